"""vLLM's ``unified_attention``, ``reshape_and_cache_flash``, ``selective_state_update`` and ``causal_conv1d_update``.

Block and slot 0 of a KV cache are ordinary; state ``null_block_id``, 0 by default, is null, and so is any negative one.
Where the peer leaves the output of padding as it was, or computes it from a zero state, it becomes 0.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from avmp import ops
from avmp.compat.arguments import refuse, require, unit_stride, unstamped
from avmp.errors import Unsupported

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN = ("auto", "float16", "bfloat16", "float32")
NO_QUANTISATION, FP8_PER_TENSOR = 0, 1


@torch.no_grad()
def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool | torch.Tensor,
    window_size: tuple[int, int],
    block_table: Any,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mm_prefix_range: torch.Tensor | None = None,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: int = 0,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """Attention of q ``[tokens, heads, head_dim]`` over pages, written to ``out``; ``causal`` may be bool ``[rows]``.

    fp8 caches are scaled with ``kv_quant_mode`` 1 only; q may then be fp8 too. ``output_scale`` divides a result that
    is stored in fp8. Without effect: ``seq_threshold_3D``, ``num_par_softmax_segments``, ``softmax_segm_*``,
    ``use_td``, ``mm_prefix_clamp_sliding_window``. Raises Unsupported for qq_bias, mm_prefix_range, rswa, lookback and
    other ``kv_quant_mode``.
    """
    name = "unified_attention"
    refuse(name, "use plain, causal or windowed attention", qq_bias=qq_bias, mm_prefix_range=mm_prefix_range)
    lookback = chunk_lookback + 1
    refuse(name, "use window_size", rswa_prefix_lens=rswa_prefix_lens, rswa_window=rswa_window, chunk_lookback=lookback)
    refuse(name, "use kv_quant_mode 0 or 1", k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)
    other = int(kv_quant_mode) not in (NO_QUANTISATION, FP8_PER_TENSOR)
    refuse(name, f"it is {int(kv_quant_mode)}; use 0, or 1 (fp8 per tensor)", kv_quant_mode=other)
    key_scale, value_scale = _scales(q.dtype, kv_quant_mode, q_descale, k_descale, v_descale)
    if q.dtype == torch.float8_e4m3fn:
        q = q.to(torch.bfloat16 if out.dtype == torch.float8_e4m3fn else out.dtype)
    table, first_valid_id = unstamped(block_table, "block_table")
    left = window_size[0]
    alibi: Literal["distance", "position", "root"] = "root" if use_alibi_sqrt else "position"
    if alibi == "position" and sinks is None and causal is True:
        alibi = "distance"  # the same up to a number per query, which cancels; and small where the weights are large

    def attend(causal: bool, lens: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return ops.paged_attention(
            q,
            k,
            v,
            table,
            lens,
            cu_seqlens_q,
            scale=softmax_scale,
            max_query_len=max_seqlen_q,
            max_seq_len=max_seqlen_k,
            first_valid_id=first_valid_id,
            window=(left, 0 if causal else left),
            causal=causal,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            alibi=alibi,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            out=into,
        )

    into = out if output_scale is None else None
    if isinstance(causal, torch.Tensor):
        # Rows of one kind at a time: the others have no keys, and give 0.
        own = torch.where(causal.bool(), seqused_k, 0)
        result = attend(True, own, into).add_(attend(False, seqused_k - own, None))
    else:
        result = attend(causal, seqused_k, into)
    if output_scale is not None:
        largest = torch.finfo(torch.float8_e4m3fn).max
        out.copy_((result.float() / output_scale).clamp_(-largest, largest))


def _scales(
    q_dtype: torch.dtype,
    kv_quant_mode: int,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of keys, that of fp8 queries in it, and of values. None but for fp8 per tensor."""
    if int(kv_quant_mode) != FP8_PER_TENSOR:
        return None, None
    if q_dtype != torch.float8_e4m3fn or q_descale is None:
        return k_descale, v_descale
    return q_descale if k_descale is None else q_descale * k_descale, v_descale


