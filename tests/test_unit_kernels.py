"""Kernels that move bytes, in the interpreter: bit for bit what the reference does, whatever the order of programs."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import staging, tables, tuning, units, units_reference
from avmp.kernels.backend import TritonBackend
from avmp.kernels.reference import TorchBackend
from avmp.kernels.units import word_offset
from tests.count_compilations import compilations
from tests.driver import Driver
from tests.pool_device import GUARD
from tests.test_cache_pool_machine import PoolDriver
from tests.test_machine import LAYOUTS
from tests.triton_interpreter import ORDERS

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


def in_turn(name: str, values: list[str]) -> pytest.MarkDecorator:
    """Every value with its programs in one order after the other; all but one of the orders only among the slow."""
    cases = [
        pytest.param(value, order, marks=() if turn == number % 3 else pytest.mark.slow)
        for number, value in enumerate(values, 1)
        for turn, order in enumerate(ORDERS)
    ]
    return pytest.mark.parametrize((name, "program_order"), cases, indirect=["program_order"])


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


def test_nothing_is_launched_for_no_units() -> None:
    pair, nothing = Pair(2, 8 * KIB, 256, seed=0), np.zeros(0, dtype=np.int64)
    pair.both("move", nothing, nothing)
    pair.both("zero", nothing)
    assert len(pair.gathered(nothing)) == 0
    pair.kernels.apply_table_changes(torch.zeros(4, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32))


def test_host_memory_is_reached_through_a_staging_tensor(program_order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every memory is the device's; here another one is taken to be the host's, in parts of three units."""
    pair = Pair(2, 64 * KIB, 1024, seed=3)
    packed = pair.gathered(pair.live[:10])
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * 2 * 1024)
    monkeypatch.setattr(staging, "needs_staging", lambda lanes, host: True)
    assert torch.equal(pair.gathered(pair.live[:10]), packed)
    pair.both("scatter", packed, pair.free[:10])


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


# -- anybody's ids ---------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("module", [units, units_reference], ids=["triton", "torch"])


