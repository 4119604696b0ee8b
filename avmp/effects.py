"""What the device has to do for the policy's decisions to come true, in order.

Data effects carry physical ids, fixed when they are emitted. Table changes are remembered as dirty entries only:
their final values are uploaded once, after all data effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.handles import NOTHING, Int64Array, Kind

Operation: TypeAlias = Literal["move", "copy", "zero", "poison", "swap_out", "swap_in"]


class Launch(NamedTuple):
    """One kernel launch over units of one pool; no byte that it writes for one unit is read or written for another.

    ``sources`` and ``destinations`` are physical ids, int64 ``[units]``. ``zero`` and ``poison`` have no sources.
    ``swap_out`` reads sources and writes the host buffer of the swapped sequence ``swapped`` at unit positions
    ``destinations``; ``swap_in`` reads that buffer at positions ``sources``.
    """

    operation: Operation
    pool: Kind
    sources: Int64Array
    destinations: Int64Array
    swapped: int = 0


@dataclass(frozen=True)
class TableChanges:
    """Final values of every table entry that changed: ids and values pair up, ids ascend and are unique.

    ``cells`` are entries of the block table, ``row * row_width + column``.
    """

    page_ids: Int64Array
    page_values: NDArray[np.int32]
    slot_ids: Int64Array
    slot_values: NDArray[np.int32]
    cells: Int64Array
    cell_values: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.page_ids) + len(self.slot_ids) + len(self.cells)


class EffectList:
    """Data effects in program order. Merging them into few launches is left to ``drain``."""

    def __init__(self) -> None:
        self._effects: list[Launch] = []

    def __len__(self) -> int:
        return len(self._effects)

    def add(
        self,
        operation: Operation,
        pool: Kind,
        sources: Int64Array = NOTHING,
        destinations: Int64Array = NOTHING,
        swapped: int = 0,
    ) -> None:
        """Appends one effect; one without units is left out."""
        if len(destinations):
            self._effects.append(Launch(operation, pool, sources, destinations, swapped))

    def drain(self) -> list[Launch]:
        """All effects so far as launches, in order; the list is empty afterwards."""
        effects, self._effects = self._effects, []
        return merge(effects)


def merge(effects: list[Launch]) -> list[Launch]:
    """Effects as launches. One joins the launch before it if both are of one kind and no unit written by one of the
    two is read or written by the other. A move never joins and is never joined: the pools overlap in bytes, and a
    moved unit may land where another pool's unit was just read."""
    launches: list[list[Launch]] = []
    read: set[int] = set()
    written: set[int] = set()
    for effect in effects:
        reads = set() if effect.operation == "swap_in" else set(effect.sources.tolist())
        writes = set() if effect.operation == "swap_out" else set(effect.destinations.tolist())
        last = launches[-1][0] if launches else None
        if (
            last is None
            or effect.operation == "move"
            or (last.operation, last.pool, last.swapped) != (effect.operation, effect.pool, effect.swapped)
            or not writes.isdisjoint(written)
            or not writes.isdisjoint(read)
            or not reads.isdisjoint(written)
        ):
            launches.append([])
            read, written = set(), set()
        launches[-1].append(effect)
        read |= reads
        written |= writes
    return [_joined(launch) for launch in launches]


def _joined(launch: list[Launch]) -> Launch:
    if len(launch) == 1:
        return launch[0]
    sources = np.concatenate([effect.sources for effect in launch])
    destinations = np.concatenate([effect.destinations for effect in launch])
    return launch[0]._replace(sources=sources, destinations=destinations)
