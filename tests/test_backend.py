"""The torch backend, every branch of it, against plain numpy: no byte but those asked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from avmp.errors import InvalidArgument
from avmp.host_swap import HostSwap
from avmp.kernels import staging as staging_module
from avmp.kernels import units_reference
from avmp.kernels.reference import TorchBackend
from avmp.kernels.unit_arguments import POISON_BYTE

LANES, GUARD = 3, 64
# Unit and lane bytes; no unit divides its lane, so that the view of the units is not contiguous.
SIZES = [(256, 256 * 37 + 128), (768, 768 * 20 + 256), (16384, 16384 * 9 + 256), (40960, 40960 * 7 + 512)]


class Arena:
    """A backend on a random arena with guards, and what the arena should hold."""

    def __init__(self, unit_bytes: int, lane_bytes: int) -> None:
        generator = torch.Generator().manual_seed(unit_bytes)
        self.memory = torch.randint(0, 255, (2 * GUARD + LANES * lane_bytes,), dtype=torch.uint8, generator=generator)
        self.lanes, self.unit_bytes = self.memory[GUARD:-GUARD].view(LANES, lane_bytes), unit_bytes
        self.backend = TorchBackend(self.lanes, {"page": unit_bytes, "slot": 0})
        self.expected = self.memory.numpy().copy()
        inner = self.expected[GUARD:-GUARD].reshape(LANES, lane_bytes)
        shape = (LANES, lane_bytes // unit_bytes, unit_bytes)
        self.units = np.lib.stride_tricks.as_strided(inner, shape, (lane_bytes, unit_bytes, 1))
        places = np.random.default_rng(unit_bytes).permutation(shape[1])
        self.sources, self.destinations = places[: shape[1] // 2], places[shape[1] // 2 : 2 * (shape[1] // 2)]

    def same(self) -> bool:
        return bool((self.memory.numpy() == self.expected).all())


@pytest.fixture(params=SIZES, ids=[str(size) for size, _ in SIZES])
def arena(request: pytest.FixtureRequest) -> Arena:
    return Arena(*request.param)


@pytest.fixture(params=["numpy", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU, or as on any other device."""
    if request.param == "torch":
        monkeypatch.setattr(units_reference, "_on_host", lambda tensor: False)
    return str(request.param)


@pytest.fixture(params=["whole", "chunks"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunks":
        monkeypatch.setattr(staging_module, "STAGING_BYTES", 3 * LANES * 768)


@pytest.mark.parametrize("operation", ["copy", "move"])
def test_units_are_copied_in_all_lanes(arena: Arena, staging: None, operation: str, way: str) -> None:
    getattr(arena.backend, operation)("page", arena.sources, arena.destinations)
    arena.units[:, arena.destinations] = arena.units[:, arena.sources]
    assert arena.same()
    one = arena.sources[:1].repeat(len(arena.destinations))
    arena.backend.copy("page", one, arena.destinations)  # one source for many
    arena.units[:, arena.destinations] = arena.units[:, one]
    assert arena.same()


def test_units_become_zero_or_nan(arena: Arena, staging: None, way: str) -> None:
    arena.backend.zero("page", arena.sources)
    arena.backend.poison("page", arena.destinations)
    arena.units[:, arena.sources], arena.units[:, arena.destinations] = 0, POISON_BYTE
    assert arena.same()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.full((8,), POISON_BYTE, dtype=torch.uint8).view(dtype).isnan().all()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "host"])
def test_units_leave_and_come_back_elsewhere(
    arena: Arena, staging: None, way: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "needs_staging", lambda lanes, host: elsewhere)
    shape = (len(arena.sources), LANES, arena.units.shape[2])
    out = torch.full(shape, 7, dtype=torch.uint8)
    arena.backend.gather("page", arena.sources, out)
    assert (out.numpy() == arena.units[:, arena.sources].transpose(1, 0, 2)).all() and arena.same()
    backwards = arena.destinations[::-1].copy()
    arena.backend.scatter("page", out, backwards)
    arena.units[:, backwards] = arena.units[:, arena.sources]
    assert arena.same()


def test_nothing_is_done_for_no_units(arena: Arena, way: str) -> None:
    none = np.empty(0, dtype=np.int64)
    empty = torch.empty((0, LANES, arena.units.shape[2]), dtype=torch.uint8)
    for operation, arguments in (
        ("copy", (none, none)),
        ("move", (none, none)),
        ("zero", (none,)),
        ("poison", (none,)),
        ("gather", (none, empty)),
        ("scatter", (empty, none)),
    ):
        getattr(arena.backend, operation)("page", *arguments)
    assert arena.same()


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_the_pool_are_refused_before_anything_is_written(arena: Arena, wrong: int) -> None:
    outside, inside = np.array([int(arena.sources[0]), wrong]), arena.destinations[:2]
    packed = torch.zeros((2, LANES, arena.units.shape[2]), dtype=torch.uint8)
    for operation, arguments in (
        ("copy", (outside, inside)),
        ("move", (inside, outside)),
        ("copy", (inside, inside[:1])),
        ("zero", (outside,)),
        ("poison", (outside,)),
        ("gather", (outside, packed)),
        ("scatter", (packed, outside)),
    ):
        with pytest.raises(InvalidArgument, match="ids"):
            getattr(arena.backend, operation)("page", *arguments)
    assert arena.same() and not packed.any()


