"""Units of an arena copied, filled, gathered and scattered, and tables changed, in plain torch: the specification of
the Triton kernels, and what runs where they do not.

An arena is uint8 ``[lanes, lane_bytes]``; unit u of a pool is the bytes ``[u * unit_bytes, (u + 1) * unit_bytes)`` of
every lane: they belong together and are moved together. A pool's units are ``[lanes, units, unit_bytes]``, a strided
view of the arena, not contiguous where the unit does not divide the lane: it must never be handed whole to a function
that makes its input contiguous first, which would copy the arena.

Ids are int32 or int64 on the arena's device. Those below ``first_valid_id`` and those beyond the pool are null:
nothing is read or written for them. With a ``page_table`` (int32) ids are virtual, and null by the same rule before
and after translation.

On a CPU rows are copied by numpy, at the speed of memcpy. Elsewhere nothing waits for the device, so that null ids
cannot be left out: the first pair that is not null is carried out in their place, once more.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.kernels import staging
from avmp.kernels.unit_arguments import (
    POISON_BYTE,
    check_ids,
    check_lanes,
    check_moves,
    check_packed_beside,
    check_pairs,
    check_table_changes,
    unit_view,
)

ROW_LOOP_BYTES = 16 * 1024
"""On a CPU, units of at least this size are copied one by one: a row loop runs at the speed of memcpy from here on,
below it the fixed cost of each assignment counts. ``P[dst] = P[src]`` is 3 to 9 times slower at either size."""

NULL = -1
"""Stands for every null id once it has been found out."""

Array: TypeAlias = NDArray[Any]


def copy_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """Units ``sources`` of the arena are written to units ``destinations`` too.

    ``lanes`` uint8 ``[lanes, lane_bytes]``; ids int32 or int64 ``[count]``, on its device; nothing happens for a pair
    with a null id. No unit written is read or written for another pair; one may be read for many, and a unit may be
    copied onto itself. Sizes, strides and addresses are multiples of 16 bytes. Raises InvalidArgument for shapes,
    dtypes and devices.

    Floor: every byte is read once and written once, 8 bytes of ids per unit.
    """
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, sources, page_table)
    check_ids(lanes, destinations, page_table)
    check_pairs(sources, destinations)
    if not len(sources):
        return
    from_ids = _physical(sources, page_table, first_valid_id, limit)
    _copy(lanes, unit_bytes, from_ids, _physical(destinations, page_table, first_valid_id, limit))


def migrate(
    lanes: torch.Tensor,
    unit_bytes: int,
    moves: torch.Tensor,
    *,
    count: int | None = None,
    device_count: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """Units come to lie elsewhere: the first ``count`` columns of ``moves``, int32 or int64 ``[2, moves]`` on the
    arena's device, sources above destinations, physical ids. What stays behind is undefined.

    ``count`` defaults to all; ``device_count`` instead, int32 of one element on the arena's device, is read there when
    the work runs, and means at least none and at most all of them. Otherwise as ``copy_units``.
    """
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    sources, destinations = check_moves(lanes, moves, count, device_count)
    if not len(sources):
        return
    from_ids = _physical(sources, None, first_valid_id, limit)
    if device_count is not None:
        turns = torch.arange(len(sources), device=lanes.device)
        from_ids = torch.where(turns < device_count, from_ids, NULL)
    _copy(lanes, unit_bytes, from_ids, _physical(destinations, None, first_valid_id, limit))


def zero_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """Units ``destinations`` become zero; arguments as for ``copy_units``. Floor: every byte is written once."""
    _fill(lanes, unit_bytes, destinations, 0, page_table, first_valid_id)


def poison_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """Every byte of units ``destinations`` becomes POISON_BYTE, a NaN in every dtype; otherwise as ``zero_units``."""
    _fill(lanes, unit_bytes, destinations, POISON_BYTE, page_table, first_valid_id)


def gather_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    out: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """Units ``sources`` to ``out``, uint8 ``[count, lanes, unit_bytes]``, contiguous, on the arena's device.

    Every element of ``out`` is written: zeros for a null id. Otherwise as ``copy_units``.
    """
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, sources, page_table)
    check_packed_beside(lanes, unit_bytes, out, len(sources))
    if not len(sources):
        return
    ids, units = _physical(sources, page_table, first_valid_id, limit), unit_view(lanes, unit_bytes)
    if _on_host(lanes):
        pairs = _pairs(ids.numpy(), np.arange(len(ids)))
        packed = out.numpy()
        for lane, rows in enumerate(units.numpy()):
            _copy_rows(rows, packed[:, lane], *pairs)
        packed[ids.numpy() < 0] = 0
        return
    for part in staging.chunks(lanes, unit_bytes, len(ids)):
        gathered = units.index_select(1, ids[part].clamp(min=0))
        out[part].copy_(torch.where(ids[part, None] < 0, 0, gathered).transpose(0, 1))


def scatter_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    source: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """The inverse of ``gather_units``: packed units to their places; nothing is written for a null id."""
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, destinations, page_table)
    check_packed_beside(lanes, unit_bytes, source, len(destinations))
    if not len(destinations):
        return
    ids, units = _physical(destinations, page_table, first_valid_id, limit), unit_view(lanes, unit_bytes)
    if _on_host(lanes):
        pairs = _pairs(np.arange(len(ids)), ids.numpy())
        packed = source.numpy()
        for lane, rows in enumerate(units.numpy()):
            _copy_rows(packed[:, lane], rows, *pairs)
        return
    with _Nulls(ids >= 0, units[:, :1]) as nulls:
        places, ids = nulls.replaced(torch.arange(len(ids), device=ids.device)), nulls.replaced(ids)
        for part in staging.chunks(lanes, unit_bytes, len(ids)):
            units.index_copy_(1, ids[part], source.index_select(0, places[part]).transpose(0, 1))


def swap_out(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    host: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``gather_units`` to any memory: ``host`` is normally pinned host memory, and the copy to it asynchronous."""
    rule = dict(page_table=page_table, first_valid_id=first_valid_id)
    staging.leave(gather_units, lanes, unit_bytes, sources, host, **rule)


