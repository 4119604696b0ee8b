"""Sequences that come, grow and go: admit, extend, release, release_front."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.handles import NOTHING, Handles, Int64Array, as_count, as_counts, as_handles, as_list
from avmp.ledger import Ledger, Planned
from avmp.sequences import NO_WINDOW

Counts: TypeAlias = "int | Iterable[int] | NDArray[np.integer]"


class Prefix(NamedTuple):
    """What a new sequence starts from: ``snapshot`` (its state, and its pages unless ``pages`` are given), or
    ``pages`` alone for a model without state layers. ``pages`` are handles that cover exactly the position."""

    snapshot: int | None = None
    pages: Handles | None = None


class Start(NamedTuple):
    """A resolved prefix: how many tokens are there, in which pages (virtual ids), and the slot that holds their
    state (a virtual id; None for a sequence that starts from nothing). The rest is as in SequenceTable."""

    position: int
    pages: Int64Array
    slot: int | None
    front: int = 0
    window: int = NO_WINDOW
    history: tuple[int, ...] = ()


Prefixes: TypeAlias = "int | Prefix | Iterable[int | Prefix | None] | None"
_EMPTY = Start(0, NOTHING, None)


# -- admit ---------------------------------------------------------------------------------------------------------


def plan_admit(ledger: Ledger, token_counts: Iterable[int], prefix: Prefixes = None) -> Planned[Int64Array]:
    """New sequences of these total lengths, one slot each; yields their handles."""
    counts = [as_count(count, "admit: token count") for count in as_list(token_counts, "admit: token counts")]
    starts = None if prefix is None else _starts(ledger, prefix, len(counts))
    ledger.require_rows("admit", len(counts))
    ledger.require_width("admit", max(counts, default=0))
    pages = sum(map(ledger.columns_for, counts))
    if starts is not None:
        pages += _pages_beyond(ledger, counts, starts)
    slots = len(counts) if ledger.has_slots else 0
    return Planned(pages, slots, lambda: _admit(ledger, counts, starts))


def _starts(ledger: Ledger, prefix: Prefixes, count: int) -> list[Start]:
    single = isinstance(prefix, (int, np.integer, Prefix))
    prefixes = [prefix] * count if single else as_list(prefix, "admit: prefix")  # type: ignore[arg-type]
    if len(prefixes) != count:
        raise InvalidArgument(f"admit: {len(prefixes)} prefixes for {count} sequences; expected one, or one each")
    return [_start(ledger, item) for item in prefixes]  # type: ignore[arg-type]


def _start(ledger: Ledger, item: int | Prefix | None) -> Start:
    if item is None:
        return _EMPTY
    prefix = item if isinstance(item, Prefix) else Prefix(int(item))
    if prefix.snapshot is None:
        return _start_from_pages(ledger, prefix)
    snapshot = ledger.snapshot(prefix.snapshot)
    history = (*snapshot.lineage, int(prefix.snapshot))
    start = Start(snapshot.position, snapshot.pages, snapshot.slot, snapshot.front, snapshot.window, history)
    if prefix.pages is None:
        return start
    pages = _prefix_pages(ledger, prefix.pages)
    columns = len(snapshot.pages)
    if len(pages) != columns:
        raise InvalidArgument(
            f"prefix: {len(pages)} pages, but the snapshot's position {snapshot.position} needs exactly {columns}"
        )
    return start._replace(pages=pages, front=0, window=NO_WINDOW)


def _start_from_pages(ledger: Ledger, prefix: Prefix) -> Start:
    if ledger.has_slots:
        raise InvalidArgument("prefix: pages without a snapshot; state layers can only go on from a state")
    if prefix.pages is None:
        return _EMPTY
    pages = _prefix_pages(ledger, prefix.pages)
    return Start(len(pages) * ledger.page_tokens, pages, None)


def _prefix_pages(ledger: Ledger, handles: Handles) -> Int64Array:
    pages = ledger.space.pages.resolve(as_handles(handles))
    if len(np.unique(pages)) != len(pages):
        raise InvalidArgument("prefix: a page is named twice")
    return pages


def _pages_beyond(ledger: Ledger, counts: list[int], starts: list[Start]) -> int:
    """What the prefixes change in the number of pages: theirs are shared, a tail that grows at once is copied."""
    change = 0
    for count, start in zip(counts, starts, strict=True):
        if count < start.position:
            raise InvalidArgument(f"admit: {count} tokens in all, but the prefix alone has {start.position}")
        change -= len(start.pages)
        change += int(count > start.position and len(start.pages) > 0 and start.position % ledger.page_tokens > 0)
    return change


def _admit(ledger: Ledger, counts: list[int], starts: list[Start] | None) -> Int64Array:
    table, space = ledger.table, ledger.space
    taken = table.occupy(len(counts))
    rows = np.array(taken, dtype=np.int64)
    if ledger.has_slots and counts:
        table.slot[rows] = slots = space.bind(space.slots, len(rows), fresh=starts is None)
    if starts is None:
        grow_rows(ledger, rows, np.array(counts, dtype=np.int64))
        return table.handles(taken)
    for row, start in zip(taken, starts, strict=True):
        _begin(ledger, row, start)
    beyond = [count - start.position for count, start in zip(counts, starts, strict=True)]
    grow_rows(ledger, rows, np.array(beyond, dtype=np.int64))
    if ledger.has_slots and counts:
        stateful = np.array([start.slot is not None for start in starts])
        if space.zeroed["slot"]:
            space.zero(space.slots, slots[~stateful])
        sources = [start.slot for start in starts if start.slot is not None]
        space.copy(space.slots, np.array(sources, dtype=np.int64), slots[stateful])
    return table.handles(taken)


def _begin(ledger: Ledger, row: int, start: Start) -> None:
    table = ledger.table
    ledger.space.pages.share(start.pages[start.pages > 0])
    table.set_pages(row, start.pages, start.front)
    table.set_length(row, start.position)
    table.window[row] = start.window
    table.history[row] = start.history
    table.flag(row, len(start.pages) > 0 and start.position % ledger.page_tokens > 0)


# -- extend --------------------------------------------------------------------------------------------------------


def plan_extend(ledger: Ledger, ids: Int64Array, counts: Counts = 1) -> Planned[None]:
    """Room for ``counts`` more tokens in each row."""
    table = ledger.table
    added = as_counts(counts, len(ids), "extend: counts")
    lengths = table.length[ids] + added
    ledger.require_width("extend", int(lengths.max(initial=0)))
    pages = int((ledger.columns_for(lengths) - table.column_counts(ids)).sum()) if ledger.has_pages else 0
    pages += len(_tails_to_copy(ledger, ids, added))
    return Planned(pages, 0, lambda: grow_rows(ledger, ids, added))


def grow_rows(ledger: Ledger, rows: Int64Array, added: Int64Array) -> None:
    """Commits ``added`` more tokens for each row; the pages are there. Shared tails are copied first."""
    table, space = ledger.table, ledger.space
    if table.flagged:
        _copy_tails(ledger, rows, added)
    if len(rows) == 1:
        _grow_row(ledger, int(rows[0]), int(added[0]))
        return
    before = table.length[rows]
    # Rows whose last step was taken up by `batch` start a new one, also where it brings them no token.
    table.begin[rows] = np.where(table.mark[rows] == before, before, table.begin[rows])
    lengths = before + added
    if ledger.has_pages:
        missing = ledger.columns_for(lengths) - table.column_counts(rows)
        total = int(missing.sum())
        if total:
            cells = _cells(table.next_cell[rows], missing, total)
            table.cells[cells] = space.bind(space.pages, total)
            table.next_cell[rows] += missing
            table.dirty.add(cells)
    table.length[rows] = lengths
    table.longest = max(table.longest, int(lengths.max(initial=0)))
    table.set_cursors(rows)


def _grow_row(ledger: Ledger, row: int, added: int) -> None:
    """The same for one row. Most admissions come alone, and plain integers then cost a third of what arrays do."""
    table, space = ledger.table, ledger.space
    length = table.length_of(row) + added
    missing = ledger.columns_for(length) - table.column_count(row)
    if missing:
        table.append_pages(row, space.bind(space.pages, missing))
    table.grow_length(row, length)


def _cells(first: Int64Array, counts: Int64Array, total: int) -> Int64Array:
    """Flat indices: for each i, ``counts[i]`` consecutive ones from ``first[i]``."""
    starts = np.cumsum(counts) - counts
    return np.repeat(first - starts, counts) + np.arange(total)


def _tails_to_copy(ledger: Ledger, rows: Int64Array, added: Int64Array) -> list[int]:
    """Rows, in order, whose shared tail page has to be copied before they append: all flagged ones, except that the
    last holder of a page keeps it."""
    table, references = ledger.table, ledger.space.pages.references
    if not table.flagged:
        return []
    left: dict[int, int] = {}
    copied = []
    for row in rows[table.tail_shared[rows] & (added > 0)].tolist():
        tail = table.tail(row)
        if left.setdefault(tail, int(references[tail])) > 1:
            left[tail] -= 1
            copied.append(row)
    return copied


def _copy_tails(ledger: Ledger, rows: Int64Array, added: Int64Array) -> None:
    table, space = ledger.table, ledger.space
    copied = _tails_to_copy(ledger, rows, added)
    for row in rows[table.tail_shared[rows] & (added > 0)].tolist():
        table.flag(row, False)
    if not copied:
        return
    space.counters.tail_copies += len(copied)
    cells = table.next_cell[copied] - 1
    old = table.cells[cells].astype(np.int64)
    new = space.bind(space.pages, len(copied), fresh=False)
    space.copy(space.pages, old, new)
    table.cells[cells] = new
    table.dirty.add(cells)
    ids, counts = np.unique(old, return_counts=True)
    space.drop(space.pages, ids, counts)


# -- release -------------------------------------------------------------------------------------------------------


def plan_release(ledger: Ledger, rows: Int64Array, after: int | None = None) -> Planned[None]:
    """The sequences are gone; their units too, or once the ticket ``after`` is retired."""
    if after is not None:
        require_ticket("release: after", after)
    return Planned(0, 0, lambda: release_rows(ledger, rows, after))


def plan_retire(ledger: Ledger, ticket: int) -> Planned[None]:
    """What tickets up to this one hold is let go of."""
    require_ticket("retire: ticket", ticket)
    return Planned(0, 0, lambda: ledger.space.retire(int(ticket)))


def require_ticket(what: str, ticket: int) -> None:
    """Raises InvalidArgument unless this is an integer that fits into 64 bits."""
    if isinstance(ticket, bool) or not isinstance(ticket, (int, np.integer)) or not abs(ticket) < 2**63:
        raise InvalidArgument(f"{what}={ticket!r}: expected an integer of 64 bits")


def held_by(ledger: Ledger, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Virtual ids of all pages and slots of these rows, one entry per holder."""
    table = ledger.table
    pages = [table.pages(row) for row in rows.tolist()]
    held = np.concatenate([NOTHING, *pages])
    slots = table.slot[rows].astype(np.int64)
    return held[held > 0], slots[slots > 0]


