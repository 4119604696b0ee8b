"""A device in miniature: one lane of real bytes, the table mirrors, and the effects carried out in order."""

from __future__ import annotations

import numpy as np

from avmp.allocator import Allocator
from avmp.effects import Launch, TableChanges

POISON = -1
WORD = 8


class FakeDevice:
    """Holds one lane as int64 words. Pages and slots overlap in it exactly as they do in an arena.

    A page stores one word per token; a slot stores its state in its first and its last word. Guard words around the
    lane must never change.
    """

    def __init__(self, allocator: Allocator) -> None:
        layout = allocator.layout
        self.layout = layout
        self.words = np.full(layout.lane_bytes // WORD + 64, 7, dtype=np.int64)
        self.lane = self.words[32:-32]
        self.lane[:] = 0
        self.unit_words = {"page": layout.page_bytes // WORD, "slot": layout.slot_bytes // WORD}
        self.page_table = np.zeros(layout.page_count + 1, dtype=np.int64)
        self.slot_table = np.zeros(layout.slot_count + 1, dtype=np.int64)
        self.block_table = np.zeros(allocator._ledger.table.block_table.size, dtype=np.int64)
        self.host: dict[tuple[str, int], np.ndarray] = {}
        self.launches = 0

    def flush(self, allocator: Allocator) -> list[Launch]:
        """Carries out what the allocator asks for: data effects in order, then the tables."""
        launches, changes = allocator.drain()
        for launch in launches:
            getattr(self, launch.operation)(launch)
        self.upload(changes)
        self.launches += len(launches)
        return launches

    def upload(self, changes: TableChanges) -> None:
        self.page_table[changes.page_ids] = changes.page_values
        self.slot_table[changes.slot_ids] = changes.slot_values
        self.block_table[changes.cells] = changes.cell_values

    def unit(self, pool: str, physical: int) -> np.ndarray:
        words = self.unit_words[pool]
        return self.lane[physical * words : (physical + 1) * words]

    def move(self, launch: Launch) -> None:
        assert not set(launch.sources.tolist()) & set(launch.destinations.tolist())
        self.copy(launch)
        for source in launch.sources.tolist():  # what was moved away must never be read again
            self.unit(launch.pool, source)[:] = POISON

    def copy(self, launch: Launch) -> None:
        # Programs of one launch run in any order: reading everything first must give the same as copying one by one.
        read = [self.unit(launch.pool, source).copy() for source in launch.sources.tolist()]
        for source, destination in zip(launch.sources.tolist(), launch.destinations.tolist(), strict=True):
            self.unit(launch.pool, destination)[:] = self.unit(launch.pool, source)
        for data, destination in zip(read, launch.destinations.tolist(), strict=True):
            assert (self.unit(launch.pool, destination) == data).all()

    def zero(self, launch: Launch) -> None:
        for destination in launch.destinations.tolist():
            self.unit(launch.pool, destination)[:] = 0

    def poison(self, launch: Launch) -> None:
        for destination in launch.destinations.tolist():
            self.unit(launch.pool, destination)[:] = POISON

    def swap_out(self, launch: Launch) -> None:
        assert launch.destinations.tolist() == list(range(len(launch.sources)))
        units = [self.unit(launch.pool, source).copy() for source in launch.sources.tolist()]
        self.host[launch.pool, launch.swapped] = np.array(units)

    def swap_in(self, launch: Launch) -> None:
        units = self.host.pop((launch.pool, launch.swapped))
        for source, destination in zip(launch.sources.tolist(), launch.destinations.tolist(), strict=True):
            self.unit(launch.pool, destination)[:] = units[source]

    # -- what kernels do -------------------------------------------------------------------------------------------

    def write_token(self, virtual_slot: int, value: int) -> None:
        page, offset = divmod(virtual_slot, self.layout.page_tokens)
        physical = int(self.page_table[page])
        assert page >= 1 and physical >= self.layout.first_page
        self.unit("page", physical)[offset] = value

    def read_token(self, page: int, offset: int) -> int:
        return int(self.unit("page", int(self.page_table[page]))[offset])

    def write_state(self, slot: int, value: int) -> None:
        physical = int(self.slot_table[slot])
        assert slot >= 1 and physical >= self.layout.first_slot
        unit = self.unit("slot", physical)
        unit[0] = unit[-1] = value

    def read_state(self, slot: int) -> int:
        unit = self.unit("slot", int(self.slot_table[slot]))
        assert unit[0] == unit[-1]
        return int(unit[0])

    def verify(self, allocator: Allocator) -> None:
        """Mirrors equal the host's tables; the null area and the guards are untouched."""
        space, table = allocator._space, allocator._ledger.table
        assert (self.page_table[: space.pages.capacity + 1] == space.pages.physical).all()
        assert (self.slot_table[: space.slots.capacity + 1] == space.slots.physical).all()
        assert (self.block_table == table.block_table.reshape(-1)).all()
        assert not self.lane[: self.layout.null_bytes // self.layout.lane_count // WORD].any()
        assert (self.words[:32] == 7).all() and (self.words[-32:] == 7).all()
