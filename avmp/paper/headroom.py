"""What the published workloads leave to be gained: requests completed by a queue that never takes memory back.

Strict first-in first-out with head-of-line blocking. Admission reserves everything a request will ever need, for
``prompt + output`` tokens, so that nothing is evicted, preempted or out of memory later; a request that its memory
could not hold even alone is dropped. Within a tick departures come before admissions.

    departure = admission + prompt + output
    rate      = 1000 * completed / last departure tick; over several seeds, sums of both

A slot of the layouts here is one state in every layer, and a page is one page in every layer: 4 of the experiment's
pages and 28 of its states for the models ``paper_jamba`` and ``paper_mamba2``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from avmp.baselines import (
    SGLANG_DEFAULT_SHARE,
    AllocatorPolicy,
    ByteBudget,
    InflatedBlock,
    MemoryPolicy,
    PolicyBuilder,
    PolicyFull,
    PolicySetup,
    static_split,
)
from avmp.errors import Inconsistent, InvalidArgument
from avmp.layout import Layout
from avmp.workloads.paper import PaperStream

HEADROOM_SHARES = (Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(9, 10))
"""The static splits of the published headroom table: the share of the memory that is set aside for states."""


class PlainByteBudget(ByteBudget):
    """The byte budget of all of the arena: the null area, which avmp pays for, is not taken off."""

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self.name = "plain budget"
        self.budget_bytes = setup.layout.arena_bytes


HEADROOM_POLICIES: dict[str, PolicyBuilder] = {
    **{f"static {float(share):g}": static_split(share) for share in HEADROOM_SHARES},
    "sglang": static_split(SGLANG_DEFAULT_SHARE),
    "vllm": InflatedBlock,
    "avmp": AllocatorPolicy,
    "budget": ByteBudget,
    "plain budget": PlainByteBudget,
}
"""Who is compared, by name. ``sglang`` is the static split of SGLang's default ratio, ``vllm`` vLLM's inflated block,
``budget`` the byte budget of the arena less avmp's null area, ``plain budget`` that of the whole arena."""


@dataclass(frozen=True)
class Served:
    """What one queue made of one stream, or, added up, of several. Ticks and tokens are sums over ``completed``
    requests; ``latency_ticks`` is departure less arrival, ``last_departure_ticks`` the length of the run."""

    completed: int
    dropped: int
    last_departure_ticks: int
    tokens: int
    latency_ticks: int
    peak_used_bytes: int

    def __add__(self, other: Served) -> Served:
        return Served(
            completed=self.completed + other.completed,
            dropped=self.dropped + other.dropped,
            last_departure_ticks=self.last_departure_ticks + other.last_departure_ticks,
            tokens=self.tokens + other.tokens,
            latency_ticks=self.latency_ticks + other.latency_ticks,
            peak_used_bytes=max(self.peak_used_bytes, other.peak_used_bytes),
        )

    @property
    def rate(self) -> float:
        """Requests completed per 1000 ticks; 0 where none was."""
        return 1000 * self.completed / self.last_departure_ticks if self.last_departure_ticks else 0.0

    @property
    def tokens_per_tick(self) -> float:
        """Prompt and output tokens of completed requests per tick: the mean number of requests at work."""
        return self.tokens / self.last_departure_ticks if self.last_departure_ticks else 0.0

    @property
    def mean_latency_ticks(self) -> float:
        """From arrival to departure; 0 where none was completed."""
        return self.latency_ticks / self.completed if self.completed else 0.0


def serve_reserved(stream: PaperStream, policy: MemoryPolicy) -> Served:
    """Runs the stream through the queue, against an empty policy."""
    totals = stream.prompt_tokens + stream.output_tokens
    impossible = policy.impossible(totals)
    running: list[tuple[int, int, int]] = []
    now = last = latency = peak = 0
    for request in np.flatnonzero(~impossible).tolist():
        arrival = int(stream.arrival_ticks[request])
        now = max(now, arrival)
        _release(policy, running, now)
        handle = _admit(policy, totals[request : request + 1])
        while handle is None:
            if not running:
                raise Inconsistent(f"request {request} was found possible, but does not fit into empty memory")
            now = running[0][0]
            _release(policy, running, now)
            handle = _admit(policy, totals[request : request + 1])
        departure = now + int(totals[request])
        heapq.heappush(running, (departure, request, handle))
        last, latency = max(last, departure), latency + departure - arrival
        peak = max(peak, sum(policy.used_bytes().values()))
    _release(policy, running, last)
    dropped, tokens = int(np.count_nonzero(impossible)), int(totals[~impossible].sum())
    return Served(len(stream) - dropped, dropped, last, tokens, latency, peak)


def _release(policy: MemoryPolicy, running: list[tuple[int, int, int]], now: int) -> None:
    handles = []
    while running and running[0][0] <= now:
        handles.append(heapq.heappop(running)[2])
    if handles:
        policy.release(np.array(handles, dtype=np.int64))


def _admit(policy: MemoryPolicy, total: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int | None:
    try:
        return int(policy.admit(total)[0])
    except PolicyFull:
        return None


def headroom(streams: Sequence[PaperStream], layout: Layout, build: PolicyBuilder) -> Served:
    """The sum over the streams, each against a policy of its own."""
    if not streams:
        raise InvalidArgument("headroom: no streams; expected at least one")
    served = [serve_reserved(stream, build(_setup(stream, layout))) for stream in streams]
    return sum(served[1:], served[0])


def _setup(stream: PaperStream, layout: Layout) -> PolicySetup:
    return PolicySetup(
        layout=layout,
        longest_tokens=int((stream.prompt_tokens + stream.output_tokens).max()),
        max_sequences=len(stream),
    )


def search_split(
    streams: Sequence[PaperStream], layout: Layout, shares: Iterable[Fraction] | None = None
) -> tuple[Fraction, Served]:
    """The static split that drops the fewest requests, of those the one with the highest rate, of equals the smallest
    share; and what it made of the streams. Requests that are dropped would otherwise raise the rate of the others.

    Tried are ``shares``; without them the multiples of 1/20, then the multiples of 1/100 next to the best of those.
    """

    def best(candidates: Iterable[Fraction]) -> tuple[Fraction, Served]:
        found = [(share, headroom(streams, layout, static_split(share))) for share in candidates]
        if not found:
            raise InvalidArgument("search_split: no shares; expected at least one")
        return max(found, key=lambda pair: (-pair[1].dropped, pair[1].rate, -pair[0]))

    if shares is not None:
        return best(shares)
    coarse, _ = best(Fraction(number, 20) for number in range(1, 20))
    return best(coarse + Fraction(step, 100) for step in range(-4, 5))
