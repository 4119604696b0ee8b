"""How the reference of paged attention reads pages on a CPU: gathered and widened, or summed where they lie.

Either is given the physical ids of some pages and knows nothing of queries and scores.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from avmp.kernels.attention_arguments import FP8_DTYPES


class WorkingMemory(threading.local):
    """Buffers by name, anything in them; on a CPU the same on every call in a thread. Fresh memory is slow there: what
    has just been given back comes from the system again a page at a time, which takes a fifth of a decode step."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor, which whoever takes the same name next overwrites."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        kept = self.kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self.kept[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size].view(dtype).view(shape)


MEMORY = WorkingMemory()


class Stage:
    """Pages of one cache, gathered and in fp32: ``tokens`` is ``[kv_heads, pages * page_tokens, width]``.

    Gathering whole pages runs at the speed of memory. The second step, where the dtype or the order of a page asks for
    one, is made within a buffer that the second-level cache still holds, and leaves the tokens of a head adjacent. All
    of a thread have the same memory: what one has read is gone when another reads.
    """

    def __init__(self, cache: torch.Tensor, pages: int) -> None:
        _, page_tokens, heads, width = cache.shape
        self.pages = pages
        # Bytes are gathered, whatever they mean: not every operation knows fp8.
        self.source = cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache
        by_head = cache.stride(2) > cache.stride(1)
        self.widened: torch.Tensor | None = None
        if cache.dtype == torch.float32 and not by_head:
            self.gathered = MEMORY.take("wide", (pages, page_tokens, heads, width), torch.float32, cache.device)
            self.tokens = self.gathered.flatten(0, 1).transpose(0, 1)
        else:
            wide = MEMORY.take("wide", (heads, pages, page_tokens, width), torch.float32, cache.device)
            self.tokens, self.gathered = wide.flatten(1, 2), wide.permute(1, 2, 0, 3)
        if cache.dtype != torch.float32:
            self.widened = self.gathered
            order = (pages, heads, page_tokens, width) if by_head else (pages, page_tokens, heads, width)
            narrow = MEMORY.take("narrow", order, self.source.dtype, cache.device)
            self.gathered = narrow.transpose(1, 2) if by_head else narrow
        self.typed = self.gathered.view(cache.dtype)

    def read(self, ids: torch.Tensor, null: torch.Tensor | None) -> torch.Tensor:
        """``tokens`` with the pages ``ids`` in front, zero where they are null; behind them lies anything."""
        gathered, typed, widened = self.gathered, self.typed, self.widened
        if (count := ids.numel()) < self.pages:
            gathered, typed = gathered[:count], typed[:count]
            widened = None if widened is None else widened[:count]
        torch.index_select(self.source, 0, ids, out=gathered)
        if null is not None:
            gathered[null] = 0  # whatever lies there may be NaN, and 0 * NaN is NaN
        if widened is not None:
            widened.copy_(typed)
        return self.tokens


class TokenRows:
    """One cache as the rows of a table, one per token and head, of which ``embedding_bag`` makes weighted sums: each
    value is read where it lies, once per query row, widened in registers, and added in fp32.

    Weights are rounded to the dtype of the cache, and so is the sum of each chunk: one rounding more than the result
    has in any case.
    """

    def __init__(self, cache: torch.Tensor, ids: NDArray[Any]) -> None:
        """``ids`` are the physical pages of all rows of the batch."""
        _, page_tokens, heads, width = cache.shape
        page, token, head = (step // width for step in _steps(cache))
        rows = sum((size - 1) * step for size, step in zip(cache.shape, (page, token, head), strict=False)) + 1
        self.table = cache.as_strided((rows, width), (width, 1))
        kind: Any = np.int32 if rows < 2**31 else np.int64
        self.pages, self.tokens = ids * kind(page), np.arange(page_tokens, dtype=kind) * kind(token)
        dtype = torch.from_numpy(self.tokens).dtype
        self.heads = torch.arange(heads, dtype=dtype, device=cache.device).view(-1, 1, 1) * head

    @staticmethod
    def can_read(cache: torch.Tensor) -> bool:
        """Whether pages, tokens and heads are whole rows apart, and the dtype gains by it and holds every sum: fp32
        needs no widening and gains little, and a sum in fp16 may be infinite where the result is not."""
        known = cache.dtype == torch.bfloat16 and cache.device.type == "cpu" and cache.numel() > 0
        return known and not any(step % cache.shape[3] for step in _steps(cache))

    def sums(
        self, rows: list[int], first: list[int], tokens: list[int], weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of values ``[blocks, kv_heads, rows, width]`` and of weights as they were rounded, both fp32.

        ``weights`` fp32 ``[blocks, chunks, kv_heads, rows, keys]`` are those of the first ``tokens`` of the pages, none
        null, that each block's row has from column ``first`` on. Chunks are summed one by one: the pages of one stay
        in the cache while head after head reads its part of them.
        """
        blocks, chunks, heads, count, keys = weights.shape
        rounded = MEMORY.take("rounded", weights.shape, self.table.dtype, weights.device).copy_(weights)
        index = MEMORY.take("index", weights.shape, self.heads.dtype, weights.device)
        places = torch.from_numpy(self._places(rows, first, tokens, chunks * keys))
        torch.add(places.view(blocks, chunks, 1, 1, keys), self.heads.expand(*weights.shape[:4], 1), out=index)
        sums = weights.new_zeros(blocks, heads, count, self.table.shape[1])
        begin = 0
        for used, equal in groupby(-(-seen // keys) for seen in tokens):  # blocks of as many chunks are one call
            end = begin + len(list(equal))
            if used:
                parts = self._sum(index[begin:end, :used], rounded[begin:end, :used])
                torch.sum(parts, 1, dtype=torch.float32, out=sums[begin:end])
            begin = end
        return sums, rounded.sum(4, dtype=torch.float32).sum(1)

    def _places(self, rows: list[int], first: list[int], tokens: list[int], most: int) -> NDArray[Any]:
        """Of the first head of each token, ``[blocks, most]``; behind the last token, whose weights are 0, of the first
        again: what else lies there may be NaN."""
        columns = np.add.outer(first, np.arange(most // len(self.tokens)))
        pages = self.pages[np.array(rows)[:, None], np.minimum(columns, self.pages.shape[1] - 1)]
        places: NDArray[Any] = np.add.outer(pages, self.tokens).reshape(len(rows), most)
        for place, seen in zip(places, tokens, strict=True):
            if seen < most:
                place[seen:] = place[0]
        return places

    def _sum(self, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums over the last dimension, ``[..., width]``."""
        bags = torch.arange(0, index.numel() + 1, index.shape[-1], dtype=index.dtype, device=index.device)
        sums = F.embedding_bag(
            index.flatten(),
            self.table,
            bags,
            mode="sum",
            per_sample_weights=weights.flatten(),
            include_last_offset=True,
        )
        return sums.view(*index.shape[:-1], -1)


def _steps(cache: torch.Tensor) -> list[int]:
    """Strides of pages, tokens and heads; 0 along what there is one of."""
    return [step if size > 1 else 0 for size, step in zip(cache.shape[:3], cache.stride()[:3], strict=True)]
