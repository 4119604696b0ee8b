"""Everything that is timed later, first compared with what is right: a fixed grid of small cases.

Numbers are compared with float64, and may be off by twice what a careful computation in the same precision is off.
Bytes are compared with those of the plain-torch backend on the CPU, and none may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from avmp import ops
from avmp.cache_pool import CachePool
from avmp.errors import OutOfMemory
from avmp.layout import Layout
from bench.gpu.problems import (
    Bench,
    HybridStep,
    Shape,
    attention_by_hand,
    attention_call,
    conv_call,
    crowded_pool,
    differing,
    judged,
    take_all,
    update_call,
    worst,
)
from bench.gpu.run import Row
from bench.gpu.states_by_hand import by_hand

Judgement = tuple[float, float]


def rows(bench: Bench) -> Iterator[Row]:
    """One row a case: the largest error and the most allowed, or the number of differing bytes."""
    for name, case in cases(bench):

        def make(case: Callable[[], Judgement] = case) -> dict[str, Any]:
            error, allowed = case()
            return {"error": error, "allowed": allowed, "ok": error <= allowed}

        yield Row(name, make)


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Judgement]]]:
    """In the order of how much else rests on them."""
    yield from (
        ("copy_units, pages", lambda: units(bench, 64 * 1024, "copy_units")),
        ("copy_units, odd units, virtual ids", lambda: units(bench, 4352, "copy_units", virtual=True)),
        ("zero_units", lambda: units(bench, 64 * 1024, "zero_units")),
        ("poison_units", lambda: units(bench, 4352, "poison_units")),
        ("migrate, count on the device", lambda: migration(bench, 64 * 1024, bench.size(50, 10), True)),
        ("migrate, 70,000 units", lambda: migration(bench, 256, bench.size(70_000, 300), False)),
        ("swap_out, swap_in", lambda: swap(bench)),
        ("apply_table_changes", lambda: tables(bench)),
        ("addresses beyond 4 GiB", lambda: far(bench)),
    )
    yield from (
        ("write_kv, virtual ids", lambda: writing(bench, True, None)),
        ("write_kv, physical ids, block 0", lambda: writing(bench, False, None)),
        ("write_kv, e4m3", lambda: writing(bench, True, "e4m3")),
        ("gather_kv, dense", lambda: gathering(bench, False, None)),
        ("gather_kv, ragged", lambda: gathering(bench, True, None)),
        ("gather_kv, e5m2", lambda: gathering(bench, False, "e5m2")),
    )
    for name, shape in attention_shapes(bench).items():
        yield f"attention: {name}", lambda shape=shape: attention(bench, shape)
    yield "attention: other places, same bits", lambda: permuted(bench)
    mamba1, mamba2 = (bench.size(8192, 16),), bench.size((48, 64), (4, 8))
    several, low = (3, 1, 4, 2, 2), bench.dtype
    updates: dict[str, dict[str, Any]] = {
        "Mamba-1": dict(dims=mamba1, dstate=16, state_dtype=torch.float32, null=True),
        "Mamba-2, groups": dict(dims=mamba2, dstate=bench.size(128, 16), state_dtype=low, groups=2, null=True),
        "speculative": dict(dims=mamba2, dstate=bench.size(128, 16), state_dtype=low, queries=several),
    }
    for name, details in updates.items():
        yield (
            f"state update, {name}",
            lambda details=details: state("selective_state_update", "state", update_call(bench, 5, **details)),
        )
    windows: dict[str, dict[str, Any]] = {
        "width 4": dict(width=4, null=True),
        "width 3, channels last": dict(width=3, channels_last=True),
        "several tokens": dict(width=4, queries=several),
    }
    for name, details in windows.items():
        yield (
            f"conv update, {name}",
            lambda details=details: state(
                "causal_conv1d_update", "conv_state", conv_call(bench, 5, bench.size(8448, 32), **details)
            ),
        )
    yield "pool: same bytes as on the CPU", lambda: twin_pools(bench)
    yield "pool: captured, migrated, replayed", lambda: replayed(bench)


# -- units -----------------------------------------------------------------------------------------------------------


def on_cpu(value: Any) -> Any:
    return value.cpu() if torch.is_tensor(value) else value


def same_bytes(operation: str, written: torch.Tensor, *arguments: Any, **keywords: Any) -> Judgement:
    """``operation`` on its device, and by plain torch on the CPU; ``written``, its first argument, has to be equal."""
    right = written.clone().cpu()
    with ops.use_backend("torch"):
        getattr(ops, operation)(
            right, *map(on_cpu, arguments), **{name: on_cpu(value) for name, value in keywords.items()}
        )
    getattr(ops, operation)(written, *arguments, **keywords)
    return differing(written, right)


def arena(bench: Bench, lanes: int, lane_bytes: int) -> torch.Tensor:
    generator = torch.Generator(bench.device).manual_seed(0)
    shape = (lanes, lane_bytes)
    return torch.randint(0, 256, shape, generator=generator, device=bench.device, dtype=torch.uint8)


def units(bench: Bench, unit_bytes: int, operation: str, virtual: bool = False) -> Judgement:
    """A third of the units, null ids among them; the lane ends within a unit."""
    count = bench.size(100, 20)
    lanes = arena(bench, 2, unit_bytes * count + 256)
    ids = bench.permutation(count)[: count // 3 * 2]
    ids[:2] = 0
    table = {"page_table": bench.permutation(count, 1), "first_valid_id": 1} if virtual else {"first_valid_id": 1}
    chosen = ids.view(2, -1) if operation == "copy_units" else ids[None, : count // 3]
    return same_bytes(operation, lanes, unit_bytes, *chosen, **table)


def migration(bench: Bench, unit_bytes: int, count: int, on_device: bool) -> Judgement:
    lanes = arena(bench, 2, unit_bytes * (2 * count + 1))
    moves = bench.permutation(2 * count).view(2, count)
    if on_device:
        return same_bytes("migrate", lanes, unit_bytes, moves, count=bench.ints([count // 2]))
    return same_bytes("migrate", lanes, unit_bytes, moves)


def swap(bench: Bench) -> Judgement:
    """Units to pinned memory, then to other places."""
    size, count = 64 * 1024, 12
    lanes = arena(bench, 2, size * 4 * count)
    before, ids = lanes.clone(), bench.permutation(4 * count)
    host = torch.empty(count, 2, size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    ops.swap_out(lanes, size, ids[:count], host)
    ops.swap_in(lanes, size, host, ids[count : 2 * count])
    view = before.view(2, -1, size)
    view[:, ids[count : 2 * count].long()] = view[:, ids[:count].long()]
    return differing(lanes, before)


def tables(bench: Bench) -> Judgement:
    words = torch.zeros(5000, dtype=torch.int32, device=bench.device)
    changes = torch.stack([bench.permutation(5000)[:1500], bench.permutation(1500, 1)])
    return same_bytes("apply_table_changes", words, changes)


def far(bench: Bench) -> Judgement:
    """Units on either side of 2^32 bytes, and keys beyond 2^31 elements."""
    size, heads, dim, page = 64 * 1024, 8, 128, 16
    pages = bench.size((5 << 30) // size, 40)
    lanes = torch.zeros(1, pages * size, dtype=torch.uint8, device=bench.device)
    ids = bench.ints([pages - 1, pages // 2, pages * 4 // 5])
    cache = lanes.view(bench.dtype).view(pages, 2, page, heads, dim)
    key, value = (bench.random(3 * page, heads, dim, seed=seed) for seed in (1, 2))
    slots = (ids.long()[:, None] * page + torch.arange(page, device=bench.device)).flatten()
    ops.write_kv(key, value, cache[:, 0], cache[:, 1], slots, first_valid_id=0)
    ops.copy_units(lanes, size, ids[:1], bench.ints([3]))
    ops.copy_units(lanes, size, bench.ints([3]), bench.ints([pages - 2]))
    ids = torch.cat([bench.ints([pages - 2]), ids[1:]])[None]
    found = ops.gather_kv(cache[:, 0], cache[:, 1], ids, bench.ints([3 * page]), max_seq_len=3 * page, first_valid_id=0)
    return worst(differing(found[0][0], key), differing(found[1][0], value))


# -- keys and values -------------------------------------------------------------------------------------------------


def kv_shape(bench: Bench, **changed: Any) -> Shape:
    heads, kv_heads, dim = bench.size((32, 8, 128), (4, 2, 32))
    lens = bench.size((1000, 37, 513, 4096), (40, 5, 33))
    base = Shape(lens, (1,) * len(lens), heads, kv_heads, dim, dim, bench.dtype, lse=False)
    return replace(base, **({"dim_v": changed["dim"]} if "dim" in changed else {}) | changed)


def writing(bench: Bench, virtual: bool, fp8: str | None) -> Judgement:
    """Every third place of the cache, null ones among them; more tokens than places."""
    call = attention_call(bench, kv_shape(bench, virtual=virtual, fp8=fp8, lens=(bench.size(700, 40),), queries=(1,)))
    keys, values = call["key_cache"], call["value_cache"]
    places = bench.permutation(len(keys) * keys.shape[1], 7).long()[::3].contiguous()
    places[:3] = -1
    new = [bench.random(len(places) + 2, *keys.shape[2:], seed=seed) * 3 for seed in (20, 21)]
    names = ("page_table", "first_valid_id", "key_scale", "value_scale")
    keywords = {name: call[name] for name in names if name in call}
    whole = torch.empty(0, dtype=torch.uint8, device=bench.device).set_(keys.untyped_storage())
    right = whole.clone().cpu()
    copies = [
        torch.empty(0, dtype=cache.dtype)
        .set_(right.untyped_storage())
        .as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for cache in (keys, values)
    ]
    with ops.use_backend("torch"):
        ops.write_kv(
            *map(on_cpu, new), *copies, places.cpu(), **{name: on_cpu(value) for name, value in keywords.items()}
        )
    ops.write_kv(*new, keys, values, places, **keywords)
    return differing(whole, right)


def gathering(bench: Bench, ragged: bool, fp8: str | None) -> Judgement:
    call = attention_call(bench, kv_shape(bench, fp8=fp8))
    lens = call["seq_lens"]
    keywords = {name: call[name] for name in ("page_table", "first_valid_id", "max_seq_len")}
    if ragged:
        total = torch.cat([bench.ints([0]), lens.cumsum(0, dtype=torch.int32)])
        keywords |= {"cu_seq_lens": total, "num_tokens": int(total[-1]) + 5}
    if fp8:
        keywords |= {"dtype": bench.dtype, "key_scale": call["key_scale"], "value_scale": call["value_scale"]}
    tensors = [call[name] for name in ("key_cache", "value_cache", "block_table", "seq_lens")]
    mine = ops.gather_kv(*tensors, **keywords)
    with ops.use_backend("torch"):
        right = ops.gather_kv(*map(on_cpu, tensors), **{name: on_cpu(value) for name, value in keywords.items()})
    return worst(differing(mine[0], right[0]), differing(mine[1], right[1]))


# -- attention -------------------------------------------------------------------------------------------------------


def attention_shapes(bench: Bench) -> dict[str, Shape]:
    base = kv_shape(bench)
    many = bench.size((70, 1, 300, 8), (12, 1, 9))
    some = (1, 3, 4, 2)[: len(base.lens)]
    longest = bench.size(32_768, 300)
    return {
        "decode, virtual ids": base,
        "decode, physical ids, block 0": replace(base, virtual=False),
        "decode, pages of 64": replace(base, page=64),
        "decode, one long row": replace(base, lens=(longest,), queries=(1,), lse=True),
        "decode, unsplit": replace(base, splits=1),
        "a few tokens, window, soft cap": replace(base, queries=some, window=100, softcap=20.0, lse=True),
        "ALiBi, sinks, a null page": replace(base, alibi=True, sinks=True, null_page=True, lse=True),
        "chunked prefill": replace(base, queries=many, lse=True),
        "prefill, window, ALiBi": replace(base, queries=many, window=60, alibi=True),
        "decode, e4m3, pages by head": replace(base, fp8="e4m3", order="HND"),
        "prefill, e5m2": replace(base, fp8="e5m2", queries=many),
        "fp16, head_dim 80, pages of 24": replace(base, dim=80, dim_v=80, page=24, dtype=torch.float16),
        "fp32, head_dim 64": replace(base, dim=64, dim_v=64, dtype=torch.float32),
        "head_dim 192 and 128": replace(base, dim=192, dim_v=128),
        "head_dim 256, one KV head": replace(base, dim=256, dim_v=256, kv_heads=1, heads=8),
    }


def attention(bench: Bench, shape: Shape) -> Judgement:
    call = attention_call(bench, shape)
    nan = torch.full((len(call["q"]), shape.heads, shape.dim_v), float("nan"), dtype=shape.dtype, device=bench.device)
    result = ops.paged_attention(**call, out=nan)
    out, lse = result if shape.lse else (result, None)
    exact = attention_by_hand(call, torch.float64)
    low = attention_by_hand(call, torch.float32, shape.dtype)
    judgement = judged(out, exact[0], low[0])
    return judgement if not shape.lse else worst(judgement, judged(lse, exact[1], low[1]))


def permuted(bench: Bench) -> Judgement:
    """The same pages at other physical ids."""
    call = attention_call(bench, kv_shape(bench))
    order = bench.permutation(len(call["key_cache"]) - 1, 5).long() + 1
    moved = dict(call)
    for name in ("key_cache", "value_cache"):
        moved[name] = call[name].clone()
        moved[name][order] = call[name][1:]
    table = torch.cat([bench.ints([0]), order.int()])
    moved["page_table"] = table[call["page_table"].long()]
    return differing(ops.paged_attention(**moved), ops.paged_attention(**call))


# -- states ----------------------------------------------------------------------------------------------------------


def state(operation: str, mutated: str, call: dict[str, Any]) -> Judgement:
    """Output and state, by hand: exact, and with fp32 in the middle as careful low precision."""
    (exact, exact_state), (low, low_state) = (
        by_hand(operation, call, dtype) for dtype in (torch.float64, torch.float32)
    )
    mine = getattr(ops, operation)(**call)
    return worst(judged(mine.cpu(), exact, low), judged(call[mutated].cpu(), exact_state, low_state))


# -- the pool --------------------------------------------------------------------------------------------------------


def twin_pools(bench: Bench) -> Judgement:
    """A pool and its twin on the CPU, in plain torch, with the same bytes and the same random life."""
    layout = Layout.from_unit_sizes(4096, 17_408, 512 << 10, 2)
    pools = [
        CachePool(layout, device=device, max_rows=256, max_tokens_per_sequence=512, backend=backend)
        for device, backend in ((bench.device, "triton"), ("cpu", "torch"))
    ]
    null_bytes = layout.first_slot * layout.slot_bytes
    pools[1].lanes[:, null_bytes:].random_(generator=torch.Generator().manual_seed(0))
    pools[0].lanes.copy_(pools[1].lanes)
    lives = [_live(pool, bench.size(200, 40)) for pool in pools]
    if lives[0] != lives[1] or not pools[0].stats().migrations:
        raise AssertionError(f"the twins differ, or nothing has migrated: {lives}")
    for pool in pools:
        pool.flush()
    return worst(*(differing(pools[0].tables.words, pools[1].tables.words),), differing(pools[0].lanes, pools[1].lanes))


def _live(pool: CachePool, steps: int) -> str:
    rng = np.random.default_rng(0)
    present: list[int] = []
    swapped: list[int] = []
    for _ in range(steps):
        choice = rng.random()
        try:
            if choice < 0.4 or not present:
                present += pool.admit(rng.integers(1, 200, 3)).tolist()
                pool.batch(present[-3:])
            elif choice < 0.6:
                present += pool.fork(int(rng.choice(present)), 2).tolist()
            elif choice < 0.7:
                swapped += pool.swap_out([present.pop(int(rng.integers(len(present))))]).tolist()
            elif choice < 0.8 and swapped:
                present += pool.swap_in([swapped.pop()]).tolist()
            else:
                pool.extend(present)
                pool.batch(present)
        except OutOfMemory:
            pool.release([present.pop(int(rng.integers(len(present)))) for _ in range(min(5, len(present)))])
    return pool.digest()


def replayed(bench: Bench) -> Judgement:
    """A decoding step captured into a CUDA graph gives the same bits after its pages and states have moved. (On the
    CPU, where there are no graphs: the same calls once more.)"""
    pool, sequences = crowded_pool(bench, 3)
    batch = pool.batch(sequences)
    pool.lanes.view(bench.dtype).normal_(generator=torch.Generator(bench.device).manual_seed(0))
    step, before = HybridStep(bench, pool, len(sequences)), pool.lanes.clone()
    replay = captured(bench, lambda: step.run(batch))
    pool.lanes.copy_(before)
    right = replay()
    if not all(bool(one.any()) for one in right):
        raise AssertionError("an output of zeros: its layer saw nothing")
    pool.lanes.copy_(before)
    for kind in ("slot", "page"):
        moved = pool.stats().units_moved
        taken = take_all(pool, kind)
        pool.flush()
        if pool.stats().units_moved == moved:
            raise AssertionError(f"taking {len(taken)} of kind {kind} has moved nothing of the other kind")
        pool.give(taken)
    mine = replay()
    return worst(*(differing(one, other) for one, other in zip(mine, right, strict=True)))


def captured(bench: Bench, call: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """Copies of what the call yields, by a CUDA graph of it."""
    call()
    if bench.dry:
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return [result.clone() for result in results]

    return replay
