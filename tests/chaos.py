"""A migration policy for tests: whatever relies on a unit staying where it was finds out at once."""

from __future__ import annotations

import random

import numpy as np

from avmp.address_space import AddressSpace
from avmp.page_pool import Pool


class ChaosMigration:
    """Before each commit: one random live page and slot move to random free places, and an extent shifts by one.

    Pinned units and those that tickets hold stay. Deterministic: same seed and same calls, same placements.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.moves = 0

    def disturb(self, space: AddressSpace) -> None:
        for pool in space.pools:
            self._move_one(space, pool)
        self._shift(space, self._random.choice(space.pools))

    def _move_one(self, space: AddressSpace, pool: Pool) -> None:
        free = np.flatnonzero(pool.free.mask(pool.extent))
        held = np.flatnonzero(pool.references)
        stay = set(pool.pins) | set(pool.ticket_counts()[0].tolist())
        movable = [virtual for virtual in held.tolist() if virtual not in stay]
        if len(free) and movable:
            space.relocate(pool, self._random.choice(movable), int(self._random.choice(free)))
            self.moves += 1

    def _shift(self, space: AddressSpace, pool: Pool) -> None:
        pages, slots = space.pages.extent, space.slots.extent
        grown = (pages + 1, slots) if pool is space.pages else (pages, slots + 1)
        if self._random.random() < 0.5 and pool.unit_bytes and space.layout.fits(*grown):
            pool.grow(pool.extent + 1)
        elif pool.extent > pool.floor and pool.free.mask(pool.extent)[-1]:
            none = np.empty(0, dtype=np.int64)
            pool.retract(pool.extent - 1, none, none)
