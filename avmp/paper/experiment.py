"""The published experiment: one stream of requests against one allocator, and what is counted.

An arrival makes one call per attention layer for ``max(1, ceil(prompt / 16))`` pages and one per state layer for one
state; growth one call per attention layer for a page; a departure frees everything. A call that fails counts one
out-of-memory and flags its request, which carries on without; nothing is retried or queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from avmp.errors import InvalidArgument
from avmp.paper.allocators import KV, STATE, LayerUnits, MigratingPools, PaperAllocator, SplitPools
from avmp.paper.alternatives import ScannedSplitPools, WholeRequestPools
from avmp.paper.padded_pool import PaddedPool
from avmp.units import ceil_div
from avmp.workloads.paper import ARRIVAL, GROWTH, PAPER_PAGE_TOKENS, PaperStream

Builder = Callable[[LayerUnits, int], PaperAllocator]
"""From units and the bytes of the memory to an empty allocator."""

VARIANTS: dict[str, Builder] = {
    "padded_unified": PaddedPool,
    "fixed_dual_mr05": lambda units, total_bytes: SplitPools(units, total_bytes, 0.5),
    "fixed_dual_mr09": lambda units, total_bytes: SplitPools(units, total_bytes, 0.9),
    "avmp_static_mr05": lambda units, total_bytes: SplitPools(units, total_bytes, 0.5),
    "avmp_dynamic_b128": lambda units, total_bytes: MigratingPools(units, total_bytes, 0.5, 128),
}
"""The five variants of the paper."""

OTHER_VARIANTS: dict[str, Builder] = {
    "padded_correct_frees": lambda units, total_bytes: PaddedPool(units, total_bytes, correct_frees=True),
    "fixed_dual_scanned": lambda units, total_bytes: ScannedSplitPools(units, total_bytes, 0.5),
    "whole_requests": lambda units, total_bytes: WholeRequestPools(units, total_bytes, 0.5),
}
"""What they are held against: see the classes. The shares of states are 0.5."""


@dataclass(frozen=True)
class Outcome:
    """What one allocator made of one stream.

    ``completed`` departed without a failing call, ``served_intact`` moreover never lost a unit to an eviction.
    ``evictions`` counts victims, ``shrink_attempts`` also those refused; bytes are capacities at the end and sums over
    shrinks. ``cpu_seconds`` is the whole run; the phases' seconds and counts are those of ``Counters``.
    """

    requests: int
    oom: int
    completed: int
    served_intact: int
    evictions: int
    evictions_beside_room: int
    evictions_beside_empty: int
    shrink_attempts: int
    shrinks: int
    bytes_migrated: int
    kv_pool_bytes: int
    state_pool_bytes: int
    served: int
    served_by_eviction: int
    served_by_shrink: int
    cpu_seconds: float
    retry_seconds: float
    shrink_seconds: float

    @property
    def completion(self) -> float:
        """completed / requests."""
        return self.completed / self.requests

    @property
    def calls(self) -> int:
        """All allocate calls."""
        return self.served + self.served_by_eviction + self.served_by_shrink + self.oom

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def variant(name: str) -> Builder:
    """The builder of that name: of ``VARIANTS``, of ``OTHER_VARIANTS``, ``fixed_dual:SHARE`` with the share of states
    ("0.1" or "9/19"), ``avmp_dynamic:BATCH``, or ``avmp_dynamic:BATCH:SHARE`` to start from another share than 0.5.
    Raises InvalidArgument for any other name."""
    if name in VARIANTS or name in OTHER_VARIANTS:
        return VARIANTS.get(name) or OTHER_VARIANTS[name]
    kind, _, text = name.partition(":")
    try:
        if kind == "fixed_dual":
            share = Fraction(text)
            return lambda units, total_bytes: SplitPools(units, total_bytes, share)
        if kind == "avmp_dynamic":
            number, _, start = text.partition(":")
            batch, share = int(number), Fraction(start or "1/2")
            return lambda units, total_bytes: MigratingPools(units, total_bytes, share, batch)
    except (ValueError, ZeroDivisionError):
        pass
    known = ", ".join((*VARIANTS, *OTHER_VARIANTS, "fixed_dual:SHARE", "avmp_dynamic:BATCH[:SHARE]"))
    raise InvalidArgument(f"unknown variant {name!r}; known: {known}")


def run_experiment(stream: PaperStream, allocator: PaperAllocator, units: LayerUnits) -> Outcome:
    """Drives an empty allocator through the whole stream."""
    started = time.process_time()
    flagged: set[int] = set()
    departed: set[int] = set()
    for _, kind, request in stream.events():
        if kind == ARRIVAL:
            pages = max(1, ceil_div(int(stream.prompt_tokens[request]), PAPER_PAGE_TOKENS))
            calls = [(KV, pages)] * units.attention_layers + [(STATE, 1)] * units.state_layers
        elif kind == GROWTH:
            calls = [] if request in departed else [(KV, 1)] * units.attention_layers
        else:
            calls = []
            departed.add(request)
            allocator.release(request)
        for pool, count in calls:
            if not allocator.allocate(request, pool, count):
                flagged.add(request)
    return _outcome(stream, allocator, flagged, time.process_time() - started)


def _outcome(stream: PaperStream, allocator: PaperAllocator, flagged: set[int], cpu_seconds: float) -> Outcome:
    counters = allocator.counters
    kv_pool_bytes, state_pool_bytes = allocator.pool_bytes()
    return Outcome(
        requests=len(stream),
        oom=counters.failed,
        completed=len(stream) - len(flagged),
        served_intact=len(stream) - len(flagged | counters.stripped),
        evictions=counters.evictions,
        evictions_beside_room=counters.evictions_beside_room,
        evictions_beside_empty=counters.evictions_beside_empty,
        shrink_attempts=counters.shrink_attempts,
        shrinks=counters.shrinks,
        bytes_migrated=counters.bytes_migrated,
        kv_pool_bytes=kv_pool_bytes,
        state_pool_bytes=state_pool_bytes,
        served=counters.served,
        served_by_eviction=counters.served_by_eviction,
        served_by_shrink=counters.served_by_shrink,
        cpu_seconds=cpu_seconds,
        retry_seconds=counters.retry_seconds,
        shrink_seconds=counters.shrink_seconds,
    )
