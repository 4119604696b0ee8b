"""What tests of the state operations share: tensors amid NaN, tables of rows, cases in pairs, and bounds on errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GUARD = 7.0

Factors = dict[str, tuple[dict[str, Any], ...]]


def pairwise(factors: Factors, seed: int) -> Iterator[dict[str, Any]]:
    """Few cases in which any two values of any two factors meet once at least."""
    rng, names = random.Random(seed), list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }

    def closes(name: str, value: int, chosen: dict[str, int]) -> int:
        return sum(((name, value, b, y) in missing) + ((b, y, name, value) in missing) for b, y in chosen.items())

    while missing:
        first = min(missing)
        chosen = {first[0]: first[1], first[2]: first[3]}
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                chosen[name] = max((closes(name, x, chosen), rng.random(), x) for x in range(len(factors[name])))[2]
        missing -= {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}
        yield {key: value for name in names for key, value in factors[name][chosen[name]].items()}


def amid_nan(values: torch.Tensor, dtype: torch.dtype, value: float = float("nan")) -> torch.Tensor:
    """The same numbers in the middle of a larger tensor, so that no two dimensions are adjacent in memory."""
    memory = torch.full([size + 3 for size in values.shape], value, dtype=dtype)
    inner = memory[tuple(slice(1, 1 + size) for size in values.shape)]
    return inner.copy_(values.to(dtype))


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a view looks into."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).view(
        torch.uint8
    )


def state_pool(slots: int, inner: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
    """A view ``[slots, *inner]`` with these strides inside a slot, as in an arena: a slot is longer than the state,
    and all bytes are 0xFF, NaN in every format."""
    span = sum((size - 1) * stride for size, stride in zip(inner, strides, strict=True)) + 1
    slot = -(-(span + 24) // 16) * 16
    memory = torch.full((slots * slot * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return memory.as_strided((slots, *inner), (slot, *strides), 8)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of all its memory."""
    copy = storage(tensor).clone().view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself, and 0 differs from -0."""
    copies = (tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*copies)


def only_changed(before: torch.Tensor, after: torch.Tensor, slots: list[int]) -> bool:
    """Whether nothing but these slots of two views of equal memories differs."""
    one, other = twin(before), twin(after)
    one[slots], other[slots] = 0, 0
    return torch.equal(storage(one), storage(other))


def within(found: torch.Tensor, right: torch.Tensor, low: torch.Tensor) -> None:
    """Against float64, the error is at most twice that of a careful implementation in the problem's precision, by
    maximum and by root mean square; some units in the last place of fp32 are free, since few elements make luck."""
    if not right.numel():
        return
    assert found.isfinite().all()
    eps = torch.finfo(torch.float32).eps
    error, allowed = (one.double() - right for one in (found, low))
    for measure in (torch.max, lambda numbers: numbers.square().mean().sqrt()):
        size, most = measure(right.abs()), 2 * measure(allowed.abs())
        assert measure(error.abs()) <= most + 4 * eps * size, (measure(error.abs()), most, size)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty gives NaN: an element that is not written shows."""
    stock = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = stock(*args, **kwargs)
        return made.fill_(float("nan")) if made.dtype.is_floating_point else made

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = stock  # type: ignore[assignment]


class NoWaiting(TorchFunctionMode):
    """Fails on what would make the host wait for the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(function, "__name__", "") not in {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "to"}
        return function(*args, **(kwargs or {}))


class Launched:
    """Stands in for a kernel; keeps the grids and arguments of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((grid, kwargs))


class SomePrograms:
    """Stands in for a kernel; runs only these programs of each launch, on a grid of one axis."""

    def __init__(self, kernel: Any, programs: list[int]) -> None:
        self.kernel, self.programs = kernel, programs
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        from triton.runtime.interpreter import InterpreterBuilder

        self.grids.append(grid)
        stock = InterpreterBuilder.set_grid_idx

        def set_grid_idx(builder: Any, x: int, y: int, z: int) -> None:
            builder.grid_idx = (self.programs[x], y, z)

        def launch(*args: Any, **kwargs: Any) -> None:
            InterpreterBuilder.set_grid_idx = set_grid_idx
            try:
                self.kernel[(len(self.programs),)](*args, **kwargs)
            finally:
                InterpreterBuilder.set_grid_idx = stock

        return launch
