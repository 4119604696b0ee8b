"""Paged attention in plain torch: the specification of the Triton kernels, and what runs where they do not.

Written for the CPU. Pages are gathered a chunk at a time into staging buffers that stay in the cache, the query heads
that share a KV head become the query rows of one attention call (a group of g heads is a query of length g, which
needs no mask in decoding), and the chunks' partial results are merged by their log-sum-exp (FlashDecoding,
https://pytorch.org/blog/flash-decoding). Memory is constant in the length of the context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from avmp.kernels.attention_arguments import FP8_DTYPES, Problem, Window, check_attention

CHUNK_BYTES = 1 << 20
"""Keys (or values) of one chunk: with both, what a second-level cache about holds. Half and twice are 5 % slower."""
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 256, 4096
"""A chunk costs some 50 µs whatever it holds; the mask of a chunk grows with it."""
MOST_PARTIALS = 32
"""Partial results that wait to be merged: all of a decode step's up to a context of 16,384, few enough in a prefill."""
QUERY_TOKENS = 256
"""Query tokens attended at a time: bounds the mask, and skips what a causal prefill does not see."""

_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""A private operation of torch that returns the log-sum-exp too. Without it, whole sequences go through the public
``scaled_dot_product_attention`` unless a log-sum-exp is needed."""


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    window: Window = None,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of new tokens over pages of keys and values, for decode, a few query tokens, prefill and any mix.

    * ``q`` ``[tokens, query_heads, head_dim]``, fp16, bf16 or fp32: row r's are ``query_start_loc[r]`` to
      ``query_start_loc[r + 1]``, the last tokens of its context;
    * ``key_cache`` ``[pages, page_tokens, kv_heads, head_dim]``, ``value_cache`` the same with its own head_dim; q's
      dtype or fp8, any strides with a contiguous last dimension; query_heads is a multiple of kv_heads;
    * ``block_table`` int32 ``[rows, width]``, ``seq_lens`` int32 ``[rows]`` (query tokens included),
      ``query_start_loc`` int32 ``[rows + 1]``; ``max_query_len`` and ``max_seq_len`` bound what these hold;
    * ``page_table`` int32 maps virtual to physical page ids; None: the block table holds physical ids. Ids below
      ``first_valid_id``, before or after translation, are null: their keys are invisible.

    A query at position i scores key j as ``scale * q·k``, times ``key_scale``; then ``softcap * tanh(s / softcap)``;
    then ``- alibi_slope * |i - j|``; then the mask: ``window`` is the number of latest keys that it sees, its own
    included, or a pair (left, right) with -1 for no limit, and ``causal`` hides all behind it. ``sinks``
    ``[query_heads]`` are logits that join the softmax and have no value. ``alibi_slopes`` are ``[query_heads]`` or
    ``[rows, query_heads]``; ``key_scale`` and ``value_scale`` one number, ``[kv_heads]`` or ``[rows, kv_heads]``.

    Returns ``(out, lse)``: out ``[tokens, query_heads, head_dim_v]`` in q's dtype, or the tensor given; lse fp32
    ``[tokens, query_heads]``, the natural logarithm of the softmax's denominator (sinks included), if ``return_lse``.
    A query that sees nothing gets 0 and -inf (its sink, if there is one); so does a token that belongs to no row,
    without the sink. ``num_splits`` steers the kernels only: it changes no more than rounding.

    Reads ``kv_heads * (head_dim + head_dim_v) * itemsize`` bytes per visible key once for decode, computes
    ``2 * query_heads * (head_dim + head_dim_v)`` operations per query and visible key.
    """
    problem = check_attention(
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        page_table=page_table,
        window=window,
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=return_lse,
        out=out,
    )
    starts = query_start_loc.tolist()
    whole = not _has_flash(q.device) and not softcap and not return_lse and sinks is None
    chunk_tokens = max_seq_len if whole else _chunk_tokens(key_cache)
    lens = seq_lens.tolist()
    ids, null = _physical_ids(
        block_table, seq_lens, problem.page_tokens, max(lens, default=0), page_table, first_valid_id
    )
    null_rows = null.any(1).tolist()
    pages = _Pages(problem, key_cache, value_cache, chunk_tokens)
    attend = _attend_whole if whole else _attend_flash if _has_flash(q.device) and not softcap else _attend_plainly
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        if count <= 0:
            continue
        pages.open(ids[row], null[row] if null_rows[row] else None, length)
        pages.scales = (_row(key_scale, row), _row(value_scale, row))
        for begin in range(0, count, QUERY_TOKENS):
            tokens = slice(starts[row] + begin, starts[row] + min(begin + QUERY_TOKENS, count))
            block = _Block(q[tokens], problem, length - count + begin, pages.dtype)
            block.attend(pages, partial(attend, scale=scale, softcap=softcap), _row(alibi_slopes, row))
            block.store(tokens, sinks)
    used = starts[-1] if problem.rows else 0
    problem.out[used:] = 0
    if problem.lse is not None:
        problem.lse[used:] = float("-inf")
    return problem.out, problem.lse


