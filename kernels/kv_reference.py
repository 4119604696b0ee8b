"""Keys and values written into pages and read back, in plain torch: the specification of the Triton kernels, and what
runs where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels.attention_arguments import QUERY_DTYPES, check_starts, require_one_device, require_unit_stride
from avmp.kernels.fp8_formats import FORMATS, LARGEST, as_bits

Parts = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


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
    """Writes new keys and values to their places in the pages; changes nothing else.

    * ``key`` ``[tokens, kv_heads, head_dim]``, ``value`` the same with its own head_dim, fp16, bf16 or fp32; there may
      be more tokens than places (padding). ``value`` and ``value_cache`` None: pages that hold keys only;
    * caches ``[pages, page_tokens, kv_heads, head_dim]``, of the same dtype or fp8, any strides with a contiguous last
      dimension, the two independent;
    * ``slot_mapping`` int32 or int64 ``[places]``, distinct: ``page * page_tokens + offset`` of each token. What lies
      below ``first_valid_id * page_tokens`` is null, as is a page that ``page_table`` (int32: virtual to physical ids;
      None: ids are physical) maps below ``first_valid_id``: nothing is written for it. Likewise beyond the pool.

    fp8 stores ``x / scale``, rounded to nearest even, beyond the largest finite value as that value; NaN stays NaN.
    Scales are one number or ``[kv_heads]``.

    Floor: each value is read once and written once, 8 bytes of place (and 4 of page id) per token.
    """
    parts = check_write(key, value, key_cache, value_cache, slot_mapping, page_table, key_scale, value_scale)
    pages, page_tokens = key_cache.shape[:2]
    slots = slot_mapping.long()
    valid = slots >= first_valid_id * page_tokens
    page = torch.where(valid, slots, 0) // page_tokens
    page, valid = _translated(page, valid, page_table, first_valid_id, pages)
    page, inside = page[valid], (slots % page_tokens)[valid]
    for new, cache, scale in parts:
        as_bits(cache)[page, inside] = as_bits(_stored(new[: len(slots)][valid], cache.dtype, scale))


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
    """Keys and values of rows, out of their pages into contiguous tensors.

    * caches, ``page_table`` and ``first_valid_id`` as for ``write_kv``; ``block_table`` int32 ``[rows, width]``;
    * row r's tokens are ``starts[r]`` (0 by default) to ``starts[r] + seq_lens[r]``, both int32 ``[rows]``; no more
      than ``max_seq_len`` of them.

    Dense: ``[rows, max_seq_len, kv_heads, head_dim]``. Ragged, with ``cu_seq_lens`` int32 ``[rows + 1]`` (running sums
    of ``seq_lens``) and ``num_tokens``: ``[num_tokens, kv_heads, head_dim]``. Zero for padding and for tokens of null
    pages. In the caches' dtype, as they are; or in ``dtype``, where fp8 is multiplied by its scale (one number or
    ``[kv_heads]``) in fp32.

    Raises Unsupported for another ``dtype``, and InvalidArgument, also for sums that are not those of ``seq_lens``, or
    do not fit ``num_tokens``, and for rows longer than their table. (The kernel, which waits for nothing, takes sums as
    they are: it leaves out what would lie outside the result, and zeroes what no row fills.)

    Floor: each value is read once and written once, 4 bytes of ids (8 with a page table) per page and KV head.
    """
    check_gather(
        key_cache, value_cache, block_table, seq_lens, starts, cu_seq_lens, num_tokens, page_table, key_scale,
        value_scale, dtype,
    )  # fmt: skip
    if cu_seq_lens is not None:
        check_sums(cu_seq_lens.tolist(), seq_lens.tolist(), num_tokens or 0)
    pages, page_tokens = key_cache.shape[:2]
    rows, device = len(block_table), block_table.device
    place = torch.arange(max_seq_len, device=device).expand(rows, -1)
    live = place < seq_lens[:, None]
    token = place if starts is None else place + starts[:, None]
    valid = live & (token >= 0)
    token = torch.where(valid, token, 0)
    if not valid.any():
        page = token
    elif int(token.max()) // page_tokens < block_table.shape[1]:
        page = block_table.long().gather(1, token // page_tokens)
    else:
        raise InvalidArgument(
            f"gather_kv: token {int(token.max())} lies behind the {block_table.shape[1]} pages of {page_tokens} tokens "
            "that block_table has for a row"
        )
    page, valid = _translated(page, valid, page_table, first_valid_id, pages)
    row, column = valid.nonzero(as_tuple=True)
    page, inside = page[row, column], token[row, column] % page_tokens
    gathered: list[torch.Tensor | None] = [None, None]
    for which, (cache, scale) in enumerate(((key_cache, key_scale), (value_cache, value_scale))):
        if cache is None:
            continue
        values = _loaded(as_bits(cache)[page, inside].view(cache.dtype), dtype or cache.dtype, scale)
        shape = (rows, max_seq_len) if cu_seq_lens is None else (num_tokens or 0,)
        out = torch.zeros(*shape, *cache.shape[2:], dtype=dtype or cache.dtype, device=device)
        target = (row, column) if cu_seq_lens is None else (cu_seq_lens.long()[row] + column,)
        as_bits(out)[target] = as_bits(values)
        gathered[which] = out
    assert gathered[0] is not None
    return gathered[0], gathered[1]


def _translated(
    ids: torch.Tensor, valid: torch.Tensor, page_table: torch.Tensor | None, first_valid_id: int, pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical ids and which are valid, of ids of which some are."""
    valid = valid & (ids >= first_valid_id)
    if page_table is not None:
        valid &= ids < len(page_table)
        ids = page_table[torch.where(valid, ids, 0)].long() if len(page_table) else ids
        valid &= ids >= first_valid_id
    return ids, valid & (ids < pages)