class Twins:
    """Equal memory for kernel and reference, canaries around it; ids of every kind, null ones among them."""

    def __init__(self, lanes: int, count: int, unit_bytes: int, virtual: bool, dtype: torch.dtype, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.unit_bytes, self.dtype = unit_bytes, dtype
        shape = (lanes, count * unit_bytes + 256)
        self.memories, self.arenas = zip(*(guarded(shape) for _ in range(2)), strict=True)
        self.arenas[0].copy_(torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)))
        self.arenas[1].copy_(self.arenas[0])
        places = rng.permutation(np.arange(1, count)).astype(np.int32)
        table = np.concatenate([np.array([0], np.int32), places, np.array([0, -7, count], np.int32)])
        self.rule: dict[str, Any] = {"first_valid_id": 1}
        nulls = [0, -1, -(2**31), count, 2**31 - 1]
        if virtual:
            longer = torch.from_numpy(np.concatenate([table, places]))  # behind its end there would be more to find
            self.rule["page_table"] = longer[: len(table)]
            nulls = [0, -1, -(2**31), len(table), 2**31 - 1, len(table) - 1, len(table) - 2, len(table) - 3]
        ids = rng.permutation(np.arange(1, count)) if virtual else places.astype(np.int64)
        half = len(ids) // 2
        self.lists = [ids[:half].copy(), ids[half : 2 * half].copy()]
        for chosen in self.lists:
            chosen[rng.permutation(half)[: half // 2]] = np.resize(nulls, half // 2)

    def ids(self, which: int) -> torch.Tensor:
        return torch.from_numpy(self.lists[which]).to(self.dtype)

    def both(self, operation: str, *arguments: Any, **rule: Any) -> None:
        for module, arena in zip((units, units_reference), self.arenas, strict=True):
            getattr(module, operation)(arena, self.unit_bytes, *arguments, **rule)
        assert torch.equal(*self.memories)


FEW = {(256, True, torch.int64), (4352, False, torch.int64), (20 * KIB, True, torch.int32)}
ALL = itertools.product((256, 4352, 20 * KIB), (False, True), (torch.int32, torch.int64))


@pytest.mark.parametrize(
    ("unit_bytes", "virtual", "dtype"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in ALL],
)
def test_every_operation_does_what_its_twin_does(
    unit_bytes: int, virtual: bool, dtype: torch.dtype, program_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "BULK_INTERPRETED", replace(tuning.BULK, programs=7))
    lanes = 1 if unit_bytes > 16 * KIB else 2
    twins = Twins(lanes, 37, unit_bytes, virtual, dtype, seed=unit_bytes)
    one, two, rule = twins.ids(0), twins.ids(1), twins.rule
    before = twins.memories[0].clone()
    twins.both("copy_units", one, two, **rule)
    twins.both("copy_units", one[:1].repeat(len(two)), two, **rule)
    twins.both("zero_units", two[::2].contiguous(), **rule)
    twins.both("poison_units", one[1::2].contiguous(), **rule)
    assert not torch.equal(twins.memories[0], before)
    packed = []
    for module, arena in zip((units, units_reference), twins.arenas, strict=True):
        memory, out = guarded((len(one), lanes, unit_bytes), value=0x11)
        module.gather_units(arena, unit_bytes, one, out, **rule)
        assert (memory[:GUARD_BYTES] == 0x11).all() and (memory[-GUARD_BYTES:] == 0x11).all()
        packed.append(out)
    assert torch.equal(*packed) and packed[0].any()
    twins.both("scatter_units", packed[0].flip(0).contiguous(), two, **rule)
    packed[1].zero_()
    for operation in ("swap_out", "gather_units"):
        getattr(units, operation)(twins.arenas[0], unit_bytes, two, packed[operation == "swap_out"], **rule)
    assert torch.equal(*packed)
    twins.both("swap_in", packed[0], one, **rule)


def followed(table: torch.Tensor) -> torch.Tensor:
    """The same, in memory in which there is more to find behind its end."""
    return torch.cat([table, torch.full((8,), 2, dtype=torch.int32)])[: len(table)]


class Bound:
    """An arena of random bytes, a table that says where its units lie, and ids of every kind that go through it."""

    LANES, COUNT, UNIT_BYTES = 2, 24, 768

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.memory, lanes = guarded((self.LANES, self.COUNT * self.UNIT_BYTES + 256))
        lanes.copy_(torch.randint(0, 256, lanes.shape, dtype=torch.uint8, generator=g))
        places = torch.randperm(self.COUNT - 1, generator=g).int() + 1
        self.table = followed(torch.cat([torch.zeros(1).int(), places, torch.tensor([0, -3, self.COUNT]).int()]))
        nulls = torch.tensor([0, -1, -(2**31), self.COUNT, self.COUNT + 1, self.COUNT + 2, len(self.table)])
        ids = torch.cat([torch.randperm(self.COUNT - 1, generator=g) + 1, nulls]).int()
        self.one, self.two = ids[torch.randperm(len(ids), generator=g)].split(len(ids) // 2)
        self.packed = torch.randint(0, 256, (len(self.one), self.LANES, self.UNIT_BYTES), generator=g).to(torch.uint8)
        self.moved = torch.cat([torch.zeros(1).long(), torch.randperm(self.COUNT - 1, generator=g) + 1])

    def units(self, memory: torch.Tensor) -> torch.Tensor:
        lanes = memory[GUARD_BYTES:-GUARD_BYTES].view(self.LANES, -1)
        return lanes[:, : self.COUNT * self.UNIT_BYTES].view(self.LANES, self.COUNT, self.UNIT_BYTES)

    def physical(self, ids: torch.Tensor) -> torch.Tensor:
        """One id after the other, translated by hand."""
        known = [int(self.table[one]) if 1 <= one < len(self.table) else -1 for one in ids.tolist()]
        return torch.tensor([one if 1 <= one < self.COUNT else -1 for one in known], dtype=torch.int32)

    def moved_table(self) -> torch.Tensor:
        """The table once unit u has come to lie where ``moved[u]`` says."""
        places = [int(self.moved[one]) if 0 <= one < self.COUNT else one for one in self.table.tolist()]
        return followed(torch.tensor(places, dtype=torch.int32))

    def after(self, operation: Any, memory: torch.Tensor, *ids: torch.Tensor, **table: torch.Tensor) -> torch.Tensor:
        """What is packed, if anything is, once the operation has run on this memory."""
        lanes, packed = memory[GUARD_BYTES:-GUARD_BYTES].view(self.LANES, -1), self.packed.clone()
        if operation.__name__ in ("scatter_units", "swap_in"):
            ids = (packed, *ids)
        elif operation.__name__ in ("gather_units", "swap_out"):
            ids = (*ids, packed)
        operation(lanes, self.UNIT_BYTES, *ids, first_valid_id=1, **table)
        return packed


IN_ANY_ORDER = pytest.mark.parametrize(
    ("module", "program_order"),
    [(units_reference, "forward"), *((units, order) for order in ORDERS)],
    indirect=["program_order"],
    ids=["torch", *(f"triton {order}" for order in ORDERS)],
)
TRANSLATED = ("copy_units", "zero_units", "poison_units", "gather_units", "scatter_units", "swap_out", "swap_in")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TRANSLATED)
@IN_ANY_ORDER
def test_where_units_lie_changes_no_byte(module: Any, name: str, seed: int, program_order: str) -> None:
    """Virtual ids do what the physical ones do that their table says; also once all units lie elsewhere."""
    bound, operation = Bound(seed), getattr(module, name)
    ids = (bound.one, bound.two) if name == "copy_units" else (bound.one,)
    right, virtual, moved = (bound.memory.clone() for _ in range(3))
    packed = bound.after(operation, right, *(bound.physical(one) for one in ids))
    assert not torch.equal(right, bound.memory) or not torch.equal(packed, bound.packed)
    assert torch.equal(bound.after(operation, virtual, *ids, page_table=bound.table), packed)
    assert torch.equal(virtual, right)
    bound.units(moved)[:, bound.moved] = bound.units(bound.memory)
    assert torch.equal(bound.after(operation, moved, *ids, page_table=bound.moved_table()), packed)
    bound.units(moved).copy_(bound.units(moved)[:, bound.moved])
    assert torch.equal(moved, right)


@BOTH
def test_unit_zero_is_data_where_ids_begin_at_zero_and_a_unit_may_be_copied_onto_itself(module: Any) -> None:
    memory, lanes = guarded((2, 8 * KIB))
    lanes.copy_(torch.randint(0, 255, lanes.shape, dtype=torch.uint8))
    expected = memory.clone()
    expected[GUARD_BYTES:-GUARD_BYTES].view(2, 8, KIB)[:, 3] = lanes.view(2, 8, KIB)[:, 0]
    module.copy_units(lanes, KIB, torch.tensor([0, 5, -1]), torch.tensor([3, 5, 2]))
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("count", [None, 0, 1, 16, 17, 40])
@pytest.mark.parametrize("where", ["host", "device"])
def test_only_the_moves_that_count_are_carried_out(count: int | None, where: str, program_order: str) -> None:
    """On the device a count may be anything: at most all of them are."""
    twins = Twins(2, 82, 768, False, torch.int32, seed=1)
    moves = torch.stack([twins.ids(0), twins.ids(1)])
    rule: dict[str, Any] = {"count": count, "first_valid_id": 1}
    before = twins.memories[0].clone()
    if where == "device":
        known = 2**31 - 1 if count is None else count
        rule = {"device_count": torch.tensor([9, known, 9], dtype=torch.int32)[1:2], "first_valid_id": 1}
    twins.both("migrate", moves, **rule)
    assert torch.equal(twins.memories[0], before) == (count == 0)
    twins.both("migrate", moves[:, :0], **rule if count is None else {"first_valid_id": 1})


@BOTH
def test_a_negative_count_on_the_device_is_none(module: Any) -> None:
    memory, lanes = guarded((1, 8 * KIB))
    before = memory.clone()
    lanes[0, :KIB] = before[GUARD_BYTES : GUARD_BYTES + KIB] = 1
    moves = torch.tensor([[0, 1], [4, 5]], dtype=torch.int32)
    module.migrate(lanes, KIB, moves, device_count=torch.tensor(-5, dtype=torch.int32))
    assert torch.equal(memory, before)


@BOTH
def test_what_cannot_be_right_is_refused_before_anything_runs(module: Any) -> None:
    lanes, ids = torch.zeros(2, 8 * KIB, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    out, one = torch.zeros(3, 2, 256, dtype=torch.uint8), torch.ones(1, dtype=torch.int32)
    arenas = [(lanes, 100), (lanes[:, 8:-8], 256), (lanes.int(), 256), (lanes[0], 256), (lanes.T, 256)]
    for wrong_lanes, unit_bytes in [*arenas, (lanes, 0), (lanes, -256), (lanes, 16 * KIB)]:
        with pytest.raises(InvalidArgument):
            module.zero_units(wrong_lanes, unit_bytes, ids)
    unaligned = torch.zeros(3 * 512 + 8, dtype=torch.uint8)[8:].view(3, 2, 256)
    for wrong in (out[:2], out.int(), out.transpose(0, 1), unaligned):
        for operation, arguments in (("gather_units", (ids, wrong)), ("scatter_units", (wrong, ids))):
            with pytest.raises(InvalidArgument):
                getattr(module, operation)(lanes, 256, *arguments)
    for wrong in (ids.float(), ids.view(3, 1), torch.zeros(6, dtype=torch.int32)[::2], ids.to("meta")):
        with pytest.raises(InvalidArgument):
            module.poison_units(lanes, 256, wrong)
        with pytest.raises(InvalidArgument):
            module.zero_units(lanes, 256, ids, page_table=wrong)
    with pytest.raises(InvalidArgument, match="as many sources as destinations"):
        module.copy_units(lanes, 256, ids, ids[:2])
    with pytest.raises(InvalidArgument, match="first_valid_id -1"):
        module.copy_units(lanes, 256, ids, ids, first_valid_id=-1)
    with pytest.raises(InvalidArgument, match="where the bytes are"):
        module.gather_units(lanes, 256, ids, out.to("meta"))
    moves = torch.zeros(2, 3, dtype=torch.int32)
    for wrong_moves, rule in (
        (moves[0], {}),
        (moves.T.contiguous(), {}),
        (moves.T, {}),
        (moves, {"count": 4}),
        (moves, {"count": -1}),
        (moves, {"count": 1, "device_count": one}),
        (moves, {"device_count": one.long()}),
        (moves, {"device_count": ids}),
        (moves, {"device_count": one.to("meta")}),
    ):
        with pytest.raises(InvalidArgument):
            module.migrate(lanes, 256, wrong_moves, **rule)
    apply = tables.apply_table_changes if module is units else module.apply_table_changes
    words, changes = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    for wrong_words, wrong_changes in (
        (words.long(), changes),
        (words[::2], changes),
        (words, changes.long()),
        (words, changes[0]),
        (words, torch.zeros(3, 2, dtype=torch.int32).T),
        (words, changes.to("meta")),
    ):
        with pytest.raises(InvalidArgument):
            apply(wrong_words, wrong_changes)
    assert not lanes.any() and not out.any()


def test_more_tiles_than_one_launch_can_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "GRID_X_LIMIT", 3)
    with pytest.raises(InvalidArgument, match="too many bytes"):
        units.zero_units(torch.zeros(2, 8 * KIB, dtype=torch.uint8), 256, torch.zeros(3, dtype=torch.int32))


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1023, 1024, 5000])
def test_table_changes(count: int, program_order: str) -> None:
    memory = torch.arange(-4, 8004, dtype=torch.int32)
    expected, words = memory.clone(), memory[4:-4]
    changes = torch.stack([torch.randperm(8000)[:count], torch.randint(-(2**31), 2**31, (count,))]).int()
    changes[0, 1::9] = torch.tensor([-1, 8000, -(2**31), 2**31 - 1], dtype=torch.int32).repeat(count)[: count // 9 + 1][
        : len(changes[0, 1::9])
    ]
    units_reference.apply_table_changes(expected[4:-4], changes)
    tables.apply_table_changes(words, changes)
    assert torch.equal(memory, expected)