def swap_in(
    lanes: torch.Tensor,
    unit_bytes: int,
    host: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """The inverse of ``swap_out``, bit for bit; nothing is written for a null id."""
    rule = dict(page_table=page_table, first_valid_id=first_valid_id)
    staging.come_back(scatter_units, lanes, unit_bytes, host, destinations, **rule)


def apply_table_changes(tables: torch.Tensor, changes: torch.Tensor) -> None:
    """``tables[changes[0]] = changes[1]``: tables int32 ``[words]``, changes int32 ``[2, count]``, contiguous, on its
    device; indices are distinct, and those outside the table are left out. Raises InvalidArgument.

    Floor: 8 bytes read and 4 written per change.
    """
    check_table_changes(tables, changes)
    if not changes.numel() or not len(tables):
        return
    places, values = changes
    if _on_host(tables):
        table, at = tables.numpy(), places.numpy()
        inside = (at >= 0) & (at < len(table))
        table[at[inside]] = values.numpy()[inside]
        return
    with _Nulls((places >= 0) & (places < len(tables)), tables[:1]) as nulls:
        tables.index_copy_(0, nulls.replaced(places).long(), nulls.replaced(values))


def _physical(ids: torch.Tensor, page_table: torch.Tensor | None, first_valid_id: int, limit: int) -> torch.Tensor:
    """Physical ids, NULL for null ones, of virtual ids, or of physical ones where there is no table, in a pool of
    ``limit`` units."""
    if page_table is None and _on_host(ids):
        array = ids.numpy()  # a tenth of what the general way costs, which counts where a few units are moved
        if first_valid_id <= array.min() and array.max() < limit:
            return ids
    valid = ids >= first_valid_id
    if page_table is not None:
        valid &= ids < len(page_table)
        ids = page_table[torch.where(valid, ids, 0)]
        valid &= ids >= first_valid_id
    return torch.where(valid & (ids < limit), ids, NULL).long()


def _copy(lanes: torch.Tensor, unit_bytes: int, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    units = unit_view(lanes, unit_bytes)
    if _on_host(lanes):
        pairs = _pairs(sources.numpy(), destinations.numpy())
        for rows in units.numpy():
            _copy_rows(rows, rows, *pairs)
        return
    with _Nulls((sources >= 0) & (destinations >= 0), units[:, :1]) as nulls:
        sources, destinations = nulls.replaced(sources), nulls.replaced(destinations)
        for part in staging.chunks(lanes, unit_bytes, len(sources)):
            units.index_copy_(1, destinations[part], units.index_select(1, sources[part]))


def _fill(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    byte: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
) -> None:
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, destinations, page_table)
    if not len(destinations):
        return
    ids, units = _physical(destinations, page_table, first_valid_id, limit), unit_view(lanes, unit_bytes)
    if _on_host(lanes):
        array = units.numpy()
        for unit in ids.tolist():
            if unit >= 0:
                array[:, unit] = byte
        return
    with _Nulls(ids >= 0, units[:, :1]) as nulls:
        units.index_fill_(1, nulls.replaced(ids), byte)


# -- on a CPU --------------------------------------------------------------------------------------------------------


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pairs(from_ids: Array, to_ids: Array) -> tuple[Array, Array]:
    """Those of which neither is null."""
    kept = (from_ids >= 0) & (to_ids >= 0)
    return (from_ids, to_ids) if kept.all() else (from_ids[kept], to_ids[kept])


def _copy_rows(source: Array, target: Array, from_ids: Array, to_ids: Array) -> None:
    """One lane, rows uint8 ``[units, unit_bytes]``: ``target[to_ids] = source[from_ids]``."""
    unit_bytes = source.shape[1]
    if len(from_ids) == 0:
        return
    if unit_bytes >= ROW_LOOP_BYTES:
        (bytes_from, from_step), (bytes_to, to_step) = _flat(source), _flat(target)
        begins = (from_ids.astype(np.int64) * from_step).tolist(), (to_ids.astype(np.int64) * to_step).tolist()
        for begin, target_begin in zip(*begins, strict=True):
            bytes_to[target_begin : target_begin + unit_bytes] = bytes_from[begin : begin + unit_bytes]
        return
    step = max(staging.STAGING_BYTES // unit_bytes, 1)
    for begin in range(0, len(from_ids), step):
        part = slice(begin, begin + step)
        # np.take is the fastest, but makes an array contiguous first: a copy of it all, if it is not.
        rows = np.take(source, from_ids[part], axis=0) if source.flags.c_contiguous else source[from_ids[part]]
        target[to_ids[part]] = rows


def _flat(rows: Array) -> tuple[memoryview, int]:
    """All bytes from the first row to the last, and how far rows lie apart. Slices of a memoryview are copied by one
    memmove, with half the fixed cost of an assignment to a row of an array."""
    step = rows.strides[0]
    length = (len(rows) - 1) * step + rows.shape[1]
    return memoryview(np.lib.stride_tricks.as_strided(rows, (length,), (1,))), step


# -- on any other device ---------------------------------------------------------------------------------------------


class _Nulls:
    """Stands in for null entries with the first one that is ``valid``; where none is, with place 0, whose content is
    put back at the end."""

    def __init__(self, valid: torch.Tensor, place: torch.Tensor) -> None:
        self._valid, self._place, self._kept = valid, place, place.clone()
        self._first = valid.to(torch.uint8).argmax().view(1)

    def __enter__(self) -> _Nulls:
        return self

    def replaced(self, entries: torch.Tensor) -> torch.Tensor:
        """As ``entries``, all of them valid."""
        clean = torch.where(self._valid, entries, 0)
        return torch.where(self._valid, clean, clean.index_select(0, self._first))

    def __exit__(self, *failure: object) -> None:
        self._place.copy_(torch.where(self._valid.any(), self._place, self._kept))
