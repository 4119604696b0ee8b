"""The split allocators of the published experiment (arXiv 2605.22416) as counts and free lists; no byte is touched.

All of them hand out ids last-freed first, a fresh pool in ascending order. What a request holds of a pool is its
entry; entries stand in the order of their last successful allocation, and the first is the next victim, which may be
the very request that asks. An eviction strips one entry and is never undone. Each class is one policy; a new one
overrides :meth:`SplitPools.relieve`. The allocator with one pool for both kinds is in ``padded_pool.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import Geometry, require_count
from avmp.units import align_up

KV, STATE = range(2)
_ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class LayerUnits:
    """What the experiment allocates: the KV page of **one** attention layer and the state of **one** state layer.

        page_bytes  = align_up(page_tokens * kv_bytes_per_token of a layer, 128)
        state_bytes = align_up(state of a layer, 128)

    A request calls once for each of its ``attention_layers`` and ``state_layers``.
    """

    page_bytes: int
    state_bytes: int
    attention_layers: int = 1
    state_layers: int = 1

    @classmethod
    def of(cls, geometry: Geometry) -> LayerUnits:
        """Raises Unsupported where layers of one kind differ in bytes, or one kind is missing."""
        kv = {layer.key_bytes_per_token + layer.value_bytes_per_token for layer in geometry.attention_layers}
        state = {layer.nbytes for layer in geometry.state_layers}
        if len(kv) != 1 or len(state) != 1:
            raise Unsupported(f"{geometry.name}: the experiment needs layers of both kinds, equal in bytes by kind")
        return cls(
            page_bytes=align_up(geometry.page_tokens * kv.pop(), _ALIGNMENT_BYTES),
            state_bytes=align_up(state.pop(), _ALIGNMENT_BYTES),
            attention_layers=len(geometry.attention_layers),
            state_layers=len(geometry.state_layers),
        )

    def bytes_of(self, kind: int) -> int:
        """Bytes of one unit of that kind."""
        return self.state_bytes if kind == STATE else self.page_bytes


@dataclass
class Counters:
    """What happened so far. A call is served at once, after an eviction, after a shrink, or it fails:
    ``calls == served + served_by_eviction + served_by_shrink + failed``.

    ``evictions`` counts victims, ``stripped`` is the set of them. ``evictions_beside_room`` counts those at whose
    moment the other pool had the missing bytes free, ``evictions_beside_empty`` those beside a pool without a single
    live unit. ``shrink_attempts`` are the shortages that reached the shrink, refused ones included. Seconds are CPU
    time; ``retry_seconds`` is evictions and what follows them, ``shrink_seconds`` the same for shrinks.
    """

    served: int = 0
    served_by_eviction: int = 0
    served_by_shrink: int = 0
    failed: int = 0
    evictions: int = 0
    evictions_beside_room: int = 0
    evictions_beside_empty: int = 0
    shrink_attempts: int = 0
    shrinks: int = 0
    bytes_migrated: int = 0
    retry_seconds: float = 0.0
    shrink_seconds: float = 0.0
    stripped: set[int] = field(default_factory=set)


class PaperAllocator(Protocol):
    """What the experiment drives."""

    counters: Counters

    def allocate(self, request: int, kind: int, count: int) -> bool:
        """``count`` units of ``kind`` (KV or STATE) for the request; whether it got them."""

    def release(self, request: int) -> None:
        """The request departs."""

    def pool_bytes(self) -> tuple[int, int]:
        """Capacities now, in bytes: KV and state; (all, 0) for one pool."""


class IdPool:
    """Free ids, the next one last, and the entries, the next victim first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        self.entries: dict[int, list[int]] = {}

    def take(self, request: int, count: int) -> bool:
        """The request gets ``count`` ids (1 or more) and moves to the end of the order; False, and nothing, without as
        many."""
        require_count("count", count)
        if count > len(self.free):
            return False
        ids = self.free[-count:]
        del self.free[-count:]
        entry = self.entries.pop(request, None) or []
        entry.extend(reversed(ids))
        self.entries[request] = entry
        return True

    def drop(self, request: int) -> None:
        """All ids of the request are free."""
        self.free.extend(self.entries.pop(request, ()))

    def victim(self) -> int | None:
        """The request whose last successful allocation is the oldest."""
        return next(iter(self.entries), None)

    def shrink(self, count: int) -> bool:
        """Gives up the ``count`` highest ids; False if one of them is live, or there are not as many."""
        end = self.capacity - count
        rest = [unit for unit in self.free if unit < end]
        if end < 0 or len(self.free) - len(rest) < count:
            return False
        self.free, self.capacity = rest, end
        return True

    def grow(self, count: int) -> None:
        """New ids above the present ones; the highest comes out first."""
        self.free.extend(range(self.capacity, self.capacity + count))
        self.capacity += count


