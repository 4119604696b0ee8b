"""Sequences as rows of preallocated arrays: lengths, block-table rows, state slots, pending tokens.

A sequence keeps its row for life. Nothing here knows where a page lies; the ids in the tables are virtual.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.dirty_entries import DirtyEntries
from avmp.errors import InvalidArgument, StaleHandle
from avmp.handles import (
    GENERATION_MASK,
    ID_MASK,
    KIND_SHIFT,
    SEQUENCE,
    Handles,
    Int64Array,
    as_handles,
    describe_handle,
    make_handle,
)

Rows: TypeAlias = "slice | Int64Array"
"""Rows of the tables: a slice where they are consecutive (numpy then makes views), else int64 ids."""

NO_WINDOW = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Snapshot:
    """A position to go back to: one slot of its own, and references to the pages that it reads.

    ``pages`` are virtual ids, int64, one per block-table column, 0 where ``release_front`` had taken a column away.
    ``front`` and ``window`` are those of its sequence at that time (see SequenceTable). ``lineage`` holds the
    snapshots that lay before this one on its sequence's history, oldest first: each of them is a prefix of this one.
    """

    position: int
    slot: int
    pages: Int64Array
    front: int
    window: int
    lineage: tuple[int, ...]


@dataclass(frozen=True)
class Swapped:
    """A sequence whose bytes are in host memory: how many pages and slots to bring back, and its row's integers
    (see SequenceTable)."""

    length: int
    columns: int
    front: int
    window: int
    has_slot: bool
    history: tuple[int, ...]


class SequenceTable:
    """All rows. Each array has one entry per row; int64 unless said otherwise:

    * ``cursor``: virtual token slot of the last token, ``page * page_tokens + offset``; the next token needs a new
      page exactly if ``(cursor + 1) % page_tokens == 0`` (-1 for an empty sequence);
    * ``length``: tokens that have room, those of the coming step included;
    * ``begin``, ``mark``: the pending tokens. ``mark`` is the length at the last ``batch``. As long as it differs
      from the length, the tokens from ``mark`` on are pending; once they are equal, those from ``begin`` on are;
    * ``next_cell``: where in ``cells`` the next page goes, ``row * row_width + ceil(length / page_tokens)``;
    * ``front`` (int32): columns that ``release_front`` has given up; they stay, as 0;
    * ``window``: how many tokens before the next one are still read, at most: what the calls of ``release_front``
      have left in front of the then last token; NO_WINDOW where all are read;
    * ``slot`` (int32): virtual id of the state slot, 0 where there are no state layers;
    * ``handle``: the present handle, 0 for a free row; ``generation`` (int32): which life of the row it is;
    * ``tail_shared`` (bool): the row may append into a page that others hold too; ``flagged`` counts these rows.

    ``block_table`` is int32 ``[max_rows, row_width]``, ``cells`` the same memory in one dimension and ``first_cell``
    where each row begins in it. ``longest`` is an upper bound of all lengths. ``history[row]`` are the snapshots that
    hold a prefix of what the row holds, oldest first; dropped ones are skipped by whoever reads it.
    """

    def __init__(self, max_rows: int, row_width: int, page_tokens: int, max_tokens: int) -> None:
        self.max_rows, self.row_width, self.page_tokens = max_rows, row_width, page_tokens
        self.max_tokens = max_tokens
        self.cursor: Int64Array = np.full(max_rows, -1, dtype=np.int64)
        self.length: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.begin: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.mark: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.longest = 0
        self.block_table: NDArray[np.int32] = np.zeros((max_rows, row_width), dtype=np.int32)
        self.cells = self.block_table.reshape(-1)
        self.first_cell: Int64Array = np.arange(max_rows, dtype=np.int64) * row_width
        self.next_cell = self.first_cell.copy()
        self.front: NDArray[np.int32] = np.zeros(max_rows, dtype=np.int32)
        self.slot: NDArray[np.int32] = np.zeros(max_rows, dtype=np.int32)
        self.window: Int64Array = np.full(max_rows, NO_WINDOW, dtype=np.int64)
        self.tail_shared: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.flagged = 0
        self.handle: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.generation: NDArray[np.int32] = np.zeros(max_rows, dtype=np.int32)
        self.history: list[tuple[int, ...]] = [()] * max_rows
        self.dirty = DirtyEntries(max_rows * row_width)
        self._free = list(range(max_rows))
        self._known: dict[bytes, Rows] = {}
        # Scalar access through a memoryview costs a third of what it costs through numpy.
        self._cursor, self._length = memoryview(self.cursor), memoryview(self.length)
        self._begin, self._mark = memoryview(self.begin), memoryview(self.mark)
        self._next_cell, self._front = memoryview(self.next_cell), memoryview(self.front)
        self._slot, self._window = memoryview(self.slot), memoryview(self.window)
        self._handle, self._generation = memoryview(self.handle), memoryview(self.generation)

    @property
    def free_rows(self) -> int:
        """Rows that no sequence has."""
        return len(self._free)

    @property
    def table_bytes(self) -> int:
        """Bytes of host memory beside the block table."""
        counts = (self.cursor, self.length, self.begin, self.mark, self.first_cell, self.next_cell, self.window)
        others = (self.front, self.slot, self.tail_shared, self.handle, self.generation)
        return sum(array.nbytes for array in counts + others)

    # -- handles to rows -------------------------------------------------------------------------------------------

    def rows(self, sequences: Handles) -> Rows:
        """Rows of distinct live sequences, in the given order.

        Raises StaleHandle for a handle that is not a live sequence, InvalidArgument where one comes twice. The
        answer for the last few batches is kept until a row is released: a decoding engine asks for the same ones.
        """
        if isinstance(sequences, (int, np.integer)):
            row = self.row(sequences)
            return slice(row, row + 1)
        handles = as_handles(sequences)
        if len(handles) == 1:
            return self.rows(handles[0])
        key = handles.tobytes()
        known = self._known.get(key)
        if known is None:
            known = self._look_up(handles)
            if len(self._known) >= 8:
                self._known.clear()
            self._known[key] = known
        return known

    def _look_up(self, handles: Int64Array) -> Rows:
        rows = handles & ID_MASK
        inside = (handles > 0) & (rows < self.max_rows)
        good = inside & (self.handle[np.where(inside, rows, 0)] == handles)
        if not good.all():
            raise StaleHandle(self._explain(int(handles[np.argmin(good)])))
        if len(rows) and (rows[1:] == rows[:-1] + 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        ordered = np.sort(rows)
        if (ordered[1:] == ordered[:-1]).any():
            raise InvalidArgument("a sequence is named twice in one call; expected distinct sequences")
        rows.flags.writeable = False  # kept, and handed out with batches
        return rows

    def row(self, sequence: int | np.integer) -> int:
        """The row of one live sequence; raises as ``rows`` does."""
        if not isinstance(sequence, (int, np.integer)):
            raise InvalidArgument(f"{sequence!r}: expected the integer handle of one sequence")
        handle = int(sequence)
        row = handle & ID_MASK
        if handle <= 0 or row >= self.max_rows or self._handle[row] != handle:
            raise StaleHandle(self._explain(handle))
        return row

    def _explain(self, handle: int) -> str:
        what, row = describe_handle(handle), handle & ID_MASK
        if handle <= 0 or handle >> KIND_SHIFT != SEQUENCE or row >= self.max_rows:
            return f"{what} is foreign: expected a sequence of this allocator"
        if handle >> 32 & GENERATION_MASK >= self._generation[row] + (self._handle[row] != 0):
            return f"{what} is foreign: this allocator has not handed it out"
        return f"{what} is stale: it was released or swapped out"

    def count(self, rows: Rows) -> int:
        """How many rows these are."""
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def ids(self, rows: Rows) -> Int64Array:
        """The same rows as int64 ids."""
        return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

    # -- rows coming and going -------------------------------------------------------------------------------------

    def occupy(self, count: int) -> list[int]:
        """Takes the ``count`` lowest free rows and gives each a new handle. There are enough."""
        rows = [heapq.heappop(self._free) for _ in range(count)]
        for row in rows:
            self._handle[row] = make_handle(SEQUENCE, row, self._generation[row])
        return rows

    def handles(self, rows: list[int]) -> Int64Array:
        """The present handles of these rows, int64."""
        return np.array([self._handle[row] for row in rows], dtype=np.int64)

    def vacate(self, row: int) -> Int64Array:
        """The row's sequence is gone: its handle is stale and its table entries are 0. Returns the virtual ids of
        its pages; what becomes of them and of its slot is the caller's business."""
        pages = self.cut(row, 0)
        self.reset(row)
        self._slot[row] = 0
        self._handle[row] = 0
        self._generation[row] = self._generation[row] + 1 & GENERATION_MASK
        heapq.heappush(self._free, row)
        self._known.clear()
        return pages

    def reset(self, row: int) -> None:
        """An empty sequence in this row, whose columns are gone already: no tokens, no history. The slot stays."""
        self._cursor[row] = -1
        self._length[row] = self._begin[row] = self._mark[row] = self._front[row] = 0
        self._window[row] = NO_WINDOW
        self.history[row] = ()
        if self.flagged:
            self.flag(row, False)

    def live_rows(self) -> Int64Array:
        """Rows in use, int64, ascending."""
        return np.flatnonzero(self.handle)

    # -- pages -----------------------------------------------------------------------------------------------------

    def column_counts(self, rows: Int64Array) -> Int64Array:
        """Block-table columns of each row, those given up included, int64."""
        return self.next_cell[rows] - self.first_cell[rows]

    def flag(self, row: int, shared: bool) -> None:
        """Whether this row may append into a tail page that others hold too: its next extend then looks."""
        self.flagged += int(shared) - int(self.tail_shared[row])
        self.tail_shared[row] = shared

    def pages(self, row: int) -> Int64Array:
        """Virtual ids of the row's columns, int64, 0 where a column was given up."""
        return self.cells[row * self.row_width : self._next_cell[row]].astype(np.int64)

    def tail(self, row: int) -> int:
        """Virtual id of the row's last column, which exists."""
        return int(self.cells[self._next_cell[row] - 1])

    def set_pages(self, row: int, pages: Int64Array, front: int = 0) -> None:
        """The row's columns are ``pages`` from now on; entries behind them must be 0 already."""
        first = row * self.row_width
        self.cells[first : first + len(pages)] = pages
        self._next_cell[row] = first + len(pages)
        self._front[row] = front
        self.dirty.add_range(first, first + len(pages))

    def cut(self, row: int, columns: int) -> Int64Array:
        """Takes away all columns from ``columns`` on; returns the virtual ids that were there, 0 left out."""
        first, last = row * self.row_width + columns, self._next_cell[row]
        if first >= last:
            return np.empty(0, dtype=np.int64)
        pages = self.cells[first:last].astype(np.int64)
        self.cells[first:last] = 0
        self._next_cell[row] = first
        self.dirty.add_range(first, last)
        return pages[pages > 0] if self._front[row] else pages

    def length_of(self, row: int) -> int:
        """Tokens in this row."""
        return self._length[row]

    def column_count(self, row: int) -> int:
        """Block-table columns of this row, those given up included."""
        return self._next_cell[row] - row * self.row_width

    def append_pages(self, row: int, pages: Int64Array) -> None:
        """More columns for this row."""
        first = self._next_cell[row]
        self.cells[first : first + len(pages)] = pages
        self._next_cell[row] = first + len(pages)
        self.dirty.add_range(first, first + len(pages))

    def grow_length(self, row: int, length: int) -> None:
        """More tokens, which are pending; the columns already fit. Where `batch` has taken up what was pending, a
        new step begins."""
        if self._mark[row] == self._length[row]:
            self._begin[row] = self._mark[row]
        self._cursor[row] = self.cursor_at(row, length)
        self._length[row] = length
        if length > self.longest:
            self.longest = length

    def set_length(self, row: int, length: int) -> None:
        """Length, with nothing pending; the columns already fit it."""
        self._cursor[row] = self.cursor_at(row, length)
        self._length[row] = self._begin[row] = self._mark[row] = length
        if length > self.longest:
            self.longest = length

    def cursor_at(self, row: int, length: int) -> int:
        """Virtual token slot of token ``length - 1`` of this row, -1 for length 0."""
        if length == 0 or self.row_width == 0:
            return -1
        column, offset = divmod(length - 1, self.page_tokens)
        return int(self.cells[row * self.row_width + column]) * self.page_tokens + offset

    def set_cursors(self, rows: Int64Array) -> None:
        """Recomputes the cursor of each row from its length and columns."""
        if self.row_width == 0:
            return
        last = self.length[rows] - 1
        page = self.cells[np.maximum(self.next_cell[rows] - 1, 0)].astype(np.int64)
        self.cursor[rows] = np.where(last < 0, -1, page * self.page_tokens + last % self.page_tokens)
