"""Problems for the adapters: keys and values of rows, as they are and in pages, and plain attention in float64."""

from __future__ import annotations

import math

import torch

GARBAGE_ID = 2**30


class Paged:
    """Rows of ``lens`` tokens and ``room`` for more. Physical ids, page 0 among them; NaN where nothing lives.

    ``keys`` and ``values`` are lists of ``[tokens, kv_heads, dim]``; ``caches`` two tensors ``[pages, page, kv_heads,
    dim]``; ``table`` int32 ``[rows, width]``, with garbage behind a row's pages; ``indptr``, ``indices`` and ``last``
    are the same compressed, for rows without room.
    """

    def __init__(
        self,
        lens: tuple[int, ...],
        room: int = 0,
        page: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.page, self.lens = page, torch.tensor(lens, dtype=torch.int32)
        columns = [-(-(length + room) // page) for length in lens]
        ids = torch.randperm(sum(columns), generator=self.g).int()
        self.table = torch.full((len(lens), max([*columns, 1]) + 1), GARBAGE_ID, dtype=torch.int32)
        self.caches = [torch.full((len(ids), page, kv_heads, dim), math.nan).to(dtype) for _ in range(2)]
        self.keys, self.values = (
            [torch.randn(length, kv_heads, dim, generator=self.g).to(dtype) for length in lens] for _ in range(2)
        )
        self.indptr = torch.tensor([0, *columns]).cumsum(0).int()
        self.indices = ids
        self.last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in lens]).int()
        for row, own in enumerate(ids.split(columns)):
            self.table[row, : len(own)] = own
            for cache, new in zip(self.caches, (self.keys[row], self.values[row]), strict=True):
                for begin in range(0, len(new), page):
                    part = new[begin : begin + page]
                    cache[own[begin // page], : len(part)] = part

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g).to(dtype or self.caches[0].dtype)

    def stored(self, row: int, which: int, count: int) -> torch.Tensor:
        """What the pages of a row hold: ``[count, kv_heads, dim]``."""
        columns = -(-count // self.page)
        return self.caches[which][self.table[row, :columns].long()].flatten(0, 1)[:count]


def attention64(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi: str = "distance",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[queries, heads, dim]`` and natural log-sum-exp ``[queries, heads]`` of the last tokens of a context.
    The slopes fall with the ``"distance"`` or its ``"root"`` backwards, or rise with the key's ``"position"``, counted
    from the first key, or from the first ``"query"``."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    if slopes is not None:
        position = torch.arange(len(k)).expand_as(ahead)
        ascent = {
            "distance": -ahead.abs(),
            "root": -ahead.clamp(max=0).neg().double().sqrt(),
            "position": position,
            "query": position - (len(k) - len(q)),
        }[alibi]
        scores = scores + slopes.double()[:, None] * ascent[:, None]
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None].expand(len(q), -1, 1)], 2)
    lse = torch.logsumexp(scores, 2)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()[..., : len(k)]
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
