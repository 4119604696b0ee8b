"""The tables of one step, on the host: what kernels are told about the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from avmp.errors import InvalidArgument
from avmp.growth import Counts
from avmp.handles import MOST, NOTHING, Int64Array, as_count, as_counts
from avmp.ledger import Ledger
from avmp.sequences import Rows, SequenceTable

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class BatchTables:
    """One step's rows, in the caller's order, padding behind them. All ids are virtual; 0 means nothing.

    Valid until the next change to the allocator. ``R`` is ``pad_to`` or the number of sequences.

    * ``block_table`` int32 ``[R, row_width]``, ``seq_lens`` int32 ``[R]`` (this step's tokens included),
      ``query_start_loc`` int32 ``[R + 1]``, ``state_indices`` int32 ``[R]``, ``has_initial_state`` bool ``[R]``;
    * ``slot_mapping`` int64 ``[num_tokens]`` (empty without attention layers): ``page * page_tokens + offset`` of each
      token of this step; below ``first_valid_id * page_tokens`` where ``release_front`` has given up the page.
    """

    table: SequenceTable
    rows: Rows
    num_sequences: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    seq_lens: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    slot_mapping: Int64Array
    state_indices: NDArray[np.int32]
    has_initial_state: NDArray[np.bool_]
    first_valid_id: int = 1

    @cached_property
    def block_table(self) -> NDArray[np.int32]:
        """See the class. Gathered when first asked for, so ask before the next change; read-only, and a view where the
        rows are consecutive and nothing pads."""
        rows = _padded(self.table.block_table[self.rows], len(self.seq_lens))
        rows.flags.writeable = False
        return rows


def make_batch(
    ledger: Ledger, rows: Rows, query_lens: Counts | None, pad_to: int | None
) -> tuple[BatchTables, Int64Array]:
    """Tables for these rows, and where each row's pending tokens begin, which the caller stores.

    The query lengths default to the pending tokens. See ``Allocator.batch``.
    """
    table = ledger.table
    count = table.count(rows)
    padded = count if pad_to is None else as_count(pad_to, "batch: pad_to")
    if padded < count:
        raise InvalidArgument(f"batch: pad_to={pad_to} is less than the {count} sequences")
    lengths, marks = table.length[rows], table.mark[rows]
    begin = np.where(marks != lengths, marks, table.begin[rows])
    if query_lens is None:
        queries = lengths - begin
    else:
        queries = as_counts(query_lens, count, "batch: query_lens")
        if (queries > lengths).any():
            raise InvalidArgument("batch: a query length exceeds its sequence's length")
    max_query_len = int(queries.max(initial=0))
    ends = np.cumsum(queries)
    total = int(ends[-1]) if count else 0
    if total > MOST:
        raise InvalidArgument(f"batch: {total} tokens in one step; query_start_loc is int32")
    slot_mapping = _slot_mapping(ledger, rows, lengths, queries, ends, total, max_query_len)
    starts = np.zeros(padded + 1, dtype=np.int32)
    starts[1 : count + 1] = ends
    starts[count + 1 :] = total
    tables = BatchTables(
        table=table,
        rows=rows,
        num_sequences=count,
        num_tokens=total,
        max_query_len=max_query_len,
        max_seq_len=int(lengths.max(initial=0)),
        seq_lens=_padded(lengths.astype(np.int32), padded),
        query_start_loc=starts,
        slot_mapping=slot_mapping,
        state_indices=_padded(table.slot[rows].copy(), padded),
        has_initial_state=_padded(lengths > queries, padded),
    )
    return tables, begin


def _slot_mapping(
    ledger: Ledger, rows: Rows, lengths: Int64Array, queries: Int64Array, ends: Int64Array, total: int, longest: int
) -> Int64Array:
    table = ledger.table
    if not ledger.has_pages:
        return NOTHING
    if longest <= 1 and total == len(queries):
        return table.cursor[rows].copy()
    row = np.repeat(table.ids(rows), queries)
    position = np.repeat(lengths - ends, queries) + np.arange(total)
    column, offset = np.divmod(position, ledger.page_tokens)
    return table.block_table[row, column].astype(np.int64) * ledger.page_tokens + offset


def _padded(values: NDArray[Scalar], rows: int) -> NDArray[Scalar]:
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), dtype=values.dtype)
    padded[: len(values)] = values
    return padded
