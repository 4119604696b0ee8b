"""What fits is known before it is tried: capacity answers against what then happens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avmp.allocator import Allocator
from avmp.errors import AvmpError, InvalidArgument, OutOfMemory, RowsExhausted, RowTooLong, StaleHandle
from avmp.layout import Layout
from avmp.options import Options
from tests.driver import Driver
from tests.helpers import KIB, Whole, whole_allocators

LAYOUTS = {
    "slot of five pages": Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4),
    "slot smaller than a page": Layout.from_unit_sizes(1024, 256, 24 * KIB, page_tokens=4),
    "sizes that do not divide": Layout.from_unit_sizes(768, 1280, 40 * KIB, lane_count=2, page_tokens=3),
    "pages only": Layout.from_unit_sizes(256, 0, 8 * KIB, page_tokens=4),
    "slots only": Layout.from_unit_sizes(0, 256, 4 * KIB, page_tokens=4),
}
REFUSALS = (OutOfMemory, RowsExhausted, RowTooLong)


@pytest.fixture
def whole():
    yield from whole_allocators()


def succeeds(allocator: Allocator, operation: str, *arguments: Any) -> bool:
    """Whether it does, by doing it; what it has admitted or taken is given back."""
    try:
        result = getattr(allocator, operation)(*arguments)
    except REFUSALS:
        return False
    if operation == "admit":
        allocator.release(result)
    return True


@given(seed=st.integers(0, 10**9), name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_the_largest_numbers_are_exact_whatever_is_held_pinned_or_awaited(seed: int, name: str, data: st.DataObject):
    layout = LAYOUTS[name]
    options = Options(
        debug=1,
        hysteresis=data.draw(st.sampled_from([0.0, 0.0625, 1.0])),
        floor_pages=data.draw(st.sampled_from([0, 5])) * layout.has_pages,
        floor_slots=data.draw(st.sampled_from([0, 2])) * layout.has_slots,
    )
    chaos = data.draw(st.sampled_from([None, 1]))
    driver = Driver(layout, max_rows=9, max_tokens=32, chaos_seed=chaos, options=options, verify_bytes=False)
    rng = random.Random(seed)
    for _ in range(data.draw(st.integers(0, 40))):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange, check=False)
    allocator = driver.allocator
    tokens, sequences = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 10))
    most = allocator.max_sequences(tokens)
    assert succeeds(allocator, "admit", [tokens] * most) or most == 0
    assert not succeeds(allocator, "admit", [tokens] * (most + 1))
    longest = allocator.max_tokens(sequences)
    assert succeeds(allocator, "admit", [longest] * sequences) == allocator.fits("admit", [longest] * sequences)
    assert longest == 0 or succeeds(allocator, "admit", [longest] * sequences)
    assert not succeeds(allocator, "admit", [longest + 1] * sequences)
    driver.empty()


@given(name=st.sampled_from(sorted(LAYOUTS)), tokens=st.integers(1, 60), sequences=st.integers(1, 9))
def test_sequences_and_tokens_answer_for_each_other(name: str, tokens: int, sequences: int):
    allocator = Allocator(LAYOUTS[name], max_rows=9, max_tokens_per_sequence=60)
    longest = allocator.max_tokens(sequences)
    assert allocator.max_sequences(longest) >= sequences or longest == 0
    assert (allocator.max_sequences(tokens) >= sequences) == (longest >= tokens)


def test_questions_change_nothing(whole: Whole):
    allocator = whole(LAYOUTS["slot of five pages"])
    sequences = allocator.admit([5, 9])
    snapshot, swapped = allocator.snapshot(sequences[0]), allocator.swap_out(allocator.admit([3]))
    before, attempts = allocator.digest(), allocator.stats().attempts
    questions: list[tuple[Any, ...]] = [
        ("admit", [64] * 9), ("admit", [6], snapshot), ("extend", sequences, 3), ("release", sequences, 4),
        ("fork", sequences[0], 3), ("reorder", sequences, [1, 1]), ("snapshot", sequences), ("retire", 3),
        ("restore", sequences[1], snapshot), ("drop", snapshot), ("truncate", sequences, [5, 1]),
        ("swap_out", sequences), ("swap_in", swapped), ("discard", swapped), ("take", "slot", 99),
        ("release_front", sequences, 4), ("pin", allocator.pages(sequences[0])),
        ("retain", allocator.pages(sequences[0])),
    ]  # fmt: skip
    answers = [allocator.fits(*question) for question in questions]
    assert allocator.digest() == before and allocator.stats().attempts == attempts
    assert answers.count(False) == 2 and not answers[0] and not allocator.fits("take", "slot", 99)


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (("admit", [-1]), InvalidArgument),
        (("grow", [1]), InvalidArgument),
        (("extend", [7]), StaleHandle),
        (("take", "block"), InvalidArgument),
        (("swap_in", [7]), StaleHandle),
    ],
)
def test_questions_with_bad_arguments_raise_as_the_operation_would(
    question: tuple[Any, ...], error: type[AvmpError], whole: Whole
):
    allocator = whole(LAYOUTS["slot of five pages"])
    with pytest.raises(error):
        allocator.fits(*question)


@pytest.mark.parametrize("name", ["max_sequences", "max_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_capacity_questions_want_a_count(name: str, value: Any, whole: Whole):
    with pytest.raises(InvalidArgument):
        getattr(whole(LAYOUTS["slot of five pages"]), name)(value)


def test_a_sequence_that_no_row_can_hold_fits_no_times(whole: Whole):
    allocator = whole(LAYOUTS["slot of five pages"], max_tokens=30)  # 32 in whole pages
    assert (allocator.max_sequences(33), allocator.max_tokens(1), allocator.max_tokens_per_sequence) == (0, 32, 32)
    assert allocator.max_sequences(32) == LAYOUTS["slot of five pages"].max_sequences(32) == 7
