"""What the published metric hides: one view for each point that the grid itself does not show."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from avmp.baselines import AllocatorPolicy, InflatedBlock, InflatedBlockRule, PolicySetup
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.paper import LayerUnits, Outcome, variant
from avmp.text_table import format_table
from avmp.units import ceil_div, parse_bytes
from bench.paper.jobs import Cell, Job, Selection
from bench.paper.published import (
    BATCHES,
    CORRECT_FREES,
    OOM_TOTAL,
    SPLITS,
    THROUGHPUT,
    WHOLE_REQUESTS,
    Comparison,
)
from bench.paper.results import Results, beside, percent, scaled

SHARES = ("0.05", "0.1", "0.15", "0.2", "0.25", "0.3", "0.35", "0.4", "0.45", "9/19", "0.5", "0.6", "0.7", "0.8", "0.9")
PROMPT_TOKENS = 1024
START_SHARE = "0"


def without_sharegpt(selection: Selection) -> list[str]:
    """The three workloads that the published sums, sweep and intervals are made of."""
    return [name for name in selection.workloads if name != "sharegpt_replay"]


def no_cells(selection: Selection) -> list[Job]:
    """Nothing has to run."""
    return []


def throughput_cells(selection: Selection) -> list[Job]:
    """Equal decisions with two searches for victims, and the one they are compared with."""
    return [*selection.cells(("fixed_dual_scanned", "fixed_dual_mr05", "avmp_dynamic_b128"))]


def throughput(results: Results, comparison: Comparison) -> str:
    """CPU seconds, and the ratios that were published as throughput."""
    rows = []
    for workload in results.selection.workloads:
        scanned, indexed, ours = (
            results.of(name, workload) for name in ("fixed_dual_scanned", "fixed_dual_mr05", "avmp_dynamic_b128")
        )
        for slow, fast in zip(scanned, indexed, strict=True):
            comparison.require(f"{workload}: both searches end with the same OOMs", slow.oom == fast.oom)
        seconds = [sum(found.cpu_seconds for found in outcomes) for outcomes in (scanned, indexed, ours)]
        ratios = [f"{seconds[0] / seconds[2]:.2f}", f"{seconds[1] / seconds[2]:.2f}"]
        rows.append([workload, *(f"{value:.2f}" for value in seconds), f"{THROUGHPUT[workload]}", *ratios])
    header = ["CPU seconds", "fixed_dual, scan", "fixed_dual, index", "avmp_dynamic", "published ratio"]
    return format_table([*header, "scan / avmp", "index / avmp"], rows)


def order_cells(selection: Selection) -> list[Job]:
    """The dynamic variant."""
    return [*selection.cells(("avmp_dynamic_b128",))]


def order(results: Results, comparison: Comparison) -> str:
    """Victims stripped at a moment when the other pool could have given the bytes."""
    rows = []
    for workload in results.selection.workloads:
        outcomes = results.of("avmp_dynamic_b128", workload)
        evictions, room, empty = (
            _sum(outcomes, key) for key in ("evictions", "evictions_beside_room", "evictions_beside_empty")
        )
        done = _sum(outcomes, "shrinks")
        rows.append([workload, f"{evictions:,}", f"{room:,}", percent(room, evictions), f"{empty:,}", f"{done:,}"])
    header = ["avmp_dynamic_b128", "victims", "other pool had the bytes", "%", "other pool was empty", "migrations"]
    return format_table(header, rows)


def _sum(outcomes: Sequence[Outcome], key: str) -> int:
    return sum(int(getattr(found, key)) for found in outcomes)


def split_cells(selection: Selection) -> list[Job]:
    """Shares of states, and the rule that strips whole requests."""
    names = [*(f"fixed_dual:{share}" for share in SHARES), "avmp_dynamic_b128", "whole_requests"]
    correct = selection.cells(("padded_correct_frees",))
    return [*selection.cells(names, without_sharegpt(selection)), *correct]


def splits(results: Results, comparison: Comparison) -> str:
    """Out-of-memory counts of static splits beside those of the dynamic one, and two rules that are not published."""
    workloads = without_sharegpt(results.selection)
    names = {f"fixed_dual:{share}": SPLITS.get(share) for share in SHARES}
    names |= {"avmp_dynamic_b128": OOM_TOTAL["avmp_dynamic_b128"], "whole_requests": WHOLE_REQUESTS}
    rows = []
    for name, published in names.items():
        counts = [results.mean_oom(name, workload) for workload in workloads]
        whole = len(workloads) == 3 and results.selection.is_whole
        total = results.compare(comparison, f"{name} OOM", beside(published, sum(counts), whole))
        outcomes = [found for workload in workloads for found in results.of(name, workload)]
        intact = percent(_sum(outcomes, "served_intact"), _sum(outcomes, "requests"))
        rows.append([name, total, *(f"{value:.1f}" for value in counts), intact])
    table = format_table(["OOMs", "published / here", *workloads, "intact %"], rows)
    correct = [
        results.compare(
            comparison,
            f"padded_unified with correct frees, {workload} OOM",
            beside(
                CORRECT_FREES[workload],
                results.mean_oom("padded_correct_frees", workload),
                results.comparable(workload),
            ),
        )
        for workload in results.selection.workloads
    ]
    fault = format_table(
        ["OOMs, published / here", *results.selection.workloads], [["padded, correct frees", *correct]]
    )
    return f"{table}\n\n{fault}"


def ratio_cells(selection: Selection) -> list[Job]:
    """SGLang's default ratio, read as the paper does and as SGLang does."""
    return [*selection.cells(("fixed_dual_mr09", "fixed_dual:9/19"), without_sharegpt(selection))]


