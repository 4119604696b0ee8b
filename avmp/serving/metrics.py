"""The figures of a simulated run: what a user of the server would see, and what it took."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avmp.baselines import IntArray
from avmp.errors import InvalidArgument
from avmp.serving.roofline import StepModel
from avmp.serving.served import FloatArray, Served

QUANTILES = (50, 90, 99)
SLICES = 10
"""Equal parts of a run's time, by which runs are compared in pairs."""


@dataclass(frozen=True)
class Latency:
    """A good request: its first token after at most ``first_token_seconds``, and from then on at most
    ``per_token_seconds`` a token on average."""

    first_token_seconds: float = 2.0
    per_token_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name in ("first_token_seconds", "per_token_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"latency target: {name}={getattr(self, name)!r}, expected more than 0")


@dataclass(frozen=True)
class ServingResult:
    """One run, for JSON and tables. Rates are over the time from the first arrival to the end of the last step;
    latencies map ``"p50"`` and so on to seconds. ``output_tokens`` counts each token that a user got once.

    Shares of time are of the time that steps took. ``used_share`` and ``used_bytes`` are over the samples of memory,
    which are evenly spaced by steps. ``slices`` are the output tokens in each of SLICES equal parts of the time, or of
    the horizon that was asked for; what came later is in none.
    """

    policy: str
    requests: int
    completed: int
    refused: int
    refused_requests: tuple[int, ...]
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    good_requests_per_second: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    queueing: dict[str, float]
    output_tokens: int
    prompt_tokens_read: int
    recomputed_tokens: int
    preemptions: int
    steps: int
    mean_batch: float
    most_batch: int
    used_share: dict[str, float]
    used_bytes: dict[str, float]
    retractions: int
    migrations: int
    bytes_moved: int
    bytes_swapped: int
    move_share: float
    swap_share: float
    slices: tuple[int, ...]
    digest: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarize(served: Served, target: Latency | None = None, horizon: float | None = None) -> ServingResult:
    """The figures of a run. Deterministic: equal runs give equal digests. Runs that are compared slice by slice need
    the same ``horizon``, in seconds from the first arrival."""
    trace = served.trace
    begin = float(trace.arrival_seconds[0])
    seconds = float(served.step_end[-1]) - begin if len(served.step_end) else 0.0
    rate = 1 / seconds if seconds else 0.0
    busy = served.busy_seconds or 1.0
    tokens = int(served.step_tokens.sum())
    done = ~np.isnan(served.finished)
    queueing = served.admitted - trace.arrival_seconds
    return ServingResult(
        policy=served.policy,
        requests=len(trace),
        completed=int(done.sum()),
        refused=len(served.refused),
        refused_requests=tuple(served.refused.tolist()),
        seconds=seconds,
        requests_per_second=float(done.sum() * rate),
        tokens_per_second=tokens * rate,
        good_requests_per_second=float(_good(served, target or Latency()).sum() * rate),
        first_token=_quantiles(first_token_seconds(served)),
        between_tokens=_quantiles(*between_tokens(served)),
        queueing=_quantiles(queueing[~np.isnan(queueing)]),
        output_tokens=tokens,
        prompt_tokens_read=served.prefill_tokens,
        recomputed_tokens=served.recomputed_tokens,
        preemptions=served.preemptions,
        steps=len(served.step_end),
        mean_batch=float(served.step_batch.mean()) if len(served.step_batch) else 0.0,
        most_batch=int(served.step_batch.max(initial=0)),
        used_share=_used_share(served),
        used_bytes={kind: _mean([getattr(s, f"{kind}_used") for s in served.samples]) for kind in ("kv", "state")},
        retractions=served.counters["retractions"],
        migrations=served.counters["migrations"],
        bytes_moved=served.counters["bytes_moved"],
        bytes_swapped=served.swapped_bytes,
        move_share=served.move_seconds / busy,
        swap_share=served.swap_seconds / busy,
        slices=_slices(served, begin, seconds if horizon is None else horizon),
        digest=digest(served),
    )


def first_token_seconds(served: Served) -> FloatArray:
    """From arrival to first token, of every request that got one."""
    waits = served.first_token - served.trace.arrival_seconds
    found: FloatArray = waits[~np.isnan(waits)]
    return found


def between_tokens(served: Served) -> tuple[FloatArray, IntArray]:
    """Times between one output token of a request and the next, ascending, and how often each was seen."""
    values = np.concatenate([served.gap_seconds, served.late_gaps])
    counts = np.concatenate([served.gap_count, np.ones(len(served.late_gaps), dtype=np.int64)])
    order = np.argsort(values, kind="stable")
    seen = order[counts[order] > 0]
    return values[seen], counts[seen]


def time_shares(model: StepModel, served: Served) -> dict[str, float]:
    """What the time of all steps went to: reading weights, KV and states, or operations where these took longer, the
    overhead, moves and swaps. They sum to 1."""
    parts = model.split_seconds(served.step_work) | {"moves": served.move_seconds, "swaps": served.swap_seconds}
    total = math.fsum(parts.values()) or 1.0
    return {name: seconds / total for name, seconds in parts.items()}


def _good(served: Served, target: Latency) -> NDArray[np.bool_]:
    trace = served.trace
    first = served.first_token - trace.arrival_seconds
    per_token = (served.finished - served.first_token) / np.maximum(trace.output_tokens - 1, 1)
    done = ~np.isnan(served.finished)
    in_time = (first <= target.first_token_seconds) & (per_token <= target.per_token_seconds)
    good: NDArray[np.bool_] = done & (in_time | (trace.output_tokens == 0))
    return good


def _quantiles(values: FloatArray, counts: IntArray | None = None) -> dict[str, float]:
    """As numpy's percentiles, of each value as often as it counts (then they ascend); 0 of nothing."""
    if not len(values):
        return {f"p{q}": 0.0 for q in QUANTILES}
    if counts is None:
        values, counts = np.sort(values), np.ones(len(values), dtype=np.int64)
    ends = np.cumsum(counts)
    places = np.array(QUANTILES) / 100 * (int(ends[-1]) - 1)
    below = np.floor(places).astype(np.int64)
    low = values[np.searchsorted(ends, below, side="right")]
    high = values[np.searchsorted(ends, np.minimum(below + 1, ends[-1] - 1), side="right")]
    found = low + (places - below) * (high - low)
    return {f"p{q}": float(value) for q, value in zip(QUANTILES, found, strict=True)}


def _used_share(served: Served) -> dict[str, float]:
    used = [(sample.kv_used + sample.state_used) / served.arena_bytes for sample in served.samples]
    return {"mean": _mean(used), "most": max(used, default=0.0)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _slices(served: Served, begin: float, seconds: float) -> tuple[int, ...]:
    """Output tokens of the steps that ended in each of SLICES equal parts of ``seconds`` from ``begin``."""
    if not seconds:
        return (0,) * SLICES
    after = served.step_end - begin
    inside = after <= seconds
    index = np.minimum((after[inside] / seconds * SLICES).astype(np.int64), SLICES - 1)
    counts = np.zeros(SLICES, dtype=np.int64)
    np.add.at(counts, index, served.step_tokens[inside])
    return tuple(counts.tolist())


def digest(served: Served) -> str:
    """SHA-256 over what was counted and over the times of every request and step, 16 hexadecimal digits of it."""
    counted = {
        "policy": served.policy,
        "refused": served.refused.tolist(),
        "prefill_tokens": served.prefill_tokens,
        "recomputed_tokens": served.recomputed_tokens,
        "preemptions": served.preemptions,
        "swapped_bytes": served.swapped_bytes,
        "counters": served.counters,
    }
    hashed = hashlib.sha256(json.dumps(counted, sort_keys=True).encode())
    for times in (served.admitted, served.first_token, served.finished, served.step_end):
        hashed.update(np.ascontiguousarray(times, dtype="<f8").tobytes())
    for counts in (served.step_tokens, served.step_batch):
        hashed.update(np.ascontiguousarray(counts, dtype="<i8").tobytes())
    return hashed.hexdigest()[:16]
