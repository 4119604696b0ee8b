"""The static split that serves a trace best: nobody knows it beforehand, so that it has to be searched for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from avmp.serving.metrics import ServingResult

MOST_RUNS = 48
"""A search serves the trace so many times at most."""

_WIDE = 6
"""The range is entered at the start and at the borders between so many equal parts of it: there may be more than one
peak."""

_FIRST_STRIDE = 16
"""The climb begins in strides of one part of so many, or less."""

_NEAR, _EACH_SIDE = Fraction(1, 20), 8
"""Around the top of the climb every split within this part of the arena is tried; where that is more than so many on a
side, three of the nearest and so many evenly spaced ones."""

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class BestSplit(Generic[Kept]):
    """The split that did best, its slots and their share of the arena, its run and what came of it; and the tokens per
    second of all that were tried, by their slots."""

    slots: int
    share: Fraction
    served: Kept
    result: ServingResult
    tried: dict[int, float]


def best_split(
    shares: Sequence[Fraction],
    run: Callable[[Fraction], Kept],
    judge: Callable[[Kept], ServingResult],
    start: float,
    most_runs: int = MOST_RUNS,
) -> BestSplit[Kept]:
    """The best of ``shares``, which ascend, one for each number of slots from 1 on: the fewest requests refused, among
    those the most tokens per second, and then the lesser 90th percentile of the time to first token.

    A climb from the best of ``start`` and some shares far apart, in strides that are halved down to one slot, and then
    all around its top; if a better split is there, again from that one. What is found beats all that were tried. A test
    compares it with every split there is, on a trace that is short enough.
    """
    search = _Search(shares, run, judge, most_runs)
    last = len(shares) - 1
    search.try_all([bisect_left(shares, start), *(last * part // _WIDE for part in range(1, _WIDE))])
    stride = 1 << max((len(shares) // _FIRST_STRIDE).bit_length() - 1, 0)
    search.climb(stride)
    spacing = _spacing(shares)
    near = sorted({1, 2, 3, *(spacing * n for n in range(1, _EACH_SIDE + 1))})
    while search.try_all([search.best + side * distance for distance in near for side in (1, -1)]):
        search.climb(spacing)
    slots, served = search.best + 1, search.served
    assert served is not None
    tried = {place + 1: result.tokens_per_second for place, result in sorted(search.found.items())}
    return BestSplit(slots, shares[search.best], served, search.found[search.best], tried)


def _spacing(shares: Sequence[Fraction]) -> int:
    """The slots between splits that are tried near the top: one, unless that would be too many splits."""
    slot_share = shares[0] if len(shares) > 1 else Fraction(1)
    near = -(-_NEAR // slot_share)
    return int(max(-(-near // _EACH_SIDE), 1))


class _Search(Generic[Kept]):
    """What has been tried, and the best of it: its place among the shares, and its run."""

    def __init__(
        self,
        shares: Sequence[Fraction],
        run: Callable[[Fraction], Kept],
        judge: Callable[[Kept], ServingResult],
        most_runs: int,
    ) -> None:
        self.shares, self.run, self.judge, self.runs_left = shares, run, judge, most_runs
        self.found: dict[int, ServingResult] = {}
        self.best = -1
        self.served: Kept | None = None

    def try_all(self, places: Sequence[int]) -> bool:
        """Whether one of these is better than the best so far."""
        before = self.best
        for place in places:
            bounded = min(max(place, 0), len(self.shares) - 1)
            if bounded not in self.found and self.runs_left:
                self._try(bounded)
        return self.best != before

    def climb(self, stride: int) -> None:
        """Upwards in strides that are halved where neither side is better."""
        while stride:
            if not self.try_all([self.best + stride, self.best - stride]):
                stride //= 2

    def _try(self, place: int) -> None:
        self.runs_left -= 1
        served = self.run(self.shares[place])
        result = self.found[place] = self.judge(served)
        if self.best < 0 or _score(result) > _score(self.found[self.best]):
            self.best, self.served = place, served


def _score(result: ServingResult) -> tuple[int, float, float]:
    return -result.refused, result.tokens_per_second, -result.first_token["p90"]
