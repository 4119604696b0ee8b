"""One pool of equal units (pages, or state slots): who holds them, where they lie, which are free.

A unit has a **virtual id**, which never changes while it is held, and a **physical id**, which a migration may
change. Everything outside this file and the effects speaks of virtual ids.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.errors import StaleHandle
from avmp.free_ranks import FreeRanks
from avmp.handles import (
    GENERATION_MASK,
    ID_MASK,
    KIND_SHIFT,
    NOTHING,
    PAGE,
    SLOT,
    Int64Array,
    Kind,
    describe_handle,
    make_handle,
)

Int32Array: TypeAlias = NDArray[np.int32]


class Pool:
    """One pool. Which kind it is makes no difference beyond its direction in the lane.

    ``unit_count`` physical ids fit into a lane; those below ``first`` are null and belong to nobody. The pool owns
    the ``extent`` units nearest its own end. A unit of rank r (0 is nearest that end) has the physical id
    ``origin + step * r``.

    Invariants: every unit of the extent is free or held, and ``free.count`` of them are free; the physical ids of held
    units are distinct and outside the null area; ``references[v]`` is the number of holders of v, 0 if v is
    not bound, and ``physical[v]`` is 0 then; ``extra_references == sum(references) - live``;
    ``unbound[:spare]`` are the virtual ids that are not bound. Virtual id 0 is physical 0 for ever.

    ``dirty`` marks the virtual ids whose entry in ``physical``, the page table, has changed since ``drain_dirty``.

    There is no table from physical to virtual: only a migration asks, and finds the owners of a band by one pass
    over ``physical`` (``virtual_at``), which costs less than keeping such a table up to date.
    """

    def __init__(self, kind: Kind, unit_count: int, first: int, unit_bytes: int, lane_count: int) -> None:
        self.kind: Kind = kind
        self.unit_bytes, self.total_bytes = unit_bytes, unit_bytes * lane_count
        self.unit_count = unit_count
        self.first = first
        self.capacity = max(unit_count - first, 0)
        self.origin, self.step = (unit_count - 1, -1) if kind == "page" else (first, 1)
        self.extent = 0
        self.floor = 0
        self.extra_references = 0
        self.free = FreeRanks(self.capacity)
        self.physical: Int32Array = np.zeros(self.capacity + 1, dtype=np.int32)
        self.references: Int32Array = np.zeros(self.capacity + 1, dtype=np.int32)
        self.loose: Int32Array = np.zeros(self.capacity + 1, dtype=np.int32)
        self.generation: Int32Array = np.zeros(self.capacity + 1, dtype=np.int32)
        self.unbound: Int32Array = np.arange(self.capacity, 0, -1, dtype=np.int32)
        self.spare = self.capacity
        self.pins: Counter[int] = Counter()
        self.tickets: dict[int, list[Int64Array]] = {}
        self._dirty = bytearray(self.capacity + 1)
        self.dirty: NDArray[np.bool_] = np.frombuffer(self._dirty, dtype=np.bool_)
        self._handle_kind = PAGE if kind == "page" else SLOT
        self._base = self._handle_kind << KIND_SHIFT
        # Scalar access through a memoryview costs a third of what it costs through numpy.
        self._physical, self._references = memoryview(self.physical), memoryview(self.references)
        self._loose, self._generation = memoryview(self.loose), memoryview(self.generation)
        self._unbound = memoryview(self.unbound)

    @property
    def live(self) -> int:
        """Held units, those that only tickets hold included."""
        return self.extent - self.free.count

    # -- ranks and bytes -------------------------------------------------------------------------------------------

    def ranks_of(self, virtual: Int64Array) -> Int64Array:
        """Ranks, int64, of held units."""
        return (self.physical[virtual].astype(np.int64) - self.origin) * self.step

    def physical_of_ranks(self, ranks: Int64Array) -> Int64Array:
        """Physical ids, int64, of ranks."""
        return self.origin + self.step * ranks

    def virtual_at(self, ranks: Int64Array) -> Int64Array:
        """Virtual ids, int64, of the live units of these ranks, which ascend. One pass over the page table."""
        if not len(ranks):
            return NOTHING
        ends = self.origin + self.step * int(ranks[0]), self.origin + self.step * int(ranks[-1])
        inside = (self.physical >= min(ends)) & (self.physical <= max(ends)) & (self.references > 0)
        virtual = np.flatnonzero(inside)
        at = self.ranks_of(virtual)
        order = np.argsort(at)
        return virtual[order[np.searchsorted(at[order], ranks)]]

    @property
    def table_bytes(self) -> int:
        """Bytes of host memory that this pool's arrays take."""
        integers = (self.physical, self.references, self.loose, self.generation, self.unbound, self.free.reserve)
        return sum(array.nbytes for array in (*integers, self.free.map, self.dirty))

    def drain_dirty(self) -> Int64Array:
        """Virtual ids, ascending, whose page-table entry has changed since the last call."""
        virtual = self.dirty.nonzero()[0]
        self.dirty[virtual] = False
        return virtual

    # -- taking and giving back ------------------------------------------------------------------------------------

    def take(self, count: int) -> Int64Array:
        """Binds ``count`` units with one holder each: virtual ids, int64 ``[count]``. The room is there."""
        ranks = self.free.take(count)
        self.spare -= count
        virtual = self.unbound[self.spare : self.spare + count].astype(np.int64)
        physical = self.origin - ranks if self.step < 0 else self.origin + ranks
        self.physical[virtual] = physical.astype(np.int32)
        self.references[virtual] = 1
        self.dirty[virtual] = True
        return virtual

    def take_one(self, loose: int = 0) -> int:
        """Binds one unit with one holder, which is its handle if ``loose`` is 1; returns that handle."""
        self.spare = spare = self.spare - 1
        virtual = self._unbound[spare]
        self._physical[virtual] = self.origin + self.step * self.free.take_one()
        self._references[virtual] = 1
        self._loose[virtual] = loose
        self._dirty[virtual] = 1
        return self._base | self._generation[virtual] << 32 | virtual

    def give_one(self, handle: int) -> bool:
        """Frees the unit of a handle that is live and its only holder. False, and nothing happens, if it is not."""
        virtual = handle & ID_MASK
        if (
            0 < virtual <= self.capacity
            and self._references[virtual] == 1
            and self._loose[virtual] == 1
            and handle == self._base | self._generation[virtual] << 32 | virtual
        ):
            self.free_one(virtual)
            return True
        return False

    def free_one(self, virtual: int) -> int:
        """Frees one unit whose only holder lets go; returns its physical id."""
        physical = self._physical[virtual]
        self._physical[virtual] = self._references[virtual] = self._loose[virtual] = 0
        self._generation[virtual] = self._generation[virtual] + 1 & GENERATION_MASK
        self.free.give_one((physical - self.origin) * self.step)
        self._unbound[self.spare] = virtual
        self.spare += 1
        self._dirty[virtual] = 1
        return physical

    def share(self, virtual: Int64Array, counts: Int64Array | int = 1) -> None:
        """``counts`` more holders (one, or one number each) for ``virtual``, which are distinct."""
        self.references[virtual] += counts
        self.extra_references += len(virtual) if isinstance(counts, int) else int(counts.sum())

    def drop(self, virtual: Int64Array, counts: Int64Array | int = 1) -> tuple[Int64Array, Int64Array]:
        """``counts`` holders fewer for ``virtual``, which are distinct. Frees the units that nobody holds any more
        and returns their virtual ids, void from now on, and the physical ids where they were, int64."""
        if self.extra_references:
            left = self.references[virtual] - counts
            self.references[virtual] = left
            self.extra_references -= len(virtual) if isinstance(counts, int) else int(counts.sum())
            virtual = virtual[left == 0]
            self.extra_references += len(virtual)
        return virtual, self._free(virtual) if len(virtual) else virtual

    def freed_by(self, virtual: Int64Array) -> int:
        """How many units ``drop(virtual)`` would free."""
        if not self.extra_references:
            return len(virtual)
        ids, counts = np.unique(virtual, return_counts=True)
        return int(np.count_nonzero(self.references[ids] == counts))

    def _free(self, virtual: Int64Array) -> Int64Array:
        physical = self.physical[virtual].astype(np.int64)
        self.physical[virtual] = 0
        self.references[virtual] = 0
        self.generation[virtual] = self.generation[virtual] + 1 & GENERATION_MASK
        self.free.give(self.origin - physical if self.step < 0 else physical - self.origin)
        self.unbound[self.spare : self.spare + len(virtual)] = virtual
        self.spare += len(virtual)
        self.dirty[virtual] = True
        return physical

    # -- handles ---------------------------------------------------------------------------------------------------

    def handles(self, virtual: Int64Array) -> Int64Array:
        """Handles, int64, of bound virtual ids; 0 stays 0."""
        generation = self.generation[virtual].astype(np.int64)
        return np.where(virtual == 0, 0, self._base | generation << 32 | virtual)

    def handle_of(self, virtual: int) -> int:
        """The handle of one bound virtual id."""
        return make_handle(self._handle_kind, virtual, self._generation[virtual])

    def resolve(self, handles: Int64Array) -> Int64Array:
        """Virtual ids, int64, of live handles. Raises StaleHandle for the first that is not live."""
        virtual = handles & ID_MASK
        inside = (virtual > 0) & (virtual <= self.capacity)
        known = np.where(inside, virtual, 0)
        good = inside & (handles >> 32 == (self._base >> 32 | self.generation[known])) & (self.references[known] > 0)
        if not good.all():
            raise StaleHandle(self._explain(int(handles[np.argmin(good)])))
        return virtual

    def _explain(self, handle: int) -> str:
        virtual = handle & ID_MASK
        if handle >> KIND_SHIFT != self._handle_kind or not 0 < virtual <= self.capacity:
            return f"{describe_handle(handle)} is foreign: expected a {self.kind} of this allocator"
        generation, now = handle >> 32 & GENERATION_MASK, self._generation[virtual]
        if generation > now or (generation == now and not self._references[virtual]):
            return f"{describe_handle(handle)} is foreign: this allocator has not handed it out"
        return f"{describe_handle(handle)} is stale: it was freed, {self.kind} {virtual} is at generation {now} now"

    # -- pins and tickets ------------------------------------------------------------------------------------------

    def hold(self, ticket: int, virtual: Int64Array) -> None:
        """The holders that ``virtual`` stands for give way to a ticket: reference counts stay as they are."""
        if len(virtual):
            self.tickets.setdefault(ticket, []).append(virtual)

    def due(self, ticket: int) -> list[Int64Array]:
        """What tickets up to ``ticket`` hold, oldest ticket first; they hold nothing afterwards."""
        due = sorted(number for number in self.tickets if number <= ticket)
        return [virtual for number in due for virtual in self.tickets.pop(number)]

    def ticket_counts(self) -> tuple[Int64Array, Int64Array]:
        """Virtual ids held by tickets, ascending, and how often each is."""
        held = [virtual for arrays in self.tickets.values() for virtual in arrays]
        if not held:
            return NOTHING, NOTHING
        ids, counts = np.unique(np.concatenate(held), return_counts=True)
        return ids, counts

    def awaiting(self) -> Int64Array:
        """Virtual ids, ascending, of the units that nobody but tickets holds."""
        ids, counts = self.ticket_counts()
        only: Int64Array = ids[self.references[ids] == counts]
        return only

    def held_only_by(self, pins: bool, tickets: bool) -> int:
        """How many units nobody but pins, or tickets, or either, holds."""
        held: Counter[int] = Counter(self.pins) if pins else Counter()
        if tickets:
            ids, counts = self.ticket_counts()
            held.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        return sum(self._references[virtual] == count for virtual, count in held.items())

    def pinned_extent(self, pins: bool = True, tickets: bool = True) -> int:
        """The smallest extent that keeps every pinned unit, and every unit that a ticket holds, where it is."""
        virtual = list(self.pins) if pins else []
        if tickets and self.tickets:
            virtual += self.ticket_counts()[0].tolist()
        return int(self.ranks_of(np.array(virtual, dtype=np.int64)).max()) + 1 if virtual else 0

    # -- extent ----------------------------------------------------------------------------------------------------

    def grow(self, extent: int) -> None:
        """The pool owns at least ``extent`` units from now on; the new ones are free."""
        if extent > self.extent:
            self.free.open(self.extent, extent)
            self.extent = extent

    def retract(self, extent: int, virtual: Int64Array, destinations: Int64Array) -> None:
        """The live units ``virtual`` move to the free ranks ``destinations``; then every unit of rank ``extent`` and
        beyond is given up, all of which are free by then."""
        self.free.close(extent, destinations)
        self.extent = extent
        self._rebind(virtual, destinations)

    def relocate(self, virtual: int, destination: int) -> None:
        """Moves one live unit to a free rank inside the extent."""
        which = np.array([virtual], dtype=np.int64)
        self.free.swap(destination, int(self.ranks_of(which)[0]))
        self._rebind(which, np.array([destination], dtype=np.int64))

    def _rebind(self, virtual: Int64Array, destinations: Int64Array) -> None:
        self.physical[virtual] = self.physical_of_ranks(destinations)
        self.dirty[virtual] = True