def release_rows(ledger: Ledger, rows: Int64Array, after: int | None = None) -> None:
    """Commits the release of these rows."""
    space, table = ledger.space, ledger.table
    slots = table.slot[rows].astype(np.int64)
    # Row by row, for the pages of one row are distinct, and those of two may not be.
    held = [(space.pages, table.vacate(row)) for row in rows.tolist()]
    if ledger.has_slots:
        held.append((space.slots, slots))
    for pool, virtual in held:
        if after is None or after <= space.retired:
            space.drop(pool, virtual)
        else:
            pool.hold(int(after), virtual)


def plan_release_front(ledger: Ledger, ids: Int64Array, tokens: Counts) -> Planned[None]:
    """The first ``tokens`` tokens of each row are no longer read: their whole pages are given up."""
    table = ledger.table
    left = as_counts(tokens, len(ids), "release_front: tokens")
    beyond = left > table.length[ids]
    if beyond.any():
        row = int(ids[beyond][0])
        raise InvalidArgument(f"release_front: {left[beyond][0]} tokens, the sequence has {table.length[row]}")
    return Planned(0, 0, lambda: _release_front(ledger, ids, left))


def _release_front(ledger: Ledger, rows: Int64Array, tokens: Int64Array) -> None:
    table, space = ledger.table, ledger.space
    for row, count in zip(rows.tolist(), tokens.tolist(), strict=True):
        if count:
            table.window[row] = min(int(table.window[row]), int(table.length[row]) - count)
        columns = count // ledger.page_tokens if ledger.has_pages else 0
        front = int(table.front[row])
        if columns > front:
            first = row * table.row_width
            pages = table.cells[first + front : first + columns].astype(np.int64)
            table.cells[first + front : first + columns] = 0
            table.front[row] = columns
            table.dirty.add_range(first + front, first + columns)
            table.set_cursors(np.array([row]))
            space.drop(space.pages, pages)
