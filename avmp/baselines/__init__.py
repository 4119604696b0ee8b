"""Memory policies by name, behind one protocol: avmp itself, and what it is compared with.

A policy answers one question, over and over: do these sequences, with these lengths, fit together? ``POLICIES`` is the
table of those that a replay shows, in that order, ``MORE_POLICIES`` that of the others. A new one is a function that
takes a :class:`PolicySetup` and returns a :class:`MemoryPolicy`, and a line in a table; where counting is all there is
to it, :class:`CountedPolicy` does everything but the count.
"""

from __future__ import annotations

from collections.abc import Callable

from avmp.baselines.allocator_policy import AllocatorPolicy
from avmp.baselines.byte_budget import ByteBudget
from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.inflated_block import InflatedBlock, InflatedBlockRule, two_states
from avmp.baselines.padded_unit import PaddedUnit
from avmp.baselines.paper_pools import PaperPools
from avmp.baselines.protocol import Counts, IntArray, MemoryPolicy, PolicyFull, PolicySetup
from avmp.baselines.static_split import (
    SGLANG_CACHED_SLOTS,
    SGLANG_DEFAULT_SHARE,
    STATIC_SHARES,
    StaticSplit,
    parse_split,
    sglang_default,
    static_split,
)
from avmp.baselines.two_ends import TwoEnds
from avmp.errors import InvalidArgument

PolicyBuilder = Callable[[PolicySetup], MemoryPolicy]

POLICIES: dict[str, PolicyBuilder] = {
    "avmp": AllocatorPolicy,
    **{name: static_split(share) for name, share in STATIC_SHARES.items()},
    "vllm": InflatedBlock,
    "oracle": ByteBudget,
}

MORE_POLICIES: dict[str, PolicyBuilder] = {
    "vllm-align": two_states,
    "sglang": sglang_default("sglang", 1),
    "sglang-cached": sglang_default("sglang-cached", SGLANG_CACHED_SLOTS),
    "sglang-unified": TwoEnds,
    "padded": PaddedUnit,
    "paper": PaperPools,
}
"""Policies that are there by name, and not among those that a replay shows unless it is asked to."""


def make_policy(name: str, setup: PolicySetup) -> MemoryPolicy:
    """The policy of that name, empty: one of the two tables, or a static split of any share, ``static-0.37``. Raises
    InvalidArgument for any other name."""
    build, share = POLICIES.get(name) or MORE_POLICIES.get(name), parse_split(name)
    if build is None:
        if share is not None:
            return StaticSplit(setup, share, name)
        known = ", ".join((*POLICIES, *MORE_POLICIES))
        raise InvalidArgument(f"unknown policy {name!r}; known: {known}, and static-SHARE with a share such as 0.37")
    return build(setup)


__all__ = [
    "MORE_POLICIES",
    "POLICIES",
    "SGLANG_CACHED_SLOTS",
    "SGLANG_DEFAULT_SHARE",
    "STATIC_SHARES",
    "AllocatorPolicy",
    "ByteBudget",
    "CountedPolicy",
    "Counts",
    "InflatedBlock",
    "InflatedBlockRule",
    "IntArray",
    "MemoryPolicy",
    "PaddedUnit",
    "PaperPools",
    "PolicyBuilder",
    "PolicyFull",
    "PolicySetup",
    "StaticSplit",
    "TwoEnds",
    "Units",
    "make_policy",
    "parse_split",
    "static_split",
]
