"""Continuous batching over one arena: admission, chunked prefill, decoding, forks, preemption by swap, release.

A step runs one token of every answer under way and up to ``chunk_tokens`` prompt tokens, in one ragged batch. Who came
first is served first: answers that were swapped out come back before anybody new is admitted, and when memory runs
short, the answer that came last is swapped out. Several samples of one prompt are forks of one sequence; a sample that
finds no room reads the prompt again later. A request that could not be held even alone is refused on arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from avmp.cache_pool import CachePool
from avmp.demo.memories import PagedMemory
from avmp.demo.model import HybridModel
from avmp.demo.requests import Request
from avmp.demo.sampling import draw
from avmp.errors import Inconsistent, OutOfMemory
from avmp.geometry import require_count


@dataclass
class Answer:
    """One sample of one request. ``handle`` names its sequence, or what of it was swapped out, 0 before it is admitted;
    ``kept`` is how many tokens are in the cache."""

    request: Request
    sample: int = 0
    handle: int = 0
    kept: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.request.number, self.sample

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt are still to come."""
        return self.kept < len(self.request.prompt)

    def upcoming(self, most: int) -> list[int]:
        """The tokens that go through the model next, at most ``most`` of a prompt."""
        if self.prefilling:
            upcoming: list[int] = self.request.prompt[self.kept : self.kept + most].tolist()
            return upcoming
        return self.tokens[-1:]


@dataclass(frozen=True)
class Moment:
    """One step as the report shows it. Bytes are those of all lanes; ``slots_extent_bytes`` is where the states' side
    ends. ``migrations`` counts retractions of that boundary which moved live units."""

    step: int
    running: int
    waiting: int
    swapped: int
    pages: int
    slots: int
    page_bytes: int
    slot_bytes: int
    slots_extent_bytes: int
    pages_extent_bytes: int
    migrations: int
    bytes_moved: int


