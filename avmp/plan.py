"""What fits into an arena before anything runs: avmp's layout, and how many sequences of which length each rule holds.

Rules are those of :mod:`avmp.baselines`: ``avmp`` (exactly what its allocator admits), ``vllm`` (the inflated block),
``static-0.5``, ``sglang`` (a static split at SGLang's default share, one slot per sequence) and ``oracle``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from avmp.baselines import (
    SGLANG_DEFAULT_SHARE,
    ByteBudget,
    CountedPolicy,
    InflatedBlock,
    InflatedBlockRule,
    PolicySetup,
    StaticSplit,
)
from avmp.geometry import Geometry
from avmp.layout import Layout
from avmp.text_table import format_table
from avmp.units import format_bytes, largest

_SHORTEST_TOKENS = 256
_LONGEST_TOKENS = 2**31 - 1
_DEFAULT_LONGEST_TOKENS = 65536


@dataclass(frozen=True)
class Capacity:
    """What one rule holds: ``sequences[tokens]`` sequences of ``tokens`` tokens each at once, and
    ``longest_tokens`` in a single one (None: any length, where only states are kept)."""

    rule: str
    sequences: dict[int, int]
    longest_tokens: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """One model in one arena."""

    geometry: Geometry
    layout: Layout
    vllm: InflatedBlockRule
    capacities: tuple[Capacity, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; sizes are bytes."""
        layout, vllm = self.layout, self.vllm
        return {
            "model": self.geometry.name,
            "arena_bytes": layout.arena_bytes,
            "lane_count": layout.lane_count,
            "lane_bytes": layout.lane_bytes,
            "null_bytes": layout.null_bytes,
            "page": {
                "tokens": layout.page_tokens,
                "bytes": layout.page_total_bytes,
                "bytes_per_lane": layout.page_bytes,
                "most": layout.max_pages(),
            },
            "slot": {
                "bytes": layout.slot_total_bytes,
                "bytes_per_lane": layout.slot_bytes,
                "most": layout.max_slots(),
            },
            "vllm": {
                "block_tokens": vllm.block_tokens,
                "block_bytes": vllm.block_bytes,
                "attention_groups": vllm.attention_groups,
                "state_groups": vllm.state_groups,
                "state_padding": vllm.state_padding,
            },
            "capacities": [_as_plain(capacity) for capacity in self.capacities],
        }


def plan_memory(geometry: Geometry, memory: int | str) -> MemoryPlan:
    """The plan for a model in ``memory`` (bytes or "8GiB"). Raises ArenaTooSmall."""
    layout = Layout.plan(geometry, memory)
    lengths = _lengths(geometry.max_position_embeddings or _DEFAULT_LONGEST_TOKENS)
    setup = PolicySetup(layout, longest_tokens=lengths[-1], max_sequences=1)
    vllm = InflatedBlock(setup)
    others = (
        vllm,
        StaticSplit(setup, Fraction(1, 2)),
        StaticSplit(setup, SGLANG_DEFAULT_SHARE, "sglang"),
        ByteBudget(setup),
    )
    own = Capacity("avmp", {tokens: layout.max_sequences(tokens) for tokens in lengths}, layout.max_tokens(1))
    return MemoryPlan(geometry, layout, vllm.rule, (own, *(_capacity(policy, lengths) for policy in others)))


def _lengths(longest: int) -> list[int]:
    """256, and four times as much each time, up to the longest sequence of the model."""
    lengths = [_SHORTEST_TOKENS]
    while 4 * lengths[-1] <= longest:
        lengths.append(4 * lengths[-1])
    return lengths


def _capacity(policy: CountedPolicy, lengths: list[int]) -> Capacity:
    sequences = {tokens: policy.max_sequences(tokens) for tokens in lengths}
    longest = largest(_LONGEST_TOKENS, lambda tokens: not policy.impossible(np.array([tokens]))[0])
    return Capacity(policy.name, sequences, longest if policy.units.kv_per_block else None)


def _as_plain(capacity: Capacity) -> dict[str, Any]:
    by_length = [
        {"tokens_each": tokens, "sequences": count, "tokens_in_all": tokens * count}
        for tokens, count in capacity.sequences.items()
    ]
    return {"rule": capacity.rule, "by_length": by_length, "longest_tokens": capacity.longest_tokens}


def format_plan(plan: MemoryPlan) -> str:
    """The plan for a person: the layout, the two other rules' units, and two tables of what fits."""
    rules = [capacity.rule for capacity in plan.capacities]
    lengths = list(plan.capacities[0].sequences)
    counts = {tokens: [capacity.sequences[tokens] for capacity in plan.capacities] for tokens in lengths}
    sequences = [[f"{tokens:,}", *(f"{count:,}" for count in counts[tokens])] for tokens in lengths]
    tokens_held = [[f"{tokens:,}", *(f"{count * tokens:,}" for count in counts[tokens])] for tokens in lengths]
    longest = [
        "any" if capacity.longest_tokens is None else f"{capacity.longest_tokens:,}" for capacity in plan.capacities
    ]
    return "\n".join(
        [
            plan.geometry.describe(),
            plan.layout.describe(),
            _describe_vllm(plan.vllm),
            "",
            "Sequences that fit at once, by their length in tokens:",
            format_table(["tokens each", *rules], sequences),
            "",
            "Tokens in all of them together, and in the longest single sequence:",
            format_table(["tokens each", *rules], [*tokens_held, ["longest single", *longest]]),
        ]
    )


def _describe_vllm(rule: InflatedBlockRule) -> str:
    takes = []
    if rule.attention_groups:
        takes.append(f"{rule.attention_groups} per {rule.block_tokens:,} tokens")
    if rule.state_groups:
        takes.append(f"{rule.state_groups} for its states, padded by {rule.state_padding:.2%}")
    return (
        f"vLLM's rule: equal blocks of {format_bytes(rule.block_bytes)} ({rule.page_bytes:,} B in each of "
        f"{rule.group_layers} layers); a sequence takes {' and '.join(takes)}"
    )
