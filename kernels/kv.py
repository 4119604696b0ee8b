"""Keys and values written into pages and read back, in Triton; see ``kv_reference.py`` for what is computed.

One launch takes keys and values. A program owns a tile of (token, head) pairs by head_dim: with few heads it takes many
tokens, with many heads a few, and every access is a vector of 16 bytes along head_dim. Ids are tested before they are
divided or used as an index, after translation once more, and widened to int64 before they are multiplied.

Writing does what ``reshape_and_cache_flash`` of https://github.com/vllm-project/vllm does, gathering what its
``gather_and_maybe_dequant_cache`` does; page tables, null pages, free strides and the division into tiles are our own.

Floor: each of ``tokens * kv_heads * (head_dim + head_dim_v)`` elements is read once, in the itemsize that it has, and
written once, in that which it gets. Beside them, writing reads 4 or 8 bytes of place per token, gathering 4 bytes of id
per page and KV head, and both 4 more with a page table. No arithmetic but that of fp8: bound by memory, and a step of
few tokens by its launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import attention_tuning as tuning
from avmp.kernels.attention_launch import device_class, stride_hint
from avmp.kernels.attention_tiles import row_offset, token_offsets
from avmp.kernels.fp8 import decode, encode
from avmp.kernels.fp8_formats import FORMATS, PLAIN, as_bits
from avmp.kernels.kv_reference import check_gather, check_write
from avmp.kernels.launch import GRID_X_LIMIT, INTERPRETED, cdiv, device_guard, require_runnable


@triton.jit
def new_offsets(tokens, heads, token_stride, head_stride, HINT: tl.constexpr):
    """int64 offsets of (token, head) pairs in what is written. (Triton 3.6 loses a hint on what a function returns.)"""
    offsets = tokens.to(tl.int64) * token_stride + heads.to(tl.int64) * head_stride
    return tl.multiple_of(offsets, HINT)


@triton.jit
def result_offsets(targets, heads, kv_heads, dim):
    """int64 offsets of (token, head) pairs in a contiguous ``[tokens, kv_heads, dim]``."""
    return (targets.to(tl.int64) * kv_heads + heads) * dim


@triton.jit
def _translated(ids, valid, page_table, first_valid_id, table_limit, page_limit):
    """Physical ids and which are valid, of ids of which some are."""
    valid = valid & (ids >= first_valid_id)
    if page_table is not None:
        valid = valid & (ids < table_limit)
        ids = tl.load(page_table + ids, mask=valid, other=-1)
        valid = valid & (ids >= first_valid_id)
    return ids, valid & (ids < page_limit)


@triton.jit
def _write_part(
    new, cache, scales, tokens, heads, offsets, valid, new_token, new_head, scale_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FORMAT: tl.constexpr, NEW_HINT: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_DIM)
    mask = valid[:, None] & (dims < DIM)[None, :]
    source = new_offsets(tokens, heads, new_token, new_head, NEW_HINT)
    values = tl.load(new + source[:, None] + dims[None, :], mask=mask, other=0)
    if FORMAT != 0:
        values = values.to(tl.float32)
        if scales is not None:
            values = tl.div_rn(
                values, (tl.load(scales + heads * scale_head).to(tl.float32)[:, None] + tl.zeros_like(values))
            )
        values = encode(values, FORMAT)
    tl.store(cache + offsets[:, None] + dims[None, :], values, mask=mask)


@triton.jit(
    do_not_specialize=["count", "first_valid_id", "table_limit", "page_limit"],
    do_not_specialize_on_alignment=["slot_mapping", "page_table"],
)
def write_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, page_table, key_scale, value_scale,
    count, first_valid_id, table_limit, page_limit,
    key_token, key_head, value_token, value_head,
    k_page, k_token, k_head, v_page, v_token, v_head, key_scale_head, value_scale_head,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_V: tl.constexpr, PAIRS: tl.constexpr,
    FORMAT_K: tl.constexpr, FORMAT_V: tl.constexpr,
    HINT_K: tl.constexpr, HINT_V: tl.constexpr, HINT_KEY: tl.constexpr, HINT_VALUE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of PAIRS (token, head) pairs, token by token."""
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    tokens, heads = pairs // HEADS, (pairs % HEADS).to(tl.int32)
    inside_count = tokens < count
    slots = tl.load(slot_mapping + tokens, mask=inside_count, other=-1).to(tl.int64)
    # Tested before the division, which would round a small negative number to page 0.
    valid = inside_count & (slots >= first_valid_id * PAGE)
    slots = tl.where(valid, slots, 0)
    pages, valid = _translated(slots // PAGE, valid, page_table, first_valid_id, table_limit, page_limit)
    offsets = token_offsets(pages, slots % PAGE, heads, k_page, k_token, k_head, HINT_K)
    _write_part(
        key, key_cache, key_scale, tokens, heads, offsets, valid, key_token, key_head, key_scale_head,
        DIM, BLOCK_DIM, FORMAT_K, HINT_KEY,
    )  # fmt: skip
    if value is not None:
        offsets = token_offsets(pages, slots % PAGE, heads, v_page, v_token, v_head, HINT_V)
        _write_part(
            value, value_cache, value_scale, tokens, heads, offsets, valid, value_token, value_head, value_scale_head,
            DIM_V, BLOCK_DIM_V, FORMAT_V, HINT_VALUE,
        )  # fmt: skip


@triton.jit
def _read_part(
    cache, out, scales, targets, heads, offsets, live, valid, scale_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_DIM)
    stored = tl.load(cache + offsets[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0)
    if out.dtype.element_ty == cache.dtype.element_ty:
        values = stored  # bytes as they are, fp8 included
    else:
        values = decode(stored, FORMAT).to(tl.float32)
        if scales is not None:
            values *= tl.load(scales + heads * scale_head).to(tl.float32)[:, None]
    rows = result_offsets(targets, heads, HEADS, DIM)
    tl.store(
        out + rows[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=live[:, None] & (dims < DIM)[None, :]
    )


@triton.jit
def _zero_part(out, first, end, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAIRS: tl.constexpr):
    pairs, dims = first + tl.arange(0, PAIRS), tl.arange(0, BLOCK_DIM)
    zeros = tl.zeros([PAIRS, BLOCK_DIM], out.dtype.element_ty)
    tl.store(out + pairs[:, None] * DIM + dims[None, :], zeros, mask=(pairs < end)[:, None] & (dims < DIM)[None, :])


@triton.jit
def _zero_tokens(
    key_out, value_out, first_pair, end_token, step,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_V: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Zeroes every ``step``-th tile of PAIRS (token, head) pairs from ``first_pair`` on, up to a token."""
    end = end_token.to(tl.int64) * HEADS
    for first in range(first_pair, end, step):
        _zero_part(key_out, first, end, DIM, BLOCK_DIM, PAIRS)
        if value_out is not None:
            _zero_part(value_out, first, end, DIM_V, BLOCK_DIM_V, PAIRS)


@triton.jit(
    do_not_specialize=["rows", "total", "longest", "tiles", "first_valid_id", "table_limit", "page_limit", "table_row"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "starts", "cu_seq_lens", "page_table"],
)
def gather_kv_kernel(
    key_cache, value_cache, key_out, value_out, block_table, seq_lens, starts, cu_seq_lens, page_table,
    key_scale, value_scale, rows, total, longest, tiles, first_valid_id, table_limit, page_limit, table_row,
    k_page, k_token, k_head, v_page, v_token, v_head, key_scale_head, value_scale_head,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_V: tl.constexpr, PAIRS: tl.constexpr,
    FORMAT_K: tl.constexpr, FORMAT_V: tl.constexpr, HINT_K: tl.constexpr, HINT_V: tl.constexpr,
):  # fmt: skip
    """Grid: rows times tiles of PAIRS (token, head) pairs; all together zero what no ragged row fills."""
    if cu_seq_lens is not None:
        part, parts = tl.program_id(0).to(tl.int64) * PAIRS, tl.num_programs(0).to(tl.int64) * PAIRS
        front, behind = tl.load(cu_seq_lens), tl.maximum(tl.load(cu_seq_lens + rows), 0)
        _zero_tokens(
            key_out, value_out, part, tl.minimum(front, total), parts,
            HEADS, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, PAIRS,
        )  # fmt: skip
        _zero_tokens(
            key_out, value_out, behind.to(tl.int64) * HEADS + part, total, parts,
            HEADS, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, PAIRS,
        )  # fmt: skip
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    pairs = tile.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    places, heads = pairs // HEADS, (pairs % HEADS).to(tl.int32)
    valid = places < tl.load(seq_lens + row)
    tokens = places
    if starts is not None:
        tokens += tl.load(starts + row)
        valid &= tokens >= 0
    ids = tl.load(block_table + row_offset(row, table_row) + tokens // PAGE, mask=valid, other=-1)
    if cu_seq_lens is None:
        targets, live = row_offset(row, longest) + places, places < longest
    else:
        first_target = tl.load(cu_seq_lens + row).to(tl.int64)
        targets = first_target + places
        live = (places < tl.load(seq_lens + row)) & (places < longest)
        live &= (targets >= 0) & (targets < total)  # whatever the sums are
        if tile == tiles - 1:  # a row that is longer than the longest has no programs for the rest
            end = tl.maximum(first_target + tl.maximum(tl.minimum(tl.load(seq_lens + row), longest), 0), 0)
            _zero_tokens(
                key_out, value_out, end * HEADS, tl.minimum(tl.load(cu_seq_lens + row + 1), total), PAIRS,
                HEADS, DIM, DIM_V, BLOCK_DIM, BLOCK_DIM_V, PAIRS,
            )  # fmt: skip
    pages, valid = _translated(ids, valid, page_table, first_valid_id, table_limit, page_limit)
    offsets = token_offsets(pages, tokens % PAGE, heads, k_page, k_token, k_head, HINT_K)
    _read_part(
        key_cache, key_out, key_scale, targets, heads, offsets, live, valid, key_scale_head,
        HEADS, DIM, BLOCK_DIM, FORMAT_K,
    )  # fmt: skip
    if value_cache is not None:
        offsets = token_offsets(pages, tokens % PAGE, heads, v_page, v_token, v_head, HINT_V)
        _read_part(
            value_cache, value_out, value_scale, targets, heads, offsets, live, valid, value_scale_head,
            HEADS, DIM_V, BLOCK_DIM_V, FORMAT_V,
        )  # fmt: skip


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """``kv_reference.write_kv`` by Triton, in one launch on the current stream."""
    check_write(key, value, key_cache, value_cache, slot_mapping, page_table, key_scale, value_scale)
    require_runnable(key)
    shape = _Shape(key_cache, value_cache)
    count = len(slot_mapping)
    if count == 0:
        return
    with device_guard(key):
        write_kv_kernel[(cdiv(count * shape.heads, shape.pairs),)](
            key,
            value,
            as_bits(key_cache),
            None if value_cache is None else as_bits(value_cache),
            slot_mapping,
            page_table,
            key_scale,
            value_scale,
            count,
            first_valid_id,
            0 if page_table is None else len(page_table),
            len(key_cache),
            *key.stride()[:2],
            *((0, 0) if value is None else value.stride()[:2]),
            **shape.strides,
            key_scale_head=_per_head(key_scale),
            value_scale_head=_per_head(value_scale),
            **shape.constants,
            HINT_KEY=stride_hint(key),
            HINT_VALUE=1 if value is None else stride_hint(value),
            num_warps=shape.warps,
        )


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    starts: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    num_tokens: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``kv_reference.gather_kv`` by Triton, in one launch on the current stream; nothing waits for the device."""
    check_gather(
        key_cache, value_cache, block_table, seq_lens, starts, cu_seq_lens, num_tokens, page_table, key_scale,
        value_scale, dtype,
    )  # fmt: skip
    require_runnable(key_cache)
    shape, rows = _Shape(key_cache, value_cache), len(block_table)
    outer = (rows, max_seq_len) if cu_seq_lens is None else (num_tokens or 0,)
    outs = [
        None
        if cache is None
        else torch.empty(*outer, *cache.shape[2:], dtype=dtype or cache.dtype, device=cache.device)
        for cache in (key_cache, value_cache)
    ]
    assert outs[0] is not None
    tiles = cdiv(max_seq_len * shape.heads, shape.pairs)
    if rows * tiles > GRID_X_LIMIT:
        raise InvalidArgument(
            f"gather_kv: {rows} rows by max_seq_len {max_seq_len}: {rows * tiles:,} programs, expected at most "
            f"{GRID_X_LIMIT:,}; give a lower max_seq_len, or fewer rows at a time"
        )
    if outs[0].numel() == 0 or rows == 0 or tiles == 0:
        return outs[0].zero_(), None if outs[1] is None else outs[1].zero_()
    with device_guard(key_cache):
        gather_kv_kernel[(rows * tiles,)](
            as_bits(key_cache),
            None if value_cache is None else as_bits(value_cache),
            as_bits(outs[0]),
            None if outs[1] is None else as_bits(outs[1]),
            block_table,
            seq_lens,
            starts,
            cu_seq_lens,
            page_table,
            key_scale,
            value_scale,
            rows,
            num_tokens or 0,
            max_seq_len,
            tiles,
            first_valid_id,
            0 if page_table is None else len(page_table),
            len(key_cache),
            block_table.stride(0),
            **shape.strides,
            key_scale_head=_per_head(key_scale),
            value_scale_head=_per_head(value_scale),
            **shape.constants,
            num_warps=shape.warps,
        )
    return outs[0], outs[1]


class _Shape:
    """What the two launches share: strides and constants of the caches."""

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor | None) -> None:
        _, page_tokens, self.heads, dim = key_cache.shape
        dim_v = 0 if value_cache is None else value_cache.shape[3]
        block, block_v = triton.next_power_of_2(dim), triton.next_power_of_2(max(dim_v, 1))
        elements = tuning.KV_TILE_INTERPRETED if INTERPRETED else tuning.KV_TILE
        self.pairs = max(elements // max(block, block_v), 1)
        self.warps = tuning.kv_warps(device_class(key_cache))
        strides = (*key_cache.stride()[:3], *((0, 0, 0) if value_cache is None else value_cache.stride()[:3]))
        names = ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")
        self.strides = dict(zip(names, strides, strict=True))
        self.constants = dict(
            HEADS=self.heads,
            PAGE=page_tokens,
            DIM=dim,
            DIM_V=dim_v,
            BLOCK_DIM=block,
            BLOCK_DIM_V=block_v,
            PAIRS=self.pairs,
            FORMAT_K=FORMATS.get(key_cache.dtype, PLAIN),
            FORMAT_V=PLAIN if value_cache is None else FORMATS.get(value_cache.dtype, PLAIN),
            HINT_K=stride_hint(key_cache),
            HINT_V=1 if value_cache is None else stride_hint(value_cache),
        )


def _per_head(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
