"""Which token comes next: at random, but always the same for the same request, sample and position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def noise(seed: int, request: int, sample: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Gumbel noise, ``[vocabulary]``: the largest of logits plus noise is a draw from their softmax
    (https://arxiv.org/abs/1411.0030)."""
    return np.random.default_rng((seed, request, sample, position)).gumbel(size=vocabulary)


def draw(logits: NDArray[np.float32], seed: int, request: int, sample: int, position: int) -> int:
    """The token at ``position`` of one answer, given the logits ``[vocabulary]`` after the token before it."""
    return int(np.argmax(logits + noise(seed, request, sample, position, len(logits))))
