"""What comes of runs, in words: a table for each rate, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from avmp.serving.metrics import Latency, ServingResult, time_shares
from avmp.serving.roofline import FORMULA
from avmp.serving.served import Served
from avmp.serving.server import Server
from avmp.text_table import format_table
from avmp.units import format_bytes
from avmp.workloads import Trace

_SHOWN_LINES = 8


@dataclass(frozen=True)
class Run:
    """One policy at one rate; ``share`` and ``slots`` are those of the split that a search found."""

    rate: float | None
    policy: str
    share: float | None
    result: ServingResult
    served: Served
    slots: int | None = None


def _refused_lines(trace: Trace, result: ServingResult) -> list[int] | None:
    """Lines of the file that the refused requests stand on; None for a trace that comes from no file."""
    if trace.lines is None:
        return None
    lines: list[int] = trace.lines[list(result.refused_requests)].tolist()
    return lines


def as_lines(server: Server, trace: Trace, target: Latency, runs: list[Run], asked: Mapping[str, Any]) -> str:
    """One JSON object a line for each run, with all that it was run and judged by; ``asked`` is what of it the server
    does not know."""
    setting = {"trace": trace.name, **_setting(server), **asked, "target": asdict(target)}
    return "\n".join(
        json.dumps(
            {
                **setting,
                "rate": run.rate,
                "share": run.share,
                "slots": run.slots,
                "refused_lines": _refused_lines(trace, run.result),
                "busy_seconds": run.served.busy_seconds,
                "move_seconds": run.served.move_seconds,
                "swap_seconds": run.served.swap_seconds,
                "time_shares": time_shares(server.model, run.served),
                **run.result.as_dict(),
                "policy": run.policy,
            }
        )
        for run in runs
    )


def _setting(server: Server) -> dict[str, Any]:
    """The server, so that a run can be had again from its record alone."""
    model = server.model
    return {
        "model": model.geometry.name,
        "page_tokens": model.geometry.page_tokens,
        "costs": asdict(model.costs),
        "device": model.device.name,
        "device_figures": asdict(model.device),
        "tp": model.tp_size,
        "assumptions": asdict(model.assumptions),
        "arena_bytes": server.layout.arena_bytes,
        "engine": asdict(server.rules),
        "options": asdict(server.options),
    }


_COLUMNS: tuple[tuple[str, Callable[[ServingResult], str]], ...] = (
    ("requests/s", lambda r: f"{r.requests_per_second:,.3f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_second:,.1f}"),
    ("good/s", lambda r: f"{r.good_requests_per_second:,.3f}"),
    ("first token p50/p90/p99 s", lambda r: _three(r.first_token, 1, 2)),
    ("between tokens p50/p90/p99 ms", lambda r: _three(r.between_tokens, 1e3, 1)),
    ("queueing p99 s", lambda r: f"{r.queueing['p99']:,.2f}"),
    ("batch mean/most", lambda r: f"{r.mean_batch:,.1f}/{r.most_batch:,}"),
    ("preempted", lambda r: f"{r.preemptions:,}"),
    ("tokens again", lambda r: f"{r.recomputed_tokens:,}"),
    ("refused", lambda r: f"{r.refused:,}"),
    ("used mean/most", lambda r: f"{r.used_share['mean']:.0%}/{r.used_share['most']:.0%}"),
    ("moves", lambda r: f"{r.migrations:,}"),
    ("moved", lambda r: format_bytes(r.bytes_moved)),
    ("time for moves", lambda r: f"{r.move_share:.3%}"),
    ("digest", lambda r: r.digest),
)


def _three(quantiles: dict[str, float], factor: float, decimals: int) -> str:
    return "/".join(f"{factor * value:,.{decimals}f}" for value in quantiles.values())


def as_text(server: Server, trace: Trace, target: Latency, runs: list[Run]) -> str:
    """What was simulated, and a table for each rate."""
    rates = list(dict.fromkeys(run.rate for run in runs))
    parts = [
        f"{trace.name}: {len(trace):,} requests, {int(trace.prompt_tokens.sum()):,} prompt and "
        f"{int(trace.output_tokens.sum()):,} output tokens",
        server.model.geometry.describe(),
        server.model.describe(),
        f"arena of {format_bytes(server.layout.arena_bytes)} on each device; steps of at most "
        f"{server.rules.token_budget:,} tokens and {server.rules.max_batch:,} requests, preemption by "
        f"{server.rules.preemption}, a reserve of {server.rules.reserve_tokens} tokens a running request",
        "Simulated time from this model of a step, nothing was measured:",
        FORMULA,
        f"good: first token within {target.first_token_seconds:g} s, {target.per_token_seconds:g} s a token after it",
    ]
    for rate in rates:
        chosen = [run for run in runs if run.rate == rate]
        rows = [[_label(run), *(show(run.result) for _, show in _COLUMNS)] for run in chosen]
        heading = "Arrivals as they are:" if rate is None else f"{rate:g} requests per second offered:"
        parts += ["", heading, format_table(["policy", *(title for title, _ in _COLUMNS)], rows)]
        parts += ["", "What the time of steps went to:", _time_table(server, chosen)]
        parts += [line for run in chosen for line in _describe_refused(trace, run)]
    return "\n".join(parts)


def _time_table(server: Server, runs: list[Run]) -> str:
    shares = [time_shares(server.model, run.served) for run in runs]
    rows = [[_label(run), *(f"{part:.1%}" for part in each.values())] for run, each in zip(runs, shares, strict=True)]
    return format_table(["policy", *shares[0]], rows)


def _label(run: Run) -> str:
    return run.policy if run.share is None else f"{run.policy} ({run.share:.3f})"


def _describe_refused(trace: Trace, run: Run) -> list[str]:
    if not run.result.refused:
        return []
    lines = _refused_lines(trace, run.result)
    what, places = ("requests", list(run.result.refused_requests)) if lines is None else ("lines", lines)
    shown = ", ".join(str(place) for place in places[:_SHOWN_LINES])
    more = f" and {len(places) - _SHOWN_LINES:,} more" if len(places) > _SHOWN_LINES else ""
    return [
        f"{run.policy} refuses {run.result.refused:,}, as it could not hold them even alone or the model is not made "
        f"for them: {what} {shown}{more}"
    ]
