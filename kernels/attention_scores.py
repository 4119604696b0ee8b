"""How the reference of paged attention gets from scores to weights: soft cap, ALiBi, mask, softmax.

Scores are fp32 and in powers of two: what others write as e^s is 2^s here, which takes a CPU a quarter of the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from avmp.kernels.attention_arguments import Problem

LOG2E, LN2 = 1 / math.log(2), math.log(2)
LOWEST = torch.finfo(torch.float32).min


class Block(NamedTuple):
    """Some consecutive query tokens of a row, and the range of keys that any of them sees, from the beginning of a
    page on. ``token`` is the first of them in q, ``position`` its place in the row, ``context`` that of the row's first
    query token."""

    row: int
    token: int
    queries: int
    position: int
    context: int
    begin: int
    end: int


class Numbers(NamedTuple):
    """What a call gives beside queries, keys and values, as it was given."""

    softcap: float
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


def adjust(scores: torch.Tensor, block: Block, problem: Problem, numbers: Numbers, null: torch.Tensor | None) -> None:
    """Soft cap, ALiBi and mask, in place, on scores ``[chunks, kv_heads, queries * group, keys]`` of the block's keys.

    With a soft cap, scores come in its units. ``null`` says which of the chunks' pages are null (None: none is).
    """
    p = problem
    if numbers.softcap:
        scores.tanh_().mul_(numbers.softcap * LOG2E)
    chunks, keys, seen = scores.shape[0], scores.shape[3], block.end - block.begin
    last = block.position + block.queries - 1
    right = p.right >= 0 and block.end - 1 > block.position + p.right
    left = p.left >= 0 and block.begin < last - p.left
    if numbers.slopes is not None or right or left:
        by_token = scores.view(chunks, p.kv_heads, block.queries, p.group, keys)
        places = torch.arange(block.begin, block.begin + chunks * keys, device=scores.device)
        positions = torch.arange(block.position, last + 1, device=scores.device)
        distance = places.view(chunks, 1, 1, 1, keys) - positions.view(1, 1, block.queries, 1, 1)
        if numbers.slopes is not None:
            slopes = numbers.slopes if numbers.slopes.dim() < 2 else numbers.slopes[block.row]
            slopes = (slopes.float() * LOG2E).view(p.kv_heads, 1, p.group, 1)
            if p.alibi == "distance":
                by_token.addcmul_(slopes, distance.abs().float(), value=-1)
            elif p.alibi == "position":
                by_token.addcmul_(slopes, (places - block.context).float().view(chunks, 1, 1, 1, keys))
            else:
                by_token.addcmul_(slopes, distance.clamp(max=0).neg().float().sqrt(), value=-1)
        if right:
            by_token.masked_fill_(distance > p.right, float("-inf"))
        if left:
            by_token.masked_fill_(distance < -p.left, float("-inf"))
    if null is not None:
        hidden = null.repeat_interleave(p.page_tokens)[:seen]
        hidden = F.pad(hidden, (0, chunks * keys - seen), value=True)
        scores.masked_fill_(hidden.view(chunks, 1, 1, keys), float("-inf"))
    elif seen < chunks * keys:
        scores[-1, :, :, seen - (chunks - 1) * keys :] = float("-inf")


class Softmax:
    """The softmax of some query rows as it grows, all fp32: ``acc`` ``[blocks, kv_heads, rows, head_dim_v]``, the sum
    of values by weight, ``divisor``, that of the weights as they were taken there, ``total``, that of the weights as
    they are, and ``top``, the largest score, each ``[blocks, kv_heads, rows]``.

    The sums of weights are 1 at least, the weight of ``top``, or 0 where nothing has been seen yet.
    """

    def __init__(self, q: torch.Tensor, width: int, sinks: torch.Tensor | None) -> None:
        """``sinks`` ``[kv_heads, rows]`` are scores that have no value, and come first."""
        self.acc = q.new_zeros(*q.shape[:3], width)
        self.total, self.divisor = q.new_zeros(2, *q.shape[:3]).unbind(0)
        self.top = torch.full_like(self.total, LOWEST)  # where nothing is seen: no -inf minus -inf
        self.empty = sinks is None
        if sinks is not None:
            self.top.copy_(sinks).clamp_(min=LOWEST)
            for sums in (self.total, self.divisor):
                torch.exp2(sinks - self.top, out=sums)  # 1, and 0 for a sink of -inf

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Turns scores ``[blocks, chunks, kv_heads, rows, keys]`` into weights; returns their sums, and adds them to
        ``total``. It is for the caller to add to ``acc`` and ``divisor``."""
        top = torch.maximum(self.top, scores.amax(4).amax(1))
        if not self.empty:
            shrink = (self.top - top).exp2_()
            self.acc.mul_(shrink.unsqueeze(3))
            self.total.mul_(shrink)
            self.divisor.mul_(shrink)
        scores.sub_(top.unsqueeze(1).unsqueeze(4)).exp2_()
        sums = scores.sum(4).sum(1)
        self.total.add_(sums)
        self.top, self.empty = top, False
        return sums
