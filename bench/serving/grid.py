"""What is studied: every cell of the grid by name, and how one is computed.

A cell is one policy at one load on one trace for one model. Loads are multiples of the oracle's capacity for that
model and trace. ``best-static`` is the static split found by a search that simulates the whole trace for each share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from avmp.errors import InvalidArgument
from avmp.named_models import named_model
from avmp.serving.arrivals import at_rate, paper_arrivals, shifting_day, take
from avmp.serving.devices import find_device, model_costs
from avmp.serving.metrics import ServingResult, summarize
from avmp.serving.roofline import StepModel
from avmp.serving.search import MOST_RUNS, BestSplit
from avmp.serving.served import Served
from avmp.serving.server import Server
from avmp.workloads import Trace, builtin_trace, read_trace
from bench.serving.settings import search_constants, settings, trace_digest

MODELS = {
    "jamba-v0.1": "h200",
    "zamba2-2.7b": "l4",
    "nemotron-h-8b": "l4",
    "falcon-h1-1.5b": "rtx-3060-12gb",
    "qwen3-next-80b-a3b": "mi300x",
    "granite-4.0-h-small": "a100-80gb",
}
"""Each on one device that can hold it; states as an engine keeps them (``convention="vllm"``)."""

CLOSER = "granite-4.0-h-small"
"""The model that every policy is tried on, and the paper's workloads."""

TRACES = ("sharegpt", "azure", "mooncake", "day")
PAPER_TRACES = {"uniform_short": 1, "mixed_long": 2, "agentic_burst": 3}
"""The paper's workloads, by their first seed, as arrivals."""

FILES = {"azure": "azure_llm_2023_conv.csv", "mooncake": "mooncake_conversation.jsonl"}
LOADS = (0.5, 1.0, 2.0)
POLICIES = ("oracle", "avmp", "vllm", "best-static")
EAGER = {"avmp-eager": "avmp", "vllm-eager": "vllm"}
"""The same policies where the engine admits whoever fits at this moment, as vLLM does: no reserve for growth."""

OTHERS = ("vllm-align", "sglang", "sglang-cached", "sglang-unified", "padded", "paper", *EAGER)
SPLITS_TRIED = {load: MOST_RUNS if load >= 1 else 12 for load in LOADS}
"""Static splits that are tried at each load, at most: below capacity, where memory is not what runs out, fewer."""

_STATIC_PROBE = "static-0.37"
REQUESTS = 5000
"""Of each trace, at most."""


@dataclass(frozen=True)
class Cell:
    """One policy at one load."""

    model: str
    trace: str
    load: float
    policy: str
    requests: int = REQUESTS

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.model}/{self.trace}/{self.requests}/{self.load:g}/{self.policy}"


def grid(requests: int = REQUESTS) -> list[Cell]:
    """All cells, those of one model and trace together, the oracle before those that are compared with it."""
    cells = []
    for model in MODELS:
        for trace in TRACES:
            policies = POLICIES + (OTHERS if model == CLOSER else ())
            cells += [Cell(model, trace, load, policy, requests) for load in LOADS for policy in policies]
    return cells + [Cell(CLOSER, trace, 1.0, policy, requests) for trace in PAPER_TRACES for policy in POLICIES]


@lru_cache(maxsize=4)
def _recorded(name: str) -> Trace:
    folder = os.environ.get("AVMP_TRACES")
    if not folder:
        raise InvalidArgument(f"trace {name}: set AVMP_TRACES to the folder that holds {FILES[name]}")
    return read_trace(Path(folder) / FILES[name])


def _drawn(name: str, requests: int) -> Trace:
    if name in FILES:
        return _recorded(name)
    if name == "day":
        return shifting_day(requests)
    return paper_arrivals(name, PAPER_TRACES[name]) if name in PAPER_TRACES else builtin_trace(name, requests, 0)


def server_of(model: str, policy: str = "avmp") -> Server:
    """A model on its device, with the engine that the policy is tried on."""
    geometry = named_model(model, convention="vllm")
    server = Server(StepModel(geometry, model_costs(geometry), find_device(MODELS[model])))
    return replace(server, rules=replace(server.rules, reserve_tokens=0)) if policy in EAGER else server


@lru_cache(maxsize=len(MODELS) * len(POLICIES + OTHERS))
def settings_of(model: str, policy: str) -> str:
    """What the figures of this model's cells under this policy depend on, their traces aside."""
    if policy == "best-static":
        return settings(server_of(model), _STATIC_PROBE, search_constants(), list(SPLITS_TRIED.items()))
    return settings(server_of(model, policy), EAGER.get(policy, policy))


