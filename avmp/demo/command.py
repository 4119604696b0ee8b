"""``python -m avmp demo``: serves a trace with the demo's engine, and compares every token with an unpaged run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from avmp.cache_pool import CachePool
from avmp.demo.engine import Engine
from avmp.demo.model import HybridModel, ModelShape
from avmp.demo.report import draw_memory, format_result, live_line, require_plots, result_of
from avmp.demo.requests import requests_like
from avmp.demo.unpaged import compare_all
from avmp.errors import InvalidArgument
from avmp.workloads import Trace

PAGE_TOKENS = 16


def run(arguments: argparse.Namespace, trace: Trace) -> tuple[str, int]:
    """What is to be printed, and the exit code: 1 if a token differs from the unpaged run."""
    if arguments.plot:
        require_plots(Path(arguments.plot))
    seed, shape = arguments.seed or 0, ModelShape()
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"--seed {seed}: expected 0 to 2**63 - 1")
    requests = requests_like(
        trace, shape.vocabulary, arguments.shrink, arguments.requests_per_step, arguments.samples, seed
    )
    device = _device(arguments.device)
    if device.type == "cpu" and arguments.backend == "triton":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which only its backend does
    pool = CachePool(
        shape.geometry(PAGE_TOKENS),
        arguments.memory,
        device=device,
        max_rows=arguments.max_sequences,
        max_tokens_per_sequence=arguments.longest,
        max_batch_tokens=arguments.max_sequences + arguments.chunk_tokens,
        backend=arguments.backend,
    )
    engine = Engine(HybridModel(shape, seed, pool.device), pool, requests, arguments.chunk_tokens, seed)
    show = live_line(sys.stderr, pool.layout.arena_bytes)
    started = time.perf_counter()
    with torch.inference_mode(), _one_thread():
        engine.run(show)
        seconds = time.perf_counter() - started
        if show is not None:
            print(file=sys.stderr)
        compared = compare_all(HybridModel(shape, seed), engine.finished, seed)
    pool.check()
    result = result_of(engine, seconds, compared)
    if arguments.plot:
        draw_memory(engine.history, pool.layout.arena_bytes, Path(arguments.plot))
    if arguments.json:
        return json.dumps(asdict(result) | {"equal": result.equal}, indent=2), int(not result.equal)
    head = (
        f"{trace.name}: {len(trace):,} requests, lengths divided by {arguments.shrink}\n"
        f"{shape.geometry(PAGE_TOKENS).describe()}, {pool.backend.name} backend on {pool.device}\n"
    )
    return f"{head}\n{format_result(result)}", int(not result.equal)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The model's tensors are so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        raise InvalidArgument(f"device {name!r}: {str(error).splitlines()[0]}") from error
    return device