@torch.no_grad()
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes ``key`` and ``value`` ``[tokens, kv_heads, head_dim]`` to ``slot_mapping``; slots below 0 are skipped.

    As many tokens as ``slot_mapping`` has; caches ``[blocks, block_size, kv_heads, head_dim]``, any strides. With
    ``kv_cache_dtype`` ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"`` what is stored is divided by ``k_scale`` and
    ``v_scale``, one number or ``[kv_heads]``. Raises Unsupported for other kinds and for head-major caches.
    """
    name = "reshape_and_cache_flash"
    if key_cache.dim() != 4:
        raise Unsupported(f"{name}: key_cache of {key_cache.dim()} dimensions; use [blocks, block_size, heads, dim]")
    if kv_cache_dtype not in FP8 and kv_cache_dtype not in PLAIN:
        raise Unsupported(f"{name}: kv_cache_dtype {kv_cache_dtype!r}; use one of {', '.join([*PLAIN, *FP8])}")
    if kv_cache_dtype in PLAIN:
        ops.write_kv(key, value, key_cache, value_cache, slot_mapping, first_valid_id=0)
        return
    fp8 = FP8[kv_cache_dtype]
    caches = key_cache.view(fp8), value_cache.view(fp8)
    ops.write_kv(key, value, *caches, slot_mapping, first_valid_id=0, key_scale=k_scale, value_scale=v_scale)


@torch.no_grad()
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    null_block_id: int = 0,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> None:
    """One step of states ``[slots, [heads,] dim, dstate]`` in place, its output to ``out`` ``[tokens, [heads,] dim]``.

    Indices are ``[rows]`` or ``[rows, columns]``: with ``num_accepted_tokens`` a row begins with the state in column
    ``accepted - 1`` and keeps the state after each token t in column t of the destinations; without, column 0 is the
    row's state. ``cu_seqlens`` ``[rows + 1]``: rows of several tokens. Note the order D, dt_bias, z. Without effect:
    ``is_blackwell``, ``cache_philox_rounds``. Raises Unsupported for enable_stochastic_rounding.
    """
    name = "selective_state_update"
    refuse(name, "keep the state in float32", enable_stochastic_rounding=enable_stochastic_rounding)
    require(out is not None, name, "out must be given: the result is written there")
    require(num_accepted_tokens is None or state_batch_indices is not None, name, "num_accepted_tokens needs indices")
    assert out is not None
    rows = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    sources, first_valid_id = _valid_ids(state_batch_indices, null_block_id, rows)
    destinations, _ = _valid_ids(dst_state_batch_indices, null_block_id, rows)
    longest = 1 if cu_seqlens is None else None
    if num_accepted_tokens is None:
        sources, destinations = _first_column(sources), _first_column(destinations)
    elif sources is not None:
        sources = sources if sources.dim() == 2 else sources[:, None]
        destinations = destinations[:, None] if destinations is not None and destinations.dim() == 1 else destinations
        columns = sources if destinations is None else destinations
        longest = 1 if cu_seqlens is None else columns.shape[1]
    written = out if out.stride(-1) == 1 else None
    result = ops.selective_state_update(
        state,
        unit_stride(x),
        dt,
        A,
        unit_stride(B),
        unit_stride(C),
        D=D,
        z=None if z is None else unit_stride(z),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        state_indices=sources,
        first_valid_id=first_valid_id,
        destination_indices=destinations,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=cu_seqlens,
        max_query_len=longest,
        out=written,
    )
    if written is None:
        out.copy_(result)


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution of new tokens with the windows ``[slots, dim, state_len]`` before them, which move on in place.

    ``x`` is ``[rows, dim]``, ``[rows, dim, tokens]``, or with ``query_start_loc`` ``[tokens, dim]``; the result
    overwrites it, or goes to ``out``, and is returned; it is a new tensor where x is not of the state's dtype. With
    ``num_accepted_tokens`` a window begins at column ``accepted - 1`` of the state, else at column 0; a state has the
    width - 1 + tokens - 1 columns that this needs, and more do not change. Without effect: ``validate_data``.
    """
    name, width = "causal_conv1d_update", weight.shape[1]
    require(out is None or (out.shape == x.shape and out.dtype == x.dtype), name, "out must be like x")
    source = x.to(conv_state.dtype)
    target = source if out is None else out
    tokens = source[..., None] if query_start_loc is None and source.dim() == 2 else source
    indices, first_valid_id = _valid_ids(conv_state_indices, null_block_id, None)
    if query_start_loc is None:
        longest: int | None = tokens.shape[2]
        flat = tokens.transpose(1, 2).reshape(-1, tokens.shape[1])
    else:
        longest, flat = max_query_len if max_query_len > 0 else None, tokens
    in_place = flat.data_ptr() == source.data_ptr() and target is source and flat.stride(-1) == 1
    result = ops.causal_conv1d_update(
        unit_stride(flat),
        conv_state if num_accepted_tokens is not None else conv_state[..., : width - 1],
        weight,
        bias,
        activation="silu" if activation is True else activation or None,
        state_indices=_first_column(indices),
        first_valid_id=first_valid_id,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
        max_query_len=longest,
        out=flat if in_place else None,
    )
    if not in_place:
        shaped = result if query_start_loc is not None else result.view(len(x), -1, x.shape[1]).transpose(1, 2)
        target.copy_(shaped.reshape(x.shape))
    return target.to(x.dtype)


def _valid_ids(
    indices: torch.Tensor | None, null_block_id: int | None, rows: int | None
) -> tuple[torch.Tensor | None, int]:
    """The indices of these rows, and the least that is not null."""
    if indices is None:
        return None, 0
    indices = indices[:rows]
    if null_block_id is None or null_block_id < 0:
        return indices, 0
    if null_block_id == 0:
        return indices, 1
    return indices.masked_fill(indices == null_block_id, -1), 0


def _first_column(indices: torch.Tensor | None) -> torch.Tensor | None:
    return indices if indices is None or indices.dim() == 1 else indices[:, 0]
