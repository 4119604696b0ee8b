"""One token of the state operations on a CPU, beside what merely touches the same states.

    python -m bench.state [--rounds N] [--threads N] [--json FILE]

The yardstick of the state update is ``states.mul_().add_()`` on as many contiguous states: two passes over them, where
the update computes three products. That of the convolution is ``states.mul_()``. States are scattered over a pool far
larger than the caches, and each round takes others. Wall time, medians over rounds in which both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from avmp.kernels.conv_reference import causal_conv1d_update
from avmp.kernels.state_update_reference import selective_state_update
from bench.records import machine, write_lines

HEADS, DIM, DSTATE = 64, 64, 128
CHANNELS, WIDTH = 8448, 4
POOL_BYTES = 512 << 20
Call = Callable[[torch.Tensor], object]


def slots_of(pool: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 ``[rounds, rows]``: all slots of a pool, shuffled, but for slot 0."""
    found = torch.randperm(len(pool) - 1, generator=torch.Generator().manual_seed(0)) + 1
    return found[: len(found) // rows * rows].int().view(-1, rows)


def update_case(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Call, Call]:
    """Slots by round, and the two measured calls: 64 heads of 64 x 128 as in Mamba-2, tied."""
    pool = torch.randn(max(POOL_BYTES // (HEADS * DIM * DSTATE * dtype.itemsize), 2 * rows + 1), HEADS, DIM, DSTATE)
    pool = pool.to(dtype)
    x, b, c = torch.randn(rows, HEADS, DIM), torch.randn(rows, 1, DSTATE), torch.randn(rows, 1, DSTATE)
    dt = torch.randn(rows, HEADS, 1).expand(-1, -1, DIM)
    rates = torch.rand(HEADS, 1, 1).neg().expand(-1, DIM, DSTATE)
    skip, bias = (torch.randn(HEADS, 1).expand(-1, DIM) for _ in range(2))

    def update(slots: torch.Tensor) -> torch.Tensor:
        return selective_state_update(
            pool, x, dt, rates, b, c, D=skip, dt_bias=bias, dt_softplus=True, state_indices=slots
        )

    def touch(slots: torch.Tensor) -> torch.Tensor:
        first = int(slots[0]) % (len(pool) - rows)
        return pool[first : first + rows].mul_(0.999).add_(0.001)

    return slots_of(pool, rows), update, touch


def conv_case(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Call, Call]:
    """The same for 8,448 channels of width 4, with four columns to a channel as a cache of transformers has them."""
    pool = torch.randn(POOL_BYTES // (CHANNELS * WIDTH * 4), CHANNELS, WIDTH).to(dtype)
    x, weight, bias = torch.randn(rows, CHANNELS).to(dtype), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)

    def update(slots: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_update(x, pool, weight, bias, activation="silu", state_indices=slots)

    def touch(slots: torch.Tensor) -> torch.Tensor:
        first = int(slots[0]) % (len(pool) - rows)
        return pool[first : first + rows].mul_(0.999)

    return slots_of(pool, rows), update, touch


CASES = [
    ("state update", update_case, rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 8, 64)
] + [("conv update", conv_case, rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (8, 64)]


def measure(name: str, make: Callable[..., Any], rows: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Milliseconds of both calls, and their ratio."""
    slots, update, touch = make(rows, dtype)
    seconds: dict[str, list[float]] = {"update": [], "floor": []}
    for number in range(rounds + 1):
        for label, call in (("update", update), ("floor", touch)):
            started = time.perf_counter()
            call(slots[number % len(slots)])
            if number:  # the first round touches memory for the first time
                seconds[label].append(time.perf_counter() - started)
    medians = {label: statistics.median(values) * 1e3 for label, values in seconds.items()}
    return {
        "operation": name,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "update_ms": round(medians["update"], 3),
        "floor_ms": round(medians["floor"], 3),
        "ratio": round(medians["update"] / medians["floor"], 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=31, help="rounds to take medians over (default 31)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE, one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(*case, arguments.rounds) for case in CASES]
    print(f"{'operation':13} {'dtype':9} {'rows':>5} {'ms':>8} {'floor ms':>9} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['operation']:13} {row['dtype']:9} {row['rows']:5} {row['update_ms']:8.3f} {row['floor_ms']:9.3f} "
            f"{row['ratio']:6.2f}"
        )
    if arguments.json:
        where = machine() | {"torch": torch.__version__, "threads": arguments.threads}
        with open(arguments.json, "a", encoding="utf-8") as target:
            write_lines(({"benchmark": "state", **row, **where} for row in rows), target)


if __name__ == "__main__":
    main()
