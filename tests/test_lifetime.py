"""Who may use a unit, and until when: handles, double and foreign frees, tickets, pins, the stream of events."""

from __future__ import annotations

import hashlib
import random
import threading
from itertools import count
from typing import Any

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.errors import AvmpError, InvalidArgument, OutOfMemory, StaleHandle
from avmp.handles import ID_MASK
from avmp.layout import Layout
from avmp.options import Options
from tests.driver import Driver
from tests.helpers import KIB, FailAt, Whole, empty, whole_allocators

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 20 * KIB, page_tokens=4)


@pytest.fixture
def whole():
    yield from whole_allocators()


def physical(allocator: Allocator, handles: Any) -> list[int]:
    """Where units lie, by handle of one kind."""
    handles = np.atleast_1d(handles)
    pool = allocator._space.pages if handles[0] >> 59 == 1 else allocator._space.slots
    return pool.physical[handles & ID_MASK].tolist()


# -- double and foreign frees --------------------------------------------------------------------------------------


def one_of_each(allocator: Allocator) -> dict[str, tuple[str, Any]]:
    """By kind: the operation that lets go of it, and a live handle."""
    first, second = allocator.admit([5, 6]).tolist()
    return {
        "sequence": ("release", first),
        "snapshot": ("drop", allocator.snapshot(second)),
        "swapped": ("discard", int(allocator.swap_out(allocator.admit([2]))[0])),
        "page": ("give", allocator.take("page")),
        "slot": ("give", int(allocator.take("slot", 1)[0])),
    }


@pytest.mark.parametrize("quick", [False, True], ids=["checked", "quick"])
@pytest.mark.parametrize("kind", ["sequence", "snapshot", "swapped", "page", "slot"])
def test_letting_go_twice_is_refused_and_says_what_the_handle_was(kind: str, quick: bool, whole: Whole):
    allocator = whole(LAYOUT, chaos=None, options=Options(zero_slots=False)) if quick else whole(LAYOUT)
    operation, handle = one_of_each(allocator)[kind]
    getattr(allocator, operation)(handle)
    before = allocator.digest()
    with pytest.raises(StaleHandle, match=rf"{kind} \d+ \(generation \d+\)") as error:
        getattr(allocator, operation)(handle)
    assert "stale" in str(error.value) or "gone already" in str(error.value)
    with pytest.raises((StaleHandle, InvalidArgument)):  # together with one that is live, and named twice
        getattr(allocator, operation)([handle, one_of_each(allocator)[kind][1]])
    empty(allocator)
    assert allocator.digest() != before


@pytest.mark.parametrize("kind", ["sequence", "snapshot", "swapped", "page", "slot"])
@pytest.mark.parametrize("operation", ["release", "drop", "discard", "give", "unpin", "swap_in", "extend"])
def test_a_handle_of_another_kind_or_of_another_allocator_is_refused(operation: str, kind: str, whole: Whole):
    other, allocator = whole(LAYOUT), whole(LAYOUT)
    owner, handle = one_of_each(other)[kind]
    before = allocator.digest()
    with pytest.raises(StaleHandle):
        getattr(allocator, operation)(handle)
    assert allocator.digest() == before
    theirs = {"sequence": "extend", "swapped": "swap_in"}.get(kind)
    if operation not in (owner, theirs):
        before = other.digest()
        with pytest.raises(StaleHandle):
            getattr(other, operation)(handle)
        assert other.digest() == before


@pytest.mark.parametrize("nonsense", [0, -1, 1, 1 << 62, (1 << 63) - 1, 7 << 59])
def test_a_number_that_is_no_handle_is_refused_everywhere(nonsense: int, whole: Whole):
    allocator = whole(LAYOUT)
    allocator.admit([5])
    before = allocator.digest()
    for operation in ("release", "extend", "batch", "snapshot", "swap_out", "swap_in", "drop", "discard", "pin"):
        with pytest.raises(StaleHandle):
            getattr(allocator, operation)([nonsense])
    with pytest.raises(StaleHandle):
        allocator.give(nonsense)
    assert allocator.digest() == before


def test_units_of_a_sequence_are_not_given_back_with_give(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([5])[0])
    for handle in (*allocator.pages(sequence).tolist(), allocator.slot(sequence)):
        with pytest.raises(StaleHandle, match="sequences and snapshots"):
            allocator.give(handle)
    allocator.retain(allocator.pages(sequence))
    allocator.give(allocator.pages(sequence))
    with pytest.raises(StaleHandle):
        allocator.give(allocator.pages(sequence))


