"""Units of an arena copied, filled, gathered and scattered: the bytes of migrations, forks, snapshots and swaps.

``units_reference.py`` says what each function does; here one launch takes all units, lanes and parts. All sizes are
multiples of 16 bytes (of 256 in a layout's arena), and so is every address: words are int32, and offsets are counted in
16-byte vectors until the last moment, from which the compiler knows that it may use 128-bit accesses.

Work is cut into tiles of ROWS units by WORDS words of one lane; programs on axis 0 walk over them. Ids are read once
per tile, tested before and after they are translated, and widened to int64 before they are multiplied: an id that is
null or beyond the pool reaches no memory. Where the device knows how many pairs there are, the launch is that of the
whole list, and programs that find nothing to do end at once.

Floor: every byte is read once and written once (filling: written once), no arithmetic but addresses; 8 bytes of ids per
unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import staging, tuning
from avmp.kernels.launch import GRID_X_LIMIT, INTERPRETED, cdiv, device_guard, multiprocessors, require_runnable
from avmp.kernels.unit_arguments import (
    POISON_BYTE,
    VECTOR_BYTES,
    check_ids,
    check_lanes,
    check_moves,
    check_packed_beside,
    check_pairs,
)

WORD_BYTES = 4

_COUNTS = ["count", "lanes", "columns", "items", "unit_vectors", "first_valid_id", "table_limit"]


@triton.jit
def word_offset(ids, lane, unit_stride, lane_stride):
    """Offset in words, int64, of the units ``ids`` in a lane; strides are in vectors of 16 bytes."""
    return (ids.to(tl.int64) * unit_stride + lane.to(tl.int64) * lane_stride) * 4


@triton.jit
def _ids_of(ids, rows, count, page_table, table_limit, first_valid_id, limit):
    """The physical ids at these rows and which of them are valid; without a list of ids, the rows themselves."""
    valid = rows < count
    if ids is None:
        found = rows
    else:
        found = tl.load(ids + rows, mask=valid, other=-1)
        valid = valid & (found >= first_valid_id)
        if page_table is not None:
            valid = valid & (found < table_limit)
            found = tl.load(page_table + found, mask=valid, other=-1)
            valid = valid & (found >= first_valid_id)
        valid = valid & (found < limit)
    return found, valid


@triton.jit(
    do_not_specialize=[
        *_COUNTS,
        *("source_unit", "source_lane", "source_limit"),
        *("destination_unit", "destination_lane", "destination_limit"),
    ],
    do_not_specialize_on_alignment=["source_ids", "destination_ids", "page_table", "device_count"],
)
def copy_units_kernel(
    source,
    destination,
    source_ids,
    destination_ids,
    page_table,
    device_count,
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
    table_limit,
    first_valid_id,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies, moves, gathers (no destination ids) and scatters (no source ids)."""
    if device_count is not None:
        count = tl.maximum(tl.minimum(count, tl.load(device_count)), 0)
        items = tl.cdiv(count, ROWS) * lanes * columns
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        rows = item // (lanes * columns) * ROWS + tl.arange(0, ROWS)
        lane = item // columns % lanes
        inside = item % columns * WORDS + tl.arange(0, WORDS)
        from_ids, from_valid = _ids_of(source_ids, rows, count, page_table, table_limit, first_valid_id, source_limit)
        to_ids, to_valid = _ids_of(
            destination_ids, rows, count, page_table, table_limit, first_valid_id, destination_limit
        )
        if destination_ids is not None:
            to_valid = to_valid & from_valid
        in_unit = inside[None, :] < unit_vectors * 4
        from_words = word_offset(from_ids, lane, source_unit, source_lane)[:, None] + inside[None, :]
        to_words = word_offset(to_ids, lane, destination_unit, destination_lane)[:, None] + inside[None, :]
        values = tl.load(source + from_words, mask=from_valid[:, None] & in_unit, other=0)
        tl.store(destination + to_words, values, mask=to_valid[:, None] & in_unit)


