"""Calls of every public operation, on an arena and on tensors of their own, for tests of what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import avmp
from avmp import registration
from avmp.cache_pool import CachePool
from avmp.device_batch import Batch
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.options import Options

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
CHANNELS, STATE_HEADS, STATE_DIM, DSTATE = 8, 2, 4, 8
PARTS = (StatePart("conv", (CHANNELS, 4), "float32"), StatePart("ssm", (STATE_HEADS, STATE_DIM, DSTATE), "float32"))
HYBRID = Geometry(
    attention_layers=tuple(AttentionLayer(layer, KV_HEADS, DIM, DIM, "float32") for layer in (1, 3)),
    state_layers=tuple(StateLayer(layer, PARTS) for layer in (0, 2)),
    page_tokens=PAGE,
    max_position_embeddings=64,
)
WEIGHTS = torch.Generator().manual_seed(0)
A = -torch.rand(STATE_HEADS, STATE_DIM, DSTATE, generator=WEIGHTS)
TAPS = torch.randn(CHANNELS, 4, generator=WEIGHTS)
BIAS = torch.randn(CHANNELS, generator=WEIGHTS)
ROOTS: dict[str, Any] = {"alibi_slopes": torch.rand(HEADS, generator=WEIGHTS), "alibi": "root"}


def hybrid_pool(**keywords: Any) -> CachePool:
    keywords = {"memory": "128KiB", "options": Options(poison=True), "device": "cpu", "max_rows": 8} | keywords
    pool = CachePool(HYBRID, **keywords)
    generator = torch.Generator().manual_seed(3)
    pool.lanes.view(-1).view(torch.float32).normal_(
        generator=generator
    )  # null pages and slots, too: nobody may read them
    return pool


@dataclass
class Step:
    """A batch of a pool, and what a model would bring along for its tokens."""

    pool: CachePool
    batch: Batch
    seed: int = 0
    in_arena: bool = True
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        tokens = self.batch.num_tokens
        self.q, self.k, self.v = (self.random(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.x, self.dt = (self.random(tokens, STATE_HEADS, STATE_DIM) for _ in range(2))
        self.B, self.C = (self.random(tokens, 1, DSTATE) for _ in range(2))
        self.channels = self.random(tokens, CHANNELS)
        self.units = torch.arange(self.pool.layout.first_page, self.pool.layout.first_page + 6)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the arena, or copies, each with a storage of its own."""
        keys, values = self.pool.kv(layer)
        assert values is not None
        return (keys, values) if self.in_arena else (keys.clone(), values.clone())

    def state(self, layer: int, part: int) -> torch.Tensor:
        state = self.pool.state(layer)[part]
        return state if self.in_arena else state.clone()

    def pages(self) -> dict[str, Any]:
        return {"page_table": self.batch.page_table, "first_valid_id": self.batch.first_valid_id}

    def attention(self) -> dict[str, Any]:
        b = self.batch
        tables = {"block_table": b.block_table, "seq_lens": b.seq_lens, "query_start_loc": b.query_start_loc}
        return tables | {"max_query_len": b.max_query_len, "max_seq_len": b.max_seq_len} | self.pages()

    def rows(self) -> dict[str, Any]:
        b = self.batch
        return {
            "state_indices": b.state_indices,
            "slot_table": b.slot_table,
            "first_valid_id": b.first_valid_id,
            "query_start_loc": b.query_start_loc,
            "max_query_len": b.max_query_len,
            "has_initial_state": b.has_initial_state,
        }

    def unit(self) -> tuple[torch.Tensor, int]:
        lanes = self.pool.lanes
        return lanes if self.in_arena else lanes.clone(), self.pool.layout.page_bytes


def first_step(in_arena: bool = True, **keywords: Any) -> Step:
    """Three rows of 9, 1 and 5 tokens in their prefill."""
    pool = hybrid_pool(**keywords)
    return Step(pool, pool.batch(pool.admit([9, 1, 5])), in_arena=in_arena)


