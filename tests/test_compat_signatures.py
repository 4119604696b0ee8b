"""Adapters have their peers' parameter names, order and defaults, as published; a positional call is a drop-in."""

import inspect

import pytest

from avmp.compat import causal_conv1d, flash_attn, flash_attn_3, flashinfer, mamba_ssm, vllm

DECODE, PREFILL = flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper


def published(text: str) -> list[tuple[str, object]]:
    """Names and defaults of ``a, b=None, *args, c=0``."""
    signature = inspect.signature(eval(f"lambda {' '.join(text.split())}: 0"))
    return [(name, parameter.default) for name, parameter in signature.parameters.items()]


SIGNATURES = {
    flash_attn.flash_attn_with_kvcache: """
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False""",
    flash_attn_3.flash_attn_with_kvcache: """
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False""",
    vllm.unified_attention: """
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
        softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None, alibi_slopes=None,
        output_scale=None, qq_bias=None, sinks=None, mm_prefix_range=None, rswa_prefix_lens=None, rswa_window=None,
        use_alibi_sqrt=False, kv_quant_mode=0, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1,
        use_td=False, mm_prefix_clamp_sliding_window=False""",
    vllm.reshape_and_cache_flash: """
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale""",
    vllm.selective_state_update: """
        state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
        dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None,
        is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0""",
    vllm.causal_conv1d_update: """
        x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
        query_start_loc=None, max_query_len=-1, null_block_id=0, validate_data=False, out=None""",
    mamba_ssm.selective_state_update: """
        state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None""",
    causal_conv1d.causal_conv1d_update: """
        x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None""",
    DECODE.__init__: """
        self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
        backend='auto', jit_args=None""",
    DECODE.plan: """
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs""",
    DECODE.run: """
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None""",
    DECODE.forward: """
        self, q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None""",
    PREFILL.forward: """
        self, q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None,
        v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None""",
    PREFILL.__init__: """
        self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None""",
    PREFILL.plan: """
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False""",
    flashinfer.append_paged_kv_cache: """
        append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
        kv_layout='NHD'""",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__}.{function.__qualname__}")
def test_names_order_and_defaults_are_the_published_ones(function):
    found = inspect.signature(function).parameters
    assert [(name, parameter.default) for name, parameter in found.items()] == published(SIGNATURES[function])


def test_the_prefill_run_has_the_published_keywords():
    """Its published signature ends in an ellipsis, so this compares what is before it."""
    found = list(inspect.signature(PREFILL.run).parameters)
    assert found[:13] == [name for name, _ in published(
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None"
    )]  # fmt: skip
    assert "kv_cache_sf" in found


def test_the_decode_plan_takes_its_options_by_position_in_the_published_order():
    names = [name for name, _ in published(
        "pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type, "
        "sm_scale, rope_scale, rope_theta, non_blocking, block_tables, seq_lens, fixed_split_size, "
        "disable_split_kv, q_len_per_req"
    )]  # fmt: skip
    assert list(flashinfer.PLAN_NAMES) == names
