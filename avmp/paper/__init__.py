"""The published AVMP experiment (arXiv 2605.22416), carried out to the digit, and what its workloads leave to gain.

``allocators.py`` and ``padded_pool.py`` hold its allocators as counts and free lists, ``experiment.py`` its rules and
the variants by name, ``alternatives.py`` what they are held against, ``headroom.py`` a queue with the real allocator
and those it is compared with. The streams of requests are in :mod:`avmp.workloads.paper`. What the figures are worth is
written in ``bench/README.md``.
"""

from avmp.paper.allocators import KV, STATE, Counters, IdPool, LayerUnits, MigratingPools, PaperAllocator, SplitPools
from avmp.paper.alternatives import ScannedSplitPools, WholeRequestPools
from avmp.paper.experiment import OTHER_VARIANTS, VARIANTS, Outcome, run_experiment, variant
from avmp.paper.headroom import (
    HEADROOM_POLICIES,
    HEADROOM_SHARES,
    PlainByteBudget,
    Served,
    headroom,
    search_split,
    serve_reserved,
)
from avmp.paper.padded_pool import PaddedPool

__all__ = [
    "HEADROOM_POLICIES",
    "HEADROOM_SHARES",
    "KV",
    "OTHER_VARIANTS",
    "STATE",
    "VARIANTS",
    "Counters",
    "IdPool",
    "LayerUnits",
    "MigratingPools",
    "Outcome",
    "PaddedPool",
    "PaperAllocator",
    "PlainByteBudget",
    "ScannedSplitPools",
    "Served",
    "SplitPools",
    "WholeRequestPools",
    "headroom",
    "run_experiment",
    "search_split",
    "serve_reserved",
    "variant",
]
