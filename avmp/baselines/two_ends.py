"""One buffer whose two kinds of unit grow towards each other, and are packed as a whole when they meet."""

from __future__ import annotations

from typing import Any

import numpy as np

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.protocol import IntArray, PolicySetup


class _End:
    """The units of one kind, counted from their end of the buffer: ``owner[i]`` is the sequence of unit i, 0 for a
    hole; no unit at or beyond ``extent`` has an owner."""

    def __init__(self, unit_bytes: int, most: int) -> None:
        self.unit_bytes = unit_bytes
        self.owner: IntArray = np.zeros(most, dtype=np.int64)
        self.extent = self.live = 0

    def beyond(self, count: int) -> int:
        """Bytes that ``count`` more units take beyond the extent, the holes being filled first."""
        return max(count - (self.extent - self.live), 0) * self.unit_bytes

    def take(self, owners: IntArray) -> None:
        """A unit for each entry: the lowest hole, or beyond the extent."""
        places = (self.owner[: self.extent] == 0).nonzero()[0][: len(owners)]
        fresh = len(owners) - len(places)
        self.owner[places] = owners[: len(places)]
        self.owner[self.extent : self.extent + fresh] = owners[len(places) :]
        self.extent += fresh
        self.live += len(owners)

    def free(self, owners: IntArray) -> None:
        """All units of these sequences become holes."""
        held = self.owner[: self.extent]
        mine = np.isin(held, owners) if len(owners) > 1 else held == owners[0]
        held[mine] = 0
        self.live -= int(np.count_nonzero(mine))

    def pack(self) -> int:
        """Closes every hole with the units furthest out; yields how many moved."""
        sources = self.owner[self.live : self.extent].nonzero()[0] + self.live
        holes = (self.owner[: self.live] == 0).nonzero()[0]
        self.owner[holes] = self.owner[sources]
        self.owner[self.live : self.extent] = 0
        self.extent = self.live
        return len(sources)


class TwoEnds(CountedPolicy):
    """SGLang's unified memory (``--enable-unified-memory``): pages from one end, slots from the other, all layers of a
    unit in one piece, holes taken lowest first. When the free middle does not hold what is wanted beyond the holes,
    **all** holes of both kinds are packed. One page and one slot are set aside as padding.

    Pages are those of the setup, for this policy as for every other; its own default is one token.
    """

    def __init__(self, setup: PolicySetup) -> None:
        units = Units.of_pages_and_slots(setup)
        super().__init__("sglang-unified", setup, units)
        self.middle_bytes = self.arena_bytes - setup.layout.has_pages * units.kv_bytes
        self.middle_bytes -= setup.layout.has_slots * units.state_bytes
        self.pages, self.slots = (
            _End(size, max(self.middle_bytes // size, 0) if size else 0) for size in (units.kv_bytes, units.state_bytes)
        )
        self.packs = self.moving_packs = self._moved_bytes = 0

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units * kv_bytes + state_units * state_bytes <= middle_bytes``."""
        return kv_units * self.units.kv_bytes + state_units * self.units.state_bytes <= self.middle_bytes

    @property
    def moved_bytes(self) -> int:
        """What packing has moved so far."""
        return self._moved_bytes

    def extents(self) -> dict[str, int]:
        """The two ends, holes included."""
        return {"kv": self.pages.extent * self.units.kv_bytes, "state": self.slots.extent * self.units.state_bytes}

    def counters(self) -> dict[str, int]:
        """A pack that moves something is a migration, one that only gives up holes at the edge a retraction."""
        idle = self.packs - self.moving_packs
        return {"retractions": idle, "migrations": self.moving_packs, "bytes_moved": self._moved_bytes}

    def _place(self, handles: IntArray, kv_units: IntArray, state_units: int) -> None:
        pages, slots = np.repeat(handles, kv_units), np.repeat(handles, state_units)
        used = (self.pages.extent * self.pages.unit_bytes) + (self.slots.extent * self.slots.unit_bytes)
        if self.pages.beyond(len(pages)) + self.slots.beyond(len(slots)) > self.middle_bytes - used:
            self._pack()
        for end, owners in ((self.pages, pages), (self.slots, slots)):
            if len(owners):
                end.take(owners)

    def _pack(self) -> None:
        moved = self.pages.pack() * self.pages.unit_bytes + self.slots.pack() * self.slots.unit_bytes
        self.packs += 1
        self.moving_packs += moved > 0
        self._moved_bytes += moved

    def _vacate(self, handles: IntArray) -> None:
        if len(handles):
            self.pages.free(handles)
            self.slots.free(handles)
