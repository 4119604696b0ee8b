"""The four workloads of the published AVMP experiment (arXiv 2605.22416), draw for draw.

A stream is a number of requests in ticks: a request arrives, its prompt takes one tick per token, then each tick
yields one output token, and it departs:

    departure = arrival + prompt + output
    growth at arrival + prompt + step + 1 for each step in 0..output-1 with (prompt + step) % 16 == 0

that is, whenever ``ceil(total / 16)`` rises while tokens are produced. Within a tick departures come first, then
growth, then arrivals, each in the order of request numbers; growth on the tick of the departure comes too late.

To add a workload, write a function that draws (arrivals, prompts, outputs) from a generator and name it in
``PAPER_WORKLOADS``. The order of draws decides what comes out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from avmp.errors import InvalidArgument
from avmp.workloads.percentiles import TABLES
from avmp.workloads.trace import IntArray

PAPER_PAGE_TOKENS = 16
DEPARTURE, GROWTH, ARRIVAL = range(3)
"""Kinds of events; within one tick, lower comes first."""

SHAREGPT_FILE = "sharegpt_prompt_tokens.json"
SHAREGPT_VARIABLE = "AVMP_TRACES"

Event = tuple[int, int, int]
Draws = tuple[IntArray, IntArray, IntArray]


@dataclass(frozen=True, eq=False)
class PaperStream:
    """The requests of one workload and seed, in the order of their numbers: arrival tick, prompt and output tokens.

    ``published`` tells whether these are the requests of the paper; they are not where the full list of ShareGPT
    prompts was not at hand.
    """

    name: str
    seed: int
    arrival_ticks: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    published: bool = True

    def __len__(self) -> int:
        return len(self.arrival_ticks)

    @property
    def departure_ticks(self) -> IntArray:
        """arrival + prompt + output."""
        return self.arrival_ticks + self.prompt_tokens + self.output_tokens

    def growth(self) -> tuple[IntArray, IntArray]:
        """(tick, request) of each growth, those on the tick of a departure included; by request, then by tick."""
        first_step = -self.prompt_tokens % PAPER_PAGE_TOKENS
        counts = np.maximum(-((first_step - self.output_tokens) // PAPER_PAGE_TOKENS), 0)
        requests = np.repeat(np.arange(len(self)), counts)
        nth = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = self.arrival_ticks + self.prompt_tokens + first_step + 1
        return begin[requests] + PAPER_PAGE_TOKENS * nth, requests

    def events(self) -> list[Event]:
        """(tick, kind, request) of everything that happens, in order."""
        ticks, requests = self.growth()
        everyone = np.arange(len(self))
        parts = (
            (self.departure_ticks, DEPARTURE, everyone),
            (ticks, GROWTH, requests),
            (self.arrival_ticks, ARRIVAL, everyone),
        )
        tick = np.concatenate([part[0] for part in parts])
        kind = np.concatenate([np.full(len(part[0]), part[1]) for part in parts])
        request = np.concatenate([part[2] for part in parts])
        order = np.lexsort((request, kind, tick))
        return list(zip(tick[order].tolist(), kind[order].tolist(), request[order].tolist(), strict=True))


@dataclass(frozen=True)
class PaperWorkload:
    """How many requests, the three seeds of the paper, and what to draw."""

    requests: int
    seeds: tuple[int, int, int]
    draw: Callable[[int, np.random.Generator], Draws]


def _one_per_tick(requests: int) -> IntArray:
    return np.arange(requests, dtype=np.int64)


def _lognormal(rng: np.random.Generator, mean: float, least: int, most: int, requests: int) -> IntArray:
    return np.clip(rng.lognormal(mean, 1.0, requests).astype(np.int64), least, most)


def uniform_short(requests: int, rng: np.random.Generator) -> Draws:
    """Prompts of 128 to 1,024 tokens, outputs of 64 to 256, one arrival per tick."""
    prompts = rng.integers(128, 1025, requests)
    return _one_per_tick(requests), prompts, rng.integers(64, 257, requests)


def mixed_long(requests: int, rng: np.random.Generator) -> Draws:
    """A fifth of the prompts long (16,384 to 65,536), the rest 512 to 4,096; outputs of 128 to 512; one per tick."""
    is_long = rng.random(requests) < 0.2
    short, long = rng.integers(512, 4097, requests), rng.integers(16384, 65537, requests)
    outputs = rng.integers(128, 513, requests)
    return _one_per_tick(requests), np.where(is_long, long, short), outputs


def agentic_burst(requests: int, rng: np.random.Generator) -> Draws:
    """Ten arrivals per tick on average, prompts lognormal(8.5, 1) in 64 to 65,536, outputs of 64 to 256."""
    arrivals = np.ceil(np.cumsum(rng.exponential(0.1, requests))).astype(np.int64)
    prompts = _lognormal(rng, 8.5, 64, 65536, requests)
    return arrivals, prompts, rng.integers(64, 257, requests)


def sharegpt_replay(requests: int, rng: np.random.Generator) -> Draws:
    """Prompts drawn from recorded ones, in 16 to 4,096; outputs lognormal(4.5, 1) in 32 to 2,048; one per tick."""
    prompts = np.clip(rng.choice(sharegpt_prompts(), requests, replace=True), 16, 4096)
    return _one_per_tick(requests), prompts, _lognormal(rng, 4.5, 32, 2048, requests)


PAPER_WORKLOADS: dict[str, PaperWorkload] = {
    "uniform_short": PaperWorkload(512, (1, 2, 3), uniform_short),
    "mixed_long": PaperWorkload(256, (2, 3, 4), mixed_long),
    "agentic_burst": PaperWorkload(256, (3, 4, 5), agentic_burst),
    "sharegpt_replay": PaperWorkload(512, (4, 5, 6), sharegpt_replay),
}


def sharegpt_prompts() -> IntArray:
    """The prompt lengths that ``sharegpt_replay`` draws from, in tokens.

    That is the published list, in its order, where ``AVMP_TRACES`` names the folder that holds
    ``sharegpt_prompt_tokens.json``. Without the variable it is as many values read off the percentiles of that list:
    close to it in distribution, but different requests, with which no published figure can be compared. Raises
    InvalidArgument for a folder without that file, or a file that is no list of lengths.
    """
    folder = os.environ.get(SHAREGPT_VARIABLE)
    if folder:
        return _read_prompts(Path(folder) / SHAREGPT_FILE)
    table = TABLES["sharegpt_prompt"]
    positions = (np.arange(table.requests) + 0.5) / table.requests * 100
    return np.rint(np.interp(positions, np.arange(101), table.values)).astype(np.int64)


def _read_prompts(path: Path) -> IntArray:
    try:
        lengths = np.asarray(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} (the folder is that of {SHAREGPT_VARIABLE}) cannot be read: {error}") from error
    if lengths.ndim != 1 or not len(lengths) or not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 1:
        raise InvalidArgument(f"{path}: expected a flat list of token counts of at least 1")
    return lengths.astype(np.int64)


def paper_stream(name: str, seed: int, requests: int | None = None) -> PaperStream:
    """The stream of a workload for a seed; ``requests`` defaults to the paper's number, and with another number the
    stream is not the published one. Raises InvalidArgument for an unknown name or a number that makes no sense."""
    if name not in PAPER_WORKLOADS:
        raise InvalidArgument(f"unknown workload {name!r}; known: {', '.join(PAPER_WORKLOADS)}")
    workload = PAPER_WORKLOADS[name]
    count = workload.requests if requests is None else requests
    for what, value, least in (("requests", count, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"workload {name!r}: {what}={value!r}, expected a whole number of at least {least}")
    published = count == workload.requests and seed in workload.seeds
    if name == "sharegpt_replay" and not os.environ.get(SHAREGPT_VARIABLE):
        published = False
    return PaperStream(name, seed, *workload.draw(count, np.random.default_rng(seed)), published)
