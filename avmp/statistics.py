"""What the allocator says about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from avmp.ledger import Ledger


@dataclass(frozen=True)
class Statistics:
    """Present use and counters since the start. Units are pages and slots; bytes are those of all lanes.

    ``live`` counts held units, ``awaiting`` those of them that only tickets hold. ``attempts`` tells, by outcome,
    how allocations went that free units could not serve (see ``Counters``); ``retractions`` moved nothing,
    ``migrations`` moved live units.
    """

    pages_live: int
    pages_free: int
    pages_awaiting: int
    pages_extent: int
    pages_capacity: int
    slots_live: int
    slots_free: int
    slots_awaiting: int
    slots_extent: int
    slots_capacity: int
    sequences: int
    snapshots: int
    swapped: int
    used_bytes: int
    peak_used_bytes: int
    gap_bytes: int
    null_bytes: int
    table_bytes: int
    block_table_bytes: int
    retractions: int
    migrations: int
    units_given_up: int
    units_moved: int
    bytes_moved: int
    tail_copies: int
    attempts: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The same as a plain dictionary, for JSON."""
        return asdict(self)


def statistics_of(ledger: Ledger) -> Statistics:
    """The present statistics."""
    ledger.space.note_use()
    space, table, counters = ledger.space, ledger.table, ledger.space.counters
    return Statistics(
        pages_live=space.pages.live,
        pages_free=space.pages.free.count,
        pages_awaiting=len(space.pages.awaiting()),
        pages_extent=space.pages.extent,
        pages_capacity=space.pages.capacity,
        slots_live=space.slots.live,
        slots_free=space.slots.free.count,
        slots_awaiting=len(space.slots.awaiting()),
        slots_extent=space.slots.extent,
        slots_capacity=space.slots.capacity,
        sequences=table.max_rows - table.free_rows,
        snapshots=len(ledger.snapshots),
        swapped=len(ledger.swapped),
        used_bytes=space.used_bytes,
        peak_used_bytes=counters.peak_used_bytes,
        gap_bytes=space.gap_bytes,
        null_bytes=space.layout.null_bytes,
        table_bytes=space.pages.table_bytes + space.slots.table_bytes + table.table_bytes,
        block_table_bytes=table.block_table.nbytes,
        retractions=counters.retractions,
        migrations=counters.migrations,
        units_given_up=counters.units_given_up,
        units_moved=counters.units_moved,
        bytes_moved=counters.bytes_moved,
        tail_copies=counters.tail_copies,
        attempts={reason: count for reason, count in sorted(counters.attempts.items()) if count},
    )
