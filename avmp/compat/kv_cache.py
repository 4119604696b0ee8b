"""What the two FlashAttention adapters share: caches as pages, and new keys and values appended to them."""

from __future__ import annotations

from typing import Any

import torch

from avmp.compat.arguments import per_row, require, slots_of, unit_stride, unstamped
from avmp.errors import InvalidArgument
from avmp.ops import write_kv


class Caches:
    """The caches of one call as pages, and how many tokens each row has in them.

    Paged, ``[pages, page_tokens, kv_heads, head_dim]`` with a block table; or dense, ``[rows, tokens, kv_heads,
    head_dim]``, where a row is one page of all its tokens. ``table`` is int32 ``[rows, width]``, ``lens`` int32
    ``[rows]``, ``capacity`` the tokens that a row has room for: a tensor that counts more counts as so many. Raises
    InvalidArgument for what the peers refuse too.
    """

    def __init__(
        self,
        function: str,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_table: Any,
        batch_idx: torch.Tensor | None,
        seqlens: int | torch.Tensor | None,
        rows: int,
    ) -> None:
        self.function, self.key, self.value, self.rows = function, key, value, rows
        require(
            key.dtype == q.dtype and value.dtype == q.dtype,
            function,
            f"q of {q.dtype}, k_cache of {key.dtype} and v_cache of {value.dtype} must be of one dtype",
        )
        require(
            key.dim() == value.dim() == 4
            and key.shape[:3] == value.shape[:3]
            and key.shape[3] == q.shape[-1]
            and q.shape[-2] % max(key.shape[2], 1) == 0,
            function,
            f"k_cache {tuple(key.shape)} and v_cache {tuple(value.shape)} do not fit q {tuple(q.shape)}",
        )
        require(block_table is None or batch_idx is None, function, "cache_batch_idx is for dense caches")
        if block_table is not None:
            self.table, self.first_valid_id = unstamped(block_table, "block_table")
        else:
            enough = batch_idx is not None or len(key) >= rows
            require(enough, function, f"{rows} rows without cache_batch_idx, but dense caches of {len(key)}")
            own = torch.arange(rows, dtype=torch.int32, device=q.device)
            self.table, self.first_valid_id = (own if batch_idx is None else batch_idx)[:, None], 0
        require(
            self.table.dtype == torch.int32 and self.table.dim() == 2 and len(self.table) == rows,
            function,
            f"{rows} rows need an int32 block table, got {self.table.dtype} {tuple(self.table.shape)}",
        )
        self.capacity = self.table.shape[1] * key.shape[1]
        self.counted = seqlens is not None
        if isinstance(seqlens, int):
            fits = 0 <= seqlens <= self.capacity
            require(fits, function, f"cache_seqlens {seqlens}: expected 0 to {self.capacity}, what a row has room for")
        self.lens = per_row(self.capacity if seqlens is None else seqlens, rows, q.device)
        require(
            self.lens.dtype == torch.int32 and self.lens.shape == (rows,),
            function,
            f"cache_seqlens must be int32 [{rows}], is {self.lens.dtype} {tuple(self.lens.shape)}",
        )
        if isinstance(seqlens, torch.Tensor):
            self.lens = seqlens.clamp(max=self.capacity)  # without waiting: attention would read behind the table

    def append(self, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Writes ``[rows, new, kv_heads, head_dim]`` behind each row's tokens, which become more by ``new``; what a row
        has no room for is dropped, and not counted."""
        if k is None and v is None:
            return
        if k is None or v is None or not self.counted:
            raise InvalidArgument(f"{self.function}: k, v and cache_seqlens are given together")
        for name, new, cache in (("k", k, self.key), ("v", v, self.value)):
            require(
                new.dtype == cache.dtype and new.shape == (self.rows, k.shape[1], *cache.shape[2:]),
                self.function,
                f"{name} {new.dtype} {tuple(new.shape)} does not fit {self.rows} rows of {cache.dtype} "
                f"{tuple(cache.shape)}",
            )
        positions = self.lens[:, None] + torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
        slots = slots_of(self.table, positions, self.key.shape[1]).flatten()
        if k.dtype.itemsize == 1:
            k, v = k.bfloat16(), v.bfloat16()  # holds every value of fp8 exactly
        new_key, new_value = (unit_stride(new).flatten(0, 1) for new in (k, v))
        write_kv(new_key, new_value, self.key, self.value, slots, first_valid_id=self.first_valid_id)
        self.lens = (self.lens + k.shape[1]).clamp_(max=self.capacity)
