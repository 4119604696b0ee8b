"""The bound for any policy with avmp's pages and slots: only the sum of the bytes counts."""

from __future__ import annotations

from typing import Any

from avmp.baselines.counted import CountedPolicy, Units
from avmp.baselines.protocol import PolicySetup


class ByteBudget(CountedPolicy):
    """One budget: the arena less the null area. Pages and slots are rounded as in avmp's layout; where they lie, and
    what is left over at the end of a lane, costs nothing."""

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__("oracle", setup, Units.of_pages_and_slots(setup))
        self.budget_bytes = setup.layout.arena_bytes - setup.layout.null_bytes

    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """``kv_units * kv_bytes + state_units * state_bytes <= budget_bytes``."""
        return kv_units * self.units.kv_bytes + state_units * self.units.state_bytes <= self.budget_bytes
