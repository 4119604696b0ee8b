"""What all operations share: the tables they work on, and the shape of a planned operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

import numpy as np

from avmp.address_space import AddressSpace
from avmp.errors import InvalidArgument, RowsExhausted, RowTooLong, StaleHandle
from avmp.handles import ID_MASK, KIND_SHIFT, SNAPSHOT, SWAPPED, Int64Array, describe_handle, make_handle
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
    """The address space, the sequences in it, and what outlives a sequence.

    ``has_pages`` and ``has_slots`` tell whether the model has attention and state layers; ``max_tokens`` is what one
    sequence can have.
    """

    space: AddressSpace
    table: SequenceTable
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    swapped: dict[int, Swapped] = field(default_factory=dict)
    issued: int = 0

    def __post_init__(self) -> None:
        self.has_pages, self.has_slots = self.space.layout.has_pages, self.space.layout.has_slots
        self.page_tokens, self.max_tokens = self.table.page_tokens, self.table.max_tokens

    @overload
    def columns_for(self, tokens: int) -> int: ...
    @overload
    def columns_for(self, tokens: Int64Array) -> Int64Array: ...
    def columns_for(self, tokens: int | Int64Array) -> int | Int64Array:
        """Block-table columns for that many tokens: ``ceil(tokens / page_tokens)``, 0 without attention layers."""
        return -(-tokens // self.page_tokens) if self.has_pages else tokens * 0

    def issue(self, kind: int) -> int:
        """A handle for a new snapshot or swapped sequence."""
        self.issued += 1
        return make_handle(kind, self.issued & ID_MASK, self.issued >> 32)

    def snapshot(self, handle: int) -> Snapshot:
        """The snapshot of a handle. Raises StaleHandle."""
        if not isinstance(handle, (int, np.integer)):
            raise InvalidArgument(f"{handle!r}: expected the integer handle of a snapshot")
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
        mine = handle > 0 and handle >> KIND_SHIFT == kind and 0 < handle & ID_MASK <= self.issued
        return f"this {what} is gone already" if mine else f"not a {what} of this allocator"

    def require_rows(self, operation: str, count: int) -> None:
        """Raises RowsExhausted unless ``count`` rows are free."""
        if count > self.table.free_rows:
            raise RowsExhausted(
                f"{operation}: {count} rows wanted, {self.table.free_rows} of max_rows={self.table.max_rows} free; "
                "release sequences, or make the allocator with more rows"
            )

    def require_width(self, operation: str, longest: int) -> None:
        """Raises RowTooLong if a length of ``longest`` tokens exceeds what a block-table row holds."""
        if longest > self.max_tokens:
            raise RowTooLong(f"{operation}: {longest} tokens in one sequence, a row holds {self.max_tokens} at most")
