"""Problems for paged attention: pages in a NaN-filled arena, garbage in unused cells, and what is right in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    alibi: str | None = None  # slopes by "head" or "row"
    alibi_form: str = "distance"
    sinks: bool = False
    virtual: bool = True
    first_valid_id: int = 1
    order: str = "NHD"
    sliced: bool = False  # q and caches are part of wider tensors, along their last dimension
    null_columns: tuple[tuple[int, int], ...] = ()
    leading_tokens: int = 0
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


def arena_pages(
    pages: int, parts: list[tuple[int, ...]], dtype: torch.dtype, order: str, sliced: bool = False
) -> list[torch.Tensor]:
    """Views ``[pages, page_tokens, heads, dim]`` of one storage filled with 0xFF (NaN in every format), as in an
    arena: the parts of a page are adjacent, each begins at a multiple of 256 bytes."""
    if sliced:
        wide = [(*part[:2], part[2] + odd) for part, odd in zip(parts, (9, 6), strict=True)]
        views = arena_pages(pages, wide, dtype, order)
        return [view[..., : part[2]] for view, part in zip(views, parts, strict=True)]
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
    caches = arena_pages(used + spare + first, parts, cache_dtype, s.order, s.sliced)
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
    tokens = s.leading_tokens + sum(s.queries) + s.padded_tokens
    starts = torch.tensor([s.leading_tokens, *s.queries]).cumsum(0).tolist()
    q = torch.randn(tokens, s.heads, s.head_dim, generator=g).mul(s.magnitude).to(s.dtype)
    if s.sliced:
        values, wide = q, torch.full((tokens, s.heads, s.head_dim + 7), float("nan"), dtype=s.dtype)
        q = wide[..., 3 : 3 + s.head_dim].copy_(values)
    q[: starts[0]] = q[starts[-1] :] = float("nan")
    call: dict[str, Any] = dict(
        q=q,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        seq_lens=torch.tensor([*s.lens, *[0] * s.padded_rows], dtype=torch.int32),
        query_start_loc=torch.tensor([*starts, *[starts[-1]] * s.padded_rows], dtype=torch.int32),
        scale=1 / math.sqrt(s.head_dim),
        max_query_len=max([*s.queries, 0]),
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
        extras |= {"alibi_slopes": slopes, "alibi": s.alibi_form}
    if s.sinks:
        extras["sinks"] = torch.randn(s.heads, generator=g)
    if s.scales:
        size = {"tensor": (), "head": (s.kv_heads,), "row": (rows, s.kv_heads)}[s.scales]
        extras["key_scale"], extras["value_scale"] = (torch.rand(size, generator=g) + 0.5 for _ in range(2))
    return extras


class Row:
    """One row of a call: ``q`` ``[heads, tokens, head_dim]``, ``k`` and ``v`` ``[heads, keys, width]`` with scales, 0
    where there is no page, in ``dtype``; what is ``rounded`` to before, if given."""

    def __init__(self, call: dict[str, Any], row: int, dtype: torch.dtype, rounded: torch.dtype | None) -> None:
        begin, end = call["query_start_loc"][row : row + 2].tolist()
        self.call, self.dtype, self.tokens = call, dtype, slice(begin, end)
        length, slopes, sinks = int(call["seq_lens"][row]), call.get("alibi_slopes"), call.get("sinks")
        self.q = call["q"][begin:end].to(dtype).transpose(0, 1)
        heads = len(self.q)
        exists, parts = self._read(row, length, rounded)
        self.k, self.v = (part.transpose(0, 1).repeat_interleave(heads // part.shape[1], 0) for part in parts)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        self.hidden = ~(_visible(call, distance) & exists)
        self.bias = torch.zeros(heads, 1, 1, dtype=dtype)
        if slopes is not None:
            slopes = slopes if slopes.dim() == 1 else slopes[row]
            descent = {
                "distance": distance.abs(),
                "position": (length - (end - begin) - torch.arange(length)).expand_as(distance),
                "root": distance.clamp(min=0).to(dtype).sqrt(),
            }
            self.bias = slopes.to(dtype)[:, None, None] * descent[call.get("alibi", "distance")]
        sinks = torch.full((heads,), float("-inf")) if sinks is None else sinks
        self.sinks = sinks.to(dtype)[:, None, None].expand(-1, end - begin, 1)

    def _read(self, row: int, length: int, rounded: torch.dtype | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        call, size = self.call, self.call["key_cache"].shape[1]
        pages = call["block_table"][row, : -(-length // size)].long()
        exists = pages >= call["first_valid_id"]
        if call["page_table"] is not None:
            pages = call["page_table"].long()[pages.where(exists, 0)]
            exists = exists & (pages >= call["first_valid_id"])
        exists, parts = exists.repeat_interleave(size)[:length], []
        for name in ("key", "value"):
            cache, scale = call[f"{name}_cache"], call.get(f"{name}_scale")
            part = cache[pages.clamp(0, len(cache) - 1)].flatten(0, 1)[:length].to(self.dtype)
            part = part.masked_fill(~exists[:, None, None], 0)
            if scale is not None:
                part *= (scale[row] if scale.dim() == 2 else scale).to(self.dtype).view(-1, 1)
            parts.append(part.to(rounded).to(self.dtype) if rounded else part)
        return exists, parts

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """From products of queries and keys ``[heads, tokens, keys]`` to what the softmax is taken of."""
        scores, cap = products * self.call["scale"], self.call["softcap"]
        if cap:
            scores = cap * _tanh(scores / cap, self.call["q"].dtype if self.dtype == torch.float32 else self.dtype)
        return (scores - self.bias).masked_fill(self.hidden, float("-inf"))


def rows(call: dict[str, Any], dtype: torch.dtype, rounded: torch.dtype | None = None) -> Iterator[Row]:
    for row, length in enumerate(call["seq_lens"].tolist()):
        if length and call["query_start_loc"][row] < call["query_start_loc"][row + 1]:
            yield Row(call, row, dtype, rounded)


def results(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64 of a call without a key."""
    out = torch.zeros(*call["q"].shape[:2], call["value_cache"].shape[3], dtype=torch.float64)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float64)
    starts = call["query_start_loc"]
    if call.get("sinks") is not None:
        lse[starts[0] : starts[-1]] = call["sinks"].double()
    return out, lse


