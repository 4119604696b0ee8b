"""avmp itself as a policy: the real allocator, not a model of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from avmp.allocator import Allocator
from avmp.baselines.protocol import Counts, IntArray, PolicyFull, PolicySetup
from avmp.errors import OutOfMemory, RowsExhausted, RowTooLong
from avmp.geometry import require_count
from avmp.units import largest

_REFUSALS = (OutOfMemory, RowsExhausted, RowTooLong)


class AllocatorPolicy:
    """The :class:`MemoryPolicy` that :class:`avmp.allocator.Allocator` is, with the options of the setup.

    Effects and events are not recorded, whatever the options say: there is no device here to drain them.
    """

    def __init__(self, setup: PolicySetup) -> None:
        self.name = "avmp"
        self.layout = setup.layout
        self.arena_bytes = setup.layout.arena_bytes
        self._options = replace(setup.options, record_effects=False, events=False)
        self.longest_tokens = self._longest_alone(setup.longest_tokens)
        self.allocator = Allocator(
            setup.layout,
            max_rows=setup.max_sequences,
            max_tokens_per_sequence=max(self.longest_tokens, 1),
            options=self._options,
        )
        # Its statistics count everything there is, which takes longer than a step.
        self._space = self.allocator._ledger.space

    @property
    def moved_bytes(self) -> int:
        """What has been relocated so far."""
        return self._space.counters.bytes_moved

    def fits(self, token_counts: IntArray, spare_tokens: int = 0) -> bool:
        """Whether ``admit(token_counts)`` would succeed now and leave room for ``spare_tokens`` more tokens."""
        if not self.allocator.fits("admit", token_counts):
            return False
        if not spare_tokens:
            return True
        tokens = [*np.asarray(token_counts).tolist(), spare_tokens]
        pages = sum(self.layout.pages_per_sequence(count) for count in tokens)
        return self._space.possible(pages, len(token_counts) * self.layout.has_slots)

    def admit(self, token_counts: IntArray) -> IntArray:
        """New sequences; their handles. Raises PolicyFull."""
        try:
            return self.allocator.admit(token_counts)
        except _REFUSALS as error:
            raise PolicyFull(f"avmp: {error}") from error

    def extend(self, handles: IntArray, counts: Counts = 1) -> None:
        """More tokens for each sequence. Raises PolicyFull."""
        try:
            self.allocator.extend(handles, counts)
        except _REFUSALS as error:
            raise PolicyFull(f"avmp: {error}") from error

    def release(self, handles: IntArray) -> None:
        """The sequences are gone."""
        self.allocator.release(handles)

    def swap_out(self, handles: IntArray) -> IntArray:
        """The sequences leave; handles to bring them back with."""
        return self.allocator.swap_out(handles)

    def swap_in(self, swapped: IntArray) -> IntArray:
        """They are back; their new handles. Raises PolicyFull."""
        try:
            return self.allocator.swap_in(swapped)
        except _REFUSALS as error:
            raise PolicyFull(f"avmp: {error}") from error

    def used_bytes(self) -> dict[str, int]:
        """Bytes held at present, by kind."""
        pages, slots = self._space.pools
        return {"kv": pages.live * pages.total_bytes, "state": slots.live * slots.total_bytes}

    def extents(self) -> dict[str, int]:
        """The two extents; the gap between them belongs to nobody."""
        pages, slots = self._space.pools
        return {"kv": pages.extent * pages.total_bytes, "state": slots.extent * slots.total_bytes}

    def counters(self) -> dict[str, int]:
        """What moving capacity has cost so far."""
        statistics = self.allocator.stats()
        return {name: getattr(statistics, name) for name in ("retractions", "migrations", "bytes_moved")}

    def impossible(self, token_counts: IntArray) -> NDArray[np.bool_]:
        """For each length, whether it does not fit even alone, or exceeds the longest of the setup."""
        return np.asarray(token_counts) > self.longest_tokens

    def max_sequences(self, tokens: int) -> int:
        """How many sequences of this length an empty arena holds beside the floors."""
        pages = self.layout.pages_per_sequence(require_count("tokens", tokens))
        return largest(self.arena_bytes, lambda count: self._holds(count * pages, count * self.layout.has_slots))

    def _holds(self, pages: int, slots: int) -> bool:
        options = self._options
        floors = options.floor_pages * self.layout.has_pages, options.floor_slots * self.layout.has_slots
        return self.layout.fits(max(pages, floors[0]), max(slots, floors[1]))

    def _longest_alone(self, tokens: int) -> int:
        """The longest sequence, of ``tokens`` tokens at most, that an empty arena holds."""
        slots = int(self.layout.has_slots)
        return largest(tokens, lambda length: self._holds(self.layout.pages_per_sequence(length), slots))
