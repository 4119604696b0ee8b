"""Decode attention over pages on a CPU, beside torch's own attention on contiguous data of the same size.

    python -m bench.attention [--rounds N] [--threads N] [--json FILE]

Batch 8, 32 query heads on 8 KV heads of 128, pages of 16 tokens scattered over a pool with keys and values adjacent.
The yardstick is ``scaled_dot_product_attention`` on keys and values that already lie contiguously, with the query
heads of a group as the query's rows: its fastest form there. Wall time, medians over rounds in which both take turns;
results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from avmp.kernels.attention_reference import paged_attention
from bench.records import machine, write_lines

BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 8, 32, 8, 128, 16
CONTEXTS = (1024, 2048, 4096, 8192)
BOUNDS = {torch.float32: 1.3, torch.bfloat16: 1.0}
"""The most time that paged attention may take, in units of the yardstick's."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(dtype: torch.dtype, context: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """The two measured calls, on the same keys and values."""
    generator = torch.Generator().manual_seed(context)
    shape = (BATCH, context, KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(BATCH, HEADS, HEAD_DIM, generator=generator).to(dtype)
    pages = BATCH * context // PAGE_TOKENS
    ids = torch.randperm(pages, generator=generator) + 1
    arena = torch.zeros(pages + 1, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM, dtype=dtype)
    for part, tensor in enumerate((keys, values)):
        arena[ids, part] = tensor.view(pages, *arena.shape[2:])
    table = torch.randperm(pages, generator=generator) + 1  # virtual ids, in the order of the sequences' pages
    page_table = torch.zeros(pages + 1, dtype=torch.int32)
    page_table[table] = ids.int()
    block_table = table.int().view(BATCH, -1)
    seq_lens = torch.full((BATCH,), context, dtype=torch.int32)
    starts = torch.arange(BATCH + 1, dtype=torch.int32)

    def paged() -> torch.Tensor:
        return paged_attention(
            q,
            arena[:, 0],
            arena[:, 1],
            block_table,
            seq_lens,
            starts,
            scale=HEAD_DIM**-0.5,
            max_query_len=1,
            max_seq_len=context,
            page_table=page_table,
        )[0]

    k, v = (tensor.transpose(1, 2).contiguous() for tensor in (keys, values))
    grouped = q.view(BATCH, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)

    def contiguous() -> torch.Tensor:
        return F.scaled_dot_product_attention(grouped, k, v, scale=HEAD_DIM**-0.5).reshape(q.shape)

    return paged, contiguous


def measure(rounds: int, dtype: torch.dtype, context: int) -> dict[str, Any]:
    """Milliseconds of both, and their ratio beside its bound. Raises if their results differ."""
    paged, contiguous = make_case(dtype, context)
    torch.testing.assert_close(paged(), contiguous(), atol=TOLERANCE[dtype], rtol=0)
    seconds: dict[str, list[float]] = {"paged": [], "contiguous": []}
    for number in range(rounds + 1):
        for name, call in (("paged", paged), ("contiguous", contiguous)):
            started = time.perf_counter()
            call()
            if number:  # the first round touches memory for the first time
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "paged_ms": round(medians["paged"], 2),
        "contiguous_ms": round(medians["contiguous"], 2),
        "ratio": round(medians["paged"] / medians["contiguous"], 3),
        "bound": BOUNDS[dtype],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take medians over (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE, one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(arguments.rounds, dtype, context) for dtype in BOUNDS for context in CONTEXTS]
    print(f"{'dtype':9} {'context':>7} {'paged ms':>9} {'contiguous ms':>14} {'ratio':>6} {'bound':>6}")
    for row in rows:
        above = " above" if row["ratio"] > row["bound"] else ""
        print(
            f"{row['dtype']:9} {row['context']:7} {row['paged_ms']:9.2f} {row['contiguous_ms']:14.2f} "
            f"{row['ratio']:6.2f} {row['bound']:6}{above}"
        )
    if arguments.json:
        where = machine() | {"torch": torch.__version__, "threads": arguments.threads}
        with open(arguments.json, "a", encoding="utf-8") as target:
            write_lines(({"benchmark": "attention", **row, **where} for row in rows), target)


if __name__ == "__main__":
    main()
