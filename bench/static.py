"""Every kernel compiled for every target, without a GPU: what its machine code is made of.

    python -m bench.static [--only TEXT] [--target NAME] [--jobs NUMBER] [--json FILE]

Exit code 1 if a kernel spills or breaks one of its limits (``bench/static_entries.py``). The committed table is
``bench/results/static.json``, of triton 3.9. Figures depend on the version of triton, which comes with its own
assembler: with another one, limits on registers are wider by OTHER_VERSION, all others are the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from avmp.text_table import format_table
from bench.offline import TARGETS, compiled, measured, prepare
from bench.static_entries import Entry, bounds_entries, complaints, table_entries, unit_entries

COLUMNS = ("kernel", "target", "regs", "spills", "shared", "loads", "stores", "async", "matrix", "instr", "occupancy")

RECORDED_VERSION = "3.9."
OTHER_VERSION = 1.45
"""What triton 3.6 and its assembler take more of for a body like that of decode: 128 registers instead of 89."""


def entries() -> list[Entry]:
    """Every kernel of the project, in the order of the table. Loads triton, as what is listed names its kernels'
    constants: ``prepare`` comes first where they are to be compiled."""
    from bench.attention_entries import attention_entries, kv_entries
    from bench.state_entries import state_entries

    return [
        *unit_entries(),
        *table_entries(),
        *bounds_entries(),
        *attention_entries(),
        *kv_entries(),
        *state_entries(),
    ]


def measure(entry: Entry, target: str) -> dict[str, Any]:
    """One row of the table."""
    row = measured(compiled(entry.kernel, entry.arguments, target, entry.options), target)
    return {"name": entry.name, "kernel": entry.kernel, "target": target, **row}


def measure_all(wanted: list[tuple[Entry, str]], jobs: int) -> list[dict[str, Any]]:
    """The rows of these entries and targets, compiled by so many processes."""
    if jobs <= 1:
        return [measure(entry, target) for entry, target in wanted]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare) as pool:
        return list(pool.map(measure, *zip(*wanted, strict=True))) if wanted else []


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""

    def counted(kind: str) -> str:
        return " ".join(f"{number}x{what}" for what, number in row[kind].items()) or "-"

    return (
        row["name"],
        row["target"],
        str(row["registers"]),
        str(row["spills"]) + (f" + {row['scalar_spills']} scalar" if row["scalar_spills"] else ""),
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


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.static", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only kernels whose name contains TEXT")
    parser.add_argument("--target", choices=TARGETS, help="only this target")
    parser.add_argument(
        "--jobs", metavar="NUMBER", type=int, default=os.cpu_count() or 1, help="compile so many at once"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    arguments = parser.parse_args()
    prepare()
    wanted = [
        (entry, target)
        for entry in entries()
        for target in entry.targets
        if arguments.only in entry.name and arguments.target in (None, target)
    ]
    rows = measure_all(wanted, arguments.jobs)
    triton = version("triton")
    slack = 1.0 if triton.startswith(RECORDED_VERSION) else OTHER_VERSION
    failed = [
        f"{entry.name}, {target}: {text}"
        for (entry, target), row in zip(wanted, rows, strict=True)
        for text in complaints(row, entry.limits, slack)
    ]
    print(format_table(COLUMNS, [cells(row) for row in rows]))
    if arguments.json:
        arguments.json.write_text(record(rows, triton), encoding="utf-8")
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
