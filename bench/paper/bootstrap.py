"""The paper's interval: the mean of paired differences, resampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
SEED = 20260520


def paired_bootstrap(deltas: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 2.5th and 97.5th percentile of the means of ``RESAMPLES`` draws of as many pairs."""
    values = np.asarray(deltas, dtype=np.float64)
    draws = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), (2.5, 97.5))
    return float(values.mean()), float(low), float(high)
