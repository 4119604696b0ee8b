"""What operations read of a ``Batch``, and what they refuse."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from avmp.bounds import Limits
from avmp.errors import InvalidArgument


class BatchLike(Protocol):
    """What is read of a ``Batch``; see there for shapes."""

    @property
    def block_table(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def query_start_loc(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def state_indices(self) -> torch.Tensor: ...
    @property
    def has_initial_state(self) -> torch.Tensor: ...
    @property
    def page_table(self) -> torch.Tensor: ...
    @property
    def slot_table(self) -> torch.Tensor: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def first_valid_id(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def limits(self) -> Limits | None: ...
    def require_latest(self) -> None:
        """Raises Inconsistent if a later batch has overwritten the tables."""


def latest(operation: str, batch: BatchLike) -> BatchLike:
    """The batch itself. While code is traced there is no telling which batch it will run with."""
    if not hasattr(batch, "require_latest"):
        raise InvalidArgument(f"{operation}: expected tables as tensors or a Batch, got a {type(batch).__name__}")
    if not torch.compiler.is_compiling():
        batch.require_latest()
    return batch


def leave_out(operation: str, **given: Any) -> None:
    """Raises InvalidArgument for what a batch brings itself."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise InvalidArgument(f"{operation}: a batch brings its own {' and '.join(names)}; leave out one or the other")


def require_tokens(operation: str, tokens: torch.Tensor, batch: BatchLike) -> None:
    """Raises InvalidArgument for fewer tokens than the batch has; there may be more (padding)."""
    if tokens.shape[0] < batch.num_tokens:
        raise InvalidArgument(f"{operation}: {tokens.shape[0]} tokens, the batch has {batch.num_tokens}")


def first_valid(first_valid_id: int | None, table: torch.Tensor | None) -> int:
    """What is given; else 1 for virtual ids, of which 0 is null, and 0 for physical ones, of which 0 is like any."""
    return int(table is not None) if first_valid_id is None else first_valid_id


def required(operation: str, name: str, value: Any) -> Any:
    """The value. Raises InvalidArgument if it is None."""
    if value is None:
        raise InvalidArgument(f"{operation}: {name} is missing: give it, or a Batch instead of the tables")
    return value
