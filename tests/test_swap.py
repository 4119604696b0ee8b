"""Sequences that leave and come back, start again, or go back some tokens: what they find there."""

from __future__ import annotations

import pytest

from avmp.errors import InvalidArgument, OutOfMemory, RowsExhausted, StaleHandle
from avmp.handles import ID_MASK
from avmp.layout import Layout
from avmp.options import Options
from tests.helpers import KIB, Whole, whole_allocators
from tests.serving import Serving, state_after
from tests.test_prefix import words

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 32 * KIB, page_tokens=4)
POISON = Options(debug=2, poison=True)
KINDS = {
    "both": LAYOUT,
    "pages only": Layout.from_unit_sizes(256, 0, 16 * KIB, page_tokens=4),
    "states only": Layout.from_unit_sizes(0, 256, 16 * KIB, page_tokens=4),
}


@pytest.fixture
def whole():
    yield from whole_allocators()


# -- swap and preemption -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_sequence_comes_back_byte_for_byte_after_others_have_had_its_memory(kind: str, whole: Whole):
    allocator = whole(KINDS[kind], options=POISON)
    model = Serving(allocator)
    first, second = model.admit(words(0, 30)), model.admit(words(0, 17, seed=1))
    left = allocator.swap_out([first, second])
    with pytest.raises(StaleHandle):
        allocator.extend(first)
    assert allocator.stats().used_bytes == 0 and allocator.stats().swapped == 2
    for seed in range(4):
        other = model.admit(words(0, 50, seed=10 + seed))
        model.verify(other)
        allocator.release(other)
    back = allocator.swap_in(left[::-1]).tolist()
    for handle, was in zip(back, (second, first), strict=True):
        model.tokens[handle] = model.tokens[was]
        model.verify(handle)
        model.feed(handle, words(30, 37, seed=2))
        model.verify(handle)
    with pytest.raises(StaleHandle, match="gone already"):
        allocator.swap_in(left)


def test_swapping_gathers_every_page_in_order_and_the_slot_and_scatters_them_to_the_new_places(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([13])[0])
    allocator.drain()
    swapped = int(allocator.swap_out(sequence)[0])
    out = allocator.drain()[0]
    gathers = [launch for launch in out if launch.operation == "swap_out"]
    assert [(g.pool, g.destinations.tolist(), g.swapped) for g in gathers] == [
        ("page", [0, 1, 2, 3], swapped),
        ("slot", [0], swapped),
    ]
    assert [len(gather.sources) for gather in gathers] == [4, 1]
    back = int(allocator.swap_in(swapped)[0])
    scatters = [launch for launch in allocator.drain()[0] if launch.operation == "swap_in"]
    here = allocator._space.pages.physical[allocator.pages(back) & ID_MASK].tolist()
    assert [(s.pool, s.sources.tolist(), s.swapped) for s in scatters] == [
        ("page", [0, 1, 2, 3], swapped),
        ("slot", [0], swapped),
    ]
    assert scatters[0].destinations.tolist() == here


def test_swapping_in_needs_rows_pages_and_slots_like_an_admission(whole: Whole):
    allocator = whole(LAYOUT, max_rows=3)
    left = allocator.swap_out(allocator.admit([64, 30]))
    sequences = allocator.admit([64, 64])
    with pytest.raises(RowsExhausted, match="swap_in: 2 rows wanted, 1 of max_rows=3 free"):
        allocator.swap_in(left)
    assert allocator.fits("swap_in", left[:1])
    allocator.release(sequences[0])
    while allocator.fits("swap_in", left):
        allocator.take("page", 1)
    before = allocator.digest()
    with pytest.raises(OutOfMemory, match="swap_in") as refusal:
        allocator.swap_in(left)
    assert (refusal.value.wanted_pages, refusal.value.wanted_slots) == (24, 2)
    assert allocator.digest() == before and allocator.stats().swapped == 2
    allocator.discard(left)
    with pytest.raises(StaleHandle):
        allocator.discard(left[:1])


def test_a_preempted_request_starts_again_from_a_zeroed_state_and_says_so(whole: Whole):
    allocator = whole(LAYOUT, chaos=None, options=Options(debug=2))
    model = Serving(allocator)
    sequence = model.admit(words(0, 20))
    old = model.state(sequence)
    place = allocator._space.slots.physical[allocator.slot(sequence) & ID_MASK]
    allocator.release(sequence)
    again = int(allocator.admit([20])[0])
    assert allocator._space.slots.physical[allocator.slot(again) & ID_MASK] == place  # the very same bytes
    tables = allocator.batch(again)
    assert tables.has_initial_state.tolist() == [False] and tables.query_start_loc.tolist() == [0, 20]
    assert old != 0 and model.state(again) == 0


def test_a_state_is_left_as_it_was_where_zeroing_is_off(whole: Whole):
    allocator = whole(LAYOUT, chaos=None, options=Options(debug=2, zero_slots=False))
    model = Serving(allocator)
    sequence = model.admit(words(0, 20))
    old = model.state(sequence)
    allocator.release(sequence)
    again = int(allocator.admit([20])[0])
    assert model.state(again) == old != 0
    assert allocator.batch(again).has_initial_state.tolist() == [False]  # kernels must not read it


