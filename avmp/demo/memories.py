"""Where the demo's caches live: in an avmp arena, or, to compare with, in plain tensors.

``PagedMemory`` is all that an engine has to write to run a hybrid model out of an arena.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from avmp import ops
from avmp.cache_pool import CachePool
from avmp.demo.model import Tensor


class PagedMemory:
    """The arena's caches of one step's batch."""

    def __init__(self, pool: CachePool, sequences: list[int]) -> None:
        self._pool = pool
        self._batch = batch = pool.batch(sequences)
        self.last_tokens = batch.query_start_loc[1:].long() - 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Memory``."""
        keys, values = self._pool.kv(layer)
        assert values is not None
        ops.write_kv(k, v, keys, values, self._batch)
        return ops.paged_attention(q, keys, values, self._batch, scale=q.shape[-1] ** -0.5)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See ``Memory``."""
        window, _ = self._pool.state(layer)
        return ops.causal_conv1d_update(x, window, weight, bias, self._batch, activation="silu")

    def update_states(
        self, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """See ``Memory``. What is the same along a head is expanded, not copied: the kernel sees strides of 0."""
        _, state = self._pool.state(layer)
        heads, head_dim, state_dim = state.shape[1:]
        return ops.selective_state_update(
            state,
            x,
            dt[..., None].expand(-1, -1, head_dim),
            A[:, None, None].expand(heads, head_dim, state_dim),
            B,
            C,
            self._batch,
            D=D[:, None].expand(heads, head_dim),
            dt_bias=dt_bias[:, None].expand(heads, head_dim),
            dt_softplus=True,
        )


class PlainMemory:
    """One whole sequence at once, in tensors of its own, by the textbook: shares nothing with avmp."""

    def __init__(self, tokens: int) -> None:
        self.last_tokens = torch.tensor([tokens - 1])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Memory``."""
        group = q.shape[1] // k.shape[1]
        k, v = (heads.repeat_interleave(group, 1).transpose(0, 1) for heads in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See ``Memory``."""
        channels, width = weight.shape
        padded = F.pad(x.T, (width - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).T

    def update_states(
        self, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """See ``Memory``."""
        group = x.shape[1] // B.shape[1]
        B, C = (shared.repeat_interleave(group, 1) for shared in (B, C))
        dt = F.softplus(dt + dt_bias)
        decays = torch.exp(dt * A)[..., None, None]
        inputs = torch.einsum("th,thp,thn->thpn", dt, x, B)
        states = torch.empty_like(inputs)
        state = torch.zeros_like(inputs[0])
        for token in range(len(x)):
            state = torch.addcmul(inputs[token], state, decays[token], out=states[token])
        return torch.einsum("thpn,thn->thp", states, C) + D[:, None] * x
