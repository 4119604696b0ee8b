"""The first bad id of a table, in Triton; see ``bounds_reference.py`` for what is bad.

Programs on axis 0 walk over the places of all rows, one place behind each row included, and each leaves the least bad
place that it has met: the least of these is the same in any order of programs. Nothing is counted, no atomics.

Floor: each id that a length makes valid is read once, 4 bytes, and 4 more of its entry in a page or slot table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.kernels import tuning
from avmp.kernels.bounds_reference import NOTHING_FOUND, check_bounds
from avmp.kernels.launch import INTERPRETED, cdiv, device_guard, require_runnable

_NOTHING_FOUND = tl.constexpr(NOTHING_FOUND)


@triton.jit(
    do_not_specialize=["rows", "width", "row_stride", "table_limit", "divisor", "first_valid_id", "low", "high"],
    do_not_specialize_on_alignment=["ids", "begins", "ends", "page_table"],
)
def first_bad_id_kernel(
    ids, begins, ends, page_table, least, rows, width, row_stride, table_limit, divisor, first_valid_id, low, high,
    NULL_IS_BAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: programs that share all places; ``least`` int64 ``[programs]``."""
    total = rows.to(tl.int64) * (width + 1)
    best = tl.full([BLOCK], _NOTHING_FOUND, tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, total, step):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = place < total
        row, column = place // (width + 1), place % (width + 1)
        begin = tl.zeros([BLOCK], tl.int64)
        end = begin + width
        if begins is not None:
            begin = tl.load(begins + row, mask=inside, other=0)
        if ends is not None:
            end = tl.load(ends + row, mask=inside, other=0)
        looked_at = inside & (column >= begin) & (column < end) & (column < width)
        value = tl.load(ids + row * row_stride + column, mask=looked_at, other=0).to(tl.int64)
        found = looked_at & (value >= first_valid_id.to(tl.int64) * divisor)
        number = tl.where(found, value, 0) // divisor
        bad = inside & (end > begin) & (((column == 0) & (begin < 0)) | ((column == width) & (end > width)))
        if NULL_IS_BAD:
            bad = bad | (looked_at & (value < first_valid_id.to(tl.int64) * divisor))
        if page_table is not None:
            bad = bad | (found & (number >= table_limit))
            found = found & (number < table_limit)
            number = tl.load(page_table + number, mask=found, other=0).to(tl.int64)
            bad = bad | (found & (number < first_valid_id))
        bad = bad | (found & ((number < low) | (number >= high)))
        best = tl.minimum(best, tl.where(bad, place, _NOTHING_FOUND))
    tl.store(least + tl.program_id(0), tl.min(best, 0))


def first_bad_id(
    ids: torch.Tensor,
    *,
    low: int,
    high: int,
    begins: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    divisor: int = 1,
    first_valid_id: int = 1,
    null_is_bad: bool = False,
) -> int:
    """``bounds_reference.first_bad_id`` by Triton, in one launch on the current stream; waits for its answer."""
    check_bounds(ids, begins, ends, page_table, divisor)
    require_runnable(ids)
    rows, width = ids.shape
    places = rows * (width + 1)
    if not places:
        return NOTHING_FOUND
    block = tuning.BOUNDS_BLOCK_INTERPRETED if INTERPRETED else tuning.BOUNDS_BLOCK
    programs = min(cdiv(places, block), tuning.BOUNDS_PROGRAMS)
    least = torch.empty(programs, dtype=torch.int64, device=ids.device)
    with device_guard(ids):
        first_bad_id_kernel[(programs,)](
            ids,
            begins,
            ends,
            page_table,
            least,
            rows,
            width,
            ids.stride(0),
            0 if page_table is None else len(page_table),
            divisor,
            first_valid_id,
            low,
            high,
            NULL_IS_BAD=null_is_bad,
            BLOCK=block,
            num_warps=tuning.BOUNDS_WARPS,
        )
    return int(least.min())
