"""The numbers of an OutOfMemory are those that decide: what is short, by how much, and what is in the way."""

import random

import pytest

from avmp.allocator import Allocator
from avmp.errors import OutOfMemory
from avmp.layout import Layout
from avmp.options import Options
from tests.chaos import ChaosMigration

LAYOUT = Layout.from_unit_sizes(256, 768, 16 * 1024, page_tokens=4)
PAGES, SLOTS = LAYOUT.max_pages(), LAYOUT.max_slots()


def arena(**keywords: int) -> Allocator:
    return Allocator(LAYOUT, max_rows=64, max_tokens_per_sequence=64, options=Options(debug=2, **keywords))


def refusal(allocator: Allocator, operation: str, *arguments: object) -> OutOfMemory:
    before = allocator.digest()
    with pytest.raises(OutOfMemory) as caught:
        getattr(allocator, operation)(*arguments)
    assert allocator.digest() == before
    assert allocator.stats().attempts[f"refused: {caught.value.reason}"] >= 1
    return caught.value


def test_slots_that_do_not_fit_whatever_becomes_of_the_pages_are_what_is_short() -> None:
    error = refusal(arena(), "admit", [4] * (SLOTS + 3))
    assert (error.pool, error.missing_units, error.reason) == ("slot", error.missing_units, "bytes")
    assert 3 <= error.missing_units <= SLOTS + 3 and "out of slots" in str(error)


def test_missing_units_are_exactly_those_whose_release_makes_room() -> None:
    rng = random.Random(4)
    seen = {"page": 0, "slot": 0}
    for _ in range(300):
        allocator = Allocator(
            LAYOUT, max_rows=64, max_tokens_per_sequence=64, disturbance=ChaosMigration(rng.randrange(99))
        )
        pages = allocator.take("page", rng.randrange(PAGES))
        slots = allocator.take("slot", rng.randrange(allocator.layout.max_slots(len(pages)) + 1))
        wanted = [rng.randrange(1, rng.choice([3, 60])) for _ in range(rng.randrange(1, 9))]
        if allocator.fits("admit", wanted):
            continue
        error = refusal(allocator, "admit", wanted)
        held = pages if error.pool == "page" else slots
        assert error.missing_bytes == error.missing_units * LAYOUT.lane_count * (256 if error.pool == "page" else 768)
        if error.missing_units > len(held) or not LAYOUT.fits(len(pages) + error.wanted_pages):
            continue  # no release in this pool alone can make room for that much
        seen[error.pool] += 1
        allocator.give(held[: error.missing_units - 1])
        assert not allocator.fits("admit", wanted)
        allocator.give(held[error.missing_units - 1 : error.missing_units])
        assert allocator.fits("admit", wanted)
    assert seen["page"] > 20 and seen["slot"] > 5


def test_units_that_only_pins_hold_are_reported_as_pinned() -> None:
    allocator = arena()
    pages = allocator.take("page", 18)
    allocator.pin(pages)
    allocator.give(pages)
    error = refusal(allocator, "take", "page", PAGES - 10)
    assert (error.reason, error.pinned_pages) == ("pinned", 18) and "unpin" in str(error)
    allocator.unpin(pages)
    allocator.take("page", PAGES - 10)


def test_tickets_and_pins_that_block_together_are_both_named() -> None:
    allocator = arena()
    pages = allocator.take("page", 10)
    allocator.pin(pages)
    allocator.give(pages)
    sequences = allocator.admit([40])
    allocator.release(sequences, after=7)
    error = refusal(allocator, "take", "page", PAGES - 6)
    assert error.reason == "awaiting+pinned" and error.awaiting_pages == 10
    assert "retire" in str(error) and "unpin" in str(error)
    allocator.retire(7)
    assert refusal(allocator, "take", "page", PAGES - 6).reason == "pinned"
    allocator.unpin(pages)
    allocator.take("page", PAGES - 6)


def test_what_tickets_hold_back_is_told_apart_from_what_pins_hold_back() -> None:
    allocator = arena()
    filler = allocator.take("page", 6)
    held = allocator.admit([16])
    allocator.give(filler)
    allocator.release(held, after=1)
    error = refusal(allocator, "take", "slot", SLOTS)
    assert error.held_by_tickets_bytes > 0 == error.held_by_pins_bytes
    assert error.reason == "awaiting"


def test_floors_are_named_when_they_are_in_the_way() -> None:
    allocator = arena(floor_slots=3)
    error = refusal(allocator, "take", "page", PAGES - 4)
    assert error.reason == "floor" and error.held_by_floors_bytes == 3 * 768
    assert allocator.fits("take", "page", PAGES - 9)


def test_reorder_tells_what_it_wants_and_what_it_lets_go_of() -> None:
    allocator = arena()
    sequences = allocator.admit([6, 1, 1])
    allocator.pin(allocator.slot(int(sequences[1])))
    allocator.pin(allocator.pages(int(sequences[1])))
    for kind in ("page", "slot"):
        while allocator.fits("take", kind):
            allocator.take(kind)
    error = refusal(allocator, "reorder", sequences, [0, 0, 2])
    assert error.wanted_pages == error.wanted_slots == 1 and error.freed_pages == error.freed_slots == 0


def test_the_error_can_tell_what_a_release_would_give() -> None:
    allocator = arena()
    sequences = allocator.admit([40, 40])
    twin = allocator.fork(int(sequences[0]))
    error = refusal(allocator, "take", "page", PAGES)
    assert error.releasable(sequences[1]) == (10, 1)
    assert error.releasable(twin) == (0, 1)
    assert error.releasable([*sequences.tolist(), int(twin[0])]) == (20, 3)


def test_a_ticket_that_is_retired_already_frees_at_once() -> None:
    allocator = arena()
    allocator.retire(5)
    allocator.release(allocator.admit([8]), after=3)
    assert allocator.stats().pages_live == allocator.stats().slots_live == 0
    allocator.release(allocator.admit([8]), after=6)
    assert allocator.stats().pages_awaiting == 2
    allocator.retire(6)
    assert allocator.stats().pages_live == 0
