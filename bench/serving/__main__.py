"""``python -m bench.serving``: computes the cells that the record lacks, then writes the report.

The traces of Azure and Mooncake are read where AVMP_TRACES points. A run may be stopped at any time; the next one goes
on where it stopped. Beside the record, under its name, are what its cells come to, why avmp is behind where it is, and
how long each run of this command took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from avmp.errors import AvmpError, InvalidArgument
from avmp.progress import progress_on
from bench.serving import causes
from bench.serving.figure import FIGURE, draw
from bench.serving.grid import REQUESTS, Cell, Ground, compute, grid, require_same_settings
from bench.serving.record import RESULTS, append, beside, drop_torn_line, load
from bench.serving.report import README, write
from bench.serving.study import Study, write_gains

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
    cells, record = grid(arguments.requests), arguments.record
    if arguments.list:
        found = load(record)
        print("\n".join(f"{'done' if cell.key in found else '    '} {cell.key}" for cell in cells))
        return 0
    _require_files_of_its_own(arguments)
    drop_torn_line(record)
    require_same_settings(load(record), cells, record)
    why = beside(record, "causes")
    if not arguments.report_only:
        started = time.monotonic()
        computed = _complete(cells, record, arguments.processes)
        computed += _find_causes(Study(load(record), arguments.requests, load(why)), why)
        if computed:
            taken = round(time.monotonic() - started, 1)
            append(beside(record, "runs"), {"computed": computed, "processes": arguments.processes, "seconds": taken})
    study = Study(load(record), arguments.requests, load(why))
    if not study.found:
        raise InvalidArgument(f"{record}: no cell is there to report")
    write(study, len(cells), arguments.readme)
    write_gains(study, beside(record, "gains"))
    if not draw(study, arguments.figure):
        print("bench.serving: no figure: matplotlib is not installed (pip install '.[bench]')", file=sys.stderr)
    return 0


def _require_files_of_its_own(arguments: argparse.Namespace) -> None:
    """A study of another size does not touch what is recorded of the full one."""
    kept = {"record": RESULTS, "readme": README, "figure": FIGURE}
    same = [f"--{name}" for name, path in kept.items() if getattr(arguments, name).resolve() == path.resolve()]
    if arguments.requests != REQUESTS and same:
        raise InvalidArgument(
            f"--requests {arguments.requests}: the files of the study are of {REQUESTS} requests; give others by "
            f"{', '.join(same)}"
        )


def _complete(cells: list[Cell], record: Path, processes: int) -> int:
    """Computes what is missing, model and trace by model and trace; returns how many cells that were."""
    found = load(record)
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.key not in found:
            groups[cell.model, cell.trace].append(cell)
    missing = sum(map(len, groups.values()))
    with progress_on(sys.stderr, missing) as progress:
        if processes == 1:
            for (model, trace), group in groups.items():
                report = progress.part(f"{model} {trace}", len(group))
                for done, result in enumerate(compute(group, found), start=1):
                    append(record, result)
                    report(done)
            return missing
        with ProcessPoolExecutor(processes) as pool:
            waiting = {pool.submit(_compute_group, group, record): group for group in groups.values()}
            for future in as_completed(waiting):
                group = waiting[future]
                future.result()
                progress.part(f"{group[0].model} {group[0].trace}", len(group))(len(group))
    return missing


def _compute_group(cells: list[Cell], record: Path) -> None:
    for result in compute(cells, load(record)):
        append(record, result)


def _find_causes(study: Study, path: Path) -> int:
    """Finds out why avmp is behind where that is not known; returns of how many cells."""
    missing = []
    for gain in study.losses():
        cell = study.cell(*gain.cell, gain.other)
        ours, theirs = (study.get(*gain.cell, policy) for policy in ("avmp", gain.other))
        assert ours and theirs
        if not causes.is_of(study.causes.get(cell.key), cell, ours, theirs):
            missing.append((cell, ours, theirs))
    with progress_on(sys.stderr, len(missing)) as progress:
        for cell, ours, theirs in missing:
            report = progress.part(f"why {cell.key}", 1)
            append(path, causes.find_out(Ground(cell.model, cell.trace, cell.requests), cell, ours, theirs))
            report(1)
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
