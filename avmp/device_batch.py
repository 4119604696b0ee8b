"""One step's tables on the device, and the same in physical ids for kernels that know nothing of virtual ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from avmp.address_space import Counters
from avmp.bounds import Limits
from avmp.device_tables import DeviceTables
from avmp.errors import Inconsistent, InvalidArgument
from avmp.handles import Int64Array
from avmp.ledger import Ledger
from avmp.sequences import Rows
from avmp.uploads import send_array


@dataclass(frozen=True)
class Stamped:
    """Physical ids hold until something moves: ``epoch`` is the number of relocations that the tables they were read
    from knew of."""

    counters: Counters
    epoch: int

    def require_current(self) -> None:
        """Raises Inconsistent if a unit has moved since."""
        if self.epoch != self.counters.relocations:
            raise Inconsistent(
                f"physical ids of relocation epoch {self.epoch} are stale: units have moved since (epoch "
                f"{self.counters.relocations}); ask a new batch for its physical ids"
            )


class Held:
    """What the rows of a batch held when it was made: its tables are right as long as they hold it. Other rows may
    come, grow and go, and units may move."""

    def __init__(self, ledger: Ledger, rows: Rows) -> None:
        table = self._table = ledger.table
        self._ids = table.ids(rows).copy()
        self._handles = table.handle[self._ids].copy()
        self._columns = np.arange(table.row_width) < table.column_counts(self._ids)[:, None]
        self._pages, self._slots = self._now()
        held = (np.unique(self._pages), np.unique(self._slots))
        self._units = [(pool, ids, pool.generation[ids]) for pool, ids in zip(ledger.space.pools, held, strict=True)]

    def require(self, what: str) -> None:
        """Raises Inconsistent if any of it has been freed, or a row that is still there holds something else."""
        for pool, ids, generations in self._units:
            freed = ids[pool.generation[ids] != generations]
            if len(freed):
                raise Inconsistent(
                    f"{what} is stale: {pool.kind} {freed[0]}, which it reads and writes, has been freed since and may "
                    "be another sequence's; make a new batch"
                )
        pages, slots = self._now()
        changed = (pages != self._pages).any(1) | (slots != self._slots)
        changed &= self._table.handle[self._ids] == self._handles
        if changed.any():
            raise Inconsistent(
                f"{what} is stale: the sequence of row {int(changed.argmax())} holds other pages or another slot "
                "since; make a new batch"
            )

    def _now(self) -> tuple[Int64Array, Int64Array]:
        pages = np.where(self._columns, self._table.block_table[self._ids], 0).astype(np.int64)
        return pages, self._table.slot[self._ids].astype(np.int64)


@dataclass(frozen=True)
class PhysicalTable(Stamped):
    """A dense block table of physical page ids; see ``Batch.physical``."""

    block_table: torch.Tensor


@dataclass(frozen=True)
class PhysicalCsr(Stamped):
    """A compressed block table of physical page ids; see ``Batch.physical_csr``."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor


