"""FlashAttention 3's ``flash_attn_with_kvcache``: ``page_table``, ragged queries, fp8 with scales per row and head."""

from __future__ import annotations

from typing import Any

import torch

from avmp.compat.arguments import refuse, require, uniform_starts, unit_stride
from avmp.compat.kv_cache import Caches
from avmp.ops import paged_attention

FUNCTION = "flash_attn_with_kvcache"
MOST_SPLITS = 256


@torch.no_grad()
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: Any = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As FlashAttention 2's (see ``flash_attn.py``), with ``page_table`` for the block table, and:

    * ``cu_seqlens_q`` int32 ``[rows + 1]`` with ``max_seqlen_q``: q is ``[tokens, heads, head_dim]``, out likewise;
    * q and caches in fp8 e4m3 with ``q_descale``, ``k_descale``, ``v_descale`` fp32 ``[rows, kv_heads]``: out in bf16.
      Beside other dtypes, which are never scaled, engines pass the same three: they are without effect.

    The log-sum-exp is fp32 ``[rows, heads, queries]`` or ``[heads, tokens]``, -inf for a query that sees nothing.
    Without effect: ``scheduler_metadata``, ``pack_gqa``, ``sm_margin``; ``rotary_interleaved`` and ``rotary_seqlens``,
    which say how to apply rotary_cos; ``num_splits`` changes rounding only. Raises Unsupported for qv, rotary_cos,
    rotary_sin, cache_leftpad, attention_chunk, cu_seqlens_k_new, and for cache_batch_idx with a page_table.
    """
    refuse(FUNCTION, "rotate q and k before the call", rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    refuse(FUNCTION, "let every sequence begin at the first token of its cache", cache_leftpad=cache_leftpad)
    refuse(FUNCTION, "append k and v of equal length per row, or by write_kv", cu_seqlens_k_new=cu_seqlens_k_new)
    refuse(FUNCTION, "use plain or windowed attention", qv=qv, attention_chunk=attention_chunk)
    picked = cache_batch_idx if page_table is not None else None
    refuse(FUNCTION, "pick the rows of page_table before the call", cache_batch_idx=picked)
    require(0 <= num_splits <= MOST_SPLITS, FUNCTION, f"num_splits {num_splits}: expected 0 to {MOST_SPLITS}")
    ragged = cu_seqlens_q is not None
    require(q.dim() == (3 if ragged else 4), FUNCTION, f"q of {q.dim()} dimensions, cu_seqlens_q given: {ragged}")
    require(not ragged or max_seqlen_q is not None, FUNCTION, "cu_seqlens_q needs max_seqlen_q")
    rows = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    queries = q.shape[1] if max_seqlen_q is None or not ragged else max_seqlen_q
    caches = Caches(FUNCTION, q, k_cache, v_cache, page_table, cache_batch_idx, cache_seqlens, rows)
    caches.append(k, v)
    tokens = unit_stride(q) if ragged else unit_stride(q).flatten(0, 1)
    if q.dtype != torch.float8_e4m3fn:
        k_descale = v_descale = None
    elif q_descale is not None:
        k_descale = q_descale if k_descale is None else q_descale * k_descale
    result: Any = paged_attention(
        tokens.to(torch.bfloat16) if q.dtype == torch.float8_e4m3fn else tokens,
        k_cache,
        v_cache,
        caches.table,
        caches.lens,
        uniform_starts(rows, queries, q.device) if cu_seqlens_q is None else cu_seqlens_q,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        max_query_len=queries,
        max_seq_len=caches.capacity,
        first_valid_id=caches.first_valid_id,
        window=(window_size[0], window_size[1]),
        causal=causal,
        softcap=softcap,
        key_scale=k_descale,
        value_scale=v_descale,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
    )
    shape = *q.shape[:-1], v_cache.shape[3]
    if not return_softmax_lse:
        return result.view(shape)  # type: ignore[no-any-return]
    out, lse = result
    return out.view(shape), lse.view(shape[:-1]).transpose(-1, -2).contiguous()
