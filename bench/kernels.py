"""How fast the torch backend is on this machine: units that move, and attention over pages, on one thread.

    python -m bench.kernels [--rounds N] [--json FILE]

Units move from random places to random free ones of an arena that is far larger than the caches, beside one
``torch.Tensor.copy_`` of the same bytes: wall time, medians over rounds in which all measurements take turns. Attention
is measured by ``bench/attention.py``, which says beside what.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from avmp.device_memory import advise_huge_pages
from avmp.kernels.reference import TorchBackend
from bench import attention
from bench.records import machine, write_lines

ARENA_BYTES = 1 << 30
MOVED_BYTES = 64 << 20
UNIT_BYTES = tuple(1 << power for power in range(12, 22))
BOUND = 0.8
"""The least share of ``copy_`` that rows of BOUND_FROM_BYTES and more have to reach."""
BOUND_FROM_BYTES = 64 << 10


def copy_seconds(source: torch.Tensor, destination: torch.Tensor) -> float:
    """One contiguous copy."""
    started = time.perf_counter()
    destination.copy_(source)
    return time.perf_counter() - started


def move_seconds(backend: TorchBackend, pool: str, sources: Any, destinations: Any) -> float:
    """One call that moves all of them."""
    started = time.perf_counter()
    backend.move(pool, sources, destinations)
    return time.perf_counter() - started


def measure(rounds: int) -> list[dict[str, Any]]:
    """GB/s of payload, read once and written once, for each unit size and for ``copy_``."""
    arena = torch.empty(1, ARENA_BYTES, dtype=torch.uint8)
    advise_huge_pages(arena)  # as an arena is allocated
    arena.zero_()
    backend = TorchBackend(arena, {str(size): size for size in UNIT_BYTES})
    plain = torch.zeros(MOVED_BYTES, dtype=torch.uint8), torch.zeros(MOVED_BYTES, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in ("copy_", *map(str, UNIT_BYTES))}
    for number in range(rounds + 1):
        taken = {"copy_": copy_seconds(*plain)}
        for size in UNIT_BYTES:
            places = rng.permutation(ARENA_BYTES // size)[: 2 * (MOVED_BYTES // size)]
            taken[str(size)] = move_seconds(backend, str(size), *np.split(places, 2))
        if number:  # the first round touches pages for the first time
            for name, value in taken.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [{"name": "torch copy_, contiguous", "gb_per_second": _rate(medians["copy_"]), "ratio": 1.0}]
    for size in UNIT_BYTES:
        ratio = medians["copy_"] / medians[str(size)]
        row = {"name": f"move units of {size >> 10} KiB", "gb_per_second": _rate(medians[str(size)])}
        row["ratio"] = round(ratio, 3)
        if size >= BOUND_FROM_BYTES:
            row["bound"] = BOUND
        rows.append(row)
    return rows


def _rate(seconds: float) -> float:
    return round(MOVED_BYTES / seconds / 1e9, 2)


def main() -> int:
    """Command line; 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default 15)")
    parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE, one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.rounds)
    print(f"{'measurement':28} {'GB/s':>7} {'of copy_':>9} {'bound':>6}")
    for row in rows:
        below = " below" if row["ratio"] < row.get("bound", 0) else ""
        bound = row.get("bound", "")
        print(f"{row['name']:28} {row['gb_per_second']:7.2f} {row['ratio']:9.2f} {bound:>6}{below}")
    print()
    attended = attention.measure_all(arguments.rounds)
    kept = attention.show(attended) and all(row["ratio"] >= row.get("bound", 0) for row in rows)
    if arguments.json:
        where = machine() | {"torch": torch.__version__}
        records = [{"benchmark": "kernels", **row} for row in rows]
        records += [{"benchmark": "attention", "threads": 1, **row} for row in attended]
        with open(arguments.json, "a", encoding="utf-8") as target:
            write_lines((record | where for record in records), target)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
