"""What both implementations of the state operations accept: checks, rows and tokens, and tensors in one form."""

from __future__ import annotations

from typing import NamedTuple

import torch

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels.attention_arguments import require_unit_stride

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ID_DTYPES = (torch.int32, torch.int64)
MOST_DSTATE = 4096
"""A program holds whole rows of dstate in registers."""
LEAST_WIDTH, MOST_WIDTH = 2, 5
MOST_HISTORY = 5
"""Columns of a convolution state that a program can hold in registers."""
ACTIVATIONS = (None, "silu", "swish")


class Rows(NamedTuple):
    """Whose tokens are whose, checked: sizes only, no values are read.

    ``most`` bounds the tokens of a row (None: unknown). ``columns`` of the indices that rows start from, 1 if they have
    one dimension; ``target_columns`` of those that the state goes to after each token, 0 if it goes to one place after
    the last.
    """

    rows: int
    tokens: int
    most: int | None
    columns: int
    target_columns: int


class StateUpdate(NamedTuple):
    """One call of ``selective_state_update``, checked. Tensors have a dimension of heads and one of groups."""

    rows: Rows
    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    intermediate: torch.Tensor | None
    out: torch.Tensor
    result: torch.Tensor
    tied: bool


class Convolution(NamedTuple):
    """One call of ``causal_conv1d_update``, checked. ``shifted``: the window lies where acceptance left it."""

    rows: Rows
    width: int
    state_len: int
    silu: bool
    shifted: bool
    out: torch.Tensor


def check_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    slot_table: torch.Tensor | None,
    first_valid_id: int,
    destination_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    max_query_len: int | None,
    has_initial_state: torch.Tensor | None,
    intermediate_states: torch.Tensor | None,
    intermediate_indices: torch.Tensor | None,
    out: torch.Tensor | None,
) -> StateUpdate:
    """Raises InvalidArgument or Unsupported, or says what is to be computed. Reads shapes and dtypes, no values."""
    name = "selective_state_update"
    if state.dim() not in (3, 4) or x.dim() != state.dim() - 1:
        raise InvalidArgument(
            f"{name}: expected state [slots, dim, dstate] with x [tokens, dim], or state [slots, heads, dim, dstate] "
            f"with x [tokens, heads, dim]; got state {tuple(state.shape)} and x {tuple(x.shape)}"
        )
    tokens, inner = len(x), tuple(state.shape[1:])
    if 0 in inner or inner[-1] > MOST_DSTATE:
        raise Unsupported(f"{name}: a state of {inner}; sizes from 1, and dstate up to {MOST_DSTATE}, are offered")
    for label, tensor, shape in (
        ("x", x, (tokens, *inner[:-1])),
        ("dt", dt, (tokens, *inner[:-1])),
        ("z", z, (tokens, *inner[:-1])),
        ("A", A, inner),
        ("D", D, inner[:-1]),
        ("dt_bias", dt_bias, inner[:-1]),
        ("C", C, tuple(B.shape)),
    ):
        _check_shape(name, label, tensor, shape)
    heads = inner[0] if state.dim() == 4 else 1
    groups = B.shape[1] if B.dim() == 3 else 1
    if B.dim() not in (2, 3) or B.shape[0] != tokens or B.shape[-1] != inner[-1] or not groups or heads % groups:
        raise InvalidArgument(
            f"{name}: B and C must be [tokens, dstate] or [tokens, groups, dstate] with groups that divide {heads} "
            f"heads, here ({tokens}, …, {inner[-1]}); got {tuple(B.shape)}"
        )
    result = out = _output(name, x, out)
    _check_dtypes(name, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, out=out)
    for label, tensor in (("state", state), ("x", x), ("z", z), ("B", B), ("C", C)):
        if tensor is not None:
            require_unit_stride(name, label, tensor)
    rows = _check_rows(
        name,
        tokens,
        len(state),
        state_indices,
        slot_table,
        first_valid_id,
        destination_indices,
        num_accepted_tokens,
        query_start_loc,
        max_query_len,
        has_initial_state,
    )
    if num_accepted_tokens is not None and (state_indices is None or state_indices.dim() != 2):
        raise InvalidArgument(
            f"{name}: num_accepted_tokens chooses a column of state_indices; give these as [rows, columns]"
        )
    _check_bound(name, rows, "columns of destination indices", rows.target_columns or None)
    if intermediate_states is not None:
        _check_intermediate(name, state, rows, intermediate_states, intermediate_indices)
    tables = (slot_table, state_indices, destination_indices, num_accepted_tokens, query_start_loc, has_initial_state)
    floats = (x, dt, A, B, C, D, z, dt_bias, out, intermediate_states)
    _check_device(name, state, *floats, *tables, intermediate_indices)
    tied = _constant(A, 2) and _constant(dt, 1) and (dt_bias is None or _constant(dt_bias, 1))
    if state.dim() == 3:
        state, A = state.unsqueeze(1), A.unsqueeze(0)
        x, dt, out = x.unsqueeze(1), dt.unsqueeze(1), out.unsqueeze(1)
        z = None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if one is None else one.unsqueeze(0) for one in (D, dt_bias))
        intermediate_states = None if intermediate_states is None else intermediate_states.unsqueeze(2)
    if B.dim() == 2:
        B, C = B.unsqueeze(1), C.unsqueeze(1)
    return StateUpdate(rows, state, x, dt, A, B, C, D, z, dt_bias, intermediate_states, out, result, tied)


