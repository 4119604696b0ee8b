"""What adapters do alike: refuse what is not offered, take tables of physical ids, place new tokens."""

from __future__ import annotations

from typing import Any

import torch

from avmp.errors import InvalidArgument, Unsupported


def refuse(function: str, instead: str, **given: Any) -> None:
    """Raises Unsupported for the first argument that is given: neither None nor 0 nor False nor empty."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            raise Unsupported(f"{function}: {name} is not offered; {instead}")


def require(condition: bool, function: str, message: str) -> None:
    """Raises InvalidArgument unless the condition holds."""
    if not condition:
        raise InvalidArgument(f"{function}: {message}")


def unstamped(table: Any, name: str) -> tuple[torch.Tensor, int]:
    """``(tensor, first_valid_id)`` of a tensor of physical ids, where 0 is ordinary; or of the attribute ``name`` of
    ``Batch.physical()`` or ``Batch.physical_csr()``, where 0 is null. Raises Inconsistent if a unit has moved since."""
    if isinstance(table, torch.Tensor):
        return table, 0
    if hasattr(table, "page_table") or not hasattr(table, name):
        raise InvalidArgument(
            f"expected a tensor of physical ids, or what Batch.physical() or .physical_csr() gives, with {name}, got "
            f"{type(table).__name__}"
        )
    table.require_current()
    return getattr(table, name), 1


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """int64 ``[rows, n]``: ``page * page_tokens + offset`` of positions ``[rows, n]``; -1 outside the table."""
    column, width = positions.long() // page_tokens, block_table.shape[1]
    if not width:
        return torch.full_like(column, -1)
    page = block_table.gather(1, column.clamp(0, width - 1)).long()
    return torch.where((positions >= 0) & (column < width), page * page_tokens + positions % page_tokens, -1)


def per_row(seqlens: int | torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """int32 ``[rows]`` of a tensor or of one number for all."""
    if isinstance(seqlens, torch.Tensor):
        return seqlens
    return torch.full((rows,), seqlens, dtype=torch.int32, device=device)


def uniform_starts(rows: int, queries: int, device: torch.device) -> torch.Tensor:
    """int32 ``[rows + 1]``: where each row's queries begin, of rows with equally many."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * queries


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
