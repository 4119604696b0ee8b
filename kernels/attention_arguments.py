"""What both implementations of paged attention accept: checks, outputs, and the window in one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, SupportsIndex, get_args

import torch

from avmp.errors import InvalidArgument, Unsupported

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST_HEAD_DIM = 256
UNLIMITED = -1
MOST_WINDOW = 2**30
"""A side of a window that reaches so far reaches beyond every context: kernels add positions to it in 32 bits."""
Window = int | tuple[int, int] | None
Alibi = Literal["distance", "position", "root"]
ALIBI_FORMS: tuple[Alibi, ...] = get_args(Alibi)


class Problem(NamedTuple):
    """One call, checked: sizes, outputs, and how far a query sees to either side of its own position.

    A query at position i sees key j if ``i - left <= j <= i + right``; -1 is no limit on that side.
    """

    rows: int
    tokens: int
    query_heads: int
    kv_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    page_tokens: int
    left: int
    right: int
    alibi: Alibi
    out: torch.Tensor
    lse: torch.Tensor | None


def check_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    page_table: torch.Tensor | None,
    first_valid_id: int,
    window: Window,
    causal: bool,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    alibi: Alibi,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
    num_splits: int,
) -> Problem:
    """Raises InvalidArgument or Unsupported, or says what is to be computed. Reads shapes and dtypes, no values."""
    if q.dim() != 3 or key_cache.dim() != 4 or value_cache.dim() != 4 or block_table.dim() != 2:
        raise InvalidArgument(
            "paged_attention: expected q [tokens, heads, head_dim], caches [pages, page_tokens, kv_heads, head_dim] "
            f"and block_table [rows, width], got {q.dim()}, {key_cache.dim()}, {value_cache.dim()} and "
            f"{block_table.dim()} dimensions"
        )
    tokens, query_heads, head_dim = q.shape
    pages, page_tokens, kv_heads, head_dim_v = value_cache.shape
    rows = len(block_table)
    if key_cache.shape != (pages, page_tokens, kv_heads, head_dim):
        raise InvalidArgument(
            f"paged_attention: key cache {tuple(key_cache.shape)} does not fit value cache "
            f"{tuple(value_cache.shape)} and q {tuple(q.shape)}: expected [pages, page_tokens, kv_heads, head_dim]"
        )
    if page_tokens == 0:
        raise InvalidArgument(f"paged_attention: caches {tuple(key_cache.shape)}: expected pages of 1 token at least")
    if kv_heads == 0 or query_heads == 0 or query_heads % kv_heads:
        raise InvalidArgument(
            f"paged_attention: {query_heads} query heads and {kv_heads} KV heads: expected a multiple, 1 time or more"
        )
    if not 1 <= head_dim <= MOST_HEAD_DIM or not 1 <= head_dim_v <= MOST_HEAD_DIM:
        raise Unsupported(
            f"paged_attention: head_dim {head_dim} and {head_dim_v} for values; 1 to {MOST_HEAD_DIM} is offered"
        )
    if seq_lens.shape != (rows,) or query_start_loc.shape != (rows + 1,):
        raise InvalidArgument(
            f"paged_attention: {rows} rows need seq_lens [{rows}] and query_start_loc [{rows + 1}], got "
            f"{tuple(seq_lens.shape)} and {tuple(query_start_loc.shape)}"
        )
    _check_dtypes(q, key_cache, value_cache)
    _check_tables(block_table, seq_lens, query_start_loc, page_table)
    for name, tensor in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        require_unit_stride("paged_attention", name, tensor)
    require_one_device(
        "paged_attention",
        q,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        page_table=page_table,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        out=out,
    )
    for name, number in (("first_valid_id", first_valid_id), ("num_splits", num_splits)):
        if number < 0:
            raise InvalidArgument(f"paged_attention: {name} {number}: expected 0 or more")
    if not 0 <= softcap < math.inf:
        raise InvalidArgument(f"paged_attention: softcap {softcap}: expected 0 (none) or more, and finite")
    if alibi not in ALIBI_FORMS:
        raise InvalidArgument(f"paged_attention: alibi {alibi!r}: expected one of {', '.join(ALIBI_FORMS)}")
    per_row = {(query_heads,), (rows, query_heads)}
    _check_shape("alibi_slopes", alibi_slopes, per_row)
    _check_shape("sinks", sinks, {(query_heads,)})
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        _check_shape(name, scale, {(), (1,), (kv_heads,), (rows, kv_heads)})
    for name, numbers in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is not None:
            require_unit_stride("paged_attention", name, numbers)
    left, right = window_bounds(window, causal)
    shape = (tokens, query_heads, head_dim_v)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif out.shape != shape or out.dtype not in QUERY_DTYPES or (head_dim_v > 1 and out.stride(2) != 1):
        raise InvalidArgument(
            f"paged_attention: out must be float16, bfloat16 or float32 {shape} with a contiguous last dimension, got "
            f"{out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )
    elif _may_overlap(out):
        raise InvalidArgument(
            f"paged_attention: elements of out {tuple(out.shape)} with strides {out.stride()} may share memory: "
            "expected each its own"
        )
    lse = torch.empty(tokens, query_heads, dtype=torch.float32, device=q.device) if return_lse else None
    group = query_heads // kv_heads
    sizes = rows, tokens, query_heads, kv_heads, group, head_dim, head_dim_v, page_tokens
    return Problem(*sizes, left, right, alibi, out, lse)


def window_bounds(window: Window, causal: bool) -> tuple[int, int]:
    """``(left, right)`` as in Problem. An integer n means the n latest keys, the query's own included; a pair is
    (left, right) with -1 for no limit; ``causal`` hides what lies right of the query in any case."""
    if window is None:
        left, right = UNLIMITED, UNLIMITED
    elif isinstance(window, list | tuple):
        if len(window) != 2:
            raise InvalidArgument(f"window {window}: expected a pair (left, right), -1 for no limit")
        left, right = (_side(window, side) for side in window)
    else:
        latest = _integer(window, window)
        if latest < 1:
            raise InvalidArgument(f"window {window}: expected at least 1 (the query's own key), or None")
        left, right = _side(window, latest - 1), 0
    return left, 0 if causal else right


def _side(window: object, side: SupportsIndex) -> int:
    reach = _integer(window, side)
    return reach if 0 <= reach < MOST_WINDOW else UNLIMITED


def _integer(window: object, number: SupportsIndex) -> int:
    """Of any kind that can count, such as numpy's; a truth value is none."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise InvalidArgument(f"window {window!r}: expected an integer, a pair of them, or None")


