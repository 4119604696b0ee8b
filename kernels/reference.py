"""Every effect of the policy on an arena, and changes of tables, by the operations on units in plain torch.

The policy knows its ids on the host; here they are checked, sent to the device, and given to the same functions that
anybody calls. Within one call no unit written is read or written for another (the caller's launches see to that), so
units may be taken in any order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.kernels import units_reference
from avmp.kernels.unit_arguments import unit_view

Ids = NDArray[np.int64]


class TorchBackend:
    """One method per kind of effect and one for tables, for the two pools of one arena.

    ``lanes`` is uint8 ``[lane_count, lane_bytes]`` on any device; ``unit_bytes`` gives each pool's bytes per unit and
    lane, 0 for a pool that does not exist. Pools overlap: both views span the whole lane. Unit ids are physical,
    int64 on the host, and may change as soon as a method has returned. Every method raises InvalidArgument for ids
    outside the pool, before it writes anything, and does its work in one launch on the current stream.
    """

    name = "torch"
    operations: ModuleType = units_reference

    def __init__(self, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> None:
        self.device = lanes.device
        self.units = {pool: unit_view(lanes, size) for pool, size in unit_bytes.items() if size}
        self._lanes, self._unit_bytes = lanes, unit_bytes

    def move(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """Units ``sources`` come to lie at ``destinations``; what stays behind is undefined."""
        self._call("migrate", pool, self._upload(pool, sources, destinations))

    def copy(self, pool: str, sources: Ids, destinations: Ids) -> None:
        """The bytes of units ``sources`` are written to units ``destinations`` too."""
        self._call("copy_units", pool, *self._upload(pool, sources, destinations))

    def zero(self, pool: str, destinations: Ids) -> None:
        """Units become zero."""
        self._call("zero_units", pool, *self._upload(pool, destinations))

    def poison(self, pool: str, destinations: Ids) -> None:
        """Units are filled with NaN patterns."""
        self._call("poison_units", pool, *self._upload(pool, destinations))

    def gather(self, pool: str, sources: Ids, out: torch.Tensor) -> None:
        """Units to ``out``, uint8 ``[len(sources), lane_count, unit_bytes]``, contiguous, on any device; asynchronous
        where ``out`` is pinned."""
        self._call("swap_out", pool, *self._upload(pool, sources), out)

    def scatter(self, pool: str, source: torch.Tensor, destinations: Ids) -> None:
        """The inverse of ``gather``."""
        self._call("swap_in", pool, source, *self._upload(pool, destinations))

    def apply_table_changes(self, tables: torch.Tensor, changes: torch.Tensor) -> None:
        """``tables[changes[0]] = changes[1]``: tables int32 ``[words]``, changes int32 ``[2, count]`` on its device;
        indices are distinct."""
        if tables.device.type != "meta":
            self.operations.apply_table_changes(tables, changes)

    def _call(self, operation: str, pool: str, *arguments: Any) -> None:
        if self.device.type != "meta":  # which has no bytes
            getattr(self.operations, operation)(self._lanes, self._unit_bytes[pool], *arguments)

    def _upload(self, pool: str, *ids: Ids) -> torch.Tensor:
        """int32 ``[len(ids), count]`` on the device, without waiting for it.

        Copied out of pinned memory that nobody else knows: torch's host allocator reuses it only once the copy out of
        it has finished, so that the caller may change its arrays at once.
        """
        require_ids(self.units[pool], *ids)
        staging = torch.empty((len(ids), len(ids[0])), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        staged = staging.numpy()
        for row, one in enumerate(ids):
            staged[row] = one
        return staging.to(self.device, non_blocking=True)


def require_ids(units: torch.Tensor, *ids: Ids) -> None:
    """Raises InvalidArgument unless all of ``ids`` are equally many and name units of ``units``, ``[lanes, units,
    bytes]``."""
    if len({len(one) for one in ids}) != 1:
        raise InvalidArgument(f"{' and '.join(str(len(one)) for one in ids)} ids: expected equally many")
    count = units.shape[1]
    for one in ids:
        if len(one) and not 0 <= int(one.min()) <= int(one.max()) < count:
            raise InvalidArgument(f"unit ids {one.min()} to {one.max()}: the pool has 0 to {count - 1}")
