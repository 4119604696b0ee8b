"""PNG figures of simulated runs. matplotlib (the ``bench`` extra) is needed only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from avmp.errors import InvalidArgument
from avmp.serving.metrics import ServingResult, first_token_seconds
from avmp.serving.planning import ServingPlan
from avmp.serving.served import Served

_DOTS_PER_INCH = 120


def require_plots() -> None:
    """Raises InvalidArgument where matplotlib is not installed: before anything is computed, not after."""
    if find_spec("matplotlib") is None:
        raise InvalidArgument("--plot needs matplotlib; install the bench extra: pip install '.[bench]'")


def draw_runs(path: Path, served: Mapping[str, Served], results: Sequence[tuple[float | None, ServingResult]]) -> None:
    """Memory over time of the first policy, the distribution of times to first token of all (both at the last rate),
    and tokens per second by rate where there are several. ``served`` is by policy, ``results`` by rate and policy."""
    from matplotlib.figure import Figure

    rates = {rate for rate, _ in results}
    columns = 3 if len(rates) > 1 else 2
    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    axes = figure.subplots(1, columns)
    first = next(iter(served.values()))
    _memory(axes[0], first)
    _latencies(axes[1], served)
    if len(rates) > 1:
        _throughput(axes[2], results)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def draw_plan(path: Path, plan: ServingPlan) -> None:
    """Requests per second under full load, and what memory is used for, by policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    rates, memory = figure.subplots(1, 2)
    names = [expectation.rule for expectation in plan.expectations]
    rates.barh(names, [expectation.requests_per_second for expectation in plan.expectations], color="tab:green")
    rates.set(title="under full load", xlabel="requests per second")
    states = [expectation.state_share for expectation in plan.expectations]
    memory.barh(names, states, color="tab:blue", label="states")
    kv = [expectation.kv_share for expectation in plan.expectations]
    memory.barh(names, kv, left=states, color="tab:orange", label="KV")
    memory.set(title="memory in use", xlabel="share of the arena", xlim=(0, 1))
    memory.legend(fontsize="small")
    for axes in (rates, memory):
        axes.invert_yaxis()
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _memory(axes: Any, served: Served) -> None:
    """States from below, KV from above, as shares of the arena; lines where the two sides end."""
    seconds = np.array([sample.seconds for sample in served.samples])
    shares = {
        name: np.array([getattr(sample, name) for sample in served.samples]) / served.arena_bytes
        for name in ("state_used", "kv_used", "state_extent", "kv_extent")
    }
    axes.fill_between(seconds, 0, shares["state_used"], color="tab:blue", alpha=0.7, lw=0, label="states in use")
    axes.fill_between(seconds, 1 - shares["kv_used"], 1, color="tab:orange", alpha=0.7, lw=0, label="KV in use")
    axes.plot(seconds, shares["state_extent"], color="navy", lw=1, label="the states' side ends")
    axes.plot(seconds, 1 - shares["kv_extent"], color="saddlebrown", lw=1, label="the KV side begins")
    axes.set(title=f"memory under {served.policy}", xlabel="seconds", ylabel="share of the arena", ylim=(0, 1))
    axes.legend(fontsize="small")


def _latencies(axes: Any, served: Mapping[str, Served]) -> None:
    for name, run in served.items():
        waits = np.sort(first_token_seconds(run))
        if len(waits):
            axes.step(waits, (np.arange(len(waits)) + 1) / len(waits), where="post", label=name)
    axes.set(title="time to first token", xlabel="seconds", ylabel="share of requests", ylim=(0, 1))
    axes.set_xscale("log")
    if axes.lines:  # nobody may have had a token
        axes.legend(fontsize="small")


def _throughput(axes: Any, results: Sequence[tuple[float | None, ServingResult]]) -> None:
    for name in dict.fromkeys(result.policy for _, result in results):
        points = sorted((rate, result.tokens_per_second) for rate, result in results if rate and result.policy == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(title="throughput", xlabel="requests per second offered", ylabel="output tokens per second")
    axes.legend(fontsize="small")
