"""What every launcher shares: the device guard, the limits of a grid, whether the interpreter runs the kernels.

Triton launches on the current device and its current stream, whatever device its arguments live on. So every
``kernel[grid](...)`` stands inside ``with device_guard(tensor):``; a test looks for one that does not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

from avmp.errors import InvalidArgument

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors. TRITON_INTERPRET decides when kernels are defined:
setting it later changes nothing."""

if INTERPRETED:
    from avmp.kernels.interpreter import install

    install()

GRID_X_LIMIT = 2**31 - 1
GRID_YZ_LIMIT = 65_535
"""The most programs along an axis. A count that a user controls goes on axis 0."""


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current for the launches inside (CUDA and ROCm); does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def require_runnable(tensor: torch.Tensor) -> None:
    """Raises InvalidArgument where Triton cannot run a kernel on the tensor: off a GPU, but for the interpreter."""
    if tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"):
        return
    raise InvalidArgument(
        f"backend 'triton' on a {tensor.device.type} tensor: Triton runs on CUDA and ROCm tensors, and on CPU tensors "
        "only in its interpreter (set TRITON_INTERPRET=1 before triton is imported); use backend 'torch'"
    )


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the tensor's device; 1 in the interpreter, which runs one program after another."""
    return _multiprocessors(tensor.device) if tensor.is_cuda else 1


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
