"""Which entries of a table have to be uploaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DirtyEntries:
    """A set of table entries whose values have to be uploaded, kept as a log that is folded when it grows long.

    Between two folds it logs at most as many entries as the table has. Recording can be switched off where there is
    no device.
    """

    __slots__ = ("_arrays", "_logged", "_ranges", "_singles", "add_one", "enabled", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._logged = 0
        self.set_enabled(True)

    def set_enabled(self, enabled: bool) -> None:
        """Starts or stops recording; what was recorded is forgotten."""
        self.enabled = enabled
        self._arrays: list[NDArray[np.integer]] = []
        self._ranges: list[tuple[int, int]] = []
        self._singles: list[int] = []
        self._logged = 0
        self.add_one = self._record_one if enabled else _ignore

    def add(self, entries: NDArray[np.integer]) -> None:
        """Marks entries; they may repeat. The array belongs to the log from now on."""
        if self.enabled:
            self._arrays.append(entries)
            self._count(len(entries))

    def add_range(self, begin: int, end: int) -> None:
        """Marks ``begin`` to ``end - 1``."""
        if self.enabled and end > begin:
            self._ranges.append((begin, end))
            self._count(end - begin)

    def _record_one(self, entry: int) -> None:
        self._singles.append(entry)
        if len(self._singles) > self.size:
            self._fold()

    def _count(self, entries: int) -> None:
        self._logged += entries
        if self._logged > self.size:
            self._fold()

    def drain(self) -> NDArray[np.int64]:
        """The marked entries, int64, ascending and unique; none is marked afterwards."""
        if not (self._arrays or self._ranges or self._singles):
            return np.empty(0, dtype=np.int64)
        self._fold()
        entries = self._arrays.pop().astype(np.int64)
        return entries

    def _fold(self) -> None:
        ranges = [np.arange(begin, end) for begin, end in self._ranges]
        logged = [*self._arrays, *ranges, np.array(self._singles, dtype=np.int64)]
        self._arrays, self._ranges, self._singles = [np.unique(np.concatenate(logged))], [], []
        # Only what is added from now on counts towards the next fold, else a full set would fold every time.
        self._logged = 0


def _ignore(entry: int) -> None:
    """Recording is off."""