# -- more than an axis of a grid has programs ------------------------------------------------------------------------

MANY = 65_536 + 17


def test_more_moves_than_a_grid_s_second_axis_has_programs(program_order: str) -> None:
    pair = Pair(1, 2 * MANY * 256, 256, seed=0)
    pair.both("move", pair.live, pair.free)


@in_turn("operation", ["gather", "scatter", "zero"])
def test_more_units_than_a_grid_s_second_axis_has_programs(operation: str, program_order: str) -> None:
    pair = Pair(1, 2 * MANY * 256, 256, seed=1)
    if operation == "gather":
        assert pair.gathered(pair.live).any()
    elif operation == "scatter":
        pair.both("scatter", torch.randint(0, 255, (MANY, 1, 256), dtype=torch.uint8), pair.free)
    else:
        pair.both("zero", pair.live)


def test_more_table_changes_than_a_grid_s_second_axis_has_programs(program_order: str) -> None:
    words, expected = torch.zeros(2 * MANY, dtype=torch.int32), torch.zeros(2 * MANY, dtype=torch.int32)
    changes = torch.stack([torch.randperm(2 * MANY)[:MANY], torch.arange(1, MANY + 1)]).int()
    tables.apply_table_changes(words, changes)
    units_reference.apply_table_changes(expected, changes)
    assert torch.equal(words, expected) and int((words > 0).sum()) == MANY