class SplitPools:
    """fixed_dual, and avmp_static, which decides alike: ``floor(ratio * bytes)`` for states, the rest for KV, each
    in whole units. On a shortage: strip one request of that kind, try once more."""

    def __init__(self, units: LayerUnits, total_bytes: int, ratio: float | Fraction) -> None:
        if not 0 <= ratio <= 1:
            raise InvalidArgument(f"state share {ratio}: expected 0 to 1")
        state_bytes = int(total_bytes * ratio)
        self.units = units
        self.pools = (
            self.make_pool((total_bytes - state_bytes) // units.page_bytes),
            self.make_pool(state_bytes // units.state_bytes),
        )
        self.counters = Counters()

    @staticmethod
    def make_pool(capacity: int) -> IdPool:
        """What keeps the ids of one kind."""
        return IdPool(capacity)

    def allocate(self, request: int, kind: int, count: int) -> bool:
        """See :class:`PaperAllocator`."""
        if self.pools[kind].take(request, count):
            self.counters.served += 1
            return True
        got = self.relieve(request, kind, count)
        self.counters.failed += not got
        return got

    def relieve(self, request: int, kind: int, count: int) -> bool:
        """What a shortage leads to; whether the request got its units."""
        return self.evict_and_retry(request, kind, count)

    def evict_and_retry(self, request: int, kind: int, count: int) -> bool:
        """Strips one request of its units of this kind; whether that was enough."""
        started = time.process_time()
        counters, pool, other = self.counters, self.pools[kind], self.pools[1 - kind]
        victim = pool.victim()
        if victim is not None:
            missing = (count - len(pool.free)) * self.units.bytes_of(kind)
            counters.evictions_beside_room += len(other.free) * self.units.bytes_of(1 - kind) >= missing
            counters.evictions_beside_empty += not other.entries
            self._strip(victim, pool)
        got = pool.take(request, count)
        counters.served_by_eviction += got
        counters.retry_seconds += time.process_time() - started
        return got

    def _strip(self, victim: int, *pools: IdPool) -> None:
        self.counters.evictions += 1
        self.counters.stripped.add(victim)
        for pool in pools:
            pool.drop(victim)

    def release(self, request: int) -> None:
        """See :class:`PaperAllocator`."""
        for pool in self.pools:
            pool.drop(request)

    def pool_bytes(self) -> tuple[int, int]:
        """See :class:`PaperAllocator`."""
        return self.pools[KV].capacity * self.units.page_bytes, self.pools[STATE].capacity * self.units.state_bytes


class MigratingPools(SplitPools):
    """avmp_dynamic: when stripping one request was not enough, the other pool gives up its ``batch`` highest ids and
    this one gains ``floor(bytes / unit)``; then one more try. A live id among them refuses the shrink: nothing is
    relocated. Where the bytes given up are less than a unit, they are lost."""

    def __init__(self, units: LayerUnits, total_bytes: int, ratio: float | Fraction = 0.5, batch: int = 128) -> None:
        if batch < 1:
            raise InvalidArgument(f"batch={batch}: expected at least 1 unit")
        super().__init__(units, total_bytes, ratio)
        self.batch = batch

    def relieve(self, request: int, kind: int, count: int) -> bool:
        """Evict first, migrate second."""
        return self.evict_and_retry(request, kind, count) or self._shrink_and_retry(request, kind, count)

    def _shrink_and_retry(self, request: int, kind: int, count: int) -> bool:
        started = time.process_time()
        counters = self.counters
        counters.shrink_attempts += 1
        if self.pools[1 - kind].shrink(self.batch):
            given_up = self.batch * self.units.bytes_of(1 - kind)
            counters.shrinks += 1
            counters.bytes_migrated += given_up
            self.pools[kind].grow(given_up // self.units.bytes_of(kind))
            got = self.pools[kind].take(request, count)
        else:
            got = False
        counters.served_by_shrink += got
        counters.shrink_seconds += time.process_time() - started
        return got
