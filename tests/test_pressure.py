"""Memory runs out: what is refused, for which reason, and that nothing is refused while the bytes are there."""

from __future__ import annotations

import random
import threading
from collections import deque

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.errors import ArenaTooSmall, OutOfMemory
from avmp.layout import Layout
from avmp.options import Options
from tests.helpers import KIB, Whole, whole_allocators

FIVE_PAGES = Layout.from_unit_sizes(256, 5 * 256, 16 * KIB, page_tokens=4)
SIZES = {
    "slot of eight pages": Layout.from_unit_sizes(256, 8 * 256, 64 * KIB, page_tokens=4),
    "sizes that do not divide": Layout.from_unit_sizes(768, 1280, 96 * KIB, lane_count=2, page_tokens=4),
    "slot smaller than a page": Layout.from_unit_sizes(1024, 256, 64 * KIB, page_tokens=4),
}


@pytest.fixture
def whole():
    yield from whole_allocators()


def free_bytes(allocator: Allocator) -> int:
    """Bytes that hold nothing, the null area and the rest of each lane apart."""
    layout, stats = allocator.layout, allocator.stats()
    return layout.lane_count * layout.lane_bytes - stats.null_bytes - stats.used_bytes


def need_of(layout: Layout, tokens: int) -> int:
    return layout.pages_per_sequence(tokens) * layout.page_total_bytes + layout.slot_total_bytes