# -- launches and compilations ---------------------------------------------------------------------------------------


def launches_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernel and the grid of each launch from now on."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Counted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            seen.append((self.name, grid))
            return self.kernel[grid]

    for module, names in (
        (units, ("copy_units_kernel", "fill_units_kernel")),
        (tables, ("apply_table_changes_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))
    return seen


def test_every_operation_is_one_launch_whatever_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = launches_of(monkeypatch)
    lanes, ids = torch.zeros(3, 64 * KIB, dtype=torch.uint8), torch.arange(8, dtype=torch.int32)
    packed = torch.zeros(8, 3, KIB, dtype=torch.uint8)
    units.copy_units(lanes, KIB, ids, ids + 8)
    units.gather_units(lanes, KIB, ids, packed)
    units.scatter_units(lanes, KIB, packed, ids)
    units.swap_out(lanes, KIB, ids, packed)
    units.swap_in(lanes, KIB, packed, ids)
    units.zero_units(lanes, KIB, ids)
    units.poison_units(lanes, KIB, ids)
    assert [name for name, _ in seen] == ["copy_units_kernel"] * 5 + ["fill_units_kernel"] * 2
    assert all(len(grid) == 1 for _, grid in seen)  # the other axes end at 65,535
    seen.clear()
    for count in (0, 1, 8, 99):
        units.migrate(lanes, KIB, torch.stack([ids, ids + 8]), device_count=torch.tensor([count], dtype=torch.int32))
    assert len(seen) == 4 and len(set(seen)) == 1
    seen.clear()
    tables.apply_table_changes(ids, torch.stack([ids, ids]))
    assert len(seen) == 1


def sweep_counts() -> None:
    """Lists of moves, and page tables, of every length and place; every count on the host and on the device."""
    for count in (1, 3, 16, 17, 1024):
        for lane_count in (1, 3):
            lanes = torch.empty(lane_count, 65_536 * 32, dtype=torch.uint8)
            moves = torch.zeros(2, 1025, dtype=torch.int32)[:, count % 2 :][:, :count]
            at = torch.zeros(4, dtype=torch.int32)[count % 3 :][:1]
            units.migrate(lanes, 65_536, moves)
            units.migrate(lanes, 65_536, moves, device_count=at, first_valid_id=count % 2)
            table = torch.zeros(2000, dtype=torch.int32)[count % 5 :][: count + 1]
            units.copy_units(lanes, 65_536, moves[0], moves[1], page_table=table)
            units.zero_units(lanes, 65_536, moves[0], page_table=table)


def test_no_count_leads_to_a_compilation() -> None:
    found = compilations("tests.test_unit_kernels:sweep_counts")
    assert found == {"copy_units_kernel": 3, "fill_units_kernel": 1}  # count known here, there; with a page table


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
        for unit, lanes in ((unit_bytes, lane_bytes), (3 * unit_bytes, unit_bytes)):  # in an arena, and packed
            out = torch.empty(16, dtype=torch.int64)
            store_offsets_kernel[(1,)](ids, out, lane, unit // 16, lanes // 16, 16)
            assert out.tolist() == [(one * unit + lane * lanes) // 4 for one in ids.tolist()]


@pytest.mark.parametrize("make", [TritonBackend, TorchBackend])
def test_units_on_either_side_of_4_gib(make: Any) -> None:
    """Real memory, of which the system gives only the pages that are written."""
    lanes = torch.empty(2, 2**32 + 2**20, dtype=torch.uint8)
    backend = make(lanes, {"page": 4096})
    low, high = np.array([3]), np.array([2**20 + 5])
    units = backend.units["page"]
    units[:, 3] = torch.randint(0, 255, (2, 4096), dtype=torch.uint8)
    original = units[:, 3].clone()
    backend.move("page", low, high)
    assert torch.equal(units[:, 2**20 + 5], original)
    backend.zero("page", low)
    packed = torch.empty(1, 2, 4096, dtype=torch.uint8)
    backend.gather("page", high, packed)
    assert torch.equal(packed[0], original)
    backend.poison("page", high)
    assert (units[:, 2**20 + 5] == 0xFF).all() and not units[:, 3].any()
    backend.scatter("page", packed, high)
    backend.move("page", high, low)
    assert torch.equal(units[:, 3], original)


def test_words_on_either_side_of_4_gib() -> None:
    words = torch.empty(2**30 + 64, dtype=torch.int32)
    changes = torch.tensor([[5, 2**30 + 7, 2**29 + 1], [1, 2, 3]], dtype=torch.int32)
    tables.apply_table_changes(words, changes)
    assert words[changes[0].long()].tolist() == [1, 2, 3]


# -- in a pool -------------------------------------------------------------------------------------------------------


class KernelPoolDriver(PoolDriver):
    @staticmethod
    def make_allocator(*arguments: Any, **keywords: Any) -> Any:
        return PoolDriver.make_allocator(*arguments, backend="triton", **keywords)


@in_turn("name", ["slot of five pages", "sizes that do not divide"])
def test_every_byte_survives_random_operations_on_a_pool(name: str, program_order: str) -> None:
    layout, rng = LAYOUTS[name], random.Random(name)
    driver = KernelPoolDriver(layout, max_tokens=min(40, 12 * layout.page_tokens), chaos_seed=7)
    assert driver.allocator.backend.name == "triton"
    for _ in range(120):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    driver.empty()
