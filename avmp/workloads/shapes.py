"""Built-in workloads: request lengths sampled from a recorded or published distribution.

A new one is a function registered by name: it gets the number of requests and two independent random streams, and
returns prompt and output lengths. Its first line of documentation is what users read about it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from avmp.errors import InvalidArgument
from avmp.workloads.percentiles import TABLES
from avmp.workloads.trace import IntArray, Trace

Workload = Callable[[int, np.random.Generator, np.random.Generator], tuple[IntArray, IntArray]]

WORKLOADS: dict[str, Workload] = {}


def workload(name: str) -> Callable[[Workload], Workload]:
    """Registers a function as the built-in workload of this name."""

    def register(function: Workload) -> Workload:
        if name in WORKLOADS:
            raise InvalidArgument(f"workload {name!r} is registered already")
        WORKLOADS[name] = function
        return function

    return register


@workload("sharegpt")
def sharegpt(requests: int, prompts: np.random.Generator, outputs: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Prompts like ShareGPT's first turns; outputs lognormal(4.5, 1.0), clipped to 32..2048.

    The rule for outputs is the one published with the AVMP paper's replay (arXiv 2605.22416).
    """
    lengths = np.clip(outputs.lognormal(4.5, 1.0, requests).astype(np.int64), 32, 2048)
    return TABLES["sharegpt_prompt"].sample(requests, prompts), lengths


@workload("azure_conv")
def azure_conv(requests: int, prompts: np.random.Generator, outputs: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Prompts and outputs like those of Azure's conversation service in 2023, sampled independently.

    Taken apart, both lengths follow the trace; its weak correlation between the two (-0.11) is lost.
    """
    return TABLES["azure_conv_prompt"].sample(requests, prompts), TABLES["azure_conv_output"].sample(requests, outputs)


def builtin_trace(name: str, requests: int, seed: int, rate: float | None = None) -> Trace:
    """``requests`` requests of a built-in workload; the same arguments give the same trace.

    Without a rate, all arrive at 0. With one, they arrive at random (a Poisson process) at ``rate`` requests per
    second on average. Neither the rate nor the number of requests changes what is drawn: a shorter trace is the
    beginning of a longer one.
    """
    if name not in WORKLOADS:
        raise InvalidArgument(f"unknown workload {name!r}; known: {', '.join(sorted(WORKLOADS))}")
    for what, value, least in (("requests", requests, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"workload {name!r}: {what}={value!r}, expected a whole number of at least {least}")
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidArgument(f"workload {name!r}: rate is {rate!r}, expected requests per second above 0")
    prompts, outputs, gaps = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    prompt_tokens, output_tokens = WORKLOADS[name](requests, prompts, outputs)
    arrivals = np.zeros(requests) if rate is None else np.cumsum(gaps.exponential(1 / rate, requests))
    return Trace(name, arrivals, prompt_tokens, output_tokens)
