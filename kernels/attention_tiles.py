"""The inner loop of paged attention: one tile of query rows over a range of keys, for decode and prefill alike.

Query rows are packed: the heads of a group (those that share a KV head) are adjacent, tokens follow each other. A tile
of keys is cut into chunks of CHUNK tokens, the largest power of two that divides the page size and fits the tile: no
chunk crosses a page, whatever the page size, so that one block-table and one page-table entry are read per chunk.
The physical ids of the next tile are loaded in this one and carried: loads of keys and values then depend on nothing
loaded in the same iteration, which is what lets the compiler keep several tiles in flight. A few ids are carried as
scalars: whatever layout a use of them has, it is selects between registers that hold them already, and what is tested
of a chunk is tested once. As a tensor they would be loaded again for every layout.

The online softmax is that of FlashAttention (https://arxiv.org/abs/2205.14135) with powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avmp.kernels import attention_tuning
from avmp.kernels.attention_arguments import ALIBI_FORMS
from avmp.kernels.fp8 import decode
from avmp.kernels.fp8_formats import PLAIN

_FEW_CHUNKS = tl.constexpr(attention_tuning.FEW_CHUNKS)
_PLAIN = tl.constexpr(PLAIN)
_DISTANCE = tl.constexpr(ALIBI_FORMS.index("distance"))
_POSITION = tl.constexpr(ALIBI_FORMS.index("position"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _physical_ids(table, page_table, begins, end, first_valid_id, PAGE: tl.constexpr):
    """Of the pages in which tokens ``begins`` (one or several) lie; -1 from ``end`` on and for null. A virtual id is
    tested here, since its entry is read; a physical one where its page is (``attend``). Neither for being too large."""
    ids = tl.load(table + begins // PAGE, mask=begins < end, other=-1)
    if page_table is not None:
        ids = tl.load(page_table + ids, mask=ids >= first_valid_id, other=-1)
    return ids


@triton.jit
def chunk_ids(
    table, page_table, first_token, end, first_valid_id, PAGE: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr
):
    """Physical ids of the chunks from ``first_token`` on: a tuple of a few, or int32 ``[N // CHUNK]``."""
    if N // CHUNK <= _FEW_CHUNKS:
        ids = ()
        for chunk in tl.static_range(N // CHUNK):
            begin = first_token + chunk * CHUNK
            ids = ids + (_physical_ids(table, page_table, begin, end, first_valid_id, PAGE),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        begins = first_token + tl.arange(0, N // CHUNK) * CHUNK
        ids = _physical_ids(table, page_table, begins, end, first_valid_id, PAGE)
    return ids


@triton.jit
def token_pages(ids, CHUNK: tl.constexpr, N: tl.constexpr):
    """int32 ``[N]``: for each token of a tile what ``chunk_ids`` found for its chunk."""
    if N // CHUNK <= _FEW_CHUNKS:
        pages = tl.zeros([N], tl.int32) + ids[0]
        for chunk in tl.static_range(1, N // CHUNK):
            pages = tl.where(tl.arange(0, N) // CHUNK == chunk, ids[chunk], pages)
    else:
        pages = tl.reshape(tl.broadcast_to(ids[:, None], [N // CHUNK, CHUNK]), [N])
    return pages


@triton.jit
def token_offsets(ids, inside, head, page_stride, token_stride, head_stride, HINT: tl.constexpr):
    """int64 offsets of tokens in a cache: ``ids`` are physical pages, ``inside`` the place within the page."""
    offsets = ids.to(tl.int64) * page_stride + inside.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    return tl.multiple_of(offsets, HINT)


@triton.jit
def row_offset(row, stride):
    """int64 offset of a row of a table."""
    return row.to(tl.int64) * stride


@triton.jit
def query_offsets(tokens, heads, token_stride, head_stride):
    """int64 offsets of (token, head) pairs in q or out."""
    return tokens.to(tl.int64) * token_stride + heads.to(tl.int64) * head_stride


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """By powers of two, safe for any x. PRECISE: a series near 0, where 1 - 2 / (1 + e^2x) loses digits."""
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if PRECISE:
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        far = tl.where(tl.abs(x) < 0.25, near, far)
    return far


@triton.jit
def load_tile(
    cache, offsets, dims, exists, FORMAT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """A tile in DTYPE; ``offsets``, ``dims`` and ``exists`` broadcast against each other. What does not exist is 0."""
    if BLOCK == DIM:
        stored = tl.load(cache + offsets + dims, mask=exists, other=0)
    else:
        stored = tl.load(cache + offsets + dims, mask=exists & (dims < DIM), other=0)
    if FORMAT != _PLAIN:
        # By way of fp32, two quick instructions: from half to bfloat16 there is a slow one for each value.
        stored = decode(stored, FORMAT).to(tl.float32)
    return stored.to(DTYPE)


@triton.jit
def attend(
    acc,
    total,
    top,
    q,
    positions,
    context,
    slopes,
    key_cache,
    value_cache,
    table,
    page_table,
    begin,
    end,
    kv_head,
    scale,
    cap,
    left,
    right,
    first_valid_id,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FORMAT_K: tl.constexpr,
    FORMAT_V: tl.constexpr,
    HINT_K: tl.constexpr,
    HINT_V: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Keys ``begin`` (a multiple of CHUNK) to ``end`` for the rows q ``[M, BLOCK_DIM]`` at ``positions`` ``[M]`` of a
    sequence whose first query is at ``context``.

    ``acc`` fp32 ``[M, BLOCK_DIM_V]``, ``total`` and ``top`` fp32 ``[M]`` are the running sum of values, the
    denominator and the maximum, in powers of two. ``scale`` includes log2(e) without a soft cap, and is divided by it
    with one; ``cap`` and ``slopes`` include log2(e). ALIBI is the place in ALIBI_FORMS of the bias. LEFT and
    RIGHT say whether the limit on that side is tested, WHOLE that there are whole tiles only.
    """
    dims, dims_v = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_DIM_V)
    ids = chunk_ids(table, page_table, begin, end, first_valid_id, PAGE, CHUNK, N)
    for first in range(begin, end, N):
        tokens = first + tl.arange(0, N)
        pages = token_pages(ids, CHUNK, N)
        ids = chunk_ids(table, page_table, first + N, end, first_valid_id, PAGE, CHUNK, N)
        exists = pages >= first_valid_id
        if not WHOLE:
            exists = exists & (tokens < end)
        if PAGE == CHUNK:
            inside = tl.arange(0, N) % PAGE
        else:
            inside = tokens % PAGE
        offsets = token_offsets(pages, inside, kv_head, k_page, k_token, k_head, HINT_K)
        k = load_tile(key_cache, offsets[:, None], dims[None, :], exists[:, None], FORMAT_K, DIM, BLOCK_DIM, q.dtype)
        offsets = token_offsets(pages, inside, kv_head, v_page, v_token, v_head, HINT_V)
        v = load_tile(
            value_cache, offsets[:, None], dims_v[None, :], exists[:, None], FORMAT_V, DIM_V, BLOCK_DIM_V, q.dtype
        )
        if FORMAT_V != _PLAIN:
            # Always true, which only the last pass of the compiler sees. The passes before it would give the bytes the
            # layout of the matrix operand as they are read from shared memory: one by one there, since what the
            # operand wants adjacent are tokens, and in half vectors from global memory. This stops them.
            v = tl.where(dims_v[None, :] < BLOCK_DIM_V, v, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP:
            scores = cap * tanh(scores, q.dtype == tl.float32)
        if slopes is not None:
            if ALIBI == _DISTANCE:
                scores -= slopes[:, None] * tl.abs(positions[:, None] - tokens[None, :]).to(tl.float32)
            elif ALIBI == _POSITION:
                scores += slopes[:, None] * (tokens - context).to(tl.float32)[None, :]
            else:
                back = tl.maximum(positions[:, None] - tokens[None, :], 0)
                scores -= slopes[:, None] * tl.sqrt(back.to(tl.float32))
        visible = exists[None, :]
        if LEFT:
            visible = visible & (tokens[None, :] >= positions[:, None] - left)
        if RIGHT:
            visible = visible & (tokens[None, :] <= positions[:, None] + right)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: no -inf minus -inf
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def finish(acc, total, top, sinks, heads, valid, value_scale):
    """Results and their log-sum-exp (natural) after all keys, with the sinks in the denominator."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2(top - shift)
        total = total * share + tl.exp2(sink - shift)
    else:
        shift = tl.where(top == float("-inf"), 0.0, top)
        share = tl.full(top.shape, 1.0, tl.float32)
    some = total != 0  # also true of NaN, which is for the caller to see
    safe = tl.where(some, total, 1.0)
    lse = tl.where(some, (shift + tl.log2(safe)) * LN2, float("-inf"))
    return acc * (tl.where(some, share / safe, 0.0) * value_scale)[:, None], lse


@triton.jit
def head_scale(scales, row, kv_head, row_stride, head_stride):
    """The fp8 scale of a row and head; 1 without."""
    if scales is not None:
        scale = tl.load(scales + row_offset(row, row_stride) + kv_head * head_stride).to(tl.float32)
    else:
        scale = 1.0
    return scale


@triton.jit
def zero_unowned(
    out,
    lse,
    query_start_loc,
    rows,
    tokens,
    part,
    parts,
    kv_head,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    """Tokens before the first row and behind the last one get 0 and -inf: every ``parts``-th of them, for the heads of
    one group."""
    dims = tl.arange(0, BLOCK_DIM_V)
    member = tl.arange(0, BLOCK_GROUP)
    heads = kv_head * GROUP + member
    before = tl.minimum(tl.maximum(tl.load(query_start_loc), 0), tokens)  # whatever the table holds
    owned = tl.minimum(tl.maximum(tl.load(query_start_loc + rows), before), tokens) - before
    for place in range(part, tokens - owned, parts):
        token = place + tl.where(place < before, 0, owned)
        where = query_offsets(token + tl.zeros_like(heads), heads, out_token, out_head)
        zeros = tl.zeros([BLOCK_GROUP, BLOCK_DIM_V], out.dtype.element_ty)
        tl.store(out + where[:, None] + dims[None, :], zeros, mask=(member < GROUP)[:, None] & (dims < DIM_V)[None, :])
        if lse is not None:
            where = query_offsets(token + tl.zeros_like(heads), heads, HEADS, 1)
            tl.store(lse + where, tl.full([BLOCK_GROUP], float("-inf"), tl.float32), mask=member < GROUP)
