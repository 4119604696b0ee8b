"""Problems with random contents, what is right for them in float64, and what a careful low precision makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from avmp import ops
from avmp.cache_pool import CachePool
from avmp.device_batch import Batch
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from bench.gpu.timing import Timer

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass
class Bench:
    """Where everything runs. ``dry``: on the CPU, in Triton's interpreter, at tiny sizes, with nothing measured."""

    device: torch.device
    dry: bool
    timer: Timer

    @property
    def dtype(self) -> torch.dtype:
        """What engines use. The interpreter of triton computes wrongly with bfloat16."""
        return torch.float16 if self.dry else torch.bfloat16

    def size(self, real: Any, tiny: Any) -> Any:
        return tiny if self.dry else real

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    def permutation(self, count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randperm(count, generator=generator, device=self.device, dtype=torch.int32)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Shape:
    """An attention problem: ``lens`` and ``queries`` per row, the context including its queries."""

    lens: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    page: int = 16
    fp8: str | None = None
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    virtual: bool = True
    order: str = "NHD"
    null_page: bool = False
    lse: bool = True
    splits: int = 0


def attention_call(bench: Bench, s: Shape, seed: int = 0) -> dict[str, Any]:
    """The arguments of ``paged_attention``: pages scattered at random over an arena with keys and values adjacent, and
    NaN wherever no token is. Physical ids begin at 0, virtual ones at 1."""
    first = int(s.virtual)
    columns = [-(-length // s.page) for length in s.lens]
    count, total = sum(columns), sum(columns) + 3
    physical = bench.permutation(total, seed)[:count].long() + first
    ids = bench.permutation(total, seed + 1)[:count] + 1 if s.virtual else physical.int()
    page_table = torch.zeros(total + 1, dtype=torch.int32, device=bench.device)
    table = torch.full((len(s.lens), max(columns) + 1), 2**30, dtype=torch.int32, device=bench.device)
    if s.virtual:
        page_table[ids.long()] = physical.int()
    caches = _caches(bench, s, total + first)
    begin = 0
    for row, (length, pages) in enumerate(zip(s.lens, columns, strict=True)):
        table[row, :pages] = ids[begin : begin + pages]
        tokens = torch.arange(length, device=bench.device)
        places = physical[begin : begin + pages][tokens // s.page], tokens % s.page
        for part, cache in enumerate(caches):
            values = bench.random(length, s.kv_heads, cache.shape[3], dtype=torch.float32, seed=seed + 2 * row + part)
            _bits(cache)[places] = _bits(values.to(cache.dtype))
        begin += pages
    if s.null_page:
        table[0, 0] = -1
    starts = torch.tensor([0, *s.queries]).cumsum(0)
    call: dict[str, Any] = dict(
        q=bench.random(int(starts[-1]), s.heads, s.dim, dtype=s.dtype, seed=seed + 99),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        seq_lens=bench.ints(s.lens),
        query_start_loc=bench.ints(starts.tolist()),
        scale=s.dim**-0.5,
        max_query_len=max(s.queries),
        max_seq_len=max(s.lens),
        page_table=page_table if s.virtual else None,
        first_valid_id=first,
        window=s.window,
        softcap=s.softcap,
        return_lse=s.lse,
        num_splits=s.splits,
    )
    if s.alibi:
        call["alibi_slopes"] = bench.random(s.heads, dtype=torch.float32, seed=seed + 3).abs() * 0.1
    if s.sinks:
        call["sinks"] = bench.random(s.heads, dtype=torch.float32, seed=seed + 4)
    if s.fp8:
        call["key_scale"] = bench.random(s.kv_heads, dtype=torch.float32, seed=seed + 5).abs() + 0.5
        call["value_scale"] = bench.random(s.kv_heads, dtype=torch.float32, seed=seed + 6).abs() + 0.5
    return call


def _caches(bench: Bench, s: Shape, pages: int) -> list[torch.Tensor]:
    dtype = FP8[s.fp8] if s.fp8 else s.dtype
    sizes = [s.page * s.kv_heads * dim for dim in (s.dim, s.dim_v)]
    storage = torch.full((pages * sum(sizes) * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=bench.device)
    views = []
    for dim, begin in ((s.dim, 0), (s.dim_v, sizes[0])):
        inner = (s.kv_heads * dim, dim, 1) if s.order == "NHD" else (dim, s.page * dim, 1)
        shape = (pages, s.page, s.kv_heads, dim)
        views.append(storage.view(dtype).as_strided(shape, (sum(sizes), *inner), begin))
    return views


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in FP8.values() else tensor


def attention_by_hand(
    call: dict[str, Any], dtype: torch.dtype, rounded: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp as the specification says, float64: computed in ``dtype``, with keys, values, weights and
    output ``rounded`` to another if asked."""
    q, (kv_heads, dim_v) = call["q"], call["value_cache"].shape[2:]
    out = q.new_zeros(len(q), q.shape[1], dim_v, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float64)
    starts = call["query_start_loc"].tolist()
    for row, length in enumerate(call["seq_lens"].tolist()):
        part = slice(starts[row], starts[row + 1])
        count = part.stop - part.start
        if not count or not length:
            continue
        keys, values, exists = _context(call, row, length, dtype, rounded)
        queries = q[part].to(dtype).view(count, kv_heads, -1, q.shape[2])
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * call["scale"]
        if call["softcap"]:
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        places = torch.arange(length, device=q.device)
        distance = places[length - count :, None] - places
        if "alibi_slopes" in call:
            scores = scores - call["alibi_slopes"].to(dtype).view(kv_heads, -1, 1, 1) * distance.abs()
        seen = exists & (distance >= 0)
        if call["window"]:
            seen = seen & (distance < call["window"])
        scores = scores.masked_fill(~seen, -math.inf)
        top = scores.amax(3, keepdim=True)
        sink = call["sinks"].to(dtype).view(kv_heads, -1, 1, 1) if "sinks" in call else torch.full_like(top, -math.inf)
        top = torch.maximum(top, sink).clamp(min=torch.finfo(dtype).min)  # finite where nothing is seen
        weights = torch.exp(scores - top)
        weights = weights.to(rounded or dtype).to(dtype)
        total = weights.sum(3, keepdim=True) + torch.exp(sink - top)
        safe = torch.where(total > 0, total, 1)
        result = torch.einsum("hgqk,khd->qhgd", weights / safe if rounded is None else weights, values)
        if rounded is not None:
            result = (result / safe.permute(2, 0, 1, 3)).to(rounded)
        out[part] = result.flatten(1, 2).double()
        lse[part] = torch.where(total > 0, top + torch.log(safe), -math.inf).permute(2, 0, 1, 3).flatten(1).double()
    return out, lse


def _context(
    call: dict[str, Any], row: int, length: int, dtype: torch.dtype, rounded: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[length, kv_heads, dim]`` of a row, scaled, zero on null pages, and which of them exist."""
    page = call["key_cache"].shape[1]
    ids = call["block_table"][row, : -(-length // page)].long()
    exists = ids >= call["first_valid_id"]
    ids = torch.where(exists, ids, 0)
    ids = ids if call["page_table"] is None else call["page_table"][ids].long()
    parts = []
    for name in ("key", "value"):
        stored = _bits(call[f"{name}_cache"])[ids].view(call[f"{name}_cache"].dtype).to(dtype).flatten(0, 1)[:length]
        if f"{name}_scale" in call:
            stored = stored * call[f"{name}_scale"].to(dtype).view(-1, 1)
        parts.append(stored if rounded is None else stored.to(rounded).to(dtype))
    live = exists.repeat_interleave(page)[:length]
    keys, values = (part.masked_fill(~live[:, None, None], 0) for part in parts)
    return keys, values, live


def judged(mine: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> tuple[float, float]:
    """The largest error against ``exact``, and the most allowed: twice that of a careful low precision ``low``, and a
    few units in the last place of fp32, in which everything is accumulated."""
    finite = exact.isfinite()
    if not torch.equal(mine[~finite].double(), exact[~finite]):
        return math.inf, 0.0
    size = exact[finite].abs().max().item()
    error, allowed = ((one.double() - exact)[finite].abs().max().item() for one in (mine, low))
    return error, 2 * allowed + 16 * torch.finfo(torch.float32).eps * size


def differing(mine: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """How many bytes differ; none may."""
    if mine.shape != right.shape or mine.dtype != right.dtype:
        return math.inf, 0.0
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (mine, right.to(mine.device)))
    return float((one != other).sum().item()), 0.0


def worst(*judgements: tuple[float, float]) -> tuple[float, float]:
    """The judgement furthest beyond what it allows."""
    return max(judgements, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] - pair[1])


def update_call(
    bench: Bench,
    rows: int,
    dims: tuple[int, ...],
    dstate: int,
    state_dtype: torch.dtype,
    groups: int = 1,
    queries: tuple[int, ...] | None = None,
    null: bool = False,
) -> dict[str, Any]:
    """Arguments of ``selective_state_update``. ``dims`` is (channels,) for Mamba-1, (heads, head_dim) for Mamba-2: A,
    D, dt and its bias are one number per head then, expanded. With ``queries``, speculation: a slot for every token."""
    count, tokens = _tokens(bench, rows, queries)
    ids = _slots(bench, rows, max(queries or (1,)), null)
    one, two = len(dims) == 1, len(dims) == 2
    own, inner = (dims, (dstate,)) if one else ((dims[0], 1), (groups, dstate))
    a = -bench.random(*own, *((dstate,) if one else ()), dtype=torch.float32, seed=3).abs() - 0.1
    call = dict(
        state=bench.random(len(ids["slot_table"]), *dims, dstate, dtype=state_dtype, seed=4),
        x=bench.random(count, *dims, seed=5),
        dt=bench.random(count, *own, seed=6).expand(count, *dims),
        A=a[..., None].expand(*dims, dstate) if two else a,
        B=bench.random(count, *inner, seed=7),
        C=bench.random(count, *inner, seed=8),
        D=bench.random(*own, dtype=torch.float32, seed=9).expand(dims),
        z=bench.random(count, *dims, seed=10),
        dt_bias=bench.random(*own, dtype=torch.float32, seed=11).expand(dims),
        dt_softplus=True,
    )
    if queries is not None:
        call["num_accepted_tokens"] = bench.ints([1 + row % max(queries) for row in range(rows)])
    return call | tokens | ids


def conv_call(
    bench: Bench,
    rows: int,
    channels: int,
    width: int,
    queries: tuple[int, ...] | None = None,
    channels_last: bool = False,
    null: bool = False,
) -> dict[str, Any]:
    """Arguments of ``causal_conv1d_update``; where rows have queries of several tokens, every second begins afresh."""
    count, tokens = _tokens(bench, rows, queries)
    ids = _slots(bench, rows, 1, null)
    inner = (width - 1, channels) if channels_last else (channels, width - 1)
    state = bench.random(len(ids["slot_table"]), *inner, seed=4)
    call = dict(
        x=bench.random(count, channels, seed=5),
        conv_state=state.transpose(1, 2) if channels_last else state,
        weight=bench.random(channels, width, seed=6),
        bias=bench.random(channels, seed=7),
        activation="silu",
    )
    if queries is not None:
        call["has_initial_state"] = torch.arange(rows, device=bench.device) % 2 == 0
    return call | tokens | ids


def _slots(bench: Bench, rows: int, columns: int, null: bool) -> dict[str, torch.Tensor]:
    """Virtual slots, so many to a row, mapped to physical ones at random; the second row has none if ``null``."""
    slots = rows * columns + 2
    ids = (bench.permutation(slots, 2)[: rows * columns] + 1).view(rows, columns)
    if null:
        ids[1] = 0
    table = torch.cat([bench.ints([0]), bench.permutation(slots, 1) + 1])
    return {"state_indices": ids if columns > 1 else ids[:, 0].contiguous(), "slot_table": table}


def _tokens(bench: Bench, rows: int, queries: tuple[int, ...] | None) -> tuple[int, dict[str, Any]]:
    """How many tokens there are, and the arguments that say whose they are."""
    if queries is None:
        return rows, {}
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    return starts[-1], {"query_start_loc": bench.ints(starts), "max_query_len": max(queries)}


def hybrid(bench: Bench) -> Geometry:
    """A small model of two attention and two state layers, whose pages and parts have usual sizes."""
    name = str(bench.dtype).removeprefix("torch.")
    heads, dim, channels = bench.size((8, 128, 2048), (2, 16, 32))
    parts = (StatePart("conv", (channels, 3), name), StatePart("ssm", (channels, 16), "float32"))
    return Geometry(
        tuple(AttentionLayer(layer, heads, dim, dim, name) for layer in (1, 3)),
        tuple(StateLayer(layer, parts) for layer in (0, 2)),
        max_position_embeddings=bench.size(8192, 256),
    )


class HybridStep:
    """What the layers of ``hybrid`` do to the caches of a pool in one step of so many tokens, on random inputs."""

    def __init__(self, bench: Bench, pool: CachePool, tokens: int) -> None:
        geometry, self._pool = pool.layout.geometry, pool
        assert geometry is not None
        self._attention, self._state = geometry.attention_layers, geometry.state_layers
        heads, dim = self._attention[0].kv_heads, self._attention[0].key_dim
        self._q = bench.random(tokens, 4 * heads, dim, seed=1)
        self._k, self._v = (bench.random(tokens, heads, dim, seed=seed) for seed in (2, 3))
        (channels, _), (_, dstate) = (part.shape for part in self._state[0].parts)
        conv, update = conv_call(bench, 1, channels, 4), update_call(bench, tokens, (channels,), dstate, torch.float32)
        self._x, self._weight = update["x"], conv["weight"]
        self._inputs = [update[name] for name in ("x", "dt", "A", "B", "C")]

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """The outputs of all layers."""
        outputs = []
        for layer in self._state:
            conv, ssm = self._pool.state(layer.layer)
            outputs.append(ops.causal_conv1d_update(self._x, conv, self._weight, None, batch, activation="silu"))
            outputs.append(ops.selective_state_update(ssm, *self._inputs, batch, dt_softplus=True))
        for layer in self._attention:
            keys, values = self._pool.kv(layer.layer)
            ops.write_kv(self._k, self._v, keys, values, batch)
            outputs.append(ops.paged_attention(self._q, keys, values, batch, scale=0.1))
        return outputs


def crowded_pool(bench: Bench, left: int) -> tuple[CachePool, list[int]]:
    """A pool that was full, with its first few sequences and its last: some are in the way of whatever takes all."""
    pool = CachePool(hybrid(bench), bench.size("256MiB", "1MiB"), device=bench.device, max_rows=2048, backend="triton")
    everyone = pool.admit([40] * pool.max_sequences(40)).tolist()
    pool.release(everyone[left - 1 : -1])
    kept = [*everyone[: left - 1], everyone[-1]]
    pool.batch(kept)
    pool.extend(kept)
    return pool, kept


def take_all(pool: CachePool, kind: str) -> Any:
    """Handles of as many units as there can be."""
    count = 1
    while pool.fits("take", kind, count + 1):
        count += 1
    return pool.take(kind, count)
