"""FlashAttention 2's ``flash_attn_with_kvcache``, for pages of any size and any head_dim up to 256, without waiting
for the device and without a copy of the cache."""

from __future__ import annotations

from typing import Any

import torch

from avmp.compat.arguments import refuse, require, uniform_starts, unit_stride
from avmp.compat.kv_cache import Caches
from avmp.ops import paged_attention

FUNCTION = "flash_attn_with_kvcache"
MOST_SPLITS = 128


@torch.no_grad()
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Appends ``k`` and ``v`` ``[rows, new, kv_heads, head_dim]`` to the caches in place, if given, at
    ``cache_seqlens``; then attends with ``q`` ``[rows, queries, heads, head_dim]``, aligned to the end of the context.

    Caches are ``[pages, page_tokens, kv_heads, head_dim]`` with ``block_table`` int32 ``[rows, width]`` (or
    ``Batch.physical()``), or dense, ``[rows, tokens, kv_heads, head_dim]``, of which ``cache_batch_idx`` int32
    ``[rows]`` may pick. ``cache_seqlens``, a number or int32 ``[rows]``, counts the tokens before; None: all.

    Returns out ``[rows, queries, heads, head_dim_v]``; with ``return_softmax_lse`` also fp32 ``[rows, heads,
    queries]``, natural, +inf for a query that sees nothing. With ``alibi_slopes``, ``-slope * distance`` is added to
    the scores; in the log-sum-exp it is ``slope * key's position`` where nothing but causal limits what is seen, as
    for the peer. ``num_splits`` changes rounding only; ``rotary_interleaved`` has no effect. Raises Unsupported for
    rotary_cos, rotary_sin and cache_leftpad.
    """
    refuse(FUNCTION, "rotate q and k before the call", rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    refuse(FUNCTION, "let every sequence begin at the first token of its cache", cache_leftpad=cache_leftpad)
    require(q.dim() == 4, FUNCTION, f"q must be [rows, queries, heads, head_dim], is {tuple(q.shape)}")
    require(0 <= num_splits <= MOST_SPLITS, FUNCTION, f"num_splits {num_splits}: expected 0 to {MOST_SPLITS}")
    rows, queries, heads, head_dim = q.shape
    require(
        alibi_slopes is None or alibi_slopes.shape in {(heads,), (rows, heads)},
        FUNCTION,
        f"alibi_slopes must be [{heads}] or [{rows}, {heads}]",
    )
    caches = Caches(FUNCTION, q, k_cache, v_cache, block_table, cache_batch_idx, cache_seqlens, rows)
    caches.append(k, v)
    result: Any = paged_attention(
        unit_stride(q).flatten(0, 1),
        k_cache,
        v_cache,
        caches.table,
        caches.lens,
        uniform_starts(rows, queries, q.device),
        scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        max_query_len=queries,
        max_seq_len=caches.capacity,
        first_valid_id=caches.first_valid_id,
        window=(window_size[0], window_size[1]),
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
    )
    shape = rows, queries, heads, v_cache.shape[3]
    if not return_softmax_lse:
        return result.view(shape)  # type: ignore[no-any-return]
    out, lse = result[0].view(shape), result[1].view(shape[:3]).transpose(1, 2)
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).contiguous()
    left, right = window_size[0], 0 if causal else window_size[1]
    if alibi_slopes is not None and right == 0 and (left < 0 or left >= caches.capacity):
        lse += _alibi_of_queries(alibi_slopes, caches.lens, queries)
    return out, lse


def _alibi_of_queries(slopes: torch.Tensor, lens: torch.Tensor, queries: int) -> torch.Tensor:
    """fp32 ``[rows or 1, heads, queries]``: slope times a query's position, by which a bias that grows with the key's
    position exceeds one that falls with the distance."""
    positions = (lens - queries)[:, None] + torch.arange(queries, dtype=torch.int32, device=lens.device)
    return slopes.view(-1, slopes.shape[-1], 1).float() * positions[:, None]
