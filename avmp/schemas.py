"""What each operation takes and returns, as torch's schemas have it; ``registration.py`` makes the rest of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Operation(NamedTuple):
    """``arguments`` is their schema, without ``out`` and backends; the first of them tells by its device who computes.

    ``caches`` are those that may be views of an arena. There are ``results`` tensors, which ``fake`` makes, as empty as
    need be, from the arguments by name; ``out`` is whether the first of them can be written in place.
    """

    arguments: str
    caches: tuple[str, ...] = ()
    results: int = 0
    fake: Callable[..., Any] = lambda **arguments: ()
    out: bool = False


def _fake_attention(
    q: torch.Tensor, value_cache: torch.Tensor, return_lse: bool, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = q.shape[:2]
    lse = q.new_empty((tokens, heads) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((tokens, heads, value_cache.shape[3])), lse


def _fake_gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    max_seq_len: int,
    num_tokens: int | None,
    dtype: torch.dtype | None,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    outer = (block_table.shape[0], max_seq_len) if num_tokens is None else (num_tokens,)
    keys = key_cache.new_empty((*outer, *key_cache.shape[2:]), dtype=dtype or key_cache.dtype)
    if value_cache is None:
        return keys, keys.new_empty(0)
    return keys, value_cache.new_empty((*outer, *value_cache.shape[2:]), dtype=dtype or value_cache.dtype)


def _fake_update(x: torch.Tensor, **rest: Any) -> tuple[torch.Tensor]:
    return (x.new_empty(x.shape),)


_IDS = "Tensor? page_table=None, SymInt first_valid_id=1"
_UNIT_IDS = "Tensor? page_table=None, SymInt first_valid_id=0"
_STATE_ROWS = (
    "Tensor? state_indices=None, Tensor? slot_table=None, SymInt first_valid_id=1, Tensor? destination_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? query_start_loc=None, SymInt? max_query_len=None, "
    "Tensor? has_initial_state=None"
)
OPERATIONS = {
    "paged_attention": Operation(
        "Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
        f"*, float scale, SymInt max_query_len, SymInt max_seq_len, {_IDS}, SymInt[]? window=None, bool causal=True, "
        "float softcap=0.0, Tensor? alibi_slopes=None, str alibi='distance', Tensor? sinks=None, "
        "Tensor? key_scale=None, Tensor? value_scale=None, bool return_lse=False, SymInt num_splits=0",
        caches=("key_cache", "value_cache"),
        results=2,
        fake=_fake_attention,
        out=True,
    ),
    "write_kv": Operation(
        "Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
        f"*, {_IDS}, Tensor? key_scale=None, Tensor? value_scale=None",
        caches=("key_cache", "value_cache"),
    ),
    "gather_kv": Operation(
        "Tensor key_cache, Tensor? value_cache, Tensor block_table, Tensor seq_lens, "
        f"*, SymInt max_seq_len, {_IDS}, Tensor? starts=None, Tensor? cu_seq_lens=None, SymInt? num_tokens=None, "
        "Tensor? key_scale=None, Tensor? value_scale=None, ScalarType? dtype=None",
        caches=("key_cache", "value_cache"),
        results=2,
        fake=_fake_gather,
    ),
    "selective_state_update": Operation(
        "Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, Tensor? D=None, Tensor? z=None, "
        f"Tensor? dt_bias=None, bool dt_softplus=False, {_STATE_ROWS}, bool update_state=True, "
        "Tensor(b!)? intermediate_states=None, Tensor? intermediate_indices=None",
        caches=("state",),
        results=1,
        fake=_fake_update,
        out=True,
    ),
    "causal_conv1d_update": Operation(
        "Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, *, str? activation=None, " + _STATE_ROWS,
        caches=("conv_state",),
        results=1,
        fake=_fake_update,
        out=True,
    ),
    "copy_units": Operation(
        f"Tensor(a!) lanes, SymInt unit_bytes, Tensor sources, Tensor destinations, *, {_UNIT_IDS}", caches=("lanes",)
    ),
    "zero_units": Operation(
        f"Tensor(a!) lanes, SymInt unit_bytes, Tensor destinations, *, {_UNIT_IDS}", caches=("lanes",)
    ),
    "poison_units": Operation(
        f"Tensor(a!) lanes, SymInt unit_bytes, Tensor destinations, *, {_UNIT_IDS}", caches=("lanes",)
    ),
    "migrate": Operation(
        "Tensor(a!) lanes, SymInt unit_bytes, Tensor moves, *, SymInt? count=None, Tensor? device_count=None, "
        "SymInt first_valid_id=0",
        caches=("lanes",),
    ),
    "swap_out": Operation(
        f"Tensor lanes, SymInt unit_bytes, Tensor sources, Tensor(b!) host, *, {_UNIT_IDS}", caches=("lanes",)
    ),
    "swap_in": Operation(
        f"Tensor(a!) lanes, SymInt unit_bytes, Tensor host, Tensor destinations, *, {_UNIT_IDS}", caches=("lanes",)
    ),
    "apply_table_changes": Operation("Tensor(a!) tables, Tensor changes"),
}
