"""Prefixes that are reused, snapshots, forks and beams: who shares which page, and who copies it when."""

from __future__ import annotations

import numpy as np
import pytest

from avmp.errors import InvalidArgument, OutOfMemory, StaleHandle
from avmp.growth import Prefix
from avmp.layout import Layout
from avmp.options import Options
from tests.helpers import KIB, Whole, whole_allocators
from tests.serving import Serving, state_after

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 32 * KIB, page_tokens=4)
POISON = Options(debug=2, poison=True)


@pytest.fixture
def whole():
    yield from whole_allocators()


def words(begin: int, end: int, seed: int = 0) -> list[int]:
    """Tokens of positions ``begin`` to ``end - 1`` of a text."""
    return [1 + (position * 7919 + seed * 104_729) % 50_000 for position in range(begin, end)]


# -- reuse ---------------------------------------------------------------------------------------------------------


def test_a_third_request_reuses_the_2000_tokens_that_two_of_4278_have_in_common(whole: Whole):
    layout = Layout.from_unit_sizes(256, 40 * 256, 512 * KIB, page_tokens=16)
    allocator = whole(layout, max_tokens=4288, options=Options(debug=1, poison=True))
    model = Serving(allocator)
    common = words(0, 2000)
    first = model.admit(common)
    branch = allocator.snapshot(first)
    model.feed(first, words(2000, 4278, seed=1))
    second = model.admit([*common, *words(2000, 4278, seed=2)], branch, reused=2000)
    before = allocator.stats().pages_live
    third = model.admit([*common, *words(2000, 4278, seed=3)], branch, reused=2000)
    assert allocator.stats().pages_live - before == -(-4278 // 16) - 125
    assert allocator.pages(third)[:125].tolist() == allocator.pages(second)[:125].tolist()
    for handle in (first, second, third):
        model.verify(handle)


@pytest.mark.parametrize("stride", [256, 2048, 4096])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_a_request_resumes_at_the_last_snapshot_before_it_differs_for_any_page_and_stride(
    page: int, stride: int, whole: Whole
):
    layout = Layout.from_unit_sizes(8 * page, 1280, 1 << 20, page_tokens=page)
    allocator = whole(layout, max_tokens=10_240, max_rows=4, options=Options(debug=1, poison=True))
    model = Serving(allocator)
    text = words(0, 9000)
    first = model.admit(text[:0])
    snapshots = {}
    for begin in range(0, 9000, stride):
        model.feed(first, text[begin : begin + stride])
        snapshots[min(begin + stride, 9000)] = allocator.snapshot(first)
    same = 8500
    position = max(at for at in snapshots if at <= same)
    assert position == same // stride * stride
    second = model.admit([*text[:same], *words(same, 9100, seed=4)], snapshots[position], reused=position)
    assert allocator.pages(second)[: position // page].tolist() == allocator.pages(first)[: position // page].tolist()
    model.feed(first, words(9000, 9050))
    model.verify(second)
    model.verify(first)


def test_a_prompt_that_ends_just_below_a_page_is_resumed_from_a_snapshot_taken_while_decoding(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    first = model.admit(words(0, 15))
    for position in range(15, 18):
        model.feed(first, words(position, position + 1))
        snapshot = allocator.snapshot(first)
        second = model.admit(words(0, position + 4), snapshot, reused=position + 1)
        model.verify(second)
        model.verify(first)
        allocator.release(second)
        allocator.drop(snapshot)


def test_kv_without_a_state_is_no_prefix_for_a_model_with_states(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([8])[0])
    snapshot = allocator.snapshot(sequence)
    allocator.extend(sequence, 8)
    pages = allocator.pages(sequence)
    with pytest.raises(InvalidArgument, match="state"):
        allocator.admit([16], Prefix(pages=pages))
    with pytest.raises(InvalidArgument, match="position 8 needs exactly 2"):  # never more than the state covers
        allocator.admit([16], Prefix(snapshot, pages))
    with pytest.raises(StaleHandle, match="slot"):
        allocator.admit([16], Prefix(snapshot, [int(pages[0]), allocator.slot(sequence)]))
    assert allocator.lengths(allocator.admit([16], Prefix(snapshot, pages[:2]))).tolist() == [16]


def test_without_states_kept_pages_are_a_prefix_of_their_own(whole: Whole):
    layout = Layout.from_unit_sizes(256, 0, 16 * KIB, page_tokens=4)
    allocator = whole(layout, options=POISON)
    model = Serving(allocator)
    first = model.admit(words(0, 14))
    kept = allocator.pages(first)[:3]
    allocator.retain(kept)
    allocator.release(first)
    second = model.admit(words(0, 20), Prefix(pages=kept), reused=12)
    model.verify(second)
    assert allocator.stats().pages_live == 5
    with pytest.raises(InvalidArgument, match="twice"):
        allocator.admit([20], Prefix(pages=[kept[0], kept[0]]))


# -- snapshots -----------------------------------------------------------------------------------------------------


def test_a_snapshot_costs_one_slot_and_no_page_and_is_refused_rather_than_push_anybody_out(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    running = model.admit(words(0, 30))
    snapshots = []
    while allocator.fits("snapshot", running):
        before = allocator.stats()
        snapshots.append(allocator.snapshot(running))
        after = allocator.stats()
        assert (after.slots_live - before.slots_live, after.pages_live - before.pages_live) == (1, 0)
    assert len(snapshots) == LAYOUT.max_slots(8) - 1
    with pytest.raises(OutOfMemory, match="snapshot"):
        allocator.snapshot(running)
    assert len(snapshots) == allocator.stats().snapshots
    model.verify(running)
    allocator.drop(snapshots[0])
    model.feed(running, words(30, 35))
    model.verify(running)


def test_a_dropped_snapshot_never_answers_for_the_one_that_takes_its_place(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    old_text, new_text = words(0, 9), words(0, 9, seed=5)
    first, second = model.admit(old_text), model.admit(new_text)
    cache = {"key": allocator.snapshot(first)}
    old = cache["key"]
    allocator.release(first)
    allocator.drop(old)
    cache["key"] = allocator.snapshot(second)
    assert cache["key"] != old
    with pytest.raises(StaleHandle, match="gone already"):
        allocator.admit([9], old)
    third = model.admit([*new_text, 77], cache["key"], reused=9)
    model.verify(third)


def test_a_snapshot_outlives_its_sequence_and_can_be_restored_into_any_other(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    first, second = model.admit(words(0, 10)), model.admit(words(0, 25, seed=6))
    snapshot = allocator.snapshot(first)
    model.feed(first, words(10, 20))
    allocator.release(first)
    for _ in range(3):
        allocator.restore(second, snapshot)
        model.tokens[second] = words(0, 10)
        model.verify(second)
        model.feed(second, words(10, 23, seed=7))
        model.verify(second)


def test_whoever_appends_behind_a_shared_tail_copies_it_once_and_the_last_holder_keeps_it(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    writer = model.admit(words(0, 6))
    snapshot = allocator.snapshot(writer)
    tail = int(allocator.pages(writer)[1])
    others = [model.admit(words(0, 6), snapshot, reused=6) for _ in range(3)]
    model.feed(writer, words(6, 7, seed=8))  # the one that wrote the page goes on in place
    assert int(allocator.pages(writer)[1]) == tail and allocator.stats().tail_copies == 0
    before = allocator.stats().pages_live
    model.feed(others[0], words(6, 8, seed=9))
    assert int(allocator.pages(others[0])[1]) != tail
    assert (allocator.stats().tail_copies, allocator.stats().pages_live) == (1, before + 1)
    allocator.release(writer)
    allocator.drop(snapshot)
    model.feed(others[1], words(6, 8, seed=10))  # two are left
    assert int(allocator.pages(others[1])[1]) != tail and allocator.stats().tail_copies == 2
    model.feed(others[2], words(6, 8, seed=11))  # nobody else is left
    assert int(allocator.pages(others[2])[1]) == tail and allocator.stats().tail_copies == 2
    for other in others:
        model.verify(other)


def test_the_copy_of_a_shared_tail_is_part_of_what_extend_asks_for(whole: Whole):
    allocator = whole(LAYOUT, chaos=None)
    writer = int(allocator.admit([6])[0])
    snapshot = allocator.snapshot(writer)
    other = int(allocator.admit([6], snapshot)[0])
    while allocator.fits("take", "page", 1):
        allocator.take("page", 1)
    assert not allocator.fits("extend", other)
    assert allocator.fits("extend", writer) and allocator.fits("extend", other, 0)
    before = allocator.digest()
    with pytest.raises(OutOfMemory):
        allocator.extend([writer, other])
    assert allocator.digest() == before


# -- forks and beams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_forks_share_full_pages_and_have_a_tail_and_a_state_of_their_own(length: int, whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    parent = model.admit(words(0, length))
    before = allocator.stats()
    children = allocator.fork(parent, 3).tolist()
    after = allocator.stats()
    assert after.slots_live - before.slots_live == 3
    assert after.pages_live - before.pages_live == (3 if length % 4 else 0)
    for seed, handle in enumerate([parent, *children]):
        model.tokens[handle] = words(0, length)
        model.verify(handle)
        model.feed(handle, words(length, length + 5, seed=20 + seed))
    for handle in (parent, *children):
        model.verify(handle)
    allocator.release(parent)
    for handle in children:
        model.verify(handle)


def test_a_beam_goes_on_from_its_parents_and_lets_go_of_whoever_has_no_child(whole: Whole):
    allocator = whole(LAYOUT, options=POISON)
    model = Serving(allocator)
    beam = [model.admit(words(0, 6 + row, seed=row)) for row in range(4)]
    rng = np.random.default_rng(2)
    for step in range(12):
        parents = rng.integers(0, 4, 4).tolist()
        allocator.reorder(beam, parents)
        was = {handle: list(model.tokens[handle]) for handle in beam}
        for handle, parent in zip(beam, parents, strict=True):
            model.tokens[handle] = list(was[beam[parent]])
            model.verify(handle)
        for row, handle in enumerate(beam):
            model.feed(handle, words(step, step + 1 + step % 2, seed=50 + row))
    for handle in beam:
        model.verify(handle)
    assert state_after(model.tokens[beam[0]]) == model.state(beam[0])
