"""The recurrence of selective state-space layers in Triton; see ``state_update_reference.py`` for what is computed.

One program owns a tile of the state, some rows of dim by all of dstate, of one row of the batch and one head (after
``selective_state_update`` of https://github.com/state-spaces/mamba). It reads the tile once, keeps it in fp32 registers
while it walks over the row's tokens, and writes it once; nothing passes between programs. Where A, dt and dt_bias are
one number per head (Mamba-2), which strides of 0 say, the decay is one exponential per token.

Floor: a step of one token reads and writes ``2 * rows * heads * dim * dstate * itemsize`` bytes of state; the rest is
some percent of that. Many tokens of a row follow each other, each some 20 operations deep: right and linear for a
prompt, but a chunked scan, which works on many at once, is another kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import state_tuning as tuning
from avmp.kernels.launch import GRID_X_LIMIT, INTERPRETED, cdiv, device_guard, require_runnable
from avmp.kernels.state_arguments import StateUpdate, check_state_update
from avmp.kernels.state_rows import (
    COUNTS,
    TABLES,
    alignment,
    first_unowned,
    lanes,
    row_arguments,
    row_tokens,
    slot_of,
    source_slot,
    zero_tokens,
)


@triton.jit
def tile_offsets(slot, head, dims, slot_stride, head_stride, dim_stride, BLOCK: tl.constexpr, HINT: tl.constexpr):
    """int64 offsets of a tile of one slot and head, ``[dims, BLOCK]``."""
    rows = slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride + dims.to(tl.int64) * dim_stride
    return tl.multiple_of(rows, HINT)[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def per_dim(pointer, offsets, within, ONE: tl.constexpr):
    """One number per row of the tile, or one for all of them, in fp32."""
    if ONE:
        found = tl.load(pointer)
    else:
        found = tl.load(pointer + offsets, mask=within, other=0.0)
    return found.to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x), which is x itself above 20. What 1 + e^x rounds away is put back, after Kahan."""
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + e
    gain = tl.where(one == 1.0, 1.0, one - 1.0)
    return tl.where(x > 20.0, x, tl.where(one == 1.0, e, tl.log(one) * (e / gain)))


