"""Sizes at start-up: what an allocator can hold, what it refuses to begin with, and how little is out of reach."""

from __future__ import annotations

import random

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.baselines import STATIC_SHARES, make_policy
from avmp.errors import ArenaTooSmall, InvalidArgument, OutOfMemory, RowsExhausted
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.options import Options
from avmp.replay import replay, setup_for
from avmp.workloads import Trace
from tests.helpers import KIB, Whole, whole_allocators


@pytest.fixture
def whole():
    yield from whole_allocators()


def geometry(attention_layers: int, state_layers: int) -> Geometry:
    attention = tuple(AttentionLayer(layer, 2, 32, 32, "bfloat16") for layer in range(attention_layers))
    part = StatePart("ssm", (64, 16), "float32")
    return Geometry(attention, tuple(StateLayer(50 + layer, (part,)) for layer in range(state_layers)))


# -- what a request holds ------------------------------------------------------------------------------------------


def test_a_request_of_twelve_tokens_holds_one_slot_and_one_page_beside_a_state_of_7800_tokens(whole: Whole):
    token_bytes = 2 * 2 * 32 * 2
    attention = tuple(AttentionLayer(layer, 2, 32, 32, "bfloat16") for layer in range(2))
    part = StatePart("ssm", (7800, token_bytes), "uint8")
    model = Geometry(attention, tuple(StateLayer(layer, (part,)) for layer in range(2, 24)))
    layout = Layout.plan(model, "256MiB")
    allocator = whole(layout, max_tokens=4096)
    sequence = allocator.admit([12])
    held = allocator.stats().used_bytes
    assert held == layout.slot_total_bytes + layout.page_total_bytes
    useful = model.state_bytes_per_sequence + 12 * model.kv_bytes_per_token
    assert held <= 1.02 * useful + layout.page_total_bytes
    pool_bytes = layout.arena_bytes - layout.null_bytes
    assert held / pool_bytes < 0.2
    assert allocator.max_sequences(12) == pool_bytes // held - 1
    allocator.release(sequence)


# -- one request exactly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chaos", [None, 1])
def test_an_arena_of_exactly_one_longest_request_beside_the_null_area_serves_it_again_and_again(
    chaos: int | None, whole: Whole
):
    pages, slot = 50, 5
    layout = Layout.from_unit_sizes(256, slot * 256, (slot + slot + pages) * 256, page_tokens=4)
    allocator = whole(layout, max_tokens=4 * pages, chaos=chaos)
    assert allocator.max_tokens(1) == 200 and allocator.max_sequences(200) == 1
    for _ in range(5):
        sequence = allocator.admit([1])
        for _ in range(199):
            allocator.extend(sequence)
        assert allocator.stats().used_bytes == layout.arena_bytes - layout.null_bytes
        assert not allocator.fits("admit", [0])
        allocator.release(sequence)


def test_an_arena_one_page_short_of_the_longest_request_is_refused_at_once_with_the_numbers():
    layout = Layout.from_unit_sizes(256, 5 * 256, (5 + 5 + 49) * 256, page_tokens=4)
    with pytest.raises(ArenaTooSmall) as refusal:
        Allocator(layout, max_tokens_per_sequence=200)
    for number in ("15,104 B", "200 tokens", "50 pages of 256 B", "1 slots of 1,280 B", "null area of 1,280 B"):
        assert number in str(refusal.value)
    assert Allocator(layout, max_tokens_per_sequence=196).max_tokens(1) == 196


def test_floors_are_part_of_what_has_to_fit_at_the_start():
    layout = Layout.from_unit_sizes(256, 5 * 256, (5 + 3 * 5 + 50) * 256, page_tokens=4)
    options = Options(floor_slots=3)
    assert Allocator(layout, max_tokens_per_sequence=200, options=options).max_tokens(1) == 200
    with pytest.raises(ArenaTooSmall, match="3 slots"):
        Allocator(layout, max_tokens_per_sequence=201, options=options)
    with pytest.raises(ArenaTooSmall, match="floors of 51 pages"):
        Allocator(layout, max_tokens_per_sequence=8, options=Options(floor_slots=3, floor_pages=51))


def test_the_longest_sequence_is_what_the_model_names_or_what_fits_whichever_is_less():
    model = named_model("jamba-v0.1")
    small, large = Allocator(model, "256MiB"), Allocator(model, "8GiB", max_tokens_per_sequence=1000)
    assert small.max_tokens_per_sequence == small.max_tokens(1) == small.layout.max_tokens(1)
    assert large.max_tokens_per_sequence == 1008  # whole pages
    assert model.max_position_embeddings == 262144
    with pytest.raises(InvalidArgument, match="max_tokens_per_sequence"):
        Allocator(geometry(1, 1), "1MiB")


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"max_rows": True}, {"max_tokens": 0}, {"max_tokens": 1.5}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int], whole: Whole):
    with pytest.raises(InvalidArgument):
        whole(Layout.from_unit_sizes(256, 1280, 16 * KIB), **wrong)


# -- more requests than slots --------------------------------------------------------------------------------------


def test_1024_rows_with_30_slots_are_30_sequences_and_994_rows_of_padding(whole: Whole):
    layout = Layout.from_unit_sizes(256, 16 * 256, 31 * 16 * 256 + 30 * 256, page_tokens=16)
    allocator = whole(layout, max_tokens=16, max_rows=1024)
    assert allocator.max_sequences(1) == 30  # known before anything is allocated
    with pytest.raises(OutOfMemory):
        allocator.admit([1] * 1024)
    sequences = allocator.admit([1] * 30)
    tables = allocator.batch(sequences, pad_to=1024)
    assert tables.block_table.shape == (1024, 1) and tables.num_sequences == 30
    assert (tables.state_indices[:30] > 0).all() and len(set(tables.state_indices[:30].tolist())) == 30
    for padded in (tables.block_table, tables.seq_lens, tables.state_indices, tables.has_initial_state):
        assert not padded[30:].any()
    assert tables.query_start_loc.tolist() == [*range(31), *[30] * 994]


