"""What a record says, for the eye: a few lines of text, and one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from avmp.text_table import format_table

Record = dict[str, Any]


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
        (row["name"], _number(row["median_us"]), _number(row["gb_per_second"]), _number(row["share_of_copy"]))
        for row in rows(record, "bandwidth")
        if "share_of_copy" in row
    ]
    decode = [
        (
            row["name"],
            *map(_number, (row["timings"]["avmp"]["median_us"], row["share_of_copy"])),
            *(_number(row["times_as_long_as"].get(name)) for name in ("sdpa", "physical ids", "plain pages")),
        )
        for row in rows(record, "decode")
        if "timings" in row
    ]
    return "\n".join(
        [
            *lines,
            format_table(("operation", "µs", "GB/s", "of copy_"), shares),
            format_table(("decode", "µs", "of copy_", "/ sdpa", "/ physical ids", "/ plain pages"), decode),
        ]
    )


def rows(record: Record, name: str) -> list[Record]:
    """The rows of a section."""
    return next((section["rows"] for section in record["sections"] if section["name"] == name), [])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def draw(record: Record, path: Path) -> str | None:
    """One PNG: shares of the copy bandwidth, and decode beside torch's attention. Returns why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"matplotlib cannot be imported: {error}"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(16, 8))
    moved = [row for row in rows(record, "bandwidth") if row.get("share_of_copy") is not None][::-1]
    left.barh([row["name"] for row in moved], [row["share_of_copy"] for row in moved])
    left.axvline(1.0, color="black", linewidth=1)
    left.set_xlabel("share of the bandwidth of torch's copy_")
    decoded = [row for row in rows(record, "decode") if row.get("share_of_copy") is not None and row["page"] == 16]
    for batch in sorted({row["batch"] for row in decoded}):
        line = sorted((row["context"], row["kv_bytes"], row["timings"]) for row in decoded if row["batch"] == batch)
        for name, style in (("avmp", "-o"), ("sdpa", ":x")):
            speeds = [size / timings[name]["median_us"] / 1e3 for _, size, timings in line]
            right.plot([context for context, _, _ in line], speeds, style, label=f"{name}, batch {batch}")
    right.set_xscale("log", base=2)
    right.set_xlabel("context, pages of 16 tokens")
    right.set_ylabel("GB/s of keys and values")
    if decoded:
        right.legend()
    figure.suptitle(record["machine"]["device"] if record["measured"] else "a dry run: nothing was measured")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return None
