"""What the policy costs on the host, beside a plain loop over a Python list in the same run.

    python -m bench.policy [--rounds N] [--json FILE]

CPU time of one thread, medians over rounds in which all measurements take turns; the ratios are what to compare
between machines. Bounds are what the project holds itself to, printed beside each ratio.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from avmp.allocator import Allocator
from avmp.cache_pool import CachePool
from avmp.layout import Layout
from avmp.migration import plan_relocation
from avmp.named_models import MODEL_NAMES, named_model
from avmp.options import Options
from bench.records import machine, write_lines

CACHE_BYTES = 96 * 2**20


@dataclass
class Measurement:
    """``run`` is timed; ``before`` is not. ``unit`` names the measurement whose median one ratio is a multiple of."""

    name: str
    run: Callable[[], object]
    unit: str = ""
    bound: float | None = None
    before: Callable[[], object] | None = None
    repeat: int = 1
    seconds: list[float] = field(default_factory=list)

    def once(self) -> None:
        if self.before is not None:
            self.before()
        started = time.process_time_ns()
        for _ in range(self.repeat):
            self.run()
        self.seconds.append((time.process_time_ns() - started) / 1e9 / self.repeat)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def plain_loop(count: int) -> Callable[[], None]:
    """The yardstick: one increment per sequence."""
    lengths = [1000] * count

    def run() -> None:
        for i in range(count):
            lengths[i] += 1

    return run


def arena(pages: int, slot_pages: int = 8) -> Layout:
    """A lane-per-layer arena with that many 64 KiB pages per lane, 4 lanes, 16 tokens a page."""
    return Layout.from_unit_sizes(65536, 65536 * slot_pages, 65536 * pages, 4, 16)


def decode_steps() -> list[Measurement]:
    """One token for each of B sequences, with block-table rows, lengths and virtual slot mapping ready."""
    flush_from = np.zeros(CACHE_BYTES, dtype=np.uint8)
    found = []
    for count, bound in ((256, 2.0), (1024, 0.6)):
        for order in ("in row order", "shuffled"):
            allocator = Allocator(arena(200_000), max_rows=1024, max_tokens_per_sequence=32768)
            sequences = allocator.admit([500 + i % 16 for i in range(count)])
            if order == "shuffled":
                sequences = np.random.default_rng(1).permutation(sequences)

            def step(allocator: Allocator = allocator, sequences: np.ndarray = sequences) -> None:
                allocator.extend(sequences)
                allocator.slot_mapping(sequences)

            unit, hot = f"loop {count}", bound if order == "in row order" else None
            drain = allocator.drain
            found.append(Measurement(f"decode {count}, {order}", step, unit, hot, drain, repeat=8))
            if order == "in row order":
                flush = lambda drain=drain: (drain(), int(flush_from.sum()))  # noqa: E731
                found.append(Measurement(f"decode {count}, caches flushed", step, unit, None, flush))
    return found


def device_steps() -> list[Measurement]:
    """One decoding step with its tables brought up to date in the memory of a device, here the CPU: extend, then
    ``batch``, which flushes. A pool of 262,144 small pages: no bytes but those of tables move."""
    torch.set_num_threads(1)
    found = []
    for count in (256, 1024):
        layout = Layout.from_unit_sizes(256, 2048, 256 * 2**18, 1, 16)
        pool = CachePool(layout, device="cpu", max_rows=1024, max_tokens_per_sequence=8192, max_batch_tokens=2**20)
        sequences = pool.admit([100 + i % 16 for i in range(count)])
        pool.batch(sequences)

        def step(pool: Any = pool, sequences: np.ndarray = sequences) -> None:
            pool.extend(sequences)
            pool.batch(sequences)

        found.append(Measurement(f"step with batch and flush, {count}", step, f"loop {count}", repeat=4))
    return found


def admissions() -> list[Measurement]:
    """One sequence of 10,000 tokens comes, is forked, and goes, beside 40 others of 600."""
    allocator = Allocator(arena(131_072), max_rows=64, max_tokens_per_sequence=16384)
    allocator.admit([600] * 40)
    present: dict[str, Any] = {}

    def admit() -> None:
        present["parent"] = allocator.admit([10_000])

    def fork() -> None:
        present["child"] = allocator.fork(int(present["parent"][0]))

    def release_child() -> None:
        allocator.release(present["child"])

    def release() -> None:
        allocator.release(present["parent"])

    def warm_up() -> None:
        for _ in range(3):
            admit(), fork(), release_child(), release()
        allocator.drain()

    return [
        Measurement("admit 10,000 tokens", admit, "loop 1024", 2.0, warm_up),
        Measurement("fork of 10,000 tokens", fork, "loop 1024", 0.6),
        Measurement("release of the fork", release_child, "loop 1024"),
        Measurement("release 10,000 tokens", release, "loop 1024", 0.5),
    ]


def retractions() -> list[Measurement]:
    """The plan for a pool that is 90 % live at random to give up 5 % of its pages."""
    found = []
    for pages, bound in ((100_000, 2.0), (1_000_000, 20.0)):
        layout = Layout.from_unit_sizes(256, 0, 256 * (pages + 1))
        allocator = Allocator(layout, max_rows=1, max_tokens_per_sequence=16)
        handles = np.random.default_rng(2).permutation(allocator.take("page", pages))
        allocator.give(handles[: pages // 10])
        pool = allocator._space.pages

        pool.free.return_reserve()

        def plan(pool: Any = pool, extent: int = pages - pages // 20) -> None:
            plan_relocation(pool.free.map[: pool.extent], extent)

        found.append(Measurement(f"plan a retraction, {pages:,} pages", plan, "loop 1024", bound, repeat=3))
    return found


def single_pages() -> list[Measurement]:
    """One page taken and given back, in pools that are half full."""
    free = list(range(1000))

    def take_from_list(count: int) -> list[int]:
        return [free.pop() for _ in range(count)]

    def give_to_list(pages: list[int]) -> None:
        for page in pages:
            free.append(page)

    found = [Measurement("list pop and append", lambda: give_to_list(take_from_list(1)), repeat=1000)]
    for pages in (2**14, 2**16, 2**18, 2**20):
        layout = Layout.from_unit_sizes(256, 1024, 256 * pages)
        allocator = Allocator(layout, max_rows=4, max_tokens_per_sequence=64)
        allocator.give(np.random.default_rng(3).permutation(allocator.take("page", pages // 2))[: pages // 4])

        def pair(take: Any = allocator.take, give: Any = allocator.give) -> None:
            give(take("page"))

        found.append(
            Measurement(f"one page, pool of {pages:,}", pair, "list pop and append", 4.0, allocator.drain, repeat=1000)
        )
    return found


def measure(rounds: int) -> list[Measurement]:
    """All measurements, taking turns; the first tenth of the rounds is not counted."""
    found = [Measurement(f"loop {count}", plain_loop(count)) for count in (256, 1024)]
    found += [*decode_steps(), *device_steps(), *admissions(), *retractions(), *single_pages()]
    gc.disable()
    for number in range(rounds + rounds // 10 + 1):
        if number == rounds // 10 + 1:
            for measurement in found:
                measurement.seconds.clear()
        for measurement in found:
            measurement.once()
    gc.enable()
    return found


def host_shares() -> list[dict[str, Any]]:
    """Host arrays as a share of a 16 GiB arena for each named model, the block table apart."""
    shares = []
    for name in MODEL_NAMES:
        geometry = named_model(name)
        allocator = Allocator(geometry, "16GiB", max_tokens_per_sequence=4096, options=Options(record_effects=False))
        share = allocator.stats().table_bytes / allocator.layout.arena_bytes
        shares.append({"name": f"host arrays, {name}", "share": round(share, 8), "bound": 0.005})
    return shares


def records(found: list[Measurement]) -> list[dict[str, Any]]:
    """Microseconds and ratios, one dictionary for each measurement."""
    medians = {measurement.name: measurement.median for measurement in found}
    rows = []
    for measurement in found:
        row: dict[str, Any] = {"name": measurement.name, "microseconds": round(measurement.median * 1e6, 3)}
        if measurement.unit:
            row["ratio"] = round(measurement.median / medians[measurement.unit], 3)
            row["unit"] = measurement.unit
        if measurement.bound is not None:
            row["bound"] = measurement.bound
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'measurement':38} {'us':>10} {'ratio':>8} {'bound':>7}  of"]
    for row in rows:
        value = f"{row['microseconds']:10.2f}" if "microseconds" in row else f"{100 * row['share']:9.4f}%"
        ratio = f"{row['ratio']:8.2f}" if "ratio" in row else " " * 8
        over = " over" if row.get("ratio", row.get("share", 0.0)) > row.get("bound", float("inf")) else ""
        bound = f"{100 * row['bound']:g}%" if "share" in row else row.get("bound", "")
        lines.append(f"{row['name']:38} {value} {ratio} {bound:>7}  {row.get('unit', '')}{over}")
    return "\n".join(lines)


README_ROWS = {
    "decode 256, in row order": "one decoding step, B = 256: rows, lengths and slot mapping ready",
    "decode 1024, in row order": "the same, B = 1,024",
    "decode 256, caches flushed": "the same with caches flushed, B = 256",
    "step with batch and flush, 1024": "decoding step with its tables on the device (a CPU), B = 1,024",
    "admit 10,000 tokens": "admit 10,000 tokens",
    "fork of 10,000 tokens": "fork a sequence of 10,000 tokens",
    "release 10,000 tokens": "release it",
    "plan a retraction, 100,000 pages": "plan a retraction among 100,000 pages",
    "plan a retraction, 1,000,000 pages": "plan a retraction among 1,000,000 pages",
    "one page, pool of 1,048,576": "take one page and give it back, pool of 1,048,576",
}
"""What the README shows of the record, and how it calls it."""


def readme_table(lines: list[dict[str, Any]]) -> str:
    """The README's table from the lines of a record."""
    found = {line["name"]: line for line in lines}
    rows = ["| operation | measured | bound |", "|---|--:|--:|"]
    for name, text in README_ROWS.items():
        line = found[name]
        missed = " (missed)" if line["ratio"] > line.get("bound", float("inf")) else ""
        rows.append(f"| {text} | {line['ratio']:.2f} × {line['unit']}{missed} | {line.get('bound', '')} |")
    worst = max((line for line in lines if "share" in line), key=lambda line: line["share"])
    model = worst["name"].removeprefix("host arrays, ")
    rows.append(f"| host arrays beside a 16 GiB arena, worst model ({model}) | {worst['share']:.3%} | 0.5 % |")
    return "\n".join(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds to take medians over (default 200)")
    parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE, one JSON object a line")
    arguments = parser.parse_args()
    rows = records(measure(arguments.rounds)) + host_shares()
    print(table(rows))
    if arguments.json:
        where = machine()
        with open(arguments.json, "a", encoding="utf-8") as target:
            write_lines(({"benchmark": "policy", **row, **where} for row in rows), target)


if __name__ == "__main__":
    main()