@dataclass(frozen=True)
class Batch(Stamped):
    """One step's tables on the device, rows in the caller's order, padding behind them as 0.

    ``R`` is ``pad_to`` or the number of sequences. All ids are virtual: a kernel finds page v at physical id
    ``page_table[v]``. The tensors are views of the pool's buffers, at the same addresses in every step: they are valid
    until the next change to the pool, and the next batch overwrites them.

    * ``block_table`` int32 ``[R, row_width]``, ``seq_lens`` int32 ``[R]`` (this step's tokens included),
      ``query_start_loc`` int32 ``[R + 1]``, ``state_indices`` int32 ``[R]``, ``has_initial_state`` bool ``[R]``;
    * ``slot_mapping`` int64 ``[num_tokens]``: ``page * page_tokens + offset`` of each token of this step;
    * ``page_table`` and ``slot_table`` int32: physical ids by virtual id, the same for every batch;
    * ``backend`` is the pool's: the operations of ``ops.py`` use it for this batch;
    * on the host: ``columns`` int64 ``[num_sequences]``, the pages of each row, and the integers;
    * ``held``, of a pool at ``debug=2``: what the rows held, so that every operation finds out when that has changed.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor
    page_table: torch.Tensor
    slot_table: torch.Tensor
    num_sequences: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    columns: Int64Array
    page_tokens: int
    tables: DeviceTables
    number: int
    backend: str
    first_valid_id: int = 1
    held: Held | None = None

    @property
    def limits(self) -> Limits | None:
        """Of a pool at ``debug=2``: what it owns by the page tables of the device at this moment, so that every
        operation on this batch checks its ids; None otherwise."""
        return self.tables.limits

    def require_latest(self) -> None:
        """Raises Inconsistent if a later batch has overwritten these tables; of a pool at ``debug=2`` also if something
        that they lead to has been given up since. Virtual ids stay valid when units move."""
        if self.number != self.tables.batches:
            raise Inconsistent(
                f"batch {self.number} was overwritten by batch {self.tables.batches}; use the latest one"
            )
        if self.held is not None:
            self.held.require(f"batch {self.number}")

    def physical(self, out: torch.Tensor | None = None) -> PhysicalTable:
        """The block table in physical ids, dense, for kernels that know nothing of virtual ones.

        ``out`` is int32 with at least R rows and row_width columns; a fresh tensor by default. Columns beyond a
        sequence's pages are 0, the null page, and so are those that ``release_front`` has given up: a kernel has to
        mask them by its window, or be told that 0 is null (``first_valid_id=1``). Raises Inconsistent for a batch that
        a later one or a relocation has overtaken.
        """
        self.require_current()
        self.require_latest()
        shape = self.block_table.shape
        table = self.page_table[self.block_table.long()]
        if out is None:
            return PhysicalTable(self.counters, self.epoch, table)
        if out.dtype != torch.int32 or out.dim() != 2 or any(o < s for o, s in zip(out.shape, shape, strict=True)):
            raise InvalidArgument(f"physical: out must be int32 of at least {tuple(shape)}, got {tuple(out.shape)}")
        out[: shape[0], : shape[1]].copy_(table)
        return PhysicalTable(self.counters, self.epoch, out)

    def physical_csr(self, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> PhysicalCsr:
        """The same as compressed rows: ``kv_indptr`` int32 ``[R + 1]``, ``kv_indices`` int32 ``[pages]`` (physical)
        and ``kv_last_page_len`` int32 ``[R]`` (1 to page_tokens; 0 for an empty sequence and for padding).

        ``out`` is a triple of int32 vectors at least that long, written from their beginning. Raises as ``physical``.
        """
        self.require_current()
        self.require_latest()
        rows, device = len(self.seq_lens), self.seq_lens.device
        counts = np.zeros(rows, dtype=np.int64)
        counts[: self.num_sequences] = self.columns
        indptr = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        total, size = int(indptr[-1]), self.page_tokens
        row = np.repeat(np.arange(rows), counts)
        column = np.arange(total) - np.repeat(indptr[:-1], counts)
        cells = send_array(row * self.block_table.shape[1] + column, device)
        pages = self.page_table[self.block_table.reshape(-1)[cells].long()]
        last = torch.where(self.seq_lens > 0, (self.seq_lens - 1) % size + 1, 0).to(torch.int32)
        made = send_array(indptr, device), pages, last
        if out is not None:
            wanted = [values.numel() for values in made]
            if len(out) != 3 or any(
                b.dtype != torch.int32 or b.dim() != 1 or b.numel() < n for b, n in zip(out, wanted, strict=True)
            ):
                raise InvalidArgument(f"physical_csr: out must be three int32 vectors of at least {wanted} entries")
            made = tuple(b[: v.numel()].copy_(v) for b, v in zip(out, made, strict=True))  # type: ignore[assignment]
        return PhysicalCsr(self.counters, self.epoch, *made)
