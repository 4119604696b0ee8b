"""Paged attention in Triton: decode split over the context, its merge, and prefill; see ``attention_reference.py`` for
what is computed, and ``attention_tiles.py`` for the loop that both kernels share.

Decode (FlashDecoding, https://pytorch.org/blog/flash-decoding): one program per row, KV head, tile of packed query rows
and split of the context; a second kernel merges the splits. The number of splits depends on shapes only, their length
on each row's own context, so that the host waits for nothing and equal calls give equal bits. Prefill
(FlashAttention-2, https://arxiv.org/abs/2307.08691): one program per KV head and tile of packed query rows, the
heaviest first; keys that all rows see are not tested against the causal limit.

A batch with rows of both kinds takes both launches; each row is done by one of them.

Floor: decode reads each visible key and value once per KV head, q, and writes out; for each KV head also 8 bytes of ids
per page, or where pages are no power of two, or larger than a tile, per chunk (``attention_launch.chunk_tokens``). With
g query heads per KV head that is g operations per byte at bf16, bound by memory for every g in use. Prefill is bound by
arithmetic from some 200 query rows per KV head on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.kernels import attention_tuning as tuning
from avmp.kernels.attention_arguments import Alibi, Window, check_attention
from avmp.kernels.attention_launch import Shared, Tables
from avmp.kernels.attention_tiles import (
    LN2,
    LOG2E,
    attend,
    finish,
    head_scale,
    query_offsets,
    row_offset,
    zero_unowned,
)
from avmp.kernels.launch import INTERPRETED, cdiv, device_guard, multiprocessors, require_runnable

_COUNTS = ["rows", "tokens", "most_queries", "first_valid_id", "left", "right", "table_row"]
_TABLES = ["block_table", "seq_lens", "query_start_loc", "page_table"]


@triton.jit
def _visible_range(first, last, length, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """Keys that queries at positions ``first`` to ``last`` see, from a multiple of CHUNK on: begin and end."""
    begin, end = 0, length
    if LEFT:
        begin = tl.maximum(first - left, 0) // CHUNK * CHUNK
    if RIGHT:
        end = tl.maximum(tl.minimum(length, last + right + 1), 0)
    return begin, end


@triton.jit
def _row_queries(query_start_loc, row, tokens):
    """First token and number of query tokens of a row: of those that there are, whatever the table holds."""
    first_token = tl.maximum(tl.load(query_start_loc + row), 0)
    return first_token, tl.minimum(tl.load(query_start_loc + row + 1), tokens) - first_token


@triton.jit
def part_places(row, head, query, split, heads, most_queries, splits):
    """int64 places in ``[rows, heads, most_queries, splits]``."""
    return ((row.to(tl.int64) * heads + head) * most_queries + query) * splits + split


@triton.jit
def first_tile(first_token, row, group, tile_rows):
    """int32 number of the tile with which a row begins: the tiles of all rows are counted, one more than is full for
    each row, so that none has to look at the others."""
    return (first_token.to(tl.int64) * group // tile_rows + row).to(tl.int32)


@triton.jit
def _load_queries(q, tokens, heads, valid, q_token, q_head, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    dims = tl.arange(0, BLOCK_DIM)
    offsets = query_offsets(tokens, heads, q_token, q_head)[:, None] + dims[None, :]
    return tl.load(q + offsets, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _store_results(
    out, lse, acc, lse_values, tokens, heads, valid, out_token, out_head, HEADS: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_DIM_V: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_DIM_V)
    offsets = query_offsets(tokens, heads, out_token, out_head)[:, None] + dims[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=valid[:, None] & (dims < DIM_V)[None, :])
    if lse is not None:
        tl.store(lse + query_offsets(tokens, heads, HEADS, 1), lse_values, mask=valid)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def decode_kernel(
    q, key_cache, value_cache, out, lse, parts, part_lse,
    block_table, seq_lens, query_start_loc, page_table, slopes, sinks, key_scale, value_scale,
    scale, cap, left, right, rows, tokens, most_queries, first_valid_id, table_row,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head,
    slope_row, key_scale_row, key_scale_head, value_scale_row, value_scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_DIM_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, FORMAT_K: tl.constexpr, FORMAT_V: tl.constexpr,
    HINT_K: tl.constexpr, HINT_V: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Rows of 1 to ``most_queries`` queries. Grid: rows, KV heads times tiles of packed rows, splits.

    With one split results go to ``out``; otherwise to ``parts`` fp32 ``[rows, HEADS, most_queries, SPLITS,
    BLOCK_DIM_V]`` and ``part_lse`` fp32 of the same without the last dimension. An empty split writes -inf alone.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row, kv_head, tile, split = (
        tl.program_id(0),
        tl.program_id(1) % KV_HEADS,
        tl.program_id(1) // KV_HEADS,
        tl.program_id(2),
    )
    first_token, queries = _row_queries(query_start_loc, row, tokens)
    if (tile == 0) & (split == 0):
        zero_unowned(
            out, lse, query_start_loc, rows, tokens, row, tl.num_programs(0), kv_head, out_token, out_head,
            HEADS, GROUP, triton.next_power_of_2(GROUP), DIM_V, BLOCK_DIM_V,
        )  # fmt: skip
    if (queries <= most_queries) & (tile * M < queries * GROUP):
        length = tl.load(seq_lens + row)
        packed = tile * M + tl.arange(0, M)
        query, heads = packed // GROUP, kv_head * GROUP + packed % GROUP
        valid = query < queries
        positions = length - queries + query
        block = _load_queries(q, first_token + query, heads, valid, q_token, q_head, DIM, BLOCK_DIM)
        begin, end = _visible_range(length - queries, length - 1, length, left, right, LEFT, RIGHT, CHUNK)
        if SPLITS > 1:
            share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, SPLITS), N) * N, LEAST_KEYS)
            begin += split * share
            end = tl.minimum(begin + share, end)
        if slopes is not None:
            slope = tl.load(slopes + row_offset(row, slope_row) + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        else:
            slope = None
        acc, total, top = attend(
            tl.zeros([M, BLOCK_DIM_V], tl.float32), tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32),
            block, positions, length - queries, slope, key_cache, value_cache,
            block_table + row_offset(row, table_row), page_table, begin, end, kv_head,
            scale * head_scale(key_scale, row, kv_head, key_scale_row, key_scale_head), cap, left, right,
            first_valid_id, k_page, k_token, k_head, v_page, v_token, v_head,
            PAGE, CHUNK, N, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, LEFT, RIGHT, CAP, ALIBI, FORMAT_K, FORMAT_V, HINT_K,
            HINT_V, False,
        )  # fmt: skip
        factor = head_scale(value_scale, row, kv_head, value_scale_row, value_scale_head)
        if SPLITS == 1:
            acc, lse_values = finish(acc, total, top, sinks, heads, valid, factor)
            _store_results(
                out,
                lse,
                acc,
                lse_values,
                first_token + query,
                heads,
                valid,
                out_token,
                out_head,
                HEADS,
                DIM_V,
                BLOCK_DIM_V,
            )
        else:
            acc, lse_values = finish(acc, total, top, None, heads, valid, factor)
            place = part_places(row, heads, query, split, HEADS, most_queries, SPLITS)
            dims = tl.arange(0, BLOCK_DIM_V)
            some = valid & (total != 0)
            tl.store(
                parts + place[:, None] * BLOCK_DIM_V + dims[None, :], acc, mask=some[:, None] & (dims < DIM_V)[None, :]
            )
            tl.store(part_lse + place, lse_values, mask=valid)


@triton.jit(do_not_specialize=["most_queries", "tokens"], do_not_specialize_on_alignment=["query_start_loc"])
def merge_kernel(
    parts, part_lse, out, lse, query_start_loc, sinks, most_queries, tokens, out_token, out_head,
    HEADS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighs the splits of one query and head by their log-sum-exp. Grid: rows times most_queries, heads."""
    row, query, head = tl.program_id(0) // most_queries, tl.program_id(0) % most_queries, tl.program_id(1)
    first_token, queries = _row_queries(query_start_loc, row, tokens)
    if (query < queries) & (queries <= most_queries):
        place = part_places(row, head, query, tl.arange(0, SPLITS), HEADS, most_queries, SPLITS)
        dims = tl.arange(0, BLOCK_DIM_V)
        each = tl.load(part_lse + place) * LOG2E
        highest = tl.max(each, 0)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            highest = tl.maximum(highest, sink)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(each - shift)
        total = tl.sum(weights, 0)
        if sinks is not None:
            total += tl.exp2(sink - shift)
        # An empty split has written nothing: what lies there is not read, since 0 times NaN is NaN.
        mask = (each != float("-inf"))[:, None] & (dims < DIM_V)[None, :]
        values = tl.load(parts + place[:, None] * BLOCK_DIM_V + dims[None, :], mask=mask, other=0.0)
        some = total != 0  # also true of NaN
        safe = tl.where(some, total, 1.0)
        result = tl.sum(values * weights[:, None], 0) / safe
        token = first_token + query
        where = query_offsets(token, head, out_token, out_head)
        tl.store(out + where + dims, result.to(out.dtype.element_ty), mask=dims < DIM_V)
        if lse is not None:
            where = query_offsets(token, head, HEADS, 1)
            tl.store(lse + where, tl.where(some, (shift + tl.log2(safe)) * LN2, float("-inf")))


