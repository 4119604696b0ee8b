"""The recurrence of selective state-space layers in plain torch: the specification of the Triton kernel, and what runs
where that does not.

A state of many bytes is updated where it lies; small ones are taken several at a time, so that few operations do for
many rows. Either way a chunk of states stays in the cache from the first operation on it to the last, and passes
through memory once each way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from avmp.kernels.reference_rows import NULL, RowTable
from avmp.kernels.state_arguments import StateUpdate, check_state_update

CHUNK_BYTES = 1 << 20
"""Of states in fp32 at a time: what a core's second-level cache holds."""
IN_PLACE_BYTES = 1 << 17
"""From this size on, three operations of their own cost a row less than the copy into a chunk and back."""
SOFTPLUS_LINEAR = 20.0


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
    """Advances the state of each row by its tokens, in place, and returns what they read out of it.

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
      virtual to physical ids. Ids below ``first_valid_id``, before or after translation, or outside the table or the
      pool are null: the row's tokens get 0, and nothing else happens;
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

    Returns ``out`` ``[tokens, heads, dim]`` in x's dtype, or the tensor given, which may be ``x`` itself. Tokens behind
    those of all rows get 0. Raises InvalidArgument or Unsupported before anything is written.

    Floor: with one token per row, ``2 * rows * heads * dim * dstate * itemsize`` bytes of state. Tokens of a row are
    taken one by one: linear in their number, but no substitute for a chunked scan over long prompts.
    """
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
    indices = (state_indices, slot_table, first_valid_id, destination_indices, num_accepted_tokens)
    table = RowTable(p.rows, len(state), *indices, query_start_loc, has_initial_state)
    entries = None if intermediate_indices is None else intermediate_indices.tolist()
    scan = _Scan(p, dt_softplus)
    row_bytes = 4 * p.state[0].numel()
    for rows in table.chunks(1 if row_bytes >= IN_PLACE_BYTES else CHUNK_BYTES // row_bytes):
        _advance_rows(p, scan, table, rows, update_state, entries)
    table.store(p.out, scan.results())
    return p.result


class _Scan:
    """The inputs of all tokens, in fp32."""

    def __init__(self, p: StateUpdate, dt_softplus: bool) -> None:
        self.p = p
        width = 1 if p.tied else p.x.shape[2]
        delta = p.dt[..., :width].float()
        if p.dt_bias is not None:
            delta = delta + p.dt_bias[:, :width].float()
        if dt_softplus:
            delta = F.softplus(delta, threshold=SOFTPLUS_LINEAR)
        self.delta, self.x = delta, p.x.float()
        self.inputs = delta * self.x
        self.B, self.C = p.B.float(), p.C.float()
        self.rates = p.A[:, :width, : 1 if p.tied else None].float()
        self.y = torch.empty_like(self.inputs)

    def step(self, states: torch.Tensor, tokens: slice | torch.Tensor) -> None:
        """One token each for fp32 ``states`` ``[n, heads, dim, dstate]``, in place."""
        groups = self.B.shape[1]
        n, heads, dim, dstate = states.shape
        b, c = self.B[tokens], self.C[tokens]
        states.mul_(torch.exp(self.delta[tokens].unsqueeze(3) * self.rates))
        inputs = self.inputs[tokens].reshape(n, groups, heads // groups, dim, 1)
        states.unflatten(1, (groups, -1)).addcmul_(inputs, b.reshape(n, groups, 1, 1, dstate))
        if n * groups == 1:
            y = torch.mv(states.reshape(-1, dstate), c.reshape(dstate))
        else:
            # The vectors on the left: three times as fast as on the right, where torch's product has no path for them.
            y = torch.bmm(c.reshape(n * groups, 1, dstate), states.reshape(n * groups, -1, dstate).transpose(1, 2))
        self.y[tokens] = y.reshape(n, heads, dim)

    def results(self) -> torch.Tensor:
        """fp32 ``[tokens, heads, dim]``; of tokens that no step has taken, anything."""
        if self.p.D is not None:
            self.y += self.p.D.float() * self.x
        if self.p.z is not None:
            self.y *= F.silu(self.p.z.float())
        return self.y


def _advance_rows(
    p: StateUpdate, scan: _Scan, table: RowTable, rows: list[int], update: bool, entries: list[int] | None
) -> None:
    """All tokens of some rows, which are in descending order of how many they have."""
    first = rows[0]
    stays = update and not p.rows.target_columns and table.targets[first] == table.sources[first]
    if len(rows) == 1 and stays and p.state.dtype == torch.float32 and not table.fresh[first]:
        states, update = p.state[table.sources[first]].unsqueeze(0), False  # the pool itself
    else:
        states = _load(p.state, [table.sources[row] for row in rows])
        fresh = [place for place, row in enumerate(rows) if table.fresh[row]]
        if fresh:
            states[fresh] = 0
    active = len(rows)
    for step in range(table.counts[first]):
        while table.counts[rows[active - 1]] <= step:
            active -= 1
        scan.step(states[:active], table.tokens(rows[:active], step))
        if p.intermediate is not None:
            for place, row in enumerate(rows[:active]):
                entry = row if entries is None else entries[row]
                if 0 <= entry < len(p.intermediate):
                    p.intermediate[entry, step] = states[place].to(p.intermediate.dtype)
        if update and p.rows.target_columns:
            _store(p.state, states[:active], table.targets_by_token[rows[:active], step].tolist())
    if update and not p.rows.target_columns:
        _store(p.state, states, [table.targets[row] for row in rows])


def _load(state: torch.Tensor, sources: list[int]) -> torch.Tensor:
    """A copy in fp32."""
    if len(sources) == 1:
        return state[sources[0]].unsqueeze(0).to(torch.float32, copy=True)
    return state.index_select(0, torch.tensor(sources, device=state.device)).float()


def _store(state: torch.Tensor, states: torch.Tensor, targets: list[int]) -> None:
    """States to their slots, but for NULL."""
    if len(targets) == 1:
        if targets[0] != NULL:
            state[targets[0]].copy_(states[0])
        return
    known = [place for place, target in enumerate(targets) if target != NULL]
    if not known:
        return
    slots = torch.tensor([targets[place] for place in known], device=state.device)
    chosen = states if len(known) == len(targets) else states[known]
    state.index_copy_(0, slots, chosen.to(state.dtype))