class Ground:
    """One model on its device, and one trace: what all cells of the two share."""

    def __init__(self, model: str, trace: str, requests: int) -> None:
        self.model, self.server = model, server_of(model)
        longest = self.server.model.geometry.max_position_embeddings
        self.trace, self.left_out = _suited(_drawn(trace, requests), requests, longest)
        self.trace_digest = trace_digest(self.trace)

    @cached_property
    def capacity(self) -> float:
        """Requests per second of the oracle under full load."""
        return self.server.capacity(self.trace)

    def run(self, policy: str, rate: float) -> ServingResult:
        """One policy at one rate. Slices are of the time in which requests arrive."""
        trace = at_rate(self.trace, rate)
        served = server_of(self.model, policy).serve(EAGER.get(policy, policy), trace)
        return summarize(served, horizon=float(trace.arrival_seconds[-1]))

    def best_static(self, rate: float, oracle: dict[str, Any], most_runs: int) -> BestSplit[Served]:
        """The static split that does best at one rate, given the oracle's figures."""
        trace = at_rate(self.trace, rate)
        horizon = float(trace.arrival_seconds[-1])
        return self.server.best_static(trace, oracle["used_bytes"], horizon=horizon, most_runs=most_runs)


def _suited(trace: Trace, requests: int, longest: int | None) -> tuple[Trace, int]:
    """The first requests that the model is made for, and how many before the last of them it is not."""
    total = trace.prompt_tokens + trace.output_tokens
    suited = np.flatnonzero(total <= (longest or total.max()))[:requests]
    return take(trace, suited), int(suited[-1]) + 1 - len(suited)


def compute(cells: list[Cell], found: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records of these cells, which share model and trace, one by one. ``found`` are records of earlier runs; the
    oracle's is needed by the cells that are compared with it, and computed again where it is missing. Raises
    InvalidArgument where records of the same model and trace are of other requests."""
    if not cells:
        return
    first = cells[0]
    ground = Ground(first.model, first.trace, first.requests)
    _require_same_trace(ground, first, found)
    oracles: dict[float, dict[str, Any]] = {}
    for cell in cells:
        if cell.load not in oracles:
            oracle = Cell(cell.model, cell.trace, cell.load, "oracle", cell.requests)
            oracles[cell.load] = found.get(oracle.key) or _record(oracle, ground, None)
        record = oracles[cell.load] if cell.policy == "oracle" else _record(cell, ground, oracles[cell.load])
        yield record


def require_same_settings(found: Mapping[str, Mapping[str, Any]], cells: Iterable[Cell], path: Path) -> None:
    """Raises InvalidArgument where the record of one of these cells was made with other settings than the present."""
    for cell in cells:
        record = found.get(cell.key)
        if record is None:
            continue
        then, now = record.get("settings"), settings_of(cell.model, cell.policy)
        if then != now:
            raise InvalidArgument(
                f"{path}: {cell.key} has the settings {then}, the simulated server now has {now}: its constants or "
                "rules have changed since; remove the record, or go on in another file"
            )


def _require_same_trace(ground: Ground, cell: Cell, found: Mapping[str, Mapping[str, Any]]) -> None:
    begin = f"{cell.model}/{cell.trace}/{cell.requests}/"
    for key, record in found.items():
        if key.startswith(begin) and record.get("trace_digest") != ground.trace_digest:
            raise InvalidArgument(
                f"trace {cell.trace}: its requests have the digest {ground.trace_digest}, those of the record {key} "
                f"{record.get('trace_digest')}; remove the record, or bring back the trace"
            )


def _record(cell: Cell, ground: Ground, oracle: dict[str, Any] | None) -> dict[str, Any]:
    rate = oracle["rate"] if oracle else ground.capacity * cell.load
    extra: dict[str, Any] = {}
    if cell.policy == "best-static":
        assert oracle is not None
        best = ground.best_static(rate, oracle["result"], SPLITS_TRIED[cell.load])
        result, extra = best.result, {"share": float(best.share), "slots": best.slots, "tried": best.tried}
    else:
        result = ground.run(cell.policy, rate)
    figures = result.as_dict()
    del figures["refused_requests"]
    return {
        "key": cell.key,
        "model": cell.model,
        "device": MODELS[cell.model],
        "trace": cell.trace,
        "load": cell.load,
        "policy": cell.policy,
        "requests": len(ground.trace),
        "rate": rate,
        "left_out": ground.left_out,
        "trace_digest": ground.trace_digest,
        "settings": settings_of(cell.model, cell.policy),
        "arena_bytes": ground.server.layout.arena_bytes,
        "result": figures,
        **extra,
    }
