"""Sequences that branch and go back: fork, reorder, snapshot, restore, drop, truncate."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from avmp.errors import InvalidArgument
from avmp.growth import Counts, held_by
from avmp.handles import NOTHING, SNAPSHOT, Int64Array, as_count, as_counts
from avmp.ledger import Ledger, Planned
from avmp.sequences import Snapshot


def _tail(ledger: Ledger, row: int) -> bool:
    """Whether the row's last page is partly filled."""
    return ledger.has_pages and ledger.table.length_of(row) % ledger.page_tokens > 0


# -- fork ----------------------------------------------------------------------------------------------------------


def plan_fork(ledger: Ledger, row: int, n: int = 1) -> Planned[Int64Array]:
    """``n`` new sequences equal to this one; yields their handles."""
    count = as_count(n, "fork: n")
    ledger.require_rows("fork", count)
    pages = count if _tail(ledger, row) else 0
    return Planned(pages, count if ledger.has_slots else 0, lambda: _fork(ledger, row, count))


def _fork(ledger: Ledger, row: int, count: int) -> Int64Array:
    table = ledger.table
    if not count:
        return NOTHING
    rows = table.occupy(count)
    tails, slots = _bind_copies(ledger, [row] * count)
    likeness = _Likeness(ledger, row)
    table.set_length(row, likeness.length)
    for child, tail, slot in zip(rows, tails, slots, strict=True):
        _be_like(ledger, child, likeness, tail, slot)
    return table.handles(rows)


class _Likeness:
    """What a row is, read once so that the row itself may be overwritten."""

    def __init__(self, ledger: Ledger, row: int) -> None:
        table = ledger.table
        self.pages, self.slot = table.pages(row), int(table.slot[row])
        self.length, self.front, self.window = table.length_of(row), int(table.front[row]), int(table.window[row])
        self.flagged, self.history = bool(table.tail_shared[row]), table.history[row]


def _bind_copies(ledger: Ledger, parents: list[int]) -> tuple[list[int], list[int]]:
    """A copy of each parent's partly filled tail (0 where there is none) and of its slot, one per child."""
    space, table = ledger.space, ledger.table
    tails = slots = [0] * len(parents)
    tailed = [row for row in parents if _tail(ledger, row)]
    if tailed:
        old = np.array([table.tail(row) for row in tailed], dtype=np.int64)
        new = space.bind(space.pages, len(tailed), fresh=False)
        space.copy(space.pages, old, new)
        space.counters.tail_copies += len(tailed)
        copies = iter(new.tolist())
        tails = [next(copies) if _tail(ledger, row) else 0 for row in parents]
    if ledger.has_slots and parents:
        new = space.bind(space.slots, len(parents), fresh=False)
        space.copy(space.slots, table.slot[np.array(parents)], new)
        slots = new.tolist()
    return tails, slots


def _be_like(ledger: Ledger, row: int, likeness: _Likeness, tail: int, slot: int) -> None:
    """This row, empty so far, shares the likeness's full pages and has a tail and a slot of its own."""
    table = ledger.table
    shared = likeness.pages[likeness.front : -1] if tail else likeness.pages[likeness.front :]
    ledger.space.pages.share(shared)
    table.set_pages(row, likeness.pages, likeness.front)
    if tail:
        table.cells[table.next_cell[row] - 1] = tail
    table.slot[row] = slot
    table.set_length(row, likeness.length)
    table.window[row], table.history[row] = likeness.window, likeness.history


# -- reorder -------------------------------------------------------------------------------------------------------


