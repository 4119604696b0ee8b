"""What can be shown: each view names the cells it needs and makes a table of their results. To add one, write the two
functions and name them in ``VIEWS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from avmp.paper import VARIANTS, Outcome
from avmp.text_table import format_table
from bench.paper import claims, queues
from bench.paper.bootstrap import paired_bootstrap
from bench.paper.jobs import Job, Selection
from bench.paper.published import (
    BATCHES,
    BOOTSTRAP,
    COMPLETION,
    OOM_TOTAL,
    OOM_TOTALS,
    PHASES,
    SERVED_INTACT,
    SHAREGPT_PER_CELL,
    Comparison,
)
from bench.paper.results import Results, beside, percent, scaled

AVMP, FIXED = "avmp_dynamic_b128", "fixed_dual_mr05"
CI_TOLERANCE = 0.1
"""How far the ends of an interval may lie from the published ones: the order of draws was not published."""


@dataclass(frozen=True)
class View:
    """``needs`` yields the jobs, ``render`` the text; the comparison learns what was published."""

    title: str
    needs: Callable[[Selection], Sequence[Job]]
    render: Callable[[Results, Comparison], str]


def grid(selection: Selection) -> list[Job]:
    """The 240 cells, or those of the selection."""
    return [*selection.cells(tuple(VARIANTS))]


def totals(results: Results, comparison: Comparison) -> str:
    """Out-of-memory counts."""
    rows = []
    for name in VARIANTS:
        row, total = [name], 0.0
        for workload in results.selection.workloads:
            here = results.mean_oom(name, workload)
            published: str | None = OOM_TOTALS[name].get(workload)
            if workload == "sharegpt_replay":
                published, here = SHAREGPT_PER_CELL[name], here / results.rows
            else:
                total += here
            shown = beside(published, here, results.comparable(workload))
            row.append(results.compare(comparison, f"{name} {workload} OOM", shown))
        whole = all(results.comparable(workload) for workload in OOM_TOTALS[name])
        row.append(results.compare(comparison, f"{name} total OOM", beside(OOM_TOTAL[name], total, whole)))
        rows.append(row)
    names = [f"{name}, a cell" if name == "sharegpt_replay" else name for name in results.selection.workloads]
    return format_table(["OOMs, published / here", *names, "total of three"], rows)


def served_intact(results: Results, comparison: Comparison) -> str:
    """Completion beside requests that were never stripped."""
    rows = []
    for name in VARIANTS:
        row = [name]
        for workload in results.selection.workloads:
            outcomes = results.of(name, workload)
            requests = sum(found.requests for found in outcomes)
            parts = (
                ("completed", COMPLETION.get(workload) if name == AVMP else None),
                ("served_intact", SERVED_INTACT.get(name, {}).get(workload)),
            )
            for key, published in parts:
                share = 100 * sum(getattr(found, key) for found in outcomes) / requests
                shown = beside(published, share, results.comparable(workload))
                row.append(results.compare(comparison, f"{name} {workload} {key}, %", shown))
        rows.append(row)
    header = [f"{name}, {what}" for name in results.selection.workloads for what in ("completed %", "intact %")]
    return format_table(["published / here", *header], rows)


def refusals(results: Results, comparison: Comparison) -> str:
    """Evictions, attempts at migration, and bytes."""
    rows = []
    for name in VARIANTS:
        for workload in results.selection.workloads:
            outcomes = results.of(name, workload)
            attempts = sum(found.shrink_attempts for found in outcomes)
            shrinks = sum(found.shrinks for found in outcomes)
            rows.append(
                [
                    f"{name} {workload}",
                    f"{sum(found.evictions for found in outcomes):,}",
                    f"{attempts:,}",
                    f"{shrinks:,}",
                    percent(attempts - shrinks, attempts),
                    scaled(sum(found.bytes_migrated for found in outcomes)),
                    scaled(sum(found.kv_pool_bytes for found in outcomes) // len(outcomes)),
                    scaled(sum(found.state_pool_bytes for found in outcomes) // len(outcomes)),
                ]
            )
    header = ["all cells", "evictions", "migrations tried", "done", "refused %", "moved", "mean KV pool", "mean state"]
    return format_table(header, rows)


def batch_cells(selection: Selection) -> list[Job]:
    """The three workloads of the published sweep."""
    return [*selection.cells([f"avmp_dynamic:{batch}" for batch in BATCHES], claims.without_sharegpt(selection))]


def batches(results: Results, comparison: Comparison) -> str:
    """The sweep over batch sizes."""
    workloads = claims.without_sharegpt(results.selection)
    rows = []
    for batch, published in BATCHES.items():
        name = f"avmp_dynamic:{batch}"
        by_workload = [results.mean_oom(name, workload) for workload in workloads]
        whole = len(workloads) == 3 and results.selection.is_whole
        total = results.compare(comparison, f"batch {batch} OOM", beside(published, sum(by_workload), whole))
        outcomes = [found for workload in workloads for found in results.of(name, workload)]
        attempts, shrinks = (sum(getattr(found, key) for found in outcomes) for key in ("shrink_attempts", "shrinks"))
        shown = [f"{value:.1f}" for value in by_workload]
        rows.append(
            [f"b{batch}", total, *shown, f"{attempts:,}", f"{shrinks:,}", percent(attempts - shrinks, attempts)]
        )
    header = ["batch", "OOMs, published / here", *workloads, "migrations tried", "done", "refused %"]
    return format_table(header, rows)


def pair_cells(selection: Selection) -> list[Job]:
    """Both sides of the pairs, on the three workloads of the published intervals."""
    return [*selection.cells((FIXED, AVMP), claims.without_sharegpt(selection))]


def bootstrap(results: Results, comparison: Comparison) -> str:
    """Paired intervals of the difference in out-of-memory counts."""
    workloads = claims.without_sharegpt(results.selection)
    if not workloads:
        return "needs one of the three workloads that the published intervals are made of"
    deltas = {name: _deltas(results, name) for name in workloads}
    groups = {"all": [delta for name in workloads for delta in deltas[name]]} | deltas
    rows = []
    for name, values in groups.items():
        mean, low, high = paired_bootstrap(values)
        row = [name, f"{len(values)}", f"{mean:+.2f}", f"[{low:.2f}, {high:.2f}]", "-"]
        if results.selection.is_whole and len(workloads) == 3:
            published = BOOTSTRAP[name]
            row[-1] = f"{published[0]:+.2f} [{published[1]:.2f}, {published[2]:.2f}]"
            comparison.check(f"mean difference, {name}", f"{published[0]:.2f}", f"{mean:.2f}")
            near = all(abs(a - b) <= CI_TOLERANCE for a, b in zip(published[1:], (low, high), strict=True))
            comparison.check(f"interval, {name}: within {CI_TOLERANCE} of {published[1:]}", True, near)
        rows.append(row)
    return format_table([f"OOMs, {AVMP} - {FIXED}", "pairs", "mean", "95 % interval", "published"], rows)


def _deltas(results: Results, workload: str) -> list[int]:
    pairs = zip(results.of(AVMP, workload), results.of(FIXED, workload), strict=True)
    return [ours.oom - theirs.oom for ours, theirs in pairs]


def phase_cells(selection: Selection) -> list[Job]:
    """The two variants whose phases were published."""
    return [*selection.cells((FIXED, AVMP))]


def phases(results: Results, comparison: Comparison) -> str:
    """Where calls and CPU time go; attempts that fail are in."""
    rows = []
    for name in (FIXED, AVMP):
        for workload in results.selection.workloads:
            outcomes = results.of(name, workload)
            rows.append([f"{name} {workload}", *_counts(outcomes), *_seconds(outcomes)])
            rows[-1].append(PHASES.get((name, workload), "-"))
    calls = ["calls", "at once %", "by eviction %", "by migration %", "failed %"]
    return format_table(["all cells", *calls, "CPU % service / retry / migration", "published CPU %"], rows)


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    calls = sum(found.calls for found in outcomes)
    keys = ("served", "served_by_eviction", "served_by_shrink", "oom")
    shares = [f"{100 * sum(getattr(found, key) for found in outcomes) / calls:.3f}" for key in keys]
    return [f"{calls:,}", *shares]


def _seconds(outcomes: Sequence[Outcome]) -> list[str]:
    whole, retry, shrink = (
        sum(getattr(found, key) for found in outcomes) for key in ("cpu_seconds", "retry_seconds", "shrink_seconds")
    )
    parts = (whole - retry - shrink, retry, shrink)
    return [" / ".join(f"{100 * part / whole:.1f}" for part in parts)]


VIEWS: dict[str, View] = {
    "totals": View("Out-of-memory counts: sums over models and pools of the mean of three seeds", grid, totals),
    "served-intact": View("Completed requests, and those that were never stripped of memory", grid, served_intact),
    "refusals": View("Evictions, migrations tried and done, and bytes", grid, refusals),
    "batches": View("Batch sizes of avmp_dynamic", batch_cells, batches),
    "bootstrap": View("Paired bootstrap: 10,000 resamples, seed 20260520", pair_cells, bootstrap),
    "phases": View("Phases: shares of calls and of CPU time", phase_cells, phases),
    "throughput": View("Throughput: CPU time of the simulator", claims.throughput_cells, claims.throughput),
    "order": View("Evict first, migrate second", claims.order_cells, claims.order),
    "splits": View("Static splits, searched", claims.split_cells, claims.splits),
    "ratio": View("What a ratio of 0.9 means", claims.ratio_cells, claims.ratio),
    "padding": View(
        "Padding: one unit for both kinds, vLLM's inflated block, and avmp", claims.no_cells, claims.padding
    ),
    "lost-bytes": View("Bytes that migrations lose for ever", claims.lost_cells, claims.lost_bytes),
    "headroom": View("Honest headroom: requests completed per 1000 ticks", queues.queue_cells, queues.headroom_table),
    "queue": View("The same queue for a user", queues.searched_cells, queues.queue_table),
}
DEFAULT_VIEWS = ("totals", "served-intact", "refusals", "batches", "bootstrap", "phases")


def figures_for(names: Sequence[str], results: Results) -> dict[str, Any]:
    """What :mod:`bench.paper.figures` draws of the views that were shown."""
    found: dict[str, Any] = {}
    workloads = results.selection.workloads
    if "totals" in names or "served-intact" in names:
        found["oom"] = {name: [results.mean_oom(name, workload) for workload in workloads] for name in VARIANTS}
        found["served"] = {name: [results.shares(name, workload) for workload in workloads] for name in VARIANTS}
    if "batches" in names:
        sweep = claims.without_sharegpt(results.selection)
        found["batches"] = {
            batch: sum(results.mean_oom(f"avmp_dynamic:{batch}", workload) for workload in sweep) for batch in BATCHES
        }
    if "headroom" in names:
        found["headroom"] = queues.rates(results)
    return found
