"""``attn_implementation="avmp"``: the attention of any transformers model, reading keys and values in their pages."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from avmp import ops
from avmp.errors import InvalidArgument, Unsupported
from avmp.integrations.transformers_layers import Pages, store, tokens_of


def register() -> None:
    """Makes the name known to transformers, with the mask that it wants."""
    AttentionInterface.register("avmp", attention)
    AttentionMaskInterface.register("avmp", padding_mask)


class OtherMask:
    """Stands for a mask that is not causal. Some models make one that none of their layers uses; one that does is
    refused there."""


def padding_mask(
    *arguments: Any,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | OtherMask | None:
    """The mask that reaches ``attention``: that of the padding, as it came."""
    return attention_mask if mask_function is causal_mask_function else OtherMask()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | OtherMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    avmp: Pages | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the new keys and values, ``[rows, kv_heads, tokens, head_dim]``, and attends to all of each row.

    Padding is neither stored nor read; its results are 0. Returns ``[rows, tokens, query_heads, head_dim_v]``.
    Raises Unsupported for what paged attention does not do, InvalidArgument without an AvmpCache.
    """
    if avmp is None:
        raise InvalidArgument(
            "attn_implementation='avmp' reads the pages of an AvmpCache, and this forward has none: pass one as the "
            "cache, or set another attn_implementation"
        )
    unsupported = {
        "masks that are not causal": isinstance(attention_mask, OtherMask),
        "dropout": bool(dropout),
        "sliding_window": sliding_window is not None,
        "is_causal=False": is_causal is False,
        "position_bias": others.get("position_bias") is not None,
        "output_attentions": bool(others.get("output_attentions")),
    }
    rows, layer = avmp
    rows.unread = None
    if any(unsupported.values()):
        rows.give_up()
        named = ", ".join(name for name, given in unsupported.items() if given)
        raise Unsupported(f"attn_implementation='avmp' does not do {named}; use 'eager' or 'sdpa'")
    assert not isinstance(attention_mask, OtherMask)
    count, _, tokens, _ = key.shape
    rows.begin(layer, count, tokens, attention_mask, paged=True)
    flat, real = [tokens_of(states) for states in (query, key, value)], rows.added.real
    if real is not None:
        flat = [states.index_select(0, real) for states in flat]
    queries, keys, values = flat
    store(rows, layer, keys, values)
    batch = rows.tables()
    out = queries.new_empty(*queries.shape[:2], value.shape[-1])
    ops.paged_attention(
        queries,
        *rows.pool.kv(layer),
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        page_table=batch.page_table,
        softcap=softcap or 0.0,
        sinks=s_aux,
        out=out,
        backend=rows.pool.backend.name,
    )
    if real is not None:
        out = out.new_zeros(count * tokens, *out.shape[1:]).index_copy_(0, real, out)
    return out.view(count, tokens, *out.shape[1:]), None