def plan_reorder(ledger: Ledger, rows: Int64Array, parents: Iterable[int]) -> Planned[None]:
    """Row i goes on from what row ``parents[i]`` was; rows without a child let go of theirs first."""
    chosen = as_counts(parents, len(rows), "reorder: parents")
    if len(rows) and int(chosen.max()) >= len(rows):
        raise InvalidArgument(f"reorder: parents must be {len(rows)} indices below {len(rows)}, got {chosen.tolist()}")
    keeper: dict[int, int] = {}
    for child, parent in enumerate(chosen.tolist()):
        if parent not in keeper or child == parent:
            keeper[parent] = child
    copying = [child for child, parent in enumerate(chosen.tolist()) if keeper[parent] != child]
    lost = rows[[parent for parent in range(len(rows)) if parent not in keeper]]
    space = ledger.space
    lost_pages, lost_slots = held_by(ledger, lost)

    def release() -> None:
        for pool, virtual in zip(space.pools, (lost_pages, lost_slots), strict=True):
            space.drop(pool, *np.unique(virtual, return_counts=True))

    return Planned(
        pages=sum(_tail(ledger, int(rows[chosen[child]])) for child in copying),
        slots=len(copying) if ledger.has_slots else 0,
        commit=lambda: _reorder(ledger, rows, chosen, copying),
        release=release,
        freed_pages=space.pages.freed_by(lost_pages),
        freed_slots=space.slots.freed_by(lost_slots),
    )


def _reorder(ledger: Ledger, rows: Int64Array, parents: Int64Array, copying: list[int]) -> None:
    table = ledger.table
    tails, slots = _bind_copies(ledger, [int(rows[parents[child]]) for child in copying])
    likenesses = {parent: _Likeness(ledger, int(rows[parent])) for parent in set(parents.tolist())}
    copies = {child: (tail, slot) for child, tail, slot in zip(copying, tails, slots, strict=True)}
    for child, parent in enumerate(parents.tolist()):
        row, likeness = int(rows[child]), likenesses[parent]
        if child == parent:
            table.set_length(row, likeness.length)
            continue
        table.cut(row, 0)
        table.reset(row)
        if child in copies:
            _be_like(ledger, row, likeness, *copies[child])
            continue
        table.set_pages(row, likeness.pages, likeness.front)
        table.slot[row] = likeness.slot
        table.set_length(row, likeness.length)
        table.window[row], table.history[row] = likeness.window, likeness.history
        table.flag(row, likeness.flagged)


# -- snapshot, restore, drop ---------------------------------------------------------------------------------------


def plan_snapshot(ledger: Ledger, rows: Int64Array) -> Planned[Int64Array]:
    """A snapshot of each row; yields their handles."""
    return Planned(0, len(rows) if ledger.has_slots else 0, lambda: _snapshot(ledger, rows))


def _snapshot(ledger: Ledger, rows: Int64Array) -> Int64Array:
    table, space = ledger.table, ledger.space
    slots = space.bind(space.slots, len(rows) if ledger.has_slots else 0, fresh=False)
    if ledger.has_slots:
        space.copy(space.slots, table.slot[rows], slots)
    handles = []
    for row, slot in zip(rows.tolist(), slots.tolist() or [0] * len(rows), strict=True):
        pages, lineage = table.pages(row), live_history(ledger, row)
        space.pages.share(pages[pages > 0])
        handle = ledger.issue(SNAPSHOT)
        ledger.snapshots[handle] = Snapshot(
            int(table.length[row]), slot, pages, int(table.front[row]), int(table.window[row]), lineage
        )
        table.history[row] = (*lineage, handle)
        handles.append(handle)
    return np.array(handles, dtype=np.int64)


def live_history(ledger: Ledger, row: int) -> tuple[int, ...]:
    """The row's history without the snapshots that have been dropped."""
    return tuple(handle for handle in ledger.table.history[row] if handle in ledger.snapshots)


def plan_restore(ledger: Ledger, row: int, handle: int) -> Planned[None]:
    """The row becomes what the snapshot holds."""
    snapshot = ledger.snapshot(handle)
    return Planned(0, 0, lambda: _restore(ledger, row, int(handle), snapshot))


