"""vLLM's rule for hybrid models: one pool of equal blocks, inflated until a block of attention holds a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.layers import geometry_of, layer_bytes
from avmp.baselines.protocol import PolicySetup
from avmp.geometry import Geometry, require_count
from avmp.units import ceil_div

ALIGNMENT_TOKENS = 16
"""Blocks are a multiple of so many tokens, whatever the page size of other policies."""


@dataclass(frozen=True)
class InflatedBlockRule:
    """What the rule makes of a model. With t1 the KV bytes of one token and S the state bytes, both of one layer:

        block_tokens = 16 * ceil(S / (16 * t1)), 16 without states     page_bytes = block_tokens * t1, S without KV

    Layers of one kind form groups of ``group_layers``: the lesser of the two layer counts, or the greater if it is
    less than 1.5 times the lesser; the last group is padded. A pool block is one page in each layer of a group, and
    serves any group: ``block_bytes = group_layers * page_bytes``. A sequence takes ``ceil(tokens / block_tokens)``
    blocks for each attention group and one block for each state group (no prefix caching, no speculation).
    """

    block_tokens: int
    page_bytes: int
    state_page_bytes: int
    group_layers: int
    attention_groups: int
    state_groups: int

    @classmethod
    def of(cls, geometry: Geometry) -> InflatedBlockRule:
        """Raises Unsupported where layers of one kind differ in bytes: the rule needs equal ones."""
        token_bytes, state_bytes = layer_bytes(geometry, "vllm")
        step = ALIGNMENT_TOKENS * token_bytes
        tokens = ALIGNMENT_TOKENS * max(ceil_div(state_bytes, step), 1) if token_bytes else ALIGNMENT_TOKENS
        layers = _group_layers(len(geometry.attention_layers), len(geometry.state_layers))
        return cls(
            block_tokens=tokens,
            page_bytes=tokens * token_bytes or state_bytes,
            state_page_bytes=state_bytes,
            group_layers=layers,
            attention_groups=ceil_div(len(geometry.attention_layers), layers),
            state_groups=ceil_div(len(geometry.state_layers), layers),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block in all layers of a group."""
        return self.group_layers * self.page_bytes

    @property
    def state_padding(self) -> float:
        """The share by which a state grows when it is padded to a page; 0 without states."""
        return self.page_bytes / self.state_page_bytes - 1 if self.state_page_bytes else 0.0


class InflatedBlock(CountedPolicy):
    """The pool of that rule on the whole arena, for the same geometry, byte for byte, as every other policy.

    One block is set aside as null block, as vLLM does. ``states`` is how many states a sequence has: one (mode
    ``none``), or two in mode ``align``, which prefix caching needs: the one that it works on and the one at the last
    block border. What prefix caching saves is not part of this.
    """

    def __init__(self, setup: PolicySetup, states: int = 1) -> None:
        name = "vllm" if states == 1 else "vllm-align"
        self.rule = InflatedBlockRule.of(geometry_of(setup, name))
        units = Units(
            block_tokens=self.rule.block_tokens,
            kv_per_block=self.rule.attention_groups,
            kv_bytes=self.rule.block_bytes,
            state_per_sequence=self.rule.state_groups * require_count("states", states),
            state_bytes=self.rule.block_bytes,
        )
        super().__init__(name, setup, units)
        self.block_count = max(self.arena_bytes // self.rule.block_bytes - 1, 0)

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units + state_units <= block_count``: a block serves either kind."""
        return kv_units + state_units <= self.block_count


def two_states(setup: PolicySetup) -> InflatedBlock:
    """The same with two states a sequence: mode ``align``."""
    return InflatedBlock(setup, states=2)


def _group_layers(attention_layers: int, state_layers: int) -> int:
    counts = [count for count in (attention_layers, state_layers) if count]
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
