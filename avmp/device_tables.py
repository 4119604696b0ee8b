"""The device's tables: mirrors of the page tables, and the tables of a step, all at fixed addresses.

All of them are parts of one int32 tensor, so that one launch brings everything up to date. Rows of the block table
are sent only where they changed since the last batch: a decoding step sends the cells of new pages.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.batch_tables import BatchTables
from avmp.bounds import Limits
from avmp.errors import InvalidArgument
from avmp.handles import MOST, Int64Array
from avmp.units import align_up

Change: TypeAlias = "tuple[Int64Array, NDArray[np.int32]]"
"""Indices of words, and their new values."""

_WORDS_PER_TOKEN = 2
"""An entry of the slot mapping is int64: two words."""


class DeviceTables:
    """Where each table lies in the one tensor, and what has to be sent to bring it up to date. ``batches`` counts the
    batches; everything of a table behind what the last one wrote is 0. ``limits``, where ids are checked: what the
    pools own by the tables as they are on the device.

    ``page_table`` and ``slot_table`` int32 ``[virtual ids]``; ``block_table`` int32 ``[max_rows, row_width]``,
    ``seq_lens`` and ``state_indices`` int32 ``[max_rows]``, ``query_start_loc`` int32 ``[max_rows + 1]``,
    ``has_initial_state`` bool ``[max_rows]``, ``slot_mapping`` int64 ``[max_tokens]``.
    """

    def __init__(
        self, page_ids: int, slot_ids: int, max_rows: int, row_width: int, max_tokens: int, device: torch.device
    ) -> None:
        self.max_rows, self.row_width, self.max_tokens = max_rows, row_width, max_tokens
        sizes = {
            "page_table": page_ids,
            "slot_table": slot_ids,
            "block_table": max_rows * row_width,
            "seq_lens": max_rows,
            "state_indices": max_rows,
            "query_start_loc": max_rows + 1,
            "has_initial_state": align_up(max_rows, 4) // 4,
            "slot_mapping": _WORDS_PER_TOKEN * max_tokens,
        }
        self.begin: dict[str, int] = {}
        words = 0
        for name, size in sizes.items():
            self.begin[name] = words
            words += align_up(size, 4)  # 16-byte boundaries, for whoever reads with wide loads
        if words > MOST:
            raise InvalidArgument(
                f"tables of {words:,} words (max_rows {max_rows:,} x {row_width:,} pages in a row, "
                f"{max_tokens:,} tokens in a batch): more than {MOST:,}; use fewer rows or larger pages"
            )
        self.words = torch.zeros(words, dtype=torch.int32, device=device)
        parts = {name: self.words[begin : begin + sizes[name]] for name, begin in self.begin.items()}
        self.page_table, self.slot_table = parts["page_table"], parts["slot_table"]
        self.block_table = parts["block_table"].view(max_rows, row_width)
        self.seq_lens, self.state_indices = parts["seq_lens"], parts["state_indices"]
        self.query_start_loc = parts["query_start_loc"]
        self.has_initial_state = parts["has_initial_state"].view(torch.bool)[:max_rows]
        self.slot_mapping = parts["slot_mapping"].view(torch.int64)
        # What the device's block table holds: whose row each position is, and how many columns may be other than 0.
        self._resident: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._filled: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._mapped = 0
        self.batches = 0
        self.limits: Limits | None = None

    def require_room(self, rows: int, tokens: int) -> None:
        """Raises InvalidArgument if a batch of so many rows, padding included, or tokens exceeds the buffers."""
        if rows > self.max_rows:
            raise InvalidArgument(f"batch: {rows} rows with padding, the tables have max_rows={self.max_rows}")
        if tokens > self.max_tokens:
            raise InvalidArgument(
                f"batch: {tokens} tokens, the tables hold max_batch_tokens={self.max_tokens}; split the step, or make "
                "the pool with more"
            )

    def changes_of_batch(self, tables: BatchTables, handles: Int64Array, dirty_cells: Int64Array) -> list[Change]:
        """Word indices and values for this batch. ``handles`` are its sequences, ``dirty_cells`` the block-table
        cells (``row * row_width + column``) that have changed since the last batch."""
        rows = len(tables.seq_lens)
        self.batches += 1
        initial = np.zeros(align_up(rows, 4), dtype=np.uint8)
        initial[:rows] = tables.has_initial_state
        changes = [
            self._dense("seq_lens", tables.seq_lens),
            self._dense("state_indices", tables.state_indices),
            self._dense("query_start_loc", tables.query_start_loc),
            self._dense("has_initial_state", initial.view(np.int32)),
            self._dense("slot_mapping", self._slot_mapping(tables.slot_mapping)),
        ]
        return changes + self._block_table_changes(tables, handles, dirty_cells)

    def _slot_mapping(self, slots: Int64Array) -> NDArray[np.int32]:
        """As words, with zeros over what an earlier batch left behind: a captured graph may read that far."""
        padded = np.zeros(max(len(slots), self._mapped), dtype=np.int64)
        padded[: len(slots)] = slots
        self._mapped = len(slots)
        return padded.view(np.int32)

    def _dense(self, name: str, values: NDArray[np.int32]) -> Change:
        begin = self.begin[name]
        return np.arange(begin, begin + len(values)), values

    def _block_table_changes(self, tables: BatchTables, handles: Int64Array, dirty_cells: Int64Array) -> list[Change]:
        if not self.row_width:
            return []
        table, count, padded = tables.table, tables.num_sequences, len(tables.seq_lens)
        ids = table.ids(tables.rows)
        columns = table.column_counts(ids)
        stays = self._resident[:count] == handles
        changes = []
        if len(dirty_cells) and stays.any():
            position_of = np.full(table.max_rows, -1, dtype=np.int64)
            position_of[ids[stays]] = np.flatnonzero(stays)
            position = position_of[dirty_cells // self.row_width]
            known = position >= 0
            cells = dirty_cells[known]
            where = position[known] * self.row_width + cells % self.row_width
            changes.append((self.begin["block_table"] + where, table.cells[cells]))
        for new in np.flatnonzero(~stays).tolist():
            changes.append(self._row(new, table.block_table[ids[new]], int(columns[new])))
        for padding in (np.flatnonzero(self._filled[count:padded]) + count).tolist():
            changes.append(self._row(padding, np.zeros(self.row_width, dtype=np.int32), 0))
        self._resident[:count], self._resident[count:] = handles, 0
        self._filled[:count] = columns
        self._filled[count:padded] = 0
        return changes

    def _row(self, position: int, values: NDArray[np.int32], columns: int) -> Change:
        """The row's columns, and zeros over what an earlier row left behind them."""
        width = max(columns, int(self._filled[position]))
        begin = self.begin["block_table"] + position * self.row_width
        return np.arange(begin, begin + width), values[:width]
