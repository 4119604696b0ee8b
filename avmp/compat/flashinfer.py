"""FlashInfer's wrappers for paged decode and prefill over compressed tables, and ``append_paged_kv_cache``.

``plan`` makes a dense block table of the compressed one, on the device. Its width is that of the longest row, taken
from ``block_tables``; or ``indptr`` on the host (as FlashInfer's users pass it to save the copy); or from upper bounds
on the host, ``max_sequence_kv`` or ``seq_lens``. Without any of them ``plan`` waits for the device, as FlashInfer's
does. For CUDA graphs it never waits, and the width is that of the buffer of indices. Contexts beyond the table end
with it. ``Batch.physical_csr()`` is taken in place of ``indptr``, ``indices`` and ``last_page_len``, each of them, and
checked again at ``run``.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from avmp.compat.arguments import refuse, require, uniform_starts, unstamped
from avmp.compat.paged_wrapper import Cache, PagedWrapper, Scale, key_and_value, planned_dtypes, refuse_encoding
from avmp.ops import write_kv

PLAN_NAMES = (
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type"),
    *("data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens"),
    *("fixed_split_size", "disable_split_kv", "q_len_per_req"),
)
"""What the decode plan takes by position after ``page_size``, in this order."""


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode over pages of a ``[pages, 2, page_size, kv_heads, head_dim]`` cache (``"HND"``: heads before tokens), or
    of a pair of caches without the second dimension. Without effect: the workspace, ``use_tensor_cores``,
    ``backend``."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)
        refuse(self._name, "use the attention that is built in", jit_args=jit_args)
        self._queries = 0

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Sets the rows of the runs to come; the optional arguments are PLAN_NAMES. With ``q_len_per_req`` > 1 a row
        has as many queries, causal among themselves. ``fixed_split_size`` and ``disable_split_kv``: contexts are not
        split. Without effect: ``rope_scale``, ``rope_theta``, ``non_blocking`` and the head counts."""
        require(len(deprecated_positional_args) <= len(PLAN_NAMES), self._name, "plan: too many positional arguments")
        given = dict(zip(PLAN_NAMES, deprecated_positional_args, strict=False)) | kwargs
        refuse(self._name, "leave it 0", window_right=given.pop("window_right", 0))
        unknown = sorted(set(given) - set(PLAN_NAMES))
        require(not unknown, self._name, f"plan: unknown arguments {unknown}")
        both = given.get("data_type")
        refuse_encoding(self._name, given.get("pos_encoding_mode"))
        q_dtype = given.get("q_data_type", "float16") or both
        dtypes = planned_dtypes(q_dtype, given.get("kv_data_type") or both, given.get("o_data_type"))
        queries = given.get("q_len_per_req") or 1
        same = self._fixed is None or self._table is None or queries == self._queries
        require(same, self._name, f"q_len_per_req {queries}, captured with {self._queries}")
        tables = indptr, indices, last_page_len
        self._plan_tables(*tables, page_size, given.get("block_tables"), self._longest(given.get("seq_lens"), None))
        if self._fixed is None or queries != self._queries:
            self._starts = uniform_starts(len(self._lens), queries, self._device)
        self._queries = queries
        self._plan_attention(
            queries > 1,
            given.get("window_left", -1),
            given.get("logits_soft_cap"),
            given.get("sm_scale"),
            dtypes,
            not given.get("fixed_split_size") and not given.get("disable_split_kv"),
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Out ``[rows * q_len_per_req, heads, head_dim]`` of q like it; with ``return_lse`` also fp32 ``[rows *
        q_len_per_req, heads]`` to base 2, -inf for an empty row. Without effect: ``enable_pdl``."""
        refuse(self._name, "use the arguments by name", args=args)
        factor = skip_softmax_threshold_scale_factor
        refuse(self._name, "use exact attention", skip_softmax_threshold_scale_factor=factor)
        refuse(self._name, "use a cache in fp8 or wider", kv_cache_sf=kv_cache_sf)
        queries = q_len_per_req or self._queries
        require(queries == self._queries, self._name, f"q_len_per_req {queries} at run, {self._queries} in plan")
        expected = len(self._lens) * queries
        require(len(q) == expected, self._name, f"q has {len(q)} tokens, expected {expected} (q_len_per_req {queries})")
        scales = q_scale, k_scale, v_scale
        return self._attend(q, paged_kv_cache, self._starts, queries, scales, out, lse, return_lse, window_left, sinks)

    def _forward(
        self,
        return_lse: bool,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``run`` with these options in place of the plan's, from now on. Without effect: ``rope_scale``,
        ``rope_theta``."""
        self._replace_options(None, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    begin_forward = plan
    forward = partialmethod(_forward, False)
    forward_return_lse = partialmethod(_forward, True)
    run_return_lse = partialmethod(run, return_lse=True)

    def end_forward(self) -> None:
        """Nothing is left to end."""


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill and append over the same caches, with any number of queries per row at the end of its context. Without
    effect: the workspace, ``backend``."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        buffers = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf, qo_indptr_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)
        refuse(
            self._name, "use causal or window_left", custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf
        )
        refuse(self._name, "use the attention that is built in", jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._starts = torch.empty(0, dtype=torch.int32)
        self._most_queries = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Sets the rows of the runs to come; ``max_token_per_sequence`` and ``max_sequence_kv`` are upper bounds.
        ``fixed_split_size`` and ``disable_split_kv``: contexts are not split. Without effect: ``rope_scale``,
        ``rope_theta``, ``non_blocking``, ``seq_lens_q``, ``use_fp16_qk_reduction`` and the head counts and
        dimensions."""
        masks = dict(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        items = dict(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        lengths = dict(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        refuse(self._name, "use causal or window_left", **masks, **items, **lengths)
        refuse_encoding(self._name, pos_encoding_mode)
        dtypes = planned_dtypes(q_data_type, kv_data_type, o_data_type)
        rows = len(unstamped(paged_kv_last_page_len, "kv_last_page_len")[0])
        require(len(qo_indptr) == rows + 1, self._name, f"qo_indptr has {len(qo_indptr)} entries for {rows} rows")
        tables = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan_tables(*tables, page_size, block_tables, self._longest(seq_lens, max_sequence_kv))
        self._most_queries = max_token_per_sequence or 0
        if qo_indptr.device.type == "cpu" and self._fixed is None and len(qo_indptr) > 1:
            self._most_queries = int(qo_indptr.diff().max())
        self._starts = self._on_device(qo_indptr, 3)
        split = not fixed_split_size and not disable_split_kv
        self._plan_attention(causal, window_left, logits_soft_cap, sm_scale, dtypes, split)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Out ``[tokens, heads, head_dim_vo]`` of q ``[tokens, heads, head_dim_qk]``; with ``return_lse`` also fp32
        ``[tokens, heads]`` to base 2, -inf for a query that sees nothing. Without effect: ``enable_pdl``,
        ``use_fp16_softmax``, ``uses_spcompress``."""
        refuse(self._name, "use the arguments by name", args=args)
        factor = skip_softmax_threshold_scale_factor
        refuse(self._name, "use exact attention", skip_softmax_threshold_scale_factor=factor)
        refuse(self._name, "use a cache in fp8 or wider", kv_cache_sf=kv_cache_sf)
        scales, most_queries = (q_scale, k_scale, v_scale), self._most_queries or len(q)
        return self._attend(
            q, paged_kv_cache, self._starts, most_queries, scales, out, lse, return_lse, window_left, sinks
        )

    def _forward(
        self,
        return_lse: bool,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``run`` with these options in place of the plan's, from now on. Without effect: ``use_fp16_qk_reduction``,
        ``rope_scale``, ``rope_theta``."""
        self._replace_options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    begin_forward = plan
    forward = partialmethod(_forward, False)
    forward_return_lse = partialmethod(_forward, True)
    run_return_lse = partialmethod(run, return_lse=True)

    def end_forward(self) -> None:
        """Nothing is left to end."""


@torch.no_grad()
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values ``[tokens, kv_heads, head_dim]`` in place, token i to position ``positions[i]`` of row
    ``batch_indices[i]``; nothing for a row below 0. ``kv_last_page_len`` is not needed."""
    name = "append_paged_kv_cache"
    require(kv_layout in ("NHD", "HND"), name, f"kv_layout {kv_layout!r}: expected 'NHD' or 'HND'")
    key, value = key_and_value(paged_kv_cache, kv_layout)
    (indices, first_valid_id), (indptr, _) = unstamped(kv_indices, "kv_indices"), unstamped(kv_indptr, "kv_indptr")
    page_size, row = key.shape[1], batch_indices.long()
    at = indptr[row.clamp(min=0)] + positions // page_size
    valid = (row >= 0) & (positions >= 0) & (at < indptr[row.clamp(min=0) + 1])
    page = indices[torch.where(valid, at, 0).long()].long()
    slots = torch.where(valid, page * page_size + positions % page_size, -1)
    write_kv(append_key, append_value, key, value, slots, first_valid_id=first_valid_id)
