"""The verifier and the digest. Both read the raw arrays: no counter is trusted, each is recomputed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from avmp.errors import Inconsistent
from avmp.handles import NOTHING, Int64Array
from avmp.ledger import Ledger
from avmp.page_pool import Pool


def check(ledger: Ledger) -> None:
    """Raises Inconsistent with numbers unless all of this holds:

    * no two live byte ranges of a lane overlap, of either pool, and none reaches into the null area;
    * each rank of an extent is free or live, none is both; nothing lives outside, or on a null id; what only tickets
      hold is what ``awaiting`` says;
    * virtual to physical and back is the identity for every held unit, and every other virtual id maps to 0;
    * the reference count of every unit equals its holders: rows, snapshots, handles, pins, tickets;
    * the extents respect the layout's inequality and the floors; counters equal what they count;
    * rows: columns, cursors, flags and free rows agree with lengths and handles.
    """
    for pool, holders in zip(ledger.space.pools, _holders(ledger), strict=True):
        _check_pool(pool, holders)
    _check_bytes(ledger)
    _check_rows(ledger)


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise Inconsistent(message)


def _holders(ledger: Ledger) -> tuple[Int64Array, Int64Array]:
    """Virtual ids of pages and of slots, one entry for each reference that rows and snapshots hold."""
    rows = ledger.table.live_rows()
    pages = [ledger.table.pages(row) for row in rows.tolist()]
    pages += [snapshot.pages for snapshot in ledger.snapshots.values()]
    slots = [*ledger.table.slot[rows].tolist(), *(snapshot.slot for snapshot in ledger.snapshots.values())]
    held_pages, held_slots = np.concatenate([NOTHING, *pages]), np.array(slots, dtype=np.int64)
    return held_pages[held_pages > 0], held_slots[held_slots > 0]


def _check_pool(pool: Pool, holders: Int64Array) -> None:
    name = pool.kind
    expected = np.bincount(holders, minlength=pool.capacity + 1) + pool.loose
    for virtual, count in pool.pins.items():
        _require(count > 0, f"{name} {virtual}: pinned {count} times")
        expected[virtual] += count
    awaiting = np.zeros(pool.capacity + 1, dtype=np.int64)
    for arrays in pool.tickets.values():
        for held in arrays:
            np.add.at(awaiting, held, 1)
    expected += awaiting
    wrong = np.flatnonzero(expected != pool.references)
    _require(
        not len(wrong),
        f"{name} {wrong[:1]}: {expected[wrong[:1]]} holders, references say {pool.references[wrong[:1]]}",
    )
    bound = np.flatnonzero(pool.references)
    physical = pool.physical[bound].astype(np.int64)
    _require(not pool.physical[pool.references == 0].any(), f"a {name} without a holder is bound")
    _require(len(np.unique(physical)) == len(physical), f"two {name}s lie at one place")
    ranks = np.sort(pool.ranks_of(bound))
    _require((pool.ranks_of(pool.virtual_at(ranks)) == ranks).all(), f"{name}s: virtual to physical and back differ")
    _check_partition(pool, pool.ranks_of(bound))
    _require(pool.live == len(bound), f"{name}s: live {pool.live}, counted {len(bound)}")
    extra = int(pool.references.sum()) - len(bound)
    _require(pool.extra_references == extra, f"{name}s: extra references {pool.extra_references}, counted {extra}")
    everything = np.concatenate([pool.unbound[: pool.spare].astype(np.int64), bound])
    _require(
        (np.sort(everything) == np.arange(1, pool.capacity + 1)).all(),
        f"{name}s: virtual ids are lost, or in two places",
    )
    only_tickets = np.flatnonzero((awaiting > 0) & (awaiting == pool.references))
    _require((pool.awaiting() == only_tickets).all(), f"{name}s: awaiting differs from what only tickets hold")


def _check_partition(pool: Pool, live: Int64Array) -> None:
    """Each rank of the extent is free or live, none is both, none lies outside."""
    name = pool.kind
    seen = np.zeros(pool.capacity, dtype=np.int64)
    _require(len(live) == 0 or (live.min() >= 0 and live.max() < pool.extent), f"a live {name} lies outside the extent")
    np.add.at(seen, live, 1)
    np.add.at(seen, pool.free.reserve[: pool.free.top], 1)
    seen += pool.free.map
    wrong = np.flatnonzero(seen[: pool.extent] != 1)
    _require(not len(wrong), f"{name}s: ranks {wrong[:4]} are neither free nor live, or more than one of them")
    _require(not seen[pool.extent :].any(), f"a {name} beyond the extent is free or live")
    free = int(np.count_nonzero(pool.free.map)) + pool.free.top
    _require(pool.free.count == free, f"{name}s: free {pool.free.count}, counted {free}")
    _require(not pool.free.map[: pool.free.hint].any(), f"{name}s: a free rank lies below the hint")
    inside = pool.floor <= pool.extent <= pool.capacity
    _require(inside, f"{name}s: extent {pool.extent} outside {pool.floor} to {pool.capacity}")


def _check_bytes(ledger: Ledger) -> None:
    """Byte ranges in a lane, from the raw physical ids of both pools."""
    space = ledger.space
    layout = space.layout
    _require(layout.fits(space.pages.extent, space.slots.extent), "the extents of the pools overlap")
    begins, ends = [], []
    for pool in space.pools:
        physical = np.sort(pool.physical[pool.references > 0].astype(np.int64))
        begins.append(physical * pool.unit_bytes)
        ends.append((physical + 1) * pool.unit_bytes)
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    _require((begin[1:] >= end[:-1]).all(), "two live units overlap in bytes")
    null = layout.null_bytes // layout.lane_count
    inside = len(begin) == 0 or (begin[0] >= null and end.max() <= layout.lane_bytes)
    _require(inside, "a unit lies in the null area or past the lane")


def _check_rows(ledger: Ledger) -> None:
    table = ledger.table
    rows = table.live_rows()
    live = np.zeros(table.max_rows, dtype=bool)
    live[rows] = True
    _require(sorted(table._free) == np.flatnonzero(~live).tolist(), "free rows differ from rows without a handle")
    lengths = table.length
    columns = ledger.columns_for(lengths[rows])
    _require((table.column_counts(rows) == columns).all(), "columns differ from ceil(length / page_tokens)")
    steps = table.begin[rows], table.mark[rows], lengths[rows]
    _require((steps[0] <= steps[1]).all() and (steps[1] <= steps[2]).all(), "pending tokens begin behind their end")
    _require(lengths.max(initial=0) <= min(table.max_tokens, table.longest), "a sequence is longer than its row")
    place, first, last = np.arange(table.row_width), table.front, table.next_cell - table.first_cell
    inside = (place >= first[:, None]) & (place < last[:, None])
    _require(((table.block_table > 0) == inside).all(), "a row has pages outside its columns, or none inside")
    for row in rows.tolist():
        cursor = table.cursor_at(row, int(lengths[row]))
        _require(table.cursor[row] == cursor, f"row {row}: cursor {table.cursor[row]}, last token {cursor}")
    for array in (lengths, table.begin, table.mark, table.slot, table.front):
        _require(not array[~live].any(), "a row without a sequence holds something")
    _require((table.slot[rows] > 0).all() if ledger.has_slots else not table.slot.any(), "sequences and slots differ")
    _require(table.flagged == np.count_nonzero(table.tail_shared), f"flagged {table.flagged}, counted otherwise")
    tail = lengths % table.page_tokens > 0
    _require(not (table.tail_shared & ~(tail & live)).any(), "a row without a partly filled tail is flagged")
    writers = Counter(
        table.tail(row) for row in rows[tail[rows] & ~table.tail_shared[rows]].tolist() if table.row_width
    )
    _require(all(count == 1 for count in writers.values()), "two sequences may append into one page")


# -- digest --------------------------------------------------------------------------------------------------------


def digest(ledger: Ledger) -> str:
    """32 hexadecimal digits over all tables that decide what happens next."""
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(ledger):
        array = np.ascontiguousarray(part)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def _parts(ledger: Ledger) -> Iterable[NDArray[np.generic]]:
    for pool in ledger.space.pools:
        yield np.array([pool.extent, pool.floor, pool.live, pool.extra_references, pool.free.count])
        yield from (pool.physical, pool.references, pool.loose, pool.generation, pool.unbound[: pool.spare])
        yield pool.free.map
        yield pool.free.reserve[: pool.free.top]
        yield np.array(sorted(pool.pins.items()), dtype=np.int64)
        for ticket in sorted(pool.tickets):
            yield np.concatenate([[ticket], *pool.tickets[ticket]])
    yield np.array([ledger.space.retired])
    table = ledger.table
    yield from (table.cursor, table.length, table.begin, table.mark, table.next_cell, table.block_table)
    yield from (table.front, table.slot, table.window)
    yield from (table.tail_shared, table.handle, table.generation, np.array(sorted(table._free), dtype=np.int64))
    for row in table.live_rows().tolist():
        yield np.array([h for h in table.history[row] if h in ledger.snapshots], dtype=np.int64)
    for handle, snapshot in sorted(ledger.snapshots.items()):
        yield np.array([handle, snapshot.position, snapshot.slot, snapshot.front, snapshot.window])
        yield snapshot.pages
        yield np.array([h for h in snapshot.lineage if h in ledger.snapshots], dtype=np.int64)
    for handle, swapped in sorted(ledger.swapped.items()):
        yield np.array([handle, swapped.length, swapped.columns, swapped.front, swapped.window, swapped.has_slot])
        yield np.array([h for h in swapped.history if h in ledger.snapshots], dtype=np.int64)
    yield np.array([ledger.issued], dtype=np.int64)
