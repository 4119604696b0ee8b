"""What Triton's interpreter needs to run our kernels as a GPU does; nothing of it touches compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_MENDED = "avmp_mended"


def mend_scalar_comparisons() -> None:
    """Makes the comparison of two scalars a truth value. In the interpreter of triton 3.9 it keeps the type of the
    scalars, and ``block_of_truth & scalar_truth`` is then no valid mask. Does nothing the second time."""
    if getattr(InterpreterBuilder, _MENDED, False):
        return
    stock = InterpreterBuilder.binary_op

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = stock(self, left, right, operation)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    InterpreterBuilder.binary_op = binary_op
    setattr(InterpreterBuilder, _MENDED, True)
