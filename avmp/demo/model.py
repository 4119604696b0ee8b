"""A hybrid model in plain torch, with random weights: Mamba-2 and attention layers in turn, each followed by an MLP.

The model owns no cache. What a layer keeps from token to token lies in a ``Memory``, which also computes what reads and
writes it: attention, the convolution window, the state update. Mamba-2: https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from avmp.errors import InvalidArgument
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart

Tensor = torch.Tensor
ATTENTION, MAMBA = "A", "M"


@dataclass(frozen=True)
class ModelShape:
    """Sizes. ``pattern`` has one letter a layer: M (Mamba-2) or A (attention)."""

    pattern: str = "MMAMMA"
    vocabulary: int = 256
    hidden: int = 64
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    state_heads: int = 4
    state_head_dim: int = 32
    state_groups: int = 1
    state_dim: int = 16
    conv_width: int = 4

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) - {ATTENTION, MAMBA}:
            raise InvalidArgument(f"pattern {self.pattern!r}: expected one letter a layer, {MAMBA} or {ATTENTION}")

    @property
    def inner(self) -> int:
        """Channels that go through the state update."""
        return self.state_heads * self.state_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that go through the convolution: x, B and C."""
        return self.inner + 2 * self.state_groups * self.state_dim

    def geometry(self, page_tokens: int = 16) -> Geometry:
        """What one sequence of this model keeps, in float32."""
        window = StatePart("conv", (self.conv_channels, self.conv_width - 1), "float32")
        state = StatePart("ssm", (self.state_heads, self.state_head_dim, self.state_dim), "float32")
        layers = list(enumerate(self.pattern))
        return Geometry(
            tuple(
                AttentionLayer(layer, self.kv_heads, self.head_dim, self.head_dim, "float32")
                for layer, kind in layers
                if kind == ATTENTION
            ),
            tuple(StateLayer(layer, (window, state)) for layer, kind in layers if kind == MAMBA),
            page_tokens=page_tokens,
            name="avmp-demo",
        )


class Memory(Protocol):
    """The caches of the sequences of one step, and what is computed on them.

    ``T`` is the number of this step's tokens, those of one sequence after those of the other.
    """

    last_tokens: Tensor
    """int64 ``[rows]``: where in the step each sequence's last token is."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keeps keys and values ``[T, kv_heads, head_dim]``, and attends from ``q`` ``[T, query_heads, head_dim]`` to
        all that are kept so far; causal."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A causal convolution of each channel, then SiLU: x ``[T, channels]``, weight ``[channels, width]``."""

    def update_states(
        self, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """The state-space recurrence, token after token: x ``[T, heads, head_dim]``, dt ``[T, heads]`` before its
        softplus, B and C ``[T, groups, state_dim]``; A, D and dt_bias ``[heads]``."""


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one attention layer; there is no positional encoding (the state layers know the order)."""

    query_key_value: Tensor
    out: Tensor


@dataclass(frozen=True)
class MambaWeights:
    """Projections, convolution and recurrence of one Mamba-2 layer."""

    into: Tensor
    conv: Tensor
    conv_bias: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    out: Tensor


class HybridModel:
    """Random weights, the same for the same seed. ``forward`` is one step over any number of sequences."""

    def __init__(self, shape: ModelShape | None = None, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.shape = s = shape or ModelShape()
        self._generator = torch.Generator().manual_seed(seed)
        self._device = torch.device(device)
        self.embedding = self._random(s.vocabulary, s.hidden, scale=1.0)
        self.mixers = [self._attention() if kind == ATTENTION else self._mamba() for kind in s.pattern]
        self.mlps = [(self._random(s.hidden, 4 * s.hidden), self._random(2 * s.hidden, s.hidden)) for _ in s.pattern]
        self.head = self._random(s.hidden, s.vocabulary)

    def forward(self, tokens: Tensor, memory: Memory, every_token: bool = False) -> Tensor:
        """Logits, float32 ``[rows, vocabulary]``, after each sequence's last token, or ``[T, vocabulary]`` after every
        token; ``tokens`` int64 ``[T]``."""
        x = self.embedding[tokens]
        for layer, (mixer, (into, out)) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            mix = self._mix_tokens if isinstance(mixer, AttentionWeights) else self._mix_states
            x = x + mix(layer, mixer, _normed(x), memory)  # type: ignore[arg-type]
            gate, up = (_normed(x) @ into).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ out
        return _normed(x if every_token else x[memory.last_tokens]) @ self.head

    def _mix_tokens(self, layer: int, weights: AttentionWeights, x: Tensor, memory: Memory) -> Tensor:
        s = self.shape
        heads = (x @ weights.query_key_value).view(len(x), -1, s.head_dim)
        q, k, v = torch.split(heads, [s.query_heads, s.kv_heads, s.kv_heads], 1)
        return memory.attend(layer, q, k, v).reshape(len(x), -1) @ weights.out

    def _mix_states(self, layer: int, weights: MambaWeights, x: Tensor, memory: Memory) -> Tensor:
        s = self.shape
        gate, channels, dt = torch.split(x @ weights.into, [s.inner, s.conv_channels, s.state_heads], -1)
        channels = memory.convolve(layer, channels, weights.conv, weights.conv_bias)
        shared = s.state_groups * s.state_dim
        values, B, C = torch.split(channels, [s.inner, shared, shared], -1)
        y = memory.update_states(
            layer,
            values.reshape(len(x), s.state_heads, s.state_head_dim),
            dt,
            weights.A,
            B.reshape(len(x), s.state_groups, s.state_dim),
            C.reshape(len(x), s.state_groups, s.state_dim),
            weights.D,
            weights.dt_bias,
        )
        return _normed(y.reshape(len(x), s.inner) * F.silu(gate)) @ weights.out

    def _attention(self) -> AttentionWeights:
        s = self.shape
        return AttentionWeights(
            self._random(s.hidden, (s.query_heads + 2 * s.kv_heads) * s.head_dim),
            self._random(s.query_heads * s.head_dim, s.hidden),
        )

    def _mamba(self) -> MambaWeights:
        s = self.shape
        return MambaWeights(
            into=self._random(s.hidden, s.inner + s.conv_channels + s.state_heads),
            conv=self._random(s.conv_channels, s.conv_width, scale=s.conv_width**-0.5),
            conv_bias=self._random(s.conv_channels, scale=0.1),
            A=-torch.exp(self._random(s.state_heads, scale=0.5)),
            D=self._random(s.state_heads, scale=1.0),
            dt_bias=self._random(s.state_heads, scale=0.5) - 2,  # steps of about 0.1: a memory of tens of tokens
            out=self._random(s.inner, s.hidden),
        )

    def _random(self, *shape: int, scale: float | None = None) -> Tensor:
        """By default scaled so that a matrix keeps the size of what it multiplies."""
        drawn = torch.randn(*shape, generator=self._generator)
        return (drawn * (shape[0] ** -0.5 if scale is None else scale)).to(self._device)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))
