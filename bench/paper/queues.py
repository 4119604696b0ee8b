"""The headroom table, and what a user of the same queue would see."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

from avmp.paper import HEADROOM_SHARES, Served
from avmp.text_table import format_table
from bench.paper.jobs import Job, Queue, Search, Selection
from bench.paper.published import HEADROOM, Comparison
from bench.paper.results import Results, scaled

AT_LEAST = 0.99
"""What avmp has to reach of a byte budget with its own rounding on the arena less its null area."""
STATICS = tuple(f"static {float(share):g}" for share in HEADROOM_SHARES)
COMPARED = ("best static", "sglang", "vllm", "avmp", "budget", "plain budget")


def queue_cells(selection: Selection) -> list[Job]:
    """The policies."""
    return [*selection.queues()]


def searched_cells(selection: Selection) -> list[Job]:
    """The policies, and the best static splits."""
    return [*selection.queues(), *selection.queues(Search)]


def headroom_table(results: Results, comparison: Comparison) -> str:
    """The published table, and avmp's columns in it."""
    rows = []
    for queue in results.selection.queues():
        served = results.found[queue]
        rates = [served[name].rate for name in (*STATICS, "plain budget")]
        # Rates compare only between those who serve the same requests: refusing long ones finishes short ones sooner.
        fewest = served["plain budget"].dropped
        equal = {name: served[name].rate for name in STATICS if served[name].dropped == fewest}
        gains = [
            rates[-1] / rate - 1 if rate else None
            for rate in (equal.get("static 0.5"), max(equal.values(), default=None))
        ]
        decimals = 2 if rates[-1] < 2 else 1
        ours, budget = served["avmp"].rate, served["budget"].rate
        comparison.require(f"{_name(queue)}: avmp reaches {AT_LEAST} of the byte budget", ours >= AT_LEAST * budget)
        rows.append(
            [
                _name(queue),
                *(
                    f"{rate:.{decimals}f}{f' ({served[name].dropped})' * (served[name].dropped > 0)}"
                    for name, rate in zip((*STATICS, "plain budget"), rates, strict=True)
                ),
                *("-" if gain is None else f"{gain:+.0%}" for gain in gains),
                _as_published(queue, rates, gains, comparison),
                f"{ours:.{decimals}f}",
                f"{budget:.{decimals}f}",
                f"{ours / budget:.3f}",
                f"{served['avmp'].dropped:,}",
            ]
        )
    header = ["per 1000 ticks (dropped)", *STATICS, "plain budget", "vs 0.5", "vs best of the five", "published"]
    return format_table([*header, "avmp", "budget less null area", "avmp / that", "dropped"], rows)


def _as_published(queue: Queue, rates: list[float], gains: list[float | None], comparison: Comparison) -> str:
    """Compares a row figure by figure; what the table says about it."""
    published = HEADROOM.get((queue.workload, queue.model, queue.pool))
    if published is None or not all(stream.published for stream in queue.streams):
        return "-"
    *texts, over_half, over_best = published.split()
    again = [(rate, text) for rate, text in zip(rates, texts, strict=True) if text != rounded(rate, text)]
    for rate, text in zip(rates, texts, strict=True):
        comparison.check(f"headroom, {_name(queue)}", text, rounded_twice(rate, text) if again else rounded(rate, text))
    for gain, text in zip(gains, (over_half, over_best), strict=True):
        comparison.check(f"headroom, {_name(queue)}", text, "-" if gain is None else f"{gain:+.0%}")
    return "; ".join(["same", *(f"{text} is {rate:.3f}, rounded twice" for rate, text in again)])


def rounded(rate: float, published: str) -> str:
    """With the decimals of the published figure."""
    return f"{rate:.{len(published.partition('.')[2])}f}"


def rounded_twice(rate: float, published: str) -> str:
    """First to hundredths, then as published, halves up."""
    step = Decimal(1).scaleb(-len(published.partition(".")[2]))
    hundredths = Decimal(rate).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return str(hundredths.quantize(step, ROUND_HALF_UP))


def queue_table(results: Results, comparison: Comparison) -> str:
    """Rates, latencies and memory of those that people can choose, and of two bounds."""
    parts: tuple[tuple[str, Callable[[Served], str]], ...] = (
        ("completed per 1000 ticks (dropped)", _rate),
        ("mean latency in ticks", lambda served: f"{served.mean_latency_ticks:,.0f}"),
        ("tokens per tick", lambda served: f"{served.tokens_per_tick:,.1f}"),
        ("peak use", lambda served: scaled(served.peak_used_bytes)),
    )
    return "\n\n".join(_queue_part(results, title, show) for title, show in parts)


def _rate(served: Served) -> str:
    return f"{served.rate:.2f}{f' ({served.dropped})' * (served.dropped > 0)}"


def _queue_part(results: Results, title: str, show: Callable[[Served], str]) -> str:
    rows = []
    for queue, search in zip(results.selection.queues(), results.selection.queues(Search), strict=True):
        share, best = next(iter(results.found[search].items()))
        served = results.found[queue] | {"best static": best}
        rows.append([_name(queue), share, *(show(served[name]) for name in COMPARED)])
    return format_table([title, "best share", *COMPARED], rows)


def rates(results: Results) -> dict[str, dict[str, float]]:
    """By cell and policy, for a figure: cells in which everybody holds every request, as rates compare only there."""
    return {
        _name(queue): {name: served.rate for name, served in results.found[queue].items()}
        for queue in results.selection.queues()
        if not any(served.dropped for served in results.found[queue].values())
    }


def _name(queue: Queue) -> str:
    return f"{queue.workload} {queue.model.removeprefix('paper_')} {queue.pool}"
