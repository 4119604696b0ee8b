"""Kernels that move bytes, in the interpreter: bit for bit what the reference does, whatever the order of programs."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import reference, tuning
from avmp.kernels import units as units_module
from avmp.kernels.backend import TritonBackend
from avmp.kernels.reference import TorchBackend
from avmp.kernels.units import copy_units, fill_units, gather_units, scatter_units, word_offset
from tests.driver import Driver
from tests.pool_device import GUARD
from tests.test_cache_pool_machine import PoolDriver
from tests.test_machine import LAYOUTS

pytestmark = pytest.mark.usefixtures("interpreter")

KIB = 1024
GUARD_BYTES = 4096
# lanes, bytes of a lane, bytes of a unit: smallest units; odd ones; units larger than a tile; a rest behind the last.
SHAPES = {
    "smallest": (2, 128 * KIB, 256),
    "three quarters": (3, 96 * KIB, 768),
    "odd": (2, 256 * KIB, 4352),
    "a tile": (1, 512 * KIB, 16 * KIB),
    "several tiles": (2, 1024 * KIB + 512, 67 * KIB),
}


def guarded(shape: tuple[int, ...], value: int = GUARD) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 of this shape, and the memory that it lies in, with a canary on either side."""
    size = int(np.prod(shape))
    memory = torch.full((size + 2 * GUARD_BYTES,), value, dtype=torch.uint8)
    return memory, memory[GUARD_BYTES : GUARD_BYTES + size].view(shape)


