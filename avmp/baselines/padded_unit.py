"""One pool of equal blocks, each as large as the larger of a KV page and a state, both of one layer."""

from __future__ import annotations

from typing import Any

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.layers import geometry_of, layer_bytes
from avmp.baselines.protocol import PolicySetup
from avmp.units import align_up

ALIGNMENT_BYTES = 128


class PaddedUnit(CountedPolicy):
    """The padded unified pool of the AVMP paper (arXiv 2605.22416). A sequence takes a block for each page of each
    attention layer and one for each state layer; a block that holds the smaller of the two wastes the rest."""

    def __init__(self, setup: PolicySetup) -> None:
        geometry = geometry_of(setup, "padded")
        token_bytes, state_bytes = layer_bytes(geometry, "padded")
        page_tokens = setup.layout.page_tokens
        self.block_bytes = align_up(max(page_tokens * token_bytes, state_bytes), ALIGNMENT_BYTES)
        units = Units(
            block_tokens=page_tokens,
            kv_per_block=len(geometry.attention_layers),
            kv_bytes=self.block_bytes,
            state_per_sequence=len(geometry.state_layers),
            state_bytes=self.block_bytes,
        )
        super().__init__("padded", setup, units)
        self.block_count = self.arena_bytes // self.block_bytes

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units + state_units <= block_count``."""
        return kv_units + state_units <= self.block_count
