"""Two pools in one address space: feasibility, capacity that migrates, and the effects that follow.

Planning is pure: ``require`` decides from counts alone and raises before anything changes. Committing cannot fail:
``make_room``, ``bind`` and ``drop`` only store into preallocated arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from avmp.effects import EffectList
from avmp.errors import OutOfMemory, Shortage
from avmp.handles import ID_MASK, Int64Array, Kind
from avmp.layout import Layout
from avmp.migration import plan_relocation
from avmp.options import Options
from avmp.page_pool import Pool

MOST_GAP_PAGES = 256
"""Pages that the page pool takes from the gap beyond its need, at most: 1/64 of a small arena."""

OBSTACLES = ("awaiting", "pinned", "floor")
"""What may hold memory back that is not in use: tickets that are not retired, pins, floors."""


class Event(NamedTuple):
    """One line of the event stream. ``virtual`` and ``physical`` are int64 of one length; ``physical`` is where the
    units are after an ``allocated`` or ``moved``, and where they were before a ``freed``."""

    what: str
    pool: Kind
    virtual: Int64Array
    physical: Int64Array


@dataclass
class Counters:
    """What has happened since the allocator was made. Units are pages and slots, bytes are those of all lanes.

    ``attempts`` counts, by outcome, the allocations that the free units of the pools could not serve:
    ``"gap"`` (served from the gap), ``"retracted"`` (the other pool gave up free units only), ``"relocated"`` (live
    units moved out of the way), and ``"refused: …"`` with the reason of the ``OutOfMemory``. ``peak_used_bytes`` is
    brought up to date by every operation but the taking of a single unit, and by ``stats``.
    """

    attempts: Counter[str] = field(default_factory=Counter)
    units_given_up: int = 0
    units_moved: int = 0
    bytes_moved: int = 0
    relocations: int = 0
    tail_copies: int = 0
    peak_used_bytes: int = 0

    @property
    def retractions(self) -> int:
        """Times that a pool gave up units, moving none."""
        return self.attempts["retracted"]

    @property
    def migrations(self) -> int:
        """Times that a pool gave up units and live ones had to move."""
        return self.attempts["relocated"]


class Disturbance(Protocol):
    """A test's own migration policy: called with the address space before each commit, free to move what is not
    pinned and to shift the extents, as ``ChaosMigration`` does."""

    def disturb(self, space: AddressSpace) -> None:
        """Relocates units and shifts extents; live units and their virtual ids stay."""


class AddressSpace:
    """The page pool, the slot pool, and what lies between them.

    ``plain_frees`` says that freeing a unit has no consequence beyond the tables (no poison, no events), and
    ``plain[kind]`` that handing one out has none either (no zeroing).

    The one inequality that keeps the pools apart, true after every commit, is ``Layout.holds``:
    ``(first_slot + slots.extent) * slot_bytes <= (page_count - pages.extent) * page_bytes``.
    """

    def __init__(self, layout: Layout, options: Options, disturbance: Disturbance | None = None) -> None:
        self.layout, self.options, self.disturbance = layout, options, disturbance
        self.pages = Pool("page", layout.page_count, layout.first_page, layout.page_bytes, layout.lane_count)
        self.slots = Pool("slot", layout.slot_count, layout.first_slot, layout.slot_bytes, layout.lane_count)
        self.effects = EffectList()
        self.counters = Counters()
        self.events: list[Event] | None = [] if options.events else None
        self.retired = -(2**63)
        self._handful = min(self.pages.capacity // 64, MOST_GAP_PAGES)
        self.releasable: Callable[..., tuple[int, int]] | None = None
        for pool, floor in ((self.pages, options.floor_pages), (self.slots, options.floor_slots)):
            pool.floor = min(floor, pool.capacity)
            pool.grow(pool.floor)
        zeroed: dict[Kind, bool] = {"page": options.zero_pages, "slot": options.zero_slots}
        self.zeroed = {kind: zero and options.record_effects for kind, zero in zeroed.items()}
        self.poisons = options.poison and options.record_effects
        self.plain_frees = not (options.events or self.poisons)
        self.plain = {kind: self.plain_frees and not zero for kind, zero in self.zeroed.items()}

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """Pages, then slots."""
        return self.pages, self.slots

    @property
    def gap_bytes(self) -> int:
        """Bytes of all lanes between the extents, that either pool may still take for nothing."""
        layout = self.layout
        low = (layout.first_slot + self.slots.extent) * layout.slot_bytes
        if not layout.page_bytes:
            return (layout.slot_count * layout.slot_bytes - low) * layout.lane_count
        low = low or layout.first_page * layout.page_bytes
        return ((layout.page_count - self.pages.extent) * layout.page_bytes - low) * layout.lane_count

    @property
    def used_bytes(self) -> int:
        """Bytes of all lanes in held units."""
        return self.pages.live * self.pages.total_bytes + self.slots.live * self.slots.total_bytes

    # -- planning --------------------------------------------------------------------------------------------------

    def possible(self, pages: int, slots: int, lifted: frozenset[str] = frozenset()) -> bool:
        """Whether ``pages`` more pages and ``slots`` more slots (negative: fewer) can be held together, moving what
        may be moved. ``lifted`` names obstacles to leave out, of OBSTACLES, to find out which are in the way."""
        if pages <= self.pages.free.count and slots <= self.slots.free.count:
            return True
        return self.layout.holds(self._least(self.pages, pages, lifted), self._least(self.slots, slots, lifted))

    def _least(self, pool: Pool, new: int, lifted: frozenset[str] = frozenset()) -> int:
        """The smallest extent with which the pool can hold ``new`` more units."""
        pins, tickets = "pinned" not in lifted, "awaiting" not in lifted
        live = pool.live - (pool.held_only_by(not pins, not tickets) if lifted else 0)
        return max(live + new, 0 if "floor" in lifted else pool.floor, pool.pinned_extent(pins, tickets))

    def require(self, operation: str, pages: int, slots: int, freed_pages: int = 0, freed_slots: int = 0) -> None:
        """Returns if ``possible`` once the operation has freed what it lets go of, else counts the refusal and raises
        OutOfMemory with the numbers."""
        if not self.possible(pages - freed_pages, slots - freed_slots):
            shortage = self._shortage(operation, pages, slots, freed_pages, freed_slots)
            self.counters.attempts[f"refused: {shortage.reason}"] += 1
            raise OutOfMemory(shortage, self.releasable)

    def _shortage(self, operation: str, pages: int, slots: int, freed_pages: int, freed_slots: int) -> Shortage:
        needs = (self.pages, pages - freed_pages), (self.slots, slots - freed_slots)
        short_of, missing = self._missing(*(new for _, new in needs))
        held = [(pool, max(pool.live + new, 0), pool.total_bytes) for pool, new in needs]
        return Shortage(
            operation=operation,
            pool=short_of.kind,
            reason=self._reason(*(new for _, new in needs)),
            wanted_pages=pages,
            wanted_slots=slots,
            wanted_bytes=pages * self.pages.total_bytes + slots * self.slots.total_bytes,
            freed_pages=freed_pages,
            freed_slots=freed_slots,
            missing_units=missing,
            missing_bytes=missing * short_of.total_bytes,
            gap_bytes=self.gap_bytes,
            free_pages=self.pages.free.count,
            free_slots=self.slots.free.count,
            awaiting_pages=len(self.pages.awaiting()),
            awaiting_slots=len(self.slots.awaiting()),
            pinned_pages=len(self.pages.pins),
            pinned_slots=len(self.slots.pins),
            held_by_tickets_bytes=sum(max(p.pinned_extent(pins=False) - live, 0) * size for p, live, size in held),
            held_by_pins_bytes=sum(max(p.pinned_extent(tickets=False) - live, 0) * size for p, live, size in held),
            held_by_floors_bytes=sum(max(p.floor - live, 0) * size for p, live, size in held),
        )

    def _missing(self, pages: int, slots: int) -> tuple[Pool, int]:
        """The pool that is short, and how many units fewer of it would make room for the rest. That is the page pool
        if it has to grow, unless the slots do not fit whatever becomes of the pages; where the pages do not fit
        either, what is missing counts beside none."""
        least_pages, least_slots = self._least(self.pages, pages), self._least(self.slots, slots)
        if pages > self.pages.free.count and self.layout.holds(0, least_slots):
            return self.pages, least_pages - self.layout.max_pages(least_slots)
        beside = least_pages if self.layout.holds(least_pages, 0) else 0
        return self.slots, least_slots - self.layout.max_slots(beside)

    def _reason(self, pages: int, slots: int) -> str:
        """The fewest obstacles that would have to be lifted, joined by +; "bytes" if lifting all is not enough."""
        for count in range(1, len(OBSTACLES) + 1):
            for chosen in combinations(OBSTACLES, count):
                if self.possible(pages, slots, frozenset(chosen)):
                    return "+".join(chosen)
        return "bytes"

    # -- committing ------------------------------------------------------------------------------------------------

    def make_room(self, pages: int, slots: int) -> None:
        """Brings the free units of both pools up to what is needed. ``require`` has found it possible."""
        if self.disturbance is not None:
            self.disturbance.disturb(self)
        page_target = self.pages.extent + max(pages - self.pages.free.count, 0)
        slot_target = self.slots.extent + max(slots - self.slots.free.count, 0)
        if page_target == self.pages.extent and slot_target == self.slots.extent:
            return
        outcome = "gap"
        if not self.layout.holds(page_target, slot_target):
            # Only one pool is short: had both no free units left, the targets would be what `require` found to fit.
            if page_target > self.pages.extent:
                moved = self._retract(self.slots, self.layout.max_slots(page_target), self.slots.live + slots)
                slot_target = self.slots.extent
            else:
                moved = self._retract(self.pages, self.layout.max_pages(slot_target), self.pages.live + pages)
                page_target = self.pages.extent
            outcome = "relocated" if moved else "retracted"
        elif page_target > self.pages.extent and self.layout.holds(page_target + self._handful, slot_target):
            # What lies in the gap costs either pool nothing, so pages, which are asked for most, come in handfuls.
            page_target += self._handful
        self.counters.attempts[outcome] += 1
        self.pages.grow(page_target)
        self.slots.grow(slot_target)

    def _retract(self, donor: Pool, extent: int, needed: int) -> int:
        """The donor gives up what lies beyond ``extent``; returns how many live units had to move."""
        least = max(donor.floor, donor.pinned_extent(), needed)
        spare = int(donor.extent * self.options.hysteresis)
        donor.free.return_reserve()
        plan = plan_relocation(donor.free.map[: donor.extent], extent, least, spare)
        virtual = donor.virtual_at(plan.sources)
        self.counters.units_given_up += donor.extent - plan.extent
        self._note_move(donor, virtual, plan.destinations)
        donor.retract(plan.extent, virtual, plan.destinations)
        return len(virtual)

    def relocate(self, pool: Pool, virtual: int, destination: int) -> None:
        """Moves one live unit to the free rank ``destination``: for policies."""
        self._note_move(pool, np.array([virtual], dtype=np.int64), np.array([destination], dtype=np.int64))
        pool.relocate(virtual, destination)

    def _note_move(self, pool: Pool, virtual: Int64Array, destinations: Int64Array) -> None:
        """Counter, effect and event of a move that is about to be made."""
        self.counters.units_moved += len(virtual)
        self.counters.relocations += len(virtual) > 0
        self.counters.bytes_moved += len(virtual) * pool.total_bytes
        physical = pool.physical_of_ranks(destinations)
        if self.options.record_effects:
            self.effects.add("move", pool.kind, pool.physical[virtual].astype(np.int64), physical)
        if self.events is not None and len(virtual):
            self.events.append(Event("moved", pool.kind, virtual, physical))

    def bind(self, pool: Pool, count: int, fresh: bool = True) -> Int64Array:
        """Hands out ``count`` units with one holder each: virtual ids, int64. Units that a copy is about to fill
        are not ``fresh``: they are not zeroed first."""
        virtual = pool.take(count) if count != 1 else np.array([pool.take_one() & ID_MASK], dtype=np.int64)
        if self.events is not None and count:
            self.events.append(Event("allocated", pool.kind, virtual, pool.physical[virtual].astype(np.int64)))
        if fresh and self.zeroed[pool.kind]:
            self.zero(pool, virtual)
        self.note_use()
        return virtual

    def note_use(self) -> None:
        """Keeps the peak of the bytes in use."""
        pages, slots = self.pages, self.slots
        used = pages.live * pages.total_bytes + slots.live * slots.total_bytes
        if used > self.counters.peak_used_bytes:
            self.counters.peak_used_bytes = used

    def zero(self, pool: Pool, virtual: NDArray[np.integer]) -> None:
        """Effect: the units become zero."""
        if self.options.record_effects:
            self.effects.add("zero", pool.kind, destinations=pool.physical[virtual].astype(np.int64))

    def copy(self, pool: Pool, sources: NDArray[np.integer], destinations: NDArray[np.integer]) -> None:
        """Effect: the bytes of virtual ``sources`` come to lie in virtual ``destinations`` too."""
        if self.options.record_effects:
            physical = pool.physical[sources].astype(np.int64), pool.physical[destinations].astype(np.int64)
            self.effects.add("copy", pool.kind, *physical)

    def swap(
        self, operation: Literal["swap_out", "swap_in"], pool: Pool, virtual: NDArray[np.integer], swapped: int
    ) -> None:
        """Effect: units go to, or come from, positions 0, 1, … of a swapped sequence's host buffer."""
        if self.options.record_effects:
            there, here = np.arange(len(virtual)), pool.physical[virtual].astype(np.int64)
            sources, destinations = (here, there) if operation == "swap_out" else (there, here)
            self.effects.add(operation, pool.kind, sources, destinations, swapped)

    def drop(self, pool: Pool, virtual: Int64Array, counts: Int64Array | int = 1) -> None:
        """``counts`` holders fewer for ``virtual``, which are distinct; units without a holder become free."""
        if len(virtual) == 1 and self.plain_frees and not pool.extra_references:
            pool.free_one(int(virtual[0]))
            return
        virtual, physical = pool.drop(virtual, counts)
        if self.events is not None and len(virtual):
            self.events.append(Event("freed", pool.kind, virtual, physical))
        if self.poisons:
            self.effects.add("poison", pool.kind, destinations=physical)

    def retire(self, ticket: int) -> None:
        """Drops what tickets up to ``ticket`` hold in either pool. ``retired`` is the highest one so far."""
        self.retired = max(self.retired, ticket)
        for pool in self.pools:
            for virtual in pool.due(ticket):
                self.drop(pool, virtual)
