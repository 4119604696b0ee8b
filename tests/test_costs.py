"""What operations cost, in counts that no machine changes: units moved, lines run, array elements touched."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from avmp.allocator import Allocator
from avmp.layout import Layout
from avmp.migration import plan_relocation
from avmp.options import Options
from tests.helpers import KIB, PACKAGE, Whole, whole_allocators


@pytest.fixture
def whole():
    yield from whole_allocators()


# -- live units in the way of a retraction -------------------------------------------------------------------------

PAGES = 16384
SHAPES: dict[str, tuple[Callable[[int], float], tuple[float, ...]]] = {
    "flat at 90 %": (lambda step: 0.9, (0.1,)),
    "wave from 60 to 95 %": (lambda step: 0.775 + 0.175 * math.cos(step / 400), (0.05, 0.1, 0.2)),
    "full, then 70 %": (lambda step: 0.995 if step < 600 else 0.7, (0.05, 0.1, 0.2)),
}


class Load:
    """Requests with lognormal prompts (median 512) and outputs (median 256) that come as long as the share of live
    pages is below a target, grow by one token per step, and leave. The KV side is 16,384 pages of 16 tokens."""

    def __init__(self, target: Callable[[int], float], seed: int) -> None:
        layout = Layout.from_unit_sizes(256, 256, (PAGES + 1001) * 256, page_tokens=16)
        options = Options(floor_pages=PAGES, zero_slots=False, record_effects=False)
        self.allocator = Allocator(layout, max_rows=1000, max_tokens_per_sequence=16384, options=options)
        self.target, self.rng = target, np.random.default_rng(seed)
        self.running = np.empty(0, dtype=np.int64)
        self.leaves: list[tuple[int, int]] = []
        self.step = self.served = 0

    def length(self, median: int) -> int:
        return int(np.clip(self.rng.lognormal(math.log(median), 1.0), 1, 8000))

    def advance(self) -> None:
        allocator, gone = self.allocator, set()
        while self.leaves and self.leaves[0][0] <= self.step:
            gone.add(heapq.heappop(self.leaves)[1])
        if gone:
            allocator.release(list(gone))
            self.running = self.running[~np.isin(self.running, list(gone))]
        pool, limit = allocator._space.pages, int(self.target(self.step) * PAGES)
        # Room is left for the next step's growth: an extend that fails would end the experiment.
        if pool.free.count >= len(self.running):
            allocator.extend(self.running)
        new = []
        while pool.live < limit and len(self.running) + len(new) < 990:
            prompt = self.length(512)
            if pool.live + prompt // 16 + 1 > limit:
                break
            new.append(int(allocator.admit([prompt])[0]))
            heapq.heappush(self.leaves, (self.step + self.length(256), new[-1]))
        self.running = np.concatenate([self.running, np.array(new, dtype=np.int64)])
        self.served += len(new)
        self.step += 1

    def share_in_the_way(self, cut: float) -> float | None:
        """Share of live pages among those that a retraction by ``cut`` would give up; None where they do not fit."""
        pool = self.allocator._space.pages
        free = pool.free.mask(pool.extent)
        left = pool.extent - int(cut * PAGES)
        if pool.live > left:
            return None
        return len(plan_relocation(free, left).sources) / (pool.extent - left)


@pytest.mark.parametrize("name", SHAPES)
def test_at_most_three_in_twenty_of_the_units_given_up_hold_live_data(name: str):
    target, cuts = SHAPES[name]
    load = Load(target, seed=1)
    shares: dict[float, list[float]] = {cut: [] for cut in cuts}
    while load.served < 12_000:
        load.advance()
        if load.step % 20 == 0 and load.step > 600:  # the arena has filled up; in the third shape the drain begins
            for cut in cuts:
                share = load.share_in_the_way(cut)
                if share is not None:
                    shares[cut].append(share)
    load.allocator.check()
    assert load.allocator.stats().units_moved == 0
    for cut, measured in shares.items():
        assert len(measured) > 50
        assert np.mean(measured) <= 0.15, f"cut {cut:.0%}: {np.mean(measured):.3f} of {len(measured)} samples"


# -- counting lines and elements -----------------------------------------------------------------------------------


class Counted(np.ndarray):
    """An array that counts the numpy operations on it and on what comes out of them, and the elements they touch."""

    calls = elements = 0

    @classmethod
    def note(cls, *values: Any) -> None:
        Counted.calls += 1
        Counted.elements += max((value.size for value in values if isinstance(value, np.ndarray)), default=0)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **keywords: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, Counted) else value for value in inputs]
        if out is not None:
            keywords["out"] = tuple(np.asarray(value) if isinstance(value, Counted) else value for value in out)
        result = getattr(ufunc, method)(*plain, **keywords)
        Counted.note(*plain, result)
        return result.view(Counted) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        result = super().__array_function__(function, types, arguments, keywords)
        Counted.note(*arguments, result)
        return result

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        Counted.note(result if not isinstance(index, slice) else None)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        Counted.note(np.asarray(value), index)


def cost_of(call: Callable[..., Any], *arguments: Any) -> tuple[int, int, int]:
    """Lines run in the package, numpy operations counted, elements touched."""
    lines = 0

    def on_line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return on_line

    previous = sys.gettrace()
    Counted.calls = Counted.elements = 0
    sys.settrace(lambda frame, event, argument: on_line if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        call(*arguments)
    finally:
        sys.settrace(previous)
    return lines, Counted.calls, Counted.elements


def decoding(batch: int, whole: Whole) -> tuple[Allocator, np.ndarray]:
    """``batch`` sequences, one in sixteen of which needs a page in each step."""
    layout = Layout.from_unit_sizes(256, 256, 8 * KIB * KIB, page_tokens=16)
    allocator = whole(layout, max_tokens=256, chaos=None, max_rows=batch, options=Options(zero_slots=False))
    sequences = allocator.admit([64 + index % 16 for index in range(batch)])
    table, pool = allocator._ledger.table, allocator._space.pages
    for name in ("cursor", "length", "cells", "next_cell"):
        setattr(table, name, getattr(table, name).view(Counted))
    for name in ("physical", "references", "unbound"):
        setattr(pool, name, getattr(pool, name).view(Counted))
    allocator.take("page", 100)
    for _ in range(4):
        allocator.extend(sequences)
    allocator.drain()
    return allocator, sequences


def steps(batch: int, whole: Whole, counts: int | str) -> np.ndarray:
    """Costs, ``[steps, 3]``, of 32 steps of decoding."""
    allocator, sequences = decoding(batch, whole)
    each = 1 if counts == "one" else np.full(batch, 1 if counts == "one each" else 3)
    return np.array([cost_of(allocator.extend, sequences, each) for _ in range(32)])


@pytest.mark.parametrize(("counts", "most_calls"), [("one", 24), ("one each", 60), ("three each", 60)])
def test_extending_takes_as_many_lines_and_numpy_calls_for_a_thousand_sequences_as_for_a_few(
    counts: str, most_calls: int, whole: Whole
):
    small, middle, large = (steps(batch, whole, counts) for batch in (16, 256, 1024))
    lines, calls, _ = middle.max(axis=0)
    assert 10 < calls <= most_calls and lines <= 250
    assert large.max(axis=0)[:2].tolist() == [lines, calls]
    assert small.max(axis=0)[0] <= lines and small.max(axis=0)[1] <= calls
    assert middle[:, 2].mean() >= 256 and large[:, 2].mean() <= 4.1 * middle[:, 2].mean()


@pytest.mark.parametrize("cut", [0.05, 0.3])
def test_planning_a_retraction_is_linear_in_the_pages(cut: float):
    """From 4,096 to 32,768 pages of which every second is free, at random."""
    costs = []
    for pages in (4096, 8192, 16384, 32768):
        free = np.random.default_rng(3).random(pages) < 0.5
        left = int(pages * (1 - cut))
        cost = cost_of(plan_relocation, free.view(Counted), left, 0, left // 16)
        assert cost[1] > 3
        costs.append(cost)
    for smaller, larger in itertools.pairwise(costs):
        assert larger[0] <= 2 * smaller[0] and larger[1] <= 2 * smaller[1]
        assert larger[2] <= 2.2 * smaller[2]
    assert costs[-1][2] <= 6 * 32768


def test_capacity_questions_cost_the_same_in_a_small_and_in_a_huge_arena(whole: Whole):
    costs = []
    for mebibytes in (1, 512):
        layout = Layout.from_unit_sizes(256, 1280, mebibytes << 20, page_tokens=16)
        options = Options(record_effects=False)
        allocator = whole(layout, max_tokens=2048, chaos=None, options=options)
        sequences = allocator.admit([100, 200])
        for pool in allocator._space.pools:
            for name in ("physical", "references"):
                setattr(pool, name, getattr(pool, name).view(Counted))
        questions: tuple[tuple[Any, ...], ...] = (
            (allocator.fits, "admit", [100, 17]),
            (allocator.fits, "extend", sequences, 30),
            (allocator.max_sequences, 100),
            (allocator.max_tokens, 3),
        )
        costs.append([cost_of(*question) for question in questions])
    assert costs[0] == costs[1]
    assert all(elements <= 8 for _, _, elements in costs[0])


def test_a_fork_shares_and_does_not_copy(whole: Whole):
    layout = Layout.from_unit_sizes(256, 1280, 4 << 20, page_tokens=16)
    allocator = whole(layout, max_tokens=10_000, max_rows=4)
    sequence = int(allocator.admit([9_999])[0])
    allocator.drain()
    allocator.fork(sequence, 2)
    launches = [launch for launch in allocator.drain()[0] if launch.operation == "copy"]
    assert [(launch.pool, len(launch.sources)) for launch in launches] == [("page", 2), ("slot", 2)]
    assert allocator.stats().pages_live == 625 + 2
