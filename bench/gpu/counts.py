"""What is counted rather than timed: launches of a step, compilations; and what a call costs the host.

``launches`` counts Triton kernels as they are launched: the kernels and copies that torch itself starts are not among
them, nor is anything that others launch. ``profile`` lists all that the device does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from avmp import ops
from bench.gpu.problems import Bench, HybridStep, conv_call, crowded_pool, take_all, update_call
from bench.gpu.run import NotPossible, Row

SWEEP = (1, 3, 16, 17, 1024)


class Compilations:
    """Counts and times every variant that triton compiles, or takes from its cache on disk, from now on."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.seconds = self._began = 0.0
        triton.knobs.runtime.jit_cache_hook = self._before
        triton.knobs.runtime.jit_post_compile_hook = self._after

    def _before(self, *, fn: Any, **_: Any) -> None:
        self.kernels[fn.name] += 1
        self._began = time.monotonic()

    def _after(self, **_: Any) -> None:
        self.seconds += time.monotonic() - self._began

    def report(self) -> dict[str, Any]:
        return {
            "variants": self.kernels.total(),
            "seconds": round(self.seconds, 3),
            "by_kernel": dict(sorted(dict(self.kernels).items())),  # a copy: the watchdog asks while others count
        }


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts Triton kernels, and no others, by name as they are launched, compiled or interpreted."""
    found: Counter[str] = Counter()
    originals: dict[Any, Any] = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def counting(original: Any) -> Any:
        def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            found[self.__name__] += 1
            return original(self, *arguments, **keywords)

        return run

    try:
        for kind, original in originals.items():
            kind.run = counting(original)
        yield found
    finally:
        for kind, original in originals.items():
            kind.run = original


def operations(bench: Bench, count: int) -> dict[str, Callable[[], Any]]:
    """A small call of each operation: so many units, tokens or rows."""
    size, heads, kv_heads, dim, page = (4096, *bench.size((32, 8, 128), (4, 2, 32)), 16)
    lanes = torch.zeros(2, 2 * count * size, dtype=torch.uint8, device=bench.device)
    ids = bench.permutation(2 * count).view(2, count)
    words = torch.zeros(2 * count, dtype=torch.int32, device=bench.device)
    cache = bench.random(count + 1, 2, page, kv_heads, dim)
    table = torch.cat([bench.ints([0]), bench.permutation(count) + 1])
    blocks, lens, starts = bench.permutation(count, 1)[:, None] + 1, bench.ints([page] * count), range(count + 1)
    key, value = (bench.random(count, kv_heads, dim, seed=seed) for seed in (1, 2))
    q, starts = bench.random(count, heads, dim, seed=3), bench.ints(starts)
    keys, values, slots = cache[:, 0], cache[:, 1], (blocks.long() * page).flatten()
    update = update_call(bench, count, (bench.size(1024, 32),), 16, torch.float32)
    conv = conv_call(bench, count, bench.size(1024, 32), 4)
    lengths = dict(scale=0.1, max_query_len=1, max_seq_len=page, page_table=table)
    return {
        "copy_units": lambda: ops.copy_units(lanes, size, *ids),
        "zero_units": lambda: ops.zero_units(lanes, size, ids[0]),
        "migrate": lambda: ops.migrate(lanes, size, ids),
        "apply_table_changes": lambda: ops.apply_table_changes(words, ids),
        "write_kv": lambda: ops.write_kv(key, value, keys, values, slots, page_table=table),
        "gather_kv": lambda: ops.gather_kv(keys, values, blocks, lens, max_seq_len=page, page_table=table),
        "paged_attention": lambda: ops.paged_attention(q, keys, values, blocks, lens, starts, **lengths),
        "paged_attention, split": lambda: ops.paged_attention(
            q, keys, values, blocks, lens, starts, **lengths, num_splits=4
        ),
        "selective_state_update": lambda: ops.selective_state_update(**update),
        "causal_conv1d_update": lambda: ops.causal_conv1d_update(**conv),
    }


def launch_rows(bench: Bench) -> Iterator[Row]:
    """Triton kernels launched by every operation, the pool's part in a step, a migration, and the layers of a step.
    More than promised is a failure."""
    for name in operations(bench, 1):
        most = 2 if name.endswith("split") else 1
        yield Row(name, lambda name=name, most=most: _launched(operations(bench, bench.size(17, 2))[name], most))
    for name, most in (("extend and batch", 1), ("the layers of a step", 8)):
        yield Row(name, lambda name=name, most=most: _launched(step(bench)[name], most))

    def migration() -> dict[str, Any]:
        """The move, zeroing the slots that were asked for, and the tables."""
        pool, _ = crowded_pool(bench, 3)
        pool.flush()
        before = pool.stats().units_moved
        with launches() as found:
            take_all(pool, "slot")
            pool.flush()
        moved = pool.stats().units_moved - before
        return _counted(found, 3) | {"units_moved": moved} | ({} if moved else {"ok": False})

    yield Row("migration: all slots taken", migration)


def step(bench: Bench) -> dict[str, Callable[[], Any]]:
    """The parts of a decoding step: the pool's, and two layers of attention (a write and a read each) with two of state
    (two updates each)."""
    pool, sequences = crowded_pool(bench, 3)
    layers = HybridStep(bench, pool, len(sequences))
    latest = [pool.batch(sequences)]

    def tables() -> None:
        pool.extend(sequences)
        latest[0] = pool.batch(sequences)

    return {"extend and batch": tables, "the layers of a step": lambda: layers.run(latest[0])}


def _launched(call: Callable[[], Any], most: int) -> dict[str, Any]:
    with launches() as found:
        call()
    return _counted(found, most)


def _counted(found: Counter[str], most: int) -> dict[str, Any]:
    return {"launches": found.total(), "most": most, "ok": found.total() <= most, "kernels": dict(found)}


def profile_rows(bench: Bench) -> Iterator[Row]:
    """Everything that the device does for the parts of a step, torch's own kernels and copies included. It comes last:
    launches may be slower once the profiler has been at work."""
    for name in ("extend and batch", "the layers of a step"):
        yield Row(name, lambda name=name: _profiled(bench, step(bench)[name]))


def _profiled(bench: Bench, call: Callable[[], Any]) -> dict[str, Any]:
    if bench.device.type != "cuda":
        return {"on_device": None}
    call()
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise NotPossible(f"no profiler here: {error}") from error
    names = [one.name for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return {"on_device": dict(Counter(names))}


def compilation_rows(bench: Bench, compilations: Compilations | None) -> Iterator[Row]:
    """Variants that a sweep of counts compiles after the first count: there must be none."""
    for name in operations(bench, 1):

        def make(name: str = name) -> dict[str, Any]:
            first, *others = bench.size(SWEEP, SWEEP[:1])
            operations(bench, first)[name]()
            before = compilations.kernels.total() if compilations else 0
            for count in others:
                operations(bench, count)[name]()
            found = compilations.kernels.total() - before if compilations else None
            return {"counts": [first, *others], "compiled": found, "ok": not found}

        yield Row(name, make)


def host_rows(bench: Bench) -> Iterator[Row]:
    """µs of the host per eager call, at sizes at which the device is never waited for."""
    word = torch.zeros(1, device=bench.device)
    yield Row("torch add_ of one word", lambda: bench.timer.host(lambda: word.add_(1)))
    for name in operations(bench, 1):
        yield Row(name, lambda name=name: bench.timer.host(operations(bench, 1)[name]))

    rows = bench.size(32, 3)

    def tables() -> dict[str, Any]:
        pool, sequences = crowded_pool(bench, rows)
        pool.batch(sequences)
        return bench.timer.host(lambda: (pool.extend(sequences), pool.batch(sequences)))

    yield Row(f"extend and batch, {rows} sequences", tables)
