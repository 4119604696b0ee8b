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


def plan_relocation(
    free: NDArray[np.bool_], extent: int, least: int | None = None, spare_units: int = 0
) -> Relocation:
    """Retracts a pool whose free ranks are True in ``free`` (bool ``[current extent]``) to ``extent`` ranks.

    The live units in the band given up go to the lowest free ranks, in order: that is the least number of moves, and
    it leaves the far side of what remains as empty as it can be. Up to ``spare_units`` further ranks right below the
    band are given up as well where they are free (a shortage seldom comes alone, and they cost nothing), but never
    so that fewer than ``least`` remain. The caller has made sure that ``extent`` holds all live units.
    """
    sources = np.flatnonzero(~free[extent:]) + extent
    destinations = np.flatnonzero(free[:extent])[: len(sources)]
    floor = extent if least is None else least
    window = free[max(extent - spare_units, floor, 0) : extent].copy()
    inside = destinations[destinations >= extent - len(window)] - (extent - len(window))
    window[inside] = False
    taken = window[::-1]
    spare = len(taken) if taken.all() else int(taken.argmin())
    return Relocation(extent - spare, sources, destinations)
