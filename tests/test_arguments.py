"""What callers pass in: any iterable, any integer type; what cannot be right is refused before anything changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.errors import AvmpError, Inconsistent, InvalidArgument, StaleHandle
from avmp.handles import GENERATION_MASK, MOST
from avmp.layout import Layout
from avmp.options import Options

LAYOUT = Layout.from_unit_sizes(256, 1280, 48 * 1024, page_tokens=4)
STATES_ONLY = Layout.from_unit_sizes(0, 256, 8192)


def allocator(layout: Layout = LAYOUT, **keywords: Any) -> Allocator:
    return Allocator(layout, max_rows=8, max_tokens_per_sequence=64, **keywords)


@pytest.mark.parametrize("debug", [0, 2])
@pytest.mark.parametrize("shape", [iter, tuple, np.array, lambda handles: (h for h in handles)])
def test_sequences_may_come_as_any_iterable(debug: int, shape: Callable[[list[int]], Any]) -> None:
    arena = allocator(options=Options(debug=debug))
    sequences = arena.admit(iter([3, 3])).tolist()
    arena.extend(shape(sequences))
    arena.extend(shape(sequences), 2)
    arena.extend(shape(sequences), iter([1, 0]))
    assert arena.lengths(shape(sequences)).tolist() == [7, 6]
    arena.reorder(shape(sequences), iter([1, 0]))
    assert arena.lengths(sequences).tolist() == [6, 7]
    snapshots = arena.snapshot(shape(sequences))
    assert arena.truncate(shape(sequences), iter([6, 7])).tolist() == [6, 7]
    arena.drop(shape(snapshots.tolist()))
    back = arena.swap_in(shape(arena.swap_out(shape(sequences)).tolist()))
    arena.release(shape(back.tolist()))
    assert arena.stats().pages_live == arena.stats().slots_live == 0


@pytest.mark.parametrize("huge", [2**31, 2**63 - 3, 2**64 - 1, 2**64 - 4, -1, np.uint64(2**64 - 1)])
@pytest.mark.parametrize("as_array", [False, True])
def test_counts_beyond_what_tables_hold_are_refused_and_change_nothing(huge: int, as_array: bool) -> None:
    arena = allocator()
    sequence = arena.admit([5])
    count = np.array([huge]) if as_array else huge
    digest = arena.digest()
    for call in (
        lambda: arena.extend(sequence, count),
        lambda: arena.truncate(sequence, count),
        lambda: arena.release_front(sequence, count),
        lambda: arena.batch(sequence, query_lens=count),
        lambda: arena.admit([huge]),
        lambda: arena.fork(int(sequence[0]), huge),
        lambda: arena.take("page", huge),
        lambda: arena.max_sequences(huge),
        lambda: arena.max_tokens(huge),
    ):
        with pytest.raises(InvalidArgument):
            call()
        assert arena.digest() == digest
    arena.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda arena, sequence: arena.admit(5),
        lambda arena, sequence: arena.admit([1.5]),
        lambda arena, sequence: arena.admit([True]),
        lambda arena, sequence: arena.extend(None),
        lambda arena, sequence: arena.extend(np.array([[int(sequence[0])]])),
        lambda arena, sequence: arena.extend(np.array([0.5])),
        lambda arena, sequence: arena.extend(sequence, [1, 1]),
        lambda arena, sequence: arena.extend([int(sequence[0])] * 2),
        lambda arena, sequence: arena.fork(sequence),
        lambda arena, sequence: arena.fork(0.5),
        lambda arena, sequence: arena.restore(int(sequence[0]), None),
        lambda arena, sequence: arena.reorder(sequence, [0.2]),
        lambda arena, sequence: arena.reorder(sequence, [1]),
        lambda arena, sequence: arena.batch(sequence, pad_to=2.5),
        lambda arena, sequence: arena.batch(sequence, pad_to=0),
        lambda arena, sequence: arena.batch(sequence, query_lens=[6]),
        lambda arena, sequence: arena.truncate(sequence, 6),
        lambda arena, sequence: arena.release_front(sequence, 6),
        lambda arena, sequence: arena.release(sequence, after=1.0),
        lambda arena, sequence: arena.release(sequence, after=2**63),
        lambda arena, sequence: arena.retire("1"),
        lambda arena, sequence: arena.take("block"),
        lambda arena, sequence: arena.take(["page"]),
        lambda arena, sequence: arena.fits("grow", sequence),
        lambda arena, sequence: arena.events(),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_and_change_nothing(call: Callable[[Allocator, Any], Any]) -> None:
    arena = allocator()
    sequence = arena.admit([5])
    digest = arena.digest()
    with pytest.raises(InvalidArgument):
        call(arena, sequence)
    assert arena.digest() == digest
    arena.check()


def test_no_sequences_at_all_is_fine_in_any_shape() -> None:
    arena = allocator()
    for none in ([], (), np.array([]), np.empty(0, dtype=np.int64)):
        arena.extend(none)
        arena.release(none)
        assert arena.batch(none).num_tokens == 0 and len(arena.admit(none)) == 0


def test_a_batch_that_equals_an_earlier_one_in_bytes_only_is_looked_at_anew() -> None:
    arena = allocator()
    sequences = arena.admit([1, 2])
    arena.extend(sequences)
    with pytest.raises(InvalidArgument):
        arena.extend(sequences.reshape(1, 2))
    with pytest.raises((InvalidArgument, StaleHandle)):
        arena.extend(sequences.view(np.int32))


def test_what_is_handed_out_cannot_write_the_tables() -> None:
    arena = allocator()
    sequences = arena.admit([6, 6, 6])
    arena.release(sequences[1])
    pair = sequences[[0, 2]]
    batch, mapping = arena.batch(pair), arena.slot_mapping(pair)
    for array in (batch.block_table, arena.block_table(sequences[0]), batch.rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1  # type: ignore[index, call-overload]
    before = mapping.copy()
    batch.state_indices[:] = 0
    batch.seq_lens[:] = 0
    arena.extend(pair)
    assert (mapping == before).all()
    arena.check()


def test_generations_wrap_without_tearing_anything() -> None:
    arena = allocator()
    for pool in arena._space.pools:
        pool.generation[:] = GENERATION_MASK
    arena._ledger.table.generation[:] = GENERATION_MASK
    page = arena.take("page")
    arena.give(page)
    sequences = arena.admit([9, 1])
    arena.release(sequences)
    arena.check()
    for stale in (page, int(sequences[0])):
        with pytest.raises(StaleHandle):
            arena.give(stale) if stale == page else arena.extend([stale])
    assert arena._space.pages.generation.min() == arena._ledger.table.generation.min() == 0


def test_lengths_stay_within_int32_where_there_are_no_pages() -> None:
    with pytest.raises(InvalidArgument, match=str(MOST)):
        Allocator(STATES_ONLY, max_tokens_per_sequence=2**33)
    arena = Allocator(STATES_ONLY)
    sequences = arena.admit([MOST, MOST])
    with pytest.raises(InvalidArgument, match="query_start_loc is int32"):
        arena.batch(sequences)
    batch = arena.batch(sequences, query_lens=1)
    assert batch.seq_lens.tolist() == [MOST, MOST] and len(batch.slot_mapping) == 0


def test_forking_no_children_leaves_the_parent_s_step_alone() -> None:
    arena = allocator()
    parent = arena.admit([3])
    assert len(arena.fork(int(parent[0]), 0)) == 0
    assert arena.batch(parent).num_tokens == 3


def test_a_given_up_tail_maps_below_the_first_page_however_many_tokens_are_asked_for() -> None:
    arena = Allocator(Layout.from_unit_sizes(256, 0, 8192, page_tokens=4), max_tokens_per_sequence=64)
    sequence = arena.admit([4])
    arena.release_front(sequence, 4)
    for query_lens in (1, 4):
        assert (arena.batch(sequence, query_lens).slot_mapping < 4).all()
    assert 0 <= arena.slot_mapping(sequence)[0] < 4
    arena.extend(sequence)
    assert arena.batch(sequence).slot_mapping[0] >= 4
    arena.check()


def test_a_torn_allocator_hands_out_nothing() -> None:
    arena = allocator()
    sequence = arena.admit([3])
    arena._committing = True
    for call in (arena.drain, lambda: arena.fits("extend", sequence), lambda: arena.batch(sequence)):
        with pytest.raises(Inconsistent):
            call()


def test_every_error_can_be_caught_as_one() -> None:
    arena = allocator()
    with pytest.raises(AvmpError):
        arena.admit([65])