@triton.jit(
    do_not_specialize=[*_COUNTS, "unit", "lane_stride", "limit", "word"],
    do_not_specialize_on_alignment=["ids", "page_table"],
)
def fill_units_kernel(
    arena,
    ids,
    page_table,
    count,
    lanes,
    columns,
    items,
    unit_vectors,
    lane_stride,
    limit,
    table_limit,
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
        found, valid = _ids_of(ids, rows, count, page_table, table_limit, first_valid_id, limit)
        words = word_offset(found, lane, unit_vectors, lane_stride)[:, None] + inside[None, :]
        values = tl.zeros([ROWS, WORDS], tl.int32) + word
        tl.store(arena + words, values, mask=valid[:, None] & (inside[None, :] < unit_vectors * 4))


def copy_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.copy_units`` by Triton, in one launch on the current stream."""
    arena = _arena(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, sources, page_table)
    check_ids(lanes, destinations, page_table)
    check_pairs(sources, destinations)
    _copy(arena._replace(ids=sources), arena._replace(ids=destinations), unit_bytes, page_table, first_valid_id)


def migrate(
    lanes: torch.Tensor,
    unit_bytes: int,
    moves: torch.Tensor,
    *,
    count: int | None = None,
    device_count: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.migrate`` by Triton, in one launch on the current stream, which is the same whatever
    ``device_count`` holds: a captured graph stays valid."""
    arena = _arena(lanes, unit_bytes, first_valid_id)
    sources, destinations = check_moves(lanes, moves, count, device_count)
    source, destination = arena._replace(ids=sources), arena._replace(ids=destinations)
    _copy(source, destination, unit_bytes, None, first_valid_id, device_count)


def gather_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    out: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.gather_units`` by Triton, in one launch on the current stream."""
    arena = _arena(lanes, unit_bytes, first_valid_id)._replace(ids=sources)
    check_ids(lanes, sources, page_table)
    check_packed_beside(lanes, unit_bytes, out, len(sources))
    _copy(arena, _packed(out), unit_bytes, page_table, first_valid_id)


def scatter_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    source: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.scatter_units`` by Triton, in one launch on the current stream."""
    arena = _arena(lanes, unit_bytes, first_valid_id)._replace(ids=destinations)
    check_ids(lanes, destinations, page_table)
    check_packed_beside(lanes, unit_bytes, source, len(destinations))
    _copy(_packed(source), arena, unit_bytes, page_table, first_valid_id)


def swap_out(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    host: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.swap_out`` by Triton: for each part of ``staging.STAGING_BYTES`` one launch and one copy."""
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
    """``units_reference.swap_in`` by Triton: for each part of ``staging.STAGING_BYTES`` one copy and one launch."""
    rule = dict(page_table=page_table, first_valid_id=first_valid_id)
    staging.come_back(scatter_units, lanes, unit_bytes, host, destinations, **rule)


def zero_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.zero_units`` by Triton, in one launch on the current stream."""
    _fill(lanes, unit_bytes, destinations, 0, page_table, first_valid_id)


def poison_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
) -> None:
    """``units_reference.poison_units`` by Triton, in one launch on the current stream."""
    _fill(lanes, unit_bytes, destinations, POISON_BYTE, page_table, first_valid_id)


class _Side(NamedTuple):
    """Where units come from or go to: int32 words, ids or None for 0, 1, 2, …, strides in vectors, the number of
    units that there are, and of lanes."""

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


def _copy(
    source: _Side,
    destination: _Side,
    unit_bytes: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
    device_count: torch.Tensor | None = None,
) -> None:
    require_runnable(source.words)
    count = len(source.ids) if source.ids is not None else source.limit
    shape = _shape(count, source.lanes, unit_bytes)
    if not shape.items:
        return
    with device_guard(source.words):
        copy_units_kernel[(_programs(source.words, shape.items),)](
            source.words,
            destination.words,
            source.ids,
            destination.ids,
            page_table,
            device_count,
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
            0 if page_table is None else len(page_table),
            first_valid_id,
            ROWS=shape.rows,
            WORDS=shape.words,
            num_warps=_bulk().warps,
        )


def _fill(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    byte: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
) -> None:
    side = _arena(lanes, unit_bytes, first_valid_id)
    check_ids(lanes, destinations, page_table)
    require_runnable(lanes)
    shape = _shape(len(destinations), len(lanes), unit_bytes)
    if not shape.items:
        return
    with device_guard(lanes):
        fill_units_kernel[(_programs(lanes, shape.items),)](
            side.words,
            destinations,
            page_table,
            len(destinations),
            len(lanes),
            shape.columns,
            shape.items,
            side.unit,
            side.lane,
            side.limit,
            0 if page_table is None else len(page_table),
            first_valid_id,
            int.from_bytes(bytes([byte] * WORD_BYTES), "little", signed=True),
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


def _arena(lanes: torch.Tensor, unit_bytes: int, first_valid_id: int) -> _Side:
    limit = check_lanes(lanes, unit_bytes, first_valid_id)
    unit, lane = unit_bytes // VECTOR_BYTES, lanes.stride(0) // VECTOR_BYTES
    return _Side(lanes.view(torch.int32), None, unit, lane, limit, len(lanes))


def _packed(packed: torch.Tensor) -> _Side:
    count, lanes, unit_bytes = packed.shape
    unit = unit_bytes // VECTOR_BYTES
    return _Side(packed.view(torch.int32), None, lanes * unit, unit, count, lanes)
