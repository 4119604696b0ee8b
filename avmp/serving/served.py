"""What a simulation leaves behind: times by request, counts by step, and samples of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from avmp.baselines import IntArray
from avmp.workloads import Trace

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """Memory at the end of a step: bytes held and bytes set aside by kind, and who was running and waiting."""

    seconds: float
    batch: int
    waiting: int
    kv_used: int
    state_used: int
    kv_extent: int
    state_extent: int


@dataclass
class Served:
    """What became of a trace, as arrays by request and by step.

    By request: ``admitted`` (first), ``first_token`` and ``finished`` are seconds, NaN where it never came to that.
    By step: when it ended, the output tokens it yielded, its batch, its ``work`` (a row of tokens, sequences, context
    and pairs, as :meth:`StepModel.seconds` takes them), and the seconds and number of its ``gaps``: the times between
    one output token of a request and the next. ``late_gaps`` are those of requests that were
    preempted in between.
    """

    trace: Trace
    policy: str
    arena_bytes: int
    refused: IntArray
    admitted: FloatArray
    first_token: FloatArray
    finished: FloatArray
    step_end: FloatArray
    step_tokens: IntArray
    step_batch: IntArray
    step_work: IntArray
    gap_seconds: FloatArray
    gap_count: IntArray
    late_gaps: FloatArray
    samples: list[Sample]
    prefill_tokens: int
    recomputed_tokens: int
    preemptions: int
    swapped_bytes: int
    move_seconds: float
    swap_seconds: float
    busy_seconds: float
    counters: dict[str, int]
