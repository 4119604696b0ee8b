"""Problems for paged attention: pages in a NaN-filled arena, garbage in unused cells, and what is right in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

GARBAGE_IDS = (-7_777_777, 2**30)
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Shape:
    """What a problem looks like; ``lens`` and ``queries`` are per row, the context including its queries."""

    lens: tuple[int, ...] = (37, 5, 64)
    queries: tuple[int, ...] = (1, 1, 1)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32
    fp8: str | None = None
    scales: str | None = None  # "tensor", "head" or "row"
    window: Any = None
    causal: bool = True
    softcap: float = 0.0
    alibi: str | None = None  # "head" or "row"
    sinks: bool = False
    virtual: bool = True
    first_valid_id: int = 1
    order: str = "NHD"
    null_columns: tuple[tuple[int, int], ...] = ()
    padded_rows: int = 0
    padded_tokens: int = 0
    magnitude: float = 1.0


@dataclass
class Problem:
    """The arguments of a call, and the sequences' keys and values as they were before they came into pages."""

    shape: Shape
    call: dict[str, Any]
    arena: torch.Tensor

    def with_(self, **changed: Any) -> dict[str, Any]:
        return self.call | changed


def arena_pages(pages: int, parts: list[tuple[int, ...]], dtype: torch.dtype, order: str) -> list[torch.Tensor]:
    """Views ``[pages, page_tokens, heads, dim]`` of one storage filled with 0xFF (NaN in every format), as in an
    arena: the parts of a page are adjacent, each begins at a multiple of 256 bytes."""
    sizes = [-(-math.prod(part) * dtype.itemsize // 256) * 256 for part in parts]
    storage = torch.full((pages * sum(sizes),), 0xFF, dtype=torch.uint8).view(dtype)
    views, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        tokens, heads, dim = part
        inner = (heads * dim, dim, 1) if order == "NHD" else (dim, tokens * dim, 1)
        views.append(
            storage.as_strided((pages, *part), (sum(sizes) // dtype.itemsize, *inner), begin // dtype.itemsize)
        )
        begin += size
    return views


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    rows, s = len(shape.lens), shape
    columns = [-(-length // s.page_tokens) for length in s.lens]
    used, first = sum(columns), s.first_valid_id
    spare = 3
    physical = torch.randperm(used + spare, generator=g)[:used] + first
    virtual = torch.randperm(used + spare, generator=g)[:used] + first
    ids = virtual if s.virtual else physical
    page_table = torch.zeros(used + spare + first, dtype=torch.int32)
    page_table[virtual] = physical.int()
    width = max([*columns, 1]) + 2
    table = torch.empty(rows + s.padded_rows, width, dtype=torch.int32)
    table[:, ::2], table[:, 1::2] = GARBAGE_IDS
    cache_dtype = FP8[s.fp8] if s.fp8 else s.dtype
    parts = [(s.page_tokens, s.kv_heads, s.head_dim), (s.page_tokens, s.kv_heads, s.head_dim_v)]
    caches = arena_pages(used + spare + first, parts, cache_dtype, s.order)
    taken = 0
    for row, (length, count) in enumerate(zip(s.lens, columns, strict=True)):
        table[row, :count] = ids[taken : taken + count]
        for cache in caches:
            values = torch.randn(length, s.kv_heads, cache.shape[3], generator=g) * s.magnitude
            for column in range(count):
                part = values[column * s.page_tokens : (column + 1) * s.page_tokens]
                cache[physical[taken + column], : len(part)] = part.to(cache_dtype)
        taken += count
    for row, column in s.null_columns:
        table[row, column] = first - 1 if column % 2 else -1
    if s.padded_rows:
        table[rows:] = 0
    tokens = sum(s.queries) + s.padded_tokens
    starts = torch.tensor([0, *s.queries]).cumsum(0).tolist()
    q = torch.randn(tokens, s.heads, s.head_dim, generator=g).mul(s.magnitude).to(s.dtype)
    q[sum(s.queries) :] = float("nan")
    call: dict[str, Any] = dict(
        q=q,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        seq_lens=torch.tensor([*s.lens, *[0] * s.padded_rows], dtype=torch.int32),
        query_start_loc=torch.tensor([*starts, *[starts[-1]] * s.padded_rows], dtype=torch.int32),
        scale=1 / math.sqrt(s.head_dim),
        max_query_len=max([*s.queries, 1]),
        max_seq_len=max([*s.lens, 1]),
        page_table=page_table if s.virtual else None,
        first_valid_id=first,
        window=s.window,
        causal=s.causal,
        softcap=s.softcap,
        return_lse=True,
    )
    call |= _extras(s, rows + s.padded_rows, g)
    return Problem(shape, call, caches[0])


def _extras(s: Shape, rows: int, g: torch.Generator) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if s.alibi:
        slopes = torch.rand(*((rows, s.heads) if s.alibi == "row" else (s.heads,)), generator=g) * 0.2
        extras["alibi_slopes"] = slopes
    if s.sinks:
        extras["sinks"] = torch.randn(s.heads, generator=g)
    if s.scales:
        size = {"tensor": (), "head": (s.kv_heads,), "row": (rows, s.kv_heads)}[s.scales]
        extras["key_scale"], extras["value_scale"] = (torch.rand(size, generator=g) + 0.5 for _ in range(2))
    return extras


def oracle(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64, key by key as the specification says."""
    return _by_hand(call, torch.float64, None)


def low_precision(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with fp32 sums, and with weights (of the sum, too) and result rounded to q's dtype."""
    return _by_hand(call, torch.float32, call["q"].dtype)


def _by_hand(
    call: dict[str, Any], dtype: torch.dtype, rounded: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    q, keys, values = call["q"], call["key_cache"], call["value_cache"]
    group = q.shape[1] // keys.shape[2]
    out = torch.zeros(len(q), q.shape[1], values.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    starts = call["query_start_loc"].tolist()
    for row, length in enumerate(call["seq_lens"].tolist()):
        k, v, exists = _context(call, row, length, dtype, rounded)
        for token in range(starts[row], starts[row + 1]):
            position = length - (starts[row + 1] - token)
            for head in range(q.shape[1]):
                h = head // group
                scores = (q[token, head].to(dtype) @ k[:, h].T if length else k.new_zeros(0)) * call["scale"]
                if call["softcap"]:
                    scores = call["softcap"] * torch.tanh(scores / call["softcap"])
                distance = position - torch.arange(length)
                slopes = call.get("alibi_slopes")
                if slopes is not None:
                    slope = slopes[head] if slopes.dim() == 1 else slopes[row, head]
                    scores = scores - slope.to(dtype) * distance.abs()
                scores = scores[_visible(call, distance) & exists]
                sink = call["sinks"][head : head + 1].to(dtype) if call.get("sinks") is not None else scores[:0]
                logits = torch.cat([scores, sink])
                if not len(logits):
                    continue
                seen, top = v[_visible(call, distance) & exists, h], logits.max()
                weights = torch.exp(logits - top)
                weights[: len(scores)] = weights[: len(scores)].to(rounded or dtype)
                lse[token, head] = top + weights.sum().log()
                out[token, head] = weights[: len(scores)] @ seen / weights.sum()
    return (out.to(rounded).double() if rounded else out), lse


def _visible(call: dict[str, Any], distance: torch.Tensor) -> torch.Tensor:
    window = call["window"]
    left, right = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)
    right = 0 if call["causal"] else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen


def _context(
    call: dict[str, Any], row: int, length: int, dtype: torch.dtype, rounded: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of a row, scaled, and which of them exist."""
    parts, exists = [], torch.ones(length, dtype=torch.bool)
    for name in ("key", "value"):
        cache, scale = call[f"{name}_cache"], call.get(f"{name}_scale")
        size = cache.shape[1]
        part = torch.zeros(length, *cache.shape[2:], dtype=dtype)
        for token in range(length):
            page = int(call["block_table"][row, token // size])
            if page >= call["first_valid_id"] and call["page_table"] is not None:
                page = int(call["page_table"][page])
            exists[token] = page >= call["first_valid_id"]
            if exists[token]:
                part[token] = cache[page, token % size].to(dtype)
        if scale is not None:
            part *= (scale[row] if scale.dim() == 2 else scale).to(dtype).view(-1, 1)
        parts.append(part.to(rounded).to(dtype) if rounded else part)
    return parts[0], parts[1], exists


class Expected:
    """What is right, and how far off a careful implementation in the problem's precision may be."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.right, self.low = oracle(call), low_precision(call)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """The error is at most twice that of the low-precision reference, over the whole tensor, for either result."""
        eps = torch.finfo(torch.float32).eps
        for mine, theirs, right in zip((out, lse), self.low, self.right, strict=True):
            if mine is None:
                continue
            finite = right.isfinite()
            assert torch.equal(mine[~finite].double(), right[~finite])
            error, allowed = ((x.double()[finite] - right[finite]).abs() for x in (mine, theirs))
            size = right[finite].abs().max().item() if finite.any() else 0.0
            assert not error.numel() or error.max() <= 2 * allowed.max() + 4 * eps * size, (error.max(), allowed.max())
