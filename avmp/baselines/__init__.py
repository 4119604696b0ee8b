"""Memory policies by name, behind one protocol: avmp itself, and what it is compared with.

A policy answers one question, over and over: do these sequences, with these lengths, fit together? ``POLICIES`` is the
table of all of them, in the order in which they are shown. A new one is a function that takes a :class:`PolicySetup`
and returns a :class:`MemoryPolicy`, and a line in the table; where counting is all there is to it,
:class:`CountedPolicy` does everything but the count.
"""

from __future__ import annotations

from collections.abc import Callable

from avmp.baselines.allocator_policy import AllocatorPolicy
from avmp.baselines.byte_budget import ByteBudget
from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.inflated_block import InflatedBlock, InflatedBlockRule
from avmp.baselines.protocol import Counts, IntArray, MemoryPolicy, PolicyFull, PolicySetup
from avmp.baselines.static_split import SGLANG_DEFAULT_SHARE, STATIC_SHARES, StaticSplit, static_split
from avmp.errors import InvalidArgument

PolicyBuilder = Callable[[PolicySetup], MemoryPolicy]

POLICIES: dict[str, PolicyBuilder] = {
    "avmp": AllocatorPolicy,
    **{name: static_split(share) for name, share in STATIC_SHARES.items()},
    "vllm": InflatedBlock,
    "oracle": ByteBudget,
}


def make_policy(name: str, setup: PolicySetup) -> MemoryPolicy:
    """The policy of that name, empty. Raises InvalidArgument for a name that is not in the table."""
    if name not in POLICIES:
        raise InvalidArgument(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name](setup)


__all__ = [
    "POLICIES",
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
    "PolicyBuilder",
    "PolicyFull",
    "PolicySetup",
    "StaticSplit",
    "Units",
    "make_policy",
    "static_split",
]