# -- going back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(0, 14))
def test_without_states_going_back_cuts_exactly_and_takes_no_memory_and_no_copy(length: int, whole: Whole):
    allocator = whole(KINDS["pages only"], options=POISON)
    model = Serving(allocator)
    sequence = model.admit(words(0, 13))
    fork = int(allocator.fork(sequence)[0])
    model.device.flush(allocator)
    free = allocator.stats().pages_free
    assert allocator.truncate(sequence, length) == length
    assert {launch.operation for launch in allocator.drain()[0]} <= {"move", "poison"}
    assert allocator.stats().pages_free >= free - 1  # but for what a disturbance does to the extent
    assert len(allocator.pages(sequence)) == -(-length // 4)
    assert allocator.lengths([sequence, fork]).tolist() == [length, 13]


def test_with_states_going_back_reaches_the_latest_snapshot_on_the_present_history(whole: Whole):
    allocator = whole(LAYOUT, max_tokens=80, options=POISON)
    model = Serving(allocator)
    sequence = model.admit(words(0, 5))
    taken = {}
    for end in (9, 16, 22):
        taken[end] = allocator.snapshot(sequence)
        model.feed(sequence, words(len(model.tokens[sequence]), end))
    snapshots = list(taken.values())  # at 5, 9 and 16
    allocator._space.disturbance, disturbance = None, allocator._space.disturbance
    before = allocator.digest()
    assert allocator.truncate(sequence, 22) == 22 and allocator.digest() == before
    allocator._space.disturbance = disturbance

    def goes_to(length: int, position: int) -> None:
        assert allocator.truncate(sequence, length) == position
        model.tokens[sequence] = model.tokens[sequence][:position]
        model.verify(sequence)

    goes_to(17, 16)
    model.feed(sequence, words(16, 30, seed=3))
    goes_to(15, 9)
    model.feed(sequence, words(9, 20, seed=4))
    goes_to(19, 9)  # the one at 16 is no longer on this history
    allocator.restore(sequence, snapshots[2])  # but can be restored, with what lay before it
    model.tokens[sequence] = words(0, 16)
    model.verify(sequence)
    goes_to(8, 5)
    allocator.drop(snapshots[0])
    model.feed(sequence, words(5, 9))
    goes_to(8, 0)
    assert model.state(sequence) == 0
    model.feed(sequence, words(0, 6))
    model.verify(sequence)


def test_going_back_works_in_a_full_arena(whole: Whole):
    allocator = whole(LAYOUT, chaos=None)
    sequence = int(allocator.admit([5])[0])
    snapshot = allocator.snapshot(sequence)
    allocator.extend(sequence, 20)
    while allocator.fits("take", "page", 1):
        allocator.take("page", 1)
    assert not allocator.fits("take", "slot", 1)
    assert allocator.truncate(sequence, 10) == 5
    assert allocator.lengths(sequence).tolist() == [5] and allocator.stats().snapshots == 1
    allocator.drop(snapshot)


def test_going_back_into_what_a_sliding_window_has_left_behind_is_refused(whole: Whole):
    allocator = whole(KINDS["pages only"])
    sequence = int(allocator.admit([40])[0])
    allocator.release_front(sequence, 24)  # a window of 16 tokens
    before = allocator.digest()
    with pytest.raises(InvalidArgument, match="given up the first 24"):
        allocator.truncate(sequence, 39)
    assert allocator.digest() == before
    allocator.extend(sequence, 8)
    assert allocator.truncate(sequence, 40) == 40
    assert allocator.truncate(sequence, 0) == 0
    assert allocator.pages(sequence).tolist() == []


# -- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_accepted_three_none_zero_two_none_leave_the_state_of_plain_decoding(kind: str, whole: Whole):
    """None: a step without drafts. Else k = 3 drafts, of which that many are accepted."""
    allocator = whole(KINDS[kind], options=POISON)
    model = Serving(allocator)
    text = words(0, 40)
    sequence = model.admit(text[:6])
    for accepted in [3, None, 0, 2, None]:
        at = len(model.tokens[sequence])
        if accepted is None:
            model.feed(sequence, text[at : at + 1])
        else:
            snapshot = allocator.snapshot(sequence)
            drafts = [*text[at : at + 1 + accepted], *[9999] * (3 - accepted)]
            model.feed(sequence, drafts)
            reached = allocator.truncate(sequence, at + 1 + accepted)
            model.tokens[sequence] = model.tokens[sequence][:reached]
            if accepted == 3 or not KINDS[kind].has_slots:
                assert reached == at + 1 + accepted
            else:
                assert reached == at  # back to the snapshot; what was accepted is computed again
            if reached < at + 1 + accepted:
                model.feed(sequence, text[reached : at + 1 + accepted])
            allocator.drop(snapshot)
        assert model.tokens[sequence] == text[: len(model.tokens[sequence])]
        model.verify(sequence)


@pytest.mark.parametrize("back", [1, 2, 3, 4])
def test_a_model_of_short_windows_alone_rolls_back_one_to_four_tokens(back: int, whole: Whole):
    allocator = whole(KINDS["states only"], options=POISON)
    model = Serving(allocator)
    sequence = model.admit(words(0, 10))
    allocator.snapshot(sequence)
    model.feed(sequence, words(10, 10 + back, seed=6))
    assert allocator.truncate(sequence, 10) == 10
    model.tokens[sequence] = words(0, 10)
    model.verify(sequence)
    assert model.state(sequence) == state_after(words(0, 10))
