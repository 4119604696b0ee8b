"""Sequences that leave for host memory and come back: swap_out, swap_in, discard.

Only tables and effects are here. The bytes of a swapped sequence lie in a host buffer of its own: its pages at unit
positions 0, 1, … in column order, columns given up left out, and its slot at position 0 of a part of its own.
"""

from __future__ import annotations

import numpy as np

from avmp.branching import live_history
from avmp.errors import InvalidArgument
from avmp.growth import release_rows
from avmp.handles import SWAPPED, Int64Array
from avmp.ledger import Ledger, Planned
from avmp.sequences import Swapped


def plan_swap_out(ledger: Ledger, rows: Int64Array) -> Planned[Int64Array]:
    """The sequences give up rows, pages and slots; yields handles to bring them back with."""

    def commit() -> Int64Array:
        handles = [_leave(ledger, row) for row in rows.tolist()]
        release_rows(ledger, rows)
        return np.array(handles, dtype=np.int64)

    return Planned(0, 0, commit)


def _leave(ledger: Ledger, row: int) -> int:
    table, space = ledger.table, ledger.space
    handle = ledger.issue(SWAPPED)
    columns = table.pages(row)
    pages = columns[columns > 0]
    ledger.swapped[handle] = Swapped(
        length=int(table.length[row]),
        columns=len(columns),
        front=int(table.front[row]),
        window=int(table.window[row]),
        has_slot=ledger.has_slots,
        history=live_history(ledger, row),
    )
    space.swap("swap_out", space.pages, pages, handle)
    if ledger.has_slots:
        space.swap("swap_out", space.slots, table.slot[[row]], handle)
    return handle


def swapped_of(ledger: Ledger, handles: Int64Array) -> list[Swapped]:
    """Their records. Raises StaleHandle, and InvalidArgument where one is named twice."""
    if len(np.unique(handles)) != len(handles):
        raise InvalidArgument("a swapped sequence is named twice in one call")
    return [ledger.swapped_sequence(handle) for handle in handles.tolist()]


def plan_swap_in(ledger: Ledger, handles: Int64Array) -> Planned[Int64Array]:
    """The sequences are back, in new rows, pages and slots; yields their handles."""
    swapped = swapped_of(ledger, handles)
    ledger.require_rows("swap_in", len(swapped))
    pages = sum(record.columns - record.front for record in swapped)
    slots = sum(record.has_slot for record in swapped)
    return Planned(pages, slots, lambda: _return(ledger, handles, swapped))


def _return(ledger: Ledger, handles: Int64Array, swapped: list[Swapped]) -> Int64Array:
    table, space = ledger.table, ledger.space
    rows = table.occupy(len(swapped))
    slots = space.bind(space.slots, sum(record.has_slot for record in swapped), fresh=False)
    for position, (row, handle, record) in enumerate(zip(rows, handles.tolist(), swapped, strict=True)):
        pages = space.bind(space.pages, record.columns - record.front, fresh=False)
        space.swap("swap_in", space.pages, pages, handle)
        if record.has_slot:
            table.slot[row] = slots[position]
            space.swap("swap_in", space.slots, slots[[position]], handle)
        columns = np.zeros(record.columns, dtype=np.int64)
        columns[record.front :] = pages
        table.set_pages(row, columns, record.front)
        table.set_length(row, record.length)
        table.window[row] = record.window
        table.history[row] = tuple(h for h in record.history if h in ledger.snapshots)
        del ledger.swapped[handle]
    return table.handles(rows)


def plan_discard(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """The swapped sequences are gone for good."""
    swapped_of(ledger, handles)

    def commit() -> None:
        for handle in handles.tolist():
            del ledger.swapped[handle]

    return Planned(0, 0, commit)
