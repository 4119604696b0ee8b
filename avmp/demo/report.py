"""What the demo prints while it runs and afterwards, and the picture it draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from avmp.demo.engine import Engine, Moment
from avmp.demo.unpaged import Comparison
from avmp.errors import InvalidArgument
from avmp.text_table import format_table
from avmp.units import format_bytes


@dataclass(frozen=True)
class DemoResult:
    """What one run came to. ``boundary_up`` and ``boundary_down`` count steps in which the states' side of the arena
    grew and shrank."""

    requests: int
    refused: int
    answers: int
    steps: int
    tokens_computed: int
    tokens_wanted: int
    seconds: float
    preemptions: int
    most_running: int
    boundary_up: int
    boundary_down: int
    retractions: int
    migrations: int
    bytes_moved: int
    tail_copies: int
    arena_bytes: int
    peak_used_bytes: int
    compared: Comparison

    @property
    def equal(self) -> bool:
        """Whether every token that was asked for is there, and is what an unpaged run produces."""
        return self.compared.different == 0 and self.compared.tokens == self.tokens_wanted


def result_of(engine: Engine, seconds: float, compared: Comparison) -> DemoResult:
    """The figures of a run that has ended."""
    stats, history = engine.pool.stats(), engine.history
    boundary = np.diff([moment.slots_extent_bytes for moment in history])
    return DemoResult(
        requests=len({answer.request.number for answer in engine.finished}),
        refused=len(engine.refused),
        answers=len(engine.finished),
        steps=engine.steps,
        tokens_computed=engine.tokens_computed,
        tokens_wanted=sum(one.output_tokens * one.samples for one in engine.requests if one not in engine.refused),
        seconds=seconds,
        preemptions=engine.preemptions,
        most_running=max((moment.running for moment in history), default=0),
        boundary_up=int((boundary > 0).sum()),
        boundary_down=int((boundary < 0).sum()),
        retractions=stats.retractions,
        migrations=stats.migrations,
        bytes_moved=stats.bytes_moved,
        tail_copies=stats.tail_copies,
        arena_bytes=engine.pool.layout.arena_bytes,
        peak_used_bytes=stats.peak_used_bytes,
        compared=compared,
    )


def live_line(stream: TextIO, arena_bytes: int) -> Callable[[Moment], None] | None:
    """One line that is rewritten every few steps; None where the stream is no terminal."""
    if not stream.isatty():
        return None

    def show(moment: Moment) -> None:
        if moment.step % 8:
            return
        print(
            f"\rstep {moment.step}: {moment.running} running, {moment.waiting} waiting, {moment.swapped} swapped; "
            f"{moment.pages} pages, {moment.slots} slots; boundary at {moment.slots_extent_bytes / arena_bytes:.0%}; "
            f"{moment.migrations} migrations\x1b[K",
            end="",
            file=stream,
            flush=True,
        )

    return show


def format_result(result: DemoResult) -> str:
    """A table for a terminal and for Markdown alike, and the verdict."""
    ties = f", {result.compared.ties} of them decided by less than float32 can tell" if result.compared.ties else ""
    rows = [
        ("requests served", f"{result.requests:,}"),
        ("answers (samples) served", f"{result.answers:,}"),
        ("requests refused", f"{result.refused:,}"),
        ("steps", f"{result.steps:,}"),
        ("tokens per second, prompts included", f"{result.tokens_computed / max(result.seconds, 1e-9):,.0f}"),
        ("most answers at once", f"{result.most_running:,}"),
        ("preemptions (swapped out)", f"{result.preemptions:,}"),
        ("boundary moved towards KV / towards states", f"{result.boundary_up:,} / {result.boundary_down:,} steps"),
        ("retractions that moved nothing", f"{result.retractions:,}"),
        ("migrations (retractions that moved live units)", f"{result.migrations:,}"),
        ("bytes moved by migrations", format_bytes(result.bytes_moved)),
        ("tail pages copied", f"{result.tail_copies:,}"),
        ("peak use", f"{result.peak_used_bytes / result.arena_bytes:.1%} of {format_bytes(result.arena_bytes)}"),
    ]
    wrong = result.compared.different + result.tokens_wanted - result.compared.tokens
    verdict = "yes" if result.equal else f"NO, {wrong:,} differ or are missing"
    return "\n".join(
        [
            format_table(["", "value"], rows),
            "",
            f"tokens equal to an unpaged run: {verdict} ({result.compared.tokens:,} tokens compared{ties})",
        ]
    )


def require_plots(path: Path) -> None:
    """Raises InvalidArgument where matplotlib is not installed, or the picture could not be written."""
    if find_spec("matplotlib") is None:
        raise InvalidArgument("--plot needs matplotlib; install the bench extra: pip install '.[bench]'")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise InvalidArgument(f"--plot {path}: expected a name that ends in .png, in a folder that exists")


def draw_memory(history: list[Moment], arena_bytes: int, path: Path) -> None:
    """Memory over time as a PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    steps = np.array([moment.step for moment in history])
    used: dict[str, Any] = {
        name: np.array([getattr(moment, name) for moment in history]) / arena_bytes
        for name in ("slot_bytes", "page_bytes", "slots_extent_bytes", "pages_extent_bytes")
    }
    moved = np.flatnonzero(np.diff([moment.bytes_moved for moment in history]))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, 0, used["slot_bytes"], color="tab:blue", alpha=0.7, lw=0, label="state slots in use")
    axes.fill_between(steps, 1 - used["page_bytes"], 1, color="tab:orange", alpha=0.7, lw=0, label="KV pages in use")
    axes.plot(steps, used["slots_extent_bytes"], color="navy", lw=1, label="the states' side ends")
    axes.plot(steps, 1 - used["pages_extent_bytes"], color="saddlebrown", lw=1, label="the KV side begins")
    axes.plot(steps[moved], used["slots_extent_bytes"][moved], "k|", ms=9, label="live units moved")
    axes.set(xlabel="step", ylabel="share of the arena", ylim=(0, 1), xlim=(0, len(steps)))
    axes.legend(loc="upper center", ncols=5, fontsize="small", bbox_to_anchor=(0.5, 1.13), frameon=False)
    figure.savefig(path, dpi=130)
