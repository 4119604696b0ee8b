"""What a device is told to do: which effects share a launch, in which order, and how few there are."""

from __future__ import annotations

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.effects import Launch, merge
from avmp.layout import Layout
from avmp.options import Options
from tests.fake_device import FakeDevice
from tests.helpers import KIB, Whole, whole_allocators

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 20 * KIB, page_tokens=4)
SIXTY_PAGES = Layout.from_unit_sizes(256, 5 * 256, 65 * 256, page_tokens=4)


@pytest.fixture
def whole():
    yield from whole_allocators()


def effect(operation: str, pool: str, sources: list[int], destinations: list[int], swapped: int = 0) -> Launch:
    return Launch(operation, pool, np.array(sources, np.int64), np.array(destinations, np.int64), swapped)  # type: ignore[arg-type]


def shape(launches: list[Launch]) -> list[tuple[str, str, list[int], list[int]]]:
    return [(e.operation, e.pool, e.sources.tolist(), e.destinations.tolist()) for e in launches]


# -- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["copy", "zero", "poison"])
def test_effects_of_one_kind_on_different_units_share_a_launch_in_program_order(operation: str):
    reads = operation == "copy"
    effects = [effect(operation, "page", [1] * reads, [2]), effect(operation, "page", [3, 1] * reads, [5, 4])]
    assert shape(merge(effects)) == [(operation, "page", [1, 3, 1] if reads else [], [2, 5, 4])]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (([1], [2]), ([2], [3]), "reads what was written"),
        (([1], [2]), ([3], [1]), "writes what was read"),
        (([1], [2]), ([3], [2]), "writes what was written"),
        (([1, 4], [2, 5]), ([9, 5], [8, 7]), "one unit of many is enough"),
    ],
)
def test_an_effect_that_touches_what_the_launch_has_written_or_read_begins_a_new_one(
    first: tuple[list[int], list[int]], second: tuple[list[int], list[int]], why: str
):
    effects = [effect("copy", "slot", *first), effect("copy", "slot", *second)]
    assert shape(merge(effects)) == shape(effects), why


def test_a_hazard_with_an_earlier_member_of_the_launch_counts_too():
    effects = [effect("copy", "page", [1], [2]), effect("copy", "page", [3], [4]), effect("copy", "page", [2], [6])]
    assert [len(launch.sources) for launch in merge(effects)] == [2, 1]


def test_reading_twice_is_no_hazard():
    assert len(merge([effect("copy", "page", [1], [2]), effect("copy", "page", [1], [3])])) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("zero", "page"), ("zero", "slot")),
        (("zero", "page"), ("poison", "page")),
        (("copy", "slot"), ("move", "slot")),
        (("move", "slot"), ("copy", "slot")),
        (("move", "page"), ("move", "page")),
        (("move", "page"), ("move", "slot")),
    ],
)
def test_different_kinds_pools_and_any_two_moves_never_share_a_launch(one: tuple[str, str], other: tuple[str, str]):
    def of(what: tuple[str, str], unit: int) -> Launch:
        return effect(*what, [unit] if what[0] in ("copy", "move") else [], [unit + 1])

    assert len(merge([of(one, 1), of(other, 10)])) == 2


def test_nothing_is_merged_across_a_move():
    effects = [effect("zero", "page", [], [1]), effect("move", "slot", [7], [3]), effect("zero", "page", [], [2])]
    assert [launch.operation for launch in merge(effects)] == ["zero", "move", "zero"]


def test_swapped_sequences_keep_their_own_launches_because_positions_in_their_buffers_repeat():
    out = [effect("swap_out", "page", [5, 6], [0, 1], swapped=1), effect("swap_out", "page", [8], [0], swapped=2)]
    assert len(merge(out)) == 2
    back = [effect("swap_in", "page", [0], [5], swapped=1), effect("swap_in", "page", [0], [6], swapped=2)]
    assert len(merge(back)) == 2


# -- tables --------------------------------------------------------------------------------------------------------


def test_each_table_entry_is_uploaded_once_with_its_final_value(whole: Whole):
    allocator = whole(LAYOUT, chaos=3)
    for _ in range(5):
        sequence = allocator.admit([20])
        allocator.extend(sequence, 9)
        allocator.release(sequence)
    kept = allocator.admit([10])
    launches, changes = allocator.drain()
    space, table = allocator._space, allocator._ledger.table
    for ids, values, final in (
        (changes.page_ids, changes.page_values, space.pages.physical),
        (changes.slot_ids, changes.slot_values, space.slots.physical),
        (changes.cells, changes.cell_values, table.block_table.reshape(-1)),
    ):
        assert (np.diff(ids) > 0).all() and (values == final[ids]).all()
    pages = table.pages(table.row(kept[0]))
    assert set(pages.tolist()) <= set(changes.page_ids.tolist())
    assert changes.cell_values[:3].tolist() == pages.tolist()
    again = allocator.drain()
    assert again[0] == [] and len(again[1]) == 0
    assert any(launch.operation == "move" for launch in launches)


