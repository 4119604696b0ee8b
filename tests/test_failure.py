"""Operations happen whole or not at all: injected failures, refused calls, interrupted commits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.errors import Inconsistent, InvalidArgument, OutOfMemory, RowsExhausted, RowTooLong, StaleHandle
from avmp.growth import Prefix
from avmp.layout import Layout
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.helpers import KIB, FailAt, Whole, empty, whole_allocators

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 17 * KIB, page_tokens=4)


@pytest.fixture
def whole():
    yield from whole_allocators()


class Scene:
    """One of everything: rows of several lengths, one of them with a shared tail, snapshots, a swapped sequence, loose
    and pinned units, a ticket. Bytes for sixteen pages are left, most of them in free slots."""

    def __init__(self, hot: bool = False) -> None:
        self.allocator = a = Allocator(
            LAYOUT,
            max_rows=8,
            max_tokens_per_sequence=48,
            options=Options(debug=0 if hot else 1, zero_slots=not hot, events=not hot, poison=not hot),
            disturbance=None if hot else ChaosMigration(4),
        )
        self.one, self.two, self.three, self.four = (int(h) for h in a.admit([6, 8, 13, 2]))
        self.early = a.snapshot(self.three)
        a.extend(self.three, 3)
        self.late = a.snapshot(self.one)
        self.flagged = int(a.admit([6], self.late)[0])
        self.pages = a.take("page", 3)
        a.retain(self.pages[0])
        self.pinned = int(a.pages(self.two)[0])
        a.pin(self.pinned)
        self.swapped = int(a.swap_out(self.four)[0])
        self.dead = self.four
        gone = int(a.admit([4])[0])
        a.release(gone, after=7)
        if hot:
            a.restore(self.flagged, self.late)
            a.release(self.flagged)
            a.batch([self.one, self.two, self.three])
        a.drain()


CALLS: dict[str, Callable[[Allocator, Scene], Any]] = {
    "admit": lambda a, s: a.admit([9, 5]),
    "admit after a snapshot": lambda a, s: a.admit([9, 3], [s.late, None]),
    "admit after a snapshot with other pages": lambda a, s: a.admit([14], Prefix(s.early, a.pages(s.three))),
    "extend by one": lambda a, s: a.extend([s.one, s.three]),
    "extend beyond a shared tail": lambda a, s: a.extend([s.one, s.flagged, s.two], [1, 5, 0]),
    "release": lambda a, s: a.release([s.three, s.one]),
    "release after a ticket": lambda a, s: a.release([s.two, s.flagged], 9),
    "retire": lambda a, s: a.retire(7),
    "release_front": lambda a, s: a.release_front([s.three, s.two], [9, 4]),
    "fork": lambda a, s: a.fork(s.three, 1),
    "reorder": lambda a, s: a.reorder([s.one, s.two, s.flagged], [2, 2, 1]),
    "snapshot": lambda a, s: a.snapshot(s.two),
    "restore": lambda a, s: a.restore(s.two, s.early),
    "drop": lambda a, s: a.drop([s.late, s.early]),
    "truncate": lambda a, s: a.truncate([s.three, s.two], [14, 7]),
    "swap_out": lambda a, s: a.swap_out([s.flagged, s.three]),
    "swap_in": lambda a, s: a.swap_in(s.swapped),
    "discard": lambda a, s: a.discard([s.swapped]),
    "take one": lambda a, s: a.take("page"),
    "take many": lambda a, s: a.take("page", 8),
    "give one": lambda a, s: a.give(int(s.pages[1])),
    "give many": lambda a, s: a.give([*s.pages.tolist(), int(s.pages[0])]),
    "retain": lambda a, s: a.retain([s.pages[0], a.slot(s.one)]),
    "pin": lambda a, s: a.pin([s.pages[0], a.slot(s.one)]),
    "unpin": lambda a, s: a.unpin(s.pinned),
}
HOT: dict[str, Callable[[Allocator, Scene], Any]] = {
    "extend by one": lambda a, s: a.extend(np.array([s.one, s.two, s.three])),
    "extend by one inside the pages": lambda a, s: a.extend([s.one]),
    "take one page": lambda a, s: a.take("page"),
    "take one slot": lambda a, s: a.take("slot"),
    "give one": lambda a, s: a.give(int(s.pages[1])),
    "release": lambda a, s: a.release(s.one),
}
ALL = [(name, False, call) for name, call in CALLS.items()] + [(name, True, call) for name, call in HOT.items()]


def named(calls: list[tuple[str, bool, Any]]) -> list[Any]:
    return [pytest.param(hot, call, id=f"{name}{', quick' if hot else ''}") for name, hot, call in calls]


@pytest.mark.parametrize(("hot", "call"), named(ALL))
def test_a_failure_at_any_line_before_the_commit_leaves_no_trace_and_none_after_it_undoes_it(hot, call):
    """The quick paths have no line of their own between the two: they may stop inside the commit instead, and then
    say so (see the next test)."""
    scene = Scene(hot)
    allocator, before = scene.allocator, scene.allocator.digest()
    done = Scene(hot)
    call(done.allocator, done)
    after = done.allocator.digest()
    assert after != before
    for line in count():
        failure = FailAt(allocator, line)
        finished = failure.run(call, allocator, scene)
        if not allocator._committing:
            possible = (after,) if finished or failure.entered else (before, after) if hot else (before,)
            assert allocator.digest() in possible, failure.where
            allocator.check()
        if finished:
            break
        if allocator._committing or allocator.digest() != before:
            scene = Scene(hot)
            allocator = scene.allocator
    assert line > 3
    empty(allocator)


def test_a_failure_at_any_line_of_batch_leaves_its_answer_as_it_was():
    scene = Scene()
    allocator, sequences = scene.allocator, [scene.three, scene.one]
    before = allocator.digest()
    reference = Scene()
    expected = reference.allocator.batch([reference.three, reference.one], pad_to=4)
    after = reference.allocator.digest()
    for line in count():
        failure = FailAt(allocator, line)
        if failure.run(allocator.batch, sequences, None, 4):
            break
        assert allocator.digest() in (before, after), failure.where
    tables = allocator.batch(sequences, pad_to=4)
    assert line > 10 and allocator.digest() == after
    for name in ("seq_lens", "query_start_loc", "slot_mapping", "state_indices", "has_initial_state", "block_table"):
        assert (getattr(tables, name) == getattr(expected, name)).all(), name
    empty(allocator)


@pytest.mark.parametrize(("hot", "call"), named(ALL))
def test_after_an_interrupted_commit_every_operation_is_refused(hot, call):
    interrupted = 0
    for line in count(step=1 if hot else 5):
        scene = Scene(hot)
        failure = FailAt(scene.allocator, line, committing=None)
        if failure.run(call, scene.allocator, scene):
            break
        if scene.allocator._committing:
            interrupted += 1
            if interrupted % 9 == 1:
                every_operation_is_refused(scene)
    assert interrupted > 1


def every_operation_is_refused(scene: Scene) -> None:
    torn = scene.allocator.digest()
    kinds = {}
    for name, other in dict(CALLS, batch=lambda a, s: a.batch([s.one])).items():
        with pytest.raises((Inconsistent, StaleHandle)) as refusal:
            other(scene.allocator, scene)
        assert scene.allocator.digest() == torn, name
        kinds[name] = refusal.type
    # Rows are looked up first in some calls, and may be gone.
    assert {kinds[name] for name in ("admit", "take one", "take many", "give one", "retire", "batch")} == {Inconsistent}


def test_a_call_from_inside_a_commit_is_refused_and_the_commit_goes_on():
    """As a signal handler that uses the allocator would do it."""
    scene = Scene()
    refused = []

    class Nosy:
        def disturb(self, space: Any) -> None:
            with pytest.raises(Inconsistent):
                scene.allocator.take("page", 1)
            refused.append(True)

    scene.allocator._space.disturbance = Nosy()
    scene.allocator.admit([5])
    assert refused == [True]
    scene.allocator.check()
    empty(scene.allocator)


REFUSALS: dict[str, tuple[type[Exception], Callable[[Allocator, Scene], Any]]] = {
    "admit, memory": (OutOfMemory, lambda a, s: a.admit([0, 48])),
    "admit after a snapshot, memory": (OutOfMemory, lambda a, s: a.admit([47, 9], [s.late, None])),
    "admit, rows": (RowsExhausted, lambda a, s: a.admit([0] * 5)),
    "admit, length": (RowTooLong, lambda a, s: a.admit([1, 49])),
    "admit, negative": (InvalidArgument, lambda a, s: a.admit([1, -1])),
    "admit, a fraction": (InvalidArgument, lambda a, s: a.admit([1.5])),
    "admit, shorter than its prefix": (InvalidArgument, lambda a, s: a.admit([5], s.late)),
    "admit, prefixes of another number": (InvalidArgument, lambda a, s: a.admit([9], [s.late, s.late])),
    "admit, no snapshot": (StaleHandle, lambda a, s: a.admit([9], s.swapped)),
    "extend, memory": (OutOfMemory, lambda a, s: a.extend([s.one, s.two, s.three], 32)),
    "extend, length": (RowTooLong, lambda a, s: a.extend([s.one, s.three], [1, 33])),
    "extend, stale": (StaleHandle, lambda a, s: a.extend([s.one, s.dead])),
    "extend, twice": (InvalidArgument, lambda a, s: a.extend([s.one, s.one])),
    "extend, counts of another number": (InvalidArgument, lambda a, s: a.extend([s.one, s.two], [1])),
    "extend, negative": (InvalidArgument, lambda a, s: a.extend([s.one, s.two], [1, -1])),
    "release, stale": (StaleHandle, lambda a, s: a.release([s.one, s.dead])),
    "release, twice": (InvalidArgument, lambda a, s: a.release([s.one, s.two, s.one])),
    "release, ticket": (InvalidArgument, lambda a, s: a.release([s.one], "soon")),
    "retire, ticket": (InvalidArgument, lambda a, s: a.retire(None)),
    "release_front, beyond the end": (InvalidArgument, lambda a, s: a.release_front([s.three, s.one], [8, 7])),
    "fork, memory": (OutOfMemory, lambda a, s: a.fork(s.one, 3)),
    "fork, rows": (RowsExhausted, lambda a, s: a.fork(s.one, 5)),
    "fork, negative": (InvalidArgument, lambda a, s: a.fork(s.one, -1)),
    "reorder, parents": (InvalidArgument, lambda a, s: a.reorder([s.one, s.two], [0, 2])),
    "snapshot, memory": (OutOfMemory, lambda a, s: a.snapshot([s.one, s.two, s.three, s.flagged])),
    "snapshot, twice": (InvalidArgument, lambda a, s: a.snapshot([s.one, s.one])),
    "restore, stale": (StaleHandle, lambda a, s: a.restore(s.one, s.dead)),
    "drop, stale": (StaleHandle, lambda a, s: a.drop([s.late, s.one])),
    "drop, twice": (InvalidArgument, lambda a, s: a.drop([s.late, s.late])),
    "truncate, beyond the end": (InvalidArgument, lambda a, s: a.truncate([s.three, s.one], [14, 7])),
    "swap_out, stale": (StaleHandle, lambda a, s: a.swap_out([s.one, s.dead])),
    "swap_in, stale": (StaleHandle, lambda a, s: a.swap_in([s.swapped, s.late])),
    "swap_in, twice": (InvalidArgument, lambda a, s: a.swap_in([s.swapped, s.swapped])),
    "discard, stale": (StaleHandle, lambda a, s: a.discard([s.swapped, s.dead])),
    "take, memory": (OutOfMemory, lambda a, s: a.take("slot", 4)),
    "take, kind": (InvalidArgument, lambda a, s: a.take("block", 1)),
    "take, negative": (InvalidArgument, lambda a, s: a.take("page", -1)),
    "give, too often": (StaleHandle, lambda a, s: a.give([s.pages[0], s.pages[1], s.pages[1]])),
    "give, a sequence's page": (StaleHandle, lambda a, s: a.give([s.pages[0], int(a.pages(s.three)[0])])),
    "retain, stale": (StaleHandle, lambda a, s: a.retain([s.pages[0], s.one])),
    "pin, stale": (StaleHandle, lambda a, s: a.pin([s.pages[0], s.late])),
    "unpin, not pinned": (StaleHandle, lambda a, s: a.unpin([s.pinned, s.pages[0]])),
    "batch, padding": (InvalidArgument, lambda a, s: a.batch([s.one, s.two], pad_to=1)),
    "batch, query lengths": (InvalidArgument, lambda a, s: a.batch([s.one, s.two], query_lens=[6, 9])),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_call_changes_nothing_and_gives_the_device_nothing_to_do(name):
    error, call = REFUSALS[name]
    scene = Scene()
    allocator = scene.allocator
    allocator.drain()
    before = allocator.digest()
    with pytest.raises(error):
        call(allocator, scene)
    assert allocator.digest() == before
    launches, changes = allocator.drain()
    assert launches == [] and len(changes) == 0
    allocator.check()
    empty(allocator)


def test_reordering_without_room_for_the_copy_changes_nothing(whole: Whole):
    allocator = whole(LAYOUT)
    sequences = allocator.admit([6, 6])
    allocator.retain([allocator.slot(sequences[1]), *allocator.pages(sequences[1])])
    while allocator.fits("take", "page", 1):
        allocator.take("page", 1)
    before = allocator.digest()
    with pytest.raises(OutOfMemory, match="reorder: out of pages"):
        allocator.reorder(sequences, [0, 0])
    assert allocator.digest() == before
    allocator.reorder(sequences, [1, 0])  # a permutation takes nothing


def test_a_refusal_tells_what_releasing_sequences_would_give(whole: Whole):
    allocator = whole(LAYOUT)
    sequences = allocator.admit([16, 9])
    with pytest.raises(OutOfMemory) as refusal:
        allocator.take("slot", 100)
    assert refusal.value.releasable(sequences) == allocator.releasable(sequences) == (7, 2)
    assert refusal.value.releasable(sequences[1]) == (3, 1)


def test_a_refusal_counts_what_is_missing_and_where_it_could_come_from(whole: Whole):
    allocator = whole(LAYOUT, chaos=None)  # 63 pages less the null slot of five pages: 59 pages, or 11 slots
    allocator.admit([16, 9])
    with pytest.raises(OutOfMemory, match="out of slots") as refusal:
        allocator.take("slot", 10)
    shortage = refusal.value.shortage
    room = LAYOUT.max_slots(7) - 2
    assert (shortage.wanted_slots, shortage.missing_units, shortage.reason) == (10, 10 - room, "bytes")
    assert shortage.missing_bytes == (10 - room) * 1280 and shortage.free_slots == 0
    assert allocator.fits("take", "slot", room) and not allocator.fits("take", "slot", room + 1)


def test_refused_calls_are_counted_by_reason_and_by_nothing_else(whole: Whole):
    allocator = whole(LAYOUT)
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            allocator.take("slot", 100)
    assert allocator.stats().attempts == {"refused: bytes": 3}
