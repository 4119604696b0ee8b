"""PNG figures beside the tables. matplotlib (the ``bench`` extra) is needed only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from avmp.errors import Unsupported

INCHES = (9, 5)


def require_matplotlib() -> None:
    """Raises Unsupported without it: before anything is computed, not after."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unsupported("--out needs matplotlib: install the bench extra, or leave --out away") from error
    matplotlib.use("Agg")


def draw(data: dict[str, Any], workloads: tuple[str, ...], folder: Path) -> list[Path]:
    """One file for each figure that there is data for. Raises Unsupported without matplotlib."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, function in (("oom", _oom), ("served", _served), ("batches", _batches), ("headroom", _headroom)):
        if data.get(name):
            drawn.append(folder / f"{name}.png")
            _save(drawn[-1], function, data[name], workloads)
    return drawn


def _save(path: Path, function: Any, data: Any, workloads: tuple[str, ...]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=INCHES, layout="constrained")
    function(axes, data, workloads)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes: Any, groups: list[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        axes.bar([place + (number + 0.5) * width - 0.4 for place in range(len(groups))], values, width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize="small")


def _oom(axes: Any, data: dict[str, list[float]], workloads: tuple[str, ...]) -> None:
    _bars(axes, list(workloads), data)
    axes.set(title="Failed allocations: sum over models and pools, mean of the seeds", ylabel="count")


def _served(axes: Any, data: dict[str, list[tuple[float, float]]], workloads: tuple[str, ...]) -> None:
    series = {}
    for variant in ("fixed_dual_mr05", "avmp_dynamic_b128"):
        for number, what in enumerate(("completed", "never stripped")):
            series[f"{variant}, {what}"] = [100 * shares[number] for shares in data[variant]]
    _bars(axes, list(workloads), series)
    axes.set(title="Requests counted as completed, and those that kept their memory", ylabel="%", ylim=(0, 105))


def _batches(axes: Any, data: dict[int, float], workloads: tuple[str, ...]) -> None:
    axes.plot(list(data), list(data.values()), marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(data), [f"b{batch}" for batch in data])
    axes.set(title="avmp_dynamic: failed allocations by batch size", ylabel="count")


def _headroom(axes: Any, data: dict[str, dict[str, float]], workloads: tuple[str, ...]) -> None:
    """Rates as shares of the plain byte budget, so that cells of different load can stand side by side."""
    names = [name for name in next(iter(data.values())) if name != "plain budget"]
    series = {name: [cell[name] / cell["plain budget"] for cell in data.values()] for name in names}
    _bars(axes, [cell.replace(" ", "\n") for cell in data], series)
    axes.tick_params(axis="x", labelsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(
        title="Requests completed per 1000 ticks, as a share of a plain byte budget, if all are held", ylabel="share"
    )
