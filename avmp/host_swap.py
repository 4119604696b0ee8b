"""Swapped sequences in host memory: pinned where the device copies asynchronously."""

from __future__ import annotations

from collections.abc import Container

import torch

from avmp.effects import Launch
from avmp.ops import Backend


class HostSwap:
    """One buffer for each pool of each swapped sequence, uint8 ``[units, lane_count, unit_bytes]``."""

    def __init__(self, lanes: torch.Tensor, device: torch.device) -> None:
        self._lane_count = lanes.shape[0]
        self._pinned = device.type == "cuda"
        self._device = device
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that swapped sequences take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def leave(self, backend: Backend, launch: Launch) -> None:
        """Copies the units of a ``swap_out`` to a new host buffer."""
        shape = (len(launch.sources), self._lane_count, backend.units[launch.pool].shape[2])
        device = "meta" if self._device.type == "meta" else "cpu"
        buffer = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=self._pinned)
        backend.gather(launch.pool, launch.sources, buffer)
        self._buffers[launch.pool, launch.swapped] = buffer

    def come_back(self, backend: Backend, launch: Launch) -> None:
        """Copies the units of a ``swap_in`` from their host buffer, which is gone afterwards."""
        buffer = self._buffers.pop((launch.pool, launch.swapped))
        backend.scatter(launch.pool, buffer, launch.destinations)

    def forget(self, alive: Container[int]) -> None:
        """Drops the buffers of sequences that are not swapped out any more."""
        for pool, swapped in [key for key in self._buffers if key[1] not in alive]:
            del self._buffers[pool, swapped]