def oracle(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64, as the specification says."""
    return _by_hand(call, torch.float64, None, None)


def low_precision(call: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp32, with the weights of values and the result rounded to q's dtype. ``seed`` decides the order in
    which terms are added, and with it which errors are made of those that might be."""
    return _by_hand(call, torch.float32, call["q"].dtype, torch.Generator().manual_seed(seed))


def _by_hand(
    call: dict[str, Any], dtype: torch.dtype, rounded: torch.dtype | None, order: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = results(call)
    for row in rows(call, dtype, rounded):
        scores = row.scores(_product(row.q, row.k.transpose(1, 2), order))
        top = torch.cat([scores, row.sinks], 2).amax(2, keepdim=True)
        top = top.masked_fill(top == float("-inf"), 0)
        weights, sink = torch.exp(scores - top), torch.exp(row.sinks - top)
        ones = torch.ones_like(row.v[:, :, :1])
        lse[row.tokens] = (top + (_product(weights, ones, order) + sink).log()).squeeze(2).T.double()
        if rounded:
            weights = weights.to(rounded).to(dtype)
        sums = _product(weights, torch.cat([row.v, ones], 2), order)
        total = sums[:, :, -1:] + sink
        result = (sums[:, :, :-1] / total).masked_fill(total == 0, 0).transpose(0, 1)
        out[row.tokens] = (result.to(rounded) if rounded else result).double()
    return out, lse


def _product(left: torch.Tensor, right: torch.Tensor, order: torch.Generator | None) -> torch.Tensor:
    """Matrix products; with ``order``, terms are added one after the other, as a matrix unit adds them. A BLAS adds
    in as many strands as suit the machine and the shape, which halves the error here and not there."""
    if order is None:
        return left @ right
    total = left.new_zeros(*left.shape[:2], right.shape[2])
    for i in torch.randperm(left.shape[2], generator=order).tolist():
        total += left[:, :, i, None] * right[:, i, None, :]
    return total


def _tanh(x: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """For 16 bits as hardware without a tanh has it, to a unit in the last place of 1 where it is near 0."""
    return torch.tanh(x) if precision.itemsize > 2 else 1 - 2 / (1 + torch.exp(2 * x))


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


def rounding_units(call: dict[str, Any], right: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """About what rounding to fp32, and to q's dtype where the specification allows it, can cost each number.

    A score is a sum of head_dim terms: it loses by the size of the terms, and where they add up, by the sum on the way.
    What a score or a weight loses moves the output in proportion to the weight, and to how far the value lies from the
    output: ``d out = sum(weight * loss * (value - out))``. Losses are independent, so that their squares add up.
    """
    eps, eps_q = torch.finfo(torch.float32).eps, torch.finfo(call["q"].dtype).eps
    units = [torch.zeros_like(right[0]), (1 + right[1].abs()).nan_to_num(posinf=0.0) * eps / 2]
    for row in rows(call, torch.float64):
        products, sizes = row.q @ row.k.transpose(1, 2), row.q.abs() @ row.k.abs().transpose(1, 2)
        out, lse = (tensor[row.tokens].transpose(0, 1) for tensor in right)
        weights = torch.exp(row.scores(products) - lse.masked_fill(lse == float("-inf"), 0)[:, :, None])
        of_score = call["scale"] * (row.q.shape[2] ** 0.5 * products.abs() + sizes) / 2
        lost = eps / 2 * (of_score + row.bias.abs() + call["softcap"] + 1)
        units[1][row.tokens] += (weights * lost).square().sum(2).sqrt().T
        squares = (weights * (lost + (eps_q / 2 if eps_q > eps else 0))).square()
        spread = squares @ row.v.square() - 2 * out * (squares @ row.v) + out.square() * squares.sum(2, keepdim=True)
        half_units = eps_q * 2.0 ** (torch.frexp(out)[1] - 2)
        unit = spread.clamp(min=0).sqrt() + half_units + eps / 2 * (weights @ row.v.abs())
        units[0][row.tokens] = unit.transpose(0, 1)
    return units[0], units[1]


class Expected:
    """What is right, and how far off a careful implementation in the problem's precision may be: at most twice as far
    as an independent low-precision reference.

    Errors are counted in ``rounding_units``. Without, the largest would be that of the one query whose weight lies on
    the one key with the largest score, and the reference's be small or not by luck. Two measures are taken, over the
    whole tensor and over several orders of summation for the reference: the root of the mean square, which is the
    sharper one, and the largest, which an error in few places cannot hide from. A reference that errs by less than a
    third of the units, or nowhere by half of one, has few numbers and luck: this much is allowed to all.
    """

    ORDERS = 3

    def __init__(self, call: dict[str, Any]) -> None:
        self.right = oracle(call)
        samples = [low_precision(call, seed) for seed in range(self.ORDERS)]
        self.low = [torch.stack(each) for each in zip(*samples, strict=True)]
        self.units = rounding_units(call, self.right)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        self._check("out", out, 0)
        if lse is not None:
            self._check("lse", lse, 1)

    def _check(self, name: str, mine: torch.Tensor, which: int) -> None:
        right, low, units = self.right[which], self.low[which], self.units[which]
        exact = ~right.isfinite() | (units == 0)
        assert torch.equal(mine[exact].double(), right[exact]), name
        if not exact.all():
            error, allowed = ((tensor - right)[..., ~exact] / units[~exact] for tensor in (mine.double(), low))
            found, bound = (values.square().mean().sqrt().item() for values in (error, allowed))
            assert found <= 2 * max(bound, 1 / 3), (name, "root of mean square", found, bound)
            found, bound = (values.abs().max().item() for values in (error, allowed))
            assert found <= 2 * max(bound, 0.5), (name, "largest", found, bound)
