"""Which entries of a table have to be uploaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DirtyEntries:
    """A set of table entries whose values have to be uploaded, kept as a log that is folded when it grows long.

    Holds at most twice as many integers as the table has entries. Recording can be switched off where there is no
    device.
    """

    __slots__ = ("_arrays", "_logged", "_singles", "add_one", "enabled", "size")

    def __init__(self, size: int, enabled: bool = True) -> None:
        self.size = size
        self._arrays: list[NDArray[np.integer]] = []
        self._singles: list[int] = []
        self._logged = 0
        self.set_enabled(enabled)

    def set_enabled(self, enabled: bool) -> None:
        """Starts or stops recording; what was recorded is forgotten."""
        self.enabled = enabled
        self._arrays, self._singles, self._logged = [], [], 0
        self.add_one = self._record_one if enabled else _ignore

    def add(self, entries: NDArray[np.integer]) -> None:
        """Marks entries; they may repeat."""
        if not self.enabled:
            return
        self._arrays.append(entries)
        self._logged += len(entries)
        if self._logged > self.size:
            self._fold()

    def add_range(self, begin: int, end: int) -> None:
        """Marks ``begin`` to ``end - 1``."""
        if self.enabled and end > begin:
            self.add(np.arange(begin, end))

    def _record_one(self, entry: int) -> None:
        self._singles.append(entry)
        if len(self._singles) > self.size:
            self._fold()

    def drain(self) -> NDArray[np.int64]:
        """The marked entries, int64, ascending and unique; none is marked afterwards."""
        if not self._arrays and not self._singles:
            return np.empty(0, dtype=np.int64)
        self._fold()
        entries = self._arrays[0].astype(np.int64)
        self._arrays, self._logged = [], 0
        return entries

    def _fold(self) -> None:
        singles = np.array(self._singles, dtype=np.int64)
        entries = np.unique(np.concatenate([*self._arrays, singles]))
        self._arrays, self._singles = [entries], []
        # Only what was added since the last fold counts towards the next, else a full set would fold every time.
        self._logged = 0


def _ignore(entry: int) -> None:
    """Recording is off."""
