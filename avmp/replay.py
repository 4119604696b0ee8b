"""Request traces replayed against memory policies: who gets how many requests done in the same memory.

Time is counted in steps of a batch, and memory alone decides who is in it:

1. Every running sequence grows by one token. While they do not all fit, the running request that arrived last is
   preempted as a whole: it goes back to the head of the queue and starts again later, and the tokens that it had
   are counted as computed again.
2. Unless somebody was preempted in this step, requests are admitted in the order of their arrival as long as the
   next one fits with its prompt; nobody overtakes. The whole prompt is computed in the step of admission.
3. A request that has all its tokens (prompt and output) leaves at the end of the step; one without output tokens
   leaves at the end of the step of its admission.

All requests are in the queue from the start, whatever their arrival times: the question is how much a memory gets
done under load. A request that could never be held, not even alone, is refused before the first step. No request
waits for ever: the running request that arrived first is never preempted as long as others run, and alone it fits.
The longest sequence that the model is made for plays no part.

Admission looks at prompts and not at what outputs will take, as engines do. Without preemptions a policy that can
hold more never completes less; with them it may, now and then, by admitting what it has to preempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from avmp.baselines import STATIC_SHARES, IntArray, MemoryPolicy, PolicyFull, PolicySetup
from avmp.errors import Inconsistent
from avmp.layout import Layout
from avmp.options import Options
from avmp.text_table import format_table
from avmp.units import format_bytes
from avmp.workloads import Trace

MOST_SEQUENCES = 4096
"""Default for the number of sequences at once, where a trace has more requests: a limit of tables, not of memory."""


@dataclass(frozen=True)
class ReplayResult:
    """What one policy made of one trace. ``requests == completed + refused_impossible``, and
    ``tokens_computed`` is the sum of the completed requests' tokens plus ``tokens_computed_again``.

    ``peak_used_bytes`` is the most memory held at the end of a step's growth and admissions, of which
    ``peak_kv_bytes`` and ``peak_state_bytes`` by kind at that moment. Batches count the sequences of a step.
    """

    policy: str
    requests: int
    completed: int
    refused_impossible: int
    steps: int
    batch_sum: int
    peak_batch: int
    preemptions: int
    tokens_computed: int
    tokens_computed_again: int
    retractions: int
    migrations: int
    bytes_moved: int
    peak_kv_bytes: int
    peak_state_bytes: int
    arena_bytes: int

    @property
    def completed_per_1000_steps(self) -> float:
        """The rate by which policies are compared; 0 where nothing ran."""
        return 1000 * self.completed / self.steps if self.steps else 0.0

    @property
    def mean_batch(self) -> float:
        """Sequences per step; 0 where nothing ran."""
        return self.batch_sum / self.steps if self.steps else 0.0

    @property
    def peak_used_bytes(self) -> int:
        """KV and states together, at the peak."""
        return self.peak_kv_bytes + self.peak_state_bytes

    def as_dict(self) -> dict[str, Any]:
        """All fields and the figures derived from them, for JSON."""
        derived = {
            "completed_per_1000_steps": self.completed_per_1000_steps,
            "mean_batch": self.mean_batch,
            "peak_used_bytes": self.peak_used_bytes,
            "peak_used_share": self.peak_used_bytes / self.arena_bytes,
        }
        return asdict(self) | derived


def setup_for(
    trace: Trace, layout: Layout, options: Options | None = None, max_sequences: int | None = None
) -> PolicySetup:
    """What policies need to know for this trace: its longest request, and room in the tables for all its requests,
    or for MOST_SEQUENCES, if that is less."""
    return PolicySetup(
        layout=layout,
        longest_tokens=int((trace.prompt_tokens + trace.output_tokens).max()),
        max_sequences=min(len(trace), MOST_SEQUENCES) if max_sequences is None else max_sequences,
        options=options or Options(),
    )


def replay(trace: Trace, policy: MemoryPolicy, on_progress: Callable[[int], None] | None = None) -> ReplayResult:
    """Runs the whole trace against an empty policy. ``on_progress`` is told how many requests are dealt with."""
    run = _Run(trace, policy)
    while run.step():
        if on_progress is not None:
            on_progress(run.completed + run.refused)
    return run.result()


class _Run:
    """One replay in progress. ``requests``, ``handles`` and ``left`` (tokens to come) describe the running sequences
    in the order of arrival; ``waiting`` is the queue, its head last, so that it too is sorted by arrival."""

    def __init__(self, trace: Trace, policy: MemoryPolicy) -> None:
        self.trace, self.policy = trace, policy
        self.prompts, self.outputs = trace.prompt_tokens, trace.output_tokens
        impossible = policy.impossible(self.prompts + self.outputs)
        self.waiting: list[int] = np.flatnonzero(~impossible)[::-1].tolist()
        self.refused = int(np.count_nonzero(impossible))
        self.requests: IntArray = np.empty(0, dtype=np.int64)
        self.handles: IntArray = np.empty(0, dtype=np.int64)
        self.left: IntArray = np.empty(0, dtype=np.int64)
        self.steps = self.completed = self.batch_sum = self.peak_batch = 0
        self.preemptions = self.tokens_computed = self.tokens_again = 0
        self.peak = {"kv": 0, "state": 0}

    def step(self) -> bool:
        """One step of the batch; False if there is nothing left to do."""
        if not self.waiting and not len(self.handles):
            return False
        if self._grow():
            self._admit()
        self._take_stock()
        self._complete()
        return True

    def _grow(self) -> bool:
        """One more token for every running sequence that can be kept; whether all of them could."""
        preemptions = self.preemptions
        while len(self.handles):
            try:
                self.policy.extend(self.handles)
                break
            except PolicyFull as error:
                self._preempt_latest(error)
        self.tokens_computed += len(self.handles)
        self.left -= 1
        return self.preemptions == preemptions

    def _preempt_latest(self, reason: PolicyFull) -> None:
        request = int(self.requests[-1])
        if len(self.requests) == 1:
            raise Inconsistent(f"request {request} runs alone and was found possible, but: {reason}")
        self.policy.release(self.handles[-1:])
        self.waiting.append(request)
        self.preemptions += 1
        self.tokens_again += int(self.prompts[request] + self.outputs[request] - self.left[-1])
        self.requests, self.handles, self.left = self.requests[:-1], self.handles[:-1], self.left[:-1]

    def _admit(self) -> None:
        count = self._admissible()
        if not count:
            if not len(self.handles):
                raise Inconsistent(f"request {self.waiting[-1]} was found possible, but does not fit into empty memory")
            return
        chosen = np.array(self._upcoming(count), dtype=np.int64)
        del self.waiting[-count:]
        handles = self.policy.admit(self.prompts[chosen])
        self.requests = np.concatenate([self.requests, chosen])
        self.handles = np.concatenate([self.handles, handles])
        self.left = np.concatenate([self.left, self.outputs[chosen]])
        self.tokens_computed += int(self.prompts[chosen].sum())

    def _admissible(self) -> int:
        """How many requests from the head of the queue fit together: doubled while they do, then halved in."""
        count, limit = 0, min(1, len(self.waiting))
        while count < limit and self._fits(limit):
            count, limit = limit, min(2 * limit, len(self.waiting))
        while limit - count > 1:
            middle = (count + limit) // 2
            count, limit = (middle, limit) if self._fits(middle) else (count, middle)
        return count

    def _fits(self, count: int) -> bool:
        return self.policy.fits(self.prompts[self._upcoming(count)])

    def _upcoming(self, count: int) -> list[int]:
        return self.waiting[: -count - 1 : -1]

    def _take_stock(self) -> None:
        batch, used = len(self.handles), self.policy.used_bytes()
        self.steps += 1
        self.batch_sum += batch
        self.peak_batch = max(self.peak_batch, batch)
        if sum(used.values()) > sum(self.peak.values()):
            self.peak = used

    def _complete(self) -> None:
        done = self.left == 0
        if not done.any():
            return
        self.policy.release(self.handles[done])
        self.completed += int(np.count_nonzero(done))
        self.requests, self.handles, self.left = self.requests[~done], self.handles[~done], self.left[~done]

    def result(self) -> ReplayResult:
        """The figures so far."""
        counters = self.policy.counters()
        return ReplayResult(
            policy=self.policy.name,
            requests=len(self.trace),
            completed=self.completed,
            refused_impossible=self.refused,
            steps=self.steps,
            batch_sum=self.batch_sum,
            peak_batch=self.peak_batch,
            preemptions=self.preemptions,
            tokens_computed=self.tokens_computed,
            tokens_computed_again=self.tokens_again,
            retractions=counters["retractions"],
            migrations=counters["migrations"],
            bytes_moved=counters["bytes_moved"],
            peak_kv_bytes=self.peak["kv"],
            peak_state_bytes=self.peak["state"],
            arena_bytes=self.policy.arena_bytes,
        )


def best_static(results: Iterable[ReplayResult]) -> str | None:
    """The name of the static split that completes the most per step, the smallest share of equals; None without."""
    splits = [result for result in results if result.policy in STATIC_SHARES]
    if not splits:
        return None
    return min(splits, key=lambda result: (-result.completed_per_1000_steps, STATIC_SHARES[result.policy])).policy


_COLUMNS: tuple[tuple[str, Callable[[ReplayResult], str]], ...] = (
    ("completed per 1000 steps", lambda result: f"{result.completed_per_1000_steps:,.1f}"),
    ("mean batch", lambda result: f"{result.mean_batch:,.1f}"),
    ("peak batch", lambda result: f"{result.peak_batch:,}"),
    ("preemptions", lambda result: f"{result.preemptions:,}"),
    ("tokens again", lambda result: f"{result.tokens_computed_again:,}"),
    ("impossible", lambda result: f"{result.refused_impossible:,}"),
    ("retractions", lambda result: f"{result.retractions:,}"),
    ("migrations", lambda result: f"{result.migrations:,}"),
    ("moved", lambda result: format_bytes(result.bytes_moved)),
    ("peak use", lambda result: f"{result.peak_used_bytes / result.arena_bytes:.1%}"),
)


def format_results(results: list[ReplayResult]) -> str:
    """One row per policy, the best static split marked: a table for a terminal and for Markdown alike."""
    best = best_static(results)
    marked = [f"{result.policy} (best static)" if result.policy == best else result.policy for result in results]
    rows = [[name, *(show(result) for _, show in _COLUMNS)] for name, result in zip(marked, results, strict=True)]
    return format_table(["policy", *(title for title, _ in _COLUMNS)], rows)
