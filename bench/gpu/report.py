"""What a record says, for the eye: a few lines of text, and one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from avmp.text_table import format_table

Record = dict[str, Any]

EAGER = "*"
"""Stands at a figure that was taken without a CUDA graph: the host's time is in it."""
EAGER_NOTE = f"{EAGER} not captured into a CUDA graph: the host's time is in it"


def summary(record: Record) -> str:
    """What went wrong, what was dropped, and the figures in short. A dry run has none: nothing was measured."""
    lines = []
    for section in record["sections"]:
        bad = [row["name"] for row in section["rows"] if "error_text" in row or not row.get("ok", True)]
        dropped = f", {len(section['dropped'])} dropped" if section["dropped"] else ""
        lines.append(f"{section['name']}: {section['status']}, {len(section['rows'])} rows{dropped}")
        lines += [f"  failed: {name}" for name in bad]
    if not record["measured"]:
        return "\n".join([*lines, "a dry run: nothing was measured"])
    shares = [
        (row["name"], *(_number(row[figure], row) for figure in ("median_us", "gb_per_second", "share_of_copy")))
        for row in rows(record, "bandwidth")
        if "share_of_copy" in row
    ]
    decode = [
        (
            row["name"],
            *(_number(value, mine) for value in (mine["median_us"], row["share_of_copy"])),
            *(
                _number(row["times_as_long_as"].get(name), mine, row["timings"].get(name, mine))
                for name in ("sdpa", "physical ids", "plain pages")
            ),
        )
        for row in rows(record, "decode")
        if "timings" in row
        for mine in (row["timings"]["avmp"],)
    ]
    tables = [
        format_table(("operation", "µs", "GB/s", "of copy_"), shares),
        format_table(("decode", "µs", "of copy_", "/ sdpa", "/ physical ids", "/ plain pages"), decode),
    ]
    drift = [
        f"{row['name']}: {_number(row['share_of_first'], row)} of its speed at the beginning"
        for row in rows(record, "drift")
        if "share_of_first" in row
    ]
    return "\n".join([*lines, *tables, *drift, *([EAGER_NOTE] if EAGER in "".join([*tables, *drift]) else [])])


def eager(*timings: dict[str, Any]) -> bool:
    """Whether one of them was taken without a CUDA graph."""
    return any(one.get("captured") is not True for one in timings)


def rows(record: Record, name: str) -> list[Record]:
    """The rows of a section."""
    return next((section["rows"] for section in record["sections"] if section["name"] == name), [])


def _number(value: float | None, *timings: dict[str, Any]) -> str:
    """A figure, marked if one of the timings that it comes from was eager."""
    if value is None:
        return "-"
    return (f"{value:.3g}" if value < 100 else f"{value:.0f}") + (EAGER if eager(*timings) else "")


def draw(record: Record, path: Path) -> str | None:
    """One PNG: shares of the copy bandwidth, and decode beside torch's attention. Returns why there is none; nothing
    is raised, since the record is worth as much without."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError as error:
        return f"matplotlib cannot be imported: {error}"
    try:
        _draw(record, path)
    except Exception as error:
        path.unlink(missing_ok=True)
        return f"{type(error).__name__}: {error}"
    return None


def _draw(record: Record, path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(16, 8))
    moved = [row for row in rows(record, "bandwidth") if row.get("share_of_copy") is not None][::-1]
    names = [row["name"] + (EAGER if eager(row) else "") for row in moved]
    left.barh(names, [row["share_of_copy"] for row in moved])
    left.axvline(1.0, color="black", linewidth=1)
    left.set_xlabel("share of the bandwidth of torch's copy_")
    decoded = [row for row in rows(record, "decode") if row.get("share_of_copy") is not None and row["page"] == 16]
    for batch in sorted({row["batch"] for row in decoded}):
        line = sorted(
            ((row["context"], row["kv_bytes"], row["timings"]) for row in decoded if row["batch"] == batch),
            key=lambda found: found[0],
        )
        for name, style in (("avmp", "-o"), ("sdpa", ":x")):
            speeds = [size / timings[name]["median_us"] / 1e3 for _, size, timings in line]
            contexts = [context for context, _, _ in line]
            right.plot(contexts, speeds, style, label=f"{name}, batch {batch}")
            for context, speed, (_, _, timings) in zip(contexts, speeds, line, strict=True):
                if eager(timings[name]):
                    right.annotate(EAGER, (context, speed), fontsize=16)
    right.set_xscale("log", base=2)
    right.set_xlabel("context, pages of 16 tokens")
    right.set_ylabel("GB/s of keys and values")
    if decoded:
        right.legend()
    figure.suptitle(record["machine"]["device"] if record["measured"] else "a dry run: nothing was measured")
    if any(eager(row) for row in moved) or any(eager(*row["timings"].values()) for row in decoded):
        figure.text(0.01, 0.01, EAGER_NOTE)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
