"""What all operations share: the tables they work on, and the shape of a planned operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from avmp.address_space import AddressSpace
from avmp.errors import RowsExhausted, RowTooLong, StaleHandle
from avmp.handles import SNAPSHOT, SWAPPED, Int64Array, describe_handle, make_handle
from avmp.sequences import SequenceTable, Snapshot, Swapped

Result = TypeVar("Result")


@dataclass
class Planned(Generic[Result]):
    """An operation that has been checked and counted, and has changed nothing yet.

    ``pages`` and ``slots`` are its joint need. ``commit`` does it and cannot fail once the room is there.
    ``release``, where there is one, runs before the room is made and frees ``freed_pages`` and ``freed_slots``.
    """

    pages: int
    slots: int
    commit: Callable[[], Result]
    release: Callable[[], None] | None = None
    freed_pages: int = 0
    freed_slots: int = 0


@dataclass
class Ledger:
    """The address space, the sequences in it, and what outlives a sequence."""

    space: AddressSpace
    table: SequenceTable
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    swapped: dict[int, Swapped] = field(default_factory=dict)
    issued: int = 0

    @property
    def has_pages(self) -> bool:
        """Whether the model has attention layers."""
        return bool(self.space.layout.page_bytes)

    @property
    def has_slots(self) -> bool:
        """Whether the model has state layers."""
        return bool(self.space.layout.slot_bytes)

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self.table.page_tokens

    def columns_for(self, tokens: Int64Array) -> Int64Array:
        """Block-table columns for that many tokens each, int64: ``ceil(tokens / page_tokens)``."""
        return -(-tokens // self.page_tokens) if self.has_pages else np.zeros_like(tokens)

    def issue(self, kind: int) -> int:
        """A handle for a new snapshot or swapped sequence."""
        self.issued += 1
        return make_handle(kind, self.issued & 0xFFFFFFFF, self.issued >> 32)

    def snapshot(self, handle: int) -> Snapshot:
        """The snapshot of a handle. Raises StaleHandle."""
        snapshot = self.snapshots.get(int(handle))
        if snapshot is None:
            raise StaleHandle(f"{describe_handle(handle)}: {self._lost(int(handle), SNAPSHOT)}")
        return snapshot

    def swapped_sequence(self, handle: int) -> Swapped:
        """The swapped sequence of a handle. Raises StaleHandle."""
        swapped = self.swapped.get(int(handle))
        if swapped is None:
            raise StaleHandle(f"{describe_handle(handle)}: {self._lost(int(handle), SWAPPED)}")
        return swapped

    def _lost(self, handle: int, kind: int) -> str:
        what = {SNAPSHOT: "snapshot", SWAPPED: "swapped sequence"}[kind]
        mine = handle > 0 and handle >> 59 == kind and 0 < handle & 0xFFFFFFFF <= self.issued
        return f"this {what} is gone already" if mine else f"not a {what} of this allocator"

    def require_rows(self, operation: str, count: int) -> None:
        """Raises RowsExhausted unless ``count`` rows are free."""
        if count > self.table.free_rows:
            raise RowsExhausted(
                f"{operation}: {count} rows wanted, {self.table.free_rows} of max_rows={self.table.max_rows} free; "
                "release sequences, or make the allocator with more rows"
            )

    def require_width(self, operation: str, tokens: Int64Array) -> None:
        """Raises RowTooLong if any of these lengths exceeds what a block-table row holds."""
        longest = int(tokens.max(initial=0))
        if longest > self.max_tokens:
            raise RowTooLong(f"{operation}: {longest} tokens in one sequence, a row holds {self.max_tokens} at most")

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can have: whole pages, or as given where there are none."""
        return self.table.max_tokens
