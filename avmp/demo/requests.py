"""What is asked of the demo's engine: prompts drawn at random, with the lengths and the rhythm of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.workloads import Trace

MOST_STEPS = 10**9
"""Until the last request arrives; idle steps cost nothing."""


@dataclass(frozen=True, eq=False)
class Request:
    """``samples`` answers of ``output_tokens`` tokens each to one prompt, asked for in step ``arrival``."""

    number: int
    arrival: int
    prompt: NDArray[np.int64]
    output_tokens: int
    samples: int

    @property
    def tokens(self) -> int:
        """What one answer keeps in the end: the prompt, and every token that was fed back (the last is not)."""
        return len(self.prompt) + self.output_tokens - 1


def requests_like(
    trace: Trace, vocabulary: int, shrink: int, requests_per_step: float, samples: int, seed: int
) -> list[Request]:
    """The trace's requests, with lengths divided by ``shrink`` (at least one token each) and its arrivals compressed or
    stretched to ``requests_per_step`` on average; every fourth request asks for ``samples`` answers, the others for
    one. Raises InvalidArgument for numbers that make no sense."""
    for name, value in (("shrink", shrink), ("samples", samples)):
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: expected at least 1")
    if not len(trace) / MOST_STEPS <= requests_per_step < float("inf"):
        raise InvalidArgument(
            f"{requests_per_step} requests per step: expected more, for an end within {MOST_STEPS} steps"
        )
    times = trace.arrival_seconds - trace.arrival_seconds[0]
    span = times[-1] or 1.0
    arrivals = (times / span * (len(trace) / requests_per_step)).astype(np.int64)
    random = np.random.default_rng(seed)
    prompts = np.maximum(trace.prompt_tokens // shrink, 1).tolist()
    outputs = np.maximum(trace.output_tokens // shrink, 1).tolist()
    return [
        Request(
            number=number,
            arrival=int(arrivals[number]),
            prompt=random.integers(vocabulary, size=prompts[number]),
            output_tokens=outputs[number],
            samples=samples if number % 4 == 3 else 1,
        )
        for number in range(len(trace))
    ]