def running_sums(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


Call = Callable[[Step], Any]

FLAT: dict[str, Call] = {
    "paged_attention": lambda s: avmp.paged_attention(s.q, *s.kv(1), scale=0.3, **s.attention()),
    "paged_attention_lse": lambda s: avmp.paged_attention(
        s.q, *s.kv(3), scale=0.3, window=3, softcap=5.0, return_lse=True, **ROOTS, **s.attention()
    ),
    "paged_attention_out": lambda s: avmp.paged_attention(
        s.q, *s.kv(1), scale=0.3, out=torch.empty_like(s.q), return_lse=True, **s.attention()
    ),
    "write_kv": lambda s: avmp.write_kv(s.k, s.v, *s.kv(3), s.batch.slot_mapping, **s.pages()),
    "write_k": lambda s: avmp.write_kv(s.k, None, s.kv(3)[0], None, s.batch.slot_mapping, **s.pages()),
    "gather_kv": lambda s: avmp.gather_kv(
        *s.kv(3), s.batch.block_table, s.batch.seq_lens, max_seq_len=s.batch.max_seq_len, **s.pages()
    ),
    "gather_k_ragged": lambda s: avmp.gather_kv(
        s.kv(3)[0],
        None,
        s.batch.block_table,
        s.batch.seq_lens,
        max_seq_len=s.batch.max_seq_len,
        cu_seq_lens=running_sums(s.batch.seq_lens),
        num_tokens=int(s.batch.seq_lens.sum()),
        dtype=torch.bfloat16,
        **s.pages(),
    ),
    "selective_state_update": lambda s: avmp.selective_state_update(
        s.state(2, 1), s.x, s.dt, A, s.B, s.C, dt_softplus=True, z=s.x, **s.rows()
    ),
    "selective_state_update_out": lambda s: avmp.selective_state_update(
        s.state(2, 1), s.x, s.dt, A, s.B, s.C, out=torch.empty_like(s.x), **s.rows()
    ),
    "causal_conv1d_update": lambda s: avmp.causal_conv1d_update(
        s.channels, s.state(0, 0), TAPS, BIAS, activation="silu", **s.rows()
    ),
    "causal_conv1d_update_out": lambda s: avmp.causal_conv1d_update(
        s.channels, s.state(0, 0), TAPS, out=torch.empty_like(s.channels), **s.rows()
    ),
    "copy_units": lambda s: avmp.copy_units(*s.unit(), s.units[:3], s.units[3:]),
    "zero_units": lambda s: avmp.zero_units(*s.unit(), s.units[:2]),
    "poison_units": lambda s: avmp.poison_units(*s.unit(), s.units[:2].int()),
    "migrate": lambda s: avmp.migrate(*s.unit(), s.units.view(2, 3), count=2),
    "migrate_on_device": lambda s: avmp.migrate(
        *s.unit(), s.units.view(2, 3), count=torch.tensor([1], dtype=torch.int32)
    ),
    "swap_out": lambda s: avmp.swap_out(*s.unit(), s.units[:2], host_units(s)),
    "swap_in": lambda s: avmp.swap_in(*s.unit(), host_units(s), s.units[:2]),
    "apply_table_changes": lambda s: avmp.apply_table_changes(
        torch.arange(9, dtype=torch.int32), torch.tensor([[7, 2], [-1, 5]], dtype=torch.int32)
    ),
}
"""Every operation with flat tables, in an arena, and in each of its forms."""

BATCHED: dict[str, Call] = {
    "paged_attention": lambda s: avmp.paged_attention(s.q, *s.kv(1), s.batch, scale=0.3),
    "write_kv": lambda s: avmp.write_kv(s.k, s.v, *s.kv(3), s.batch),
    "gather_kv": lambda s: avmp.gather_kv(*s.kv(3), s.batch),
    "selective_state_update": lambda s: avmp.selective_state_update(
        s.state(2, 1), s.x, s.dt, A, s.B, s.C, s.batch, dt_softplus=True, z=s.x
    ),
    "causal_conv1d_update": lambda s: avmp.causal_conv1d_update(
        s.channels, s.state(0, 0), TAPS, BIAS, s.batch, activation="silu"
    ),
}
"""Those that take a batch, to the same effect as the flat call of that name."""


def host_units(step: Step) -> torch.Tensor:
    lanes, unit_bytes = step.unit()
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 255, (2, len(lanes), unit_bytes), dtype=torch.uint8, generator=generator)


class Recorder(TorchDispatchMode):
    """Keeps the registered operations that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "avmp":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def recorded(call: Call, step: Step) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The registered operation that a call comes to, and with which arguments; it is carried out, too."""
    with torch.no_grad(), Recorder() as recorder:
        call(step)
    (one,) = recorder.calls
    return one


def watch_backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Who computes what, as it happens."""
    seen: list[tuple[str, str]] = []
    load = registration.load

    def watched(operation: str, backend: str) -> Callable[..., Any]:
        seen.append((operation, backend))
        return load(operation, backend)

    monkeypatch.setattr(registration, "load", watched)
    return seen


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
