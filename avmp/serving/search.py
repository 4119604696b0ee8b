"""The static split that serves a trace best: nobody knows it beforehand, so that it has to be searched for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from avmp.serving.metrics import ServingResult

GRAIN = 1000
"""Shares that a search tries are whole parts of so many."""

_FACTOR = 1.1
_STRIDES = (4, 2, 1)
_WIDE = range(-48, 49, 8)


@dataclass(frozen=True)
class BestSplit:
    """The share of the arena for states that did best, what came of it, and all shares that were tried."""

    share: Fraction
    result: ServingResult
    tried: dict[str, float]


def best_split(
    run: Callable[[Fraction], ServingResult], start: float, enough: float | None = None, refused: int = 0
) -> BestSplit:
    """Climbs from the share ``start`` by odds (states to KV), in strides of 1.46, 1.21 and 1.1: to the fewest requests
    refused, among those to the most tokens per second, and then to the lesser 90th percentile of the time to first
    token. It ends on a local best; a test compares it with the whole range.

    Where the start refuses more than ``refused`` requests, the climb begins at the best of thirteen shares far apart. A
    split that reaches ``enough`` tokens per second, such as the oracle's, without refusing more, ends the search.
    """
    found: dict[Fraction, ServingResult] = {}
    odds = _bounded(start) / (1 - _bounded(start))

    def share_at(place: int) -> Fraction:
        value = odds * _FACTOR**place
        return Fraction(round(_bounded(value / (1 + value)) * GRAIN), GRAIN)

    def result_at(place: int) -> ServingResult:
        share = share_at(place)
        if share not in found:
            found[share] = run(share)
        return found[share]

    def score(place: int) -> tuple[int, float, float]:
        result = result_at(place)
        return -result.refused, result.tokens_per_second, -result.first_token["p90"]

    def good_enough(place: int) -> bool:
        result = result_at(place)
        return enough is not None and result.tokens_per_second >= enough and result.refused <= refused

    place = 0 if result_at(0).refused <= refused else max(_WIDE, key=score)
    for stride in _STRIDES:
        while not good_enough(place):
            better = max((place + stride, place - stride), key=score)
            if score(better) <= score(place):
                break
            place = better
    best = share_at(place)
    return BestSplit(best, found[best], {f"{float(share):.3f}": r.tokens_per_second for share, r in found.items()})


def _bounded(share: float) -> float:
    return min(max(share, 0.005), 0.995)
