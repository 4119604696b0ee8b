"""Swapped sequences in host memory: pinned where the device copies asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

import torch

from avmp.backends import Backend
from avmp.effects import Launch


class HostSwap:
    """One buffer for each pool of each swapped sequence, uint8 ``[units, lane_count, unit_bytes]``.

    Buffers are made before a sequence gives anything up (``prepare``), so that a host without memory refuses the
    operation instead of losing the sequence.
    """

    def __init__(self, lanes: torch.Tensor, backend: Backend) -> None:
        self._backend = backend
        self._lane_count = lanes.shape[0]
        self._pinned = lanes.device.type == "cuda"
        self._device = "meta" if lanes.device.type == "meta" else "cpu"
        self._prepared: deque[torch.Tensor] = deque()
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that swapped sequences take."""
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), *self._prepared))

    def prepare(self, wanted: Iterable[tuple[str, int]]) -> list[torch.Tensor]:
        """Buffers for so many units of these pools; none for 0 units. Raises MemoryError or what torch raises."""
        return [self._buffer(pool, units) for pool, units in wanted if units]

    def expect(self, buffers: Iterable[torch.Tensor]) -> None:
        """The next ``swap_out`` launches fill these, in this order."""
        self._prepared.extend(buffers)

    def leave(self, launch: Launch) -> None:
        """Copies the units of a ``swap_out`` to the buffer made for it."""
        buffer = self._prepared.popleft()
        self._backend.gather(launch.pool, launch.sources, buffer)
        self._buffers[launch.pool, launch.swapped] = buffer

    def come_back(self, launch: Launch) -> None:
        """Copies the units of a ``swap_in`` from their buffer, which is gone afterwards."""
        buffer = self._buffers.pop((launch.pool, launch.swapped))
        self._backend.scatter(launch.pool, buffer, launch.destinations)

    def forget(self, alive: Container[int]) -> None:
        """Drops the buffers of sequences that are not swapped out any more."""
        for key in [key for key in self._buffers if key[1] not in alive]:
            del self._buffers[key]

    def _buffer(self, pool: str, units: int) -> torch.Tensor:
        shape = (units, self._lane_count, self._backend.units[pool].shape[2])
        return torch.empty(shape, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
