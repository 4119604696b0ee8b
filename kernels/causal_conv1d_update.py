"""The causal convolution before a state-space layer in Triton; see ``conv_reference.py`` for what is computed.

One program owns some channels of one row, and up to a number of its tokens, which it walks over with the latest columns
in registers. That of the row's first tokens has the state to itself: it reads the window, and writes what is kept;
those of later tokens find their window in ``x``. Every channel has one thread, which alone reads and writes its
columns; a barrier stands between reading and writing nevertheless, since the layouts are the compiler's choice.

The operation is ``causal_conv1d_update`` of https://github.com/Dao-AILab/causal-conv1d; rows of several tokens, what is
accepted of them, and null slots are as in https://github.com/vllm-project/vllm. How programs share it is our own.

Floor: a step of one token reads and writes ``2 * rows * dim * state_len * itemsize`` bytes of state, and of ``x`` and
``out`` together ``2 * rows * dim * itemsize``; it is bound by its launch. Accesses are 16 bytes wide where channels lie
side by side, in ``x`` as in the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import state_tuning as tuning
from avmp.kernels.launch import GRID_X_LIMIT, INTERPRETED, cdiv, device_guard, require_runnable
from avmp.kernels.state_arguments import MOST_HISTORY, check_convolution
from avmp.kernels.state_rows import (
    COUNTS,
    TABLES,
    accepted_before,
    alignment,
    first_unowned,
    lanes,
    row_arguments,
    row_tokens,
    slot_of,
    source_slot,
    zero_tokens,
)

PACKABLE = (2, 4)


@triton.jit
def entry_offset(start, entry, stride, HINT: tl.constexpr):
    """int64: ``entry`` strides behind ``start``. HINT divides it, whatever the compiler sees; 1: let it see."""
    offset = start + tl.cast(entry, tl.int64) * stride
    if HINT > 1:
        offset = tl.multiple_of(offset, HINT)
    return offset


@triton.jit
def recall(base, start, entry, stride, mask, HINT: tl.constexpr):
    """One entry for every channel, in fp32."""
    return tl.load(base + entry_offset(start, entry, stride, HINT), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(base, start, entry, stride, mask, values, HINT: tl.constexpr):
    """One entry for every channel, from fp32."""
    tl.store(base + entry_offset(start, entry, stride, HINT), values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def latest(base, start, end, stride, mask, COUNT: tl.constexpr, HINT: tl.constexpr):
    """The COUNT entries before ``end``, the last one first: five of them, those beyond COUNT meaningless."""
    h1 = recall(base, start, end - 1, stride, mask, HINT)
    h2, h3, h4, h5 = h1, h1, h1, h1
    if COUNT > 1:
        h2 = recall(base, start, end - 2, stride, mask, HINT)
    if COUNT > 2:
        h3 = recall(base, start, end - 3, stride, mask, HINT)
    if COUNT > 3:
        h4 = recall(base, start, end - 4, stride, mask, HINT)
    if COUNT > 4:
        h5 = recall(base, start, end - 5, stride, mask, HINT)
    return h1, h2, h3, h4, h5


@triton.jit
def remember(base, start, end, stride, mask, h1, h2, h3, h4, h5, COUNT: tl.constexpr, HINT: tl.constexpr):
    """The inverse of ``latest``."""
    if COUNT > 0:
        store(base, start, end - 1, stride, mask, h1, HINT)
    if COUNT > 1:
        store(base, start, end - 2, stride, mask, h2, HINT)
    if COUNT > 2:
        store(base, start, end - 3, stride, mask, h3, HINT)
    if COUNT > 3:
        store(base, start, end - 4, stride, mask, h4, HINT)
    if COUNT > 4:
        store(base, start, end - 5, stride, mask, h5, HINT)


@triton.jit
def latest_packed(base, start, first_channel, wanted, DIM, CHANNELS: tl.constexpr, COUNT: tl.constexpr):
    """As ``latest``, of channels that lie one behind another, with COUNT entries each, 2 or 4: in vectors."""
    places = first_channel * COUNT + tl.arange(0, CHANNELS * COUNT)
    loaded = tl.load(base + start + places, mask=wanted & (places < DIM * COUNT), other=0.0)
    if COUNT == 4:
        even, odd = tl.split(tl.reshape(loaded, [CHANNELS, 2, 2]))
        h4, h2 = tl.split(even)
        h3, h1 = tl.split(odd)
    else:
        h2, h1 = tl.split(tl.reshape(loaded, [CHANNELS, 2]))
        h3, h4 = h2, h2
    h1, h2, h3, h4 = h1.to(tl.float32), h2.to(tl.float32), h3.to(tl.float32), h4.to(tl.float32)
    return h1, h2, h3, h4, h4


@triton.jit
def remember_packed(
    base, start, first_channel, wanted, h1, h2, h3, h4, DIM, CHANNELS: tl.constexpr, COUNT: tl.constexpr
):
    """The inverse of ``latest_packed``."""
    dtype = base.dtype.element_ty
    if COUNT == 4:
        even, odd = tl.join(h4.to(dtype), h2.to(dtype)), tl.join(h3.to(dtype), h1.to(dtype))
        values = tl.reshape(tl.join(even, odd), [CHANNELS * 4])
    else:
        values = tl.reshape(tl.join(h2.to(dtype), h1.to(dtype)), [CHANNELS * 2])
    places = first_channel * COUNT + tl.arange(0, CHANNELS * COUNT)
    tl.store(base + start + places, values, mask=wanted & (places < DIM * COUNT))


@triton.jit
def shift_older(
    cells, x_row, old, new, count, column_stride, x_token, read, mask,
    OLDER: tl.constexpr, STATE_LEN: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """The OLDER first columns of a long state: each takes the value ``count`` columns behind, of the state or of x."""
    for column in range(0, OLDER):
        source = column + count
        held = recall(cells, old, source, column_stride, read & (source < STATE_LEN), HINT)
        token = tl.maximum(source - STATE_LEN, 0)
        arrived = recall(x_row, 0, token, x_token, mask & (source >= STATE_LEN), 1)
        tl.debug_barrier()
        store(cells, new, column, column_stride, mask, tl.where(source < STATE_LEN, held, arrived), HINT)


@triton.jit(do_not_specialize=[*COUNTS, "tiles", "tile_tokens"], do_not_specialize_on_alignment=TABLES)
def causal_conv1d_update_kernel(
    x, conv_state, weight, bias, out,
    sources, targets, slot_table, accepted, query_start_loc, has_initial_state,
    rows, tokens, most, first_valid_id, table_limit, slots, source_row, target_row, tiles, tile_tokens,
    state_slot, state_channel, state_column, x_token, weight_channel, weight_tap, bias_channel, out_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, STATE_LEN: tl.constexpr, HISTORY: tl.constexpr, CHANNELS: tl.constexpr,
    SINGLE: tl.constexpr, COLUMNS: tl.constexpr, TARGET_COLUMNS: tl.constexpr, SHIFTED: tl.constexpr,
    SILU: tl.constexpr, PACKED_STATE: tl.constexpr, PACKED_WEIGHT: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Grid: rows times ``tiles`` of a row's tokens times blocks of channels. More than one tile only where nothing is
    kept per token, and ``out`` is not ``x``. PACKED: as ``latest_packed`` wants it, with HISTORY or WIDTH entries."""
    BLOCKS: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    row, tile = tl.program_id(0) // BLOCKS // tiles, tl.program_id(0) // BLOCKS % tiles
    first_channel = tl.program_id(0) % BLOCKS * CHANNELS
    channels = first_channel + tl.arange(0, CHANNELS)
    mask = channels < DIM
    out += channels
    if tile == 0:
        zero_tokens(out, first_unowned(query_start_loc, rows, most) + row, tokens, rows, out_token, mask, CHANNELS)

    begin, count = row_tokens(query_start_loc, row, most, tokens, SINGLE)
    source, valid = source_slot(
        sources, accepted, slot_table, row, source_row, COLUMNS, first_valid_id, table_limit, slots
    )
    if SINGLE:
        first, last = 0, 1
    else:
        first = tile * tile_tokens
        last = tl.minimum(first + tile_tokens, count)
    if valid & (first < count):
        x_row = x + channels + begin * x_token
        cells = conv_state + channels.to(tl.int64) * state_channel
        old = tl.multiple_of(source * state_slot, HINT)
        known = tile == 0
        if has_initial_state is not None:
            known = known & (tl.load(has_initial_state + row) != 0)
        if PACKED_STATE:
            h1, h2, h3, h4, h5 = latest_packed(conv_state, old, first_channel, known, DIM, CHANNELS, HISTORY)
        else:
            end = STATE_LEN
            if SHIFTED:
                end = WIDTH - 1
                if accepted is not None:
                    end += accepted_before(accepted, row, STATE_LEN - WIDTH + 2)
            h1, h2, h3, h4, h5 = latest(cells, old, end, state_column, mask & known, HISTORY, HINT)
        if not SINGLE and tile > 0:
            h1, h2, h3, h4, h5 = latest(x_row, 0, first, x_token, mask, HISTORY, 1)
        if PACKED_WEIGHT:
            t1, t2, t3, t4, t5 = latest_packed(weight, 0, first_channel, True, DIM, CHANNELS, WIDTH)
        else:
            taps = weight + channels.to(tl.int64) * weight_channel
            t1, t2, t3, t4, t5 = latest(taps, 0, WIDTH, weight_tap, mask, WIDTH, 1)
        if bias is not None:
            constant = tl.load(bias + channels.to(tl.int64) * bias_channel, mask=mask, other=0.0).to(tl.float32)

        new, write = old, tile == 0
        if TARGET_COLUMNS == 0 and targets is not None:
            place = row.to(tl.int64) * target_row
            target, exists = slot_of(targets, place, slot_table, first_valid_id, table_limit, slots)
            new, write = tl.multiple_of(target * state_slot, HINT), write & exists
        tl.debug_barrier()  # all that is read of the state has been read
        if SHIFTED:
            remember(cells, new, WIDTH - 2, state_column, mask & write, h1, h2, h3, h4, h5, WIDTH - 2, HINT)
        elif TARGET_COLUMNS == 0 and STATE_LEN > HISTORY and tile == 0:
            shift_older(
                cells, x_row, old, new, count, state_column, x_token, mask & known, mask & write,
                STATE_LEN - HISTORY, STATE_LEN, HINT,
            )  # fmt: skip
        for step in range(first, last):
            now = recall(x_row, 0, step, x_token, mask, 1)
            y = now * t1 + h1 * t2
            if WIDTH > 2:
                y += h2 * t3
            if WIDTH > 3:
                y += h3 * t4
            if WIDTH > 4:
                y += h4 * t5
            if bias is not None:
                y += constant
            if SILU:
                y = y / (1.0 + tl.exp(-y))
            store(out, begin * out_token, step, out_token, mask, y, 1)
            h5, h4, h3, h2, h1 = h4, h3, h2, h1, now
            if SHIFTED:
                column = WIDTH - 2 + step
                store(cells, new, column, state_column, mask & write & (column < STATE_LEN), now, HINT)
            elif TARGET_COLUMNS > 0:
                place = row.to(tl.int64) * target_row + step
                target, exists = slot_of(targets, place, slot_table, first_valid_id, table_limit, slots)
                new = tl.multiple_of(target * state_slot, HINT)
                if PACKED_STATE:
                    remember_packed(
                        conv_state, new, first_channel, exists, h1, h2, h3, h4, DIM, CHANNELS, HISTORY
                    )  # fmt: skip
                else:
                    remember(cells, new, STATE_LEN, state_column, mask & exists, h1, h2, h3, h4, h5, HISTORY, HINT)
        if not SHIFTED and TARGET_COLUMNS == 0:
            if not SINGLE and count > last:
                h1, h2, h3, h4, h5 = latest(x_row, 0, count, x_token, mask, HISTORY, 1)
            if PACKED_STATE:
                remember_packed(conv_state, new, first_channel, write, h1, h2, h3, h4, DIM, CHANNELS, HISTORY)
            else:
                tl.debug_barrier()  # shift_older, too, has read what it needs
                remember(cells, new, STATE_LEN, state_column, mask & write, h1, h2, h3, h4, h5, HISTORY, HINT)
    if not valid:
        zero_tokens(out, begin + first, begin + tl.minimum(last, count), 1, out_token, mask, CHANNELS)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    state_indices: torch.Tensor | None = None,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    destination_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    has_initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``conv_reference.causal_conv1d_update`` by Triton, in one launch on the current stream; nothing waits for the
    device.

    Its programs are rows times tiles of ``max_query_len`` tokens times blocks of channels. Without ``max_query_len``,
    ragged rows get tiles for all tokens each, most of which find nothing to do: rows * tokens / CONV_TOKENS programs
    for every block, so that many rows want the bound. Where something is kept per token, or the addresses that ``out``
    and ``x`` span overlap, a row is one tile.
    """
    p = check_convolution(
        x,
        conv_state,
        weight,
        bias,
        activation=activation,
        state_indices=state_indices,
        slot_table=slot_table,
        first_valid_id=first_valid_id,
        destination_indices=destination_indices,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        has_initial_state=has_initial_state,
        out=out,
    )
    require_runnable(conv_state)
    if p.rows.rows == 0 or p.rows.tokens == 0:
        return p.out.zero_()
    most = p.rows.tokens if p.rows.most is None else max(p.rows.most, 1)
    whole = p.shifted or p.rows.target_columns or _share_memory(x, p.out)
    tile_tokens = most if whole else min(tuning.CONV_TOKENS, most)
    channels = tuning.conv_channels(x.shape[1], conv_state.element_size(), INTERPRETED, lanes(conv_state))
    tiles = cdiv(most, tile_tokens)
    programs = p.rows.rows * tiles * cdiv(x.shape[1], channels)
    if programs > GRID_X_LIMIT:
        raise InvalidArgument(f"causal_conv1d_update: {programs} programs, a launch takes {GRID_X_LIMIT}")
    indices = (state_indices, slot_table, first_valid_id, destination_indices, num_accepted_tokens)
    slot, channel, column = conv_state.stride()
    history = p.state_len if p.state_len <= MOST_HISTORY and not p.shifted else p.width - 1
    packed = history == p.state_len in PACKABLE and (channel, column) == (history, 1)
    with device_guard(conv_state):
        causal_conv1d_update_kernel[(programs,)](
            x,
            conv_state,
            weight,
            bias,
            p.out,
            **row_arguments(p.rows, len(conv_state), *indices, query_start_loc, has_initial_state),
            tiles=tiles,
            tile_tokens=tile_tokens,
            state_slot=slot,
            state_channel=channel,
            state_column=column,
            x_token=x.stride(0),
            weight_channel=weight.stride(0),
            weight_tap=weight.stride(1),
            bias_channel=0 if bias is None else bias.stride(0),
            out_token=p.out.stride(0),
            DIM=x.shape[1],
            WIDTH=p.width,
            STATE_LEN=p.state_len,
            HISTORY=history,
            CHANNELS=channels,
            SHIFTED=p.shifted,
            SILU=p.silu,
            PACKED_STATE=packed,
            PACKED_WEIGHT=p.width in PACKABLE and weight.stride() == (p.width, 1),
            HINT=alignment(slot) if packed else alignment(slot, column),
            num_warps=tuning.CONV_WARPS,
        )
    return p.out


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether writing to one may change the other: whether their bytes, from the first to the last, overlap."""
    (first, end), (other_first, other_end) = _span(one), _span(other)
    return first < other_end and other_first < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last, of a tensor that is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
