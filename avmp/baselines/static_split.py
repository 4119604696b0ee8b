"""Two pools whose sizes are fixed at the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.protocol import PolicySetup
from avmp.errors import InvalidArgument
from avmp.geometry import require_count

STATIC_SHARES = {f"static-0.{tenths}": Fraction(tenths, 10) for tenths in range(1, 10)}
"""The splits that a replay tries, by name: the share of the arena that is set aside for states."""

SGLANG_DEFAULT_SHARE = Fraction(9, 19)
"""SGLang's default ratio r = 0.9 is that of states to KV: a share of r / (1 + r)."""

SGLANG_CACHED_SLOTS = 3
"""Slots that SGLang counts for each running request where its prefix cache is on; 1 where it is off."""


class StaticSplit(CountedPolicy):
    """``share`` of the arena holds states, the rest KV, each in whole slots and pages of avmp's size.

    All of the arena counts: no null units are taken off, which avmp and the oracle do pay for. Where the model has
    only one kind of cache there is nothing to split, and that kind gets everything.
    """

    def __init__(
        self, setup: PolicySetup, share: Fraction, name: str | None = None, slots_per_sequence: int = 1
    ) -> None:
        if not 0 < share < 1:
            raise InvalidArgument(f"static split: a state share of {share}; expected more than 0 and less than 1")
        units = Units.of_pages_and_slots(setup)
        units = replace(units, state_per_sequence=units.state_per_sequence * require_count("slots", slots_per_sequence))
        super().__init__(name or f"static-{float(share):.3g}", setup, units)
        layout = setup.layout
        one_pool = not (layout.has_pages and layout.has_slots)
        state_bytes = self.arena_bytes if one_pool else self.arena_bytes * share.numerator // share.denominator
        kv_bytes = self.arena_bytes if one_pool else self.arena_bytes - state_bytes
        self.page_count = kv_bytes // layout.page_total_bytes if layout.has_pages else 0
        self.slot_count = state_bytes // layout.slot_total_bytes if layout.has_slots else 0

    def extents(self) -> dict[str, int]:
        """The two pools."""
        return {"kv": self.page_count * self.units.kv_bytes, "state": self.slot_count * self.units.state_bytes}

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units <= page_count`` and ``state_units <= slot_count``."""
        return (kv_units <= self.page_count) & (state_units <= self.slot_count)


def static_split(share: Fraction) -> Callable[[PolicySetup], StaticSplit]:
    """Builds splits with this share for states."""
    return lambda setup: StaticSplit(setup, share)


def sglang_default(name: str, slots_per_sequence: int) -> Callable[[PolicySetup], StaticSplit]:
    """Builds splits at SGLang's default share, with so many slots for each sequence."""
    return lambda setup: StaticSplit(setup, SGLANG_DEFAULT_SHARE, name, slots_per_sequence)


def parse_split(name: str) -> Fraction | None:
    """The share in a name such as ``static-0.37``; None for any other name, 0 and 1 included."""
    match = re.fullmatch(r"static-(0\.\d{1,6})", name)
    share = Fraction(match[1]) if match else Fraction(0)
    return share or None
