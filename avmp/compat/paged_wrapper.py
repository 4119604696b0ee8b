"""What FlashInfer's two wrappers share: the tables of a plan, and a run over them."""

from __future__ import annotations

import math
from typing import Any

import torch

from avmp.compat.arguments import refuse, require, unstamped
from avmp.ops import paged_attention

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = float | torch.Tensor | None
LOG2E = math.log2(math.e)
MOST_TABLE_ENTRIES = 2**28


class PagedWrapper:
    """Tables and options of the latest plan. With CUDA graphs, they lie in the tensors of the first one."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, *buffers: Any) -> None:
        self._name = type(self).__name__
        require(kv_layout in ("NHD", "HND"), self._name, f"kv_layout {kv_layout!r}: expected 'NHD' or 'HND'")
        self._layout, self._device = kv_layout, workspace.device
        self._fixed = buffers if use_cuda_graph else None
        for buffer in buffers if use_cuda_graph else ():
            require(isinstance(buffer, torch.Tensor), self._name, "use_cuda_graph needs all buffers, as tensors")
        for offsets in (buffers[0], *buffers[3:]) if use_cuda_graph else ():
            needed = len(buffers[2]) + 1
            require(len(offsets) == needed, self._name, f"a buffer of {len(offsets)} offsets, the rows need {needed}")
        self._table: torch.Tensor | None = None
        self._lens = torch.empty(0, dtype=torch.int32)

    def _plan_tables(
        self,
        indptr: Any,
        indices: Any,
        last: Any,
        page_size: int,
        block_tables: torch.Tensor | None,
        longest: int | None,
    ) -> None:
        """Sets ``_table`` and ``_lens``. ``longest`` bounds the contexts, if known."""
        self._stamped = [given for given in (indptr, indices, last) if not isinstance(given, torch.Tensor)]
        (indptr, self._first), (indices, _), (last, _) = (
            unstamped(given, name)
            for given, name in ((indptr, "kv_indptr"), (indices, "kv_indices"), (last, "kv_last_page_len"))
        )
        rows = len(last)
        require(len(indptr) == rows + 1, self._name, f"indptr has {len(indptr)} entries for {rows} rows")
        if block_tables is not None:
            width = block_tables.shape[1]
        else:
            width = self._width(indptr, len(indices), None if longest is None else -(-longest // page_size))
        if self._fixed is not None:
            places = len(self._fixed[1])
            require(rows == len(self._fixed[2]), self._name, f"{rows} rows, captured with {len(self._fixed[2])}")
            require(len(indices) <= places, self._name, f"{len(indices)} indices for a buffer of {places}")
            captured = width if self._table is None else self._table.shape[1]
            require(width == captured, self._name, f"a table of {width} columns, captured with {captured}")
        require(
            block_tables is not None or rows * width <= MOST_TABLE_ENTRIES,
            self._name,
            f"a dense table of {rows} rows by {width} pages; pass block_tables, or a lower max_sequence_kv",
        )
        given = [self._on_device(tensor, place) for place, tensor in enumerate((indptr, indices, last))]
        counts = given[0].diff()
        lens = torch.where(counts > 0, (counts - 1) * page_size + given[2], 0).int().clamp_(max=width * page_size)
        table = (
            _dense(given[0], given[1], width) if block_tables is None else block_tables.to(self._device, torch.int32)
        )
        if self._fixed is not None and self._table is not None:
            self._table.copy_(table)
            self._lens.copy_(lens)
        else:
            self._table, self._lens = table, lens
        self._page_size, self._capacity = page_size, max(table.shape[1], 1) * page_size

    def _width(self, indptr: torch.Tensor, pages: int, most: int | None) -> int:
        """Columns of a table for these rows, of ``most`` pages each at most, if that is known."""
        if self._fixed is not None:
            places = len(self._fixed[1])
            return places if most is None else min(places, most)
        if most is not None and indptr.device.type != "cpu":
            return min(pages, most)
        return int(indptr.diff().max()) if len(indptr) > 1 else 0  # waits for the device, if indptr is there

    def _longest(self, seq_lens: torch.Tensor | None, bound: int | None) -> int | None:
        """Upper bound of the contexts, of what is known on the host. That of a captured graph is for all its plans."""
        if bound or self._fixed is not None or seq_lens is None or seq_lens.device.type != "cpu":
            return bound or None
        return int(seq_lens.max()) if len(seq_lens) else 0

    def _on_device(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        if self._fixed is None:
            return tensor.to(self._device, non_blocking=True)
        kept: torch.Tensor = self._fixed[place]
        kept[: len(tensor)].copy_(tensor, non_blocking=True)
        return kept

    def _plan_attention(
        self,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        split: bool,
    ) -> None:
        """Sets what ``run`` uses beside the tables."""
        self._dtypes, self._splits = dtypes, 0 if split else 1
        self._set_options(causal, window_left, logits_soft_cap, sm_scale)

    def _set_options(
        self, causal: bool, window_left: int, logits_soft_cap: float | None, sm_scale: float | None
    ) -> None:
        self._window, self._scale = window_left, sm_scale
        self._options: dict[str, Any] = dict(
            causal=causal,
            window=(max(window_left, -1), 0 if causal else -1),
            softcap=max(logits_soft_cap or 0.0, 0.0),
            num_splits=self._splits,
        )

    def _replace_options(
        self,
        causal: bool | None,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
    ) -> None:
        """What ``forward`` brings takes the place of what was planned; ``causal`` None: as it was."""
        refuse_encoding(self._name, pos_encoding_mode)
        require(self._table is not None, self._name, "plan comes before forward")
        planned = self._options["causal"]
        self._set_options(planned if causal is None else causal, window_left, logits_soft_cap, sm_scale)

    @torch.no_grad()
    def _attend(
        self,
        q: torch.Tensor,
        cache: Cache,
        starts: torch.Tensor,
        most_queries: int,
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        require(self._table is not None, self._name, "plan comes before run")
        assert self._table is not None
        for given in self._stamped:
            given.require_current()
        key, value = key_and_value(cache, self._layout)
        require(key.shape[1] == self._page_size, self._name, f"pages of {key.shape[1]}, planned {self._page_size}")
        dtypes = q.dtype, key.dtype, self._dtypes[2] if out is None else out.dtype
        require(dtypes == self._dtypes, self._name, f"q, cache and out of {dtypes}, planned {self._dtypes}")
        same = window_left is None or window_left == self._window
        require(same, self._name, f"window_left {window_left} at run, {self._window} in plan")
        scale, key_scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale, None
        for factor in scales[:2]:
            if isinstance(factor, torch.Tensor):
                key_scale = factor if key_scale is None else key_scale * factor
            elif factor is not None:
                scale *= factor
        if out is None:
            out = torch.empty(*q.shape[:2], value.shape[-1], dtype=self._dtypes[2], device=q.device)
        result: Any = paged_attention(
            q,
            key,
            value,
            self._table,
            self._lens,
            starts,
            scale=scale,
            max_query_len=most_queries,
            max_seq_len=self._capacity,
            first_valid_id=self._first,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=scales[2] if isinstance(scales[2], torch.Tensor) else None,
            return_lse=return_lse,
            out=out,
            **self._options,
        )
        if isinstance(scales[2], float | int):
            out.mul_(scales[2])
        if not return_lse:
            return out
        natural = result[1]
        return out, torch.mul(natural, LOG2E, out=torch.empty_like(natural) if lse is None else lse)


def refuse_encoding(name: str, pos_encoding_mode: str | None) -> None:
    """Raises Unsupported for positions that attention would have to encode."""
    encoded = (pos_encoding_mode or "NONE") != "NONE"
    refuse(name, "encode positions in q and k before the call", pos_encoding_mode=encoded)


def planned_dtypes(q: Any, cache: Any, out: Any) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of q, of the cache and of the output, from dtypes, their names, or None: as q."""
    given = [getattr(torch, name) if isinstance(name, str) else name for name in (q, cache, out)]
    return given[0], given[1] or given[0], given[2] or given[0]


def key_and_value(cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as ``[pages, page_size, kv_heads, head_dim]``."""
    key, value = cache if isinstance(cache, tuple | list) else (cache[:, 0], cache[:, 1])
    return (key, value) if kv_layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


def _dense(indptr: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """int32 ``[rows, width]`` of a compressed table; -1 behind a row's pages."""
    at = indptr[:-1, None] + torch.arange(width, dtype=torch.int32, device=indptr.device)
    live = at < indptr[1:, None]
    if not len(indices):
        return torch.full_like(at, -1)
    return torch.where(live, indices[torch.where(live, at, 0).long()], -1).int()