def _restore(ledger: Ledger, row: int, handle: int, snapshot: Snapshot) -> None:
    table, space = ledger.table, ledger.space
    kept = snapshot.pages[snapshot.pages > 0]
    space.pages.share(kept)
    space.drop(space.pages, table.cut(row, 0))
    table.reset(row)
    table.set_pages(row, snapshot.pages, snapshot.front)
    table.set_length(row, snapshot.position)
    table.window[row] = snapshot.window
    table.history[row] = (*snapshot.lineage, handle)
    table.flag(row, _tail(ledger, row))
    if ledger.has_slots:
        space.copy(space.slots, np.array([snapshot.slot]), table.slot[[row]])


def plan_drop(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """The snapshots are gone, from every history too."""
    if len(np.unique(handles)) != len(handles):
        raise InvalidArgument("drop: a snapshot is named twice in one call")
    snapshots = [ledger.snapshot(handle) for handle in handles.tolist()]

    def commit() -> None:
        space = ledger.space
        for handle, snapshot in zip(handles.tolist(), snapshots, strict=True):
            del ledger.snapshots[handle]
            space.drop(space.pages, snapshot.pages[snapshot.pages > 0])
            if snapshot.slot:
                space.drop(space.slots, np.array([snapshot.slot]))

    return Planned(0, 0, commit)


# -- truncate ------------------------------------------------------------------------------------------------------


def plan_truncate(ledger: Ledger, rows: Int64Array, length: Counts) -> Planned[Int64Array]:
    """Each row goes back to ``length`` (one integer, or one for each) or before; yields where they are then, int64."""
    lengths = as_counts(length, len(rows), "truncate: length")
    targets = [_target(ledger, row, length) for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]

    def commit() -> Int64Array:
        for row, target in zip(rows.tolist(), targets, strict=True):
            if target is not None:
                _go_back(ledger, row, *target)
        return ledger.table.length[rows]

    return Planned(0, 0, commit)


def _target(ledger: Ledger, row: int, length: int) -> tuple[int, Snapshot | None] | None:
    """The position and snapshot to go back to; None where nothing changes."""
    table = ledger.table
    present = int(table.length[row])
    if length > present:
        raise InvalidArgument(f"truncate: length {length} is beyond the sequence's {present} tokens")
    if length == present:
        return None
    position, snapshot = length, None
    if ledger.has_slots:
        past = [ledger.snapshots[handle] for handle in live_history(ledger, row)]
        snapshot = next((s for s in reversed(past) if s.position <= length), None)
        position = snapshot.position if snapshot else 0
    _require_front(ledger, row, position)
    return position, snapshot


def _require_front(ledger: Ledger, row: int, position: int) -> None:
    """Refuses a position whose sliding window reaches into pages that ``release_front`` has given up. The window is
    at most what the calls of ``release_front`` left in front of the then last token."""
    table = ledger.table
    gone = int(table.front[row]) * ledger.page_tokens
    reaches = position - min(int(table.window[row]), position)
    if position and gone and reaches < gone:
        raise InvalidArgument(
            f"truncate: position {position} reads tokens from {reaches} on, but release_front has given up the first "
            f"{gone}; restore a snapshot that holds those pages, or recompute"
        )


def _go_back(ledger: Ledger, row: int, position: int, snapshot: Snapshot | None) -> None:
    table, space = ledger.table, ledger.space
    history = tuple(h for h in live_history(ledger, row) if ledger.snapshots[h].position <= position)
    columns = ledger.columns_for(position)
    space.drop(space.pages, table.cut(row, columns))
    if position:
        table.front[row] = min(int(table.front[row]), columns)
        table.set_length(row, position)
        table.flag(row, _tail(ledger, row))
    else:
        table.reset(row)
    table.history[row] = history
    if not ledger.has_slots:
        return
    if snapshot is None:
        space.zero(space.slots, table.slot[[row]])
    else:
        space.copy(space.slots, np.array([snapshot.slot]), table.slot[[row]])
