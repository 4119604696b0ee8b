"""Every error that avmp raises on purpose.

All of them derive from :class:`AvmpError` and carry the numbers that decided. But for :class:`Inconsistent`, they are
raised before anything has changed: whoever catches one finds every table, page and byte as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class AvmpError(Exception):
    """Base class: catch this to catch everything that avmp raises on purpose."""


class InvalidArgument(AvmpError, ValueError):
    """A value that cannot be right whatever the state of the allocator; the message says what was expected."""


class StaleHandle(AvmpError, LookupError):
    """A handle that does not name a live object: released before, never issued, or of another kind."""


class ArenaTooSmall(AvmpError, ValueError):
    """The arena cannot hold what it has to hold at the very least: the null area, the floors and one sequence."""


class Unsupported(AvmpError, NotImplementedError):
    """Something avmp does not offer; the message names what to use instead."""


class Inconsistent(AvmpError, AssertionError):
    """``check()`` found tables that contradict each other, or a commit was interrupted half-way."""


class RowsExhausted(AvmpError):
    """All ``max_rows`` rows for sequences are taken: a limit of the tables, not of the memory."""


class RowTooLong(AvmpError):
    """A sequence would outgrow its block-table row: ``max_tokens_per_sequence``, rounded up to whole pages."""


@dataclass(frozen=True)
class Shortage:
    """The numbers behind an :class:`OutOfMemory`. Units are pages or state slots, bytes are those of all lanes.

    ``reason`` is what would have to be lifted for the call to succeed: ``"awaiting"`` (tickets that have not been
    retired), ``"pinned"``, ``"floor"``, several of these joined by ``+``, or ``"bytes"`` if the bytes are not there.
    ``pool`` is the pool that is short, ``missing_units`` how many units fewer of it would make room for the rest.
    ``freed_pages`` and ``freed_slots`` are what the operation itself lets go of first. ``held_by_…_bytes`` are bytes
    of unused units that lie between live ones and a unit that must not move, or below a floor.
    """

    operation: str
    pool: str
    reason: str
    wanted_pages: int
    wanted_slots: int
    wanted_bytes: int
    freed_pages: int
    freed_slots: int
    missing_units: int
    missing_bytes: int
    gap_bytes: int
    free_pages: int
    free_slots: int
    awaiting_pages: int
    awaiting_slots: int
    pinned_pages: int
    pinned_slots: int
    held_by_tickets_bytes: int
    held_by_pins_bytes: int
    held_by_floors_bytes: int


_ADVICE = {
    "bytes": "release or swap out sequences, or use a larger arena",
    "pinned": "unpin the units at the border between the pools",
    "awaiting": "retire the tickets of steps that have finished",
    "floor": "lower the floor of the other pool",
}


class OutOfMemory(AvmpError, MemoryError):
    """An operation needs more pages or slots than can be made free. Nothing has changed.

    ``shortage`` holds the numbers, and each of its fields is readable on the error itself (``error.reason``).
    """

    def __init__(self, shortage: Shortage, releasable: Callable[..., tuple[int, int]] | None = None) -> None:
        self.shortage = shortage
        self._releasable = releasable
        super().__init__(self._message())

    def releasable(self, sequences: Any) -> tuple[int, int]:
        """Pages and slots that releasing these sequences would free, computed now from the allocator's tables."""
        if self._releasable is None:
            raise InvalidArgument("this error is a copy without its allocator; ask allocator.releasable(sequences)")
        return self._releasable(sequences)

    def __getattr__(self, name: str) -> int | str:
        if name.startswith("_") or name == "shortage":
            raise AttributeError(name)
        value: int | str = getattr(self.shortage, name)
        return value

    def __reduce__(self) -> tuple[type[OutOfMemory], tuple[Shortage]]:
        return type(self), (self.shortage,)

    def _message(self) -> str:
        s = self.shortage
        freed = f", letting go of {s.freed_pages} and {s.freed_slots} first" if s.freed_pages or s.freed_slots else ""
        parts = [
            f"{s.operation}: out of {s.pool}s ({s.reason}): wants {s.wanted_pages} pages and {s.wanted_slots} slots "
            f"({s.wanted_bytes:,} B){freed}; {s.missing_units} {s.pool}s ({s.missing_bytes:,} B) are missing",
            f"free: {s.free_pages} pages, {s.free_slots} slots, gap {s.gap_bytes:,} B",
        ]
        if s.awaiting_pages or s.awaiting_slots or s.held_by_tickets_bytes:
            parts.append(
                f"awaiting tickets: {s.awaiting_pages} pages, {s.awaiting_slots} slots, holding back "
                f"{s.held_by_tickets_bytes:,} B"
            )
        if s.pinned_pages or s.pinned_slots:
            parts.append(
                f"pinned: {s.pinned_pages} pages, {s.pinned_slots} slots, holding back {s.held_by_pins_bytes:,} B"
            )
        if s.held_by_floors_bytes:
            parts.append(f"floors hold back {s.held_by_floors_bytes:,} B")
        advice = " and ".join(_ADVICE[reason] for reason in s.reason.split("+"))
        return f"{'; '.join(parts)}. To go on: {advice}"
