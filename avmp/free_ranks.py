"""Which units of a pool are free, those nearest the pool's own end first.

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

_FIRST_WINDOW = 128


class FreeRanks:
    """The free ranks of one pool: a byte map, and a short reserve of the lowest of them.

    Invariants, which the verifier recomputes from the raw map: ``count == sum(map) + top``; a rank is in the map or
    in the reserve, never in both; no rank at or beyond the extent is in either; no rank below ``hint`` is set in
    the map. ``reserve[:top]`` (int64) descends, so that its end is its lowest rank. Giving a rank back is one store;
    taking one moves ``top``, and scans the map when the reserve has run dry.
    """

    __slots__ = ("_bytes", "_reserve", "count", "hint", "map", "refill", "reserve", "top")

    def __init__(self, capacity: int) -> None:
        self._bytes = bytearray(capacity)
        self.map: NDArray[np.bool_] = np.frombuffer(self._bytes, dtype=np.bool_)
        self.refill = min(max(capacity // 256, 1), RESERVE_RANKS)
        self.reserve: NDArray[np.int64] = np.zeros(self.refill, dtype=np.int64)
        self._reserve = memoryview(self.reserve)
        self.top = 0
        self.count = 0
        self.hint = 0

    def take_one(self) -> int:
        """The lowest rank of the reserve. The caller has made sure that ``count > 0``."""
        if not self.top:
            self._fill(self._collect(self.refill))
        self.count -= 1
        self.top = top = self.top - 1
        return self._reserve[top]

    def take(self, count: int) -> NDArray[np.int64]:
        """``count`` ranks, int64. The caller has made sure that ``count <= self.count``; it reads the answer before
        the next call, which may overwrite it."""
        self.count -= count
        top = self.top - count
        if top >= 0:
            self.top = top
            return self.reserve[top : top + count]
        ranks = self._collect(self.refill - top)
        first = self.reserve[: self.top].copy()
        self._fill(ranks[-top:])
        return np.concatenate((ranks[:-top][::-1], first))

    def give_one(self, rank: int) -> None:
        """Rank ``rank`` is free again."""
        self._bytes[rank] = 1
        self.count += 1
        if rank < self.hint:
            self.hint = rank

    def give(self, ranks: NDArray[np.int64]) -> None:
        """All of ``ranks`` (distinct, at least one) are free again."""
        self.map[ranks] = True
        self.count += len(ranks)
        self.hint = min(self.hint, int(ranks[ranks.argmin()]))

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

    def swap(self, taken: int, freed: int) -> None:
        """The free rank ``taken`` is no longer free, and ``freed`` is instead."""
        self.return_reserve()
        self.map[taken] = False
        self.map[freed] = True
        self.hint = min(self.hint, freed)

    def return_reserve(self) -> None:
        """Puts the reserve back into the map, so that the map alone tells what is free."""
        if self.top:
            self.map[self.reserve[: self.top]] = True
            self.hint = min(self.hint, self._reserve[self.top - 1])
            self.top = 0

    def mask(self, extent: int) -> NDArray[np.bool_]:
        """A fresh copy, bool ``[extent]``, True where a rank is free, the reserve included."""
        free = self.map[:extent].copy()
        free[self.reserve[: self.top]] = True
        return free

    def _fill(self, ranks: NDArray[np.int64]) -> None:
        """The reserve, empty so far, holds ``ranks`` (ascending, at most ``refill``)."""
        self.top = len(ranks)
        self.reserve[: self.top] = ranks[::-1]

    def _collect(self, wanted: int) -> NDArray[np.int64]:
        """Removes the ``wanted`` lowest ranks (or all, if fewer) from the map and returns them, ascending."""
        found: list[NDArray[np.int64]] = []
        window = max(_FIRST_WINDOW, 2 * wanted)
        start = self._bytes.find(1, self.hint)
        while start >= 0 and wanted > 0:
            ranks = self.map[start : start + window].nonzero()[0][:wanted] + start
            self.map[ranks] = False
            found.append(ranks)
            wanted -= len(ranks)
            self.hint = int(ranks[-1]) + 1
            start = self._bytes.find(1, self.hint) if wanted > 0 else -1
            window *= 2
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *found])
