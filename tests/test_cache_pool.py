"""The arena on a CPU: views, tables of a step, foreign kernels, memory, errors."""

import random
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import avmp
from avmp.cache_pool import CachePool
from avmp.device_tables import DeviceTables
from avmp.errors import ArenaTooSmall, Inconsistent, InvalidArgument, Unsupported
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.test_machine import LAYOUTS

STATE = (StatePart("conv", (6, 4), "bfloat16"), StatePart("ssm", (4, 8), "float32"))
HYBRID = Geometry(
    attention_layers=tuple(AttentionLayer(layer, 2, 16, 16, "float32") for layer in (1, 4)),
    state_layers=tuple(StateLayer(layer, STATE) for layer in (0, 2, 3, 5)),
    page_tokens=4,
    max_position_embeddings=256,
)


def pool_of(geometry: Geometry = HYBRID, memory: Any = "256KiB", **keywords: Any) -> CachePool:
    options = keywords.pop("options", Options(debug=2, poison=True))
    return CachePool(geometry, memory, device="cpu", max_rows=16, options=options, **keywords)


# -- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
@pytest.mark.parametrize("lane_count", [1, 2])
def test_views_share_the_arena_and_no_two_units_share_a_byte(kv_order: str, lane_count: int) -> None:
    pool = pool_of(kv_order=kv_order, lane_count=lane_count)
    layout = pool.layout
    arena = range(pool.lanes.data_ptr(), pool.lanes.data_ptr() + pool.lanes.nbytes)
    keys, values = pool.kv(1)
    assert keys.shape == values.shape == (layout.page_count, 4, 2, 16) and keys.dtype == torch.float32
    assert keys.stride(-1) == 1 and (keys.stride(1) > keys.stride(2)) == (kv_order == "NHD")
    assert [part.shape for part in pool.state(3)] == [(layout.slot_count, 6, 4), (layout.slot_count, 4, 8)]
    written = []
    for name, views in [(f"kv {n}", pool.kv(n)) for n in (1, 4)] + [
        (f"state {n}", pool.state(n)) for n in (0, 2, 3, 5)
    ]:
        for view in views:
            assert view.data_ptr() in arena
            unit = layout.page_count - 1 if name.startswith("kv") else layout.first_slot
            view[unit] = value = len(written) + 1
            written.append((view[unit], value))
    assert all((view == value).all() for view, value in written)


def test_pages_of_a_layer_lie_at_their_natural_stride_when_every_layer_has_a_lane() -> None:
    keys, _ = pool_of().kv(4)
    assert keys.stride(0) * 4 == pool_of().layout.page_bytes == 2 * 4 * 2 * 16 * 4


def test_layers_of_unequal_shape_share_one_lane_without_sharing_a_byte() -> None:
    geometry = Geometry(
        attention_layers=(AttentionLayer(0, 2, 16, 16, "float32"), AttentionLayer(2, 1, 32, 8, "bfloat16")),
        state_layers=(StateLayer(1, STATE), StateLayer(3, STATE[:1])),
        page_tokens=4,
        max_position_embeddings=64,
    )
    pool = pool_of(geometry)
    assert pool.layout.lane_count == 1
    views = [view for layer in (0, 2) for view in pool.kv(layer)] + [*pool.state(1), *pool.state(3)]
    assert [tuple(view.shape[2:]) for view in views[:4]] == [(2, 16), (2, 16), (1, 32), (1, 8)]
    units = [pool.layout.page_count - 1] * 4 + [pool.layout.first_slot] * 3
    for value, (view, unit) in enumerate(zip(views, units, strict=True), start=1):
        view[unit] = value
    assert all((view[unit] == value).all() for value, (view, unit) in enumerate(zip(views, units, strict=True), 1))


def test_a_layer_that_stores_keys_only_has_no_values() -> None:
    geometry = Geometry((AttentionLayer(0, 1, 64, 0, "bfloat16"),), (), 8, max_position_embeddings=64)
    keys, values = pool_of(geometry).kv(0)
    assert values is None and keys.shape[1:] == (8, 1, 64)


def test_asking_for_a_layer_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match=r"layer 0 is no attention layer.*\[1, 4\]"):
        pool_of().kv(0)
    with pytest.raises(InvalidArgument, match="unit sizes"):
        CachePool(Layout.from_unit_sizes(256, 256, 8192), device="cpu", max_tokens_per_sequence=16).kv(0)