class Engine:
    """Serves ``requests`` with ``model`` out of ``pool``; ``finished`` and ``refused`` are what became of them."""

    def __init__(
        self, model: HybridModel, pool: CachePool, requests: list[Request], chunk_tokens: int = 64, seed: int = 0
    ) -> None:
        require_count("chunk_tokens", chunk_tokens)
        self.model, self.pool, self.seed = model, pool, seed
        self.chunk_tokens = chunk_tokens
        self.requests = requests
        self.upcoming = deque(sorted(requests, key=lambda request: (request.arrival, request.number)))
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self.swapped: list[Answer] = []
        self.finished: list[Answer] = []
        self.refused: list[Request] = []
        self.steps = self.preemptions = self.tokens_computed = 0
        self.history: list[Moment] = []

    def run(self, on_step: Callable[[Moment], None] | None = None) -> None:
        """Until every request is answered or refused."""
        while self.step():
            if on_step is not None:
                on_step(self.history[-1])

    def step(self) -> bool:
        """One step of the batch; False if there is nothing left to do."""
        if not (self.upcoming or self.waiting or self.running or self.swapped):
            return False
        if not (self.waiting or self.running or self.swapped):
            self.steps = max(self.steps, self.upcoming[0].arrival)  # idle until somebody comes
        self._arrive()
        self._resume()
        self._admit()
        chosen = self._grow()
        if chosen:
            self._compute(chosen)
        elif self.waiting or self.swapped:
            raise Inconsistent("nobody runs, and who waits was found possible but does not fit into empty memory")
        self.steps += 1
        self._take_stock()
        return True

    # -- who is in the batch -----------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self.upcoming and self.upcoming[0].arrival <= self.steps:
            request = self.upcoming.popleft()
            tokens = request.tokens
            if tokens <= self.pool.max_tokens_per_sequence and self.pool.layout.max_sequences(tokens) > 0:
                self.waiting.append(Answer(request))
            else:
                self.refused.append(request)

    def _resume(self) -> None:
        """Answers come back in order, while each leaves room for a page more of everybody."""
        self.swapped.sort(key=lambda answer: answer.order)
        while self.swapped and self.pool.fits("swap_in", [self.swapped[0].handle]):
            answer = self.swapped[0]
            wanted = answer.kept + (len(self.running) + 1) * self.pool.layout.page_tokens
            if self.running and not self.pool.fits("admit", [min(wanted, self.pool.max_tokens_per_sequence)]):
                break
            answer.handle = int(self.pool.swap_in([answer.handle])[0])
            self.running.append(self.swapped.pop(0))

    def _admit(self) -> None:
        """Answers whose whole prompt fits now, unless somebody who came before them still waits for memory."""
        while self.waiting and not self.swapped:
            request = self.waiting[0].request
            if not self.pool.fits("admit", [min(len(request.prompt) + 1, request.tokens)]):
                break
            answer = self.waiting.popleft()
            answer.handle = int(self.pool.admit([0])[0])
            self.running.append(answer)

    def _grow(self) -> list[tuple[Answer, list[int]]]:
        """Room for this step's tokens: one of each answer, and ``chunk_tokens`` of prompts, first come, first served.
        Whoever came last gives way."""
        while self.running:
            chosen, budget = [], self.chunk_tokens
            for answer in sorted(self.running, key=lambda answer: answer.order):
                tokens = answer.upcoming(budget)
                budget -= len(tokens) if answer.prefilling else 0
                if tokens:
                    chosen.append((answer, tokens))
            try:
                self.pool.extend([answer.handle for answer, _ in chosen], [len(tokens) for _, tokens in chosen])
            except OutOfMemory:
                self._preempt()
                continue
            return chosen
        return []

    def _preempt(self) -> None:
        """Who came last leaves for host memory."""
        answer = max(self.running, key=lambda answer: answer.order)
        answer.handle = int(self.pool.swap_out([answer.handle])[0])
        self.running.remove(answer)
        self.swapped.append(answer)
        self.preemptions += 1

    # -- a step ------------------------------------------------------------------------------------------------------

    def _compute(self, chosen: list[tuple[Answer, list[int]]]) -> None:
        device = self.pool.device
        memory = PagedMemory(self.pool, [answer.handle for answer, _ in chosen])
        tokens = torch.tensor([token for _, tokens in chosen for token in tokens], device=device)
        logits = self.model.forward(tokens, memory).cpu().numpy()
        self.tokens_computed += len(tokens)
        for (answer, tokens_of_answer), row in zip(chosen, logits, strict=True):
            answer.kept += len(tokens_of_answer)
            if answer.prefilling:
                continue
            for one in [answer, *self._other_samples(answer)]:
                one.tokens.append(draw(row, self.seed, one.request.number, one.sample, len(one.tokens)))
                if len(one.tokens) == one.request.output_tokens:
                    self.pool.release([one.handle])
                    self.running.remove(one)
                    self.finished.append(one)

    def _other_samples(self, answer: Answer) -> list[Answer]:
        """Where a prompt has just been read: the other samples of its request that could be forked."""
        count = answer.request.samples
        if answer.tokens or answer.sample or count == 1:
            return []
        samples = [Answer(answer.request, sample) for sample in range(1, count)]
        room = sum(self.pool.fits("fork", answer.handle, n) for n in range(1, count))
        if room:
            for one, handle in zip(samples, self.pool.fork(answer.handle, room), strict=False):
                one.handle, one.kept = int(handle), answer.kept
        self.running += samples[:room]
        self.waiting.extendleft(reversed(samples[room:]))
        return samples[:room]

    def _take_stock(self) -> None:
        stats, layout = self.pool.stats(), self.pool.layout
        self.history.append(
            Moment(
                step=self.steps,
                running=len(self.running),
                waiting=len(self.waiting),
                swapped=len(self.swapped),
                pages=stats.pages_live,
                slots=stats.slots_live,
                page_bytes=stats.pages_live * layout.page_total_bytes,
                slot_bytes=stats.slots_live * layout.slot_total_bytes,
                slots_extent_bytes=stats.slots_extent * layout.slot_total_bytes,
                pages_extent_bytes=stats.pages_extent * layout.page_total_bytes,
                migrations=stats.migrations,
                bytes_moved=stats.bytes_moved,
            )
        )
