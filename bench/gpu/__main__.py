"""One NVIDIA GPU turned into numbers, within a time limit.

    python -m bench.gpu --out DIR [--budget SECONDS] [--only SECTION ...]
    python -m bench.gpu --out DIR --device cpu --dry-run

Correctness comes first; nothing is timed unless all of it passes. ``gpu.json`` in DIR is whole at every moment, so
that a run cut short has written what it has; ``gpu.png`` needs matplotlib. Exit code 0, 1 if something is wrong (the
JSON says what), 2 for bad usage or no GPU. A dry run goes through all of it on the CPU, in Triton's interpreter, at
tiny sizes, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
SCHEMA = 1
GATE = "correctness"
SECTIONS = (
    GATE,
    "ceiling",
    "bandwidth",
    "launches",
    "compilations",
    "host",
    "lanes",
    "decode",
    "peers",
    "drift",
    "profile",
)
ALWAYS = (GATE, "ceiling", "drift")
"""Shares are of the ceiling, and say little where it has sunk meanwhile."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where gpu.json and gpu.png go")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="of the whole run (default 240)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[name for name in SECTIONS if name not in ALWAYS],
        help=f"beside {', '.join(ALWAYS)}: only these",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: the whole course of it, no measurement")
    options = parser.parse_args(arguments)
    if (options.device == "cpu") != options.dry_run:
        parser.error("--device cpu and --dry-run go together: what a CPU takes says nothing about a GPU")
    if options.budget <= 0:
        parser.error(f"--budget {options.budget:g}: expected seconds")
    return options


def main(arguments: list[str] | None = None, started: float | None = None) -> int:
    """Command line; ``started`` is when the budget began (``time.monotonic``)."""
    options = parse(arguments)
    if "triton" not in sys.modules:  # it reads this when it is loaded; tests have done so, in the interpreter
        os.environ.pop("TRITON_INTERPRET", None)
        if options.dry_run:
            os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from avmp.backends import use_backend
    from avmp.kernels.launch import INTERPRETED
    from bench.gpu import report
    from bench.gpu.run import Clock, Record, Watchdog, run

    if not options.dry_run and (torch.version.cuda is None or not torch.cuda.is_available()):
        print(
            f"bench.gpu: no NVIDIA GPU: torch {torch.__version__} sees none. To try the script without one: --device "
            "cpu --dry-run",
            file=sys.stderr,
        )
        return 2
    if options.dry_run != INTERPRETED:
        raise RuntimeError(f"triton is loaded already, and {'interprets' if INTERPRETED else 'compiles'}")
    clock = Clock(options.budget, time.monotonic() if started is None else started)
    options.out.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = dict(schema=SCHEMA, benchmark="gpu", measured=not options.dry_run, complete=False)
    head |= dict(started=datetime.now(timezone.utc).isoformat(timespec="seconds"), budget=options.budget, seconds=0.0)
    head |= dict(figure=None, figure_note="the run has not come to it")
    record = Record(options.out / "gpu.json", **head, interrupted=False, exit_code=None, sections=[])
    with Watchdog(record, clock), torch.no_grad(), use_backend("triton"):
        well = run(sections(options, record), record, clock, GATE)
        record.write(exit_code=0 if well else 1, seconds=round(clock.used(), 3))
    note = report.draw(record.content, options.out / "gpu.png")  # its time and its faults are no part of the run
    record.write(figure=None if note else "gpu.png", figure_note=note)
    print(report.summary(record.content))
    return 0 if well else 1


def sections(options: argparse.Namespace, record: Any) -> list[Any]:
    """All sections in order, and in the record what they run on."""
    import torch

    from avmp.environment import collect
    from bench.gpu import bandwidth, correctness, counts, decode
    from bench.gpu.problems import Bench
    from bench.gpu.timing import Sensors, Timer
    from bench.records import machine

    device = torch.device("cpu" if options.dry_run else f"cuda:{torch.cuda.current_device()}")
    properties = None if options.dry_run else torch.cuda.get_device_properties(device)
    sensors = Sensors(str(properties.uuid) if properties else None)
    bench = Bench(device, options.dry_run, Timer(device, sensors, options.dry_run))
    compilations = None if options.dry_run else counts.Compilations()
    ceiling = bandwidth.Ceiling(bench)
    record.watched["compilations"] = (lambda: compilations.report()) if compilations else lambda: None
    record.write(
        machine=machine() | {"device": properties.name if properties else "cpu", "cuda": torch.version.cuda},
        device=None if properties is None else described(properties),
        environment=collect(),
        sensors_note=sensors.note,
    )
    made = {
        "correctness": partial(correctness.rows, bench),
        "ceiling": partial(bandwidth.ceiling_rows, bench, ceiling),
        "bandwidth": partial(bandwidth.rows, bench, ceiling),
        "launches": partial(counts.launch_rows, bench),
        "compilations": partial(counts.compilation_rows, bench, compilations),
        "host": partial(counts.host_rows, bench),
        "lanes": partial(decode.lane_rows, bench),
        "decode": partial(decode.rows, bench, ceiling),
        "peers": partial(decode.peer_rows, bench),
        "drift": partial(bandwidth.drift_rows, bench, ceiling),
        "profile": partial(counts.profile_rows, bench),
    }
    wanted = (*ALWAYS, *options.only) if options.only else SECTIONS
    return [(name, made[name]) for name in SECTIONS if name in wanted]


def described(properties: Any) -> dict[str, Any]:
    """What a roofline needs."""
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
    }


if __name__ == "__main__":
    sys.exit(main(started=STARTED))