@triton.jit
def _row_of_tile(tile, query_start_loc, rows, GROUP: tl.constexpr, M: tl.constexpr):
    """The row whose tiles begin at or before ``tile``."""
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if first_tile(tl.load(query_start_loc + middle), middle, GROUP, M) <= tile:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def prefill_kernel(
    q, key_cache, value_cache, out, lse,
    block_table, seq_lens, query_start_loc, page_table, slopes, sinks, key_scale, value_scale,
    scale, cap, left, right, rows, tokens, most_queries, first_valid_id, table_row,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head,
    slope_row, key_scale_row, key_scale_head, value_scale_row, value_scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_DIM_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
    FORMAT_K: tl.constexpr, FORMAT_V: tl.constexpr, HINT_K: tl.constexpr, HINT_V: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """Rows of more than ``most_queries`` queries. Grid: an upper bound of all rows' tiles, KV heads."""
    kv_head = tl.program_id(1)
    zero_unowned(
        out, lse, query_start_loc, rows, tokens, tl.program_id(0), tl.num_programs(0), kv_head, out_token, out_head,
        HEADS, GROUP, triton.next_power_of_2(GROUP), DIM_V, BLOCK_DIM_V,
    )  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see the most keys: they start first
    row = _row_of_tile(tile, query_start_loc, rows, GROUP, M)
    first_token, queries = _row_queries(query_start_loc, row, tokens)
    first_packed = (tile - first_tile(first_token, row, GROUP, M)) * M
    if (queries > most_queries) & (first_packed >= 0) & (first_packed < queries * GROUP):
        length = tl.load(seq_lens + row)
        packed = first_packed + tl.arange(0, M)
        query, heads = packed // GROUP, kv_head * GROUP + packed % GROUP
        valid = query < queries
        positions = length - queries + query
        block = _load_queries(q, first_token + query, heads, valid, q_token, q_head, DIM, BLOCK_DIM)
        first = length - queries + first_packed // GROUP
        last = tl.minimum(length - queries + (first_packed + M - 1) // GROUP, length - 1)
        begin, end = _visible_range(first, last, length, left, right, LEFT, RIGHT, CHUNK)
        if slopes is not None:
            slope = tl.load(slopes + row_offset(row, slope_row) + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        else:
            slope = None
        table = block_table + row_offset(row, table_row)
        key_factor = scale * head_scale(key_scale, row, kv_head, key_scale_row, key_scale_head)
        acc, total = tl.zeros([M, BLOCK_DIM_V], tl.float32), tl.zeros([M], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        if RIGHT:
            # Up to the first row's limit, whole tiles of keys need no test against it.
            free = begin + tl.maximum(tl.minimum(first + right + 1, end) - begin, 0) // N * N
            acc, total, top = attend(
                acc, total, top, block, positions, length - queries, slope, key_cache, value_cache, table, page_table,
                begin, free, kv_head, key_factor, cap, left, right, first_valid_id,
                k_page, k_token, k_head, v_page, v_token, v_head,
                PAGE, CHUNK, N, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, LEFT, False, CAP, ALIBI, FORMAT_K, FORMAT_V, HINT_K,
                HINT_V, True,
            )  # fmt: skip
            begin = free
        acc, total, top = attend(
            acc, total, top, block, positions, length - queries, slope, key_cache, value_cache, table, page_table,
            begin, end, kv_head, key_factor, cap, left, right, first_valid_id,
            k_page, k_token, k_head, v_page, v_token, v_head,
            PAGE, CHUNK, N, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, LEFT, RIGHT, CAP, ALIBI, FORMAT_K, FORMAT_V, HINT_K,
            HINT_V, False,
        )  # fmt: skip
        factor = head_scale(value_scale, row, kv_head, value_scale_row, value_scale_head)
        acc, lse_values = finish(acc, total, top, sinks, heads, valid, factor)
        _store_results(
            out, lse, acc, lse_values, first_token + query, heads, valid, out_token, out_head, HEADS, DIM_V, BLOCK_DIM_V
        )


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    window: Window = None,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi: Alibi = "distance",
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``attention_reference.paged_attention`` by Triton, on the current stream; nothing waits for the device.

    ``num_splits`` overrides into how many parts contexts are cut in decode (0: by the shapes); it is rounded up to a
    power of two of at most ``attention_tuning.MOST_SPLITS``.
    """
    problem = check_attention(
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        page_table=page_table,
        first_valid_id=first_valid_id,
        window=window,
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        alibi=alibi,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=return_lse,
        out=out,
        num_splits=num_splits,
    )
    require_runnable(q)
    out, lse = problem.out, problem.lse
    if problem.tokens == 0 or problem.rows == 0 or max_query_len <= 0:
        out.zero_()
        return out, lse if lse is None else lse.fill_(float("-inf"))
    tables = Tables(block_table, seq_lens, query_start_loc, page_table, alibi_slopes, sinks, key_scale, value_scale)
    shared = Shared(problem, q, key_cache, value_cache, tables, scale, softcap, first_valid_id)
    decode = problem.rows > 1 or max_query_len <= tuning.MOST_DECODE_QUERIES
    prefill = max_query_len > tuning.MOST_DECODE_QUERIES
    with device_guard(q):
        if decode:
            most_queries = min(max_query_len, tuning.MOST_DECODE_QUERIES)
            _decode(shared, most_queries, max_seq_len, num_splits)
        if prefill:
            _prefill(shared, tuning.MOST_DECODE_QUERIES if decode else 0)
    return out, lse


def _decode(shared: Shared, most_queries: int, max_seq_len: int, num_splits: int) -> None:
    """Rows of up to ``most_queries`` queries; and tokens of no row."""
    p = shared.problem
    packed = triton.next_power_of_2(p.group * most_queries)
    tiles = tuning.decode_tiles(packed, shared.sizes)
    programs = p.kv_heads * cdiv(p.group * most_queries, tiles.rows)  # of a row and split
    aim = tuning.INTERPRETED_PROGRAMS if INTERPRETED else tuning.PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(p.out)
    splits = tuning.split_count(p.rows * programs, max_seq_len, aim)
    if num_splits:
        splits = min(triton.next_power_of_2(num_splits), tuning.MOST_SPLITS)
    parts = part_lse = None
    if splits > 1:
        shape = (p.rows, p.query_heads, most_queries, splits)
        parts = torch.empty(*shape, shared.block_dim_v, dtype=torch.float32, device=p.out.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=p.out.device)
    decode_kernel[(p.rows, programs, splits)](
        **shared.arguments(tiles),
        parts=parts,
        part_lse=part_lse,
        tokens=p.tokens,
        most_queries=most_queries,
        SPLITS=splits,
        LEAST_KEYS=tiles.keys if num_splits else tuning.LEAST_SPLIT_KEYS,
        **tiles.options,
    )
    if splits > 1:
        merge_kernel[(p.rows * most_queries, p.query_heads)](
            parts,
            part_lse,
            p.out,
            p.lse,
            shared.tables.query_start_loc,
            shared.tables.sinks,
            most_queries,
            p.tokens,
            *p.out.stride()[:2],
            HEADS=p.query_heads,
            DIM_V=p.head_dim_v,
            BLOCK_DIM_V=shared.block_dim_v,
            SPLITS=splits,
            num_warps=tuning.MERGE_WARPS,
        )


def _prefill(shared: Shared, most_queries: int) -> None:
    """Rows of more than ``most_queries`` queries, and tokens of no row."""
    p = shared.problem
    tiles = tuning.prefill_tiles(shared.sizes)
    prefill_kernel[(p.tokens * p.group // tiles.rows + p.rows, p.kv_heads)](
        **shared.arguments(tiles),
        tokens=p.tokens,
        most_queries=most_queries,
        **tiles.options,
    )