# -- how much a step costs -----------------------------------------------------------------------------------------


def decoding(whole: Whole, rows: int = 12) -> tuple[Allocator, np.ndarray]:
    layout = Layout.from_unit_sizes(256, 5 * 256, 64 * KIB, page_tokens=16)
    allocator = whole(layout, max_tokens=320, chaos=None, max_rows=40, options=Options(debug=2, hysteresis=0.0))
    sequences = allocator.admit([16 + 3 * row for row in range(rows)])
    allocator.drain()
    return allocator, sequences


def test_a_decoding_step_gives_the_device_no_data_to_touch_and_at_most_one_table_upload(whole: Whole):
    allocator, sequences = decoding(whole)
    uploads, pages = [], allocator.stats().pages_live
    for _ in range(64):
        allocator.extend(sequences)
        allocator.batch(sequences)
        launches, changes = allocator.drain()
        assert launches == []
        # A page-table entry and a block-table cell for each sequence that began a page, and nothing else.
        assert len(changes.page_ids) == len(changes.cells) and len(changes.slot_ids) == 0
        uploads.append(len(changes.cells))
    assert 0 in uploads and sum(uploads) == allocator.stats().pages_live - pages == 48


def test_a_migration_adds_exactly_one_launch_to_a_step(whole: Whole):
    allocator, sequences = decoding(whole)
    spare = outward(allocator, allocator.take("slot", 10))
    while allocator.stats().gap_bytes >= 256 or allocator.stats().pages_free:
        allocator.take("page", 1)
    allocator.give(spare[:9])  # the last slot stands in the way of pages
    allocator.drain()
    migrations = []
    for _ in range(40):
        before = allocator.stats()
        allocator.extend(sequences)
        launches, _ = allocator.drain()
        moved = allocator.stats().migrations - before.migrations
        assert [launch.operation for launch in launches] == ["move"] * moved
        migrations.append(moved)
    assert sum(migrations) >= 1 and 0 in migrations


def test_a_slot_that_a_copy_fills_is_not_zeroed_first_and_a_new_one_is(whole: Whole):
    allocator = whole(LAYOUT, chaos=None)
    sequence = int(allocator.admit([6])[0])
    slot = allocator._space.slots.physical[allocator.slot(sequence) & 0xFFFFFFFF]
    assert shape(allocator.drain()[0]) == [("zero", "slot", [], [slot])]
    snapshot = allocator.snapshot(sequence)
    allocator.fork(sequence)
    allocator.admit([6], snapshot)
    assert {launch.operation for launch in allocator.drain()[0]} == {"copy"}
    allocator.truncate(sequence, 0)
    assert [launch.operation for launch in allocator.drain()[0]] == ["zero"]  # no snapshot lies at 0
    allocator.drop(snapshot)
    allocator.extend(sequence)
    allocator.truncate(sequence, 0)
    assert shape(allocator.drain()[0])[-1][:2] == ("zero", "slot")


def outward(allocator: Allocator, handles: np.ndarray) -> np.ndarray:
    """Handles of units of one kind by physical id."""
    pool = allocator._space.pages if handles[0] >> 59 == 1 else allocator._space.slots
    return handles[np.argsort(pool.physical[handles & 0xFFFFFFFF])]


# -- order ---------------------------------------------------------------------------------------------------------


def test_the_order_of_launches_matters_and_a_device_that_swaps_two_is_found_out(whole: Whole):
    """A page at the border makes way for a slot which is zeroed: zeroing first destroys the page."""
    allocator = whole(SIXTY_PAGES, chaos=None, options=Options(debug=2, hysteresis=0.0))
    pages = outward(allocator, allocator.take("page", 60))[::-1]
    right, wrong = FakeDevice(allocator), FakeDevice(allocator)
    changes = allocator.drain()[1]
    for device in (right, wrong):
        device.upload(changes)
        for value, page in enumerate(pages.tolist()):
            device.write_token((page & 0xFFFFFFFF) * 4, value)
    allocator.give(pages[:5])
    sequence = allocator.admit([0])
    launches, changes = allocator.drain()
    assert [(launch.operation, launch.pool) for launch in launches] == [("move", "page"), ("zero", "slot")]
    for device, order in ((right, launches), (wrong, launches[::-1])):
        for launch in order:
            getattr(device, launch.operation)(launch)
        device.upload(changes)
    found = [[device.read_token(page & 0xFFFFFFFF, 0) for page in pages[5:].tolist()] for device in (right, wrong)]
    assert found[0] == list(range(5, 60))
    assert found[1] != found[0]
    assert right.read_state(allocator.slot(sequence[0]) & 0xFFFFFFFF) == 0


def test_recording_can_be_switched_off(whole: Whole):
    allocator = whole(LAYOUT, options=Options(debug=2, record_effects=False, poison=True, zero_pages=True))
    allocator.release(allocator.fork(int(allocator.admit([6])[0]), 2))
    launches, changes = allocator.drain()
    assert launches == [] and len(changes.cells) == 0