def ratio(results: Results, comparison: Comparison) -> str:
    """A ratio r of states to KV is a share of r / (1 + r)."""
    rows = []
    workloads = without_sharegpt(results.selection)
    whole = len(workloads) == 3 and results.selection.is_whole
    readings = (
        ("0.9 of the memory for states (the paper)", "fixed_dual_mr09", OOM_TOTAL["fixed_dual_mr09"], Fraction(9, 10)),
        ("0.9 to 1, states to KV (SGLang)", "fixed_dual:9/19", SPLITS["9/19"], Fraction(9, 19)),
    )
    for reading, name, published, share in readings:
        total = sum(results.mean_oom(name, workload) for workload in workloads)
        shown = results.compare(comparison, f"{name} OOM", beside(published, total, whole))
        rows.append([reading, f"{float(share):.3f}", shown])
    return format_table(["ratio", "share of states", "OOMs, published / here"], rows)


def padding(results: Results, comparison: Comparison) -> str:
    """Units and capacities of three ways to hold both kinds in one memory."""
    rows = []
    for model in results.selection.models:
        geometry = named_model(model)
        units, rule = LayerUnits.of(geometry), InflatedBlockRule.of(geometry)
        unit_bytes = max(units.page_bytes, units.state_bytes)
        for pool in results.selection.pools:
            setup = PolicySetup(Layout.plan(geometry, pool), PROMPT_TOKENS, 65536)
            pages = units.attention_layers * ceil_div(PROMPT_TOKENS, geometry.page_tokens)
            padded = parse_bytes(pool) // unit_bytes // (pages + units.state_layers)
            inflated = InflatedBlock(setup).max_sequences(PROMPT_TOKENS)
            ours = AllocatorPolicy(setup).max_sequences(PROMPT_TOKENS)
            rows.append(
                [
                    f"{model} {pool}",
                    f"{unit_bytes / units.page_bytes:.0f}x",
                    f"{rule.block_tokens:,}",
                    f"{rule.state_padding:.1%}",
                    *(f"{count:,}" for count in (padded, inflated, ours)),
                ]
            )
    header = ["model and pool", "KV page padded by", "vLLM: tokens a block", "its state padding"]
    held = [f"{name}: sequences of {PROMPT_TOKENS:,}" for name in ("padded", "vLLM", "avmp")]
    return format_table([*header, *held], rows)


def lost_cells(selection: Selection) -> list[Job]:
    """The sweep again on one workload, starting without state capacity. Where there is some, a state is short of one
    unit, which any victim frees, so that the published cells never get as far as giving KV pages to states."""
    names = [f"avmp_dynamic:{batch}:{START_SHARE}" for batch in BATCHES]
    return [*selection.cells(names, selection.workloads[:1])]


def lost_bytes(results: Results, comparison: Comparison) -> str:
    """Capacity that nobody has any more at the end, beyond what whole units leave over at the start."""
    rows = []
    workloads = results.selection.workloads[:1]
    for batch in BATCHES:
        name = f"avmp_dynamic:{batch}:{START_SHARE}"
        row = [f"b{batch}", scaled(batch * LayerUnits.of(named_model("paper_jamba")).page_bytes)]
        for model in results.selection.models:
            cells = [cell for cell in results.selection.cells([name], workloads) if cell.model == model]
            lost = [_lost(cell, results.found[cell]) for cell in cells]
            row += [f"{sum(size > 0 for size in lost)} of {len(lost)}", scaled(sum(lost)), scaled(max(lost))]
        rows.append(row)
    columns = ("runs that lose", "lost in all", "most in a run")
    header = [f"{model}: {what}" for model in results.selection.models for what in columns]
    return format_table([f"{workloads[0]}, batch", "KV given up", *header], rows)


def _lost(cell: Cell, outcome: Outcome) -> int:
    units = LayerUnits.of(named_model(cell.model))
    at_first = sum(variant(cell.variant)(units, parse_bytes(cell.pool)).pool_bytes())
    return at_first - outcome.kv_pool_bytes - outcome.state_pool_bytes
