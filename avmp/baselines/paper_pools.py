"""The paper's own allocator (arXiv 2605.22416, ``avmp_dynamic_b128``) as a policy of a server."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.layers import geometry_of, layer_bytes
from avmp.baselines.padded_unit import ALIGNMENT_BYTES
from avmp.baselines.protocol import Counts, IntArray, PolicyFull, PolicySetup
from avmp.errors import Unsupported
from avmp.units import align_up

SHARE = Fraction(1, 2)
BATCH = 128


class PaperPools(CountedPolicy):
    """Two pools of units of one layer, half the bytes each; evict first, migrate second, relocate nothing.

    On a shortage of pages a request is evicted and the call tried again; if that was not enough, the state pool
    gives up its BATCH highest units and the page pool gains ``floor(bytes / page)``; then one more try. A live unit
    among them refuses the shrink. Freed units are taken again last freed first.

    The published eviction strips a live request of its units of one kind without telling anybody. In a server its
    owner is told: the first refusal of ``extend`` is the eviction, which is the engine's, of a whole request. Two more
    things follow. States are wanted only at admission, where the engine waits for somebody to leave instead of
    evicting, so that capacity goes from states to pages and never back (it never does in the published cells
    either, where any victim frees the one state that is missing). And the state pool keeps what one request needs,
    without which nobody could be served any more.
    """

    def __init__(self, setup: PolicySetup) -> None:
        geometry = geometry_of(setup, "paper")
        token_bytes, state_bytes = layer_bytes(geometry, "paper")
        if not token_bytes or not state_bytes:
            raise Unsupported(f"policy paper: {geometry.name} needs layers of both kinds")
        units = Units(
            block_tokens=setup.layout.page_tokens,
            kv_per_block=len(geometry.attention_layers),
            kv_bytes=align_up(setup.layout.page_tokens * token_bytes, ALIGNMENT_BYTES),
            state_per_sequence=len(geometry.state_layers),
            state_bytes=align_up(state_bytes, ALIGNMENT_BYTES),
        )
        super().__init__("paper", setup, units)
        state_pool = int(self.arena_bytes * SHARE)
        self.page_count = (self.arena_bytes - state_pool) // units.kv_bytes
        self.state_count = state_pool // units.state_bytes
        self.shrinks = 0
        self._free_states = list(range(self.state_count - 1, -1, -1))
        self._states: dict[int, list[int]] = {}
        self._evicted = False

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units <= page_count`` and ``state_units <= state_count``, as the two are now."""
        return (kv_units <= self.page_count) & (state_units <= self.state_count)

    def extend(self, handles: IntArray, counts: Counts = 1) -> None:
        """More tokens for each sequence. Raises PolicyFull: the first time, and after a shrink that was not enough or
        was refused."""
        try:
            super().extend(handles, counts)
        except PolicyFull:
            retried, self._evicted = self._evicted, True
            if not retried or not self._shrink():
                raise
            super().extend(handles, counts)
        self._evicted = False

    def extents(self) -> dict[str, int]:
        """The two pools."""
        return {"kv": self.page_count * self.units.kv_bytes, "state": self.state_count * self.units.state_bytes}

    def counters(self) -> dict[str, int]:
        """Shrinks are retractions: nothing moves."""
        return {"retractions": self.shrinks, "migrations": 0, "bytes_moved": 0}

    def _shrink(self) -> bool:
        end = self.state_count - BATCH
        rest = [unit for unit in self._free_states if unit < end]
        if end < self.units.state_per_sequence or len(self._free_states) - len(rest) < BATCH:
            return False
        self._free_states, self.state_count = rest, end
        self.page_count += BATCH * self.units.state_bytes // self.units.kv_bytes
        self.shrinks += 1
        return True

    def _place(self, handles: IntArray, kv_units: IntArray, state_units: int) -> None:
        if state_units:
            for handle in handles.tolist():
                self._states[handle] = [self._free_states.pop() for _ in range(state_units)]

    def _vacate(self, handles: IntArray) -> None:
        for handle in handles.tolist():
            self._free_states.extend(self._states.pop(handle))