def check_convolution(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    state_indices: torch.Tensor | None,
    slot_table: torch.Tensor | None,
    first_valid_id: int,
    destination_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    max_query_len: int | None,
    has_initial_state: torch.Tensor | None,
    out: torch.Tensor | None,
) -> Convolution:
    """Raises InvalidArgument or Unsupported, or says what is to be computed. Reads shapes and dtypes, no values."""
    name = "causal_conv1d_update"
    if x.dim() != 2 or conv_state.dim() != 3 or weight.dim() != 2:
        raise InvalidArgument(
            f"{name}: expected x [tokens, dim], conv_state [slots, dim, state_len] and weight [dim, width], got "
            f"{tuple(x.shape)}, {tuple(conv_state.shape)} and {tuple(weight.shape)}"
        )
    (tokens, dim), (slots, _, state_len), width = x.shape, conv_state.shape, weight.shape[1]
    if conv_state.shape[1] != dim or len(weight) != dim or not dim:
        raise InvalidArgument(
            f"{name}: x has {dim} channels, conv_state {conv_state.shape[1]} and weight {len(weight)}; they must agree"
        )
    _check_shape(name, "bias", bias, (dim,))
    if not LEAST_WIDTH <= width <= MOST_WIDTH:
        raise Unsupported(f"{name}: width {width}; {LEAST_WIDTH} to {MOST_WIDTH} is offered")
    if state_len < width - 1:
        raise InvalidArgument(f"{name}: conv_state holds {state_len} columns, a width of {width} needs {width - 1}")
    if activation not in ACTIVATIONS:
        raise Unsupported(f"{name}: activation {activation!r}; {', '.join(map(repr, ACTIVATIONS))} are offered")
    out = _output(name, x, out)
    _check_dtypes(name, x=x, conv_state=conv_state, weight=weight, bias=bias, out=out)
    require_unit_stride(name, "x", x)
    rows = _check_rows(
        name,
        tokens,
        slots,
        state_indices,
        slot_table,
        first_valid_id,
        destination_indices,
        num_accepted_tokens,
        query_start_loc,
        max_query_len,
        has_initial_state,
    )
    shifted = num_accepted_tokens is not None and (state_indices is None or state_indices.dim() == 1)
    if shifted and rows.target_columns:
        raise InvalidArgument(
            f"{name}: num_accepted_tokens with state_indices [rows] keeps all tokens in one slot; destination_indices "
            "must be [rows] too"
        )
    _check_bound(name, rows, "columns of destination indices", rows.target_columns or None)
    _check_bound(name, rows, "tokens that fit a state behind its window", state_len - width + 2 if shifted else None)
    if rows.target_columns and state_len > MOST_HISTORY:
        raise Unsupported(
            f"{name}: a state of {state_len} columns stored after each token; up to {MOST_HISTORY} are offered: pass "
            f"the last {width - 1} columns"
        )
    tables = (slot_table, state_indices, destination_indices, num_accepted_tokens, query_start_loc, has_initial_state)
    _check_device(name, conv_state, x, weight, bias, out, *tables)
    return Convolution(rows, width, state_len, activation is not None, shifted, out)


