"""What tests of the allocator share: allocators that must be whole and empty at the end, and failures on demand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np

import avmp
from avmp.allocator import Allocator
from avmp.layout import Layout
from avmp.options import Options
from tests.chaos import ChaosMigration

KIB = 1024
PACKAGE = os.path.dirname(os.path.abspath(avmp.__file__)) + os.sep


def live_sequences(allocator: Allocator) -> list[int]:
    """Handles of all sequences, by row."""
    table = allocator._ledger.table
    return table.handle[table.live_rows()].tolist()


def empty(allocator: Allocator) -> None:
    """Lets go of everything that anybody holds. Afterwards every table is whole and every unit is back."""
    ledger = allocator._ledger
    allocator.release(live_sequences(allocator))
    allocator.drop(list(ledger.snapshots))
    allocator.discard(list(ledger.swapped))
    for pool in ledger.space.pools:
        virtual = np.arange(len(pool.loose))
        allocator.give(pool.handles(np.repeat(virtual, pool.loose)))
        allocator.unpin(pool.handles(np.array(list(pool.pins.elements()), dtype=np.int64)))
    allocator.retire(1 << 62)
    allocator.check()
    stats = allocator.stats()
    assert stats.pages_live == stats.slots_live == stats.sequences == stats.snapshots == stats.swapped == 0
    assert (stats.pages_free, stats.slots_free) == (stats.pages_extent, stats.slots_extent)
    assert stats.used_bytes == 0


class Whole:
    """Makes allocators, checked after every operation and disturbed by default, and empties them all at the end."""

    def __init__(self) -> None:
        self.made: list[Allocator] = []

    def __call__(
        self,
        layout: Layout,
        max_tokens: int | None = 64,
        chaos: int | None = 1,
        max_rows: int = 16,
        options: Options | None = None,
    ) -> Allocator:
        allocator = Allocator(
            layout,
            max_rows=max_rows,
            max_tokens_per_sequence=max_tokens,
            options=options or Options(debug=2),
            disturbance=None if chaos is None else ChaosMigration(chaos),
        )
        self.made.append(allocator)
        return allocator


def whole_allocators() -> Iterator[Whole]:
    """For a fixture: ``yield from whole_allocators()``."""
    whole = Whole()
    yield whole
    for allocator in whole.made:
        empty(allocator)


class Injected(Exception):
    """What FailAt raises: nothing in the package knows it."""


class FailAt:
    """While active, the n-th line (from 0) that runs in the package raises: lines outside a commit count, or, with
    ``committing``, those inside, or, with None, all. ``entered`` tells whether a commit began, ``where`` which line
    raised."""

    def __init__(self, allocator: Allocator, line: int, committing: bool | None = False) -> None:
        self.allocator, self.line, self.committing = allocator, line, committing
        self.entered = False
        self.where: str | None = None

    def __enter__(self) -> FailAt:
        self._previous = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._previous)

    def run(self, call: Callable[..., Any], *arguments: Any) -> bool:
        """Whether the call came to its end."""
        with self:
            try:
                call(*arguments)
            except Injected:
                return False
        return True

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            self.entered |= self.allocator._committing
            if self.committing in (None, self.allocator._committing):
                self.line -= 1
                if self.line == -1:
                    self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                    raise Injected(self.where)
        return self._on_line
