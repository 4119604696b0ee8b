"""Who computes: backends by name, for the effects of the policy on an arena and for every public operation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.kernels.reference import TorchBackend

Ids = NDArray[np.int64]


class Backend(Protocol):
    """One method for each kind of effect, and one for tables, on the two pools of one arena; see
    ``kernels/reference.py`` for what each does. Ids are physical, int64, on the host."""

    name: str
    units: dict[str, torch.Tensor]

    def move(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """Units come to lie elsewhere."""

    def copy(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """Units are copied."""

    def zero(self, pool: str, destinations: Ids) -> None:
        """Units become zero."""

    def poison(self, pool: str, destinations: Ids) -> None:
        """Units are filled with NaN patterns."""

    def gather(self, pool: str, sources: Ids, out: torch.Tensor) -> None:
        """Units to a contiguous tensor."""

    def scatter(self, pool: str, source: torch.Tensor, destinations: Ids) -> None:
        """Units from a contiguous tensor."""

    def apply_table_changes(self, tables: torch.Tensor, changes: torch.Tensor) -> None:
        """Words of a table are overwritten."""


def _triton_backend(lanes: torch.Tensor, unit_bytes: dict[str, int]) -> Backend:
    """Triton is loaded only where it is used: it takes a second to import, and is not to be had on every system."""
    try:
        from avmp.kernels.backend import TritonBackend
    except ImportError as error:
        raise InvalidArgument(f"backend 'triton': triton cannot be imported here ({error}); use 'torch'") from error
    return TritonBackend(lanes, unit_bytes)


BACKENDS: dict[str, Callable[[torch.Tensor, dict[str, int]], Backend]] = {
    "torch": TorchBackend,
    "triton": _triton_backend,
}


def default_backend(device: torch.device) -> str:
    """``"triton"`` for a GPU, CUDA or ROCm, where triton is installed; ``"torch"`` otherwise."""
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def make_backend(name: str | None, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> Backend:
    """The backend of that name, by default that of the arena's device, for an arena uint8 ``[lane_count,
    lane_bytes]``. Raises InvalidArgument for a backend that does not run there; no other takes its place."""
    return BACKENDS[_known(name or default_backend(lanes.device))](lanes, unit_bytes)


_forced: ContextVar[str | None] = ContextVar("avmp_backend", default=None)

MODULES = {
    "paged_attention": {"torch": "attention_reference", "triton": "paged_attention"},
    "write_kv": {"torch": "kv_reference", "triton": "kv"},
    "gather_kv": {"torch": "kv_reference", "triton": "kv"},
    "selective_state_update": {"torch": "state_update_reference", "triton": "selective_state_update"},
    "causal_conv1d_update": {"torch": "conv_reference", "triton": "causal_conv1d_update"},
    "copy_units": {"torch": "units_reference", "triton": "units"},
    "zero_units": {"torch": "units_reference", "triton": "units"},
    "poison_units": {"torch": "units_reference", "triton": "units"},
    "migrate": {"torch": "units_reference", "triton": "units"},
    "gather_units": {"torch": "units_reference", "triton": "units"},
    "scatter_units": {"torch": "units_reference", "triton": "units"},
    "swap_out": {"torch": "units_reference", "triton": "units"},
    "swap_in": {"torch": "units_reference", "triton": "units"},
    "apply_table_changes": {"torch": "units_reference", "triton": "tables"},
    "first_bad_id": {"torch": "bounds_reference", "triton": "bounds"},
}
"""Where each operation is implemented, below avmp.kernels: the same name and the same signature in both."""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Operations inside run on this backend, ``"torch"`` or ``"triton"``, whatever the device of their tensors.

    For this thread: one that is started inside does not inherit it. Enter it around a compiled function; inside one
    Dynamo refuses it.
    """
    token = _forced.set(_known(name))
    try:
        yield
    finally:
        _forced.reset(token)


def chosen_backend(tensor: torch.Tensor, backend: str | None = None, pool_backend: str | None = None) -> str:
    """Who computes on this tensor: ``backend``, else that of ``use_backend``, else that of the pool whose batch it is,
    else what suits the tensor's device. Raises InvalidArgument for an unknown name."""
    return _known(backend) if backend else _forced.get() or pool_backend or default_backend(tensor.device)


def implementation(operation: str, tensor: torch.Tensor, backend: str | None = None) -> Callable[..., Any]:
    """The function that computes ``operation``, on the ``chosen_backend``. Raises InvalidArgument for a backend that
    cannot run; no other takes its place."""
    return load(operation, chosen_backend(tensor, backend))


@cache
def load(operation: str, backend: str) -> Callable[..., Any]:
    """The function that computes ``operation`` on that backend. Raises InvalidArgument if it cannot be imported."""
    try:
        module = importlib.import_module(f"avmp.kernels.{MODULES[operation][backend]}")
    except ImportError as error:
        advice = "; use backend 'torch'" if backend != "torch" else ""
        raise InvalidArgument(f"backend {backend!r}: {operation} cannot be imported here ({error}){advice}") from error
    function: Callable[..., Any] = getattr(module, operation)
    return function


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise InvalidArgument(f"backend {name!r}: expected one of {', '.join(BACKENDS)}")
    return name
