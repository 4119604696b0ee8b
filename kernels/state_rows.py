"""What the kernels of the state operations share: which tokens are a row's, and which slot an id names."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from avmp.kernels.state_arguments import Rows

COUNTS = ["rows", "tokens", "most", "first_valid_id", "table_limit", "slots", "source_row", "target_row"]
"""Arguments by whose value nothing is compiled anew."""
TABLES = ["sources", "targets", "slot_table", "accepted", "query_start_loc", "has_initial_state"]
"""Arguments by whose alignment nothing is compiled anew."""

MOST_ALIGNMENT = 16


@triton.jit
def row_tokens(query_start_loc, row, most, tokens, SINGLE: tl.constexpr):
    """First token (int64) and number of tokens of a row: of those that there are, and no more than ``most`` (0:
    unknown; SINGLE: the kernel takes one, if there is one), whatever the table holds."""
    if query_start_loc is not None:
        begin = tl.load(query_start_loc + row)
        end = tl.minimum(tl.load(query_start_loc + row + 1), tokens)
        count = tl.where(begin < 0, 0, end - begin)
        if not SINGLE:
            count = tl.where(most > 0, tl.minimum(count, most), count)
        begin = begin.to(tl.int64)
    else:
        begin = row.to(tl.int64) * most
        count = most
    return begin, count


@triton.jit
def first_unowned(query_start_loc, rows, most):
    """The first token behind those of all rows, int64."""
    if query_start_loc is not None:
        first = tl.maximum(tl.load(query_start_loc + rows), 0).to(tl.int64)
    else:
        first = rows.to(tl.int64) * most
    return first


@triton.jit
def slot_of(ids, place, slot_table, first_valid_id, table_limit, slots):
    """The physical slot (int64) that ``ids[place]`` names, and whether it is one."""
    slot = tl.load(ids + place).to(tl.int64)
    valid = slot >= first_valid_id
    if slot_table is not None:
        valid = valid & (slot < table_limit)
        slot = tl.load(slot_table + slot, mask=valid, other=-1).to(tl.int64)
        valid = valid & (slot >= first_valid_id)
    return slot, valid & (slot < slots)


@triton.jit
def source_slot(
    sources, accepted, slot_table, row, source_row, COLUMNS: tl.constexpr, first_valid_id, table_limit, slots
):
    """The slot that a row starts from, and whether there is one: that of its latest accepted token, of several."""
    if sources is not None:
        place = row.to(tl.int64) * source_row
        if COLUMNS > 1 and accepted is not None:
            place += accepted_before(accepted, row, COLUMNS)
        slot, valid = slot_of(sources, place, slot_table, first_valid_id, table_limit, slots)
    else:
        slot, valid = row.to(tl.int64), row < slots
    return slot, valid


@triton.jit
def accepted_before(accepted, row, limit):
    """Accepted tokens of the row's previous step, less one: 0 to ``limit - 1``, whatever the table holds."""
    return tl.minimum(tl.maximum(tl.load(accepted + row).to(tl.int32), 1), limit) - 1


@triton.jit
def zero_tokens(out, first, end, every, token_stride, mask, SIZE: tl.constexpr):
    """Zeros for each ``every``-th token from ``first`` to ``end``, where ``out`` points for token 0."""
    for token in range(first, end, every):
        place = out + tl.cast(token, tl.int64) * token_stride
        tl.store(place, tl.zeros([SIZE], out.dtype.element_ty), mask=mask)


def row_arguments(
    rows: Rows,
    slots: int,
    state_indices: torch.Tensor | None,
    slot_table: torch.Tensor | None,
    first_valid_id: int,
    destination_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
) -> dict[str, Any]:
    """By name, for either kernel. ``targets`` None: to where it came from."""
    targets = state_indices if destination_indices is None and rows.target_columns else destination_indices
    return dict(
        sources=state_indices,
        targets=targets,
        slot_table=slot_table,
        accepted=num_accepted_tokens,
        query_start_loc=query_start_loc,
        has_initial_state=None if has_initial_state is None else has_initial_state.view(torch.uint8),
        rows=rows.rows,
        tokens=rows.tokens,
        most=rows.most or 0,
        first_valid_id=first_valid_id,
        table_limit=0 if slot_table is None else len(slot_table),
        slots=slots,
        source_row=0 if state_indices is None else state_indices.stride(0),
        target_row=0 if targets is None else targets.stride(0),
        SINGLE=rows.most == 1,
        COLUMNS=rows.columns,
        TARGET_COLUMNS=rows.target_columns,
    )


def alignment(*strides: int) -> int:
    """The largest power of two, at most MOST_ALIGNMENT, that divides all of them, and so every offset along them."""
    found = MOST_ALIGNMENT
    for stride in strides:
        while stride % found:
            found //= 2
    return found


def lanes(tensor: torch.Tensor) -> int:
    """Threads of a warp."""
    return 64 if tensor.is_cuda and torch.version.hip else 32
