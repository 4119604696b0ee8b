"""The figure of the study. matplotlib (the ``bench`` extra) is needed only here."""

from __future__ import annotations

from pathlib import Path

from bench.serving.grid import LOADS, MODELS, TRACES
from bench.serving.study import Study

FIGURE = Path(__file__).resolve().parent.parent / "results" / "serving.png"


def draw(study: Study, path: Path = FIGURE) -> bool:
    """Gains at the highest load, one bar for each comparison; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    others = ("vllm", "best-static", "oracle")
    cells = [(model, trace) for model in MODELS for trace in TRACES if study.get(model, trace, LOADS[-1], "avmp")]
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(others)
    for number, other in enumerate(others):
        gains = [study.gain(model, trace, LOADS[-1], other) for model, trace in cells]
        places = [at + (number - 1) * width for at in range(len(cells))]
        heights = [100 * gain.gain if gain else 0.0 for gain in gains]
        spans = [
            [abs(h - 100 * g.low), abs(100 * g.high - h)] if g else [0.0, 0.0]
            for h, g in zip(heights, gains, strict=True)
        ]
        axes.bar(places, heights, width, label=f"over {other}", yerr=list(zip(*spans, strict=True)), capsize=1)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(
        range(len(cells)), [f"{model}\n{trace}" for model, trace in cells], rotation=60, ha="right", fontsize=7
    )
    axes.set(ylabel="output tokens per second, %", title=f"avmp at {LOADS[-1]:g}x the oracle's capacity (simulated)")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
