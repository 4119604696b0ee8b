"""The same answers without an arena: what the engine is checked against."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from avmp.demo.engine import Answer
from avmp.demo.memories import PlainMemory
from avmp.demo.model import HybridModel
from avmp.demo.sampling import noise

ROUNDING = 1e-4
"""Scores closer than this are a draw: logits of size 1 differ by some 1e-6 from one order of summation to another."""


class Comparison(NamedTuple):
    """Tokens compared, those that an unpaged run would not have chosen, and those that it would not have chosen by less
    than ROUNDING (not counted as different)."""

    tokens: int
    different: int
    ties: int


def compare(model: HybridModel, answer: Answer, seed: int) -> Comparison:
    """Compares every token of an answer with what an unpaged run of the model chooses.

    The run is given the tokens that were served, all at once, and asked at each position what it chooses: as long as it
    agrees, that is what it would have produced token by token.
    """
    prompt = answer.request.prompt.tolist()
    tokens = torch.tensor(prompt + answer.tokens[:-1])
    logits = model.forward(tokens, PlainMemory(len(tokens)), every_token=True)[len(prompt) - 1 :].numpy()
    number, sample, vocabulary = answer.request.number, answer.sample, model.shape.vocabulary
    scores = logits + np.stack([noise(seed, number, sample, at, vocabulary) for at in range(len(answer.tokens))])
    behind = scores.max(1) - scores[np.arange(len(scores)), answer.tokens]
    different = int((~(behind <= ROUNDING)).sum())  # so that a NaN is different
    return Comparison(len(scores), different, int((~(behind <= 0)).sum()) - different)


def compare_all(model: HybridModel, answers: list[Answer], seed: int) -> Comparison:
    """All answers together."""
    total = Comparison(0, 0, 0)
    for answer in answers:
        total = Comparison(*map(sum, zip(total, compare(model, answer, seed), strict=True)))
    return total
