"""The published figures, and the comparison with ours: to the digits that were printed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from avmp.paper import Outcome
from bench.paper.jobs import Cell

GOLDEN_FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "paper_golden.json"
"""Figures of each of the 240 cells; models and fields have the prototype's names there."""

_MODEL_NAMES = {"paper_jamba": "jamba_1_5_mini", "paper_mamba2": "mamba2_1b3"}
FIELDS = {
    "n": "requests",
    "oom": "oom",
    "completed": "completed",
    "completion_ratio": "completion",
    "never_evicted_completed": "served_intact",
    "evictions": "evictions",
    "rebalance_attempts": "shrink_attempts",
    "rebalance_count": "shrinks",
    "bytes_migrated": "bytes_migrated",
    "kv_pool_bytes": "kv_pool_bytes",
    "ssm_pool_bytes": "state_pool_bytes",
}
"""The prototype's name of each field, and ours."""

OOM_TOTALS = {
    "padded_unified": {"uniform_short": "482.7", "mixed_long": "573.0", "agentic_burst": "512.0"},
    "fixed_dual_mr05": {"uniform_short": "7.3", "mixed_long": "387.3", "agentic_burst": "157.3"},
    "fixed_dual_mr09": {"uniform_short": "522.0", "mixed_long": "492.0", "agentic_burst": "207.3"},
    "avmp_static_mr05": {"uniform_short": "7.3", "mixed_long": "387.3", "agentic_burst": "157.3"},
    "avmp_dynamic_b128": {"uniform_short": "9.0", "mixed_long": "364.3", "agentic_burst": "136.7"},
}
"""Sums over models and pools of the mean out-of-memory count of three seeds."""

OOM_TOTAL = {
    "padded_unified": "1567.7",
    "fixed_dual_mr05": "552.0",
    "fixed_dual_mr09": "1221.3",
    "avmp_static_mr05": "552.0",
    "avmp_dynamic_b128": "510.0",
}
SHAREGPT_PER_CELL = {
    "padded_unified": "78.4",
    "fixed_dual_mr05": "2.33",
    "fixed_dual_mr09": "67.8",
    "avmp_static_mr05": "2.33",
    "avmp_dynamic_b128": "2.33",
}
BATCHES = {
    1: "552.0",
    2: "554.3",
    4: "552.0",
    8: "551.0",
    16: "549.0",
    32: "524.7",
    64: "521.3",
    128: "510.0",
    256: "509.3",
}
BOOTSTRAP = {
    "all": (-3.50, -5.83, -1.39),
    "uniform_short": (0.42, 0.0, 1.25),
    "mixed_long": (-5.75, -10.33, -1.33),
    "agentic_burst": (-5.17, -9.25, -1.33),
}
"""Mean difference in out-of-memory count per pair, avmp_dynamic_b128 less fixed_dual_mr05, and its 95 % interval."""

THROUGHPUT = {"uniform_short": 13.3, "mixed_long": 2.39, "agentic_burst": 1.83, "sharegpt_replay": 2.36}
COMPLETION = {"uniform_short": "99.6", "mixed_long": "85", "agentic_burst": "90"}
"""Requests that departed without a failed call under avmp_dynamic_b128, in percent."""
SERVED_INTACT = {
    "fixed_dual_mr05": {"uniform_short": "15.1", "mixed_long": "6.2", "agentic_burst": "3.3"},
    "avmp_dynamic_b128": {"uniform_short": "15.2", "mixed_long": "7.1", "agentic_burst": "4.3"},
}
PHASES = {
    ("fixed_dual_mr05", "mixed_long"): "76.8 / 21.2 / 0",
    ("fixed_dual_mr05", "agentic_burst"): "91.7 / 7.1 / 0",
    ("avmp_dynamic_b128", "mixed_long"): "87.1 / 8.6 / 0.03",
    ("avmp_dynamic_b128", "agentic_burst"): "95.7 / 2.1 / 0.01",
}
CORRECT_FREES = {"uniform_short": "509.3", "mixed_long": "573.0", "agentic_burst": "512.0", "sharegpt_replay": "381.3"}
SPLITS = {"0.1": "495.3", "9/19": "548.0", "0.9": OOM_TOTAL["fixed_dual_mr09"]}
WHOLE_REQUESTS = "0.0"
"""Out-of-memory count where whole requests are evicted until the new one fits."""
HEADROOM = {
    ("uniform_short", "paper_jamba", "1GiB"): "18.6 46.2 49.5 25.1 9.8 63.1 +28% +28%",
    ("uniform_short", "paper_jamba", "4GiB"): "71.4 152.0 159.4 92.7 39.9 191.7 +20% +20%",
    ("uniform_short", "paper_mamba2", "1GiB"): "1.4 5.4 12.1 17.3 9.8 18.9 +57% +9%",
    ("uniform_short", "paper_mamba2", "4GiB"): "9.4 23.8 46.2 67.0 39.9 72.3 +56% +8%",
    ("agentic_burst", "paper_jamba", "4GiB"): "1.40 1.20 0.82 0.45 0.29 1.50 +83% +7%",
    ("sharegpt_replay", "paper_jamba", "1GiB"): "43.0 81.7 86.1 52.1 21.9 100.7 +17% +17%",
    ("sharegpt_replay", "paper_mamba2", "1GiB"): "3.5 13.7 29.4 40.5 21.8 43.6 +48% +8%",
    ("sharegpt_replay", "paper_mamba2", "4GiB"): "23.3 52.1 81.7 101.0 74.7 106.3 +30% +5%",
}
"""Requests completed per 1000 ticks: five static splits, one byte budget, its gain over 0.5 and over the best."""


@dataclass
class Comparison:
    """How many published figures were compared, how many things of our own were checked, and what differs."""

    compared: int = 0
    own: int = 0
    differences: list[str] = field(default_factory=list)

    def check(self, what: str, published: object, here: object) -> None:
        """One figure more."""
        self.compared += 1
        if published != here:
            self.differences.append(f"{what}: published {published}, here {here}")

    def require(self, what: str, holds: bool) -> None:
        """Something that nobody published, but that has to hold."""
        self.own += 1
        if not holds:
            self.differences.append(f"{what}: does not hold")


@cache
def golden() -> dict[str, Any]:
    """The golden file: ``streams`` and ``cells``."""
    loaded: dict[str, Any] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    return loaded


def golden_cell(cell: Cell) -> dict[str, float] | None:
    """The published fields of a cell under the prototype's names; None for one that was not published."""
    key = f"{cell.variant}/{cell.workload}/{_MODEL_NAMES[cell.model]}/{cell.pool.lower()}/seed{cell.seed}"
    found: dict[str, float] | None = golden()["cells"].get(key) if cell.published else None
    return found


def compare_cell(cell: Cell, outcome: Outcome, comparison: Comparison) -> bool:
    """Compares every field that was published of this cell; whether there was any."""
    fields = golden_cell(cell) or {}
    for name, value in fields.items():
        where = f"{cell.variant} {cell.workload} {cell.model} {cell.pool} seed {cell.seed} {name}"
        comparison.check(where, value, getattr(outcome, FIELDS[name]))
    return bool(fields)
