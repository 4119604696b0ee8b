"""Units of an arena copied, filled, gathered and scattered: the bytes of migrations, forks, snapshots and swaps.

An arena is uint8 ``[lanes, lane_bytes]``; unit u of a pool is the bytes ``[u * unit_bytes, (u + 1) * unit_bytes)`` of
every lane. All of them are multiples of 16 bytes here (of 256 in a layout's arena), and so is every address: words are
int32, and offsets are counted in 16-byte vectors until the last moment, from which the compiler knows that it may use
128-bit accesses. One launch takes all units, lanes and parts.

Work is cut into tiles of ROWS units by WORDS words of one lane; programs on axis 0 walk over them. Ids are read once
per tile and widened to int64 before they are multiplied. An id below ``first_valid_id`` is null: nothing is read or
written for its pair, but that gathering writes zeros for it. The same holds for ids beyond the pool, so that no id
reaches another's memory.

Floor: every byte is read once and written once (filling: written once), no arithmetic but addresses; 8 bytes of ids per
unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import tuning
from avmp.kernels.launch import GRID_X_LIMIT, INTERPRETED, cdiv, device_guard, multiprocessors

VECTOR_BYTES = 16
WORD_BYTES = 4

_COUNTS = ["count", "lanes", "columns", "items", "unit_vectors", "first_valid_id"]


@triton.jit
def word_offset(ids, lane, unit_stride, lane_stride):
    """Offset in words, int64, of the units ``ids`` in a lane; strides are in vectors of 16 bytes."""
    return (ids.to(tl.int64) * unit_stride + lane.to(tl.int64) * lane_stride) * 4


@triton.jit
def _ids_of(ids, rows, count, first_valid_id, limit):
    """The ids at these rows and which of them are valid; without a table of ids, the rows themselves."""
    valid = rows < count
    if ids is None:
        found = rows
    else:
        found = tl.load(ids + rows, mask=valid, other=-1)
        valid = valid & (found >= first_valid_id) & (found < limit)
    return found, valid


@triton.jit(
    do_not_specialize=[
        *_COUNTS,
        *("source_unit", "source_lane", "source_limit"),
        *("destination_unit", "destination_lane", "destination_limit"),
    ],
    do_not_specialize_on_alignment=["source_ids", "destination_ids"],
)
def copy_units_kernel(
    source,
    destination,
    source_ids,
    destination_ids,
    count,
    lanes,
    columns,
    items,
    unit_vectors,
    source_unit,
    source_lane,
    source_limit,
    destination_unit,
    destination_lane,
    destination_limit,
    first_valid_id,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies, gathers (no destination ids) and scatters (no source ids)."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        rows = item // (lanes * columns) * ROWS + tl.arange(0, ROWS)
        lane = item // columns % lanes
        inside = item % columns * WORDS + tl.arange(0, WORDS)
        from_ids, from_valid = _ids_of(source_ids, rows, count, first_valid_id, source_limit)
        to_ids, to_valid = _ids_of(destination_ids, rows, count, first_valid_id, destination_limit)
        if destination_ids is not None:
            to_valid = to_valid & from_valid
        in_unit = inside[None, :] < unit_vectors * 4
        from_words = word_offset(from_ids, lane, source_unit, source_lane)[:, None] + inside[None, :]
        to_words = word_offset(to_ids, lane, destination_unit, destination_lane)[:, None] + inside[None, :]
        values = tl.load(source + from_words, mask=from_valid[:, None] & in_unit, other=0)
        tl.store(destination + to_words, values, mask=to_valid[:, None] & in_unit)


@triton.jit(
    do_not_specialize=[*_COUNTS, "unit", "lane_stride", "limit", "word"],
    do_not_specialize_on_alignment=["ids"],
)
def fill_units_kernel(
    arena,
    ids,
    count,
    lanes,
    columns,
    items,
    unit_vectors,
    lane_stride,
    limit,
    first_valid_id,
    word,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Writes one word all over the units."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        rows = item // (lanes * columns) * ROWS + tl.arange(0, ROWS)
        lane = item // columns % lanes
        inside = item % columns * WORDS + tl.arange(0, WORDS)
        found, valid = _ids_of(ids, rows, count, first_valid_id, limit)
        words = word_offset(found, lane, unit_vectors, lane_stride)[:, None] + inside[None, :]
        values = tl.zeros([ROWS, WORDS], tl.int32) + word
        tl.store(arena + words, values, mask=valid[:, None] & (inside[None, :] < unit_vectors * 4))


def copy_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    first_valid_id: int = 0,
) -> None:
    """Units ``sources`` of the arena are written to units ``destinations`` too; this also is how units move.

    ``lanes`` uint8 ``[lanes, lane_bytes]``; ids int32 or int64 ``[count]``, on its device. No unit written is read or
    written for another pair; one may be read for many. Raises InvalidArgument.
    """
    arena = _arena_side(lanes, unit_bytes)
    _copy(arena._replace(ids=_ids(sources)), arena._replace(ids=_ids(destinations)), unit_bytes, first_valid_id)


def gather_units(
    lanes: torch.Tensor, unit_bytes: int, sources: torch.Tensor, out: torch.Tensor, *, first_valid_id: int = 0
) -> None:
    """Units ``sources`` to ``out``, uint8 ``[count, lanes, unit_bytes]``, contiguous, on the arena's device.

    Every element of ``out`` is written: zeros for a null id. Otherwise as ``copy_units``.
    """
    arena = _arena_side(lanes, unit_bytes)._replace(ids=_ids(sources))
    _copy(arena, _packed_side(out, len(sources), len(lanes), unit_bytes), unit_bytes, first_valid_id)


def scatter_units(
    lanes: torch.Tensor, unit_bytes: int, source: torch.Tensor, destinations: torch.Tensor, *, first_valid_id: int = 0
) -> None:
    """The inverse of ``gather_units``; nothing is written for a null id."""
    arena = _arena_side(lanes, unit_bytes)._replace(ids=_ids(destinations))
    _copy(_packed_side(source, len(destinations), len(lanes), unit_bytes), arena, unit_bytes, first_valid_id)


def fill_units(
    lanes: torch.Tensor, unit_bytes: int, destinations: torch.Tensor, byte: int, *, first_valid_id: int = 0
) -> None:
    """Every byte of units ``destinations``, ids as in ``copy_units``, becomes ``byte``, 0 to 255."""
    side = _arena_side(lanes, unit_bytes)._replace(ids=_ids(destinations))
    word = int.from_bytes(bytes([byte] * WORD_BYTES), "little", signed=True)
    shape = _shape(len(destinations), len(lanes), unit_bytes)
    if not shape.items:
        return
    with device_guard(lanes):
        fill_units_kernel[(_programs(lanes, shape.items),)](
            side.words,
            side.ids,
            len(destinations),
            len(lanes),
            shape.columns,
            shape.items,
            side.unit,
            side.lane,
            side.limit,
            first_valid_id,
            word,
            ROWS=shape.rows,
            WORDS=shape.words,
            num_warps=_bulk().warps,
        )


class _Side(NamedTuple):
    """Where units come from or go to: int32 words, ids or None for 0, 1, 2, …, strides in vectors, and the number of
    units that there are."""

    words: torch.Tensor
    ids: torch.Tensor | None
    unit: int
    lane: int
    limit: int
    lanes: int


class _Shape(NamedTuple):
    """A tile is ``rows`` units by ``words`` words; ``columns`` of them cover a unit, ``items`` everything."""

    rows: int
    words: int
    columns: int
    items: int


def _copy(source: _Side, destination: _Side, unit_bytes: int, first_valid_id: int) -> None:
    sizes = {len(side.ids) for side in (source, destination) if side.ids is not None}
    if len(sizes) != 1:
        raise InvalidArgument(f"{' and '.join(map(str, sorted(sizes)))} ids: expected as many sources as destinations")
    count = sizes.pop()
    shape = _shape(count, source.lanes, unit_bytes)
    if not shape.items:
        return
    with device_guard(source.words):
        copy_units_kernel[(_programs(source.words, shape.items),)](
            source.words,
            destination.words,
            source.ids,
            destination.ids,
            count,
            source.lanes,
            shape.columns,
            shape.items,
            unit_bytes // VECTOR_BYTES,
            source.unit,
            source.lane,
            source.limit,
            destination.unit,
            destination.lane,
            destination.limit,
            first_valid_id,
            ROWS=shape.rows,
            WORDS=shape.words,
            num_warps=_bulk().warps,
        )


def _bulk() -> tuning.Bulk:
    return tuning.BULK_INTERPRETED if INTERPRETED else tuning.BULK


def _shape(count: int, lanes: int, unit_bytes: int) -> _Shape:
    tile = _bulk().tile_bytes
    piece = tuning.piece_bytes(unit_bytes, tile)
    rows, columns = tile // piece, cdiv(unit_bytes, piece)
    items = cdiv(count, rows) * lanes * columns
    if items > GRID_X_LIMIT // 2:  # half: the last step of a program must not wrap either
        raise InvalidArgument(f"{count} units of {lanes} x {unit_bytes} bytes: too many bytes for one launch")
    return _Shape(rows, piece // WORD_BYTES, columns, items)


def _programs(tensor: torch.Tensor, items: int) -> int:
    return min(items, _bulk().programs * multiprocessors(tensor))


def _arena_side(lanes: torch.Tensor, unit_bytes: int) -> _Side:
    if lanes.dtype != torch.uint8 or lanes.dim() != 2 or lanes.stride(1) != 1:
        raise InvalidArgument(f"lanes {lanes.dtype} {tuple(lanes.shape)}: expected uint8 [lanes, lane_bytes], dense")
    _require_vectors(lanes.data_ptr(), unit_bytes, lanes.stride(0), lanes.shape[1])
    unit, lane = unit_bytes // VECTOR_BYTES, lanes.stride(0) // VECTOR_BYTES
    return _Side(lanes.view(torch.int32), None, unit, lane, lanes.shape[1] // unit_bytes, len(lanes))


def _packed_side(packed: torch.Tensor, count: int, lanes: int, unit_bytes: int) -> _Side:
    if packed.dtype != torch.uint8 or packed.shape != (count, lanes, unit_bytes) or not packed.is_contiguous():
        raise InvalidArgument(
            f"{packed.dtype} {tuple(packed.shape)}: expected uint8 {(count, lanes, unit_bytes)}, contiguous"
        )
    _require_vectors(packed.data_ptr(), unit_bytes)
    unit = unit_bytes // VECTOR_BYTES
    return _Side(packed.view(torch.int32), None, lanes * unit, unit, count, lanes)


def _require_vectors(*numbers: int) -> None:
    if any(number % VECTOR_BYTES for number in numbers):
        raise InvalidArgument(f"addresses and sizes {numbers}: expected multiples of {VECTOR_BYTES} bytes")


def _ids(ids: torch.Tensor) -> torch.Tensor:
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or (len(ids) > 1 and ids.stride(0) != 1):
        raise InvalidArgument(f"ids {ids.dtype} {tuple(ids.shape)}: expected int32 or int64 [count], dense")
    return ids
