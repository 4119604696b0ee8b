"""Capacity that moves: exactly what is missing, exactly the units in the way, never on its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avmp.allocator import Allocator
from avmp.errors import OutOfMemory
from avmp.layout import Layout
from avmp.migration import plan_relocation
from avmp.options import Options
from tests.driver import Driver
from tests.helpers import KIB, Whole, empty, live_sequences, whole_allocators

SIZES = {
    "slot of five pages": Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4),
    "sizes that do not divide": Layout.from_unit_sizes(768, 1280, 48 * KIB, lane_count=2, page_tokens=4),
    "slot smaller than a page": Layout.from_unit_sizes(1024, 256, 48 * KIB, page_tokens=4),
}
SIXTY_PAGES = Layout.from_unit_sizes(256, 5 * 256, 65 * 256, page_tokens=4)  # or 12 slots
EXACT = Options(debug=2, hysteresis=0.0)


@pytest.fixture
def whole():
    yield from whole_allocators()


def scattered(allocator: Allocator, seed: str) -> list[int]:
    """Fills the arena with sequences of one page and up, then releases half of them at random."""
    rng = random.Random(seed)
    rows: list[int] = []
    while True:
        tokens = rng.choice([1, 5, 12, 20])
        if not allocator.fits("admit", [tokens]):
            break
        rows += allocator.admit([tokens]).tolist()
    gone = rng.sample(rows, len(rows) // 2)
    allocator.release(gone)
    return [row for row in rows if row not in gone]


def fill(allocator: Allocator, kind: str) -> None:
    """Takes units of one kind until both pools have none free and no gap is left to take them from."""
    while allocator.fits("take", kind, 1) and not free_or_gap(allocator, kind):
        allocator.take(kind, 1)


def inward(allocator: Allocator, pages: np.ndarray) -> list[int]:
    """Handles of pages from the far end of the arena to the border with the slots."""
    ranks = allocator._space.pages.ranks_of(pages & 0xFFFFFFFF)
    return pages[np.argsort(ranks)].tolist()


def free_or_gap(allocator: Allocator, kind: str) -> bool:
    stats = allocator.stats()
    unit = allocator.layout.page_total_bytes if kind == "page" else allocator.layout.slot_total_bytes
    free = stats.pages_free if kind == "page" else stats.slots_free
    return free == 0 and stats.gap_bytes < unit


# -- exact demand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["page", "slot"])
@pytest.mark.parametrize("name", SIZES)
def test_the_donor_gives_up_exactly_what_is_missing_and_moves_only_what_stood_there(name: str, kind: str, whole: Whole):
    layout = SIZES[name]
    seen = set()
    for wanted in range(1, 7):
        allocator = whole(layout, chaos=None, max_rows=128, options=EXACT)
        scattered(allocator, f"{name} {kind}")
        fill(allocator, kind)
        space = allocator._space
        recipient, donor = (space.pages, space.slots) if kind == "page" else (space.slots, space.pages)
        assert recipient.free.count == 0
        if not allocator.fits("take", kind, wanted):
            break
        target = recipient.extent + wanted
        left = layout.max_slots(target) if kind == "page" else layout.max_pages(target)
        free, extent, moved = donor.free.mask(donor.extent), donor.extent, space.counters.units_moved
        in_the_way = int(np.count_nonzero(~free[left:]))
        allocator.take(kind, wanted)
        assert (recipient.extent, donor.extent) == (target, left)
        assert space.counters.units_given_up == extent - left
        assert space.counters.units_moved - moved == in_the_way
        seen.add(in_the_way > 0)
        stats = allocator.stats()
        assert (stats.retractions, stats.migrations) == ((0, 1) if in_the_way else (1, 0))
    assert wanted > 1 and seen


@given(free=st.lists(st.booleans(), max_size=60), keep=st.integers(0, 60), spare=st.integers(0, 20), least=st.data())
def test_a_plan_moves_the_live_units_of_the_band_to_the_lowest_free_places(
    free: list[bool], keep: int, spare: int, least: st.DataObject
):
    holes = np.array(free, dtype=bool)
    live = len(free) - int(holes.sum())
    extent = min(max(keep, live), len(free))
    floor = least.draw(st.integers(0, extent))
    before = holes.copy()
    plan = plan_relocation(holes, extent, floor, spare)
    assert (holes == before).all()
    assert plan.sources.tolist() == [rank for rank in range(extent, len(free)) if not free[rank]]
    assert plan.destinations.tolist() == [rank for rank in range(extent) if free[rank]][: len(plan.sources)]
    # Beyond the demand: free units next to the band only, no more than allowed, never below what must remain.
    given_up = range(plan.extent, extent)
    assert len(given_up) <= spare and (plan.extent >= floor or not given_up)
    assert all(free[rank] and rank not in plan.destinations for rank in given_up)
    if len(given_up) < spare and plan.extent > floor:
        assert not free[plan.extent - 1] or plan.extent - 1 in plan.destinations


# -- nothing moves on its own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_nothing_moves_when_something_is_given_back_or_looked_at(name: str, whole: Whole):
    allocator = whole(SIZES[name], chaos=None, max_rows=128)
    rows = scattered(allocator, name)
    snapshot = allocator.snapshot(rows[0])
    held = allocator.take("page", 2)
    rng = random.Random(name)
    quiet: list[Any] = [
        lambda: allocator.release(rows.pop(rng.randrange(1, len(rows)))),
        lambda: allocator.release(rows.pop(rng.randrange(1, len(rows))), after=1),
        lambda: allocator.retire(1),
        lambda: allocator.give(held),
        lambda: allocator.truncate(rows[0], 0),
        lambda: allocator.drop(snapshot),
        lambda: allocator.batch(rows),
        lambda: allocator.max_sequences(4) + allocator.max_tokens(2),
        lambda: allocator.discard(allocator.swap_out(rows.pop())),
    ]
    for call in quiet:
        places = [pool.physical.copy() for pool in allocator._space.pools]
        extents = [pool.extent for pool in allocator._space.pools]
        attempts = allocator.stats().attempts
        call()
        for pool, before in zip(allocator._space.pools, places, strict=True):
            kept = pool.physical > 0
            assert (pool.physical[kept] == before[kept]).all()
        assert [pool.extent for pool in allocator._space.pools] == extents
        assert allocator.stats().attempts == attempts
    assert allocator.stats().units_moved == 0


@pytest.mark.parametrize(
    ("hysteresis", "floor", "held", "pages_left"),
    [(0, 0, None, 55), (0.25, 0, None, 40), (1, 0, None, 20), (1, 50, None, 50), (1, 0, 47, 48)],
)
def test_hysteresis_takes_free_pages_and_stops_at_its_share_the_floor_and_what_is_held(
    hysteresis: float, floor: int, held: int | None, pages_left: int, whole: Whole
):
    options = Options(debug=2, hysteresis=float(hysteresis), floor_pages=floor)
    allocator = whole(SIXTY_PAGES, chaos=None, options=options)
    by_rank = inward(allocator, allocator.take("page", 60))
    allocator.give([page for rank, page in enumerate(by_rank) if rank >= 20 and rank != held])
    allocator.take("slot", 1)
    stats = allocator.stats()
    assert (stats.pages_extent, stats.units_moved, stats.attempts) == (pages_left, 0, {"gap": 1, "retracted": 1})
    assert stats.units_given_up == 60 - pages_left


# -- never the cause of a refusal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_hysteresis_changes_no_answer(name: str):
    """The same calls on allocators that give up more or less: each is refused by all of them or by none."""
    for seed in range(2):
        rng = random.Random(f"{name} {seed}")
        many = [
            Allocator(
                SIZES[name],
                max_rows=160,
                max_tokens_per_sequence=80,
                options=Options(debug=1, hysteresis=share, floor_pages=6, floor_slots=1),
            )
            for share in (0.0, 1 / 16, 1.0)
        ]
        rows: list[int] = []
        refused, differed = 0, False
        for step in range(600):
            operation, arguments = draw(rng, rows, step // 100)
            answers = []
            for allocator in many:
                try:
                    answers.append(repr(getattr(allocator, operation)(*arguments)))
                except OutOfMemory as refusal:
                    answers.append(refusal.reason)
            assert len(set(answers)) == 1
            refused += answers[0] in ("bytes", "floor", "pinned", "awaiting")
            rows = live_sequences(many[0])
            differed |= len({(a.stats().pages_extent, a.stats().slots_extent) for a in many}) > 1
        assert refused > 5 and differed
        for allocator in many:
            allocator.check()
            empty(allocator)


def draw(rng: random.Random, rows: list[int], phase: int) -> tuple[str, tuple[Any, ...]]:
    choice = rng.random()
    if not rows or (choice < 0.7 and len(rows) < 150):
        return "admit", ([rng.choice([[0, 0, 1], [4, 40, 80]][phase % 2])],)
    if choice < 0.9:
        return "extend", ([rng.choice(rows)], 0)
    return "release", (rng.sample(rows, rng.choice([1, 1, 1, len(rows)])),)


# -- floors, pins and content --------------------------------------------------------------------------------------


def test_no_extent_ever_falls_below_its_floor():
    options = Options(debug=2, floor_pages=9, floor_slots=2, hysteresis=1.0)
    driver = Driver(SIZES["slot of five pages"], chaos_seed=2, options=options, verify_bytes=False)
    rng = random.Random("floors")
    lowest = []
    for _ in range(400):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange, check=False)
        stats = driver.allocator.stats()
        assert stats.pages_extent >= 9 and stats.slots_extent >= 2
        lowest.append((stats.pages_live, stats.slots_live))
    assert min(pages for pages, _ in lowest) < 9 and min(slots for _, slots in lowest) < 2
    driver.empty()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_byte_survives_when_states_push_pages_aside_and_the_other_way_round(seed: int):
    driver = Driver(SIZES["slot of five pages"], max_rows=40, chaos_seed=None, options=Options(debug=1, poison=True))
    rng = random.Random(seed)
    for _ in range(6):
        for operation in ("admit", "admit", "admit", "snapshot", "extend", "take", "release", "drop", "give"):
            driver.run(operation, rng.randrange)
    driver.empty()


def test_retractions_migrations_gap_and_refusals_are_counted_apart(whole: Whole):
    allocator = whole(SIXTY_PAGES, chaos=None, options=EXACT)
    pages = inward(allocator, allocator.take("page", 60))
    assert allocator.stats().attempts == {"gap": 1}
    allocator.give(pages[-5:])
    allocator.take("slot", 1)
    assert allocator.stats().attempts == {"gap": 1, "retracted": 1}
    allocator.give(pages[:5])
    allocator.take("slot", 1)
    assert allocator.stats().attempts == {"gap": 1, "retracted": 1, "relocated": 1}
    assert allocator.stats().units_moved == 5 and allocator.stats().bytes_moved == 5 * 256
    with pytest.raises(OutOfMemory):
        allocator.take("slot", 1)
    stats = allocator.stats()
    assert stats.attempts == {"gap": 1, "retracted": 1, "relocated": 1, "refused: bytes": 1}
    assert (stats.retractions, stats.migrations) == (1, 1)
