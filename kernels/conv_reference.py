"""The causal convolution before a selective state-space layer in plain torch: the specification of the Triton kernel,
and what runs where that does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from avmp.kernels.reference_rows import NULL, RowTable, accepted_before
from avmp.kernels.state_arguments import Convolution, check_convolution

CHUNK_BYTES = 1 << 20
"""Of windows and tokens in fp32 at a time: what a core's second-level cache holds."""


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
    """Convolves each channel of each row's tokens with its weights, behind the tokens that the row's state remembers,
    and updates that state in place.

    In fp32, with the row's window of ``width - 1`` remembered tokens put before its first:

        out[t] = activation(bias + sum over k of weight[:, k] * token[t - width + 1 + k])

    * ``x`` ``[tokens, dim]``; ``conv_state`` ``[slots, dim, state_len]`` with ``state_len >= width - 1``, any strides
      (channels first or columns first in memory); ``weight`` ``[dim, width]``, width 2 to 5; ``bias`` ``[dim]``. Each
      of them float32, bfloat16 or float16. ``activation``: None, "silu" or "swish", which is the same;
    * rows, ``query_start_loc``, ``max_query_len``, ``state_indices``, ``slot_table``, ``first_valid_id``,
      ``destination_indices`` and ``has_initial_state`` as for ``selective_state_update``; the columns of indices
      ``[rows, columns]`` too, with a state of at most 5 columns. With ``query_start_loc``, pass ``max_query_len`` too:
      without, the Triton kernel is launched for rows of all tokens each;
    * the window is the last ``width - 1`` columns. Afterwards the state is the last ``state_len`` columns of itself and
      the row's tokens (zeros and the row's tokens, where ``has_initial_state`` is False);
    * ``num_accepted_tokens`` ``[rows]`` with ``state_indices`` ``[rows]``, for speculative decoding in one longer
      state: so many of the previous step's tokens were accepted. The window then begins at column
      ``num_accepted - 1``, and the first ``width - 2 + T`` columns become the window without its first token and the
      row's T tokens. Needs ``state_len >= width - 2 + max_query_len``; a number outside of 1 to
      ``state_len - width + 2`` counts as the nearest.

    Returns ``out`` ``[tokens, dim]`` in x's dtype, or the tensor given, which may be ``x`` itself. Tokens of null rows
    and behind those of all rows get 0. Raises InvalidArgument or Unsupported before anything is written.

    Floor: a step of one token reads and writes ``rows * dim * state_len`` elements of state each way.
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
    indices = (state_indices, slot_table, first_valid_id, destination_indices, num_accepted_tokens)
    table = RowTable(p.rows, len(conv_state), *indices, query_start_loc, has_initial_state)
    line = _Line(p, x, conv_state, weight, bias, table)
    line.before = accepted_before(num_accepted_tokens, p.state_len - p.width + 2) if p.shifted else None
    for rows, count in _equal_rows(p, table):
        if count == 1 and not p.shifted:
            line.one_token(rows)
        else:
            line.tokens(rows, count)
    table.store(p.out, line.found)
    return p.out


def _equal_rows(p: Convolution, table: RowTable) -> Iterator[tuple[list[int], int]]:
    """Active rows with equally many tokens, some at a time, and that number."""
    by_count: dict[int, list[int]] = {}
    for row in table.active:
        by_count.setdefault(table.counts[row], []).append(row)
    for count, rows in by_count.items():
        most = max(CHUNK_BYTES // (4 * p.out.shape[1] * (p.state_len + count)), 1)
        for begin in range(0, len(rows), most):
            yield rows[begin : begin + most], count


class _Line:
    """Columns and tokens of some rows, put one behind the other.

    ``memory`` is the pool with its inner dimensions in the order of the memory, so that slots are copied in whole runs:
    ``[slots, dim, columns]``, or ``[slots, columns, dim]`` where channels lie side by side.
    """

    before: torch.Tensor | None

    def __init__(
        self,
        p: Convolution,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: RowTable,
    ) -> None:
        self.p, self.x, self.table = p, x, table
        self.side_by_side = conv_state.stride(1) < conv_state.stride(2)
        self.memory = conv_state.transpose(1, 2) if self.side_by_side else conv_state
        self.axis = 1 if self.side_by_side else 2
        self.taps = weight.float().t().contiguous()
        self.constant = torch.zeros_like(self.taps[0]) if bias is None else bias.float()
        self.found = torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def one_token(self, rows: list[int]) -> None:
        """A step: no column is moved but within the copies of the slots."""
        places, held = self.table.tokens(rows, 0), self._load(rows)
        arrived, columns = self.x[places], held.float().unbind(self.axis)
        self.found[places] = self._convolved([*columns[self.p.state_len - self.p.width + 1 :], arrived.float()])
        kept = torch.empty_like(held)
        if self.side_by_side:
            kept[:, :-1] = held[:, 1:]
        else:
            kept.view(-1)[:-1] = held.view(-1)[1:]  # what each last column gets from its neighbour is overwritten
        kept.select(self.axis, -1).copy_(arrived)
        self._store(kept, self._targets(rows, 0))

    def tokens(self, rows: list[int], count: int) -> None:
        """``count`` tokens of each of these rows."""
        p, table = self.p, self.table
        parts = [slice(table.begins[row], table.begins[row] + count) for row in rows]
        new = torch.stack([self.x[part] for part in parts]).float()
        held = self._load(rows).float()
        held = held if self.side_by_side else held.transpose(1, 2)
        first = p.state_len - p.width + 1
        if self.before is not None:
            columns = self.before[rows].unsqueeze(1) + torch.arange(p.width - 1, device=new.device)
            held, first = held.gather(1, columns.unsqueeze(2).expand(-1, -1, new.shape[2])), 0
        line = torch.cat([held, new], 1)
        y = self._convolved([line[:, first + tap : first + tap + count] for tap in range(p.width)])
        for place, part in enumerate(parts):
            self.found[part] = y[place]
        if p.rows.target_columns:
            for step in range(count):
                after = line[:, step + 1 : step + 1 + p.state_len]
                self._store(self._in_memory_order(after), self._targets(rows, step))
        else:
            kept = line[:, 1:] if p.shifted else line[:, count:]
            self._store(self._in_memory_order(kept), self._targets(rows, count - 1))

    def _convolved(self, seen: list[torch.Tensor]) -> torch.Tensor:
        """Of what each tap sees, oldest first."""
        y = torch.addcmul(self.constant, seen[0], self.taps[0])
        for tap in range(1, self.p.width):
            y.addcmul_(seen[tap], self.taps[tap])
        return F.silu(y, inplace=True) if self.p.silu else y

    def _in_memory_order(self, columns: torch.Tensor) -> torch.Tensor:
        columns = columns.to(self.memory.dtype)
        return columns if self.side_by_side else columns.transpose(1, 2).contiguous()

    def _load(self, rows: list[int]) -> torch.Tensor:
        """A copy of the slots, in the order of the memory; zeros where a row starts from them."""
        slots = torch.tensor([self.table.sources[row] for row in rows], device=self.x.device)
        held = self.memory.index_select(0, slots)
        fresh = [place for place, row in enumerate(rows) if self.table.fresh[row]]
        if fresh:
            held[fresh] = 0
        return held

    def _targets(self, rows: list[int], step: int) -> list[int]:
        """Where the state goes after this token, or after the last one."""
        if self.p.rows.target_columns:
            return self.table.targets_by_token[rows, step].tolist()
        return [self.table.targets[row] for row in rows]

    def _store(self, columns: torch.Tensor, targets: list[int]) -> None:
        """The first columns of slots, but for NULL."""
        known = [place for place, target in enumerate(targets) if target != NULL]
        if known:
            slots = torch.tensor([targets[place] for place in known], device=self.x.device)
            chosen = columns if len(known) == len(targets) else columns[known]
            self.memory.narrow(self.axis, 0, columns.shape[self.axis]).index_copy_(0, slots, chosen)
