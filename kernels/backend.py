"""Every effect on an arena by Triton kernels: one launch each, on the current stream of the arena's device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.kernels.launch import require_runnable
from avmp.kernels.reference import POISON_BYTE, chunks, require_ids, unit_view
from avmp.kernels.tables import apply_table_changes
from avmp.kernels.units import copy_units, fill_units, gather_units, scatter_units

Ids = NDArray[np.int64]


class TritonBackend:
    """The methods of ``TorchBackend``, to the same bytes; see there. Raises InvalidArgument for a device that Triton
    does not run on, and, before anything is launched, for ids outside the pool."""

    name = "triton"

    def __init__(self, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> None:
        require_runnable(lanes)
        self.device = lanes.device
        self.units = {pool: unit_view(lanes, size) for pool, size in unit_bytes.items() if size}
        self._lanes, self._unit_bytes = lanes, unit_bytes

    def move(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """Units ``sources`` come to lie at ``destinations``; what stays behind is undefined."""
        self.copy(pool, sources, destinations)

    def copy(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """The bytes of units ``sources`` are written to units ``destinations`` too."""
        ids = self._upload(pool, sources, destinations)
        copy_units(self._lanes, self._unit_bytes[pool], ids[0], ids[1])

    def zero(self, pool: str, destinations: Ids) -> None:
        """Units become zero."""
        fill_units(self._lanes, self._unit_bytes[pool], self._upload(pool, destinations)[0], 0)

    def poison(self, pool: str, destinations: Ids) -> None:
        """Units are filled with NaN patterns."""
        fill_units(self._lanes, self._unit_bytes[pool], self._upload(pool, destinations)[0], POISON_BYTE)

    def gather(self, pool: str, sources: Ids, out: torch.Tensor) -> None:
        """Units to ``out``, uint8 ``[len(sources), lane_count, unit_bytes]``, contiguous, on any device.

        For host memory units are packed on the device first, so that the copy engine gets whole runs; the copy is
        asynchronous where ``out`` is pinned.
        """
        ids = self._upload(pool, sources)[0]
        if out.device == self.device:
            gather_units(self._lanes, self._unit_bytes[pool], ids, out)
            return
        for part in chunks(self.units[pool], len(sources)):
            staging = torch.empty(out[part].shape, dtype=torch.uint8, device=self.device)
            gather_units(self._lanes, self._unit_bytes[pool], ids[part], staging)
            out[part].copy_(staging, non_blocking=True)

    def scatter(self, pool: str, source: torch.Tensor, destinations: Ids) -> None:
        """The inverse of ``gather``."""
        ids = self._upload(pool, destinations)[0]
        for part in chunks(self.units[pool], len(destinations)):
            staging = source[part].to(self.device, non_blocking=True)
            scatter_units(self._lanes, self._unit_bytes[pool], staging, ids[part])

    def apply_table_changes(self, tables: torch.Tensor, changes: torch.Tensor) -> None:
        """``tables[changes[0]] = changes[1]``: tables int32 ``[words]``, changes int32 ``[2, count]`` on its device;
        indices are distinct."""
        apply_table_changes(tables, changes)

    def _upload(self, pool: str, *ids: Ids) -> torch.Tensor:
        """int32 ``[len(ids), count]`` on the device.

        Copied out of pinned memory that nobody else knows: torch's host allocator reuses it only once the copy out of
        it has finished, so that the caller may change its arrays at once.
        """
        require_ids(self.units[pool], *ids)
        staging = torch.empty((len(ids), len(ids[0])), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        staged = staging.numpy()
        for row, one in enumerate(ids):
            staged[row] = one
        return staging.to(self.device, non_blocking=True)
