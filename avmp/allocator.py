"""The allocator: every operation on sequences, snapshots, pages and slots, all of them whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from avmp import growth, verifier
from avmp.address_space import AddressSpace, Disturbance, Event
from avmp.batch_tables import BatchTables, make_batch
from avmp.effects import Launch, TableChanges
from avmp.errors import Inconsistent, InvalidArgument, RowsExhausted, RowTooLong
from avmp.geometry import Geometry
from avmp.growth import Counts, Prefixes
from avmp.handles import KIND_SHIFT, NOTHING, PAGE, Handles, Int64Array, as_count
from avmp.layout import Layout
from avmp.ledger import Ledger, Planned
from avmp.operations import plan
from avmp.options import Options
from avmp.sequences import Rows, SequenceTable
from avmp.startup import longest_sequence
from avmp.statistics import Statistics, statistics_of
from avmp.units import largest

Result = TypeVar("Result")


class Allocator:
    """Decides where KV pages and state slots lie, and moves capacity between the two when an allocation would fail.

    It touches no device memory: what a device has to do is kept as effects (``drain``). All ids it hands out are
    virtual. Sequences, pages, slots and snapshots are named by handles (see handles.py); wherever sequences are
    taken, one handle or any number of them will do, in any order, each once.

    Every operation is checked and counted before it changes anything. It raises, with the numbers, and leaves
    every table as it was: InvalidArgument, StaleHandle, OutOfMemory (the bytes are not there, or pins, tickets or
    floors hold them back), RowsExhausted and RowTooLong (limits of the tables).
    """

    def __init__(
        self,
        geometry: Geometry | Layout,
        memory: int | str | None = None,
        *,
        max_rows: int = 256,
        max_tokens_per_sequence: int | None = None,
        options: Options | None = None,
        disturbance: Disturbance | None = None,
    ) -> None:
        """An arena of ``memory`` (bytes or "8GiB") for a geometry, or one laid out already.

        ``max_rows`` is the number of sequences at once. ``max_tokens_per_sequence``, rounded up to whole pages,
        defaults to the smaller of the model's ``max_position_embeddings`` and what fits. Raises ArenaTooSmall if
        one such sequence, beside the floors, does not fit.
        """
        if isinstance(geometry, Layout):
            if memory is not None:
                raise InvalidArgument("memory is part of a Layout; give a Geometry and memory, or a Layout alone")
            layout = geometry
        elif memory is None:
            raise InvalidArgument("memory is missing: give a number of bytes, or a size like '8GiB'")
        else:
            layout = Layout.plan(geometry, memory)
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise InvalidArgument(f"max_rows={max_rows!r}: expected at least 1")
        self.layout = layout
        self.options = options or Options()
        tokens = longest_sequence(layout, self.options, max_tokens_per_sequence)
        width = layout.pages_per_sequence(tokens)
        table = SequenceTable(max_rows, width, layout.page_tokens, width * layout.page_tokens or tokens)
        table.dirty.enabled = self.options.record_effects
        self._ledger = Ledger(AddressSpace(layout, self.options, disturbance), table)
        self._space.releasable = self.releasable
        self._owner = threading.get_ident()
        self._committing = False
        tokens_per_page = layout.page_tokens
        self._offset_mask = tokens_per_page - 1 if tokens_per_page & (tokens_per_page - 1) == 0 else 0
        quick, plain = disturbance is None and not self.options.debug, self._space.plain
        self._hot = quick and layout.has_pages
        self._quick_pages = self._space.pages if quick and plain["page"] else None
        self._quick_slots = self._space.slots if quick and plain["slot"] else None

    @property
    def _space(self) -> AddressSpace:
        return self._ledger.space

    @property
    def max_rows(self) -> int:
        """Sequences at once."""
        return self._ledger.table.max_rows

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens that one sequence can have."""
        return self._ledger.max_tokens

    # -- sequences -------------------------------------------------------------------------------------------------

    def admit(self, token_counts: Iterable[int], prefix: Prefixes = None) -> Int64Array:
        """New sequences with room for ``token_counts`` tokens in all and one state slot each; their handles, int64.

        ``prefix`` is what they start from: a snapshot or a ``Prefix`` for all of them, or one (or None) for each.
        The tokens of the prefix are part of the count. Its pages are shared; where it ends inside a page, whoever
        appends first copies that page. Raises OutOfMemory, RowsExhausted, RowTooLong.
        """
        handles: Int64Array = self._run("admit", token_counts, prefix)
        return handles

    def extend(self, sequences: Handles, counts: Counts = 1) -> None:
        """Room for ``counts`` more tokens (one integer, or one for each sequence). Raises OutOfMemory, RowTooLong."""
        table = self._ledger.table
        rows = table.rows(sequences)
        if type(counts) is int and counts == 1 and self._hot and not table.flagged:
            self._extend_by_one(rows)
        else:
            self._require_whole()
            self._commit("extend", growth.plan_extend(self._ledger, table.ids(rows), counts))

    def _extend_by_one(self, rows: Rows) -> None:
        """``extend`` where each row grows by one token and no tail is shared: the decoding step. Numpy calls, about
        half a microsecond each, are what it costs; they do not grow in number with the batch."""
        table, space = self._ledger.table, self._space
        if self._committing:
            self._require_whole()
        cursor = table.cursor[rows] + 1
        length = table.length[rows] + 1
        offset = cursor & self._offset_mask if self._offset_mask else cursor % table.page_tokens
        full = (offset == 0).nonzero()[0]
        count = len(full)
        if table.longest >= table.max_tokens:
            table.longest = int(table.length.max())
            self._ledger.require_width("extend", int(length.max(initial=0)))
        if count > space.pages.free.count:
            space.require("extend", count, 0)
        self._committing = True
        if count:
            if count > space.pages.free.count:
                space.make_room(count, 0)
            where = full + rows.start if isinstance(rows, slice) else rows[full]
            cells = table.next_cell[where]
            pages = space.bind(space.pages, count)
            table.cells[cells] = pages
            table.dirty.add(cells)
            table.next_cell[where] = cells + 1
            cursor[full] = pages * table.page_tokens
        table.cursor[rows] = cursor
        table.length[rows] = length
        table.longest += 1
        self._committing = False

    def release(self, sequences: Handles, after: int | None = None) -> None:
        """The sequences are gone. Their pages and slots are free at once, or, with a ticket ``after``, stay bound,
        neither free nor movable, until ``retire(after)``: for steps and copies still under way."""
        self._run("release", sequences, after)

    def retire(self, ticket: int) -> None:
        """Everything up to step ``ticket`` has finished: what tickets up to it hold becomes free."""
        self._run("retire", ticket)

    def release_front(self, sequences: Handles, tokens: Counts) -> None:
        """A sliding window has left the first ``tokens`` tokens behind: their whole pages are given up. Their
        columns stay, as 0."""
        self._run("release_front", sequences, tokens)

    def fork(self, sequence: int, n: int = 1) -> Int64Array:
        """``n`` new sequences equal to this one, int64 handles: full pages are shared, a partly filled tail page
        and the state slot are copied at once. Nothing is pending afterwards, in the parent neither. Raises OutOfMemory,
        RowsExhausted."""
        handles: Int64Array = self._run("fork", sequence, n)
        return handles

    def reorder(self, sequences: Handles, parents: Iterable[int]) -> None:
        """Beam search: sequence i goes on from what sequence ``parents[i]`` (an index into ``sequences``) was.

        One child of each parent takes over its pages and slot; the others share full pages and copy the tail and
        the slot. What has no child is let go of first. Nothing is pending afterwards. Raises OutOfMemory.
        """
        self._run("reorder", sequences, parents)

    # -- snapshots -------------------------------------------------------------------------------------------------

    @overload
    def snapshot(self, sequence: int) -> int: ...
    @overload
    def snapshot(self, sequence: Iterable[int]) -> Int64Array: ...
    def snapshot(self, sequence: Any) -> Any:
        """A position to come back to: one slot of its own, and references to the sequence's pages. Yields a handle
        for one sequence, int64 handles for several. It outlives its sequence. Raises OutOfMemory."""
        handles = self._run("snapshot", sequence)
        return int(handles[0]) if isinstance(sequence, (int, np.integer)) else handles

    def restore(self, sequence: int, snapshot: int) -> None:
        """The sequence becomes what the snapshot holds, whatever it was before."""
        self._run("restore", sequence, snapshot)

    def drop(self, snapshots: Handles) -> None:
        """The snapshots are gone, from the histories of all sequences too."""
        self._run("drop", snapshots)

    @overload
    def truncate(self, sequence: int, length: int) -> int: ...
    @overload
    def truncate(self, sequence: Iterable[int], length: Iterable[int]) -> Int64Array: ...
    def truncate(self, sequence: Any, length: Any) -> Any:
        """Goes back to at most ``length`` tokens; yields the position reached (for one sequence, or for each).

        Without state layers that is ``length``. With them it is the latest snapshot on the sequence's present
        history not after ``length``, else 0 with the state zeroed. The present history of a sequence is the live
        snapshots that hold a prefix of what it holds now: taken of it, or before a snapshot it was restored from.
        Pages beyond are let go of. A length equal to the present one changes nothing. Never allocates.
        """
        reached = self._run("truncate", sequence, length)
        return int(reached[0]) if isinstance(sequence, (int, np.integer)) else reached

    # -- swapping --------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: Handles) -> Int64Array:
        """The sequences leave for host memory; int64 handles to bring them back with, or to ``discard``."""
        handles: Int64Array = self._run("swap_out", sequences)
        return handles

    def swap_in(self, swapped: Handles) -> Int64Array:
        """They are back, byte for byte, with new sequence handles (int64, in the same order). Raises OutOfMemory,
        RowsExhausted."""
        handles: Int64Array = self._run("swap_in", swapped)
        return handles

    def discard(self, swapped: Handles) -> None:
        """These swapped sequences will not come back."""
        self._run("discard", swapped)

    # -- raw pages and slots ---------------------------------------------------------------------------------------

    @overload
    def take(self, kind: str) -> int: ...
    @overload
    def take(self, kind: str, n: int) -> Int64Array: ...
    def take(self, kind: str, n: int | None = None) -> int | Int64Array:
        """``n`` pages or slots (``kind`` is ``"page"`` or ``"slot"``) that the caller's handles hold, int64; without
        ``n`` one of them, as an integer. Raises OutOfMemory."""
        if n is None:
            pool = self._quick_pages if kind == "page" else self._quick_slots if kind == "slot" else None
            if pool is not None and pool.free.count and not self._committing:
                try:
                    handle: int = pool.take_one(1)
                    return handle
                except BaseException:
                    self._committing = True
                    raise
        taken: Int64Array = self._run("take", kind, 1 if n is None else n)
        return int(taken[0]) if n is None else taken

    def give(self, handles: Handles) -> None:
        """Gives back what ``take`` or ``retain`` holds; units that nobody else holds become free."""
        if type(handles) is int and not self._committing:
            pool = self._quick_pages if handles >> KIND_SHIFT == PAGE else self._quick_slots
            try:
                if pool is not None and pool.give_one(handles):
                    return
            except BaseException:
                self._committing = True
                raise
        self._run("give", handles)

    def retain(self, handles: Handles) -> None:
        """One more holder for each page or slot, to be undone with ``give``: for prefix caches. A sequence that
        appends into a page held like this goes on writing in place, unless it got the page from a prefix."""
        self._run("retain", handles)

    def pin(self, handles: Handles) -> None:
        """Each unit stays where it is, and bound, until ``unpin``: for readers by physical id. A pin is a holder."""
        self._run("pin", handles)

    def unpin(self, handles: Handles) -> None:
        """Undoes one ``pin`` of each."""
        self._run("unpin", handles)

    def pages(self, sequence: int) -> Int64Array:
        """Handles, int64, of the sequence's pages by block-table column; 0 where ``release_front`` took one."""
        return self._space.pages.handles(self._ledger.table.pages(self._ledger.table.row(sequence)))

    def slot(self, sequence: int) -> int:
        """Handle of the sequence's state slot; 0 without state layers."""
        slot = int(self._ledger.table.slot[self._ledger.table.row(sequence)])
        return self._space.slots.handle_of(slot) if slot else 0

    # -- exact answers ---------------------------------------------------------------------------------------------

    def fits(self, operation: str, *arguments: Any, **keywords: Any) -> bool:
        """Whether the operation of that name would succeed with these arguments now. Bad arguments raise."""
        self._require_whole()
        try:
            planned = plan(self._ledger, operation, *arguments, **keywords)
        except (RowsExhausted, RowTooLong):
            return False
        return self._space.possible(planned.pages - planned.freed_pages, planned.slots - planned.freed_slots)

    def max_sequences(self, tokens: int) -> int:
        """The largest n for which ``admit([tokens] * n)`` would succeed now."""
        self._require_whole()
        each = as_count(tokens, "max_sequences: tokens")
        if each > self.max_tokens_per_sequence:
            return 0
        pages, slots = self.layout.pages_per_sequence(each), int(self.layout.has_slots)
        return largest(self._ledger.table.free_rows, lambda n: self._space.possible(n * pages, n * slots))

    def max_tokens(self, sequences: int = 1) -> int:
        """The largest t for which ``admit([t] * sequences)`` would succeed now; 0 also where not even empty
        sequences can be admitted (``fits`` tells)."""
        self._require_whole()
        count = as_count(sequences, "max_tokens: sequences")
        slots = count * int(self.layout.has_slots)
        if count > self._ledger.table.free_rows or not self._space.possible(0, slots):
            return 0
        if not self.layout.has_pages:
            return self.max_tokens_per_sequence
        columns = largest(self._ledger.table.row_width, lambda c: self._space.possible(count * c, slots))
        return columns * self.layout.page_tokens

    def releasable(self, sequences: Handles) -> tuple[int, int]:
        """Pages and slots that releasing these sequences would free."""
        pages, slots = growth.held_by(self._ledger, self._ids(sequences))
        return self._space.pages.freed_by(pages), self._space.slots.freed_by(slots)

    # -- tables ----------------------------------------------------------------------------------------------------

    def batch(self, sequences: Handles, query_lens: Counts | None = None, pad_to: int | None = None) -> BatchTables:
        """This step's tables, rows in the given order, virtual ids throughout.

        Query lengths default to each sequence's pending tokens: all that admit (beyond a prefix) and extend have
        added since the first of them after its previous ``batch``. Asking again gives the same answer. ``pad_to``
        adds rows of zeros behind.
        """
        self._require_whole()
        tables, begin = make_batch(self._ledger, self._rows(sequences), query_lens, pad_to)
        self._take_up(tables, begin)
        return tables

    def _take_up(self, tables: BatchTables, begin: Int64Array) -> None:
        """The pending tokens of a batch are taken up: what is added from now on is the next step's."""
        table = self._ledger.table
        self._committing = True
        table.begin[tables.rows] = begin
        table.mark[tables.rows] = table.length[tables.rows]
        self._committing = False

    def lengths(self, sequences: Handles) -> Int64Array:
        """Tokens in each sequence, int64: a copy."""
        return self._ledger.table.length[self._ids(sequences)]

    def slot_mapping(self, sequences: Handles) -> Int64Array:
        """Virtual token slot, ``page * page_tokens + offset``, of each sequence's last token, int64; -1 without one,
        below page_tokens where ``release_front`` has given up its page."""
        return self._ledger.table.cursor[self._rows(sequences)].copy()

    def block_table(self, sequences: Handles) -> NDArray[np.int32]:
        """Block-table rows, int32 ``[sequences, row_width]``, read-only: a view where the rows are consecutive."""
        rows = self._ledger.table.block_table[self._rows(sequences)]
        rows.flags.writeable = False
        return rows

    def drain(self) -> tuple[list[Launch], TableChanges]:
        """What the device has to do since the last call: data effects in order, then the final values of all table
        entries that changed."""
        self._require_whole()
        self._committing = True
        drained = self._drain()
        self._committing = False
        return drained

    def _drain(self, cells_too: bool = True) -> tuple[list[Launch], TableChanges]:
        space, table = self._space, self._ledger.table
        launches = space.effects.drain()
        pages, slots = space.pages.drain_dirty(), space.slots.drain_dirty()
        if not self.options.record_effects:
            pages = slots = NOTHING
        cells = table.dirty.drain() if cells_too else NOTHING
        changes = TableChanges(
            page_ids=pages,
            page_values=space.pages.physical[pages],
            slot_ids=slots,
            slot_values=space.slots.physical[slots],
            cells=cells,
            cell_values=table.cells[cells],
        )
        return launches, changes

    # -- looking inside --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verifies every table from the raw arrays; raises Inconsistent with the first contradiction."""
        verifier.check(self._ledger)

    def digest(self) -> str:
        """A stable hash of everything that decides future placements: equal after equal calls, in any process."""
        return verifier.digest(self._ledger)

    def stats(self) -> Statistics:
        """Counters and present use; see ``Statistics``."""
        return statistics_of(self._ledger)

    def events(self) -> list[Event]:
        """The events since the last call, in order; needs ``Options(events=True)``."""
        if self._space.events is None:
            raise InvalidArgument("events are off; make the allocator with Options(events=True)")
        events, self._space.events = self._space.events, []
        return events

    # -- running an operation --------------------------------------------------------------------------------------

    def _rows(self, sequences: Handles) -> Rows:
        return self._ledger.table.rows(sequences)

    def _ids(self, sequences: Handles) -> Int64Array:
        return self._ledger.table.ids(self._ledger.table.rows(sequences))

    def _run(self, operation: str, *arguments: Any) -> Any:
        self._require_whole()
        return self._commit(operation, plan(self._ledger, operation, *arguments))

    def _commit(self, operation: str, planned: Planned[Result]) -> Result:
        self._space.require(operation, planned.pages, planned.slots, planned.freed_pages, planned.freed_slots)
        self._committing = True
        if planned.release is not None:
            planned.release()
        self._space.make_room(planned.pages, planned.slots)
        result = planned.commit()
        self._committing = False
        if self.options.debug >= 2:
            self.check()
        return result

    def _require_whole(self) -> None:
        """Refuses to go on after a commit that an interrupt tore, and calls from another thread."""
        if self._committing:
            raise Inconsistent("an earlier operation was interrupted while it committed; make a new allocator")
        if self.options.debug and threading.get_ident() != self._owner:
            raise InvalidArgument("an allocator belongs to the thread that made it; this call comes from another")
