"""Caches in one small arena, in any order of operations: every logit is that of transformers' own cache."""

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st
from transformers import DynamicCache

from avmp.errors import OutOfMemory, RowsExhausted
from avmp.integrations.transformers import AvmpCache, Checkpoint
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.transformers_models import IN_PLACE, VOCABULARY, forward, memory_for, tiny_model

MOST_TOKENS, MOST_ROWS = 40, 4
"""Of one cache. The arena holds one such cache, and no more."""


@dataclass
class Twin:
    """A cache and transformers' own with the same in it, and the same as it was at each checkpoint."""

    cache: AvmpCache
    own: Any
    rows: int
    marks: list[tuple[Checkpoint, Any]] = field(default_factory=list)

    def reorder(self, chosen: list[int]) -> None:
        """What was done to the cache, to the others."""
        for own in (self.own, *(own for _, own in self.marks)):
            own.reorder_cache(torch.tensor(chosen))
        self.rows = len(chosen)


class Schedule:
    """Twins, and what may be done to one of them; ``number`` decides all that is to be decided."""

    def __init__(self, family: str, attention: str, chaos: int) -> None:
        self.family, self.attention = family, attention
        options, model = Options(poison=True, debug=2), tiny_model(family, attention)
        self.root = AvmpCache(
            model,
            memory_for(model, MOST_ROWS, MOST_TOKENS, page_tokens=4),
            page_tokens=4,
            max_rows=12,
            max_length=MOST_TOKENS,
            max_batch_tokens=256,
            options=options,
            disturbance=ChaosMigration(chaos) if chaos else None,
            evictable=True,
        )
        self.twins: list[Twin] = []
        self.refused = self.compared = self.came_back = 0
        self.longest = MOST_TOKENS - 1  # the last token is for the last comparison

    def run(self, operation: str, number: int) -> None:
        if operation == "begin" or not self.twins:
            return self.begin(number)
        try:
            getattr(self, operation)(self.twins[number % len(self.twins)], number // 7)
        except (OutOfMemory, RowsExhausted):
            self.refused += 1  # what follows shows that nothing has changed

    def begin(self, number: int) -> None:
        twin = Twin(
            self.root.share(evictable=number % 3 > 0), DynamicCache(config=self.root._model.config), number % 3 + 1
        )
        self.twins.append(twin)
        try:
            self.go_on(twin, number, number % 9 + 1)
        except (OutOfMemory, RowsExhausted):
            self.refused += 1
            self.twins.remove(twin)

    def step(self, twin: Twin, number: int) -> None:
        self.go_on(twin, number, 1)

    def chunk(self, twin: Twin, number: int) -> None:
        self.go_on(twin, number, number % 5 + 1)

    def go_on(self, twin: Twin, number: int, tokens: int) -> None:
        if twin.own.get_seq_length() + tokens > self.longest:
            return self.end(twin, number)
        self.came_back += twin.cache.batch_size > len(twin.cache.sequences)
        ids = torch.randint(VOCABULARY, (twin.rows, tokens), generator=torch.Generator().manual_seed(number))
        result = forward(tiny_model(self.family, self.attention), twin.cache, input_ids=ids)
        expected = forward(tiny_model(self.family), twin.own, input_ids=ids)
        assert (
            torch.equal(result, expected) if self.attention == "sdpa" else torch.allclose(result, expected, atol=1e-4)
        )
        self.compared += 1

    def fork(self, twin: Twin, number: int) -> None:
        self.twins.append(Twin(copy.deepcopy(twin.cache), copy.deepcopy(twin.own), twin.rows))

    def reorder(self, twin: Twin, number: int) -> None:
        chosen = [(number + row * row) % twin.rows for row in range(twin.rows)]
        twin.cache.reorder_cache(torch.tensor(chosen))
        twin.reorder(chosen)

    def select(self, twin: Twin, number: int) -> None:
        chosen = [(number + row) % twin.rows for row in range(number % MOST_ROWS + 1)]
        twin.cache.batch_select_indices(torch.tensor(chosen))
        twin.reorder(chosen)

    def swap(self, twin: Twin, number: int) -> None:
        twin.cache.swap_out()

    def mark(self, twin: Twin, number: int) -> None:
        twin.marks.append((twin.cache.checkpoint(), copy.deepcopy(twin.own)))

    def go_back(self, twin: Twin, number: int) -> None:
        if twin.marks:
            del twin.marks[number % len(twin.marks) + 1 :]
            mark, own = twin.marks[-1]
            twin.cache.crop(mark.length - twin.cache.get_seq_length())
            twin.own = copy.deepcopy(own)

    def end(self, twin: Twin, number: int) -> None:
        self.twins.remove(twin)
        if number % 2:
            twin.cache.reset()

    def finish(self) -> None:
        """Everything that is left goes on once more, what was swapped out too, alone in the arena if need be, which is
        whole and empty then."""
        self.longest += 1
        for twin in self.twins:
            twin.cache.evictable = True
            for mark in twin.cache.checkpoints:
                twin.cache.forget(mark)
        while self.twins:
            twin = self.twins.pop()
            before = self.compared
            self.go_on(twin, 1, 1)
            assert self.compared == before + 1
            del twin
        self.root.pool.check()
        assert self.root.pool.stats().used_bytes == 0


GROWTH = ["begin"] * 4 + ["chunk"] * 5 + ["end"] * 3 + ["swap"]
"""Short caches need states and long ones pages: what moves the boundary."""
OPERATIONS = [*GROWTH, "step", "step", "fork", "reorder", "select", "mark", "go_back"]
schedules = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10_000)), min_size=40, max_size=70)


def run(family: str, attention: str, chaos: int, schedule: list[tuple[str, int]]) -> Schedule:
    played = Schedule(family, attention, chaos)
    for operation, number in schedule:
        played.run(operation, number)
    played.finish()
    return played


def run_any(family: str, attention: str, examples: int) -> None:
    """Any schedules; over all of them, live units were moved, caches came back from host memory, and memory ran out."""
    played: list[tuple[int, int, int]] = []

    @settings(max_examples=examples)
    @given(schedule=schedules, chaos=st.integers(0, 3))
    def any_schedule(schedule: list[tuple[str, int]], chaos: int) -> None:
        result = run(family, attention, chaos, schedule)
        played.append((result.root.pool.stats().migrations, result.came_back, result.refused))
        target(float(played[-1][0]))

    any_schedule()
    assert len(played) >= examples and all(sum(counts) > 0 for counts in zip(*played, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "avmp"] if IN_PLACE else ["sdpa"])
def test_any_schedule_gives_the_logits_of_each_cache_alone(attention: str) -> None:
    run_any("bamba", attention, examples=6)


@pytest.mark.parametrize("attention", ["sdpa", "avmp"] if IN_PLACE else ["sdpa"])
def test_one_long_schedule_moves_live_units_many_times(attention: str) -> None:
    random = Random(0)
    played = run("bamba", attention, 0, [(random.choice(GROWTH), random.randrange(10_000)) for _ in range(250)])
    assert played.root.pool.stats().migrations >= 8 and min(played.came_back, played.refused) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "avmp"] if IN_PLACE else ["sdpa"])
@pytest.mark.parametrize("family", ["jamba", "zamba2", "falcon_h1", "qwen3_next", "lfm2"])
def test_the_same_for_more_families(family: str, attention: str) -> None:
    run_any(family, attention, examples=40)