def test_one_sequence_more_than_there_are_slots_is_refused_and_the_others_go_on(whole: Whole):
    layout = Layout.from_unit_sizes(256, 16 * 256, 9 * 16 * 256, page_tokens=16)
    allocator = whole(layout, max_tokens=64, max_rows=64)
    slots = layout.max_slots()
    sequences = allocator.admit([0] * slots)
    state, before = [allocator.slot(handle) for handle in sequences], allocator.digest()
    with pytest.raises(OutOfMemory) as refusal:
        allocator.admit([0])
    assert (refusal.value.pool, refusal.value.wanted_slots, refusal.value.missing_units) == ("slot", 1, 1)
    assert allocator.digest() == before and [allocator.slot(handle) for handle in sequences] == state
    allocator.release(sequences[3])
    assert len(allocator.admit([0])) == 1


def test_rows_are_a_limit_of_their_own_and_reported_as_such(whole: Whole):
    allocator = whole(Layout.from_unit_sizes(256, 256, 64 * KIB), max_rows=3)
    allocator.admit([1, 1])
    assert allocator.max_sequences(1) == 1
    with pytest.raises(RowsExhausted, match="max_rows=3"):
        allocator.admit([1, 1])


# -- nothing out of reach ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [12_416, 24_832, 12_648_448, 7, 1])
@pytest.mark.parametrize("slot", [12_416, 12_648_448, 7])
def test_after_admitting_to_refusal_less_than_a_slot_and_two_pages_is_out_of_reach(page: int, slot: int, whole: Whole):
    rng = random.Random(f"{page} {slot}")
    unit = max(page, slot, 256)
    layout = Layout.from_unit_sizes(page, slot, 40 * unit + 3 * 256, page_tokens=16)
    few = min(layout.max_slots(), 60)
    allocator = whole(layout, max_tokens=16 * 20, max_rows=few + 200, options=Options(debug=1))
    if layout.max_slots() > 200:  # fill up with what is large, then with what is small
        allocator.admit([16 * 20] * min(allocator.max_sequences(320), 60))
        allocator.take("page", most_taken(allocator, "page"))
        allocator.take("slot", most_taken(allocator, "slot"))
    while allocator.fits("admit", [1]) and allocator.stats().sequences < allocator.max_rows:
        allocator.admit([rng.randint(1, min(allocator.max_tokens(1), 320))])
    allocator.check()
    room = layout.lane_count * layout.lane_bytes - layout.null_bytes
    assert 0 <= room - allocator.stats().used_bytes < layout.slot_total_bytes + 2 * layout.page_total_bytes
    assert allocator.stats().used_bytes + layout.null_bytes <= layout.arena_bytes


def most_taken(allocator: Allocator, kind: str) -> int:
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allocator.fits("take", kind, middle) else (low, middle - 1)
    return low


def test_host_tables_are_a_small_share_of_the_arena_and_an_unbound_id_leads_to_the_null_unit():
    for name in ("jamba-v0.1", "zamba2-7b", "qwen3-next-80b-a3b", "lfm2-1.2b"):
        allocator = Allocator(named_model(name), "4GiB", max_tokens_per_sequence=2048)
        stats = allocator.stats()
        assert stats.table_bytes <= 0.005 * allocator.layout.arena_bytes, name
        for pool in allocator._space.pools:
            # One entry for each id there can be, the null id included; ids that nobody has point to unit 0.
            assert len(pool.physical) == pool.capacity + 1 and not pool.physical.any()
        handles = allocator.take("slot", allocator.layout.max_slots())
        ends = (allocator._space.slots.physical.astype(np.int64) + 1) * allocator.layout.slot_bytes
        assert ends.max() <= allocator.layout.lane_bytes
        allocator.give(handles)


@pytest.mark.parametrize(("attention", "states"), [(0, 1), (1, 0), (1, 1), (0, 7), (7, 0), (8, 24)])
def test_a_feasible_arena_never_reports_room_for_nothing(attention: int, states: int, whole: Whole):
    layout = Layout.plan(geometry(attention, states), "1MiB")
    allocator = whole(layout, max_tokens=64, chaos=2)
    assert allocator.max_tokens(1) == 64 and allocator.max_sequences(64) > 1
    sequences = allocator.admit([64] * allocator.max_sequences(64))
    assert not allocator.fits("admit", [64])
    assert allocator.lengths(sequences).tolist() == [64] * len(sequences)


# -- a load that changes its mind ----------------------------------------------------------------------------------


def test_from_short_to_long_requests_it_keeps_up_with_one_byte_budget_and_beats_every_split():
    """95 of 100 requests are short in the first phase, 95 of 100 are long in the second."""
    rng = np.random.default_rng(11)
    long = np.concatenate([rng.random(400) < 0.05, rng.random(400) < 0.95])
    prompts = np.where(long, rng.integers(1500, 4000, 800), rng.integers(10, 60, 800))
    trace = Trace("phases", np.zeros(800), prompts, rng.integers(1, 40, 800))
    setup = setup_for(trace, Layout.plan(named_model("jamba-v0.1"), "1GiB"))
    done = {}
    for name in ("avmp", "oracle", *STATIC_SHARES):
        result = replay(trace, make_policy(name, setup))
        done[name] = result.completed_per_1000_steps
        if name in ("avmp", "oracle"):
            assert result.completed == 800
    assert done["avmp"] >= 0.97 * done["oracle"]
    assert done["avmp"] > 1.1 * max(done[name] for name in STATIC_SHARES)
