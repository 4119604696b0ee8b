"""Allocators that are not in the paper, and show what its figures rest on."""

from __future__ import annotations

from avmp.paper.allocators import IdPool, SplitPools


class ScannedIdPool(IdPool):
    """The same order of victims, found as the prototype's baselines find it: by looking at every live id."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clock = 0
        self.last_use: dict[int, int] = {}

    def take(self, request: int, count: int) -> bool:
        """As above."""
        got = super().take(request, count)
        if got:
            self.clock += 1
            self.last_use[request] = self.clock
        return got

    def victim(self) -> int | None:
        """As above."""
        oldest, found = self.clock + 1, None
        for request, ids in self.entries.items():
            use = self.last_use[request]
            for _ in ids:
                if use < oldest:
                    oldest, found = use, request
        return found


class ScannedSplitPools(SplitPools):
    """fixed_dual with the prototype's search for victims: equal decisions, another running time."""

    make_pool = ScannedIdPool


class WholeRequestPools(SplitPools):
    """Not in the paper: strips whole requests, of both kinds, until the new units fit."""

    def relieve(self, request: int, kind: int, count: int) -> bool:
        """As many victims as it takes."""
        pool = self.pools[kind]
        while count > len(pool.free) and (victim := pool.victim()) is not None:
            self._strip(victim, *self.pools)
        got = pool.take(request, count)
        self.counters.served_by_eviction += got
        return got
