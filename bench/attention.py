"""Attention over pages on a CPU, beside torch's own attention on contiguous data of the same size.

    python -m bench.attention [--rounds N] [--threads N] [--json FILE]

32 query heads on 8 KV heads of 128, pages of 16 tokens scattered over a pool with keys and values adjacent: decode of
8 sequences, and prefill of one. The yardstick is ``scaled_dot_product_attention`` on keys and values that already lie
contiguously; in decode with the query heads of a group as the query's rows, its fastest form there. The floor of decode
is to read keys and values once, here by summing the same bytes. The pool lies in huge pages where the system has them,
as an arena does. Wall time, the least of the rounds in which all take turns; results are compared before anything is
timed. ``python -m bench.kernels`` prints these figures, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from avmp.device_memory import advise_huge_pages
from avmp.kernels.attention_reference import paged_attention
from bench.records import machine, write_lines

BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 8, 32, 8, 128, 16
CONTEXTS = (1024, 2048, 4096, 8192)
PREFILL_TOKENS = 2048
BOUNDS = {torch.float32: 1.3, torch.bfloat16: 1.0}
"""The most time that decode over pages may take, in units of the yardstick's."""
PASSES = 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
Calls = dict[str, Callable[[], torch.Tensor]]


class Case:
    """Sequences of one length, in pages and contiguous, and a query of ``queries`` tokens for each."""

    def __init__(self, dtype: torch.dtype, batch: int, context: int, queries: int) -> None:
        generator = torch.Generator().manual_seed(context)
        shape = (batch, context, KV_HEADS, HEAD_DIM)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.queries, self.scale = queries, HEAD_DIM**-0.5
        self.q = torch.randn(batch * queries, HEADS, HEAD_DIM, generator=generator).to(dtype)
        pages = batch * context // PAGE_TOKENS
        ids = torch.randperm(pages, generator=generator) + 1
        self.arena = torch.empty(pages + 1, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM, dtype=dtype)
        advise_huge_pages(self.arena)  # as an arena is allocated
        self.arena.zero_()
        for part, tensor in enumerate((keys, values)):
            self.arena[ids, part] = tensor.view(pages, *self.arena.shape[2:])
        table = torch.randperm(pages, generator=generator) + 1  # virtual ids, in the order of the sequences' pages
        self.page_table = torch.zeros(pages + 1, dtype=torch.int32)
        self.page_table[table] = ids.int()
        self.block_table = table.int().view(batch, -1)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32)
        self.starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32)
        self.k, self.v = (tensor.transpose(1, 2).contiguous() for tensor in (keys, values))

    def paged(self) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.arena[:, 0],
            self.arena[:, 1],
            self.block_table,
            self.seq_lens,
            self.starts,
            scale=self.scale,
            max_query_len=self.queries,
            max_seq_len=self.k.shape[2],
            page_table=self.page_table,
        )[0]

    def decode(self) -> torch.Tensor:
        """Contiguous, for one query token: the heads of a group are rows of the query."""
        grouped = self.q.view(len(self.k), KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        return F.scaled_dot_product_attention(grouped, self.k, self.v, scale=self.scale).reshape(self.q.shape)

    def prefill(self) -> torch.Tensor:
        """Contiguous, for as many query tokens as keys."""
        q = self.q.view(len(self.k), self.queries, HEADS, HEAD_DIM).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, self.k, self.v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.q.shape)

    def read(self) -> torch.Tensor:
        """Every byte of the contiguous keys and values once."""
        return self.k.view(torch.float32).sum() + self.v.view(torch.float32).sum()


def least_seconds(calls: Calls, rounds: int) -> dict[str, float]:
    """Of each, over rounds in which all take turns, and one more before them that touches memory for the first time."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: min(values) for name, values in seconds.items()}


def measure(rounds: int, dtype: torch.dtype, context: int, step: str = "decode") -> dict[str, float]:
    """Seconds of each, for decode those of the floor as well. Raises if their results differ."""
    decode = step == "decode"
    case = Case(dtype, BATCH if decode else 1, context, 1 if decode else context)
    calls: Calls = {"paged": case.paged, "contiguous": case.decode if decode else case.prefill}
    torch.testing.assert_close(calls["paged"](), calls["contiguous"](), atol=TOLERANCE[dtype], rtol=0)
    if decode:
        calls["read"] = case.read
    return least_seconds(calls, rounds)


def row_of(dtype: torch.dtype, context: int, step: str, seconds: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of both, and their ratio; for decode the floor, and the bound."""
    row: dict[str, Any] = {"step": step, "dtype": str(dtype).removeprefix("torch."), "context": context}
    row |= {f"{name}_ms": round(value * 1e3, 2) for name, value in seconds.items()}
    row["ratio"] = round(seconds["paged"] / seconds["contiguous"], 3)
    if step == "decode":
        size = 2 * BATCH * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        row |= {"bound": BOUNDS[dtype], "mebibytes": size >> 20}
        row |= {"read_gb_per_second": round(size / seconds["read"] / 1e9, 1)}
    return row


def measure_all(rounds: int) -> list[dict[str, Any]]:
    """Decode at every context, then prefill, in either dtype: the least of PASSES through all of them, each of so many
    rounds, so that what else the machine does for some seconds spoils no case in all of its rounds."""
    cases = [(dtype, context, "decode") for dtype in BOUNDS for context in CONTEXTS]
    cases += [(dtype, PREFILL_TOKENS, "prefill") for dtype in BOUNDS]
    least: list[dict[str, float]] = [{} for _ in cases]
    for _ in range(PASSES):
        for seconds, (dtype, context, step) in zip(least, cases, strict=True):
            measured = measure(rounds if step == "decode" else max(rounds // 4, 1), dtype, context, step)
            seconds.update({name: min(value, seconds.get(name, value)) for name, value in measured.items()})
    return [row_of(*case, seconds) for case, seconds in zip(cases, least, strict=True)]


def show(rows: list[dict[str, Any]]) -> bool:
    """A table on stdout. Returns whether every bound is kept."""
    columns = ("paged ms", "contiguous ms", "ratio", "bound", "floor ms", "MiB", "GB/s")
    print(f"{'step':8}{'dtype':9}{'context':>8}" + "".join(f"{name:>15}" for name in columns))
    for row in rows:
        keys = ("paged_ms", "contiguous_ms", "ratio", "bound", "read_ms", "mebibytes", "read_gb_per_second")
        above = " above" if row["ratio"] > row.get("bound", float("inf")) else ""
        print(
            f"{row['step']:8}{row['dtype']:9}{row['context']:8}"
            + "".join(f"{row.get(k, ''):>15}" for k in keys)
            + above
        )
    return all(row["ratio"] <= row.get("bound", float("inf")) for row in rows)


def main() -> int:
    """Command line; 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds in each of three passes (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also append the figures to FILE, one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure_all(arguments.rounds)
    kept = show(rows)
    if arguments.json:
        where = machine() | {"torch": torch.__version__, "threads": arguments.threads}
        with open(arguments.json, "a", encoding="utf-8") as target:
            write_lines(({"benchmark": "attention", **row, **where} for row in rows), target)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
