"""The torch backend, every branch of it, against plain numpy: no byte but those asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from avmp.errors import InvalidArgument
from avmp.kernels import reference
from avmp.kernels.reference import POISON_BYTE, TorchBackend

LANES, GUARD = 3, 64
# Unit and lane bytes; no unit divides its lane, so that the view of the units is not contiguous.
SIZES = [(256, 256 * 37 + 128), (768, 768 * 20 + 256), (16384, 16384 * 9 + 256), (40960, 40960 * 7 + 512)]


class Arena:
    """A backend on a random arena with guards, and what the arena should hold."""

    def __init__(self, unit_bytes: int, lane_bytes: int, on_numpy: bool) -> None:
        generator = torch.Generator().manual_seed(unit_bytes)
        self.memory = torch.randint(0, 255, (2 * GUARD + LANES * lane_bytes,), dtype=torch.uint8, generator=generator)
        lanes = self.memory[GUARD:-GUARD].view(LANES, lane_bytes)
        self.backend = TorchBackend(lanes, {"page": unit_bytes, "slot": 0})
        if not on_numpy:
            self.backend._arrays = {}  # as on any device but a CPU
        self.expected = self.memory.numpy().copy()
        inner = self.expected[GUARD:-GUARD].reshape(LANES, lane_bytes)
        shape = (LANES, lane_bytes // unit_bytes, unit_bytes)
        self.units = np.lib.stride_tricks.as_strided(inner, shape, (lane_bytes, unit_bytes, 1))
        places = np.random.default_rng(unit_bytes).permutation(shape[1])
        self.sources, self.destinations = places[: shape[1] // 2], places[shape[1] // 2 : 2 * (shape[1] // 2)]

    def same(self) -> bool:
        return bool((self.memory.numpy() == self.expected).all())


@pytest.fixture(params=SIZES, ids=[str(size) for size, _ in SIZES])
def make(request: pytest.FixtureRequest) -> Callable[[bool], Arena]:
    return lambda on_numpy: Arena(*request.param, on_numpy)


@pytest.fixture(params=["whole", "chunks"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunks":
        monkeypatch.setattr(reference, "STAGING_BYTES", 3 * LANES * 768)


@pytest.mark.parametrize("on_numpy", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize("operation", ["copy", "move"])
def test_units_are_copied_in_all_lanes(
    make: Callable[[bool], Arena], staging: None, operation: str, on_numpy: bool
) -> None:
    arena = make(on_numpy)
    getattr(arena.backend, operation)("page", arena.sources, arena.destinations)
    arena.units[:, arena.destinations] = arena.units[:, arena.sources]
    assert arena.same()
    one = arena.sources[:1].repeat(len(arena.destinations))
    arena.backend.copy("page", one, arena.destinations)  # one source for many
    arena.units[:, arena.destinations] = arena.units[:, one]
    assert arena.same()


@pytest.mark.parametrize("on_numpy", [True, False], ids=["numpy", "torch"])
def test_units_become_zero_or_nan(make: Callable[[bool], Arena], staging: None, on_numpy: bool) -> None:
    arena = make(on_numpy)
    arena.backend.zero("page", arena.sources)
    arena.backend.poison("page", arena.destinations)
    arena.units[:, arena.sources], arena.units[:, arena.destinations] = 0, POISON_BYTE
    assert arena.same()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.full((8,), POISON_BYTE, dtype=torch.uint8).view(dtype).isnan().all()


@pytest.mark.parametrize("on_numpy", [True, False], ids=["numpy", "torch"])
def test_units_leave_and_come_back_elsewhere(make: Callable[[bool], Arena], staging: None, on_numpy: bool) -> None:
    arena = make(on_numpy)
    shape = (len(arena.sources), LANES, arena.units.shape[2])
    out = torch.full(shape, 7, dtype=torch.uint8)
    arena.backend.gather("page", arena.sources, out)
    assert (out.numpy() == arena.units[:, arena.sources].transpose(1, 0, 2)).all() and arena.same()
    backwards = arena.destinations[::-1].copy()
    arena.backend.scatter("page", out, backwards)
    arena.units[:, backwards] = arena.units[:, arena.sources]
    assert arena.same()


@pytest.mark.parametrize("on_numpy", [True, False], ids=["numpy", "torch"])
def test_nothing_is_done_for_no_units(make: Callable[[bool], Arena], on_numpy: bool) -> None:
    arena, none = make(on_numpy), np.empty(0, dtype=np.int64)
    empty = torch.empty((0, LANES, arena.units.shape[2]), dtype=torch.uint8)
    for operation, arguments in (
        ("copy", (none, none)),
        ("zero", (none,)),
        ("poison", (none,)),
        ("gather", (none, empty)),
    ):
        getattr(arena.backend, operation)("page", *arguments)
    arena.backend.scatter("page", empty, none)
    assert arena.same()


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_the_pool_are_refused_before_anything_is_written(make: Callable[[bool], Arena], wrong: int) -> None:
    arena = make(True)
    outside, inside = np.array([int(arena.sources[0]), wrong]), arena.destinations[:2]
    staging = torch.zeros((2, LANES, arena.units.shape[2]), dtype=torch.uint8)
    for operation, arguments in (
        ("copy", (outside, inside)),
        ("move", (inside, outside)),
        ("copy", (inside, inside[:1])),
        ("zero", (outside,)),
        ("poison", (outside,)),
        ("gather", (outside, staging)),
    ):
        with pytest.raises(InvalidArgument, match="ids"):
            getattr(arena.backend, operation)("page", *arguments)
    with pytest.raises(InvalidArgument, match="ids"):
        arena.backend.scatter("page", staging, outside)
    assert arena.same() and not staging.any()


def test_table_changes_write_their_words_only() -> None:
    backend = TorchBackend(torch.zeros(1, 512, dtype=torch.uint8), {"page": 256})
    tables = torch.arange(10, dtype=torch.int32)
    backend.apply_table_changes(tables, torch.tensor([[7, 0, 3], [70, -1, 30]], dtype=torch.int32))
    assert tables.tolist() == [-1, 1, 2, 30, 4, 5, 6, 70, 8, 9]


def test_moving_small_units_of_lanes_that_they_do_not_divide_copies_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    take = np.take

    def watched(array: Any, *arguments: Any, **keywords: Any) -> Any:
        assert array.flags.c_contiguous  # numpy would copy the whole array first
        result = take(array, *arguments, **keywords)
        largest.append(result.nbytes)
        return result

    monkeypatch.setattr(reference.np, "take", watched)
    arena = Arena(*SIZES[1], True)
    arena.backend.move("page", arena.sources[:2], arena.destinations[:2])
    assert largest == [2 * 768] * LANES
