"""The published AVMP experiment (arXiv 2605.22416) and what its figures are worth.

    python -m bench.paper [--show NAME ...] [--json FILE] [--out FOLDER]

Without ``--show``: all 240 cells, compared with the published figures field by field, and the published tables beside
ours. Tables go to stdout, progress to stderr. Exit codes: 0, 1 (a published figure differs), 2 (bad usage).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from avmp.errors import AvmpError, InvalidArgument
from avmp.paper import VARIANTS
from avmp.workloads.paper import SHAREGPT_VARIABLE
from bench.paper.figures import draw, require_matplotlib
from bench.paper.jobs import MODELS, POOLS, WORKLOADS, Cell, Job, Selection, processors, run_jobs
from bench.paper.published import Comparison, compare_cell
from bench.paper.results import Results
from bench.paper.views import DEFAULT_VIEWS, VIEWS, figures_for
from bench.records import machine, write_lines


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.paper", description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument(
        "--show", nargs="+", metavar="VIEW", default=DEFAULT_VIEWS, choices=[*VIEWS, "all"], help="see --list"
    )
    made.add_argument("--list", action="store_true", help="say which views there are, and run nothing")
    made.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    made.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--pool", nargs="+", choices=POOLS, default=POOLS)
    made.add_argument("--seed", nargs="+", type=int, help="instead of the paper's three per workload")
    made.add_argument("--requests", type=int, help="per stream, instead of the paper's number: nothing is compared")
    made.add_argument("--processes", type=int, default=processors(), help="default: one per processor")
    made.add_argument("--json", metavar="FILE", help="also append each cell to FILE, one JSON object a line")
    made.add_argument("--out", metavar="FOLDER", help="also draw PNG figures of what is shown (needs matplotlib)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what was asked for; the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.list:
        print("\n".join(f"{name:14} {view.title}{'  *' * (name in DEFAULT_VIEWS)}" for name, view in VIEWS.items()))
        print("those with * are shown by default")
        return 0
    try:
        return _run(arguments)
    except (AvmpError, OSError) as error:
        print(f"bench.paper: error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    selection = _selection(arguments)
    if arguments.out:
        require_matplotlib()
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
    if arguments.json:
        Path(arguments.json).open("a", encoding="utf-8").close()  # says now, not after minutes, if it cannot be written
    names = tuple(VIEWS) if "all" in arguments.show else tuple(dict.fromkeys(arguments.show))
    jobs = [job for name in names for job in VIEWS[name].needs(selection)]
    found = run_jobs(jobs, arguments.processes, sys.stderr)
    results, sums, fields = Results(selection, found), Comparison(), Comparison()
    for name in names:
        print(f"{VIEWS[name].title}\n\n{VIEWS[name].render(results, sums)}\n")
    print(_verdict(found, sums, fields))
    if arguments.json:
        _write(Path(arguments.json), found)
    if arguments.out:
        for path in draw(figures_for(names, results), selection.workloads, Path(arguments.out)):
            print(f"figure: {path}")
    print(f"{len(found):,} jobs on {arguments.processes} processes, {time.perf_counter() - started:.1f} s")
    return 1 if sums.differences or fields.differences else 0


def _selection(arguments: argparse.Namespace) -> Selection:
    for name in ("requests", "processes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidArgument(f"--{name} {value}: expected at least 1")
    keep = {name: tuple(dict.fromkeys(getattr(arguments, name))) for name in ("workload", "model", "pool")}
    seeds = None if arguments.seed is None else tuple(dict.fromkeys(arguments.seed))
    return Selection(keep["workload"], keep["model"], keep["pool"], seeds, arguments.requests)


def _verdict(found: dict[Job, Any], sums: Comparison, fields: Comparison) -> str:
    """What was compared with the published figures, and what differs."""
    cells = [job for job in found if isinstance(job, Cell) and job.variant in VARIANTS]
    golden = sum(compare_cell(cell, found[cell], fields) for cell in cells)
    lines = [f"compared with the published figures: {fields.compared:,} fields of {golden} cells, {sums.compared} sums"]
    if sums.own:
        lines.append(f"checked besides: {sums.own} statements of our own")
    if golden < len(cells):
        why = "" if os.environ.get(SHAREGPT_VARIABLE) else f"; the ShareGPT list needs {SHAREGPT_VARIABLE}"
        lines.append(f"not compared: {len(cells) - golden} cells whose requests are not the published ones{why}")
    different = [*fields.differences, *sums.differences]
    return "\n".join([*lines, *(f"DIFFERENT: {text}" for text in different), f"differences: {len(different)}"])


def _write(path: Path, found: dict[Job, Any]) -> None:
    where = machine()
    with path.open("a", encoding="utf-8") as target:
        write_lines(({"benchmark": "paper", **record, **where} for record in _records(found)), target)


def _records(found: dict[Job, Any]) -> Iterator[dict[str, Any]]:
    for job, result in found.items():
        what = {"kind": type(job).__name__.lower(), **asdict(job)}
        if isinstance(job, Cell):
            yield what | result.as_dict()
        else:
            for policy, served in result.items():
                yield what | {"policy": policy, "rate": served.rate, **asdict(served)}


if __name__ == "__main__":
    sys.exit(main())
