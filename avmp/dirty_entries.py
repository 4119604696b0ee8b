"""Which entries of a large table have to be uploaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DirtyEntries:
    """A set of table entries whose values have to be uploaded, kept as a log that is folded when it grows long.

    Between two folds it logs at most as many entries as the table has. Where there is no device, ``enabled`` is
    False and nothing is logged.
    """

    __slots__ = ("_arrays", "_logged", "_ranges", "enabled", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.enabled = True
        self._arrays: list[NDArray[np.int64]] = []
        self._ranges: list[tuple[int, int]] = []
        self._logged = 0

    def add(self, entries: NDArray[np.int64]) -> None:
        """Marks entries; they may repeat. The array belongs to the log from now on."""
        if self.enabled:
            self._arrays.append(entries)
            self._count(len(entries))

    def add_range(self, begin: int, end: int) -> None:
        """Marks ``begin`` to ``end - 1``."""
        if self.enabled and end > begin:
            self._ranges.append((begin, end))
            self._count(end - begin)

    def drain(self) -> NDArray[np.int64]:
        """The marked entries, int64, ascending and unique; none is marked afterwards."""
        if not (self._arrays or self._ranges):
            return np.empty(0, dtype=np.int64)
        self._fold()
        return self._arrays.pop()

    def _count(self, entries: int) -> None:
        self._logged += entries
        if self._logged > self.size:
            self._fold()

    def _fold(self) -> None:
        ranges = [np.arange(begin, end) for begin, end in self._ranges]
        self._arrays, self._ranges = [np.unique(np.concatenate([*self._arrays, *ranges]))], []
        # Only what is added from now on counts towards the next fold, else a full set would fold every time.
        self._logged = 0
