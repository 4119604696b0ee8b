"""Caches in one small arena, in any order of operations: every logit is that of transformers' own cache."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hypothesis import given, settings
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
        self.refused = self.compared = 0

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
        if twin.own.get_seq_length() + tokens > MOST_TOKENS:
            return self.end(twin, number)
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
        """Everything that is left goes on once more, alone in the arena if need be, which is whole and empty then."""
        for twin in self.twins:
            twin.cache.evictable = True
            for mark in twin.cache.checkpoints:
                twin.cache.forget(mark)
        while self.twins:
            twin = self.twins.pop()
            if twin.own.get_seq_length() < MOST_TOKENS:
                self.go_on(twin, 1, 1)
            del twin
        self.root.pool.check()
        assert self.root.pool.stats().used_bytes == 0


OPERATIONS = ["begin", "step", "step", "step", "chunk", "fork", "reorder", "select", "swap", "mark", "go_back", "end"]
schedules = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10_000)), min_size=20, max_size=60)


def run(family: str, attention: str, chaos: int, schedule: list[tuple[str, int]]) -> Schedule:
    played = Schedule(family, attention, chaos)
    for operation, number in schedule:
        played.run(operation, number)
    played.finish()
    return played


@settings(max_examples=6)
@given(schedule=schedules, chaos=st.integers(0, 3))
@pytest.mark.parametrize("attention", ["sdpa", "avmp"] if IN_PLACE else ["sdpa"])
def test_any_schedule_gives_the_logits_of_each_cache_alone(
    attention: str, schedule: list[tuple[str, int]], chaos: int
) -> None:
    run("bamba", attention, chaos, schedule)


@pytest.mark.slow
@settings(max_examples=40)
@given(schedule=schedules, chaos=st.integers(0, 3))
@pytest.mark.parametrize("attention", ["sdpa", "avmp"] if IN_PLACE else ["sdpa"])
@pytest.mark.parametrize("family", ["jamba", "zamba2", "falcon_h1", "qwen3_next", "lfm2"])
def test_the_same_for_more_families(family: str, attention: str, schedule: list[tuple[str, int]], chaos: int) -> None:
    run(family, attention, chaos, schedule)
