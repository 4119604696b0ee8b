"""The corrected interpreter against torch: if it computed wrongly, every other test of a kernel would mean less."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.triton_interpreter import ORDERS, program_order

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BINARY = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.divide,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "less": lambda x, y: (x < y).to(x.dtype),
    "fma": lambda x, y: (x.double() * y.double() + y.double()).to(x.dtype),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "negate": lambda x, y: -x,
}
FLOAT8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def binary_kernel(x, y, out, OPERATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    if OPERATION == "add":
        result = a + b
    elif OPERATION == "subtract":
        result = a - b
    elif OPERATION == "multiply":
        result = a * b
    elif OPERATION == "divide":
        result = a / b
    elif OPERATION == "maximum":
        result = tl.maximum(a, b)
    elif OPERATION == "minimum":
        result = tl.minimum(a, b)
    elif OPERATION == "less":
        result = (a < b).to(out.dtype.element_ty)
    elif OPERATION == "fma":
        result = tl.fma(a, b, b)
    elif OPERATION == "clamp":
        result = tl.clamp(a, -1.0, 1.0)
    else:
        result = -a
    tl.store(out + at, result.to(out.dtype.element_ty))


@triton.jit
def convert_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def dot_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    place = at[:, None] * SIZE + at[None, :]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place), input_precision="ieee"))


@triton.jit
def reduce_kernel(x, sums, maxima, minima, places, running, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(sums + at, tl.sum(tile, axis=1))
    tl.store(maxima + at, tl.max(tile, axis=1))
    tl.store(minima + at, tl.min(tile, axis=0))
    tl.store(places + at, tl.argmax(tile, axis=1))
    tl.store(running + at[:, None] * SIZE + at[None, :], tl.cumsum(tile, axis=1))


@triton.jit
def scalar_mask_kernel(flag, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, at + 1, mask=(at < 6) & (tl.load(flag) != 0))


@triton.jit
def loop_kernel(bounds, out):
    for item in range(tl.program_id(0), tl.load(bounds), tl.num_programs(0)):
        tl.store(out + item, item)


@triton.jit
def log_kernel(turn, log):
    place = tl.atomic_add(turn, 1)
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(log + place, program)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        torch.where(found.isnan(), 0, found.float()), torch.where(expected.isnan(), 0, expected.float())
    )


def random_bits(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of every magnitude, subnormals, infinities and NaNs among them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (size,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    floats = bits.view(torch.float32)
    floats[:8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.999, 1e-40, -448.5])
    floats[8 : size // 2] = torch.randn(size // 2 - 8, generator=torch.Generator().manual_seed(1)) * 4
    return floats.to(dtype)


@pytest.mark.parametrize("operation", BINARY)
def test_arithmetic_of_bfloat16(operation: str) -> None:
    x, y = random_bits(4096, torch.bfloat16), random_bits(4096, torch.bfloat16).flip(0).contiguous()
    finite = ~(x.isnan() | y.isnan())  # which operand's NaN survives a maximum is nobody's promise
    x, y = torch.where(finite, x, 1), torch.where(finite, y, 1)
    out = torch.empty_like(x)
    binary_kernel[(1,)](x, y, out, operation, 4096)
    assert same(out, BINARY[operation](x, y))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64, torch.int32])
def test_conversion_to_bfloat16_rounds_to_nearest_even(source: torch.dtype) -> None:
    x = torch.arange(-2048, 2048, dtype=torch.int32) * 77_777 if source == torch.int32 else random_bits(4096, source)
    out = torch.empty(4096, dtype=torch.bfloat16)
    convert_kernel[(1,)](x, out, 4096)
    assert same(out, x.to(torch.bfloat16))


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.float64])
def test_conversion_from_every_bfloat16(target: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(65536, dtype=target)
    convert_kernel[(1,)](x, out, 65536)
    assert same(out, x.to(target))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", FLOAT8)
def test_conversion_to_float8_rounds_to_nearest_even_and_saturates(source: torch.dtype, target: torch.dtype) -> None:
    x = random_bits(4096, source)
    out = torch.empty(4096, dtype=target)
    convert_kernel[(1,)](x, out, 4096)
    clamped = torch.where(x.isnan(), x.float(), x.float().clamp(-FLOAT8[target], FLOAT8[target]))
    assert same(out.float(), clamped.to(target).float())


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", FLOAT8)
def test_conversion_from_every_float8(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(source)
    out = torch.empty(256, dtype=target)
    convert_kernel[(1,)](x, out, 256)
    assert same(out, x.float().to(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FLOAT8])
def test_products_of_matrices(dtype: torch.dtype) -> None:
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](x, y, out, 32)
    assert torch.allclose(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_reductions_of_bfloat16() -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    sums, maxima, minima = (torch.empty(32, dtype=torch.bfloat16) for _ in range(3))
    places, running = torch.empty(32, dtype=torch.int32), torch.empty_like(x)
    reduce_kernel[(1,)](x, sums, maxima, minima, places, running, 32)
    # float32 sums differ in their order: by at most one rounding of the result
    assert torch.allclose(sums.float(), x.float().sum(1), rtol=2**-8, atol=1e-4)
    assert torch.allclose(running.float(), x.float().cumsum(1), rtol=2**-8, atol=1e-4)
    assert torch.equal(maxima, x.max(1).values) and torch.equal(minima, x.min(0).values)
    assert torch.equal(places.long(), x.float().argmax(1))


@pytest.mark.parametrize("flag", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_comparison_of_scalars_is_a_mask(flag: int, dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=torch.int32)
    scalar_mask_kernel[(1,)](torch.tensor([flag], dtype=dtype), out, 8)
    assert out.tolist() == ([1, 2, 3, 4, 5, 6, 0, 0] if flag else [0] * 8)


def test_scalars_are_the_bounds_of_a_loop() -> None:
    out = torch.full((8,), -1, dtype=torch.int32)
    loop_kernel[(2,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_programs_run_in_the_order_asked_for() -> None:
    logs = {}
    for order in ORDERS:
        turn, log = torch.zeros(1, dtype=torch.int32), torch.full((24,), -1, dtype=torch.int32)
        with program_order(order, seed=3):
            log_kernel[(2, 3, 4)](turn, log)
        logs[order] = log.tolist()
    assert logs["forward"] == list(range(24)) and logs["reverse"] == list(range(23, -1, -1))
    assert sorted(logs["shuffle"]) == logs["forward"]
    assert all(a != b for a, b in itertools.combinations(logs.values(), 2))
    with pytest.raises(ValueError, match="forward, reverse, shuffle"), program_order("backward"):
        pass


@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_who_runs_kernels_in_the_interpreter_has_the_corrections(repository, interpreted):
    """Users too, and nobody else."""
    program = """
import avmp.kernels.launch
from triton.runtime import interpreter
print(hasattr(interpreter, "avmp_corrections"))
"""
    environment = dict(os.environ, TRITON_INTERPRET=interpreted)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(interpreted == "1")
