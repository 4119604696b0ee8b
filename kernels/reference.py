"""Every effect on an arena in plain torch: the specification of the kernels, and the backend where they do not run.

Unit ids are physical, int64 on the host. A pool's units are ``[lane_count, units, unit_bytes]``, uint8, a strided view
of the arena: unit u of every lane belongs together and is moved together. The view is not contiguous where the unit
does not divide the lane, so it must never be handed whole to a function that makes its input contiguous first: that
would copy the arena. Within one call no unit written is read or written for another (the caller's launches see to
that), so units may be taken in any order.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.errors import InvalidArgument

POISON_BYTE = 0xFF
"""Fills freed units: NaN in float64, float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 alike."""

ROW_LOOP_BYTES = 16 * 1024
"""On a CPU, units of at least this size are copied one by one: a row loop runs at the speed of memcpy from here on,
below it the fixed cost of each assignment counts. ``P[dst] = P[src]`` is 3 to 9 times slower at either size."""

STAGING_BYTES = 64 * 2**20
"""The most that a copy through a temporary holds at a time: no second copy of an arena is ever made."""


class TorchBackend:
    """One method per kind of effect and one for tables, for the two pools of one arena.

    ``lanes`` is uint8 ``[lane_count, lane_bytes]`` on any device; ``unit_bytes`` gives each pool's bytes per unit and
    lane, 0 for a pool that does not exist. Pools overlap: both views span the whole lane. Every method raises
    InvalidArgument for ids outside the pool, before it writes anything.
    """

    name = "torch"

    def __init__(self, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> None:
        self.device = lanes.device
        self.units = {pool: unit_view(lanes, size) for pool, size in unit_bytes.items() if size}
        on_cpu = self.device.type == "cpu"
        self._arrays = {pool: units.numpy() for pool, units in self.units.items()} if on_cpu else {}

    def move(self, pool: str, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Units ``sources`` come to lie at ``destinations``; what stays behind is undefined."""
        self.copy(pool, sources, destinations)

    def copy(self, pool: str, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """The bytes of units ``sources`` are written to units ``destinations`` too."""
        require_ids(self.units[pool], sources, destinations)
        array = self._arrays.get(pool)
        if array is not None:
            for lane in array:  # one lane, so that rows are contiguous: of anything else numpy makes a temporary copy
                self._copy_rows(lane, sources, destinations)
            return
        units = self.units[pool]
        for part in chunks(self.units[pool], len(sources)):
            units.index_copy_(1, self._ids(destinations[part]), units.index_select(1, self._ids(sources[part])))

    def _copy_rows(self, rows: NDArray[np.uint8], sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """One lane on a CPU, uint8 ``[units, unit_bytes]``."""
        if rows.shape[1] >= ROW_LOOP_BYTES:
            for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
                rows[destination] = rows[source]
            return
        step = max(STAGING_BYTES // rows.shape[1], 1)
        for begin in range(0, len(sources), step):
            part = slice(begin, begin + step)
            rows[destinations[part]] = np.take(rows, sources[part], axis=0)

    def zero(self, pool: str, destinations: NDArray[np.int64]) -> None:
        """Units become zero."""
        self._fill(pool, destinations, 0)

    def poison(self, pool: str, destinations: NDArray[np.int64]) -> None:
        """Units are filled with NaN patterns."""
        self._fill(pool, destinations, POISON_BYTE)

    def gather(self, pool: str, sources: NDArray[np.int64], out: torch.Tensor) -> None:
        """Units to ``out``, uint8 ``[len(sources), lane_count, unit_bytes]``, contiguous, on any device."""
        require_ids(self.units[pool], sources)
        if out.device.type == "cpu" and pool in self._arrays:
            array, target = self._arrays[pool], out.numpy()
            for position, source in enumerate(sources.tolist()):
                target[position] = array[:, source]
            return
        for part in chunks(self.units[pool], len(sources)):
            units = self.units[pool].index_select(1, self._ids(sources[part])).transpose(0, 1).contiguous()
            out[part].copy_(units, non_blocking=True)

    def scatter(self, pool: str, source: torch.Tensor, destinations: NDArray[np.int64]) -> None:
        """The inverse of ``gather``."""
        require_ids(self.units[pool], destinations)
        if source.device.type == "cpu" and pool in self._arrays:
            array, stored = self._arrays[pool], source.numpy()
            for position, destination in enumerate(destinations.tolist()):
                array[:, destination] = stored[position]
            return
        for part in chunks(self.units[pool], len(destinations)):
            units = source[part].to(self.device, non_blocking=True).transpose(0, 1)
            self.units[pool].index_copy_(1, self._ids(destinations[part]), units)

    def apply_table_changes(self, tables: torch.Tensor, changes: torch.Tensor) -> None:
        """``tables[changes[0]] = changes[1]``: tables int32 ``[words]``, changes int32 ``[2, count]`` on its device;
        indices are distinct."""
        tables[changes[0].long()] = changes[1]

    def _fill(self, pool: str, destinations: NDArray[np.int64], value: int) -> None:
        require_ids(self.units[pool], destinations)
        array = self._arrays.get(pool)
        if array is None:
            self.units[pool].index_fill_(1, self._ids(destinations), value)
            return
        for destination in destinations.tolist():
            array[:, destination] = value

    def _ids(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """On the device, without waiting for it: pageable memory would be copied while the host stands still."""
        host = torch.from_numpy(np.ascontiguousarray(ids))
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host.to(self.device)


def require_ids(units: torch.Tensor, *ids: NDArray[np.int64]) -> None:
    """Raises InvalidArgument unless all of ``ids`` are equally many and name units of ``units``, ``[lanes, units,
    bytes]``."""
    if len({len(one) for one in ids}) != 1:
        raise InvalidArgument(f"{' and '.join(str(len(one)) for one in ids)} ids: expected equally many")
    count = units.shape[1]
    for one in ids:
        if len(one) and not 0 <= int(one.min()) <= int(one.max()) < count:
            raise InvalidArgument(f"unit ids {one.min()} to {one.max()}: the pool has 0 to {count - 1}")


def chunks(units: torch.Tensor, count: int) -> list[slice]:
    """``count`` units of ``units``, ``[lanes, units, bytes]``, in parts that fit into STAGING_BYTES, one at least."""
    lanes, _, unit_bytes = units.shape
    step = max(STAGING_BYTES // (lanes * unit_bytes), 1)
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def unit_view(lanes: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """uint8 ``[lane_count, lane_bytes // unit_bytes, unit_bytes]`` of lanes uint8 ``[lane_count, lane_bytes]``."""
    lane_count, lane_bytes = lanes.shape
    shape = (lane_count, lane_bytes // unit_bytes, unit_bytes)
    return lanes.as_strided(shape, (lanes.stride(0), unit_bytes, 1), lanes.storage_offset())
