"""What to expect of a server before there is one: every policy under full load on requests like those to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from avmp.errors import Unsupported
from avmp.serving.arrivals import at_once
from avmp.serving.metrics import summarize
from avmp.serving.served import Served
from avmp.serving.server import Server, sustained_rate
from avmp.text_table import format_table
from avmp.units import format_bytes
from avmp.workloads import Trace

RULES = ("avmp", "best-static", "sglang", "sglang-unified", "vllm", "vllm-align", "padded", "paper", "oracle")


@dataclass(frozen=True)
class Expectation:
    """One policy under full load. Shares are of the arena, in the mean over the middle of the run: what states and KV
    hold, padding inside units included. ``sequences`` is the mean batch there. ``split`` is the share for states that
    a static split has; None for the others. ``gain_of_avmp`` is in requests per second."""

    rule: str
    split: float | None
    state_share: float
    kv_share: float
    sequences: float
    requests_per_second: float
    tokens_per_second: float
    refused: int
    gain_of_avmp: float | None


@dataclass(frozen=True)
class ServingPlan:
    """What was asked, and what to expect of each policy. ``left_out`` names rules that the model does not suit."""

    trace: Trace
    server: Server
    expectations: tuple[Expectation, ...]
    left_out: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        model = self.server.model
        return {
            "trace": self.trace.name,
            "requests": len(self.trace),
            "device": model.device.name,
            "tp": model.tp_size,
            "arena_bytes": self.server.layout.arena_bytes,
            "rules": [asdict(expectation) for expectation in self.expectations],
            "left_out": self.left_out,
        }


def plan_serving(server: Server, trace: Trace, on_rule: Callable[[int], None] | None = None) -> ServingPlan:
    """Serves the requests of the trace, all of them waiting, under each rule. ``on_rule`` is told how many are done."""
    waiting = at_once(trace)
    expectations: list[Expectation] = []
    left_out: dict[str, str] = {}
    for done, rule in enumerate(RULES, start=1):
        try:
            expectations.append(_expect(server, waiting, rule))
        except Unsupported as error:
            left_out[rule] = str(error)
        if on_rule is not None:
            on_rule(done)
    own = expectations[0].requests_per_second
    return ServingPlan(trace, server, tuple(_with_gain(expectation, own) for expectation in expectations), left_out)


def _expect(server: Server, trace: Trace, rule: str) -> Expectation:
    best = server.best_static_of(trace) if rule == "best-static" else None
    served = server.serve(rule, trace) if best is None else best.served
    middle = _middle(served)
    return Expectation(
        rule=rule,
        split=None if best is None else float(best.share),
        state_share=_mean([served.samples[at].state_used for at in middle]) / served.arena_bytes,
        kv_share=_mean([served.samples[at].kv_used for at in middle]) / served.arena_bytes,
        sequences=_mean([served.samples[at].batch for at in middle]),
        requests_per_second=sustained_rate(served),
        tokens_per_second=summarize(served).tokens_per_second,
        refused=len(served.refused),
        gain_of_avmp=None,
    )


def _with_gain(expectation: Expectation, own: float) -> Expectation:
    rate = expectation.requests_per_second
    gain = own / rate - 1 if rate and expectation.rule != "avmp" else None
    return Expectation(**(asdict(expectation) | {"gain_of_avmp": gain}))


def _middle(served: Served) -> list[int]:
    """The samples between the first and the last tenth of the completions; all of them where there are none."""
    times = np.sort(served.finished[~np.isnan(served.finished)])
    seconds = np.array([sample.seconds for sample in served.samples])
    if len(times) < 2:
        return list(range(len(seconds)))
    low, high = times[len(times) // 10], times[len(times) - 1 - len(times) // 10]
    found = np.flatnonzero((seconds >= low) & (seconds <= high)).tolist()
    return found or list(range(len(seconds)))


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else 0.0


def format_serving_plan(plan: ServingPlan) -> str:
    """For a terminal and for Markdown alike."""
    rows = [
        [
            f"{e.rule} ({e.split:.3f})" if e.split is not None else e.rule,
            f"{e.state_share:.1%}",
            f"{e.kv_share:.1%}",
            f"{e.sequences:,.1f}",
            f"{e.requests_per_second:,.3f}",
            f"{e.tokens_per_second:,.0f}",
            f"{e.refused:,}",
            "-" if e.gain_of_avmp is None else f"{round(e.gain_of_avmp, 3) + 0.0:+.1%}",
        ]
        for e in plan.expectations
    ]
    header = ["policy", "states hold", "KV holds", "sequences", "requests/s", "tokens/s", "refused", "avmp gains"]
    return "\n".join(
        [
            f"Under full load with {len(plan.trace):,} requests of {plan.trace.name}, in an arena of "
            f"{format_bytes(plan.server.layout.arena_bytes)}, from a model of a step's time:",
            plan.server.model.describe(),
            format_table(header, rows),
            *(f"without {rule}: {reason}" for rule, reason in plan.left_out.items()),
        ]
    )
