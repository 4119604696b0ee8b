"""Traces made ready for a server: cut, scaled to a rate, and two more shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from avmp.errors import InvalidArgument
from avmp.geometry import require_count
from avmp.workloads import TABLES, Trace
from avmp.workloads.paper import paper_stream
from avmp.workloads.trace import IntArray

_LONG_PROMPT = (8.5, 1.0, 64, 65536)
"""The long half of a day: lognormal mean and sigma, least and most tokens; the AVMP paper's agentic prompts."""


LATEST_SECONDS = 2.0**30
"""No request arrives later (34 years): beside such times a double still tells a quarter of a microsecond apart."""


def require_rate(rate: float) -> float:
    """``rate`` if it is a number of requests per second."""
    if not 0 < rate < math.inf:
        raise InvalidArgument(f"rate {rate!r}: expected requests per second, above 0")
    return rate


def take(trace: Trace, which: IntArray) -> Trace:
    """The requests of these numbers, which ascend; the first of them arrives at 0."""
    if not len(which):
        raise InvalidArgument(f"trace {trace.name!r}: no request is left")
    seconds = trace.arrival_seconds[which]
    return replace(
        trace,
        arrival_seconds=seconds - seconds[0],
        prompt_tokens=trace.prompt_tokens[which],
        output_tokens=trace.output_tokens[which],
        block_hashes=trace.block_hashes and tuple(trace.block_hashes[at] for at in which.tolist()),
        lines=None if trace.lines is None else trace.lines[which],
    )


def at_rate(trace: Trace, rate: float, seed: int = 0) -> Trace:
    """The same requests at ``rate`` requests per second on average: recorded gaps are stretched, all alike; where all
    arrive at once, gaps are drawn at random (a Poisson process). Raises InvalidArgument for a rate at which the last
    would arrive after LATEST_SECONDS."""
    require_rate(rate)
    require_count("seed", seed, 0)
    if len(trace) / rate > LATEST_SECONDS:
        raise InvalidArgument(
            f"rate {rate!r}: {len(trace):,} requests would take longer than {LATEST_SECONDS:,.0f} s to arrive; "
            f"expected at least {len(trace) / LATEST_SECONDS:.2g} requests per second"
        )
    span = float(trace.arrival_seconds[-1] - trace.arrival_seconds[0])
    if span:
        offset, factor = trace.arrival_seconds - trace.arrival_seconds[0], (len(trace) - 1) / rate / span
        seconds = offset * factor if math.isfinite(factor) else offset / span * ((len(trace) - 1) / rate)
        # The product may round neighbours past each other where they are equal to the last bit.
        return replace(trace, arrival_seconds=np.maximum.accumulate(seconds))
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(trace))
    return replace(trace, arrival_seconds=np.cumsum(gaps) - gaps[0])


def at_once(trace: Trace) -> Trace:
    """The same requests, all of them there from the start."""
    return replace(trace, arrival_seconds=np.zeros(len(trace)))


def shifting_day(requests: int, seed: int = 0, rate: float = 1.0) -> Trace:
    """A day whose mix goes from short prompts to long ones and back: at the fraction x of the day a request is long
    with the chance sin(pi * x) ** 2. Short prompts are like ShareGPT's, long ones lognormal(8.5, 1) in 64 to 65,536;
    outputs lognormal(4.5, 1) in 32 to 2,048; arrivals at random, ``rate`` a second."""
    require_count("requests", requests)
    require_count("seed", seed, 0)
    require_rate(rate)
    short, long, kinds, outputs, gaps = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5))
    place = (np.arange(requests) + 0.5) / requests
    is_long = kinds.random(requests) < np.sin(np.pi * place) ** 2
    mean, sigma, least, most = _LONG_PROMPT
    long_prompts = np.clip(long.lognormal(mean, sigma, requests).astype(np.int64), least, most)
    prompts = np.where(is_long, long_prompts, TABLES["sharegpt_prompt"].sample(requests, short))
    lengths = np.clip(outputs.lognormal(4.5, 1.0, requests).astype(np.int64), 32, 2048)
    between = gaps.exponential(1 / rate, requests)
    return Trace("day", np.cumsum(between) - between[0], prompts, lengths)


def paper_arrivals(name: str, seed: int) -> Trace:
    """A stream of the published experiment, a tick being a second."""
    stream = paper_stream(name, seed)
    ticks = stream.arrival_ticks.astype(np.float64)
    return Trace(name, ticks - ticks[0], stream.prompt_tokens, stream.output_tokens)
