"""The public operations on states: the recurrence of selective state-space layers, and the convolution before it."""

from __future__ import annotations

import torch

from avmp.errors import InvalidArgument
from avmp.registration import run
from avmp.step_tables import BatchLike, first_valid, latest, leave_out, require_tokens


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    batch: BatchLike | None = None,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_indices: torch.Tensor | None = None,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    destination_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    has_initial_state: torch.Tensor | None = None,
    update_state: bool = True,
    intermediate_states: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Advances the state of each row by its tokens, in place, and returns what they read out of it.

    ``selective_state_update(state, x, dt, A, B, C, batch, …)`` takes rows and slots from a ``Batch``.

    For each token of a row, in order and in fp32, with ``dt`` after bias and softplus:

        state = state * exp(dt * A) + dt * x * B;    y = sum over dstate of state * C  (+ D * x)  (* silu(z))

    * ``state`` ``[slots, heads, dim, dstate]`` (Mamba-2), any outer strides; ``x``, ``dt``, ``z``
      ``[tokens, heads, dim]``; ``A`` ``[heads, dim, dstate]``; ``B``, ``C`` ``[tokens, groups, dstate]`` (groups divide
      heads) or ``[tokens, dstate]``; ``D``, ``dt_bias`` ``[heads, dim]``. All without the dimension of heads: Mamba-1.
      Each of them float32, bfloat16 or float16. A, dt and dt_bias with strides of 0 along dim and dstate (one number
      per head, expanded) take a faster path. softplus is the identity above 20;
    * ``query_start_loc`` int32 ``[rows + 1]``: whose tokens are whose; None: every row has ``max_query_len`` of them
      (default 1). ``max_query_len`` bounds all rows' tokens in any case;
    * ``state_indices`` int32 or int64 ``[rows]``: the slot of each row; None: row r's is r. ``slot_table`` int32 maps
      virtual to physical ids. Ids below ``first_valid_id`` (by default 1 with a slot table, 0 without), before or after
      translation, or outside the table or the pool are null: the row's tokens get 0, and nothing else happens;
    * ``destination_indices`` ``[rows]``: where the state after the last token goes (default: where it came from), so
      that a snapshot can be read and a new slot written. ``[rows, columns]``: the state after token t goes to column t.
      A null destination is not written. Destinations are distinct, and no row reads what another one writes;
    * ``state_indices`` ``[rows, columns]``, for speculative decoding: a row starts from the column of its last accepted
      token, ``num_accepted_tokens[r] - 1`` (limited to the columns there are; 0 without), and the destinations default
      to these columns;
    * ``has_initial_state`` bool ``[rows]``: where it is False the row starts from zeros. ``update_state=False`` leaves
      ``state`` as it is;
    * ``intermediate_states`` ``[entries, steps, heads, dim, dstate]``: the state after token t goes to
      ``[intermediate_indices[r], t]`` (default r; outside the entries: nowhere).

    Returns ``[tokens, heads, dim]`` in x's dtype, or ``out``, which may have another. Tokens behind those of all rows
    get 0. Raises InvalidArgument, Unsupported, and Inconsistent for a batch that a later one has overwritten.

    Floor: with one token per row, ``2 * rows * heads * dim * dstate * itemsize`` bytes of state. Tokens of a row are
    taken one by one: linear in their number, but no substitute for a chunked scan over long prompts.
    """
    if batch is not None:
        leave_out(
            "selective_state_update",
            state_indices=state_indices,
            slot_table=slot_table,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            has_initial_state=has_initial_state,
            first_valid_id=first_valid_id,
        )
        batch = latest("selective_state_update", batch)
        state_indices, slot_table, has_initial_state = batch.state_indices, batch.slot_table, batch.has_initial_state
        query_start_loc, max_query_len = batch.query_start_loc, batch.max_query_len
        first_valid_id = batch.first_valid_id
        require_tokens("selective_state_update", x, batch)
    result: torch.Tensor = run(
        "selective_state_update",
        {
            "state": state,
            "x": x,
            "dt": dt,
            "A": A,
            "B": B,
            "C": C,
            "D": D,
            "z": z,
            "dt_bias": dt_bias,
            "dt_softplus": dt_softplus,
            "state_indices": state_indices,
            "slot_table": slot_table,
            "first_valid_id": first_valid(first_valid_id, slot_table),
            "destination_indices": destination_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "query_start_loc": query_start_loc,
            "max_query_len": max_query_len,
            "has_initial_state": has_initial_state,
            "update_state": update_state,
            "intermediate_states": intermediate_states,
            "intermediate_indices": intermediate_indices,
            "out": out,
        },
        backend,
        batch,
    )
    return result


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch: BatchLike | None = None,
    *,
    activation: str | None = None,
    state_indices: torch.Tensor | None = None,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    destination_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    has_initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Convolves each channel of each row's tokens with its weights, behind the tokens that the row's state remembers,
    and updates that state in place.

    ``causal_conv1d_update(x, conv_state, weight, bias, batch, …)`` takes rows and slots from a ``Batch``.

    In fp32, with the row's window of ``width - 1`` remembered tokens put before its first:

        out[t] = activation(bias + sum over k of weight[:, k] * token[t - width + 1 + k])

    * ``x`` ``[tokens, dim]``; ``conv_state`` ``[slots, dim, state_len]`` with ``state_len >= width - 1``, any strides
      (channels first or columns first in memory); ``weight`` ``[dim, width]``, width 2 to 5; ``bias`` ``[dim]``. Each
      of them float32, bfloat16 or float16. ``activation``: None, "silu" or "swish", which is the same;
    * rows, ``query_start_loc``, ``max_query_len``, ``state_indices``, ``slot_table``, ``first_valid_id``,
      ``destination_indices`` and ``has_initial_state`` as for ``selective_state_update``; the columns of
      two-dimensional indices, too, with a state of at most 5 columns;
    * the window is the last ``width - 1`` columns. Afterwards the state is the last ``state_len`` columns of itself and
      the row's tokens (zeros and the row's tokens, where ``has_initial_state`` is False);
    * ``num_accepted_tokens`` ``[rows]`` with ``state_indices`` ``[rows]``, for speculative decoding in one longer
      state: of the previous step's tokens so many were accepted. The window then begins at column
      ``num_accepted - 1``, and the first ``width - 2 + T`` columns become the window without its first token and the
      row's T tokens. Needs ``state_len >= width - 2 + max_query_len``; a number outside of 1 to
      ``state_len - width + 2`` counts as the nearest.

    Returns ``[tokens, dim]`` in x's dtype, or ``out``, which may be ``x`` itself. Tokens of null rows and behind those
    of all rows get 0. Raises InvalidArgument, Unsupported, and Inconsistent for a batch that a later one has
    overwritten.

    Floor: a step of one token reads and writes ``rows * dim * state_len`` elements of state each way.
    """
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise InvalidArgument(
            f"causal_conv1d_update: bias is a {type(bias).__name__}: expected a tensor or None, and a Batch behind it"
        )
    if batch is not None:
        leave_out(
            "causal_conv1d_update",
            state_indices=state_indices,
            slot_table=slot_table,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            has_initial_state=has_initial_state,
            first_valid_id=first_valid_id,
        )
        batch = latest("causal_conv1d_update", batch)
        state_indices, slot_table, has_initial_state = batch.state_indices, batch.slot_table, batch.has_initial_state
        query_start_loc, max_query_len = batch.query_start_loc, batch.max_query_len
        first_valid_id = batch.first_valid_id
        require_tokens("causal_conv1d_update", x, batch)
    result: torch.Tensor = run(
        "causal_conv1d_update",
        {
            "x": x,
            "conv_state": conv_state,
            "weight": weight,
            "bias": bias,
            "activation": activation,
            "state_indices": state_indices,
            "slot_table": slot_table,
            "first_valid_id": first_valid(first_valid_id, slot_table),
            "destination_indices": destination_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "query_start_loc": query_start_loc,
            "max_query_len": max_query_len,
            "has_initial_state": has_initial_state,
            "out": out,
        },
        backend,
        batch,
    )
    return result
