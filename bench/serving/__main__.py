"""``python -m bench.serving``: computes the cells that the record lacks, then writes the report.

The traces of Azure and Mooncake are read where AVMP_TRACES points. A run may be stopped at any time; the next one goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from avmp.errors import AvmpError, InvalidArgument
from avmp.progress import progress_on
from bench.serving.figure import FIGURE, draw
from bench.serving.grid import REQUESTS, Cell, compute, grid
from bench.serving.record import RESULTS, append, drop_torn_line, load
from bench.serving.report import README, Study, write

MOST_PROCESSES = 2


def main(argv: list[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"of each trace ({REQUESTS})")
    parser.add_argument("--processes", type=int, default=1, choices=range(1, MOST_PROCESSES + 1), help="1 or 2")
    parser.add_argument("--record", type=Path, default=RESULTS, metavar="FILE", help="the record to go on with")
    parser.add_argument("--report-only", action="store_true", help="write the report of what the record has, and end")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="the page that gets the report")
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE", help="the figure to draw")
    parser.add_argument("--list", action="store_true", help="print the cells, those that are done marked, and end")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except AvmpError as error:
        print(f"bench.serving: error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.requests < 1:
        raise InvalidArgument(f"--requests {arguments.requests}: expected at least 1")
    cells = grid(arguments.requests)
    drop_torn_line(arguments.record)
    found = load(arguments.record)
    if arguments.list:
        print("\n".join(f"{'done' if cell.key in found else '    '} {cell.key}" for cell in cells))
        return 0
    if not arguments.report_only:
        _complete(cells, arguments.record, arguments.processes)
    found = load(arguments.record)
    if not found:
        raise InvalidArgument(f"{arguments.record}: no cell is there to report")
    write(found, arguments.requests, len(cells), arguments.readme)
    if not draw(Study(found, arguments.requests), arguments.figure):
        print("bench.serving: no figure: matplotlib is not installed (pip install '.[bench]')", file=sys.stderr)
    return 0


def _complete(cells: list[Cell], record: Path, processes: int) -> None:
    """Computes what is missing, model and trace by model and trace."""
    found = load(record)
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.key not in found:
            groups[cell.model, cell.trace].append(cell)
    with progress_on(sys.stderr, sum(map(len, groups.values()))) as progress:
        if processes == 1:
            for (model, trace), group in groups.items():
                report = progress.part(f"{model} {trace}", len(group))
                for done, result in enumerate(compute(group, found), start=1):
                    append(record, result)
                    report(done)
            return
        with ProcessPoolExecutor(processes) as pool:
            waiting = {pool.submit(_compute_group, group, record): group for group in groups.values()}
            for future in as_completed(waiting):
                group = waiting[future]
                future.result()
                progress.part(f"{group[0].model} {group[0].trace}", len(group))(len(group))


def _compute_group(cells: list[Cell], record: Path) -> None:
    for result in compute(cells, load(record)):
        append(record, result)


if __name__ == "__main__":
    sys.exit(main())
