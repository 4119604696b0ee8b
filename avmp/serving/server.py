"""One server: a model on devices, an engine with its rules, and the arena that is left; any policy can run on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from avmp.baselines import Counts, IntArray, MemoryPolicy, PolicySetup, StaticSplit, make_policy
from avmp.layout import Layout
from avmp.options import Options
from avmp.serving.arrivals import at_once
from avmp.serving.engine_rules import EngineRules
from avmp.serving.metrics import Latency, summarize
from avmp.serving.roofline import StepModel
from avmp.serving.search import MOST_RUNS, BestSplit, best_split
from avmp.serving.served import Served
from avmp.serving.simulator import simulate
from avmp.workloads import Trace

Result = TypeVar("Result")


@dataclass(frozen=True)
class Server:
    """``cache_bytes`` on each device is for caches; by default what the step model leaves. ``layout`` raises
    ArenaTooSmall, and InvalidArgument where a device does not hold its share of the weights beside the caches."""

    model: StepModel
    rules: EngineRules = field(default_factory=EngineRules)
    options: Options = field(default_factory=Options)
    cache_bytes: int | None = None

    @cached_property
    def layout(self) -> Layout:
        """The arena of one device."""
        if self.cache_bytes is None:
            return Layout.plan(self.model.rank_geometry, self.model.arena_bytes())
        self.model.require_room(self.cache_bytes)
        return Layout.plan(self.model.rank_geometry, self.cache_bytes)

    def setup(self, trace: Trace) -> PolicySetup:
        """What policies are built from: tables for the longest request that the model is made for."""
        total = trace.prompt_tokens + trace.output_tokens
        longest = self.model.geometry.max_position_embeddings or int(total.max())
        suited = total[total <= longest]
        most = min(self.rules.max_batch, len(trace))  # rows cost time and memory here, however many a server may have
        return PolicySetup(self.layout, int(suited.max()) if len(suited) else 1, most, self.options)

    def policy(self, name: str | Fraction, trace: Trace) -> MemoryPolicy:
        """The policy of that name, or the static split of that share, empty."""
        setup = self.setup(trace)
        return StaticSplit(setup, name) if isinstance(name, Fraction) else make_policy(name, setup)

    def serve(
        self, policy: str | Fraction | MemoryPolicy, trace: Trace, on_progress: Callable[[int], None] | None = None
    ) -> Served:
        """The whole trace under a policy."""
        made = self.policy(policy, trace) if isinstance(policy, str | Fraction) else policy
        return simulate(trace, made, self.model, self.rules, on_progress)

    def capacity(self, trace: Trace, policy: str = "oracle") -> float:
        """Requests per second that are completed while all of them wait."""
        return sustained_rate(self.serve(policy, at_once(trace)))

    def splits(self, trace: Trace) -> list[Fraction]:
        """The states' share of every static split that can matter, ascending: 1 slot, 2, and so on, as many as leave a
        page and can be in use at once, and all else for KV. Where the model has only one kind of cache, any share."""
        layout = self.layout
        if not (layout.has_pages and layout.has_slots):
            return [Fraction(1, 2)]
        room = (layout.arena_bytes - layout.page_total_bytes) // layout.slot_total_bytes
        most = min(room, self.rules.max_batch, len(trace))  # at least 1: a layout holds a slot and a page
        return [Fraction(slots * layout.slot_total_bytes, layout.arena_bytes) for slots in range(1, most + 1)]

    def best_static(
        self,
        trace: Trace,
        used_bytes: Mapping[str, float],
        target: Latency | None = None,
        horizon: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        most_runs: int = MOST_RUNS,
    ) -> BestSplit[Served]:
        """The static split that serves this trace best: a search that begins at the mean use of another run, such as
        the oracle's (``ServingResult.used_bytes``). ``on_progress`` is told how many requests all runs dealt with."""
        before = 0

        def run(share: Fraction) -> Served:
            nonlocal before
            done, before = before, before + len(trace)
            return self.serve(share, trace, None if on_progress is None else lambda count: on_progress(done + count))

        return best_split(
            self.splits(trace),
            run,
            lambda served: summarize(served, target, horizon),
            used_bytes["state"] / ((used_bytes["kv"] + used_bytes["state"]) or 1),
            most_runs,
        )

    def best_static_of(
        self, trace: Trace, target: Latency | None = None, on_progress: Callable[[int], None] | None = None
    ) -> BestSplit[Served]:
        """The same, from a run of the oracle of its own, which progress does not count."""
        oracle = summarize(self.serve("oracle", trace), target)
        return self.best_static(trace, oracle.used_bytes, target, on_progress=on_progress)


def sustained_rate(served: Served) -> float:
    """Requests completed per second between the first and the last tenth of the completions; over the whole run where
    these are at the same time, as with a single request; 0 where nothing was completed."""
    times = np.sort(served.finished[~np.isnan(served.finished)])
    if not len(times):
        return 0.0
    low, high = len(times) // 10, len(times) - 1 - len(times) // 10
    if times[high] > times[low]:
        return float((high - low) / (times[high] - times[low]))
    return float(len(times) / (served.step_end[-1] - served.trace.arrival_seconds[0]))


class TimedPolicy:
    """A policy, and the processor time of this machine that is spent in it: not deterministic."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.name, self.arena_bytes = policy.name, policy.arena_bytes
        self.nanoseconds = 0

    def _timed(self, call: Callable[..., Result], *arguments: Any) -> Result:
        started = time.process_time_ns()
        try:
            return call(*arguments)
        finally:
            self.nanoseconds += time.process_time_ns() - started

    @property
    def moved_bytes(self) -> int:
        """As the policy's."""
        return self.policy.moved_bytes

    def fits(self, token_counts: IntArray, spare_tokens: int = 0) -> bool:
        """As the policy's."""
        return self._timed(self.policy.fits, token_counts, spare_tokens)

    def admit(self, token_counts: IntArray) -> IntArray:
        """As the policy's."""
        return self._timed(self.policy.admit, token_counts)

    def extend(self, handles: IntArray, counts: Counts = 1) -> None:
        """As the policy's."""
        self._timed(self.policy.extend, handles, counts)

    def release(self, handles: IntArray) -> None:
        """As the policy's."""
        self._timed(self.policy.release, handles)

    def swap_out(self, handles: IntArray) -> IntArray:
        """As the policy's."""
        return self._timed(self.policy.swap_out, handles)

    def swap_in(self, swapped: IntArray) -> IntArray:
        """As the policy's."""
        return self._timed(self.policy.swap_in, swapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)
