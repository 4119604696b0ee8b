"""Which ranks of a pool are free, lowest first.

A **rank** is the distance of a unit from its pool's own end of the lane: slots count up from the low end, pages
down from the high end, and both pools hand out low ranks first. That keeps the far side of an extent empty, which
is what a retraction gives up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESERVE_RANKS = 64
"""Ranks pulled from the map at a time in a large pool. A larger reserve makes a take cheaper and the order less
exact: more live units then stand in the way of a retraction."""

_FIRST_WINDOW = 512


class FreeRanks:
    """The free ranks of one pool: a byte map, and a short reserve of the lowest of them.

    Invariants, which ``check`` of the allocator recomputes from the raw map:
    ``count == sum(map) + len(reserve)``; a rank is in the map or in the reserve, never in both; no rank at or beyond
    the extent is in either; no rank below ``hint`` is set in the map. ``reserve`` is descending, so that ``pop``
    yields its lowest rank. Giving a rank back is one store; taking one is a pop, and a scan of the map for each
    refill of the reserve.
    """

    __slots__ = ("_bytes", "count", "hint", "map", "refill", "reserve")

    def __init__(self, capacity: int) -> None:
        self._bytes = bytearray(capacity)
        self.map: NDArray[np.bool_] = np.frombuffer(self._bytes, dtype=np.bool_)
        self.reserve: list[int] = []
        self.refill = min(max(capacity // 256, 1), RESERVE_RANKS)
        self.count = 0
        self.hint = 0

    def take_one(self) -> int:
        """The lowest rank of the reserve. The caller has made sure that ``count > 0``."""
        if not self.reserve:
            self.reserve = self._collect(self.refill)[::-1].tolist()
        self.count -= 1
        return self.reserve.pop()

    def take(self, count: int) -> NDArray[np.int64]:
        """``count`` ranks, int64, lowest first. The caller has made sure that ``count <= self.count``."""
        missing = count - len(self.reserve)
        if missing > 0:
            ranks = self._collect(missing + self.refill)
            taken = np.concatenate((np.array(self.reserve[::-1], dtype=np.int64), ranks[:missing]))
            self.reserve = ranks[missing:][::-1].tolist()
        else:
            kept = len(self.reserve) - count
            taken = np.array(self.reserve[kept:][::-1], dtype=np.int64)
            del self.reserve[kept:]
        self.count -= count
        return taken

    def give_one(self, rank: int) -> None:
        """Rank ``rank`` is free again."""
        self._bytes[rank] = 1
        self.count += 1
        if rank < self.hint:
            self.hint = rank

    def give(self, ranks: NDArray[np.int64]) -> None:
        """All of ``ranks`` (distinct) are free again."""
        self.map[ranks] = True
        self.count += len(ranks)
        self.hint = min(self.hint, int(ranks.min(initial=self.hint)))

    def open(self, begin: int, end: int) -> None:
        """The extent grew: ranks ``begin`` to ``end - 1`` are new and free."""
        self.map[begin:end] = True
        self.count += end - begin
        self.hint = min(self.hint, begin)

    def close(self, begin: int, filled: NDArray[np.int64]) -> None:
        """The extent shrank to ``begin`` ranks, and live units of the rest went to the free ranks ``filled``."""
        self.return_reserve()
        self.map[begin:] = False
        self.map[filled] = False
        self.count = int(np.count_nonzero(self.map))

    def return_reserve(self) -> None:
        """Puts the reserve back into the map, so that the map alone tells what is free."""
        if self.reserve:
            self.map[self.reserve] = True
            self.hint = min(self.hint, self.reserve[-1])
            self.reserve = []

    def mask(self, extent: int) -> NDArray[np.bool_]:
        """A fresh copy, bool ``[extent]``, True where a rank is free, the reserve included."""
        free = self.map[:extent].copy()
        free[self.reserve] = True
        return free

    def _collect(self, wanted: int) -> NDArray[np.int64]:
        """Removes the ``wanted`` lowest ranks (or all, if fewer) from the map and returns them, ascending."""
        found: list[NDArray[np.int64]] = []
        window = max(_FIRST_WINDOW, 2 * wanted)
        start = self._bytes.find(1, self.hint)
        while start >= 0 and wanted > 0:
            ranks = np.flatnonzero(self.map[start : start + window])[:wanted] + start
            self.map[ranks] = False
            found.append(ranks)
            wanted -= len(ranks)
            self.hint = int(ranks[-1]) + 1
            start = self._bytes.find(1, self.hint)
            window *= 2
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *found])
