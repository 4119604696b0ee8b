"""The public operations: batches, backends, refusals. What they compute is tested with their kernels."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import avmp
from avmp import registration
from avmp.errors import AvmpError, Inconsistent, InvalidArgument, Unsupported
from avmp.options import Options
from avmp.schemas import OPERATIONS
from tests.chaos import ChaosMigration
from tests.op_calls import (
    BATCHED,
    FLAT,
    TAPS,
    A,
    Call,
    Step,
    first_step,
    host_units,
    hybrid_pool,
    same,
    watch_backends,
)

# -- batches and backends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_stands_for_its_tables(name: str) -> None:
    flat, batched = first_step(), first_step()
    assert same(FLAT[name](flat), BATCHED[name](batched))
    assert torch.equal(flat.pool.lanes, batched.pool.lanes)


def test_a_padded_batch_writes_no_more_and_gives_zeros_for_padding() -> None:
    plain, padded = first_step(), first_step()
    pool = padded.pool
    more = Step(pool, pool.batch(pool.admit([2, 3]), pad_to=7))
    before = pool.lanes.clone()
    for call in BATCHED.values():
        call(Step(pool, more.batch))
    tokens = [torch.cat([t, t.new_full((3, *t.shape[1:]), float("nan"))]) for t in (more.q, more.k, more.v)]
    pool.lanes.copy_(before)
    avmp.write_kv(*tokens[1:], *pool.kv(1), more.batch)
    out = avmp.paged_attention(tokens[0], *pool.kv(1), more.batch, scale=0.25)
    assert not out[5:].any() and out[:5].isfinite().all()
    assert plain.batch.num_sequences == 3 and more.batch.seq_lens.tolist() == [2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", BATCHED)
def test_a_pool_made_for_a_backend_computes_on_it_throughout(
    name: str, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, step = first_step(), first_step(backend="triton")
    right = BATCHED[name](expected)
    seen = watch_backends(monkeypatch)
    found = BATCHED[name](step)
    assert seen == [(name, "triton")]
    for one, other in zip(tree_leaves(right), tree_leaves(found), strict=True):
        torch.testing.assert_close(one, other)
    floats = [pool.lanes.view(-1).view(torch.float32) for pool in (expected.pool, step.pool)]
    torch.testing.assert_close(*floats)


def test_who_computes_is_said_by_the_call_then_the_context_then_the_pool_then_the_device(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_backends(monkeypatch)
    step = first_step(backend="triton")
    lanes, unit_bytes = step.unit()
    BATCHED["write_kv"](step)
    with avmp.use_backend("torch"):
        BATCHED["write_kv"](step)
        avmp.zero_units(lanes, unit_bytes, step.units, backend="triton")
    avmp.zero_units(lanes, unit_bytes, step.units)
    assert [backend for _, backend in seen] == ["triton", "torch", "triton", "torch"]
    with pytest.raises(InvalidArgument, match="expected one of torch, triton"):
        avmp.zero_units(lanes, unit_bytes, step.units, backend="cuda")


def test_a_batch_outlives_relocation_but_not_the_next_batch() -> None:
    pool = hybrid_pool(disturbance=ChaosMigration(1))
    sequences = pool.admit([9, 1, 5])
    step = Step(pool, pool.batch(sequences))
    epoch = pool.relocation_epoch
    while pool.relocation_epoch == epoch:
        pool.release(pool.admit([1]))
    pool.flush()
    for call in BATCHED.values():
        call(step)
    keys, _ = avmp.gather_kv(*pool.kv(3), step.batch)
    assert torch.equal(keys[0, :9], step.k[:9])
    pool.batch(sequences, [1, 1, 1])
    before = pool.lanes.clone()
    for call in BATCHED.values():
        with pytest.raises(Inconsistent, match="batch 1 was overwritten by batch 2; use the latest one"):
            call(step)
    assert torch.equal(pool.lanes, before)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_a_batch_brings_cannot_be_given_beside_it() -> None:
    step = first_step()
    keys, values, batch = *step.pool.kv(1), step.batch
    with pytest.raises(InvalidArgument, match="paged_attention: a batch brings its own seq_lens and max_seq_len"):
        avmp.paged_attention(step.q, keys, values, batch, batch.seq_lens, scale=1.0, max_seq_len=9)
    with pytest.raises(InvalidArgument, match="write_kv: a batch brings its own page_table and first_valid_id"):
        avmp.write_kv(step.k, step.v, keys, values, batch, page_table=batch.page_table, first_valid_id=0)
    with pytest.raises(InvalidArgument, match="gather_kv: a batch brings its own max_seq_len"):
        avmp.gather_kv(keys, values, batch, max_seq_len=4)
    with pytest.raises(InvalidArgument, match="selective_state_update: a batch brings its own state_indices"):
        avmp.selective_state_update(
            step.state(2, 1), step.x, step.dt, A, step.B, step.C, batch, state_indices=batch.state_indices
        )
    with pytest.raises(InvalidArgument, match="causal_conv1d_update: a batch brings its own max_query_len"):
        avmp.causal_conv1d_update(step.channels, step.state(0, 0), TAPS, None, batch, max_query_len=1)


def test_tables_that_are_missing_or_no_tables_are_named() -> None:
    step = first_step()
    tables = step.attention()
    for name in ("seq_lens", "query_start_loc", "max_query_len", "max_seq_len"):
        with pytest.raises(InvalidArgument, match=f"paged_attention: {name} is missing: give it, or a Batch"):
            avmp.paged_attention(step.q, *step.pool.kv(1), scale=1.0, **tables | {name: None})
    with pytest.raises(InvalidArgument, match="gather_kv: max_seq_len is missing"):
        avmp.gather_kv(*step.pool.kv(1), step.batch.block_table, step.batch.seq_lens)
    with pytest.raises(InvalidArgument, match="write_kv: expected tables as tensors or a Batch, got a list"):
        avmp.write_kv(step.k, step.v, *step.pool.kv(1), [1, 2])  # type: ignore[arg-type]


def test_fewer_tokens_than_the_batch_has_are_refused() -> None:
    step = first_step()
    before = step.pool.lanes.clone()
    step.q, step.x, step.channels = step.q[:14], step.x[:14], step.channels[:14]
    for name in ("paged_attention", "selective_state_update", "causal_conv1d_update"):
        with pytest.raises(InvalidArgument, match=f"{name}: 14 tokens, the batch has 15"):
            BATCHED[name](step)
    step.k = step.k[:14]
    with pytest.raises(InvalidArgument, match="write_kv"):
        BATCHED["write_kv"](step)
    assert torch.equal(step.pool.lanes, before)


def test_attention_over_keys_without_values_is_refused() -> None:
    step = first_step()
    with pytest.raises(Unsupported, match="keys only"):
        avmp.paged_attention(step.q, step.pool.kv(1)[0], None, step.batch, scale=1.0)


BEYOND = 10**6
"""No unit, in no table."""
WITH_A_BAD_ID: dict[str, Call] = {
    "paged_attention": lambda s: avmp.paged_attention(
        s.q, *s.kv(1), scale=1.0, **s.attention() | {"block_table": bad(s.batch.block_table)}
    ),
    "write_kv": lambda s: avmp.write_kv(s.k, s.v, *s.kv(1), bad(s.batch.slot_mapping), **s.pages()),
    "gather_kv": lambda s: avmp.gather_kv(
        *s.kv(1), bad(s.batch.block_table), s.batch.seq_lens, max_seq_len=9, **s.pages()
    ),
    "selective_state_update": lambda s: avmp.selective_state_update(
        s.state(2, 1), s.x, s.dt, A, s.B, s.C, **s.rows() | {"state_indices": bad(s.batch.state_indices)}
    ),
    "causal_conv1d_update": lambda s: avmp.causal_conv1d_update(
        s.channels, s.state(0, 0), TAPS, **s.rows() | {"destination_indices": bad(s.batch.state_indices)}
    ),
    "copy_units": lambda s: avmp.copy_units(*s.unit(), bad(s.units), s.units + 6),
    "zero_units": lambda s: avmp.zero_units(*s.unit(), bad(s.units)),
    "poison_units": lambda s: avmp.poison_units(*s.unit(), bad(s.units)),
    "migrate": lambda s: avmp.migrate(*s.unit(), bad(s.units.view(2, 3)), count=2),
    "swap_out": lambda s: avmp.swap_out(*s.unit(), bad(s.units[:2]), host_units(s)),
    "swap_in": lambda s: avmp.swap_in(*s.unit(), host_units(s), bad(s.units[:2])),
    "apply_table_changes": lambda s: avmp.apply_table_changes(
        torch.zeros(9, dtype=torch.int32), bad(torch.zeros(2, 1, dtype=torch.int32))
    ),
}


def bad(ids: torch.Tensor) -> torch.Tensor:
    changed = ids.clone()
    changed.view(-1)[0] = BEYOND
    return changed


@pytest.mark.parametrize("name", OPERATIONS)
def test_with_bounds_checks_a_bad_id_is_named_and_nothing_happens(name: str) -> None:
    step = first_step()
    with avmp.use_bounds_checks():
        for calls in (FLAT, BATCHED):
            if name in calls:
                calls[name](step)
        before = step.pool.lanes.clone()
        with pytest.raises(AvmpError, match=f"{name}.*{BEYOND}"):
            WITH_A_BAD_ID[name](step)
    assert torch.equal(step.pool.lanes, before)


def test_a_pool_at_debug_2_checks_the_operations_on_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(registration, "check_ids", lambda operation, *rest: seen.append(operation))
    step = first_step(options=Options(debug=2))
    for call in BATCHED.values():
        call(step)
    assert seen == list(BATCHED)
    for call in BATCHED.values():
        call(first_step())
    assert seen == list(BATCHED)