def require_unit_stride(operation: str, name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidArgument unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgument(f"{operation}: the last dimension of {name} must be contiguous, has {tensor.stride()}")


def require_one_device(operation: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises InvalidArgument unless all tensors lie where the first one does."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise InvalidArgument(
                f"{operation}: {name} on {tensor.device}: expected {first.device}, as the first tensor"
            )


def check_starts(
    operation: str, starts: Sequence[int], tokens: int, most: int | None = None, name: str = "query_start_loc"
) -> None:
    """Raises InvalidArgument unless these are running sums within ``tokens``, of rows with at most ``most`` tokens."""
    before = 0
    for place, start in enumerate(starts):
        if not 0 <= start <= tokens:
            raise InvalidArgument(
                f"{operation}: {name}[{place}] = {start}: expected 0 to {tokens}, there are {tokens} tokens"
            )
        if start < before:
            raise InvalidArgument(
                f"{operation}: {name}[{place}] = {start} is less than {before} before it: expected running sums"
            )
        if place and most is not None and start - before > most:
            raise InvalidArgument(
                f"{operation}: row {place - 1} has {start - before} tokens by {name}: expected at most {most}, as "
                "max_query_len says"
            )
        before = start


def _check_dtypes(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if q.dtype not in QUERY_DTYPES:
        raise Unsupported(f"paged_attention: q of {q.dtype}; float16, bfloat16 and float32 are offered")
    for name, cache in (("key", key_cache), ("value", value_cache)):
        if cache.dtype != q.dtype and cache.dtype not in FP8_DTYPES:
            raise Unsupported(
                f"paged_attention: {name} cache of {cache.dtype} with q of {q.dtype}; the same dtype, float8_e4m3fn "
                "and float8_e5m2 are offered"
            )


def _check_tables(
    block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, page_table: torch.Tensor | None
) -> None:
    tables = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    if page_table is not None:
        tables["page_table"] = page_table
    for name, table in tables.items():
        if table.dtype != torch.int32:
            raise InvalidArgument(f"paged_attention: {name} must be int32, is {table.dtype}")
        if name == "page_table" and table.dim() != 1:
            raise InvalidArgument(f"paged_attention: page_table {tuple(table.shape)}: expected [ids]")
        require_unit_stride("paged_attention", name, table)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may have one place; not so where each dimension steps over all that smaller steps reach."""
    reached = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reached:
            return tensor.numel() > 0
        reached += (size - 1) * step
    return False


def _check_shape(name: str, tensor: torch.Tensor | None, shapes: set[tuple[int, ...]]) -> None:
    if tensor is not None and tuple(tensor.shape) not in shapes:
        raise InvalidArgument(
            f"paged_attention: {name} has shape {tuple(tensor.shape)}, expected one of {sorted(shapes)}"
        )
