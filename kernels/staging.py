"""Units on their way between an arena and another memory, through a staging tensor on the arena's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from avmp.kernels.unit_arguments import check_packed

STAGING_BYTES = 64 * 2**20
"""The most that a copy through a temporary holds at a time: no second copy of an arena is ever made."""


def chunks(lanes: torch.Tensor, unit_bytes: int, count: int) -> list[slice]:
    """``count`` units of all lanes in parts that fit into STAGING_BYTES, of one unit at least."""
    step = max(STAGING_BYTES // (len(lanes) * unit_bytes), 1)
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def needs_staging(lanes: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether packed units lie in another memory than the arena."""
    return host.device != lanes.device


def leave(
    gather: Callable[..., None],
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    host: torch.Tensor,
    **rule: Any,
) -> None:
    """``swap_out`` by this implementation of ``gather_units``: packed on the device first, so that the copy engine
    gets whole runs."""
    if not needs_staging(lanes, host):
        gather(lanes, unit_bytes, sources, host, **rule)
        return
    check_packed(lanes, unit_bytes, host, len(sources))
    for part in chunks(lanes, unit_bytes, len(sources)):
        staging = torch.empty(host[part].shape, dtype=torch.uint8, device=lanes.device)
        gather(lanes, unit_bytes, sources[part], staging, **rule)
        host[part].copy_(staging, non_blocking=True)


def come_back(
    scatter: Callable[..., None],
    lanes: torch.Tensor,
    unit_bytes: int,
    host: torch.Tensor,
    destinations: torch.Tensor,
    **rule: Any,
) -> None:
    """``swap_in`` by this implementation of ``scatter_units``."""
    if not needs_staging(lanes, host):
        scatter(lanes, unit_bytes, host, destinations, **rule)
        return
    check_packed(lanes, unit_bytes, host, len(destinations))
    for part in chunks(lanes, unit_bytes, len(destinations)):
        staging = torch.empty(host[part].shape, dtype=torch.uint8, device=lanes.device)
        staging.copy_(host[part], non_blocking=True)
        scatter(lanes, unit_bytes, staging, destinations[part], **rule)