def test_the_free_list_has_no_duplicates_after_a_million_units_came_and_went(whole: Whole):
    layout = Layout.from_unit_sizes(256, 1024, 2048 * KIB, page_tokens=4)
    allocator = whole(layout, chaos=None, max_tokens=4, options=Options(zero_slots=False, record_effects=False))
    rng = np.random.default_rng(6)
    held = {"page": np.empty(0, np.int64), "slot": np.empty(0, np.int64)}
    operations = 0
    while operations < 1_000_000:
        for kind, most in (("page", 2000), ("slot", 300)):
            taken = allocator.take(kind, int(rng.integers(most)))
            mine = rng.permutation(np.concatenate([held[kind], taken]))
            keep = int(rng.integers(most))
            allocator.give(mine[keep:])
            held[kind] = mine[:keep]
            operations += len(taken) + len(mine[keep:])
        for _ in range(20):
            allocator.give(allocator.take("page"))
            operations += 2
        assert len(np.unique(held["page"])) == len(held["page"])
    for pool in allocator._space.pools:
        free = pool.unbound[: pool.spare]
        assert len(np.unique(free)) == pool.spare == pool.capacity - pool.live
        assert pool.free.mask(pool.extent).sum() == pool.free.count == pool.extent - pool.live
    allocator.check()


@pytest.mark.parametrize("leave", ["release", "swap_out"])
def test_a_batch_that_was_asked_for_before_is_refused_once_one_of_its_sequences_is_gone(leave: str, whole: Whole):
    for options in (Options(debug=2), Options()):
        allocator = whole(LAYOUT, chaos=None, options=options)
        batch = allocator.admit([3, 3, 3])
        for _ in range(3):
            allocator.extend(batch)
            allocator.batch(batch)
        getattr(allocator, leave)(int(batch[1]))
        allocator.admit([3])  # has the row of the one that left
        for call in (allocator.extend, allocator.batch, allocator.release, allocator.lengths, allocator.block_table):
            with pytest.raises(StaleHandle, match="released or swapped out"):
                call(batch)
        assert allocator.lengths(batch[::2]).tolist() == [6, 6]


def test_a_freed_unit_never_answers_to_an_old_handle_again(whole: Whole):
    allocator = whole(LAYOUT)
    old: set[int] = set()
    for _ in range(200):
        page = allocator.take("page")
        assert page not in old
        old.add(page)
        allocator.give(page)
    assert len({page & ID_MASK for page in old}) < 5
    for page in old:
        with pytest.raises(StaleHandle, match="stale"):
            allocator.pin(page)


# -- tickets -------------------------------------------------------------------------------------------------------


def test_what_step_seven_still_reads_is_handed_out_only_after_it(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([30])[0])
    pages, slot = allocator.pages(sequence), allocator.slot(sequence)
    allocator.release(sequence, after=7)
    places = physical(allocator, pages), physical(allocator, slot)
    with pytest.raises(StaleHandle):
        allocator.extend(sequence)
    for step in (5, 6):
        allocator.retire(step)
        held = allocator.take("page", 12), allocator.take("slot", 3)
        assert not set(physical(allocator, held[0])) & set(places[0])
        assert not set(physical(allocator, held[1])) & set(places[1])
        assert (physical(allocator, pages), physical(allocator, slot)) == places  # bound, and where they were
        allocator.give(np.concatenate(held))
    assert allocator.stats().pages_awaiting == 8 and allocator.stats().slots_awaiting == 1
    allocator.retire(8)
    assert allocator.stats().pages_live == allocator.stats().slots_live == 0
    everything = allocator.take("page", LAYOUT.max_pages())
    assert set(places[0]) <= set(physical(allocator, everything))


def test_a_page_awaiting_a_ticket_and_held_by_a_snapshot_outlives_the_ticket(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([8])[0])
    snapshot = allocator.snapshot(sequence)
    allocator.extend(sequence, 8)
    allocator.release(sequence, after=1)
    assert allocator.stats().pages_awaiting == 2  # the other two have a holder
    allocator.retire(1)
    assert allocator.stats().pages_live == 2
    again = allocator.admit([9], snapshot)
    assert allocator.lengths(again).tolist() == [9]


