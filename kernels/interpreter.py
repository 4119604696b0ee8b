"""Triton's interpreter, made to compute like a GPU; nothing of it touches compiled code.

The interpreter of triton 3.6 to 3.9 keeps bfloat16 as uint16 and does integer arithmetic on the bit patterns, cuts off
where it should round to bfloat16, and rounds float8 wrongly. Here bfloat16 goes through float32 and back, rounded to
nearest even, and float8 goes through torch, saturating as the hardware does. In 3.9, a comparison of scalars is no
valid mask; here it is. In 3.6, numpy 2.4 and later refuse the conversion by which a scalar becomes a bound of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

FLOAT8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}
FLOATS = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
INSTALLED = "avmp_corrections"


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bit patterns, uint16, of float values rounded to nearest even."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_float8(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Bit patterns, uint8, rounded to nearest even; what exceeds the largest finite value becomes that value."""
    torch_type, largest = FLOAT8[dtype]
    floats = torch.from_numpy(np.array(values, dtype=np.float32).reshape(-1))
    clamped = torch.where(floats.isnan(), floats, floats.clamp(-largest, largest))
    return clamped.to(torch_type).view(torch.uint8).numpy().reshape(np.shape(values))


def from_float8(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values of bit patterns."""
    codes = torch.from_numpy(np.array(bits, dtype=np.uint8).reshape(-1))
    return codes.view(FLOAT8[dtype][0]).float().numpy().reshape(np.shape(bits))


def scalar_type(handle: TensorHandle) -> Any:
    return getattr(handle.dtype, "scalar", handle.dtype)


def is_bfloat16(handle: TensorHandle) -> bool:
    return bool(scalar_type(handle) == tl.bfloat16 and handle.data.dtype == np.uint16)


def widened(handle: TensorHandle) -> TensorHandle:
    """The same as float32, if it is bfloat16."""
    return TensorHandle(from_bfloat16(handle.data), tl.float32) if is_bfloat16(handle) else handle


def as_float32(handle: TensorHandle) -> np.ndarray:
    if scalar_type(handle) in FLOAT8:
        return from_float8(handle.data, scalar_type(handle))
    values: np.ndarray = widened(handle).data.astype(np.float32)
    return values


def converted(handle: TensorHandle, dtype: Any) -> TensorHandle | None:
    """The handle as ``dtype``, where one of the two is a format that the interpreter gets wrong; else None."""
    source, target = scalar_type(handle), dtype.scalar
    if target in FLOAT8 and (source in FLOATS or source == tl.bfloat16 or source in FLOAT8):
        return TensorHandle(to_float8(as_float32(handle), target), target)
    if target == tl.bfloat16 and source != tl.bfloat16:
        return TensorHandle(to_bfloat16(as_float32(handle)), target)
    if source in FLOAT8 and target in FLOATS:
        return TensorHandle(as_float32(handle).astype(FLOATS[target]), target)
    return None


def install() -> None:
    """Puts the corrections in place, once."""
    if not hasattr(interpreter, INSTALLED):
        setattr(interpreter, INSTALLED, True)
        correct_arithmetic()
        correct_conversions()
        correct_products()
        correct_reductions()
        correct_indices()


def rounded(data: np.ndarray) -> TensorHandle:
    """A result computed in float32 from bfloat16: rounded back, but for the truth value of a comparison."""
    if data.dtype == np.bool_:
        return TensorHandle(data, tl.int1)
    return TensorHandle(to_bfloat16(data), tl.bfloat16)


def correct_arithmetic() -> None:
    binary_impl, unary_impl = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    ternary_impl = InterpreterBuilder.ternary_op

    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if is_bfloat16(lhs) or is_bfloat16(rhs):
            return rounded(op(widened(lhs).data, widened(rhs).data))
        result = binary_impl(self, lhs, rhs, op)
        # A truth value with the type of the operands would be widened to it, and could not be a mask any more.
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    def unary_op(self: Any, argument: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if is_bfloat16(argument):
            return rounded(op(widened(argument).data))
        return unary_impl(self, argument, op)

    def ternary_op(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, op: Any) -> TensorHandle:
        if op is not np.where and is_bfloat16(a):
            return rounded(op(*(widened(handle).data for handle in (a, b, c))))
        return ternary_impl(self, a, b, c, op)

    for function in (binary_op, unary_op, ternary_op):
        setattr(InterpreterBuilder, function.__name__, function)


def correct_conversions() -> None:
    cast_impl, create_fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
        result = converted(source, dtype)
        if result is None and dtype.scalar != tl.bfloat16 and is_bfloat16(source):
            source = widened(source)
        return cast_impl(self, source, dtype) if result is None else result

    def convert(self: Any, source: TensorHandle, dtype: Any, rounding_mode: Any) -> TensorHandle:
        result = converted(source, dtype)
        if result is None and is_bfloat16(source):
            return cast_impl(self, widened(source), dtype)
        return create_fp_to_fp(self, source, dtype, rounding_mode) if result is None else result

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = cast, convert


def correct_products() -> None:
    create_dot, create_fma = InterpreterBuilder.create_dot, InterpreterBuilder.create_fma

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
        wide = [
            TensorHandle(as_float32(handle), tl.float32)
            if is_bfloat16(handle) or scalar_type(handle) in FLOAT8
            else handle
            for handle in (a, b)
        ]
        return create_dot(self, *wide, d, *options)

    def fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not is_bfloat16(z):
            return create_fma(self, x, y, z)
        a, b, c = (widened(handle).data.astype(np.float64) for handle in (x, y, z))
        return rounded(a * b + c)  # the product is exact, so that the sum is rounded once, as a GPU does

    InterpreterBuilder.create_dot, InterpreterBuilder.create_fma = dot, fma


def correct_reductions() -> None:
    """Reductions and scans of bfloat16 in float32, rounded at the end."""
    for operation in (ReduceOps, ScanOps):
        operation.apply_impl = through_float32(operation.apply_impl)


def through_float32(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, inputs: tuple[Any, ...]) -> Any:
        if not is_bfloat16(inputs[0].handle):
            return stock(self, inputs)
        shape = list(inputs[0].handle.data.shape)
        wide = tl.core.tensor(widened(inputs[0].handle), tl.block_type(tl.float32, shape))
        return narrowed(stock(self, (wide, *inputs[1:])))

    return apply_impl


def narrowed(result: Any) -> Any:
    """float32 tensors, one or several, back to bfloat16; indices stay."""
    if isinstance(result, tuple | list):
        return type(result)(narrowed(one) for one in result)
    if scalar_type(result.handle) != tl.float32:
        return result
    handle = rounded(result.handle.data)
    shape = getattr(result.type, "shape", ())
    return tl.core.tensor(handle, tl.block_type(tl.bfloat16, list(shape)) if len(shape) else tl.bfloat16)


def correct_indices() -> None:
    """Scalars are arrays of one element, of which numpy makes a Python integer only where it is asked for the item."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
