"""Rows of the state operations on the host, for their plain-torch implementations: whose tokens, which slots."""

from __future__ import annotations

from itertools import pairwise

import torch

from avmp.kernels.attention_arguments import check_starts
from avmp.kernels.state_arguments import Rows

Selection = slice | torch.Tensor
NULL = -1


class RowTable:
    """What the rows hold, read off the tables: ``begins`` and ``counts`` of tokens, ``sources`` (physical slots, NULL
    for none), ``fresh`` (whether a row starts from zeros), ``targets`` after the last token, or ``targets_by_token``
    ``[rows, columns]`` after each."""

    def __init__(
        self,
        rows: Rows,
        slots: int,
        state_indices: torch.Tensor | None,
        slot_table: torch.Tensor | None,
        first_valid_id: int,
        destination_indices: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        has_initial_state: torch.Tensor | None,
    ) -> None:
        if query_start_loc is None:
            most = rows.most or 0
            self.begins, self.counts = [row * most for row in range(rows.rows)], [most] * rows.rows
        else:
            starts = query_start_loc.tolist()
            check_starts("state update", starts, rows.tokens, rows.most)
            self.begins = starts[:-1]
            self.counts = [end - begin for begin, end in pairwise(starts)]
        self.fresh = [False] * rows.rows if has_initial_state is None else (~has_initial_state).tolist()
        ids = torch.arange(rows.rows) if state_indices is None else state_indices
        if ids.dim() == 2:
            column = accepted_before(num_accepted_tokens, rows.columns)
            ids = ids[:, 0] if column is None else ids.gather(1, column[:, None])[:, 0]
        physical = ids if state_indices is None else physical_slots(ids, slot_table, first_valid_id, slots)
        self.sources: list[int] = physical.tolist()
        self.targets, self.targets_by_token = self.sources, torch.empty(rows.rows, 0, dtype=torch.int64)
        targets = state_indices if destination_indices is None and rows.target_columns else destination_indices
        if targets is not None:
            physical = physical_slots(targets, slot_table, first_valid_id, slots)
            if rows.target_columns:
                self.targets_by_token = physical
            else:
                self.targets = physical.tolist()
        self.active = [row for row, source in enumerate(self.sources) if source != NULL and self.counts[row] > 0]

    def chunks(self, most: int) -> list[list[int]]:
        """Active rows, at most so many at a time, those with the most tokens first."""
        order = sorted(self.active, key=lambda row: -self.counts[row])
        return [order[begin : begin + most] for begin in range(0, len(order), most)]

    def tokens(self, rows: list[int], step: int) -> Selection:
        """Token ``step`` of each of these rows, as a slice where it is one."""
        places = [self.begins[row] + step for row in rows]
        stride = places[1] - places[0] if len(places) > 1 else 1
        if stride > 0 and places == list(range(places[0], places[0] + stride * len(places), stride)):
            return slice(places[0], places[-1] + 1, stride)
        return torch.tensor(places)

    def store(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """``found`` for the tokens of active rows, 0 for all others."""
        used = sum(self.counts[row] for row in self.active)
        if used == len(out):
            out.copy_(found)
            return
        out.zero_()
        for row in self.active:
            part = slice(self.begins[row], self.begins[row] + self.counts[row])
            out[part] = found[part].to(out.dtype)


def accepted_before(num_accepted_tokens: torch.Tensor | None, limit: int) -> torch.Tensor | None:
    """Accepted tokens of each row's previous step, less one: 0 to ``limit - 1``, whatever the table holds."""
    return None if num_accepted_tokens is None else num_accepted_tokens.long().clamp(1, limit) - 1


def physical_slots(ids: torch.Tensor, slot_table: torch.Tensor | None, first_valid_id: int, slots: int) -> torch.Tensor:
    """int64 of the same shape, NULL for what names no slot."""
    ids = ids.long()
    valid = ids >= first_valid_id
    if slot_table is not None:
        valid &= ids < len(slot_table)
        ids = slot_table[torch.where(valid, ids, 0)].long() if len(slot_table) else ids
        valid &= ids >= first_valid_id
    return torch.where(valid & (ids < slots), ids, NULL)
