"""Triton's interpreter as a dry run needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

MENDED = "avmp_bench_mended"


def mend() -> None:
    """Makes the result of comparing two scalars a truth value: it keeps the type of the scalars, and is no valid mask
    then. Does nothing the second time."""
    if getattr(InterpreterBuilder, MENDED, False):
        return
    stock = InterpreterBuilder.binary_op

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = stock(self, left, right, operation)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    InterpreterBuilder.binary_op = binary_op
    setattr(InterpreterBuilder, MENDED, True)
