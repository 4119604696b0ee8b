"""What the device has to do for the policy's decisions to come true, in order.

Data effects carry physical ids, fixed when they are emitted. Table changes are remembered as dirty entries only:
their final values are uploaded once, after all data effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Operation: TypeAlias = Literal["move", "copy", "zero", "poison", "swap_out", "swap_in"]
Int64Array: TypeAlias = NDArray[np.int64]

_NONE: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Launch:
    """One kernel launch over units of one pool; no byte that it writes for one unit is read or written for another.

    ``sources`` and ``destinations`` are physical ids, int64 ``[units]``. ``zero`` and ``poison`` have no sources.
    ``swap_out`` reads sources and writes the host buffer of the swapped sequence ``swapped`` at unit positions
    ``destinations``; ``swap_in`` reads that buffer at positions ``sources``.
    """

    operation: Operation
    pool: Literal["page", "slot"]
    sources: Int64Array
    destinations: Int64Array
    swapped: int = 0


@dataclass(frozen=True)
class TableChanges:
    """Final values of every table entry that changed: ids and values pair up, ids ascend and are unique.

    ``block_table`` entries are addressed by ``row * row_width + column``.
    """

    page_ids: Int64Array
    page_values: NDArray[np.int32]
    slot_ids: Int64Array
    slot_values: NDArray[np.int32]
    cells: Int64Array
    cell_values: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.page_ids) + len(self.slot_ids) + len(self.cells)


@dataclass
class _Open:
    """A launch that may still take more units."""

    operation: Operation
    pool: Literal["page", "slot"]
    swapped: int
    sources: list[Int64Array] = field(default_factory=list)
    destinations: list[Int64Array] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def add(self, sources: Int64Array, destinations: Int64Array, read: set[int], written: set[int]) -> None:
        self.sources.append(sources)
        self.destinations.append(destinations)
        self.read |= read
        self.written |= written

    def close(self) -> Launch:
        return Launch(
            self.operation, self.pool, np.concatenate(self.sources), np.concatenate(self.destinations), self.swapped
        )


class EffectList:
    """Data effects in program order, merged into as few launches as the hazards allow."""

    def __init__(self) -> None:
        self._launches: list[_Open] = []

    def __len__(self) -> int:
        return len(self._launches)

    def add(
        self,
        operation: Operation,
        pool: Literal["page", "slot"],
        sources: Int64Array = _NONE,
        destinations: Int64Array = _NONE,
        swapped: int = 0,
    ) -> None:
        """Appends one effect. It joins the last launch if that is of the same kind and no unit written by one of
        the two is read or written by the other. A move never joins: the pools overlap in bytes, and a moved unit
        may land where another pool's unit was just read."""
        if not len(sources) and not len(destinations):
            return
        read = set() if operation in ("zero", "poison", "swap_in") else set(sources.tolist())
        written = set() if operation == "swap_out" else set(destinations.tolist())
        last = self._launches[-1] if self._launches else None
        if (
            last is None
            or operation == "move"
            or (last.operation, last.pool, last.swapped) != (operation, pool, swapped)
            or not written.isdisjoint(last.written)
            or not written.isdisjoint(last.read)
            or not read.isdisjoint(last.written)
        ):
            last = _Open(operation, pool, swapped)
            self._launches.append(last)
        last.add(sources, destinations, read, written)

    def drain(self) -> list[Launch]:
        """All launches so far, in order; the list is empty afterwards."""
        launches, self._launches = self._launches, []
        return [launch.close() for launch in launches]