@triton.jit(
    do_not_specialize=[*COUNTS, "entries"],
    do_not_specialize_on_alignment=[*TABLES, "intermediate_indices"],
)
def selective_state_update_kernel(
    state, x, dt, A, B, C, D, z, dt_bias, intermediate, out,
    sources, targets, slot_table, accepted, query_start_loc, has_initial_state, intermediate_indices,
    rows, tokens, most, first_valid_id, table_limit, slots, source_row, target_row, entries,
    state_slot, state_head, state_dim, x_token, x_head, dt_token, dt_head, dt_dim,
    A_head, A_dim, A_state, B_token, B_group, C_token, C_group, D_head, D_dim, z_token, z_head, bias_head, bias_dim,
    entry_stride, step_stride, kept_head, kept_dim, out_token, out_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, DSTATE: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr, COLUMNS: tl.constexpr, TARGET_COLUMNS: tl.constexpr,
    TIED: tl.constexpr, SOFTPLUS: tl.constexpr, STORE: tl.constexpr, HINT: tl.constexpr, KEPT_HINT: tl.constexpr,
):  # fmt: skip
    """Grid: rows times heads times tiles of M rows of dim. Strides of A, D, dt and dt_bias may be 0."""
    TILES: tl.constexpr = (DIM + M - 1) // M
    row, head = tl.program_id(0) // (HEADS * TILES), tl.program_id(0) // TILES % HEADS
    dims, inner = tl.program_id(0) % TILES * M + tl.arange(0, M), tl.arange(0, BLOCK)
    wide_head, wide_dims, wide_group = head.to(tl.int64), dims.to(tl.int64), (head // (HEADS // GROUPS)).to(tl.int64)
    within = dims < DIM
    tile = within[:, None] & (inner < DSTATE)[None, :]
    out += wide_head * out_head + dims
    zero_tokens(out, first_unowned(query_start_loc, rows, most) + row, tokens, rows, out_token, within, M)

    begin, count = row_tokens(query_start_loc, row, most, tokens, SINGLE)
    source, valid = source_slot(
        sources, accepted, slot_table, row, source_row, COLUMNS, first_valid_id, table_limit, slots
    )
    if valid & (count > 0):
        read = tile
        if has_initial_state is not None:
            read = tile & (tl.load(has_initial_state + row) != 0)
        place = tile_offsets(source, head, dims, state_slot, state_head, state_dim, BLOCK, HINT)
        h = tl.load(state + place, mask=read, other=0.0).to(tl.float32)
        if TIED:
            rate = tl.load(A + wide_head * A_head).to(tl.float32)
        else:
            rates = A + wide_head * A_head + wide_dims[:, None] * A_dim + inner.to(tl.int64)[None, :] * A_state
            rate = tl.load(rates, mask=tile, other=0.0).to(tl.float32)
        if dt_bias is not None:
            bias = per_dim(dt_bias + wide_head * bias_head, wide_dims * bias_dim, within, TIED)
        if D is not None:
            skip = per_dim(D + wide_head * D_head, wide_dims * D_dim, within, False)
        if SINGLE:
            last = 1
        else:
            last = count
        for step in range(0, last):
            token = begin + step
            u = per_dim(x + token * x_token + wide_head * x_head, dims, within, False)
            delta = per_dim(dt + token * dt_token + wide_head * dt_head, wide_dims * dt_dim, within, TIED)
            b = tl.load(B + token * B_token + wide_group * B_group + inner, mask=inner < DSTATE, other=0.0)
            c = tl.load(C + token * C_token + wide_group * C_group + inner, mask=inner < DSTATE, other=0.0)
            if dt_bias is not None:
                delta += bias
            if SOFTPLUS:
                delta = softplus(delta)
            if TIED:
                decay = tl.exp(rate * delta)
            else:
                decay = tl.exp(rate * delta[:, None])
            h = h * decay + (delta * u)[:, None] * b.to(tl.float32)[None, :]
            y = tl.sum(h * c.to(tl.float32)[None, :], 1)
            if D is not None:
                y += skip * u
            if z is not None:
                gate = per_dim(z + token * z_token + wide_head * z_head, dims, within, False)
                y *= gate / (1.0 + tl.exp(-gate))
            tl.store(out + token * out_token, y.to(out.dtype.element_ty), mask=within)
            if intermediate is not None:
                entry = row.to(tl.int64)
                if intermediate_indices is not None:
                    entry = tl.load(intermediate_indices + row).to(tl.int64)
                there = tile_offsets(entry, head, dims, entry_stride, kept_head, kept_dim, BLOCK, KEPT_HINT)
                kept = intermediate + (token - begin) * step_stride + there
                tl.store(kept, h.to(kept.dtype.element_ty), mask=tile & (entry >= 0) & (entry < entries))
            if STORE and TARGET_COLUMNS > 0:
                target, known = slot_of(
                    targets, row.to(tl.int64) * target_row + step, slot_table, first_valid_id, table_limit, slots
                )
                there = tile_offsets(target, head, dims, state_slot, state_head, state_dim, BLOCK, HINT)
                tl.store(state + there, h.to(state.dtype.element_ty), mask=tile & known)
        if STORE and TARGET_COLUMNS == 0:
            write = tile
            if targets is not None:
                target, known = slot_of(
                    targets, row.to(tl.int64) * target_row, slot_table, first_valid_id, table_limit, slots
                )
                place = tile_offsets(target, head, dims, state_slot, state_head, state_dim, BLOCK, HINT)
                write = tile & known
            tl.store(state + place, h.to(state.dtype.element_ty), mask=write)
    if not valid:
        zero_tokens(out, begin, begin + count, 1, out_token, within, M)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_indices: torch.Tensor | None = None,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    destination_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    has_initial_state: torch.Tensor | None = None,
    update_state: bool = True,
    intermediate_states: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``state_update_reference.selective_state_update`` by Triton, in one launch on the current stream; nothing waits
    for the device."""
    p = check_state_update(
        state,
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        state_indices=state_indices,
        slot_table=slot_table,
        first_valid_id=first_valid_id,
        destination_indices=destination_indices,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        has_initial_state=has_initial_state,
        intermediate_states=intermediate_states,
        intermediate_indices=intermediate_indices,
        out=out,
    )
    require_runnable(state)
    if p.rows.rows == 0 or p.rows.tokens == 0:
        return p.result.zero_()
    _, heads, dim, dstate = p.state.shape
    tile = tuning.state_tile(dim, dstate, p.tied, INTERPRETED, lanes(state))
    programs = p.rows.rows * heads * cdiv(dim, tile.dims)
    if programs > GRID_X_LIMIT:
        raise InvalidArgument(f"selective_state_update: {programs} programs, a launch takes {GRID_X_LIMIT}")
    indices = (state_indices, slot_table, first_valid_id, destination_indices, num_accepted_tokens)
    with device_guard(state):
        selective_state_update_kernel[(programs,)](
            p.state,
            p.x,
            p.dt,
            p.A,
            p.B,
            p.C,
            p.D,
            p.z,
            p.dt_bias,
            p.intermediate,
            p.out,
            intermediate_indices=intermediate_indices,
            **row_arguments(p.rows, len(state), *indices, query_start_loc, has_initial_state),
            entries=0 if p.intermediate is None else len(p.intermediate),
            **_strides(p),
            HEADS=heads,
            GROUPS=p.B.shape[1],
            DIM=dim,
            DSTATE=dstate,
            M=tile.dims,
            BLOCK=tile.block,
            TIED=p.tied,
            SOFTPLUS=dt_softplus,
            STORE=update_state,
            HINT=alignment(*p.state.stride()[:3]),
            KEPT_HINT=1 if p.intermediate is None else alignment(*p.intermediate.stride()[:4]),
            num_warps=tile.warps,
        )
    return p.result


def _strides(p: StateUpdate) -> dict[str, int]:
    """Under the kernel's names; 0 for what is not there."""
    found: dict[str, int] = {}
    for tensor, names in (
        (p.state, ("state_slot", "state_head", "state_dim")),
        (p.x, ("x_token", "x_head")),
        (p.dt, ("dt_token", "dt_head", "dt_dim")),
        (p.A, ("A_head", "A_dim", "A_state")),
        (p.B, ("B_token", "B_group")),
        (p.C, ("C_token", "C_group")),
        (p.D, ("D_head", "D_dim")),
        (p.z, ("z_token", "z_head")),
        (p.dt_bias, ("bias_head", "bias_dim")),
        (p.intermediate, ("entry_stride", "step_stride", "kept_head", "kept_dim")),
        (p.out, ("out_token", "out_head")),
    ):
        strides = (0,) * len(names) if tensor is None else tensor.stride()
        found |= dict(zip(names, strides, strict=False))
    return found
