"""Which units move when a pool gives way. Pure functions: nothing here changes a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from avmp.handles import Int64Array


@dataclass(frozen=True)
class Relocation:
    """How a donor retracts to ``extent`` units: live units of rank ``sources`` go to the free ranks ``destinations``.

    Both are int64 and of one length; sources are at or beyond ``extent``, destinations below it, so that no unit is
    read after another was written to its place.
    """

    extent: int
    sources: Int64Array
    destinations: Int64Array


def plan_relocation(free: NDArray[np.bool_], extent: int, least: int | None = None, spare_units: int = 0) -> Relocation:
    """Retracts a pool whose free ranks are True in ``free`` (bool ``[current extent]``) to ``extent`` ranks.

    The live units in the band given up go to the lowest free ranks, in order: that is the least number of moves, and
    it leaves the far side of what remains as empty as it can be. Up to ``spare_units`` further ranks right below the
    band are given up as well where they are free (a shortage seldom comes alone, and they cost nothing), but never
    so that fewer than ``least`` remain. The caller has made sure that ``extent`` holds all live units.
    """
    sources = (~free[extent:]).nonzero()[0] + extent
    destinations = _lowest(free[:extent], len(sources))
    begin = max(extent - spare_units, extent if least is None else least, 0)
    window = free[begin:extent].copy()
    window[destinations[destinations >= begin] - begin] = False
    window = window[::-1]
    spare = len(window) if window.all() else int(window.argmin())
    return Relocation(extent - spare, sources, destinations)


def _lowest(free: NDArray[np.bool_], count: int) -> Int64Array:
    """The ``count`` lowest free ranks, which exist. Looks no further than it has to."""
    found, window = [np.empty(0, dtype=np.int64)], max(4096, 2 * count)
    start = 0
    while count > 0:
        ranks = free[start : start + window].nonzero()[0][:count] + start
        found.append(ranks)
        count -= len(ranks)
        start += window
    return np.concatenate(found)
