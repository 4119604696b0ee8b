"""Lanes, offsets, the null area and what fits, against the formulas written out again and against brute force."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avmp.errors import ArenaTooSmall, InvalidArgument
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import ARENA_ALIGNMENT, UNIT_ALIGNMENT, Layout, Part
from avmp.named_models import MODEL_NAMES, named_model

# name: lanes, attention layers per lane, state layers that a lane has room for.
LANES = {
    "jamba-v0.1": (4, 1, 7),
    "jamba-1.5-mini": (4, 1, 7),
    "zamba2-2.7b": (9, 1, 6),
    "zamba2-7b": (1, 13, 81),
    "bamba-9b": (3, 1, 10),
    "falcon-h1-1.5b": (24, 1, 1),
    "falcon-h1-7b": (44, 1, 1),
    "falcon-h1-34b": (72, 1, 1),
    "granite-4.0-h-tiny": (4, 1, 9),
    "granite-4.0-h-small": (4, 1, 9),
    "nemotron-h-8b": (4, 1, 6),
    "nemotron-nano-9b-v2": (4, 1, 7),
    "nemotron-3-nano-30b-a3b": (6, 1, 4),
    "qwen3-next-80b-a3b": (12, 1, 3),
    "qwen3.5-4b": (8, 1, 3),
    "qwen3.5-9b": (8, 1, 3),
    "qwen3.5-27b": (16, 1, 3),
    "qwen3.5-35b-a3b": (10, 1, 3),
    "lfm2-1.2b": (2, 3, 5),
    "paper_jamba": (4, 1, 7),
    "paper_mamba2": (4, 1, 7),
}

KIB = 1024


def _attention(layer: int, kv_heads: int = 2, key_dim: int = 64, value_dim: int = 64) -> AttentionLayer:
    return AttentionLayer(layer, kv_heads, key_dim, value_dim, "bfloat16")


def _state(layer: int, rows: int = 128) -> StateLayer:
    return StateLayer(layer, (StatePart("conv", (rows, 4), "bfloat16"), StatePart("ssm", (rows, 16), "float32")))


def _geometry(attention_layers: int, state_layers: int, page_tokens: int = 16) -> Geometry:
    attention = tuple(_attention(layer) for layer in range(attention_layers))
    return Geometry(attention, tuple(_state(layer) for layer in range(state_layers)), page_tokens)


# Lanes.


def test_every_named_model_is_in_the_table() -> None:
    assert set(LANES) == set(MODEL_NAMES)


@pytest.mark.parametrize("name", LANES)
def test_lanes_of_named_models(name: str) -> None:
    geometry = named_model(name)
    layout = Layout.plan(geometry, "40GiB")
    lane_count, attention_per_lane, state_per_lane = LANES[name]
    first = geometry.attention_layers[0]
    assert layout.lane_count == lane_count
    assert layout.page_bytes == attention_per_lane * 16 * first.kv_heads * 2 * first.key_dim * 2
    assert layout.slot_bytes == state_per_lane * geometry.state_layers[0].nbytes
    for index, layer in enumerate(geometry.state_layers):
        lane, index_in_lane = divmod(index, state_per_lane)
        part = layout.state_parts(layer.layer)[0]
        assert (part.lane, part.offset) == (lane, index_in_lane * layer.nbytes)
    for index, attention in enumerate(geometry.attention_layers):
        assert {part.lane for part in layout.kv_parts(attention.layer)} == {index // attention_per_lane}


@pytest.mark.parametrize(
    ("attention_layers", "state_layers", "lane_count"),
    [(4, 0, 4), (0, 5, 1), (4, 1, 1), (8, 4, 4), (1, 100, 1), (6, 10, 2), (12, 8, 4), (4, 27, 4), (13, 81, 1)],
)
def test_default_lane_count(attention_layers: int, state_layers: int, lane_count: int) -> None:
    assert Layout.plan(_geometry(attention_layers, state_layers), "8MiB").lane_count == lane_count


@given(st.integers(1, 24), st.integers(0, 60))
def test_default_lane_count_is_the_largest_divisor_within_the_waste_rule(attention: int, state: int) -> None:
    allowed = [
        lanes for lanes in range(1, attention + 1)
        if attention % lanes == 0 and (-(-state // lanes) * lanes - state) * 20 <= state
    ]  # fmt: skip
    assert Layout.plan(_geometry(attention, state), "64MiB").lane_count == max(allowed)


def test_lane_count_can_be_asked_for_and_must_divide_the_attention_layers() -> None:
    geometry = _geometry(6, 10)
    assert Layout.plan(geometry, "8MiB", lane_count=6).slot_bytes == 2 * (KIB + 8 * KIB)
    assert Layout.plan(geometry, "8MiB", lane_count=1).slot_bytes == 10 * (KIB + 8 * KIB)
    for lane_count in (0, -1, 4, 7, True):
        with pytest.raises(InvalidArgument, match=f"lane_count={lane_count}"):
            Layout.plan(geometry, "8MiB", lane_count=lane_count)
    with pytest.raises(InvalidArgument, match=r"lane_count=2: expected one of \[1\]"):
        Layout.plan(_geometry(0, 4), "8MiB", lane_count=2)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry((_attention(0), _attention(1, kv_heads=4)), (_state(2), _state(3))),
        Geometry((_attention(0), _attention(1)), (_state(2), _state(3, rows=100))),
        Geometry((_attention(0), _attention(1, value_dim=0)), ()),
    ],
)
def test_layers_of_unequal_shape_take_one_lane(geometry: Geometry) -> None:
    layout = Layout.plan(geometry, "8MiB")
    assert layout.lane_count == 1
    with pytest.raises(InvalidArgument, match="as layers differ in shape"):
        Layout.plan(geometry, "8MiB", lane_count=2)
    assert len({part.offset for layer in (0, 1) for part in layout.kv_parts(layer)}) == sum(
        len(layout.kv_parts(layer)) for layer in (0, 1)
    )


def test_key_only_page_has_one_part() -> None:
    layout = Layout.plan(Geometry((_attention(7, 1, 576, 0),), ()), "1MiB")
    (key,) = layout.kv_parts(7)
    assert (key.name, key.offset, key.shape, key.nbytes) == ("key", 0, (16, 1, 576), 18_432)
    assert layout.page_bytes == 18_432


def test_kv_order_changes_strides_and_nothing_else() -> None:
    geometry = Geometry((_attention(0, 8, 128, 64),), (), page_tokens=32)
    token_major, head_major = (Layout.plan(geometry, "4MiB", kv_order=order) for order in ("NHD", "HND"))
    assert [part.strides for part in token_major.kv_parts(0)] == [(1024, 128, 1), (512, 64, 1)]
    assert [part.strides for part in head_major.kv_parts(0)] == [(128, 4096, 1), (64, 2048, 1)]
    for one, other in zip(token_major.kv_parts(0), head_major.kv_parts(0), strict=True):
        assert dataclasses.replace(one, strides=other.strides) == other
    with pytest.raises(InvalidArgument, match="kv_order='DHN': expected one of NHD, HND"):
        Layout.plan(geometry, "4MiB", kv_order="DHN")


def test_layer_without_the_asked_cache_is_named() -> None:
    layout = Layout.plan(named_model("jamba-v0.1"), "1GiB")
    with pytest.raises(InvalidArgument, match="layer 3 is no attention layer of this layout; those are: 4 12 20 28"):
        layout.kv_parts(3)
    with pytest.raises(InvalidArgument, match="layer 4 is no state layer"):
        layout.state_parts(4)
    with pytest.raises(InvalidArgument, match="those are: none"):
        Layout.from_unit_sizes(256, 0, 4096).kv_parts(0)


# Parts inside units.


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dtypes = st.sampled_from(["bfloat16", "float32", "uint8"])
    dims = st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(0, 200), dtypes)
    parts = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5), dtypes), min_size=1, max_size=3)
    attention_count, state_count = draw(st.integers(0, 8)), draw(st.integers(0, 12))
    attention_count = attention_count if state_count else max(1, attention_count)
    uniform = draw(st.booleans())
    shapes = [draw(dims)] * attention_count if uniform else [draw(dims) for _ in range(attention_count)]
    contents = [draw(parts)] * state_count if uniform else [draw(parts) for _ in range(state_count)]
    return Geometry(
        tuple(AttentionLayer(3 * index, *shape) for index, shape in enumerate(shapes)),
        tuple(
            StateLayer(2 * index, tuple(StatePart(f"part{i}", (a, b), d) for i, (a, b, d) in enumerate(content)))
            for index, content in enumerate(contents)
        ),
        page_tokens=draw(st.integers(1, 40)),
    )


def _assert_parts_fit(parts: Iterator[Part], unit_bytes: int, lane_count: int) -> int:
    """Bytes of all parts, after checking that they are aligned, inside their unit and do not overlap."""
    ordered = sorted(parts, key=lambda part: (part.lane, part.offset))
    for part in ordered:
        assert part.offset % UNIT_ALIGNMENT == 0 and 0 <= part.lane < lane_count
        assert part.offset + part.nbytes <= unit_bytes
    for one, other in itertools.pairwise(ordered):
        assert one.lane < other.lane or one.offset + one.nbytes <= other.offset
    return sum(part.nbytes for part in ordered)


@given(geometries(), st.sampled_from(["NHD", "HND"]))
def test_parts_are_aligned_disjoint_and_inside_their_unit(geometry: Geometry, kv_order: str) -> None:
    layout = Layout.plan(geometry, "256MiB", kv_order=kv_order)
    assert layout.lane_bytes % UNIT_ALIGNMENT == layout.page_bytes % UNIT_ALIGNMENT == 0
    assert layout.slot_bytes % UNIT_ALIGNMENT == 0
    assert layout.lane_count * layout.lane_bytes <= layout.arena_bytes
    kv_parts = (part for layer in geometry.attention_layers for part in layout.kv_parts(layer.layer))
    state_parts = (part for layer in geometry.state_layers for part in layout.state_parts(layer.layer))
    assert _assert_parts_fit(kv_parts, layout.page_bytes, layout.lane_count) == geometry.kv_bytes_per_page
    assert _assert_parts_fit(state_parts, layout.slot_bytes, layout.lane_count) == geometry.state_bytes_per_sequence
    assert layout.describe().startswith("custom in 256.00 MiB")


@given(geometries())
def test_strides_reach_each_element_of_a_part_once(geometry: Geometry) -> None:
    layout = Layout.plan(geometry, "256MiB", kv_order="HND")
    for layer in geometry.attention_layers[:2]:
        for part in layout.kv_parts(layer.layer):
            tokens, heads, dim = part.shape
            steps = itertools.product(range(tokens), range(heads), (0, dim - 1))
            places = [sum(i * s for i, s in zip(step, part.strides, strict=True)) for step in steps]
            assert max(places) == tokens * heads * dim - 1 and len(set(places)) == tokens * heads * min(dim, 2)


# The null area and what fits.

SIZES = st.one_of(st.sampled_from([1, 7, 255, 256, 257, 12_416, 24_832]), st.integers(1, 6000))


def _reference_first_ids(page_bytes: int, slot_bytes: int) -> tuple[int, int]:
    """(first_page, first_slot): the least ids whose bytes lie behind one whole page and one whole slot."""
    slot = next(slot for slot in itertools.count() if slot * slot_bytes >= max(page_bytes, slot_bytes))
    page = next(page for page in itertools.count() if page * page_bytes >= slot * slot_bytes)
    return page, slot


def _feasible(layout: Layout, pages: int, slots: int) -> bool:
    """Places every unit byte range by hand: slots upwards, pages downwards, no two overlapping."""
    if not layout.slot_bytes:
        return slots == 0 and (1 + pages) * layout.page_bytes <= layout.lane_bytes
    if not layout.page_bytes:
        return pages == 0 and (1 + slots) * layout.slot_bytes <= layout.lane_bytes
    _, first_slot = _reference_first_ids(layout.page_bytes, layout.slot_bytes)
    state_end = (first_slot + slots) * layout.slot_bytes
    kv_begin = (layout.lane_bytes // layout.page_bytes - pages) * layout.page_bytes
    return state_end <= kv_begin


@st.composite
def small_layouts(draw: st.DrawFn) -> Layout:
    page_bytes, slot_bytes = draw(st.one_of(st.just(0), SIZES)), draw(st.one_of(st.just(0), SIZES))
    page_bytes = page_bytes if slot_bytes else max(1, page_bytes)
    units = draw(st.integers(4, 40))
    lane_bytes = units * max(256, page_bytes, slot_bytes) + draw(st.integers(0, 5000))
    lane_bytes += 512 * 2
    page_tokens = draw(st.integers(1, 20))
    return Layout.from_unit_sizes(page_bytes, slot_bytes, lane_bytes, draw(st.integers(1, 3)), page_tokens)


@given(small_layouts())
def test_null_area_holds_one_unit_of_each_pool_and_is_never_handed_out(layout: Layout) -> None:
    if layout.page_bytes and layout.slot_bytes:
        expected = _reference_first_ids(layout.page_bytes, layout.slot_bytes)
    else:
        expected = (int(layout.page_bytes > 0), int(layout.slot_bytes > 0))
    assert (layout.first_page, layout.first_slot) == expected
    null_per_lane = layout.null_bytes // layout.lane_count
    assert null_per_lane >= max(layout.page_bytes, layout.slot_bytes)
    assert layout.first_page * layout.page_bytes >= null_per_lane or not layout.page_bytes
    assert layout.first_slot * layout.slot_bytes >= null_per_lane or not layout.slot_bytes


def _largest(holds: Iterator[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, holds))


@given(small_layouts(), st.integers(0, 12))
def test_most_pages_and_slots_agree_with_brute_force(layout: Layout, other: int) -> None:
    most_pages = _largest(_feasible(layout, pages, other) for pages in itertools.count(1))
    most_slots = _largest(_feasible(layout, other, slots) for slots in itertools.count(1))
    assert layout.max_pages(slots=other) == most_pages
    assert layout.max_slots(pages=other) == most_slots
    for pages, slots in itertools.product(range(0, most_pages + 3, 3), range(0, most_slots + 3, 3)):
        assert layout.fits(pages, slots) == _feasible(layout, pages, slots)


@given(small_layouts(), st.integers(1, 300))
def test_most_sequences_agree_with_brute_force(layout: Layout, tokens: int) -> None:
    pages = -(-tokens // layout.page_tokens) if layout.page_bytes else 0
    slots = int(layout.slot_bytes > 0)
    assert layout.max_sequences(tokens) == _largest(_feasible(layout, n * pages, n * slots) for n in itertools.count(1))


@given(small_layouts(), st.integers(1, 12))
def test_most_tokens_agree_with_brute_force(layout: Layout, sequences: int) -> None:
    slots = sequences if layout.slot_bytes else 0
    if layout.page_bytes:
        pages = _largest(_feasible(layout, n * sequences, slots) for n in itertools.count(1))
        assert layout.max_tokens(sequences) == pages * layout.page_tokens
    else:
        assert layout.max_tokens(sequences) == (None if _feasible(layout, 0, slots) else 0)


@given(small_layouts(), st.integers(1, 300), st.integers(1, 12))
def test_sequences_and_tokens_are_inverses(layout: Layout, tokens: int, sequences: int) -> None:
    longest = layout.max_tokens(sequences)
    if longest is not None:
        assert (layout.max_sequences(tokens) >= sequences) == (longest >= tokens)


def test_sequences_of_no_tokens_take_a_slot_each_and_are_unbounded_without_one() -> None:
    layout = Layout.from_unit_sizes(512, 1024, 64 * KIB)
    assert layout.max_sequences(0) == layout.max_slots() == 63
    with pytest.raises(InvalidArgument, match="tokens=0 without a state pool"):
        Layout.from_unit_sizes(512, 0, 64 * KIB).max_sequences(0)


@pytest.mark.parametrize("call", ["fits", "max_pages", "max_slots", "max_sequences", "max_tokens"])
def test_negative_counts_are_refused(call: str) -> None:
    with pytest.raises(InvalidArgument, match="=-1: expected an integer"):
        getattr(Layout.from_unit_sizes(512, 1024, 64 * KIB), call)(-1)


# Sizes.


@pytest.mark.parametrize(
    ("page_bytes", "slot_bytes", "first_page", "first_slot"),
    [
        (12_416, 12_648_448, 1009, 1),
        (12_416, 24_832, 2, 1),
        (24_832, 12_416, 2, 2),
        (1, 1, 1, 1),
        (1, 7, 1, 1),
        (7, 24_832, 97, 1),
        (24_832, 7, 1, 97),
        (12_648_448, 1, 1, 49_408),
        (256, 0, 1, 0),
        (0, 256, 0, 1),
    ],
)
def test_any_two_sizes_go_together(page_bytes: int, slot_bytes: int, first_page: int, first_slot: int) -> None:
    layout = Layout.from_unit_sizes(page_bytes, slot_bytes, 2**26)
    assert (layout.first_page, layout.first_slot) == (first_page, first_slot)
    assert layout.page_bytes == -(-page_bytes // 256) * 256 and layout.slot_bytes == -(-slot_bytes // 256) * 256
    assert layout.max_pages() == (layout.page_count - first_page if page_bytes else 0)
    assert (
        layout.lane_bytes - layout.null_bytes - layout.max_pages() * layout.page_bytes
        < (2 * layout.page_bytes + layout.slot_bytes)
        or not page_bytes
    )


@pytest.mark.parametrize("sizes", [(1, 0), (0, 7), (0, 24_832)])
def test_one_pool_begins_at_id_1(sizes: tuple[int, int]) -> None:
    layout = Layout.from_unit_sizes(*sizes, lane_bytes=2**20)
    unit_bytes = layout.page_bytes + layout.slot_bytes
    usable = 2**20 // unit_bytes - 1
    assert layout.first_page + layout.first_slot == 1
    assert layout.max_pages() + layout.max_slots() == usable
    assert layout.null_bytes == unit_bytes


def test_states_alone_and_kv_alone() -> None:
    states = Layout.plan(_geometry(0, 3), "1MiB")
    assert (states.lane_count, states.page_bytes, states.page_count, states.first_page) == (1, 0, 0, 0)
    assert states.max_tokens(1) is None and states.max_sequences(10**9) == states.max_slots()
    pages = Layout.plan(_geometry(3, 0), "1MiB")
    assert (pages.lane_count, pages.slot_bytes, pages.slot_count, pages.first_slot) == (3, 0, 0, 0)
    assert pages.max_tokens(1) == (pages.page_count - 1) * 16


def test_arena_exactly_large_enough_and_one_byte_less() -> None:
    """Per lane: null slot and one slot of 9,216 B reach into the third page of 8,192 B, the fourth is the one page."""
    geometry = _geometry(2, 2)
    layout = Layout.plan(geometry, 2 * 4 * 8192)
    assert (layout.page_bytes, layout.slot_bytes, layout.max_sequences(1)) == (8192, 9216, 1)
    with pytest.raises(ArenaTooSmall, match="null area of 9,216 B and a page of 8,192 B and a slot of 9,2") as error:
        Layout.plan(geometry, 2 * 4 * 8192 - 1)
    assert "arena of 65,535 B: each of its 2 lanes has 32,512 B" in str(error.value)


@pytest.mark.parametrize(
    ("page_bytes", "slot_bytes", "enough"),
    [(256, 0, 512), (0, 768, 1536), (512, 512, 1536), (256, 1024, 2304), (1024, 256, 3072)],
)
def test_smallest_arena_holds_the_null_area_and_one_unit_of_each(page_bytes: int, slot_bytes: int, enough: int) -> None:
    assert Layout.from_unit_sizes(page_bytes, slot_bytes, enough).fits(int(page_bytes > 0), int(slot_bytes > 0))
    with pytest.raises(ArenaTooSmall):
        Layout.from_unit_sizes(page_bytes, slot_bytes, enough - 1)


def test_one_longest_sequence_beside_the_null_area_fits_and_one_page_less_does_not() -> None:
    geometry = named_model("jamba-v0.1")
    slot, page = 7 * 589_824, 65_536
    pages = 100
    lane_bytes = 2 * slot + pages * page
    layout = Layout.plan(geometry, 4 * lane_bytes)
    assert layout.max_tokens(1) == 16 * pages and layout.max_sequences(16 * pages) == 1
    assert Layout.plan(geometry, 4 * (lane_bytes - page)).max_sequences(16 * pages) == 0


def test_state_larger_than_the_arena_is_refused_with_the_numbers() -> None:
    with pytest.raises(ArenaTooSmall, match="arena of 1,048,576 B: each of its 4 lanes has 262,144 B, too little"):
        Layout.plan(named_model("jamba-v0.1"), "1MiB")


@pytest.mark.parametrize(
    "change",
    [
        {"page_bytes": 100}, {"slot_bytes": -256}, {"lane_bytes": 2**30}, {"lane_count": 0}, {"page_tokens": 0},
        {"page_bytes": 0, "slot_bytes": 0}, {"arena_bytes": 0}, {"page_bytes": 256.0},
    ],
)  # fmt: skip
def test_sizes_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        dataclasses.replace(Layout.from_unit_sizes(512, 1024, 64 * KIB), **change)


@pytest.mark.parametrize("size", ["0GiB", "-1GiB", "much", 0, -5, 1.5])
def test_arena_sizes_that_make_no_sense_are_refused(size: object) -> None:
    with pytest.raises(InvalidArgument, match="memory size"):
        Layout.plan(_geometry(1, 1), size)  # type: ignore[arg-type]


def test_constants() -> None:
    assert (UNIT_ALIGNMENT, ARENA_ALIGNMENT) == (256, 2_097_152)


# describe().


def test_description_shows_what_a_person_has_to_check() -> None:
    text = Layout.plan(named_model("bamba-9b"), "8GiB").describe()
    for expected in (
        "bamba-9b in 8.00 GiB (8,589,934,592 B): lane_count=3, 2,863,311,360 B each, 512 B over",
        "page: 65,536 B per lane, 196,608 B in all, 16 tokens, NHD; ids 651 to 43,689",
        "slot: 42,618,880 B per lane, 127,856,640 B in all; ids 1 to 66",
        "null area: 42,618,880 B per lane, 127,856,640 B in all",
        "lanes 0 to 2, laid out alike:",
        "page: key 16x8x128 bfloat16 at +0, value 16x8x128 bfloat16 at +32,768; layers 9 | 18 | 27",
        "slot: conv 8448x4 bfloat16 at +0, ssm 128x64x128 float32 at +67,584, next layer +4,261,888; layers 0 1 2 3",
        "capacity: 43,039 pages or 66 slots",
        "waste: rounding 0 B per page and 0 B per slot; 1 padding layers, 4,261,888 B per slot",
    ):
        assert expected in text


def test_description_of_many_equal_lanes_stays_short() -> None:
    text = Layout.plan(named_model("falcon-h1-34b"), "64GiB").describe()
    assert "layers 0 | 1 | 2 | 3 | ... | 71" in text and len(text.splitlines()) < 12


def test_description_shows_lanes_that_differ_and_rounding() -> None:
    geometry = Geometry((_attention(0), _attention(1)), tuple(_state(layer, rows=100) for layer in range(3)), 5)
    text = Layout.plan(geometry, "1MiB", lane_count=2).describe()
    assert "lane 0:" in text and "lane 1:" in text
    assert "rounding 0 B per page and 672 B per slot; 1 padding layers, 7,424 B per slot" in text


def test_description_of_one_pool_and_of_given_sizes() -> None:
    text = Layout.from_unit_sizes(0, 768, 64 * KIB).describe()
    assert text.startswith("given unit sizes in 64.00 KiB") and "page:" not in text and "any length" in text
    assert "slot:" not in Layout.from_unit_sizes(768, 0, 64 * KIB).describe()