# -- phases that want opposite things ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_ten_changes_between_states_and_kv_cross_the_middle_and_refuse_nothing_that_fits(name: str, whole: Whole):
    layout = SIZES[name]
    allocator = whole(layout, max_tokens=200, max_rows=256, chaos=5, options=Options(debug=1))
    rng = random.Random(f"phases {name}")
    running: deque[int] = deque()
    side, crossings, refusals = None, 0, 0
    short = 3 if layout.slot_bytes > layout.page_bytes else 0
    for phase in range(20):
        longest = short if phase % 2 else 190
        for _ in range(100 if short else 280):
            tokens = rng.randint(longest // 2, longest)
            try:
                running.append(int(allocator.admit([tokens])[0]))
            except OutOfMemory as refusal:
                refusals += 1
                need = need_of(layout, tokens)
                assert free_bytes(allocator) < need + layout.slot_total_bytes + 2 * layout.page_total_bytes
                assert refusal.reason == "bytes" and not allocator.fits("admit", [tokens])
                allocator.release([running.popleft() for _ in range(min(2, len(running)))])
        stats = allocator.stats()
        mostly_states = stats.slots_extent * layout.slot_bytes > layout.lane_bytes // 2
        crossings += side is not None and mostly_states != side
        side = mostly_states
        allocator.check()
    assert crossings >= 10 and refusals > 100
    assert allocator.stats().retractions + allocator.stats().migrations >= 10


def test_with_sizes_that_divide_nothing_is_lost_to_rounding(whole: Whole):
    allocator = whole(FIVE_PAGES, max_tokens=64, chaos=3)
    rng = random.Random("exact")
    running: list[int] = []
    for _ in range(300):
        tokens = rng.choice([1, 4, 30, 64])
        fits = free_bytes(allocator) >= need_of(FIVE_PAGES, tokens)
        assert allocator.fits("admit", [tokens]) == (fits and len(running) < 16)
        if fits and len(running) < 16:
            running += allocator.admit([tokens]).tolist()
        else:
            allocator.release(running.pop(rng.randrange(len(running))))


def test_a_refusal_inside_a_batch_takes_back_its_earlier_members(whole: Whole):
    allocator = whole(FIVE_PAGES)
    sequences = allocator.admit([4, 4])
    before = allocator.digest()
    with pytest.raises(OutOfMemory):
        allocator.admit([1, 1, 64, 64, 64, 64])
    assert allocator.digest() == before
    allocator.take("page", 24)
    before = allocator.digest()
    with pytest.raises(OutOfMemory):
        allocator.extend(sequences, [60, 60])
    assert allocator.digest() == before
    allocator.extend(sequences, [60, 0])
    assert allocator.lengths(sequences).tolist() == [64, 4]


# -- what else may be in the way -----------------------------------------------------------------------------------


def at_the_border(allocator: Allocator, sequence: int) -> int:
    """Handle of that page of the sequence which lies nearest the slots."""
    pages = allocator._ledger.table.pages(allocator._ledger.table.row(sequence))
    pool = allocator._space.pages
    return pool.handle_of(int(pages[np.argmax(pool.ranks_of(pages))]))


def test_a_pinned_page_at_the_border_is_the_reason_until_it_is_unpinned(whole: Whole):
    allocator = whole(FIVE_PAGES)
    short, long = allocator.admit([16, 64]).tolist()
    pinned = at_the_border(allocator, long)
    allocator.pin(pinned)
    place = int(allocator._space.pages.physical[pinned & 0xFFFFFFFF])
    allocator.release(long)
    with pytest.raises(OutOfMemory, match="pinned") as refusal:
        allocator.take("slot", 8)
    assert refusal.value.reason == "pinned" and refusal.value.pinned_pages == 1
    assert refusal.value.held_by_pins_bytes > 0
    assert allocator._space.pages.physical[pinned & 0xFFFFFFFF] == place
    allocator.unpin(pinned)
    assert len(allocator.take("slot", 8)) == 8
    assert allocator.lengths(short).tolist() == [16]


@pytest.mark.parametrize("chaos", [None, 9])
def test_capacity_answers_equal_brute_force_after_each_of_a_hundred_pins_and_unpins(chaos: int | None, whole: Whole):
    allocator = whole(FIVE_PAGES, chaos=chaos, options=Options(debug=1))
    rng = random.Random("flips")
    rows = allocator.admit([17, 9, 30]).tolist()
    pinned: list[int] = []
    spared = set()
    for _ in range(100):
        if pinned and rng.random() < 0.5:
            allocator.unpin(pinned.pop(rng.randrange(len(pinned))))
        else:
            row = rng.choice(rows)
            pinned.append(rng.choice([*allocator.pages(row).tolist(), allocator.slot(row)]))
            allocator.pin(pinned[-1])
        tokens = rng.choice([0, 4, 13])
        answers = allocator.max_sequences(tokens), allocator.max_tokens(1)
        assert answers == (most_sequences(allocator, tokens), most_tokens(allocator))
        spared.add(answers)
        if rng.random() < 0.4:  # pins keep places that others have left
            allocator.release(rows.pop(rng.randrange(len(rows))))
            if allocator.fits("admit", [9]):
                rows.append(int(allocator.admit([rng.choice([1, 9])])[0]))
            if not rows:
                rows = allocator.admit([5]).tolist()
    assert len(spared) > 5


def most_sequences(allocator: Allocator, tokens: int) -> int:
    """By doing it: admits until refused, then lets go of them again."""
    admitted: list[int] = []
    while allocator.stats().sequences < allocator.max_rows:
        try:
            admitted += allocator.admit([tokens]).tolist()
        except OutOfMemory:
            break
    allocator.release(admitted)
    return len(admitted)


def most_tokens(allocator: Allocator) -> int:
    try:
        sequence = allocator.admit([0])
    except OutOfMemory:
        return 0
    tokens = 0
    while tokens < allocator.max_tokens_per_sequence:
        try:
            allocator.extend(sequence)
        except OutOfMemory:
            break
        tokens += 1
    allocator.release(sequence)
    return tokens


def test_units_of_steps_under_way_are_the_reason_until_their_ticket_is_retired(whole: Whole):
    allocator = whole(FIVE_PAGES)
    allocator.release(allocator.admit([64, 64]), after=3)
    with pytest.raises(OutOfMemory, match="retire") as refusal:
        allocator.take("slot", 7)
    assert (refusal.value.reason, refusal.value.awaiting_pages, refusal.value.awaiting_slots) == ("awaiting", 32, 2)
    allocator.retire(2)
    assert not allocator.fits("take", "slot", 7)
    allocator.retire(3)
    assert len(allocator.take("slot", 7)) == 7


def test_a_floor_is_the_reason_where_it_alone_is_in_the_way(whole: Whole):
    allocator = whole(FIVE_PAGES, options=Options(debug=2, floor_pages=20, floor_slots=3))
    most = FIVE_PAGES.max_slots(20)
    with pytest.raises(OutOfMemory) as refusal:
        allocator.take("slot", most + 1)
    assert refusal.value.reason == "floor" and refusal.value.held_by_floors_bytes == 20 * 256
    assert len(allocator.take("slot", most)) == most
    with pytest.raises(OutOfMemory) as refusal:
        allocator.take("slot", 20)
    assert refusal.value.reason == "bytes"
    assert len(allocator.take("page", 20)) == 20


# -- extremes ------------------------------------------------------------------------------------------------------


def test_a_state_of_three_mebibytes_beside_pages_of_256_bytes_is_nothing_special(whole: Whole):
    layout = Layout.from_unit_sizes(256, 3 << 20, 13 << 20, page_tokens=16)
    allocator = whole(layout, max_tokens=1600)
    assert allocator.max_sequences(16) == 3
    sequences = allocator.admit([16, 16, 16])
    assert not allocator.fits("admit", [16])
    allocator.release(sequences[:2])
    allocator.extend(sequences[2], 1000)
    assert allocator.lengths(sequences[2]).tolist() == [1016]


def test_a_state_larger_than_the_arena_is_refused_at_construction():
    with pytest.raises(ArenaTooSmall, match=r"3,145,728|3145728"):
        Allocator(Layout.from_unit_sizes(256, 3 << 20, 4 << 20), max_tokens_per_sequence=16)


@pytest.mark.parametrize("sizes", [(256, 1280), (256, 0), (0, 256), (1024, 256)])
def test_the_first_allocation_is_never_the_null_unit_and_no_thread_is_started(sizes: tuple[int, int], whole: Whole):
    threads = threading.enumerate()
    layout = Layout.from_unit_sizes(*sizes, 16 * KIB, page_tokens=4)
    allocator = whole(layout, max_tokens=32, chaos=None)
    sequence = allocator.admit([1])
    space = allocator._space
    for pool, first in ((space.pages, layout.first_page), (space.slots, layout.first_slot)):
        bound = np.flatnonzero(pool.references)
        assert len(bound) == (pool.unit_bytes > 0) and (bound >= 1).all()
        assert (pool.physical[bound] >= max(first, 1)).all()
        assert pool.physical[0] == 0
    allocator.release(sequence)
    assert threading.enumerate() == threads


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_padding_a_full_batch_needs_no_memory_whatever_the_number_of_draft_tokens(drafts: int, whole: Whole):
    allocator = whole(FIVE_PAGES, max_rows=8, chaos=None)
    sequences = allocator.admit([0] * 8)
    while allocator.fits("take", "page", 17):
        allocator.take("page", 1)
    allocator.extend(sequences, 1 + drafts)
    allocator.take("page", allocator._space.pages.free.count)
    used, before = allocator.stats(), allocator._space.pages.physical.copy()
    tables = allocator.batch(sequences, query_lens=[1 + drafts] * 8, pad_to=64)
    assert allocator.stats() == used and (allocator._space.pages.physical == before).all()
    assert not tables.block_table[8:].any() and not tables.state_indices[8:].any() and not tables.seq_lens[8:].any()
    assert (tables.query_start_loc[8:] == 8 * (1 + drafts)).all() and (tables.state_indices[:8] > 0).all()
