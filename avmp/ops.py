"""The public operations: on keys and values (here), states (``state_ops.py``) and whole units (``unit_ops.py``).

Each takes the tables of a step flat, as tensors and integers, or a ``Batch``, of which it reads the attributes. Each is
computed by plain torch (the specification, and what runs on a CPU) or by Triton, below ``avmp.kernels`` under the same
name: on ``backend`` where that is given, else as ``use_backend`` says, else on the backend of the batch's pool, else on
what suits the device. On a GPU, plain torch waits for the device; Triton never does.

Under ``torch.compile`` each is one node of the graph, and an arena one of its inputs (``registration.py``). A graph
runs with other batches than it was traced with. So it is not noticed there that a batch has been overwritten, and a
pool's ``debug=2`` checks no ids there; ``use_bounds_checks`` around the compiled call does. ``use_backend``, too, goes
around the compiled call: inside of it Dynamo refuses the context. Neither context reaches threads that are started in
it. There are no gradients: a tensor that requires one raises Unsupported, but for calls under ``torch.no_grad()``.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, overload

import torch
from typing_extensions import Unpack

from avmp.backends import use_backend
from avmp.errors import Unsupported
from avmp.kernels.attention_arguments import Alibi, Window, window_bounds
from avmp.registration import run
from avmp.state_ops import causal_conv1d_update, selective_state_update
from avmp.step_tables import BatchLike, first_valid, latest, leave_out, require_tokens, required
from avmp.unit_ops import apply_table_changes, copy_units, migrate, poison_units, swap_in, swap_out, zero_units

__all__ = [
    "apply_table_changes",
    "causal_conv1d_update",
    "copy_units",
    "gather_kv",
    "migrate",
    "paged_attention",
    "poison_units",
    "selective_state_update",
    "swap_in",
    "swap_out",
    "use_backend",
    "write_kv",
    "zero_units",
]


class AttentionOptions(TypedDict, total=False):
    """What ``paged_attention`` takes by name beside the scale."""

    max_query_len: int
    max_seq_len: int
    page_table: torch.Tensor | None
    first_valid_id: int | None
    window: Window
    causal: bool
    softcap: float
    alibi_slopes: torch.Tensor | None
    alibi: Alibi
    sinks: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    out: torch.Tensor | None
    num_splits: int
    backend: str | None


@overload
def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor | BatchLike,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    scale: float,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor | BatchLike,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    scale: float,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor | BatchLike,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    scale: float,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
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
    backend: str | None = None,
) -> Any:
    """Attention of new tokens over paged keys and values: decode, a few query tokens, prefill, any mix of rows.

    ``paged_attention(q, key_cache, value_cache, batch, scale=…)`` takes the tables from a ``Batch``; otherwise all of
    them are given, with ``max_query_len`` and ``max_seq_len``.

    * ``q`` ``[tokens, query_heads, head_dim]``, fp16, bf16 or fp32: row r's are ``query_start_loc[r]`` to
      ``query_start_loc[r + 1]``, the last tokens of its context;
    * ``key_cache`` ``[pages, page_tokens, kv_heads, head_dim]``, ``value_cache`` the same with its own head_dim; q's
      dtype or fp8, any strides with a contiguous last dimension; query_heads is a multiple of kv_heads;
    * ``block_table`` int32 ``[rows, width]``, ``seq_lens`` int32 ``[rows]`` (query tokens included),
      ``query_start_loc`` int32 ``[rows + 1]``; ``max_query_len`` and ``max_seq_len`` bound what these hold;
    * ``page_table`` int32 maps virtual to physical page ids; None: the block table holds physical ids. Ids below
      ``first_valid_id`` (by default 1 with a page table, 0 without), before or after translation, are null: their keys
      are invisible, such as those of pages that ``release_front`` has given up. That others name a page, in both
      tables, and that a row has a column for each of its pages is for the caller to see to; checks are those of
      ``debug=2`` and ``use_bounds_checks``.

    A query at position i scores key j as ``scale * q·k``, times ``key_scale``; then ``softcap * tanh(s / softcap)``;
    then ``- alibi_slope * |i - j|``, or what ``alibi`` says; then the mask: ``window`` is the number of latest keys
    that it sees, its own included, or a pair (left, right) with -1 for no limit, and ``causal`` hides all behind it.
    ``sinks`` ``[query_heads]`` are logits that join the softmax and have no value. ``alibi_slopes`` are
    ``[query_heads]`` or ``[rows, query_heads]``; ``key_scale`` and ``value_scale`` one number, ``[kv_heads]`` or
    ``[rows, kv_heads]``. By ``alibi`` a slope falls with the ``"distance"``, rises with the key's ``"position"`` behind
    the row's first query (``+ alibi_slope * (j - i_0)``), or falls with the ``"root"`` of how far the key lies back
    (``- alibi_slope * sqrt(max(i - j, 0))``).

    Returns ``[tokens, query_heads, head_dim_v]`` in q's dtype, or ``out``, fp16, bf16 or fp32, which overlaps no other
    tensor of the call; with ``return_lse`` a pair of that and fp32 ``[tokens, query_heads]``, the natural logarithm of
    the softmax's denominator (sinks included). A query that sees nothing gets 0 and -inf (its sink, if there is one);
    so does a token that belongs to no row, without the sink. ``num_splits`` is the number of parts that a kernel may
    cut a context into, 0 to choose; it changes no more than rounding.

    NaN and infinities show as in plain softmax. A value hidden from a query, before its window or behind it, has the
    weight 0 where its page is read: if it is no finite number, that product may show, too. What lies behind a row's
    last token never counts, nor do pages before the windows of all its queries.

    Raises InvalidArgument, Unsupported, and Inconsistent for a batch that a later one has overwritten.

    Floor: ``kv_heads * (head_dim + head_dim_v) * itemsize`` bytes per visible key, once for decode;
    ``2 * query_heads * (head_dim + head_dim_v)`` operations per query and visible key.
    """
    operation, batch = "paged_attention", None
    if not isinstance(block_table, torch.Tensor):
        batch = latest(operation, block_table)
        leave_out(
            operation,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            page_table=page_table,
            first_valid_id=first_valid_id,
        )
        require_tokens(operation, q, batch)
        block_table, seq_lens, query_start_loc = batch.block_table, batch.seq_lens, batch.query_start_loc
        max_query_len, max_seq_len = batch.max_query_len, batch.max_seq_len
        page_table, first_valid_id = batch.page_table, batch.first_valid_id
    if value_cache is None:
        raise Unsupported(
            "paged_attention: this layer stores keys only; attention needs values, with pages of their own"
        )
    result = run(
        operation,
        {
            "q": q,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": block_table,
            "seq_lens": required(operation, "seq_lens", seq_lens),
            "query_start_loc": required(operation, "query_start_loc", query_start_loc),
            "scale": scale,
            "max_query_len": required(operation, "max_query_len", max_query_len),
            "max_seq_len": required(operation, "max_seq_len", max_seq_len),
            "page_table": page_table,
            "first_valid_id": first_valid(first_valid_id, page_table),
            "window": window_bounds(window, causal),
            "causal": causal,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "alibi": alibi,
            "sinks": sinks,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "return_lse": return_lse,
            "out": out,
            "num_splits": num_splits,
        },
        backend,
        batch,
    )
    return result if return_lse else result[0]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | BatchLike,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Writes new keys and values to their places in the pages, in place; changes nothing else.

    ``write_kv(key, value, key_cache, value_cache, batch)`` takes the tables from a ``Batch``.

    * ``key`` ``[tokens, kv_heads, head_dim]``, ``value`` the same with its own head_dim, fp16, bf16 or fp32; there may
      be more tokens than places (padding). ``value`` and ``value_cache`` None: pages that hold keys only;
    * caches ``[pages, page_tokens, kv_heads, head_dim]``, of the same dtype or fp8, any strides with a contiguous last
      dimension, the two independent;
    * ``slot_mapping`` int32 or int64 ``[places]``, distinct: ``page * page_tokens + offset`` of each token. What lies
      below ``first_valid_id * page_tokens`` is null, as is a page that ``page_table`` (int32: virtual to physical ids;
      None: ids are physical) maps below ``first_valid_id`` (by default 1 with a page table, 0 without): nothing is
      written for it. Likewise beyond the pool.

    fp8 stores ``x / scale``, rounded to nearest even, beyond the largest finite value as that value; NaN stays NaN.
    Scales are one number or ``[kv_heads]``.

    Raises InvalidArgument, Unsupported, and Inconsistent for a batch that a later one has overwritten.

    Floor: each value is read once and written once, 8 bytes of place (and 4 of page id) per token.
    """
    operation, batch = "write_kv", None
    if not isinstance(slot_mapping, torch.Tensor):
        batch = latest(operation, slot_mapping)
        leave_out(operation, page_table=page_table, first_valid_id=first_valid_id)
        slot_mapping = batch.slot_mapping
        page_table, first_valid_id = batch.page_table, batch.first_valid_id
    run(
        operation,
        {
            "key": key,
            "value": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slot_mapping,
            "page_table": page_table,
            "first_valid_id": first_valid(first_valid_id, page_table),
            "key_scale": key_scale,
            "value_scale": value_scale,
        },
        backend,
        batch,
    )


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor | BatchLike,
    seq_lens: torch.Tensor | None = None,
    *,
    max_seq_len: int | None = None,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    starts: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    num_tokens: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of rows, out of their pages into new contiguous tensors.

    ``gather_kv(key_cache, value_cache, batch)`` takes the tables from a ``Batch``; otherwise all of them are given,
    with ``max_seq_len``.

    * caches, ``page_table`` and ``first_valid_id`` as for ``write_kv``; ``block_table`` int32 ``[rows, width]``;
    * row r's tokens are ``starts[r]`` (0 by default) to ``starts[r] + seq_lens[r]``, both int32 ``[rows]``; no more
      than ``max_seq_len`` of them.

    Dense: ``[rows, max_seq_len, kv_heads, head_dim]``. Ragged, with ``cu_seq_lens`` int32 ``[rows + 1]`` (running sums
    of ``seq_lens``) and ``num_tokens``: ``[num_tokens, kv_heads, head_dim]``. Zero for padding and for tokens of null
    pages. In the caches' dtype, as they are; or in ``dtype``, where fp8 is multiplied by its scale (one number or
    ``[kv_heads]``) in fp32. The second result is None for pages that hold keys only.

    Raises InvalidArgument, Unsupported for another ``dtype``, and Inconsistent for a batch that a later one has
    overwritten.

    Floor: each value is read once and written once, 4 bytes of ids (8 with a page table) per page and KV head.
    """
    operation, batch = "gather_kv", None
    if not isinstance(block_table, torch.Tensor):
        batch = latest(operation, block_table)
        leave_out(
            operation,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            page_table=page_table,
            first_valid_id=first_valid_id,
        )
        block_table, seq_lens, max_seq_len = batch.block_table, batch.seq_lens, batch.max_seq_len
        page_table, first_valid_id = batch.page_table, batch.first_valid_id
    keys, values = run(
        operation,
        {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": block_table,
            "seq_lens": required(operation, "seq_lens", seq_lens),
            "max_seq_len": required(operation, "max_seq_len", max_seq_len),
            "page_table": page_table,
            "first_valid_id": first_valid(first_valid_id, page_table),
            "starts": starts,
            "cu_seq_lens": cu_seq_lens,
            "num_tokens": num_tokens,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "dtype": dtype,
        },
        backend,
        batch,
    )
    return keys, None if value_cache is None else values
