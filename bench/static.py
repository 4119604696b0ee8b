"""Every kernel compiled for every target, without a GPU: what its machine code is made of.

    python -m bench.static [--attention] [--only TEXT] [--target NAME] [--json FILE]

Exit code 1 if a kernel spills or breaks one of its limits (``bench/static_entries.py``). The committed table is
``bench/results/static.json``. Figures depend on the version of triton, which comes with its own assembler.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from avmp.text_table import format_table
from bench.offline import TARGETS, compiled, measured, prepare
from bench.static_entries import Entry, complaints, entries

COLUMNS = ("kernel", "target", "regs", "spills", "shared", "loads", "stores", "async", "matrix", "instr", "occupancy")


def measure(entry: Entry, target: str) -> dict[str, Any]:
    """One row of the table."""
    row = measured(compiled(entry.kernel, entry.arguments, target, entry.options), target)
    return {"name": entry.name, "kernel": entry.kernel, "target": target, **row}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""

    def counted(kind: str) -> str:
        return " ".join(f"{number}x{what}" for what, number in row[kind].items()) or "-"

    return (
        row["name"],
        row["target"],
        str(row["registers"]),
        str(row["spills"]),
        str(row["shared"]),
        counted("loads"),
        counted("stores"),
        counted("async"),
        counted("matrix"),
        str(row["instructions"]),
        f"{row['programs']} = {row['occupancy']:.0%}",
    )


def record(rows: list[dict[str, Any]], version: str) -> str:
    """JSON with one row a line, so that a difference shows where it is."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"triton": {json.dumps(version)}, "rows": [\n{lines}\n]}}\n'


def _attention_entries() -> list[Entry]:
    """Not part of the committed table, nor of the gate: some of them spill."""
    from bench.attention_entries import attention_entries, kv_entries

    return [*attention_entries(), *kv_entries()]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.static", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only kernels whose name contains TEXT")
    parser.add_argument("--target", choices=TARGETS, help="only this target")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    parser.add_argument("--attention", action="store_true", help="the kernels of attention and KV instead")
    arguments = parser.parse_args()
    prepare()
    import triton

    rows, failed = [], []
    for entry in _attention_entries() if arguments.attention else entries():
        for target in entry.targets:
            if arguments.only in entry.name and arguments.target in (None, target):
                rows.append(measure(entry, target))
                failed += [f"{entry.name}, {target}: {text}" for text in complaints(rows[-1], entry.limits)]
    print(format_table(COLUMNS, [cells(row) for row in rows]))
    if arguments.json:
        arguments.json.write_text(record(rows, triton.__version__), encoding="utf-8")
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