def _physical_ids(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tokens: int,
    longest: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[rows, columns in use]``, 0 where there is no page; and bool of the same: pages in use that are null."""
    columns = -(-longest // page_tokens)
    used = torch.arange(columns, device=block_table.device) < ((seq_lens + page_tokens - 1) // page_tokens)[:, None]
    ids = block_table[:, :columns].long()
    valid = used & (ids >= first_valid_id)
    if page_table is not None:
        ids = page_table[torch.where(valid, ids, 0)].long()
        valid = valid & (ids >= first_valid_id)
    return torch.where(valid, ids, 0), used & ~valid


class _Pages:
    """The pages of one row, handed out in chunks: keys and values ``[kv_heads, tokens, width]`` in staging buffers.

    ``width`` is the larger head_dim, with zeros behind the smaller: the CPU's attention wants the two equal.
    """

    def __init__(
        self,
        problem: Problem,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self.caches, self.page_tokens = (key_cache, value_cache), problem.page_tokens
        self.scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.width = max(problem.head_dim, problem.head_dim_v)
        fp8 = any(cache.dtype in FP8_DTYPES for cache in self.caches)
        # fp8 is computed in fp32, so that a scale rounds nothing.
        self.dtype = torch.float32 if fp8 else key_cache.dtype
        self.chunk_pages = max(-(-chunk_tokens // self.page_tokens), 1)
        self.buffers = [cache.new_empty(self.chunk_pages, *cache.shape[1:]) for cache in self.caches]
        # Bytes are gathered, whatever they mean: not every operation knows fp8.
        self.sources = [cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache for cache in self.caches]
        self.targets = [b.view(torch.uint8) if b.dtype in FP8_DTYPES else b for b in self.buffers]
        self.staged = [buffer.flatten(0, 1).transpose(0, 1) for buffer in self.buffers]

    def open(self, ids: torch.Tensor, null: torch.Tensor | None, length: int) -> None:
        """Takes up a row: the physical id of each of its pages (0 for null), and which are null (None: none is)."""
        self.ids, self.null, self.length = ids, null, length

    def chunks(self, first: int, end: int) -> list[tuple[int, int]]:
        """Token ranges that cover keys ``first`` to ``end``; each begins at a page and fits the staging buffers."""
        step = self.chunk_pages * self.page_tokens
        begin = first // self.page_tokens * self.page_tokens
        return [(a, min(a + step, end)) for a in range(begin, end, step)]

    def read(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values of tokens ``begin`` to ``end``, and which of them exist (None: all)."""
        part = slice(begin // self.page_tokens, -(-end // self.page_tokens))
        ids, null = self.ids[part], None if self.null is None else self.null[part]
        keys, values = (self._stage(which, ids, null, end - begin) for which in range(2))
        return keys, values, None if null is None else ~null.repeat_interleave(self.page_tokens)[: end - begin]

    def _stage(self, which: int, ids: torch.Tensor, null: torch.Tensor | None, tokens: int) -> torch.Tensor:
        pages = torch.index_select(self.sources[which], 0, ids, out=self.targets[which][: len(ids)])
        if null is not None:
            pages[null] = 0  # whatever lies there may be NaN, and 0 * NaN is NaN
        staged, scale = self.staged[which][:, :tokens], self.scales[which]
        if staged.dtype != self.dtype:
            staged = staged.to(self.dtype)
        if scale is not None:
            staged = (staged.float() * scale.view(-1, 1, 1)).to(self.dtype)
        return staged if staged.shape[2] == self.width else F.pad(staged, (0, self.width - staged.shape[2]))


class _Partial(NamedTuple):
    """A softmax over some of the keys: its result ``[kv_heads, queries, width]`` and its log-sum-exp in fp32."""

    out: torch.Tensor
    lse: torch.Tensor


def _merge(parts: list[_Partial]) -> _Partial:
    """The softmax over all their keys, in fp32."""
    if len(parts) == 1:
        return _Partial(parts[0].out.float(), parts[0].lse)
    each = torch.stack([part.lse for part in parts])
    lse = torch.logsumexp(each, dim=0)
    weights = (each - lse.masked_fill(lse == float("-inf"), 0)).exp_()  # where all are empty, 0 and not NaN
    out = torch.stack([part.out for part in parts]).float().mul_(weights.unsqueeze(3)).sum(0)
    return _Partial(out, lse)


class _Block:
    """Some consecutive query tokens of one row: ``[kv_heads, tokens * group, width]``, heads of a group adjacent."""

    def __init__(self, q: torch.Tensor, problem: Problem, first_position: int, dtype: torch.dtype) -> None:
        self.problem, self.first, self.count = problem, first_position, len(q)
        p = problem
        rows = q.to(dtype).view(self.count, p.kv_heads, p.group, p.head_dim).transpose(0, 1)
        self.rows = rows.reshape(p.kv_heads, self.count * p.group, p.head_dim)
        self.parts: list[_Partial] = []

    def attend(self, pages: _Pages, softmax: Callable[..., _Partial], slopes: torch.Tensor | None) -> None:
        p, last = self.problem, self.first + self.count - 1
        first_key = max(self.first - p.left, 0) if p.left >= 0 else 0
        end_key = min(pages.length, last + p.right + 1) if p.right >= 0 else pages.length
        rows = self.rows if pages.width == p.head_dim else F.pad(self.rows, (0, pages.width - p.head_dim))
        for begin, end in pages.chunks(first_key, end_key):
            keys, values, exists = pages.read(begin, end)
            hidden = self._hidden(begin, end, exists)
            part = softmax(rows, keys, values, self._bias(begin, end, hidden, slopes))
            if hidden is not None and bool((blind := hidden.all(1)).any()):
                blind = blind.repeat_interleave(p.group)
                part.lse[:, blind] = float("-inf")
                part.out[:, blind] = 0
            self.parts.append(part)
            if len(self.parts) == MOST_PARTIALS:
                self.parts = [_merge(self.parts)]

    def store(self, tokens: slice, sinks: torch.Tensor | None) -> None:
        p = self.problem
        if not self.parts:
            empty = torch.full(self.rows.shape[:2], float("-inf"), device=self.rows.device)
            self.parts = [_Partial(torch.zeros(*empty.shape, p.head_dim_v, device=empty.device), empty)]
        out, lse = _merge(self.parts)
        if sinks is not None:
            logits = sinks.float().view(p.kv_heads, 1, p.group).expand(-1, self.count, -1).reshape(lse.shape)
            total = torch.logaddexp(lse, logits)
            out = out * (lse - total.masked_fill(total == float("-inf"), 0)).exp_().unsqueeze(2)
            lse = total
        p.out[tokens] = self._by_token(out[..., : p.head_dim_v]).to(p.out.dtype)
        if p.lse is not None:
            p.lse[tokens] = self._by_token(lse.unsqueeze(2)).squeeze(2)

    def _by_token(self, rows: torch.Tensor) -> torch.Tensor:
        p, width = self.problem, rows.shape[2]
        split = rows.reshape(p.kv_heads, self.count, p.group, width)
        return split.transpose(0, 1).reshape(self.count, p.query_heads, width)

    def _hidden(self, begin: int, end: int, exists: torch.Tensor | None) -> torch.Tensor | None:
        """bool ``[queries, keys]``: which of these keys a query does not see; None where all see all."""
        p, last = self.problem, self.first + self.count - 1
        right, left = p.right >= 0 and end - 1 > self.first + p.right, p.left >= 0 and begin < last - p.left
        if exists is None and not right and not left:
            return None
        distance = self._distance(begin, end)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if exists is not None:
            hidden |= ~exists
        if right:
            hidden |= distance > p.right
        if left:
            hidden |= distance < -p.left
        return hidden

    def _distance(self, begin: int, end: int) -> torch.Tensor:
        device = self.rows.device
        positions = torch.arange(self.first, self.first + self.count, device=device)
        return torch.arange(begin, end, device=device) - positions[:, None]

    def _bias(
        self, begin: int, end: int, hidden: torch.Tensor | None, slopes: torch.Tensor | None
    ) -> torch.Tensor | None:
        """fp32 ``[kv_heads or 1, queries * group, keys]``, -inf where hidden."""
        p = self.problem
        if slopes is not None:
            far = self._distance(begin, end).abs().float()
            bias = -slopes.float().view(p.kv_heads, 1, p.group, 1) * far.view(1, self.count, 1, -1)
        elif hidden is not None:
            bias = torch.zeros(1, self.count, p.group, end - begin, device=self.rows.device)
        else:
            return None
        if hidden is not None:
            bias = bias.masked_fill(hidden.view(1, self.count, 1, -1), float("-inf"))
        return bias.flatten(1, 2)


def _attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> _Partial:
    """One softmax of q ``[heads, queries, width]`` over k and v ``[heads, keys, width]``, fused."""
    mask = None if bias is None else bias.unsqueeze(0)
    out, lse = _FLASH(q[None], k[None], v[None], 0.0, False, attn_mask=mask, scale=scale)
    return _Partial(out[0], lse[0])


def _attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> _Partial:
    """The same without a log-sum-exp: where nothing has to be merged."""
    mask = None if bias is None else bias.to(q.dtype).unsqueeze(0)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    return _Partial(out, out.new_zeros(out.shape[:2], dtype=torch.float32))


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> _Partial:
    """The same with every step written out: a soft cap has no fused form."""
    scores = torch.matmul(q.float(), k.float().transpose(1, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=2)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(2)).exp_()
    return _Partial(torch.matmul(weights, v.float()), lse)


def _chunk_tokens(key_cache: torch.Tensor) -> int:
    token_bytes = key_cache.shape[2] * key_cache.shape[3] * key_cache.element_size()
    return min(max(CHUNK_BYTES // token_bytes, LEAST_CHUNK_TOKENS), MOST_CHUNK_TOKENS)


def _has_flash(device: torch.device) -> bool:
    return _FLASH is not None and device.type == "cpu"


def _row(values: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """Per-head numbers of a row, from one number, one per head, or one per row and head."""
    return values if values is None or values.dim() < 2 else values[row]