# -- pins ----------------------------------------------------------------------------------------------------------


def test_a_leased_page_stays_through_compaction_and_moves_again_once_it_is_given_back(whole: Whole):
    allocator = whole(LAYOUT, chaos=8)
    sequences = allocator.admit([40, 40])
    leased = int(allocator.pages(sequences[0])[3])
    allocator.pin(leased)
    allocator.pin(leased)
    place = physical(allocator, leased)
    rng = random.Random(8)

    def churn() -> list[list[int]]:
        places = []
        for _ in range(40):
            kind = rng.choice(["page", "slot"])
            if allocator.fits("take", kind, 4):
                allocator.give(allocator.take(kind, 4))
            places.append(physical(allocator, leased))
        return places

    assert all(now == place for now in churn())
    allocator.release(sequences[0])  # the pins hold it still
    allocator.unpin(leased)
    assert all(now == place for now in churn())
    allocator.retain(leased)
    allocator.unpin(leased)
    assert any(now != place for now in churn())
    assert allocator.stats().units_moved > 50


# -- aborted calls, events, repeats, threads -----------------------------------------------------------------------


def test_admissions_aborted_at_every_line_leak_no_page_slot_or_row(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = int(allocator.admit([6])[0])
    snapshot = allocator.snapshot(sequence)
    capacity = allocator.max_sequences(6), allocator.max_tokens(2)
    for line in count():
        failure = FailAt(allocator, line)
        if failure.run(allocator.admit, [6, 9, 4], [snapshot, snapshot, None]) or failure.entered:
            break
        assert (allocator.max_sequences(6), allocator.max_tokens(2)) == capacity
        with pytest.raises(AvmpError):
            allocator.admit([6, 9, 5], [snapshot, snapshot, snapshot])
        assert allocator.stats().sequences == 1
    assert line > 30


def test_refused_and_waiting_requests_are_not_counted_as_running(whole: Whole):
    allocator = whole(LAYOUT)
    running = allocator.admit([30, 30])
    for _ in range(50):
        with pytest.raises(OutOfMemory):
            allocator.admit([60, 60, 60])
    assert (allocator.stats().sequences, allocator.stats().slots_live) == (2, 2)
    allocator.release(running)
    assert allocator.max_sequences(60) == LAYOUT.max_sequences(60)


def test_the_stream_of_events_replays_to_the_exact_tables():
    driver = Driver(LAYOUT, chaos_seed=4, options=Options(debug=1, events=True), verify_bytes=False)
    rng = random.Random("events")
    tables: dict[str, dict[int, int]] = {"page": {}, "slot": {}}
    seen = set()
    driver.flush = lambda: driver.device.flush(driver.allocator)  # leaves the events to this test
    for _ in range(600):
        getattr(driver, rng.choice([name for name in Driver.OPERATIONS if name != "misuse"]))(rng.randrange)
        for event in driver.allocator.events():
            table = tables[event.pool]
            seen.add((event.what, event.pool))
            for virtual, place in zip(event.virtual.tolist(), event.physical.tolist(), strict=True):
                if event.what == "freed":
                    assert table.pop(virtual) == place
                else:
                    assert (virtual in table) == (event.what == "moved")
                    table[virtual] = place
        for pool in driver.allocator._space.pools:
            bound = np.flatnonzero(pool.references).tolist()
            assert tables[pool.kind] == {virtual: int(pool.physical[virtual]) for virtual in bound}
    assert seen == {(what, kind) for what in ("allocated", "moved", "freed") for kind in ("page", "slot")}
    driver.empty()


def test_twenty_repeats_of_a_trace_end_with_the_same_tables_and_the_same_bytes():
    digests = set()
    for _ in range(20):
        driver = Driver(LAYOUT, chaos_seed=7, options=Options(debug=1, poison=True))
        rng = random.Random("repeat")
        for _ in range(80):
            driver.run(rng.choice(Driver.OPERATIONS), rng.randrange, check=False)
        digests.add((driver.allocator.digest(), hashlib.sha256(driver.device.words.tobytes()).hexdigest()))
        driver.empty()
    assert len(digests) == 1


def test_another_thread_is_refused_while_checks_are_on(whole: Whole):
    allocator = whole(LAYOUT)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            allocator.admit([1])
        except InvalidArgument as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread" in str(errors[0])
    assert allocator.stats().sequences == 0