def test_ids_are_copied_before_anything_runs(arena: Arena) -> None:
    ids = np.array([3, 5, 6])
    uploaded = arena.backend._upload("page", ids, ids[::-1])
    ids[:] = 0
    assert uploaded.tolist() == [[3, 5, 6], [6, 5, 3]] and uploaded.dtype == torch.int32


# -- the operations behind it: null ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("virtual", [False, True], ids=["physical", "virtual"])
@pytest.mark.parametrize("nulls", ["some", "all", "first"])
def test_null_ids_are_left_out(
    arena: Arena, staging: None, way: str, dtype: torch.dtype, virtual: bool, nulls: str
) -> None:
    """Physical ids: below 1 and beyond the pool. Virtual ones: also those that the table does not have, or maps to
    what is null."""
    count, first = arena.units.shape[1], 1
    table = np.array([0, *arena.sources, *arena.destinations, 0, -5, count], dtype=np.int32)
    # What is asked for, and where that lies; -1 for null.
    wanted = np.arange(1, len(table) - 3) if virtual else np.concatenate([arena.sources, arena.destinations])
    bad = np.array([0, -1, -(2**31), len(table), 2**31 - 1, *range(len(table) - 3, len(table))])
    bad = bad if virtual else np.array([0, -1, -(2**31), count, 2**31 - 1])
    half = len(wanted) // 2
    ids, other = wanted[:half].copy(), wanted[half : 2 * half].copy()
    where = {"some": np.arange(1, half, 2), "all": np.arange(half), "first": np.arange(1)}[nulls]
    ids[where] = np.resize(bad, len(where))

    def lies_at(asked: np.ndarray) -> np.ndarray:
        inside = (asked >= first) & (asked < (len(table) if virtual else count))
        found = np.where(inside, table[np.where(inside, asked, 0)] if virtual else asked, -1)
        return np.where((found >= first) & (found < count), found, -1)

    rule: dict[str, Any] = dict(first_valid_id=first, page_table=torch.from_numpy(table) if virtual else None)
    sources, destinations = torch.from_numpy(ids).to(dtype), torch.from_numpy(other).to(dtype)
    for one, two in ((sources, destinations), (destinations, sources)):
        units_reference.copy_units(arena.lanes, arena.unit_bytes, one, two, **rule)
        read, written = lies_at(one.numpy()), lies_at(two.numpy())
        kept = (read >= 0) & (written >= 0)
        arena.units[:, written[kept]] = arena.units[:, read[kept]]
        assert arena.same()
    at = lies_at(ids)
    packed = torch.full((half, LANES, arena.unit_bytes), 7, dtype=torch.uint8)
    units_reference.gather_units(arena.lanes, arena.unit_bytes, sources, packed, **rule)
    assert (packed.numpy()[at >= 0] == arena.units[:, at[at >= 0]].transpose(1, 0, 2)).all()
    assert not packed.numpy()[at < 0].any() and arena.same()
    packed.random_(0, 255)
    units_reference.scatter_units(arena.lanes, arena.unit_bytes, packed, sources, **rule)
    arena.units[:, at[at >= 0]] = packed.numpy()[at >= 0].transpose(1, 0, 2)
    assert arena.same()
    units_reference.poison_units(arena.lanes, arena.unit_bytes, sources, **rule)
    arena.units[:, at[at >= 0]] = POISON_BYTE
    assert arena.same()


@pytest.mark.parametrize("count", [0, 1, None])
@pytest.mark.parametrize("where", ["host", "device"])
def test_only_the_moves_that_count_are_carried_out(arena: Arena, way: str, count: int | None, where: str) -> None:
    moves = torch.from_numpy(np.stack([arena.sources, arena.destinations])).int()
    done = len(arena.sources) if count is None else count
    rule: dict[str, Any] = {"count": count}
    if where == "device":
        rule = {"device_count": torch.tensor([len(arena.sources) + 5 if count is None else count], dtype=torch.int32)}
    units_reference.migrate(arena.lanes, arena.unit_bytes, moves, **rule)
    arena.units[:, arena.destinations[:done]] = arena.units[:, arena.sources[:done]]
    assert arena.same()


