"""Paged attention in plain torch: the specification of the Triton kernels, and what runs where they do not.

Written for the CPU, in fp32 whatever the caches hold. Pages are gathered a chunk at a time into a buffer that stays in
the cache; the query heads that share a KV head are the rows of one matrix product with it. The scores of all chunks
wait for their softmax, which is in powers of two; then the values are read and summed. Rows of a batch with as many
query tokens share the softmax; what exceeds the buffer for scores is cut into spans, merged as in FlashAttention
(https://arxiv.org/abs/2205.14135). Memory is constant in the length of the context.

torch has a fused attention for CPUs. It is not used: it takes the exponential to 20 units in the last place, which
shows in fp32 results and in every log-sum-exp; and on data that has just been gathered it takes longer than the two
products and the softmax do on their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.kernels.attention_arguments import Alibi, Problem, Window, check_attention, check_starts
from avmp.kernels.attention_pages import MEMORY, Stage, TokenRows
from avmp.kernels.attention_scores import LN2, LOG2E, Block, Numbers, Softmax, adjust

FP32_BYTES = 4
CHUNK_BYTES = 1 << 19
"""Keys (or values) of one chunk and thread, in q's dtype: half of a second-level cache. What is widened takes another
half or all of it; with less, the calls cost more than the misses do."""
MOST_CHUNK_TOKENS = 1024
"""Where a token takes few bytes: what is computed and then masked, or gathered beyond a window, grows with a chunk."""
SCORE_BYTES = 4 << 20
"""Scores that wait for their softmax. With 32 heads, those of 32,768 tokens in decode; in prefill, those of 256 query
tokens and a chunk of 128."""
MOST_ROWS_TO_SUM_IN_PLACE = 8
"""Query rows per KV head up to which reading each value once per row takes clearly less time than to gather and widen
it. With 16 it is level."""


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
    alibi: Alibi = "distance",
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
      ``first_valid_id``, before or after translation, are null: their keys are invisible. That others name a page, in
      both tables, and that a row has a column for each of its pages is for the caller to see to: kernels do not test it
      (``first_bad_id`` does).

    A query at position i scores key j as ``scale * q·k``, times ``key_scale``; then ``softcap * tanh(s / softcap)``;
    then ``- alibi_slope * |i - j|``, or what ``alibi`` says; then the mask: ``window`` is the number of latest keys
    that it sees, its own included, or a pair (left, right) with -1 for no limit, and ``causal`` hides all behind it.
    ``sinks`` ``[query_heads]`` are logits that join the softmax and have no value. ``alibi_slopes`` are
    ``[query_heads]`` or ``[rows, query_heads]``; ``key_scale`` and ``value_scale`` one number, ``[kv_heads]`` or
    ``[rows, kv_heads]``. By ``alibi`` a slope falls with the ``"distance"``, rises with the key's ``"position"`` behind
    the row's first query (``+ alibi_slope * (j - i_0)``), or falls with the ``"root"`` of how far the key lies back
    (``- alibi_slope * sqrt(max(i - j, 0))``).

    Returns ``(out, lse)``: out ``[tokens, query_heads, head_dim_v]`` in q's dtype, or the tensor given; lse fp32
    ``[tokens, query_heads]``, the natural logarithm of the softmax's denominator (sinks included), if ``return_lse``.
    A query that sees nothing gets 0 and -inf (its sink, if there is one); so does a token that belongs to no row,
    without the sink. ``num_splits`` steers the kernels only: it changes no more than rounding. ``out``, fp16, bf16 or
    fp32, overlaps no other tensor of the call.

    NaN and infinities show as in plain softmax. A value hidden from a query, before its window or behind it, has the
    weight 0 where its page is read: if it is no finite number, that product may show, too. What lies behind a row's
    last token never counts, nor do pages before the windows of all its queries.

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
        first_valid_id=first_valid_id,
        window=window,
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        alibi=alibi,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=return_lse,
        out=out,
        num_splits=num_splits,
    )
    starts = query_start_loc.tolist()
    check_starts("paged_attention", starts, problem.tokens, max_query_len)
    # A row without queries reads nothing, whatever its length.
    lens = [
        length if end > begin else 0 for length, (begin, end) in zip(seq_lens.tolist(), pairwise(starts), strict=True)
    ]
    ids, null = _physical_ids(block_table, lens, problem.page_tokens, page_table, first_valid_id)
    numbers = Numbers(softcap, alibi_slopes, sinks, key_scale, value_scale)
    # Scores are in powers of two, or in units of the soft cap.
    factor = scale / softcap if softcap else scale * LOG2E
    attention = _Attention(problem, numbers, q, factor, key_cache, value_cache, ids, null)
    for blocks in attention.groups(starts, lens):
        attention.attend(blocks)
    owned = (starts[0], starts[-1]) if problem.rows else (0, 0)
    for unowned in (slice(owned[0]), slice(owned[1], None)):
        problem.out[unowned] = 0
        if problem.lse is not None:
            problem.lse[unowned] = float("-inf")
    return problem.out, problem.lse


def _physical_ids(
    block_table: torch.Tensor,
    lens: list[int],
    page_tokens: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """int32 ``[rows, columns in use]``, 0 where there is no page; and bool of the same: pages in use that are null."""
    counts = -(-np.array(lens, dtype=np.int64) // page_tokens)
    most = int(counts.max(initial=0))
    if most > block_table.shape[1]:
        raise InvalidArgument(
            f"paged_attention: row {int(counts.argmax())} has {most} pages of {page_tokens} tokens by seq_lens, its "
            f"block table {block_table.shape[1]} columns: expected one for each page"
        )
    columns = np.arange(most)
    used = columns < counts[:, None]
    ids = block_table[:, : len(columns)].cpu().numpy()
    valid = used & (ids >= first_valid_id)
    if page_table is not None:
        ids = page_table.cpu().numpy()[np.where(valid, ids, 0)]
        valid &= ids >= first_valid_id
    return np.where(valid, ids, np.int32(0)), used & ~valid


class _Attention:
    """One call: its buffers, and the way of a group of blocks through them."""

    def __init__(
        self,
        problem: Problem,
        numbers: Numbers,
        q: torch.Tensor,
        factor: float,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        ids: NDArray[Any],
        null: NDArray[Any],
    ) -> None:
        p = self.problem = problem
        self.numbers, self.q, self.factor = numbers, q, factor
        self.ids: torch.Tensor = torch.from_numpy(ids).to(q.device)
        self.null: torch.Tensor = torch.from_numpy(null).to(q.device)
        self.null_rows: list[bool] = np.asarray(null.any(1)).tolist()
        token_bytes = q.element_size() * p.kv_heads * max(p.head_dim, p.head_dim_v)
        tokens = min(max(CHUNK_BYTES * torch.get_num_threads() // token_bytes, 1), MOST_CHUNK_TOKENS)
        self.chunk_pages: int = max(min(-(-tokens // p.page_tokens), ids.shape[1]), 1)
        self.chunk_tokens: int = self.chunk_pages * p.page_tokens
        self.value_rows = TokenRows(value_cache, ids) if TokenRows.can_read(value_cache) else None
        token_scores = p.query_heads * self.chunk_tokens
        self.query_tokens = max(SCORE_BYTES // FP32_BYTES // token_scores, 1)
        scores = self.query_tokens * token_scores
        self.scores = MEMORY.take("scores", (scores,), torch.float32, q.device)
        # Keys and values are read in turns.
        self.keys, self.values = (Stage(cache, self.chunk_pages) for cache in (key_cache, value_cache))

    def groups(self, starts: list[int], lens: list[int]) -> Iterator[list[Block]]:
        """All blocks in order. Those of a group have as many query tokens each, and the scores of as many chunks for
        each as the longest has fit the buffer; or a group is one block."""
        group: list[Block] = []
        most = 0
        for block in self._blocks(starts, lens):
            most = max(most, self._chunks(block))
            full = (len(group) + 1) * most > self._room(block.queries)
            if group and (full or block.queries != group[0].queries):
                yield group
                group, most = [], self._chunks(block)
            group.append(block)
        if group:
            yield group

    def _blocks(self, starts: list[int], lens: list[int]) -> Iterator[Block]:
        p = self.problem
        for row, length in enumerate(lens):
            tokens = starts[row + 1] - starts[row]
            for done in range(0, tokens, self.query_tokens):
                count, first = min(self.query_tokens, tokens - done), length - tokens + done
                begin = max(first - p.left, 0) // p.page_tokens * p.page_tokens if p.left >= 0 else 0
                end = min(first + count + p.right, length) if p.right >= 0 else length
                yield Block(row, starts[row] + done, count, first, length - tokens, begin, max(begin, end))

    def _chunks(self, block: Block) -> int:
        return -(-(block.end - block.begin) // self.chunk_tokens)

    def _room(self, queries: int) -> int:
        """Chunks whose scores the buffer holds, for that many query tokens."""
        return self.scores.numel() // (queries * self.problem.query_heads * self.chunk_tokens)

    def attend(self, blocks: list[Block]) -> None:
        """Computes and stores what these blocks' tokens get."""
        p, count = self.problem, blocks[0].queries
        tokens = slice(blocks[0].token, blocks[-1].token + count)
        q = self.q[tokens].float() * self.factor
        q = q.view(len(blocks), count, p.kv_heads, p.group, p.head_dim).transpose(1, 2).flatten(2, 3)
        if self.numbers.key_scale is not None:
            q = q * self._of_blocks(self.numbers.key_scale, blocks)
        softmax = Softmax(q, p.head_dim_v, self._sinks(count))
        if len(blocks) > 1:
            self._attend_span(softmax, q, blocks)
        else:
            (block,), most = blocks, self._room(count) * self.chunk_tokens
            for begin in range(block.begin, block.end, most):
                self._attend_span(softmax, q, [block._replace(begin=begin, end=min(begin + most, block.end))])
        self._store(softmax, blocks, tokens)

    def _attend_span(self, softmax: Softmax, q: torch.Tensor, blocks: list[Block]) -> None:
        """All keys of these blocks: their scores, the softmax, the sum of values."""
        counts = [self._chunks(block) for block in blocks]
        if not any(counts):
            return
        shape = (len(blocks), max(counts), *q.shape[1:3], self.chunk_tokens)
        scores, keys = self.scores[: math.prod(shape)].view(shape), self.keys.tokens.transpose(1, 2)
        for block, count, queries, space in zip(blocks, counts, q.unbind(0), scores.unbind(0), strict=True):
            for (ids, null), part in zip(self._chunk_pages(block), space.unbind(0), strict=False):
                self.keys.read(ids, null)
                torch.bmm(queries, keys, out=part)
            if count:
                adjust(space[:count], block, self.problem, self.numbers, self._null(block))
            if count < len(space):
                space[count:] = float("-inf")
        sums = softmax.weigh(scores)
        few = q.shape[2] <= MOST_ROWS_TO_SUM_IN_PLACE
        if self.value_rows is not None and few and all(self._null(block) is None for block in blocks):
            rows, first = [block.row for block in blocks], [self._columns(block).start for block in blocks]
            values, sums = self.value_rows.sums(rows, first, [block.end - block.begin for block in blocks], scores)
            softmax.acc.add_(values)
        else:
            self._add_values(softmax.acc, scores, blocks)
        softmax.divisor.add_(sums)

    def _add_values(self, acc: torch.Tensor, weights: torch.Tensor, blocks: list[Block]) -> None:
        """Adds the weighted values to acc ``[blocks, kv_heads, rows, head_dim_v]``, chunk by chunk."""
        for block, target, space in zip(blocks, acc.unbind(0), weights.unbind(0), strict=True):
            left = block.end - block.begin
            for (ids, null), part in zip(self._chunk_pages(block), space.unbind(0), strict=False):
                values = self.values.read(ids, null)
                if left < self.chunk_tokens:
                    values, part = values[:, :left], part[:, :, :left]
                target.baddbmm_(part, values)
                left -= self.chunk_tokens

    def _chunk_pages(self, block: Block) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The pages of each chunk: their ids, and which are null (None: none of the block's is)."""
        if block.begin == block.end:
            return []
        ids = self.ids[block.row, self._columns(block)].split(self.chunk_pages)
        if (null := self._null(block)) is None:
            return [(some, None) for some in ids]
        return list(zip(ids, null.split(self.chunk_pages), strict=True))

    def _null(self, block: Block) -> torch.Tensor | None:
        """Which of the block's pages are null; None: none is."""
        if not self.null_rows[block.row]:
            return None
        null = self.null[block.row, self._columns(block)]
        return null if null.any() else None

    def _columns(self, block: Block) -> slice:
        size = self.problem.page_tokens
        return slice(block.begin // size, -(-block.end // size))

    def _store(self, softmax: Softmax, blocks: list[Block], tokens: slice) -> None:
        p, numbers, count = self.problem, self.numbers, blocks[0].queries
        acc = softmax.acc / softmax.divisor.clamp(min=1).unsqueeze(3)  # less than 1 is 0, and nothing was seen
        if numbers.value_scale is not None:
            acc *= self._of_blocks(numbers.value_scale, blocks)
        p.out[tokens] = self._by_token(acc, count)
        if p.lse is not None:
            lse = (softmax.top + softmax.total.log2()) * LN2
            p.lse[tokens] = self._by_token(lse.unsqueeze(3), count).squeeze(2)

    def _sinks(self, count: int) -> torch.Tensor | None:
        """In powers of two, ``[kv_heads, rows]`` for blocks of ``count`` tokens."""
        p, sinks = self.problem, self.numbers.sinks
        if sinks is None:
            return None
        return (sinks.float() * LOG2E).view(p.kv_heads, 1, p.group).expand(-1, count, -1).flatten(1)

    def _of_blocks(self, scale: torch.Tensor, blocks: list[Block]) -> torch.Tensor:
        """A scale per row, per head or for all, to multiply ``[blocks, kv_heads, rows, width]`` with."""
        if scale.dim() < 2:
            return scale.float().view(-1, 1, 1)
        return scale[[block.row for block in blocks]].float().view(len(blocks), -1, 1, 1)

    def _by_token(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """From ``[blocks, kv_heads, count * group, width]`` to ``[tokens, query_heads, width]``."""
        p = self.problem
        split = rows.view(-1, p.kv_heads, count, p.group, rows.shape[3])
        return split.transpose(1, 2).reshape(-1, p.query_heads, rows.shape[3])