def check_write(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    page_table: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> Parts:
    """Raises InvalidArgument or Unsupported; returns what is to be written where: key and value with their caches."""
    if (value is None) != (value_cache is None):
        raise InvalidArgument("write_kv: value and value_cache are given together or not at all")
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(
            f"write_kv: slot_mapping must be one-dimensional int32 or int64, is {slot_mapping.dtype} "
            f"of {slot_mapping.dim()} dimensions"
        )
    require_unit_stride("write_kv", "slot_mapping", slot_mapping)
    _check_page_table("write_kv", page_table)
    require_one_device(
        "write_kv",
        key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        page_table=page_table,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    parts: Parts = [(key, key_cache, key_scale)]
    if value is not None and value_cache is not None:
        parts.append((value, value_cache, value_scale))
    for new, cache, scale in parts:
        if new.dim() != 3 or cache.dim() != 4 or new.shape[1:] != cache.shape[2:] or len(new) < len(slot_mapping):
            raise InvalidArgument(
                f"write_kv: {tuple(new.shape)} does not fit {len(slot_mapping)} places in a cache {tuple(cache.shape)}"
            )
        if 0 in cache.shape[1:]:
            raise InvalidArgument(f"write_kv: a cache {tuple(cache.shape)} has no element in a page")
        if cache.shape[:2] != key_cache.shape[:2]:
            raise InvalidArgument(f"write_kv: caches of {key_cache.shape[:2]} and {cache.shape[:2]} pages and tokens")
        if new.dtype not in QUERY_DTYPES or (cache.dtype != new.dtype and cache.dtype not in FORMATS):
            raise Unsupported(
                f"write_kv: {new.dtype} into a cache of {cache.dtype}; float16, bfloat16 and float32 into the same "
                "dtype, float8_e4m3fn and float8_e5m2 are offered"
            )
        _check_scale("write_kv", scale, cache)
        require_unit_stride("write_kv", "keys and values", new)
        require_unit_stride("write_kv", "the caches", cache)
    return parts


def check_gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    num_tokens: int | None,
    page_table: torch.Tensor | None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises InvalidArgument or Unsupported. Reads shapes and dtypes, no values."""
    if block_table.dim() != 2:
        raise InvalidArgument(f"gather_kv: block_table {tuple(block_table.shape)}: expected [rows, width]")
    rows = len(block_table)
    _check_int32(
        "gather_kv",
        block_table=block_table,
        seq_lens=seq_lens,
        starts=starts,
        cu_seq_lens=cu_seq_lens,
    )
    _check_page_table("gather_kv", page_table)
    if (cu_seq_lens is None) != (num_tokens is None):
        raise InvalidArgument("gather_kv: cu_seq_lens and num_tokens are given together (ragged) or not at all (dense)")
    by_row = {"seq_lens": (seq_lens, rows), "starts": (starts, rows), "cu_seq_lens": (cu_seq_lens, rows + 1)}
    for name, (tensor, length) in by_row.items():
        if tensor is not None and tensor.shape != (length,):
            raise InvalidArgument(f"gather_kv: {name} has shape {tuple(tensor.shape)}, expected {(length,)}")
    for cache, scale in ((key_cache, key_scale), (value_cache, value_scale)):
        if cache is None:
            continue
        if cache.dim() != 4 or cache.shape[:3] != key_cache.shape[:3] or 0 in cache.shape[1:]:
            raise InvalidArgument(f"gather_kv: cache {tuple(cache.shape)} beside key cache {tuple(key_cache.shape)}")
        if dtype not in (None, cache.dtype, *QUERY_DTYPES):
            raise Unsupported(
                f"gather_kv: {cache.dtype} as {dtype}; as it is, or as float16, bfloat16 or float32, are offered"
            )
        _check_scale("gather_kv", scale, cache)
        require_unit_stride("gather_kv", "the caches", cache)
    require_one_device(
        "gather_kv",
        key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        starts=starts,
        cu_seq_lens=cu_seq_lens,
        page_table=page_table,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def check_sums(sums: Sequence[int], seq_lens: Sequence[int], num_tokens: int) -> None:
    """Raises InvalidArgument unless ``sums`` are the running sums of ``seq_lens``, within ``num_tokens``."""
    check_starts("gather_kv", sums, num_tokens, name="cu_seq_lens")
    for row, length in enumerate(seq_lens):
        if sums[row + 1] - sums[row] != max(length, 0):
            raise InvalidArgument(
                f"gather_kv: cu_seq_lens[{row}] and [{row + 1}] are {sums[row]} and {sums[row + 1]}, row {row} has "
                f"{length} tokens: expected running sums of seq_lens"
            )


def _check_int32(operation: str, **tables: torch.Tensor | None) -> None:
    for name, table in tables.items():
        if table is not None and (table.dtype != torch.int32 or (table.shape[-1] > 1 and table.stride(-1) != 1)):
            raise InvalidArgument(f"{operation}: {name} must be int32 with a contiguous last dimension")


def _check_page_table(operation: str, page_table: torch.Tensor | None) -> None:
    if page_table is not None and page_table.dim() != 1:
        raise InvalidArgument(f"{operation}: page_table has {page_table.dim()} dimensions, expected one")
    _check_int32(operation, page_table=page_table)


def _check_scale(operation: str, scale: torch.Tensor | None, cache: torch.Tensor) -> None:
    if scale is not None and tuple(scale.shape) not in {(), (1,), (cache.shape[2],)}:
        raise InvalidArgument(
            f"{operation}: a scale has shape {tuple(scale.shape)}, expected one number or ({cache.shape[2]},)"
        )
    if scale is not None and cache.dtype not in FORMATS:
        raise InvalidArgument(f"{operation}: a scale for a cache of {cache.dtype}; only fp8 is scaled")


def _stored(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if dtype not in FORMATS:
        return values
    values = values.float()
    if scale is not None:
        values = values / scale.float().view(-1, 1)
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _loaded(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is not None and values.dtype != dtype:
        values = values.float() * scale.float().view(-1, 1)
    return values.to(dtype)
