"""How one arena is cut: lanes, pages, slots, the null area, and what fits in an empty arena.

The arena is ``lane_count`` equal lanes, each laid out alike. In a lane, state slot s begins at ``s * slot_bytes`` and
page p at ``p * page_bytes``; slots are used from the low end, pages from the high end. With P pages per lane, a number
of live pages and slots fits if and only if

    (first_slot + slots) * slot_bytes <= (P - pages) * page_bytes

In an arena with one pool the absent side drops out: ids 1 to count - 1 are usable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from avmp.errors import ArenaTooSmall, InvalidArgument
from avmp.geometry import Geometry, require_count
from avmp.lanes import UNIT_ALIGNMENT, Part, Placement, choose_lane_count, padding_layers, place_kv, place_state
from avmp.units import align_up, ceil_div, format_bytes, parse_bytes

__all__ = ["ARENA_ALIGNMENT", "KV_ORDERS", "MAX_UNITS", "UNIT_ALIGNMENT", "Layout", "Part"]

ARENA_ALIGNMENT = 2 * 1024 * 1024
KV_ORDERS = ("NHD", "HND")
MAX_UNITS = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """The cut of one arena; made by :meth:`plan` or :meth:`from_unit_sizes`. All sizes are bytes.

    ``page_bytes`` and ``slot_bytes`` are those of one unit in one lane, 0 for a pool that does not exist;
    ``geometry`` is None where only sizes were given.
    """

    arena_bytes: int
    lane_count: int
    lane_bytes: int
    page_bytes: int
    slot_bytes: int
    page_tokens: int
    geometry: Geometry | None = None
    kv_order: str = "NHD"

    def __post_init__(self) -> None:
        for name in ("arena_bytes", "lane_count", "page_tokens"):
            require_count(name, getattr(self, name))
        for name in ("lane_bytes", "page_bytes", "slot_bytes"):
            if require_count(name, getattr(self, name), 0) % UNIT_ALIGNMENT:
                raise InvalidArgument(f"{name}={getattr(self, name)}: expected a multiple of {UNIT_ALIGNMENT}")
        if self.kv_order not in KV_ORDERS:
            raise InvalidArgument(f"kv_order={self.kv_order!r}: expected one of {', '.join(KV_ORDERS)}")
        if not self.page_bytes and not self.slot_bytes:
            raise InvalidArgument("page_bytes=0 and slot_bytes=0: expected at least one pool")
        if self.lane_count * self.lane_bytes > self.arena_bytes:
            raise InvalidArgument(f"{self.lane_count} lanes of {self.lane_bytes} B exceed {self.arena_bytes} B")
        if not self.fits(pages=int(self.page_bytes > 0), slots=int(self.slot_bytes > 0)):
            raise ArenaTooSmall(self._too_small())
        if max(self.page_count, self.slot_count) > MAX_UNITS:
            raise InvalidArgument(
                f"{self.page_count:,} pages and {self.slot_count:,} slots: ids are int32, at most {MAX_UNITS:,} of "
                "either; use larger pages or a smaller arena"
            )

    @classmethod
    def plan(
        cls, geometry: Geometry, arena_bytes: int | str, lane_count: int | None = None, kv_order: str = "NHD"
    ) -> Layout:
        """The layout of ``geometry`` in an arena of ``arena_bytes`` (an integer or "8GiB").

        ``lane_count`` defaults to the number of attention layers, or to its largest divisor for which the padding
        with empty state layers is at most 5 % of the state; layers of unequal shape take one lane. A ``lane_count``
        that is given must divide the number of attention layers. Raises InvalidArgument, or ArenaTooSmall with the
        numbers where a lane cannot hold the null area and one unit of each pool.
        """
        size = parse_bytes(arena_bytes)
        lanes = choose_lane_count(geometry, lane_count)
        return cls(
            arena_bytes=size,
            lane_count=lanes,
            lane_bytes=size // lanes // UNIT_ALIGNMENT * UNIT_ALIGNMENT,
            page_bytes=place_kv(geometry, lanes, kv_order).unit_bytes,
            slot_bytes=place_state(geometry, lanes).unit_bytes,
            page_tokens=geometry.page_tokens,
            geometry=geometry,
            kv_order=kv_order,
        )

    @classmethod
    def from_unit_sizes(
        cls, page_bytes: int, slot_bytes: int, lane_bytes: int, lane_count: int = 1, page_tokens: int = 16
    ) -> Layout:
        """A layout given by sizes in bytes per lane, any of them odd: units are rounded up to 256, lanes down.

        A size of 0 leaves that pool out. Raises as :meth:`plan` does.
        """
        require_count("lane_bytes", lane_bytes)
        return cls(
            arena_bytes=lane_bytes * require_count("lane_count", lane_count),
            lane_count=lane_count,
            lane_bytes=lane_bytes // UNIT_ALIGNMENT * UNIT_ALIGNMENT,
            page_bytes=align_up(require_count("page_bytes", page_bytes, 0), UNIT_ALIGNMENT),
            slot_bytes=align_up(require_count("slot_bytes", slot_bytes, 0), UNIT_ALIGNMENT),
            page_tokens=page_tokens,
        )

    @property
    def has_pages(self) -> bool:
        """Whether there is a KV pool."""
        return self.page_bytes > 0

    @property
    def has_slots(self) -> bool:
        """Whether there is a state pool."""
        return self.slot_bytes > 0

    @cached_property
    def page_count(self) -> int:
        """Page ids are 0 to page_count - 1, the null area included; 0 without a KV pool."""
        return self.lane_bytes // self.page_bytes if self.has_pages else 0

    @cached_property
    def slot_count(self) -> int:
        """Slot ids are 0 to slot_count - 1, the null area included; 0 without a state pool."""
        return self.lane_bytes // self.slot_bytes if self.has_slots else 0

    @cached_property
    def first_slot(self) -> int:
        """The first slot id ever handed out: ids below it are the null area. 1 without pages, 0 without slots."""
        return ceil_div(max(self.page_bytes, self.slot_bytes), self.slot_bytes) if self.has_slots else 0

    @cached_property
    def first_page(self) -> int:
        """The first page id ever handed out: ids below it are the null area. 1 without slots, 0 without pages."""
        if not self.has_pages:
            return 0
        return ceil_div(self.first_slot * self.slot_bytes, self.page_bytes) if self.has_slots else 1

    @property
    def page_total_bytes(self) -> int:
        """Bytes of one page in all lanes."""
        return self.lane_count * self.page_bytes

    @property
    def slot_total_bytes(self) -> int:
        """Bytes of one slot in all lanes."""
        return self.lane_count * self.slot_bytes

    @property
    def null_bytes(self) -> int:
        """Bytes in all lanes that neither pool can ever use: those below the first slot, or the first page."""
        if self.has_slots:
            return self.first_slot * self.slot_total_bytes
        return self.first_page * self.page_total_bytes

    def fits(self, pages: int = 0, slots: int = 0) -> bool:
        """Whether an empty arena holds so many pages and slots at once."""
        _require_counts(pages=pages, slots=slots)
        return self.holds(pages, slots)

    def holds(self, pages: int, slots: int) -> bool:
        """The same, for an allocator in a hurry: the counts are integers of 0 or more."""
        if self.page_bytes and self.slot_bytes:
            return (self.first_slot + slots) * self.slot_bytes <= (self.page_count - pages) * self.page_bytes
        if self.page_bytes:
            return slots == 0 and self.first_page + pages <= self.page_count
        return pages == 0 and self.first_slot + slots <= self.slot_count

    def max_pages(self, slots: int = 0) -> int:
        """The most pages that an empty arena holds beside ``slots`` slots; 0 also where the slots do not fit."""
        if not self.has_pages or not self.fits(slots=slots):
            return 0
        state_end = (self.first_slot + slots) * self.slot_bytes
        return self.page_count - (ceil_div(state_end, self.page_bytes) if self.has_slots else self.first_page)

    def max_slots(self, pages: int = 0) -> int:
        """The most slots that an empty arena holds beside ``pages`` pages; 0 also where the pages do not fit."""
        if not self.has_slots or not self.fits(pages=pages):
            return 0
        kv_begin = (self.page_count - pages) * self.page_bytes
        return (kv_begin // self.slot_bytes if self.has_pages else self.slot_count) - self.first_slot

    def pages_per_sequence(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens owns; 0 without a KV pool."""
        require_count("tokens", tokens, 0)
        return ceil_div(tokens, self.page_tokens) if self.has_pages else 0

    def max_sequences(self, tokens: int) -> int:
        """The most sequences of ``tokens`` tokens each, with a slot each if there is a state pool, at once.

        Raises InvalidArgument for 0 tokens without a state pool: such sequences take nothing.
        """
        pages = self.pages_per_sequence(tokens)
        if not self.has_slots:
            if pages == 0:
                raise InvalidArgument("tokens=0 without a state pool: any number of sequences fits, expected 1 or more")
            return self.max_pages() // pages
        if not self.has_pages:
            return self.max_slots()
        room = self.page_count * self.page_bytes - self.first_slot * self.slot_bytes
        return room // (self.slot_bytes + pages * self.page_bytes)

    def max_tokens(self, sequences: int = 1) -> int | None:
        """The most tokens that each of ``sequences`` sequences can have at once, in whole pages.

        0 where not even one page each, or the states, fit. None (no bound) without a KV pool, if the states fit.
        """
        slots = require_count("sequences", sequences) if self.has_slots else 0
        if not self.has_pages:
            return None if self.fits(slots=slots) else 0
        return self.max_pages(slots) // sequences * self.page_tokens

    def kv_parts(self, layer: int) -> tuple[Part, ...]:
        """``(key, value)`` of attention layer ``layer`` (the model's index); ``(key,)`` for a K-only layer.

        Raises InvalidArgument if ``layer`` has no KV here.
        """
        return _look_up(self._kv_placement, layer, "attention")

    def state_parts(self, layer: int) -> tuple[Part, ...]:
        """The parts of state layer ``layer`` (the model's index), in order; InvalidArgument if it has none."""
        return _look_up(self._state_placement, layer, "state")

    @cached_property
    def _kv_placement(self) -> Placement:
        return place_kv(self.geometry, self.lane_count, self.kv_order) if self.geometry else Placement(0, {})

    @cached_property
    def _state_placement(self) -> Placement:
        return place_state(self.geometry, self.lane_count) if self.geometry else Placement(0, {})

    def _too_small(self) -> str:
        units = [f"a page of {self.page_bytes:,} B"] if self.has_pages else []
        units += [f"a slot of {self.slot_bytes:,} B"] if self.has_slots else []
        return (
            f"arena of {self.arena_bytes:,} B: each of its {self.lane_count} lanes has {self.lane_bytes:,} B, "
            f"too little for the null area of {self.null_bytes // self.lane_count:,} B and {' and '.join(units)}"
        )

    def describe(self) -> str:
        """The layout for a person to check: sizes, ids, null area, each lane's contents with offsets, capacities."""
        lines = [*self._describe_units(), *self._describe_lanes(), *self._describe_capacity(), *self._describe_waste()]
        return "\n".join(lines)

    def _describe_units(self) -> list[str]:
        left_over = self.arena_bytes - self.lane_count * self.lane_bytes
        lines = [
            f"{self.geometry.name if self.geometry else 'given unit sizes'} in {format_bytes(self.arena_bytes)} "
            f"({self.arena_bytes:,} B): lane_count={self.lane_count}, {self.lane_bytes:,} B each, {left_over:,} B over"
        ]
        if self.has_pages:
            lines.append(
                f"page: {self.page_bytes:,} B per lane, {self.page_total_bytes:,} B in all, {self.page_tokens} tokens, "
                f"{self.kv_order}; ids {self.first_page:,} to {self.page_count - 1:,}"
            )
        if self.has_slots:
            lines.append(
                f"slot: {self.slot_bytes:,} B per lane, {self.slot_total_bytes:,} B in all; "
                f"ids {self.first_slot:,} to {self.slot_count - 1:,}"
            )
        return [*lines, f"null area: {self.null_bytes // self.lane_count:,} B per lane, {self.null_bytes:,} B in all"]

    def _describe_lanes(self) -> list[str]:
        lines = []
        first = 0
        lanes = [self._describe_lane(lane) for lane in range(self.lane_count)] if self.geometry else []
        for texts, alike in groupby(lanes, key=lambda rows: [text for text, _ in rows]):
            group = list(alike)
            last = first + len(group) - 1
            lines.append(f"lane {first}:" if first == last else f"lanes {first} to {last}, laid out alike:")
            for row, text in enumerate(texts):
                layers = [rows[row][1] for rows in group]
                shown = layers if len(layers) <= 8 else [*layers[:4], "...", layers[-1]]
                lines.append(f"  {text}; layers {' | '.join(shown)}")
            first = last + 1
        return lines

    def _describe_lane(self, lane: int) -> list[tuple[str, str]]:
        """(what lies where, layer indices) for each run of layers of equal shape in the lane."""
        rows = []
        for unit, placement in (("page", self._kv_placement), ("slot", self._state_placement)):
            here = [(layer, parts) for layer, parts in placement.parts.items() if parts[0].lane == lane]
            for _, alike in groupby(here, key=lambda item: [(part.shape, part.dtype) for part in item[1]]):
                run = list(alike)
                parts = ", ".join(_describe_part(part) for part in run[0][1])
                step = f", next layer +{run[1][1][0].offset - run[0][1][0].offset:,}" if run[1:] else ""
                rows.append((f"{unit}: {parts}{step}", " ".join(str(layer) for layer, _ in run)))
        return rows

    def _describe_capacity(self) -> list[str]:
        lengths = (256, 1024, 8192, 65536) if self.has_pages else (1,)
        fits = ", ".join(f"{self.max_sequences(tokens):,} of {tokens:,}" for tokens in lengths)
        longest = self.max_tokens(1)
        return [
            f"capacity: {self.max_pages():,} pages or {self.max_slots():,} slots; sequences by tokens: {fits}; "
            f"longest single sequence: {'any length' if longest is None else f'{longest:,} tokens'}"
        ]

    def _describe_waste(self) -> list[str]:
        if self.geometry is None:
            return []
        layers = padding_layers(len(self.geometry.state_layers), self.lane_count)
        first_layer = next(iter(self._state_placement.parts.values()), ())
        padding = layers * sum(align_up(part.nbytes, UNIT_ALIGNMENT) for part in first_layer)
        page_rounding = self.page_total_bytes - self.geometry.kv_bytes_per_page
        slot_rounding = self.slot_total_bytes - self.geometry.state_bytes_per_sequence - padding
        return [
            f"waste: rounding {page_rounding:,} B per page and {slot_rounding:,} B per slot; "
            f"{layers} padding layers, {padding:,} B per slot"
        ]


def _describe_part(part: Part) -> str:
    shape = "x".join(str(extent) for extent in part.shape)
    return f"{part.name} {shape} {part.dtype} at +{part.offset:,}"


def _look_up(placement: Placement, layer: int, kind: str) -> tuple[Part, ...]:
    if layer not in placement.parts:
        known = " ".join(str(index) for index in placement.parts) or "none"
        raise InvalidArgument(f"layer {layer!r} is no {kind} layer of this layout; those are: {known}")
    return placement.parts[layer]


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        require_count(name, count, 0)
