"""padded_unified, the one-pool allocator of the published experiment (arXiv 2605.22416), its fault included."""

from __future__ import annotations

import time

from avmp.geometry import require_count
from avmp.paper.allocators import Counters, LayerUnits


class PaddedPool:
    """padded_unified: one pool, every unit as large as the larger kind; one entry per request for both kinds.

    The published prototype frees at a departure every id that the request was **ever** given and that is not free
    now, also those that have been stripped from it and belong to others since, who lose them without notice.
    ``correct_frees`` leaves those alone.
    """

    def __init__(self, units: LayerUnits, total_bytes: int, correct_frees: bool = False) -> None:
        self.unit_bytes = max(units.page_bytes, units.state_bytes)
        self.capacity = total_bytes // self.unit_bytes
        self.correct_frees = correct_frees
        self.free = list(range(self.capacity - 1, -1, -1))
        self.entries: dict[int, dict[int, None]] = {}
        self.owners: dict[int, int] = {}
        self.given: dict[int, list[int]] = {}
        self.counters = Counters()

    def allocate(self, request: int, kind: int, count: int) -> bool:
        """See :class:`PaperAllocator`."""
        if self._take(request, count):
            self.counters.served += 1
            return True
        started = time.process_time()
        victim = next(iter(self.entries), None)
        if victim is not None:
            self.counters.evictions += 1
            self.counters.stripped.add(victim)
            self._free(list(self.entries[victim]))
        got = self._take(request, count)
        self.counters.served_by_eviction += got
        self.counters.failed += not got
        self.counters.retry_seconds += time.process_time() - started
        return got

    def release(self, request: int) -> None:
        """See :class:`PaperAllocator`."""
        given = self.given.pop(request, [])
        self._free(list(self.entries.get(request, ())) if self.correct_frees else given)

    def pool_bytes(self) -> tuple[int, int]:
        """See :class:`PaperAllocator`."""
        return self.capacity * self.unit_bytes, 0

    def _take(self, request: int, count: int) -> bool:
        require_count("count", count)
        if count > len(self.free):
            return False
        ids = self.free[: -count - 1 : -1]
        del self.free[-count:]
        entry = self.entries.pop(request, None) or {}
        entry.update(dict.fromkeys(ids))
        self.entries[request] = entry
        self.owners.update(dict.fromkeys(ids, request))
        self.given.setdefault(request, []).extend(ids)
        return True

    def _free(self, ids: list[int]) -> None:
        """Those that are live, in this order, whoever owns them; an entry that becomes empty is gone."""
        for unit in ids:
            owner = self.owners.pop(unit, None)
            if owner is not None:
                entry = self.entries[owner]
                del entry[unit]
                if not entry:
                    del self.entries[owner]
                self.free.append(unit)
