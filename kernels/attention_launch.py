"""What the decode and the prefill kernel are given alike: tensors, strides, and the constants that shapes decide."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from avmp.kernels import attention_tuning as tuning
from avmp.kernels.attention_arguments import ALIBI_FORMS, Problem
from avmp.kernels.attention_tiles import LOG2E
from avmp.kernels.fp8_formats import as_bits, decoding

LEAST_BLOCK_DIM = 16
"""The least that a matrix instruction takes along head_dim."""
MOST_HINT = 16
LARGE_SHARED_BYTES = 160 * 1024


class Tables(NamedTuple):
    """All tensors beside q, caches and results, under the kernels' names."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    page_table: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


class Shared:
    """One call's arguments; ``sizes`` is what the choice of tiles depends on."""

    def __init__(
        self,
        problem: Problem,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tables: Tables,
        scale: float,
        softcap: float,
        first_valid_id: int,
    ) -> None:
        p = self.problem = problem
        self.tables = tables
        block_dim, self.block_dim_v = (
            max(triton.next_power_of_2(dim), LEAST_BLOCK_DIM) for dim in (p.head_dim, p.head_dim_v)
        )
        cache_bytes = max(key_cache.element_size(), value_cache.element_size())
        self.sizes = tuning.Sizes(block_dim, self.block_dim_v, q.element_size(), cache_bytes, device_class(q))
        log2e = LOG2E.value
        self._arguments: dict[str, Any] = dict(
            q=q,
            key_cache=as_bits(key_cache),
            value_cache=as_bits(value_cache),
            out=p.out,
            lse=p.lse,
            **tables._asdict(),
            scale=scale / softcap if softcap else scale * log2e,
            cap=softcap * log2e,
            left=p.left,
            right=p.right,
            rows=p.rows,
            first_valid_id=first_valid_id,
            table_row=tables.block_table.stride(0),
            **_named("q", q.stride(), "token", "head"),
            **_named("k", key_cache.stride(), "page", "token", "head"),
            **_named("v", value_cache.stride(), "page", "token", "head"),
            **_named("out", p.out.stride(), "token", "head"),
            **_named("slope", strides_by_row_and_head(tables.slopes), "row"),
            **_named("key_scale", strides_by_row_and_head(tables.key_scale), "row", "head"),
            **_named("value_scale", strides_by_row_and_head(tables.value_scale), "row", "head"),
            HEADS=p.query_heads,
            GROUP=p.group,
            PAGE=p.page_tokens,
            DIM=p.head_dim,
            DIM_V=p.head_dim_v,
            BLOCK_DIM=block_dim,
            BLOCK_DIM_V=self.block_dim_v,
            LEFT=p.left >= 0,
            RIGHT=p.right >= 0,
            CAP=softcap > 0,
            ALIBI=ALIBI_FORMS.index(p.alibi),
            FORMAT_K=decoding(key_cache),
            FORMAT_V=decoding(value_cache),
            HINT_K=stride_hint(key_cache),
            HINT_V=stride_hint(value_cache),
        )

    def arguments(self, tiles: tuning.Tiles) -> dict[str, Any]:
        """By name, for a kernel with these tiles."""
        chunk = chunk_tokens(self.problem.page_tokens, tiles.keys)
        return self._arguments | dict(CHUNK=chunk, M=tiles.rows, N=tiles.keys)


def chunk_tokens(page_tokens: int, tile_keys: int) -> int:
    """The largest power of two that divides the page size and fits a tile: no chunk crosses a page."""
    return min(page_tokens & -page_tokens, tile_keys)


def stride_hint(tensor: torch.Tensor) -> int:
    """The largest power of two, at most MOST_HINT, that divides every stride but the last, and so every offset along
    these dimensions."""
    hint = MOST_HINT
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        while size > 1 and stride % hint:
            hint //= 2
    return hint


def strides_by_row_and_head(numbers: torch.Tensor | None) -> tuple[int, int]:
    """Strides of one number, numbers per head, or per row and head; 0 along what one number stands for."""
    if numbers is None:
        return 0, 0
    strides = [0 if size == 1 else step for size, step in zip(numbers.shape, numbers.stride(), strict=True)]
    row, head = [0] * (2 - len(strides)) + strides
    return row, head


def device_class(tensor: torch.Tensor) -> str:
    """Which tiles suit the tensor's device."""
    if not tensor.is_cuda:
        return tuning.INTERPRETER
    if torch.version.hip:
        return tuning.AMD
    properties = torch.cuda.get_device_properties(tensor.device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return tuning.LARGE if shared >= LARGE_SHARED_BYTES else tuning.SMALL


def _named(prefix: str, strides: tuple[int, ...], *names: str) -> dict[str, int]:
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides, strict=False)}
