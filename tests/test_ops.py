"""The public operations: batches, backends, refusals. What they compute is tested with their kernels."""

from __future__ import annotations

import copy
import inspect
import io
import math
import threading
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import avmp
from avmp import backends, bounds, registration
from avmp.cache_pool import CachePool
from avmp.device_batch import Batch
from avmp.errors import AvmpError, Inconsistent, InvalidArgument, Unsupported
from avmp.options import Options
from avmp.schemas import OPERATIONS
from tests.chaos import ChaosMigration
from tests.op_calls import (
    BATCHED,
    BIAS,
    FLAT,
    PAGE,
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


def rows_of(pool: CachePool, batch: Batch) -> tuple[set[tuple[int, int]], set[int]]:
    """Physical places (page, offset) of a batch's tokens, and its slots."""
    pages = batch.page_table[batch.slot_mapping // PAGE].tolist()
    places = set(zip(pages, (batch.slot_mapping % PAGE).tolist(), strict=True))
    return places, set(batch.slot_table[batch.state_indices[: batch.num_sequences].long()].tolist())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_padded_batch_writes_its_rows_and_nothing_else_and_gives_zeros_for_padding(
    backend: str, interpreter: None
) -> None:
    step = first_step(backend=backend)
    pool = step.pool
    more = Step(pool, pool.batch(pool.admit([2, 3]), pad_to=7))
    assert more.batch.seq_lens.tolist() == [2, 3, 0, 0, 0, 0, 0]
    for name in ("q", "k", "v", "x", "dt", "B", "C", "channels"):  # padding tokens, which nobody may take up
        tokens = getattr(more, name)
        setattr(more, name, torch.cat([tokens, tokens.new_full((3, *tokens.shape[1:]), float("nan"))]))
    before, written = pool.lanes.clone(), pool.lanes.clone()
    outs = {name: call(more) for name, call in BATCHED.items()}
    for name in ("paged_attention", "selective_state_update", "causal_conv1d_update"):
        assert outs[name][:5].isfinite().all() and outs[name][:5].any() and not outs[name][5:].any()
    # With the bytes of the rows put back, of two layers' states and one's keys and values, the arena is what it was.
    after = pool.lanes.clone()
    pool.lanes.copy_(written)
    places, slots = rows_of(pool, more.batch)
    assert len(places) == 5 and len(slots) == 2
    old = [*pool.kv(3), pool.state(0)[0], pool.state(2)[1]]
    kept = [one.clone() for one in old]
    pool.lanes.copy_(after)
    for cache, was in zip(old[:2], kept[:2], strict=True):
        for page, offset in places:
            assert not torch.equal(cache[page, offset], was[page, offset])
            cache[page, offset] = was[page, offset]
    for state, was in zip(old[2:], kept[2:], strict=True):
        for slot in slots:
            assert not torch.equal(state[slot], was[slot])
            state[slot] = was[slot]
    assert torch.equal(pool.lanes, before)


CANARY = -77.0


class Guarded:
    """``torch.empty`` with canaries around all that it gives out."""

    def __init__(self) -> None:
        self.whole: list[tuple[torch.Tensor, int]] = []
        self.empty = torch.empty

    def __call__(self, *size: Any, **keywords: Any) -> torch.Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        count = math.prod(shape)
        whole = self.empty(count + 8192, **keywords).fill_(CANARY)
        self.whole.append((whole, count))
        return whole[4096 : 4096 + count].view(shape)

    def check(self) -> None:
        assert self.whole
        for whole, count in self.whole:
            assert (whole[:4096] == CANARY).all() and (whole[4096 + count :] == CANARY).all()


def hostile_calls(step: Step, starts: list[int], most: int) -> dict[str, Any]:
    """Calls whose running sums are wrong, each with ``backend`` to be given."""
    sums = torch.tensor(starts, dtype=torch.int32)
    rows = step.rows() | {"query_start_loc": sums, "max_query_len": most}
    attention = step.attention() | {"query_start_loc": sums, "max_query_len": most}
    states = step.state(2, 1), step.x, step.dt, A, step.B, step.C
    kept = torch.empty(3, most, *step.state(2, 1).shape[1:])
    lens = sums.diff().clamp(min=0, max=9)
    ragged = dict(max_seq_len=9, cu_seq_lens=sums, num_tokens=step.batch.num_tokens)
    return {
        "paged_attention": lambda **on: avmp.paged_attention(
            step.q, *step.kv(1), scale=0.3, return_lse=True, **attention, **on
        ),
        "paged_attention, split": lambda **on: avmp.paged_attention(
            step.q, *step.kv(1), scale=0.3, return_lse=True, num_splits=4, **attention, **on
        ),
        "gather_kv": lambda **on: avmp.gather_kv(
            *step.kv(3), step.batch.block_table, lens, **ragged, **step.pages(), **on
        ),
        "selective_state_update": lambda **on: avmp.selective_state_update(
            *states, intermediate_states=kept, **rows, **on
        ),
        "causal_conv1d_update": lambda **on: avmp.causal_conv1d_update(
            step.channels, step.state(0, 0), TAPS, BIAS, **rows, **on
        ),
    }


NAMES = ("paged_attention", "paged_attention, split", "gather_kv", "selective_state_update", "causal_conv1d_update")
HOSTILE = ([0, 9, 10, 40], [0, -5, 10, 15], [-5, 9, 10, 15], [0, 10, 9, 15], [0, 9, 10, -7], [0, 9, 2**30, 2**31 - 1])


@pytest.mark.parametrize("starts", HOSTILE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sums_that_lead_out_of_the_tokens_are_refused_or_left_out_and_never_written_behind(
    name: str, starts: list[int], interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in (9, 40) if name in ("paged_attention", "selective_state_update") else (40,):
        step = first_step()
        guarded = Guarded()
        monkeypatch.setattr(torch, "empty", guarded)
        call = hostile_calls(step, starts, most)[name]
        before = step.pool.lanes.clone()
        with pytest.raises(InvalidArgument, match=r"(query_start_loc|cu_seq_lens|max_query_len)"):
            call(backend="torch")
        for backend in ("torch", "triton"):
            with avmp.use_bounds_checks(), pytest.raises(InvalidArgument, match=name.partition(",")[0]):
                call(backend=backend)
        assert torch.equal(step.pool.lanes, before)
        call(backend="triton")
        monkeypatch.undo()
        guarded.check()


def test_more_tokens_in_a_row_than_were_announced_are_not_kept_behind_their_steps(interpreter: None) -> None:
    step = first_step()
    state, most = step.state(2, 1), 2
    kept = torch.full((4, most, *state.shape[1:]), CANARY)

    def call(backend: str) -> None:
        rows = step.rows() | {"max_query_len": most, "backend": backend}
        avmp.selective_state_update(state, step.x, step.dt, A, step.B, step.C, intermediate_states=kept[:3], **rows)

    with pytest.raises(InvalidArgument, match="row 0 has 9 tokens by query_start_loc: expected at most 2"):
        call("torch")
    call("triton")
    assert (kept[3] == CANARY).all() and (kept[1, 1] == CANARY).all() and not (kept[0] == CANARY).any()


def test_a_ragged_gather_into_too_few_tokens(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = first_step()
    tables = step.batch.block_table[:1], torch.tensor([8], dtype=torch.int32)
    ragged = dict(max_seq_len=8, cu_seq_lens=torch.tensor([0, 8], dtype=torch.int32), num_tokens=2)
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded)
    keys, _ = avmp.gather_kv(*step.kv(3), *tables, **ragged, **step.pages(), backend="triton")
    monkeypatch.undo()
    guarded.check()
    dense, _ = avmp.gather_kv(*step.kv(3), *tables, max_seq_len=8, **step.pages())
    assert torch.equal(keys, dense[0, :2])
    message = r"gather_kv: cu_seq_lens\[1\] = 8: expected 0 to 2, there are 2 tokens"
    with pytest.raises(InvalidArgument, match=message):
        avmp.gather_kv(*step.kv(3), *tables, **ragged, **step.pages())
    with pytest.raises(InvalidArgument, match="row 0 has 7 tokens: expected running sums of seq_lens"):
        avmp.gather_kv(*step.kv(3), tables[0], tables[1] - 1, **ragged | {"num_tokens": 9}, **step.pages())


def test_a_ragged_gather_in_a_decode_step_has_sums_of_lengths_not_of_queries() -> None:
    pool = hybrid_pool()
    sequences = pool.admit([9, 1, 5])
    pool.batch(sequences)
    pool.extend(sequences)
    step = Step(pool, pool.batch(sequences))
    assert step.batch.num_tokens == 3
    dense, _ = avmp.gather_kv(pool.kv(3)[0], None, step.batch, dtype=torch.bfloat16)
    ragged, _ = FLAT["gather_k_ragged"](step)
    assert torch.equal(ragged, torch.cat([dense[0, :10], dense[1, :2], dense[2, :6]]))


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


MALFORMED: dict[str, tuple[str, Call]] = {
    "one lane": ("lanes", lambda s: avmp.zero_units(s.unit()[0][0], s.unit()[1], s.units)),
    "no bytes": ("units of 0 bytes", lambda s: avmp.copy_units(s.unit()[0], 0, s.units[:3], s.units[3:])),
    "moves in one row": ("moves", lambda s: avmp.migrate(*s.unit(), s.units)),
    "two counts": (
        "device_count",
        lambda s: avmp.migrate(*s.unit(), s.units.view(2, 3), count=torch.tensor([1, 2], dtype=torch.int32)),
    ),
    "a count in a matrix": (
        "device_count",
        lambda s: avmp.migrate(*s.unit(), s.units.view(2, 3), count=torch.tensor([[1]], dtype=torch.int32)),
    ),
    "short seq_lens": (
        "seq_lens",
        lambda s: avmp.paged_attention(s.q, *s.kv(1), scale=1.0, **s.attention() | {"seq_lens": s.batch.seq_lens[:2]}),
    ),
    "short lengths to gather": (
        "seq_lens",
        lambda s: avmp.gather_kv(*s.kv(1), s.batch.block_table, s.batch.seq_lens[:2], max_seq_len=9, **s.pages()),
    ),
    "more sources": ("2 and 1 ids", lambda s: avmp.copy_units(*s.unit(), s.units[:2], s.units[3:4])),
    "packed units of another size": (
        "packed units",
        lambda s: avmp.swap_in(*s.unit(), host_units(s)[:1], s.units[:2]),
    ),
    "expanded lanes": (
        "overlap",
        lambda s: avmp.zero_units(s.unit()[0][:1].expand(4, -1), s.unit()[1], s.units[:1]),
    ),
    "overlapping lanes": (
        "overlap",
        lambda s: avmp.zero_units(
            s.unit()[0].as_strided((2, s.unit()[1]), (16, 1), s.unit()[0].storage_offset()), s.unit()[1], s.units[:1]
        ),
    ),
    "a slot mapping in two rows": (
        "slot_mapping",
        lambda s: avmp.write_kv(s.k, s.v, *s.kv(1), s.batch.slot_mapping[None], **s.pages()),
    ),
    "indices of floats": (
        "state_indices",
        lambda s: avmp.causal_conv1d_update(
            s.channels, s.state(0, 0), TAPS, **s.rows() | {"state_indices": s.batch.state_indices.float()}
        ),
    ),
    "a batch for a bias": (
        "bias is a Batch",
        lambda s: avmp.causal_conv1d_update(s.channels, s.state(0, 0), TAPS, s.batch),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_refused_alike_with_and_without_checks_and_on_meta_tensors(
    name: str, backend: str, interpreter: None
) -> None:
    message, call = MALFORMED[name]
    step = first_step()
    before = step.pool.lanes.clone()
    with avmp.use_backend(backend):
        with pytest.raises(InvalidArgument, match=message) as plain:
            call(step)
        with avmp.use_bounds_checks(), pytest.raises(InvalidArgument, match=message) as checked:
            call(step)
    assert str(plain.value) == str(checked.value)
    assert torch.equal(step.pool.lanes, before)


def test_meta_tensors_are_checked_as_real_ones_are() -> None:
    lanes = torch.empty(2, 4096, dtype=torch.uint8, device="meta")
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    avmp.copy_units(lanes, 256, ids, ids)
    for wrong in (
        lambda: avmp.copy_units(lanes, 256, ids, ids[:1]),
        lambda: avmp.zero_units(lanes, 0, ids),
        lambda: avmp.zero_units(lanes[0], 256, ids),
        lambda: avmp.gather_kv(lanes.view(2, 4, 4, 256), None, ids.int(), ids.int(), max_seq_len=4),
    ):
        with pytest.raises(InvalidArgument):
            wrong()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_tensors_on_two_devices_are_refused_before_anything_is_written(backend: str, interpreter: None) -> None:
    step = first_step()
    before = step.pool.lanes.clone()
    keys, values = step.pool.kv(1)
    batch, attention = step.batch, step.attention()
    with avmp.use_backend(backend):
        with pytest.raises(InvalidArgument, match="write_kv: value on meta: expected cpu"):
            avmp.write_kv(step.k, step.v.to("meta"), keys, values, batch)
        with pytest.raises(InvalidArgument, match="write_kv: slot_mapping on meta"):
            avmp.write_kv(step.k, step.v, keys, values, batch.slot_mapping.to("meta"), **step.pages())
        with pytest.raises(InvalidArgument, match="gather_kv: value_cache on meta"):
            avmp.gather_kv(keys, values.to("meta"), batch)
        with pytest.raises(InvalidArgument, match="gather_kv: seq_lens on meta"):
            avmp.gather_kv(keys, values, batch.block_table, batch.seq_lens.to("meta"), max_seq_len=9, **step.pages())
        for name in ("block_table", "seq_lens", "query_start_loc", "page_table"):
            with pytest.raises(InvalidArgument, match=f"paged_attention: {name} on meta"):
                avmp.paged_attention(step.q, keys, values, scale=1.0, **attention | {name: attention[name].to("meta")})
    assert torch.equal(step.pool.lanes, before)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_two_tokens_or_rows_that_write_to_one_place_are_named(backend: str, interpreter: None) -> None:
    step = first_step()
    before = step.pool.lanes.clone()
    twice = step.batch.slot_mapping.clone()
    twice[7] = twice[2]
    slots = step.batch.state_indices.clone()
    slots[2] = slots[0]
    with avmp.use_bounds_checks(), avmp.use_backend(backend):
        with pytest.raises(InvalidArgument, match="write_kv: tokens 2 and 7 both write place"):
            avmp.write_kv(step.k, step.v, *step.kv(1), twice, **step.pages())
        for name in ("state_indices", "destination_indices"):
            rows = step.rows() | {name: slots}
            with pytest.raises(InvalidArgument, match="causal_conv1d_update: rows 0 and 2 both write slot"):
                avmp.causal_conv1d_update(step.channels, step.state(0, 0), TAPS, **rows)
            with pytest.raises(InvalidArgument, match="selective_state_update: rows 0 and 2 both write slot"):
                avmp.selective_state_update(step.state(2, 1), step.x, step.dt, A, step.B, step.C, **rows)
        avmp.selective_state_update(
            step.state(2, 1),
            step.x,
            step.dt,
            A,
            step.B,
            step.C,
            update_state=False,
            **step.rows() | {"state_indices": slots},
        )
    assert torch.equal(step.pool.lanes, before)


# -- what a batch of a checking pool stands for ----------------------------------------------------------------------


def checking(**keywords: Any) -> CachePool:
    return hybrid_pool(options=Options(debug=2, poison=True), **keywords)


def test_a_batch_whose_pages_were_given_up_is_refused_where_ids_are_checked() -> None:
    pool = checking()
    sequences = pool.admit([9, 1, 5])
    step = Step(pool, pool.batch(sequences))
    pool.release(sequences[:1])
    pool.admit([9])
    pool.flush()
    before = pool.lanes.clone()
    for call in BATCHED.values():
        with pytest.raises(Inconsistent, match=r"batch 1 is stale: page .* has been freed since"):
            call(step)
    assert torch.equal(pool.lanes, before)


def test_a_batch_holds_while_others_come_and_go_and_its_own_rows_grow() -> None:
    pool = checking(disturbance=ChaosMigration(2))
    others = pool.admit([5])
    sequences = pool.admit([9, 1, 5])
    step = Step(pool, pool.batch(sequences))
    pool.extend(sequences, 4)
    pool.release(others)
    pool.release(pool.admit([3]))
    pool.flush()
    for call in BATCHED.values():
        call(step)


@pytest.mark.parametrize("change", ["reorder", "truncate", "release_front", "swap_out"])
def test_a_batch_whose_rows_hold_something_else_is_refused_where_ids_are_checked(change: str) -> None:
    pool = checking()
    sequences = pool.admit([9, 6, 5])
    step = Step(pool, pool.batch(sequences))
    if change == "reorder":
        pool.reorder(sequences, [1, 0, 2])
    elif change == "truncate":
        pool.truncate(sequences, [0, 6, 5])
    elif change == "release_front":
        pool.release_front(sequences[:1], 5)
    else:
        pool.swap_out(sequences[:1])
    with pytest.raises(Inconsistent, match="batch 1 is stale"):
        BATCHED["write_kv"](step)


def test_a_batch_outlives_relocation_where_ids_are_checked() -> None:
    """The extents of the pools move with the units: what a pool owns is asked when a check is made."""
    for seed in range(8):
        pool = checking(disturbance=ChaosMigration(seed))
        sequences = pool.admit([9, 1, 5])
        step = Step(pool, pool.batch(sequences))
        owned = pool.batch(sequences).limits
        step = Step(pool, pool.batch(sequences))
        moved = False
        for tokens in (1, 9, 30, 2, 20, 1, 1):
            pool.release(pool.admit([tokens]))
            pool.flush()
            moved |= step.batch.limits != owned
            for call in BATCHED.values():
                call(step)
        assert moved and pool.relocation_epoch > 0, seed


def test_what_release_front_gave_up_is_invisible_with_and_without_a_window_also_where_ids_are_checked() -> None:
    results = []
    for options in (Options(), Options(debug=2)):
        pool = hybrid_pool(options=options)
        sequences = pool.admit([14, 3])
        first = Step(pool, pool.batch(sequences))
        BATCHED["write_kv"](first)
        pool.release_front(sequences[:1], 9)
        pool.extend(sequences)
        step = Step(pool, pool.batch(sequences))
        outs = [avmp.paged_attention(step.q, *pool.kv(1), step.batch, scale=0.3, window=window) for window in (None, 2)]
        results.append(outs)
    assert same(*results)
    assert all(out.isfinite().all() for out in results[0])


# -- pools in inference mode, files, threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_pool_made_in_inference_mode_works_outside_and_the_reverse(backend: str, interpreter: None) -> None:
    expected = first_step()
    for inside in (True, False):
        with torch.inference_mode(inside):
            pool = hybrid_pool(backend=backend)
            sequences = pool.admit([9, 1, 5])
        with torch.inference_mode(not inside):
            step = Step(pool, pool.batch(sequences))
            FLAT["write_kv"](step)
        with torch.inference_mode(inside):
            swapped = pool.swap_out(sequences)
            assert not any(buffer.is_inference() for buffer in pool._host._prepared)
        with torch.inference_mode(not inside):
            pool.flush()
            sequences = pool.swap_in(swapped)
            pool.extend(sequences)
            pool.batch(sequences)
    FLAT["write_kv"](expected)
    rows = pool.batch(sequences)
    keys, _ = avmp.gather_kv(*pool.kv(3), rows)
    assert torch.equal(keys[0, :9], expected.k[:9])


def test_a_view_can_be_saved_and_copied_and_what_comes_back_lies_in_no_arena() -> None:
    step = first_step()
    keys = step.pool.kv(1)[0]
    file = io.BytesIO()
    torch.save(keys, file)
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(keys)):
        assert torch.equal(other, keys)
        step.q += 1
        avmp.write_kv(step.k, step.v, other, step.pool.kv(1)[1], step.batch.slot_mapping, **step.pages())
        assert not torch.equal(other, keys)
    assert registration.place_of(keys) is not None and registration.place_of(copy.deepcopy(keys)) is None


def test_physical_ids_begin_at_0_and_virtual_ones_at_1_unless_it_is_said() -> None:
    keys, k = torch.zeros(3, 4, 2, 16), torch.ones(2, 2, 16)
    slots, lens, table = torch.tensor([1, 5]), torch.tensor([6], dtype=torch.int32), torch.tensor([[0, 1]]).int()
    avmp.write_kv(k, None, keys, None, slots)
    assert keys[0, 1].all() and keys[1, 1].all()
    found, _ = avmp.gather_kv(keys, None, table, lens, max_seq_len=6)
    assert found[0, [1, 5]].all()
    avmp.write_kv(2 * k, None, keys, None, slots, page_table=torch.tensor([0, 2], dtype=torch.int32))
    assert (keys[0] <= 1).all() and (keys[2, 1] == 2).all()
    avmp.write_kv(3 * k, None, keys, None, slots, first_valid_id=1)
    assert (keys[0] <= 1).all() and (keys[1, 1] == 3).all()
    starts = torch.tensor([0, 1], dtype=torch.int32)
    call = dict(scale=1.0, max_query_len=1, max_seq_len=6)
    seen = avmp.paged_attention(k[:1], keys, keys, table[:, :1], lens - 3, starts, return_lse=True, **call)
    unseen = avmp.paged_attention(
        k[:1], keys, keys, table[:, :1], lens - 3, starts, return_lse=True, first_valid_id=1, **call
    )
    assert seen[0].any() and not unseen[0].any() and unseen[1].isinf().all()
    state, x = torch.zeros(2, 8, 3), torch.ones(1, 8)
    avmp.causal_conv1d_update(x, state, TAPS, state_indices=torch.tensor([0]))
    assert state[0].any() and not state[1].any()
    lanes = torch.ones(1, 768, dtype=torch.uint8)
    avmp.zero_units(lanes, 256, torch.tensor([0, 1]), page_table=torch.tensor([2, 1], dtype=torch.int32))
    assert lanes.view(3, 256).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("operation", backends.MODULES)
def test_both_implementations_have_one_signature(operation: str) -> None:
    """Names, order, kinds and defaults; no kernel takes a parameter of its own."""
    reference, kernel = (
        [(p.name, p.kind, p.default) for p in inspect.signature(backends.load(operation, name)).parameters.values()]
        for name in ("torch", "triton")
    )
    assert reference == kernel


def test_a_backend_that_cannot_be_imported_is_not_advised_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.MODULES, "zero_units", {"torch": "no_such_module", "triton": "no_such_module"})
    backends.load.cache_clear()
    try:
        for backend, advised in (("torch", False), ("triton", True)):
            with pytest.raises(InvalidArgument, match=f"backend '{backend}': zero_units cannot be imported") as raised:
                backends.load("zero_units", backend)
            assert ("use backend 'torch'" in str(raised.value)) == advised
    finally:
        backends.load.cache_clear()


def test_a_thread_does_not_inherit_the_contexts() -> None:
    seen: list[tuple[bool, str]] = []
    with avmp.use_backend("triton"), avmp.use_bounds_checks():
        thread = threading.Thread(
            target=lambda: seen.append((bounds.wanted(), backends.chosen_backend(torch.zeros(1))))
        )
        thread.start()
        thread.join()
    assert seen == [(False, "torch")]