def test_the_arena_is_aligned_and_its_null_area_is_zero() -> None:
    pool = pool_of()
    assert pool.lanes.data_ptr() % 2**21 == 0 and pool.lanes.shape == (2, 128 * 1024)
    assert not pool.lanes[:, : pool.layout.null_bytes // 2].any()


# -- the tables of a step --------------------------------------------------------------------------------------------


def test_batch_tables_equal_the_host_s_after_every_step_and_never_move() -> None:
    pool = pool_of(disturbance=ChaosMigration(3))
    rng = random.Random(5)
    sequences = pool.admit([7, 1, 12]).tolist()
    addresses = set()
    for _ in range(150):
        action = rng.randrange(5)
        if action == 0 and len(sequences) < 10 and pool.fits("admit", [9]):
            sequences += pool.admit([rng.randrange(1, 10)]).tolist()
        elif action == 1 and len(sequences) > 2:
            pool.release(sequences.pop(rng.randrange(len(sequences))))
        elif action == 2 and len(sequences) < 10 and pool.fits("fork", sequences[0]):
            pool.batch(sequences)
            sequences += pool.fork(sequences[0]).tolist()
        elif action == 3:
            pool.truncate(sequences[-1], rng.randrange(int(pool.lengths(sequences[-1])[0]) + 1))
        if pool.fits("extend", sequences):
            pool.extend(sequences)
        rng.shuffle(sequences)
        chosen = sequences[: rng.randrange(1, len(sequences) + 1)]
        pad_to = len(chosen) + rng.randrange(4)
        batch = pool.batch(chosen, pad_to=pad_to)
        table, rows = pool._ledger.table, pool._ids(chosen)
        count = len(chosen)
        assert batch.num_sequences == count and len(batch.seq_lens) == pad_to
        assert np.array_equal(batch.block_table[:count].numpy(), table.block_table[rows])
        assert np.array_equal(batch.seq_lens[:count].numpy(), table.length[rows])
        assert np.array_equal(batch.state_indices[:count].numpy(), table.slot[rows])
        assert not batch.block_table[count:].any() and not batch.seq_lens[count:].any()
        assert not batch.state_indices[count:].any() and not batch.has_initial_state[count:].any()
        assert (batch.query_start_loc[count:] == batch.num_tokens).all()
        assert len(batch.slot_mapping) == batch.num_tokens == int(batch.query_start_loc[-1])
        names = ("block_table", "seq_lens", "query_start_loc", "slot_mapping", "state_indices", "has_initial_state")
        names += ("page_table", "slot_table")
        addresses.add(tuple(getattr(batch, name).data_ptr() for name in names))
    assert len(addresses) == 1


def test_a_decoding_step_costs_one_launch_for_tables_and_none_for_data() -> None:
    pool = pool_of(memory="4MiB", options=Options())
    sequences = pool.admit([5, 9, 2])
    pool.batch(sequences)
    for _ in range(40):
        data, tables = pool.launches, pool._uploader.launches
        pool.extend(sequences)
        pool.batch(sequences)
        assert (pool.launches - data, pool._uploader.launches - tables) == (0, 1)


def test_a_step_that_exceeds_the_buffers_is_refused_with_both_numbers() -> None:
    pool = pool_of(max_batch_tokens=16)
    sequences = pool.admit([10, 7])
    with pytest.raises(InvalidArgument, match=r"17 tokens.*max_batch_tokens=16"):
        pool.batch(sequences)
    with pytest.raises(InvalidArgument, match=r"17 rows.*max_rows=16"):
        pool.batch(sequences[:1], pad_to=17)
    assert pool.batch(sequences[:1]).num_tokens == 10 and pool.batch(sequences[1:]).num_tokens == 7


# -- foreign kernels -------------------------------------------------------------------------------------------------


def write_tokens(pool: CachePool, layer: int, batch: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """What a kernel does: through the virtual page table."""
    page = batch.page_table[batch.slot_mapping // 4].long()
    for cache, new in zip(pool.kv(layer), (keys, values), strict=True):
        cache[page, batch.slot_mapping % 4] = new


@pytest.mark.parametrize("form", ["dense", "csr"])
@pytest.mark.parametrize("kv_order", ["NHD", "HND"])
def test_torch_s_own_attention_runs_over_pages_found_through_physical_tables(form: str, kv_order: str) -> None:
    torch.manual_seed(0)
    pool = pool_of(disturbance=ChaosMigration(9), kv_order=kv_order)
    sequences = pool.admit([9, 4, 14])
    contents = [torch.randn(2, length, 2, 16) for length in (9, 4, 14)]
    batch = pool.batch(sequences)
    write_tokens(pool, 4, batch, *torch.cat(contents, dim=1))
    for _ in range(6):  # each step moves a page and a slot
        pool.extend(sequences)
        batch = pool.batch(sequences)
        new = torch.randn(2, 3, 2, 16)
        write_tokens(pool, 4, batch, *new)
        contents = [torch.cat([old, new[:, i : i + 1]], dim=1) for i, old in enumerate(contents)]
    if form == "dense":
        out = torch.full((5, batch.block_table.shape[1] + 2), 99, dtype=torch.int32)
        table = batch.physical(out)
        table.require_current()
        rows = [out[i, : -(-content.shape[1] // 4)] for i, content in enumerate(contents)]
    else:
        buffers = tuple(torch.full((64,), 99, dtype=torch.int32) for _ in range(3))
        csr = batch.physical_csr(buffers)
        csr.require_current()
        assert csr.kv_last_page_len.tolist() == [3, 2, 4] and csr.kv_indptr.data_ptr() == buffers[0].data_ptr()
        ends = csr.kv_indptr.tolist()
        rows = [csr.kv_indices[a:b] for a, b in pairwise(ends)]
    query = torch.randn(2, 1, 16)
    for row, content in zip(rows, contents, strict=True):
        paged = [cache[row.long()].flatten(0, 1)[: content.shape[1]].transpose(0, 1) for cache in pool.kv(4)]
        plain = [part.transpose(0, 1) for part in content]
        assert torch.equal(scaled_dot_product_attention(query, *paged), scaled_dot_product_attention(query, *plain))


def test_physical_tables_are_stale_once_anything_has_moved() -> None:
    pool = pool_of(disturbance=ChaosMigration(1))
    sequences = pool.admit([9, 9])
    batch = pool.batch(sequences)
    table, csr = batch.physical(), batch.physical_csr()
    pool.extend(sequences)
    for stale in (table, csr):
        with pytest.raises(Inconsistent, match="stale"):
            stale.require_current()
    for call in (batch.physical, batch.physical_csr):
        with pytest.raises(Inconsistent, match="stale"):  # the mirrors that it would read are older than the move
            call()
    latest = pool.batch(sequences)
    latest.physical().require_current()
    with pytest.raises(InvalidArgument, match="int32"):
        latest.physical(torch.zeros(2, 2, dtype=torch.int64))
    vector = torch.zeros(64, dtype=torch.int32)
    for wrong in ((vector, vector), (vector, vector, vector.view(8, 8)), (vector[:1], vector, vector)):
        with pytest.raises(InvalidArgument, match="three int32 vectors"):
            latest.physical_csr(wrong)  # type: ignore[arg-type]


def test_a_batch_that_a_later_one_has_overwritten_gives_no_physical_ids() -> None:
    pool = pool_of()
    one, two = pool.admit([9, 5]).tolist()
    first, second = pool.batch([one]), pool.batch([two])
    for call in (first.physical, first.physical_csr):
        with pytest.raises(Inconsistent, match="overwritten by batch 2"):
            call()
    assert second.physical().block_table.shape[0] == 1


def test_everything_behind_a_batch_is_zero_for_graphs_that_were_captured_with_more() -> None:
    pool = pool_of()
    sequences = pool.admit([1] * 8)
    pool.batch(sequences)
    captured = pool.tables.slot_mapping[:8], pool.tables.seq_lens[:8], pool.tables.block_table[:8]
    pool.extend(sequences[:5])
    batch = pool.batch(sequences[:5], pad_to=8)
    assert batch.num_tokens == 5 and (captured[0][:5] >= 4).all()
    assert not captured[0][5:].any() and not captured[1][5:].any() and not captured[2][5:].any()
    pool.extend(sequences)
    assert (pool.batch(sequences).slot_mapping >= 4).all()


@pytest.mark.parametrize("method", ["apply_table_changes", "zero"])
def test_a_failure_on_the_way_to_the_device_stops_the_pool(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(pool.backend, method, fail)
    sequence = pool.admit([4])
    with pytest.raises(RuntimeError, match="device lost"):
        pool.batch(sequence)
    monkeypatch.undo()
    for call in (lambda: pool.extend(sequence), lambda: pool.batch(sequence), pool.flush):
        with pytest.raises(Inconsistent, match="interrupted"):
            call()


def test_effects_in_the_wrong_order_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_cache_pool_machine import LazyDriver

    def backwards(pool: CachePool, cells_too: bool) -> Any:
        launches, changes = CachePool._drain(pool, cells_too)
        return launches[::-1], changes

    caught = 0
    for seed in range(6):
        driver = LazyDriver(LAYOUTS["slot of five pages"], chaos_seed=seed)
        monkeypatch.setattr(driver.allocator, "_drain", partial(backwards, driver.allocator))
        rng = random.Random(seed)
        try:
            for _ in range(200):
                driver.run(rng.choice(driver.OPERATIONS), rng.randrange)
        except (AssertionError, KeyError, IndexError, ValueError):
            caught += 1
    assert caught == 6


# -- memory ----------------------------------------------------------------------------------------------------------


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_nothing_of_the_arena_s_size_is_ever_allocated_a_second_time() -> None:
    geometry = avmp.named_model("jamba-v0.1")
    pool = CachePool(geometry, "512MiB", device="cpu", max_rows=32, max_tokens_per_sequence=4096)
    pool.lanes.fill_(1)  # all of it is resident from here on
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = resident_bytes("VmRSS")
    sequences = pool.admit([1500, 1500, 1500, 1500])
    pool.batch(sequences)
    twins = pool.fork(int(sequences[0]), 3)
    swapped = pool.swap_out(sequences[1:2])
    pool.flush()
    pool.release(twins)
    back = pool.swap_in(swapped)
    pool.admit([2000] * 4)
    pool.flush()
    pool.release(sequences[2:])
    pool.admit([1] * 12)  # twelve states: pages give way, live ones move
    pool.batch(back)
    assert pool.stats().units_moved > 0
    swapped_out = geometry.sequence_bytes(1500)
    assert resident_bytes("VmHWM") - before < 1.2 * swapped_out < pool.lanes.nbytes / 8


def test_memory_is_a_size_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avmp.device_memory.free_bytes", lambda device: 1_000_000)
    assert pool_of(memory=0.5).layout.arena_bytes == 500_000
    assert pool_of(memory=600_000).layout.arena_bytes == 600_000
    for wrong in (0.0, 1.5, -0.1, "0GiB", -1):
        with pytest.raises(InvalidArgument):
            pool_of(memory=wrong)
    with pytest.raises(ArenaTooSmall):
        pool_of(memory="4KiB")


def test_free_memory_of_a_cpu_is_what_the_system_would_give() -> None:
    from avmp.device_memory import free_bytes

    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
    with pytest.raises(InvalidArgument, match="give a size"):
        free_bytes(torch.device("meta"))


@pytest.mark.parametrize("known", [True, False])
def test_free_memory_of_a_gpu_is_asked_of_nvml_and_of_torch_where_that_fails(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from avmp.device_memory import free_bytes

    class NVMLError(Exception):
        pass

    def handle(uuid: str) -> str:
        if not known:
            raise NVMLError
        return uuid

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda uuid: SimpleNamespace(free=len(uuid)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0123"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (77, 100))
    assert free_bytes(torch.device("cuda")) == (len("GPU-0123") if known else 77)


def test_a_host_without_memory_refuses_to_swap_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    sequences = pool.admit([9, 3])
    pool.batch(sequences)
    before = pool.digest()

    def no_memory(*arguments: Any, **keywords: Any) -> torch.Tensor:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr("avmp.host_swap.torch.empty", no_memory)
    with pytest.raises(RuntimeError, match="host memory"):
        pool.swap_out(sequences)
    monkeypatch.undo()
    assert pool.digest() == before
    assert len(pool.swap_in(pool.swap_out(sequences))) == 2
    pool.flush()
    assert pool._host.nbytes == 0


def test_discarded_sequences_give_their_host_memory_back() -> None:
    pool = pool_of()
    sequences = pool.admit([9, 3])
    pool.batch(sequences)
    swapped = pool.swap_out(sequences)
    assert pool._host.nbytes > 0
    pool.discard(swapped[0])
    pool.swap_in(swapped[1:])
    pool.flush()
    assert pool._host.nbytes == 0


def test_a_meta_arena_of_any_size_plans_without_memory() -> None:
    pool = CachePool(avmp.named_model("qwen3-next-80b-a3b"), "4TiB", device="meta", max_tokens_per_sequence=65536)
    assert pool.kv(3)[0].shape[1:] == (16, 2, 256) and pool.kv(3)[0].device.type == "meta"
    sequences = pool.admit([3000, 5000])
    batch = pool.batch(sequences)
    assert batch.block_table.shape == (2, 4096) and batch.slot_mapping.shape == (8000,)
    pool.fork(int(sequences[0]))
    pool.swap_in(pool.swap_out(sequences[1:]))
    pool.flush()
    pool.check()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_operations_that_read_a_step_s_result_need_the_step_to_be_batched() -> None:
    pool = pool_of()
    one, two = pool.admit([5, 6]).tolist()
    for call in (
        lambda: pool.fork(one),
        lambda: pool.snapshot(one),
        lambda: pool.swap_out([one, two]),
        lambda: pool.reorder([one, two], [1, 1]),
    ):
        before = pool.digest()
        with pytest.raises(InvalidArgument, match="no batch has taken them up"):
            call()
        assert pool.digest() == before
        with pytest.raises(InvalidArgument, match="no batch has taken them up"):
            pool.fits("fork", one)
    pool.batch([one, two])
    assert pool.fits("fork", one) and pool.fits("reorder", iter([one, two]), [1, 1])
    pool.fork(one), pool.snapshot(two), pool.reorder([one, two], [1, 1]), pool.swap_out([one])


def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="record_effects"):
        pool_of(options=Options(record_effects=False))
    with pytest.raises(InvalidArgument, match="backend 'cuda'"):
        pool_of(backend="cuda")
    with pytest.raises(InvalidArgument, match="memory is missing"):
        CachePool(HYBRID, device="cpu")
    for wrong in (-1, True, 2.5):
        with pytest.raises(InvalidArgument, match="max_batch_tokens"):
            pool_of(max_batch_tokens=wrong)
    for given in ({"kv_order": "HND"}, {"lane_count": 1}):
        with pytest.raises(InvalidArgument, match=r"Layout\.plan"):
            CachePool(Layout.plan(HYBRID, "256KiB"), device="cpu", **given)
    with pytest.raises(InvalidArgument, match="fewer rows or larger pages"):
        DeviceTables(10, 10, max_rows=2200, row_width=2**20, max_tokens=8, device=torch.device("meta"))
    with pytest.raises(Unsupported, match="use flush"):
        pool_of().drain()


def test_a_mirror_that_differs_from_the_host_is_reported_at_debug_2() -> None:
    pool = pool_of()
    sequences = pool.admit([5])
    pool.batch(sequences)
    pool.tables.page_table[1] += 1
    with pytest.raises(Inconsistent, match="page table differs"):
        pool.flush()


# -- stale bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [True, False])
def test_a_state_slot_is_zero_when_handed_out_unless_that_is_switched_off(zero: bool) -> None:
    pool = pool_of(options=Options(poison=True, zero_slots=zero))
    old = pool.admit([4])
    pool.batch(old)
    pool.release(old)
    batch = pool.batch(pool.admit([4]))
    slot = int(batch.slot_table[batch.state_indices[0].long()])
    for part in pool.state(2):
        assert bool((part[slot] == 0).all()) == zero and bool(part[slot].isnan().all()) != zero


def test_freed_units_read_as_nan_and_pages_can_be_zeroed_too() -> None:
    pool = pool_of(options=Options(poison=True))
    keys, _ = pool.kv(1)
    page = pool.take("page")
    pool.flush()
    physical = int(pool.tables.page_table[page & 0xFFFFFFFF])
    keys[physical] = 3.0
    pool.give(page)
    pool.flush()
    assert keys[physical].isnan().all()
    clean = pool_of(options=Options(poison=True, zero_pages=True))
    first = clean.take("page")
    clean.give(first)
    again = clean.take("page")
    clean.flush()
    assert not clean.kv(1)[0][int(clean.tables.page_table[again & 0xFFFFFFFF])].any()


def test_a_preempted_sequence_does_not_go_on_from_its_old_state() -> None:
    pool = pool_of()
    first = pool.admit([8])
    batch = pool.batch(first)
    for part in pool.state(0):
        part[int(batch.slot_table[batch.state_indices[0].long()])] = 1.5
    pool.release(first)
    batch = pool.batch(pool.admit([8]))
    assert not batch.has_initial_state.any()
    assert not any(part[int(batch.slot_table[batch.state_indices[0].long()])].any() for part in pool.state(0))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages here")
def test_an_arena_on_a_cpu_asks_for_huge_pages():
    pool = avmp.CachePool(avmp.named_model("jamba-v0.1"), "64MiB", device="cpu", max_rows=2)
    assert "hg" in flags_of_mapping(pool.lanes.data_ptr())
    assert "hg" not in flags_of_mapping(id(pool))


def flags_of_mapping(address):
    """What the kernel says of the mapping that the address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            begin, end = (int(number, 16) for number in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"no mapping holds {address:#x}")
