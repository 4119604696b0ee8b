"""One arena for any number of transformers caches: who gives way when memory is short, and states on their way."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from avmp.cache_pool import CachePool
from avmp.errors import OutOfMemory
from avmp.handles import Int64Array

if TYPE_CHECKING:
    from avmp.integrations.transformers_rows import Rows


class Staged:
    """States of one layer that do not lie equally spaced in the arena, side by side: ``parts`` by index, each
    ``[rows, *part_shape]``. Models change them in place; they are written back before anything else happens."""

    def __init__(self, rows: Rows, layer: int) -> None:
        self.rows, self.layer = weakref.ref(rows), layer
        self.parts: dict[int, torch.Tensor] = {}


class SharedArena:
    """A pool, and the rows of all caches in it. Every change to the pool goes through ``run``, so that staged states
    are back in the arena when units move, are copied or leave."""

    def __init__(self, pool: CachePool) -> None:
        self.pool = pool
        self.staged: Staged | None = None
        self._rows: weakref.WeakSet[Rows] = weakref.WeakSet()
        self._abandoned: deque[tuple[str, Int64Array]] = deque()
        self._clock = 0

    def join(self, rows: Rows) -> None:
        """These rows live here; what they hold when they are gone is let go of before the next change."""
        self._rows.add(rows)
        weakref.finalize(rows, _abandon, self._abandoned, rows.held).atexit = False

    def tick(self) -> int:
        """A later time at each call: who was used last."""
        self._clock += 1
        return self._clock

    def settle(self) -> None:
        """Staged states are in the arena afterwards, and rows of caches that are gone are out of it."""
        while self._abandoned:  # rows may be abandoned at any moment, so that this is not done there and then
            operation, handles = self._abandoned.popleft()
            getattr(self.pool, operation)(handles)
        if self.staged is not None:
            staged, self.staged = self.staged, None
            rows = staged.rows()
            if rows is not None:
                rows.write_back(staged)

    def run(self, rows: Rows, operation: str, *arguments: Any) -> Any:
        """The pool's operation of that name, after as many evictions as it takes. Raises as the operation does."""
        self.settle()
        while True:
            try:
                with torch.inference_mode(False):  # host memory of swapped rows outlives the mode of this moment
                    return getattr(self.pool, operation)(*arguments)
            except OutOfMemory:
                if not self._evict(rows):
                    raise

    def require(self, rows: Rows, operation: str, *arguments: Any) -> None:
        """Makes sure that ``run`` would succeed now, or raises what it would raise; changes nothing but evictions."""
        while True:
            try:
                return self.require_free(operation, *arguments)
            except OutOfMemory:
                if not self._evict(rows):
                    raise

    def require_free(self, operation: str, *arguments: Any) -> None:
        """``require`` without evictions."""
        self.settle()
        if not self.pool.fits(operation, *arguments):
            getattr(self.pool, operation)(*arguments)  # does not fit: raises, and says in numbers why

    def _evict(self, needy: Rows) -> bool:
        """Whether some rows could be moved to host memory: of those that may, the ones used longest ago."""
        willing = [rows for rows in self._rows if rows.evictable and len(rows.sequences) and rows is not needy]
        if not willing:
            return False
        min(willing, key=lambda rows: rows.used).swap_out()
        return True


def _abandon(abandoned: deque[tuple[str, Int64Array]], held: dict[str, Int64Array]) -> None:
    """Runs when rows are gone, maybe in the middle of an operation: only notes what has to be let go of."""
    abandoned.extend((operation, handles) for operation, handles in held.items() if len(handles))