class Pair:
    """Two equal arenas, one for the kernels and one for the reference: NaN patterns but for the live units."""

    def __init__(self, lanes: int, lane_bytes: int, unit_bytes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.count, self.unit_bytes = lane_bytes // unit_bytes, unit_bytes
        self.memory, arena = guarded((lanes, lane_bytes))
        arena.fill_(0xFF)
        permutation = self.rng.permutation(self.count)
        self.live, self.free = np.split(permutation, [self.count // 2])
        bytes_ = torch.from_numpy(self.rng.integers(0, 256, (lanes, len(self.live), unit_bytes), dtype=np.uint8))
        sizes = {"page": unit_bytes, "slot": 0}
        self.kernels = TritonBackend(arena, sizes)
        self.kernels.units["page"][:, self.live] = bytes_
        self.expected = self.memory.clone()
        copy = self.expected[GUARD_BYTES : GUARD_BYTES + arena.numel()].view(arena.shape)
        self.reference = TorchBackend(copy, sizes)
        self.arena, self.lanes = arena, lanes

    def some(self, ids: np.ndarray) -> np.ndarray:
        return self.rng.permutation(ids)[: self.rng.integers(1, len(ids) + 1)]

    def both(self, operation: str, *arguments: Any) -> None:
        for backend in (self.kernels, self.reference):
            getattr(backend, operation)("page", *arguments)
        assert torch.equal(self.memory, self.expected)

    def gathered(self, sources: np.ndarray) -> torch.Tensor:
        """Units packed by the kernels, into memory that nothing else is written to."""
        shape = (len(sources), self.lanes, self.unit_bytes)
        (memory, out), expected = guarded(shape), torch.empty(shape, dtype=torch.uint8)
        self.kernels.gather("page", sources, out)
        self.reference.gather("page", sources, expected)
        assert torch.equal(out, expected)
        assert (memory[:GUARD_BYTES] == GUARD).all() and (memory[-GUARD_BYTES:] == GUARD).all()
        return out


@pytest.mark.parametrize("shape", SHAPES)
def test_every_effect_writes_what_the_reference_writes(
    shape: str, program_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles that a GPU takes; some programs have several of them, and not all have equally many."""
    monkeypatch.setattr(tuning, "BULK_INTERPRETED", replace(tuning.BULK, programs=13))
    pair = Pair(*SHAPES[shape], seed=len(shape))
    moved = min(len(pair.live), len(pair.free))
    pair.both("move", pair.live[:moved], pair.free[:moved])
    pair.both("copy", np.repeat(pair.live[:1], moved), pair.free[:moved])
    pair.both("zero", pair.some(pair.free))
    pair.both("poison", pair.some(pair.live))
    units = pair.gathered(pair.some(pair.live))
    pair.both("scatter", units, pair.rng.permutation(pair.count)[: len(units)])


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts_and_plans(seed: int, program_order: str) -> None:
    rng = random.Random(seed)
    unit_bytes = 256 * rng.randrange(1, 80)
    pair = Pair(rng.randrange(1, 5), unit_bytes * rng.randrange(4, 40) + 256 * rng.randrange(4), unit_bytes, seed)
    for _ in range(3):
        pairs = rng.randrange(1, pair.count // 2 + 1)
        ids = pair.rng.permutation(pair.count)[: 2 * pairs]
        pair.both("move", ids[:pairs], ids[pairs:])
        pair.both("scatter", pair.gathered(ids[pairs:]), pair.rng.permutation(pair.count)[:pairs])
        pair.both("poison", ids[:1])


def test_more_moves_than_a_grid_s_second_axis_has_programs(program_order: str) -> None:
    moves = 65_536 + 17
    pair = Pair(1, 2 * moves * 256, 256, seed=0)
    pair.both("move", pair.live, pair.free)


def test_nothing_is_launched_for_no_units() -> None:
    pair, nothing = Pair(2, 8 * KIB, 256, seed=0), np.zeros(0, dtype=np.int64)
    pair.both("move", nothing, nothing)
    pair.both("zero", nothing)
    assert len(pair.gathered(nothing)) == 0
    pair.kernels.apply_table_changes(torch.zeros(4, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_null_ids_and_ids_beyond_the_pool_are_left_out(dtype: torch.dtype, program_order: str) -> None:
    memory, lanes = guarded((2, 16 * KIB))
    lanes.copy_(torch.randint(0, 255, lanes.shape, dtype=torch.uint8))
    before, units = memory.clone(), lanes.view(2, 16, KIB)
    nulls = torch.tensor([0, -1, 1, -(2**31), 16, 2**31 - 1], dtype=dtype)
    live = torch.tensor([8, 9, 10, 11, 12, 13], dtype=dtype)
    copy_units(lanes, KIB, nulls, live, first_valid_id=2)
    copy_units(lanes, KIB, live, nulls, first_valid_id=2)
    fill_units(lanes, KIB, nulls, 7, first_valid_id=2)
    scatter_units(lanes, KIB, torch.full((6, 2, KIB), 9, dtype=torch.uint8), nulls, first_valid_id=2)
    assert torch.equal(memory, before)
    out = torch.full((6, 2, KIB), 7, dtype=torch.uint8)
    gather_units(lanes, KIB, nulls, out, first_valid_id=2)
    assert not out.any()
    gather_units(lanes, KIB, nulls[:3].abs(), out[:3].contiguous())
    copy_units(lanes, KIB, torch.tensor([0, 5], dtype=dtype), torch.tensor([3, 5], dtype=dtype))
    assert torch.equal(units[:, 3], units[:, 0])  # 0 is a unit like any other unless the caller says otherwise
    units[:, 3] = before[GUARD_BYTES : GUARD_BYTES + lanes.numel()].view(2, 16, KIB)[:, 3]
    assert torch.equal(memory, before)


def test_host_memory_is_reached_through_a_staging_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every tensor is the device's; this one is taken for another device's, in parts of three units."""
    pair = Pair(2, 64 * KIB, 1024, seed=3)
    monkeypatch.setattr(reference, "STAGING_BYTES", 3 * 2 * 1024)
    units = pair.gathered(pair.live[:10])
    monkeypatch.setattr(pair.kernels, "device", torch.device("cpu", 0))
    assert torch.equal(pair.gathered(pair.live[:10]), units)
    pair.both("scatter", units, pair.free[:10])


def test_ids_are_copied_before_anything_runs() -> None:
    pair = Pair(1, 8 * KIB, 256, seed=0)
    ids = np.array([3, 5, 7])
    uploaded = pair.kernels._upload("page", ids, ids[::-1])
    ids[:] = 0
    assert uploaded.tolist() == [[3, 5, 7], [7, 5, 3]] and uploaded.dtype == torch.int32


@pytest.mark.parametrize("ids", [[-1], [32], [5, 32], [2**40]])
def test_ids_outside_the_pool_are_refused_before_anything_runs(ids: list[int]) -> None:
    pair = Pair(1, 8 * KIB, 256, seed=0)
    wrong, right = np.array(ids), np.arange(len(ids))
    before = pair.memory.clone()
    calls = [("zero", wrong), ("copy", wrong, right), ("move", right, wrong), ("gather", wrong, None)]
    for operation, *arguments in calls:
        with pytest.raises(InvalidArgument, match="the pool has 0 to 31"):
            getattr(pair.kernels, operation)("page", *arguments)
    with pytest.raises(InvalidArgument, match="equally many"):
        pair.kernels.copy("page", right, np.arange(len(ids) + 1))
    assert torch.equal(pair.memory, before)


def test_tensors_that_cannot_be_addressed_in_vectors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, ids = torch.zeros(2, 8 * KIB, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    out = torch.zeros(3, 2, 256, dtype=torch.uint8)
    for wrong_lanes, unit_bytes in ((lanes, 100), (lanes[:, 8:-8], 256), (lanes.int(), 256), (lanes[0], 256)):
        with pytest.raises(InvalidArgument):
            fill_units(wrong_lanes, unit_bytes, ids, 0)
    for wrong_out in (out[:2], out.int(), out.transpose(0, 1), torch.zeros(3 * 512 + 8, dtype=torch.uint8)[8:]):
        with pytest.raises(InvalidArgument):
            gather_units(lanes, 256, ids, wrong_out.view(3, 2, 256) if wrong_out.dim() == 1 else wrong_out)
    for wrong_ids in (ids.float(), ids.view(3, 1), torch.zeros(6, dtype=torch.int32)[::2]):
        with pytest.raises(InvalidArgument):
            fill_units(lanes, 256, wrong_ids, 0)
    with pytest.raises(InvalidArgument, match="as many sources as destinations"):
        copy_units(lanes, 256, ids, ids[:2])
    monkeypatch.setattr(units_module, "GRID_X_LIMIT", 3)
    with pytest.raises(InvalidArgument, match="too many bytes"):
        fill_units(lanes, 256, ids, 0)


@pytest.mark.parametrize("count", [1, 1023, 1024, 5000])
def test_table_changes(count: int, program_order: str) -> None:
    memory = torch.arange(-4, 8004, dtype=torch.int32)
    expected, tables = memory.clone(), memory[4:-4]
    changes = torch.stack([torch.randperm(8000)[:count], torch.randint(-(2**31), 2**31, (count,))]).int()
    TorchBackend(torch.zeros(1, 256, dtype=torch.uint8), {}).apply_table_changes(expected[4:-4], changes)
    TritonBackend(torch.zeros(1, 256, dtype=torch.uint8), {}).apply_table_changes(tables, changes)
    assert torch.equal(memory, expected)


# -- addresses -------------------------------------------------------------------------------------------------------


@triton.jit
def store_offsets_kernel(ids, out, lane, unit_stride, lane_stride, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, word_offset(tl.load(ids + at), lane, unit_stride, lane_stride))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("unit_bytes", [256, 1_433_600, 2**31])
@pytest.mark.parametrize("lane_bytes", [2**20, 2**31 + 256, 2**32 + 256, 2**40])
def test_addresses_beyond_2_to_the_31_and_2_to_the_32(dtype: torch.dtype, unit_bytes: int, lane_bytes: int) -> None:
    crossing = [2**power // unit_bytes + step for power in (31, 32, 33, 34, 35) for step in (-1, 0, 1)]
    ids = torch.tensor([max(min(one, 2**31 - 1), 0) for one in [*crossing, 2**31 - 1]], dtype=dtype)
    for lane in (0, 1, 63):
        out = torch.empty(16, dtype=torch.int64)
        store_offsets_kernel[(1,)](ids, out, lane, unit_bytes // 16, lane_bytes // 16, 16)
        assert out.tolist() == [(one * unit_bytes + lane * lane_bytes) // 4 for one in ids.tolist()]


def test_units_on_either_side_of_4_gib() -> None:
    """Real memory, of which the system gives only the pages that are written."""
    lanes = torch.empty(2, 2**32 + 2**20, dtype=torch.uint8)
    backend = TritonBackend(lanes, {"page": 4096})
    low, high = np.array([3]), np.array([2**20 + 5])
    units = backend.units["page"]
    units[:, 3] = torch.randint(0, 255, (2, 4096), dtype=torch.uint8)
    original = units[:, 3].clone()
    backend.move("page", low, high)
    assert torch.equal(units[:, 2**20 + 5], original)
    backend.zero("page", low)
    backend.move("page", high, low)
    assert torch.equal(units[:, 3], original)


# -- in a pool -------------------------------------------------------------------------------------------------------


class KernelPoolDriver(PoolDriver):
    @staticmethod
    def make_allocator(*arguments: Any, **keywords: Any) -> Any:
        return PoolDriver.make_allocator(*arguments, backend="triton", **keywords)


@pytest.mark.parametrize("name", ["slot of five pages", "sizes that do not divide"])
def test_every_byte_survives_random_operations_on_a_pool(name: str) -> None:
    layout, rng = LAYOUTS[name], random.Random(name)
    driver = KernelPoolDriver(layout, max_tokens=min(40, 12 * layout.page_tokens), chaos_seed=7)
    assert driver.allocator.backend.name == "triton"
    for _ in range(120):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    driver.empty()