def _check_rows(
    name: str,
    tokens: int,
    slots: int,
    state_indices: torch.Tensor | None,
    slot_table: torch.Tensor | None,
    first_valid_id: int,
    destination_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    max_query_len: int | None,
    has_initial_state: torch.Tensor | None,
) -> Rows:
    if max_query_len is not None and max_query_len < 0:
        raise InvalidArgument(f"{name}: max_query_len {max_query_len}: expected 0 or more")
    if first_valid_id < 0:
        raise InvalidArgument(f"{name}: first_valid_id {first_valid_id}: expected 0 or more; negative ids are null")
    uniform = query_start_loc is None
    most = 1 if uniform and max_query_len is None else max_query_len
    if query_start_loc is not None:
        _check_ids(name, "query_start_loc", query_start_loc, (torch.int32,), dims=(1,))
        if not len(query_start_loc):
            raise InvalidArgument(f"{name}: query_start_loc must have one entry more than there are rows; it has none")
        rows = len(query_start_loc) - 1
    elif state_indices is not None:
        rows = len(state_indices)
    else:
        rows = tokens // most if most else 0
        if rows * (most or 0) != tokens:
            raise InvalidArgument(f"{name}: {tokens} tokens are no multiple of max_query_len {most}")
    if uniform and rows * (most or 0) > tokens:
        raise InvalidArgument(f"{name}: {rows} rows of {most} tokens, but {tokens} tokens in all")
    if state_indices is None and slot_table is not None:
        raise InvalidArgument(f"{name}: slot_table translates state_indices; give these, too")
    if state_indices is None and rows > slots:
        raise InvalidArgument(f"{name}: {rows} rows without state_indices, but a state for {slots}")
    for label, tensor, dtypes, dims in (
        ("state_indices", state_indices, ID_DTYPES, (1, 2)),
        ("destination_indices", destination_indices, ID_DTYPES, (1, 2)),
        ("num_accepted_tokens", num_accepted_tokens, ID_DTYPES, (1,)),
        ("has_initial_state", has_initial_state, (torch.bool,), (1,)),
    ):
        if tensor is not None:
            _check_ids(name, label, tensor, dtypes, dims)
            if len(tensor) != rows or 0 in tensor.shape[1:]:
                raise InvalidArgument(f"{name}: {label} has shape {tuple(tensor.shape)}, there are {rows} rows")
    if slot_table is not None:
        _check_ids(name, "slot_table", slot_table, (torch.int32,), dims=(1,))
    targets = state_indices if destination_indices is None else destination_indices
    return Rows(
        rows,
        tokens,
        most,
        state_indices.shape[1] if state_indices is not None and state_indices.dim() == 2 else 1,
        targets.shape[1] if targets is not None and targets.dim() == 2 else 0,
    )


def _check_bound(name: str, rows: Rows, what: str, limit: int | None) -> None:
    """Something is kept per token (limit None: nothing is): there must be room for the longest row."""
    if limit is None:
        return
    if rows.most is None:
        raise InvalidArgument(f"{name}: max_query_len is missing; it is needed to check the {limit} {what}")
    if rows.most > limit:
        raise InvalidArgument(f"{name}: rows of up to {rows.most} tokens, but {limit} {what}")


def _check_intermediate(
    name: str, state: torch.Tensor, rows: Rows, states: torch.Tensor, indices: torch.Tensor | None
) -> None:
    if states.dim() != state.dim() + 1 or states.shape[2:] != state.shape[1:]:
        raise InvalidArgument(
            f"{name}: intermediate_states must be [entries, steps, …] of states {tuple(state.shape[1:])}, got "
            f"{tuple(states.shape)}"
        )
    _check_dtypes(name, intermediate_states=states)
    require_unit_stride(name, "intermediate_states", states)
    _check_bound(name, rows, "steps of intermediate_states", states.shape[1])
    if indices is not None:
        _check_ids(name, "intermediate_indices", indices, ID_DTYPES, (1,))
        if len(indices) != rows.rows:
            raise InvalidArgument(f"{name}: {len(indices)} intermediate_indices, there are {rows.rows} rows")


def _check_ids(
    name: str, label: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]
) -> None:
    if tensor.dtype not in dtypes or tensor.dim() not in dims:
        raise InvalidArgument(
            f"{name}: {label} must be {' or '.join(map(str, dtypes))} of {' or '.join(map(str, dims))} dimensions, got "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    # A column of a wider table is welcome where a row has one entry; several lie side by side.
    if tensor.dim() == 2 or label not in {"state_indices", "destination_indices"}:
        require_unit_stride(name, label, tensor)


def _check_shape(name: str, label: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise InvalidArgument(f"{name}: {label} has shape {tuple(tensor.shape)}, expected {shape}")


def _check_dtypes(name: str, **tensors: torch.Tensor | None) -> None:
    for label, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            raise Unsupported(f"{name}: {label} of {tensor.dtype}; float16, bfloat16 and float32 are offered")


def _check_device(name: str, state: torch.Tensor, *others: torch.Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != state.device:
            raise InvalidArgument(f"{name}: tensors on {other.device} and the state on {state.device}")


def _output(name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check_shape(name, "out", out, tuple(x.shape))
    require_unit_stride(name, "out", out)
    return out


def _constant(tensor: torch.Tensor, dims: int) -> bool:
    """Whether all numbers along the last dimensions are one in memory."""
    inner = zip(tensor.shape[-dims:], tensor.stride()[-dims:], strict=True)
    return all(size == 1 or stride == 0 for size, stride in inner)
