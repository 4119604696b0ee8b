"""A server in simulated time: continuous batching over a memory policy, steps as long as the roofline says.

1. Requests that have arrived wait in the order of their arrival. A step starts as soon as the one before has ended;
   with nothing to do, time goes on to the next arrival.
2. Every request whose prompt has been read grows by one token. While they do not all fit, the running request that
   arrived last is preempted and goes back to the head of the queue: with ``recompute`` its memory is given up, and
   what it had is read again later, in chunks like a prompt; with ``swap`` it goes to the host and comes back as it was.
3. Unless somebody was preempted in this step, requests are admitted in order as long as the whole of what they have
   fits (and, where a swapped one goes on to decode, its next token, and beside them what ``reserve_tokens`` asks for),
   the batch is below ``max_batch`` and the step has tokens left. Nobody overtakes.
4. A step runs at most ``token_budget`` tokens: one of each request that is decoding, then prompts, first come, first
   served, in chunks. The chunk that ends a prompt yields the first output token.
5. A request with all its output tokens leaves; one without output tokens leaves when its prompt has been read.

A request that could not be held even alone, or is longer than the model is made for, is refused when it arrives.
Steps begin and end at whole multiples of TICK, so that sums of times are exact. Nobody waits for ever: the running
request that arrived first is never preempted while others run, alone it fits, and each of its steps yields a token or
reads some.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from avmp.baselines import IntArray, MemoryPolicy, PolicyFull
from avmp.errors import Inconsistent, InvalidArgument
from avmp.serving.arrivals import LATEST_SECONDS
from avmp.serving.engine_rules import EngineRules
from avmp.serving.roofline import StepModel
from avmp.serving.served import Sample, Served
from avmp.workloads import Trace

TICK = 2.0**-30
"""The grain of time in seconds, about a nanosecond: a double holds its multiples exactly for 97 days."""
MOST_SAMPLES = 1000
"""Memory is looked at so many times at most, evenly over the steps: when it is full, every second sample goes."""


@dataclass
class _Reader:
    """A request in the batch that still has tokens to read; room for all of them is there."""

    request: int
    handle: int
    read: int
    total: int


@dataclass(frozen=True)
class _Swapped:
    """A request in host memory."""

    handle: int
    read: int
    total: int


def simulate(
    trace: Trace,
    policy: MemoryPolicy,
    step_model: StepModel,
    rules: EngineRules | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Served:
    """Serves the whole trace from an empty memory. ``on_progress`` is told how many requests are dealt with.

    The policy's arena is that of one rank of tensor parallelism; the step model knows the whole model. Raises
    InvalidArgument where the last request arrives after LATEST_SECONDS.
    """
    if trace.arrival_seconds[-1] > LATEST_SECONDS:
        raise InvalidArgument(
            f"trace {trace.name!r}: the last request arrives at {trace.arrival_seconds[-1]:g} s, expected at most "
            f"{LATEST_SECONDS:,.0f} s, beside which the time of a step would be lost"
        )
    run, told = _Run(trace, policy, step_model, rules or EngineRules()), 0
    while run.step():
        if on_progress is not None and run.done != told:
            told = run.done
            on_progress(told)
    return run.result()


class _Run:
    """One simulation in progress.

    ``waiting`` is the queue, its head on the right. Who decodes is in three parallel arrays: the request, its handle,
    and the step that yields its last token; each of them yields one token in every step, so that
    ``left == last_step - steps`` and ``cached == prompt + output - left - 1`` need no upkeep. ``context`` is the sum
    of what they have in the cache. ``left`` and ``last_token`` by request are up to date for all others.
    """

    def __init__(self, trace: Trace, policy: MemoryPolicy, step_model: StepModel, rules: EngineRules) -> None:
        self.trace, self.policy, self.model, self.rules = trace, policy, step_model, rules
        self.prompt: list[int] = trace.prompt_tokens.tolist()
        self.output: list[int] = trace.output_tokens.tolist()
        self.arrival: list[float] = trace.arrival_seconds.tolist()
        total = trace.prompt_tokens + trace.output_tokens
        longest = step_model.geometry.max_position_embeddings
        refused = policy.impossible(total) | (total > (longest or np.iinfo(np.int64).max))
        self.refused: IntArray = np.flatnonzero(refused)
        self.coming: deque[int] = deque(np.flatnonzero(~refused).tolist())
        self.waiting: deque[int] = deque()
        self.swapped: dict[int, _Swapped] = {}
        self.readers: list[_Reader] = []
        self.requests, self.handles, self.last_step = (np.empty(0, dtype=np.int64) for _ in range(3))
        self.next_last = 0
        self.context = 0
        self.left = list(self.output)
        self.admitted, self.first_token, self.finished, self.last_token = ([math.nan] * len(trace) for _ in range(4))
        self.now = 0.0
        self.steps = 0
        self.done = len(self.refused)
        self.step_end: list[float] = []
        self.step_tokens: list[int] = []
        self.step_batch: list[int] = []
        self.step_work: list[tuple[int, int, int, int]] = []
        self.gap_count: list[int] = []
        self.step_seconds: list[float] = []
        self.late_gaps: list[float] = []
        self.samples: list[Sample] = []
        self.sample_every = 1
        self.prefill_tokens = self.recomputed_tokens = self.preemptions = self.swapped_bytes = 0
        self.move_seconds = self.swap_seconds = 0.0
        self.moved_before, self.swapped_before = policy.moved_bytes, 0

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the batch; False if there is nothing left to do."""
        if not (self.waiting or self.readers or len(self.requests)):
            if not self.coming:
                return False
            self.now = max(self.now, _whole_ticks(self.arrival[self.coming[0]]))
        self._arrive()
        back = self._admit() if self._grow() else []
        budget = self.rules.token_budget - len(self.requests)
        chunks = self._chunks(budget)
        self._pass_time(chunks)
        self._yield_tokens(chunks, back)
        return True

    def _arrive(self) -> None:
        while self.coming and self.arrival[self.coming[0]] <= self.now:
            self.waiting.appendleft(self.coming.popleft())

    def _grow(self) -> bool:
        """One more token for everybody who decodes and can be kept; whether all of them could."""
        preemptions = self.preemptions
        while len(self.requests):
            try:
                self.policy.extend(self.handles)
                self.context += len(self.requests)
                break
            except PolicyFull as error:
                self._preempt_latest(error)
        return self.preemptions == preemptions

    def _preempt_latest(self, reason: PolicyFull) -> None:
        """The request that arrived last goes. Requests are numbered in the order of their arrival."""
        if len(self.requests) + len(self.readers) == 1:
            raise Inconsistent(f"request {self.requests[0]} runs alone and was found possible, but: {reason}")
        if self.readers and self.readers[-1].request > int(self.requests.max()):
            reader = self.readers.pop()
            request, handle, read, total = reader.request, reader.handle, reader.read, reader.total
        else:
            at = int(self.requests.argmax())
            request, handle = int(self.requests[at]), int(self.handles[at])
            self.left[request] = int(self.last_step[at]) - self.steps
            self.last_token[request] = self.now
            read = total = self.prompt[request] + self.output[request] - self.left[request] - 1
            self.context -= read
            self._keep(np.arange(len(self.requests)) != at)
        which = np.array([handle])
        if self.rules.preemption == "swap":
            handle = int(self._swap(lambda: self.policy.swap_out(which))[0])
            self.swapped[request] = _Swapped(handle, read, total)
        else:
            self.policy.release(which)
            self.recomputed_tokens += read
        self.waiting.append(request)
        self.preemptions += 1

    def _swap(self, act: Callable[[], IntArray]) -> IntArray:
        before = sum(self.policy.used_bytes().values())
        handles = act()
        self.swapped_bytes += abs(sum(self.policy.used_bytes().values()) - before)
        return handles

    def _admit(self) -> list[int]:
        """Whoever fits, in order, as long as the step has tokens left for them. Yields those who decode at once."""
        budget = self.rules.token_budget - len(self.requests) - sum(r.total - r.read for r in self.readers)
        back: list[int] = []
        while self.waiting and budget > 0 and len(self.requests) + len(self.readers) < self.rules.max_batch:
            request = self.waiting[-1]
            swapped = self.swapped.get(request)
            if swapped is None:
                tokens = self.prompt[request] + self.output[request] - self.left[request]
                count = np.array([tokens])
                if not self._fits(count):
                    break
                self.readers.append(_Reader(request, int(self.policy.admit(count)[0]), 0, tokens))
                budget -= tokens
            else:
                decodes = swapped.read == swapped.total
                if not self._fits(np.array([swapped.total + decodes])):
                    break
                self._bring_back(request, swapped, decodes)
                budget -= 1 if decodes else swapped.total - swapped.read
                back += [request] * decodes
            self.waiting.pop()
            if math.isnan(self.admitted[request]):
                self.admitted[request] = self.now
        if not len(self.requests) and not self.readers:
            raise Inconsistent(f"request {self.waiting[-1]} was found possible, but does not fit into empty memory")
        return back

    def _fits(self, tokens: IntArray) -> bool:
        running = len(self.requests) + len(self.readers)
        spare = self.rules.reserve_tokens * (running + 1) if running else 0
        return self.policy.fits(tokens, spare) if spare else self.policy.fits(tokens)

    def _bring_back(self, request: int, swapped: _Swapped, decodes: bool) -> None:
        handles = self._swap(lambda: self.policy.swap_in(np.array([swapped.handle])))
        del self.swapped[request]
        if decodes:
            self.policy.extend(handles)
            self.context += swapped.read + 1
            self._decode([request], handles.tolist(), [self.steps + self.left[request]])
        else:
            self.readers.append(_Reader(request, int(handles[0]), swapped.read, swapped.total))

    def _chunks(self, budget: int) -> list[int]:
        """How many tokens each reader reads in this step: all, until the budget is spent."""
        chunks = []
        for reader in self.readers:
            if budget <= 0:
                break
            chunks.append(min(reader.total - reader.read, budget))
            budget -= chunks[-1]
        return chunks

    # -- who decodes -------------------------------------------------------------------------------------------------

    def _decode(self, requests: list[int], handles: list[int], last_step: list[int]) -> None:
        self.requests = np.concatenate([self.requests, np.array(requests, dtype=np.int64)])
        self.handles = np.concatenate([self.handles, np.array(handles, dtype=np.int64)])
        self.last_step = np.concatenate([self.last_step, np.array(last_step, dtype=np.int64)])
        self._seal()

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self.requests, self.handles, self.last_step = self.requests[which], self.handles[which], self.last_step[which]
        self._seal()

    def _seal(self) -> None:
        """A policy that sees the same array again may know it by that, as nobody can change it."""
        self.handles.flags.writeable = False
        self.next_last = int(self.last_step.min()) if len(self.last_step) else 0

    # -- what it takes -----------------------------------------------------------------------------------------------

    def _pass_time(self, chunks: list[int]) -> None:
        """The step's time. What a prompt's chunk sees: all that was read before, and its own tokens up to each."""
        decoding = len(self.requests)
        tokens, context, pairs = decoding, self.context, self.context
        for reader, chunk in zip(self.readers, chunks, strict=False):
            tokens += chunk
            context += reader.read + chunk
            pairs += chunk * reader.read + chunk * (chunk + 1) // 2
        work = (tokens, decoding + len(chunks), context, pairs)
        seconds = _whole_ticks(self.model.seconds(*work))
        moved = self.policy.moved_bytes
        if moved != self.moved_before:
            moving = _whole_ticks(self.model.move_seconds(moved - self.moved_before))
            self.moved_before = moved
            self.move_seconds += moving
            seconds += moving
        if self.swapped_bytes != self.swapped_before:
            swapping = _whole_ticks(self.model.swap_seconds(self.swapped_bytes - self.swapped_before))
            self.swapped_before = self.swapped_bytes
            self.swap_seconds += swapping
            seconds += swapping
        self.now += seconds
        self.step_seconds.append(seconds)
        self.step_work.append(work)
        if self.steps % self.sample_every == 0:
            self._sample(decoding + len(self.readers))

    def _sample(self, batch: int) -> None:
        used, extents = self.policy.used_bytes(), self.policy.extents()
        self.samples.append(
            Sample(self.now, batch, len(self.waiting), used["kv"], used["state"], extents["kv"], extents["state"])
        )
        if len(self.samples) >= MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.sample_every *= 2

    def _yield_tokens(self, chunks: list[int], back: list[int]) -> None:
        """Tokens come out, and whoever has all of them leaves."""
        self.steps += 1
        tokens = decoding = len(self.requests)
        batch = decoding + len(self.readers)
        for request in back:
            self.late_gaps.append(self.now - self.last_token[request])
        if decoding and self.next_last == self.steps:
            self._leave()
        if chunks:
            tokens += self._read(chunks)
        self.step_end.append(self.now)
        self.step_tokens.append(tokens)
        self.step_batch.append(batch)
        self.gap_count.append(decoding - len(back))

    def _leave(self) -> None:
        """Those who have yielded their last token."""
        last = self.last_step == self.steps
        gone = self.requests[last].tolist()
        self.policy.release(self.handles[last])
        for request in gone:
            self._finish(request)
            self.context -= self.prompt[request] + self.output[request] - 1
        self._keep(~last)

    def _finish(self, request: int) -> None:
        self.left[request] = 0
        self.finished[request] = self.now
        self.done += 1

    def _read(self, chunks: list[int]) -> int:
        """The readers' chunks are in the cache; yields the number of output tokens that come of it."""
        self.prefill_tokens += sum(chunks)
        ended: list[_Reader] = []
        for reader, chunk in zip(self.readers, chunks, strict=False):
            reader.read += chunk
            if reader.read == reader.total:
                ended.append(reader)
        if not ended:
            return 0
        self.readers = [reader for reader in self.readers if reader.read < reader.total]
        tokens = 0
        for reader in ended:
            tokens += self._first_of(reader.request)
        done = [reader for reader in ended if not self.left[reader.request]]
        if done:
            self.policy.release(np.array([reader.handle for reader in done]))
            for reader in done:
                self._finish(reader.request)
        decode = [reader for reader in ended if self.left[reader.request]]
        if decode:
            self.context += sum(reader.total for reader in decode)
            requests = [reader.request for reader in decode]
            last = [self.steps + self.left[request] for request in requests]
            self._decode(requests, [reader.handle for reader in decode], last)
        return tokens

    def _first_of(self, request: int) -> int:
        """What was to be read has been: the next output token, if one is wanted."""
        if not self.left[request]:
            return 0
        if math.isnan(self.first_token[request]):
            self.first_token[request] = self.now
        else:
            self.late_gaps.append(self.now - self.last_token[request])
        self.last_token[request] = self.now
        self.left[request] -= 1
        return 1

    def result(self) -> Served:
        """What has become of everything."""
        return Served(
            trace=self.trace,
            policy=self.policy.name,
            arena_bytes=self.policy.arena_bytes,
            refused=self.refused,
            admitted=np.array(self.admitted),
            first_token=np.array(self.first_token),
            finished=np.array(self.finished),
            step_end=np.array(self.step_end),
            step_tokens=np.array(self.step_tokens, dtype=np.int64),
            step_batch=np.array(self.step_batch, dtype=np.int64),
            step_work=np.array(self.step_work, dtype=np.int64).reshape(-1, 4),
            gap_seconds=np.array(self.step_seconds),
            gap_count=np.array(self.gap_count, dtype=np.int64),
            late_gaps=np.array(self.late_gaps),
            samples=self.samples,
            prefill_tokens=self.prefill_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            swapped_bytes=self.swapped_bytes,
            move_seconds=self.move_seconds,
            swap_seconds=self.swap_seconds,
            busy_seconds=math.fsum(self.step_seconds),
            counters=self.policy.counters(),
        )


def _whole_ticks(seconds: float) -> float:
    return math.ceil(seconds / TICK) * TICK