def test_a_negative_count_on_the_device_moves_nothing(arena: Arena, way: str) -> None:
    moves = torch.from_numpy(np.stack([arena.sources, arena.destinations])).int()
    units_reference.migrate(arena.lanes, arena.unit_bytes, moves, device_count=torch.tensor(-3, dtype=torch.int32))
    assert arena.same()


def test_table_changes_write_their_words_only(way: str) -> None:
    backend = TorchBackend(torch.zeros(1, 512, dtype=torch.uint8), {"page": 256})
    tables = torch.arange(10, dtype=torch.int32)
    backend.apply_table_changes(tables, torch.tensor([[7, 0, 3], [70, -1, 30]], dtype=torch.int32))
    assert tables.tolist() == [-1, 1, 2, 30, 4, 5, 6, 70, 8, 9]
    backend.apply_table_changes(tables, torch.tensor([[-1, 10, 2, -(2**31)], [5, 5, 20, 5]], dtype=torch.int32))
    assert tables.tolist() == [-1, 1, 20, 30, 4, 5, 6, 70, 8, 9]
    backend.apply_table_changes(tables, torch.tensor([[-1, 10], [5, 5]], dtype=torch.int32))
    backend.apply_table_changes(tables, torch.zeros(2, 0, dtype=torch.int32))
    assert tables.tolist() == [-1, 1, 20, 30, 4, 5, 6, 70, 8, 9]


# -- what must not happen --------------------------------------------------------------------------------------------


def test_moving_small_units_of_lanes_that_they_do_not_divide_copies_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    take = np.take

    def watched(array: Any, *arguments: Any, **keywords: Any) -> Any:
        assert array.flags.c_contiguous  # numpy would copy the whole array first
        result = take(array, *arguments, **keywords)
        largest.append(result.nbytes)
        return result

    monkeypatch.setattr(units_reference.np, "take", watched)
    arena = Arena(*SIZES[1])
    arena.backend.move("page", arena.sources[:2], arena.destinations[:2])
    assert largest == [2 * 768] * LANES


class Watch(torch.overrides.TorchFunctionMode):
    """Notes what waits for a device, and copies between memories that do."""

    WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []
        self.copies: list[bool] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.WAITS:
            self.waited.append(name)
        if name == "copy_":
            self.copies.append(bool((kwargs or {}).get("non_blocking")))
        return function(*args, **(kwargs or {}))


OPERATIONS: dict[str, Callable[..., None]] = {
    "copy": lambda lanes, ids, host: units_reference.copy_units(lanes, 256, ids[0], ids[1], first_valid_id=1),
    "zero": lambda lanes, ids, host: units_reference.zero_units(lanes, 256, ids[0], first_valid_id=1),
    "migrate": lambda lanes, ids, host: units_reference.migrate(lanes, 256, ids, device_count=ids[0, :1].contiguous()),
    "swap out": lambda lanes, ids, host: units_reference.swap_out(lanes, 256, ids[0], host, page_table=ids[1]),
    "swap in": lambda lanes, ids, host: units_reference.swap_in(lanes, 256, host, ids[0], page_table=ids[1]),
    "tables": lambda lanes, ids, host: units_reference.apply_table_changes(ids[0].contiguous(), ids),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_waits_for_a_device(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is no CPU; on the way to the host and back every copy may be late."""
    monkeypatch.setattr(units_reference, "_on_host", lambda tensor: False)
    monkeypatch.setattr(staging_module, "needs_staging", lambda lanes, host: True)
    lanes, host = torch.zeros(2, 2048, dtype=torch.uint8), torch.ones(2, 2, 256, dtype=torch.uint8)
    ids = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    with Watch() as watch:
        OPERATIONS[operation](lanes, ids, host)
    assert not watch.waited
    if operation.startswith("swap"):
        assert watch.copies.count(True) == 1  # the one between the memories


def test_host_memory_is_pinned_where_the_device_copies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def noted(*shape: Any, **keywords: Any) -> torch.Tensor:
        asked.append(keywords)
        return empty(*shape, **keywords | {"pin_memory": False})

    monkeypatch.setattr("avmp.host_swap.torch.empty", noted)
    lanes = torch.zeros(LANES, 1024, dtype=torch.uint8)
    backend = TorchBackend(lanes, {"page": 256})
    for device, pinned in (("cuda", True), ("cpu", False)):
        arena = SimpleNamespace(device=torch.device(device), shape=lanes.shape)
        host = HostSwap(arena, backend)  # type: ignore[arg-type]
        assert [buffer.shape for buffer in host.prepare([("page", 3), ("page", 0)])] == [(3, LANES, 256)]
        assert asked.pop() == {"dtype": torch.uint8, "device": "cpu", "pin_memory": pinned}
