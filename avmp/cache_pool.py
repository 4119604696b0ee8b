"""The arena: the allocator's decisions carried out on real memory, and the tables that kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

from avmp.address_space import Disturbance
from avmp.allocator import Allocator
from avmp.backends import Backend, make_backend
from avmp.batch_tables import make_batch
from avmp.device_batch import Batch, Held
from avmp.device_memory import allocate_arena, resolve_memory
from avmp.device_tables import Change, DeviceTables
from avmp.effects import Launch
from avmp.errors import Inconsistent, InvalidArgument, Unsupported
from avmp.geometry import Geometry
from avmp.growth import Counts
from avmp.handles import Handles, Int64Array, as_count, as_handles
from avmp.host_swap import HostSwap
from avmp.layout import Layout
from avmp.options import Options
from avmp.pool_checks import check_batch, check_launch, limits_of
from avmp.uploads import StreamTransport, Transport, Uploader
from avmp.views import Views

MOST_BATCH_TOKENS = 8192


class CachePool(Allocator):
    """An allocator with its arena. Every operation of ``Allocator`` is here, under the same name.

    What an operation decides is carried out on the device's current stream by the next ``flush``, which ``batch``
    calls: between the two, the arena lags behind the tables of the host. No call waits for the device.
    """

    def __init__(
        self,
        geometry: Geometry | Layout,
        memory: int | str | float | None = None,
        *,
        device: torch.device | str | None = None,
        max_rows: int = 256,
        max_tokens_per_sequence: int | None = None,
        max_batch_tokens: int | None = None,
        options: Options | None = None,
        disturbance: Disturbance | None = None,
        kv_order: str = "NHD",
        lane_count: int | None = None,
        backend: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        """An arena of ``memory`` on ``device`` (the current CUDA device, or the CPU where there is none).

        ``memory`` is bytes, "8GiB", or a share of what is free there (a float). ``max_batch_tokens`` bounds the
        tokens of one step; it defaults to 8192 or one longest sequence, if that is more. ``kv_order`` is the order
        inside a page, NHD or HND. ``backend`` names who carries out effects; by default the device decides.
        Otherwise as ``Allocator``.
        """
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        options = options or Options()
        if not options.record_effects:
            raise InvalidArgument("record_effects=False: a pool without effects would never move a byte")
        if not isinstance(geometry, Layout):
            if memory is None:
                raise InvalidArgument("memory is missing: give bytes, a size like '8GiB', or a share like 0.9")
            geometry = Layout.plan(geometry, resolve_memory(memory, self.device), lane_count, kv_order)
            memory = None
        elif lane_count is not None or kv_order != "NHD":
            raise InvalidArgument("lane_count and kv_order are part of a Layout; give them to Layout.plan")
        super().__init__(
            geometry,
            memory,  # type: ignore[arg-type]
            max_rows=max_rows,
            max_tokens_per_sequence=max_tokens_per_sequence,
            options=options,
            disturbance=disturbance,
        )
        if max_batch_tokens is None:
            max_batch_tokens = max(MOST_BATCH_TOKENS, min(self.max_tokens_per_sequence, 2**20), max_rows)
        tokens = max(as_count(max_batch_tokens, "max_batch_tokens"), 1)
        with torch.inference_mode(False):  # whose tensors could not be written to outside of it
            self._allocate(backend, transport, tokens)
        # At debug=2 ids are checked before they are used; a meta device has none.
        self._checks = options.debug >= 2 and self.device.type != "meta"
        self.launches = 0

    def _allocate(self, backend: str | None, transport: Transport | None, tokens: int) -> None:
        layout, table = self.layout, self._ledger.table
        self.lanes = allocate_arena(layout, self.device)
        self.device = self.lanes.device  # with its index: the current device may change
        self.views = Views(self.lanes, layout) if layout.geometry is not None else None
        self.backend: Backend = make_backend(
            backend, self.lanes, {"page": layout.page_bytes, "slot": layout.slot_bytes}
        )
        self.tables = DeviceTables(
            self._space.pages.capacity + 1,
            self._space.slots.capacity + 1,
            table.max_rows,
            table.row_width,
            tokens,
            self.device,
        )
        self._uploader = Uploader(self.tables.words, self.backend, transport or StreamTransport(self.device))
        self._host = HostSwap(self.lanes, self.backend)

    # -- memory ----------------------------------------------------------------------------------------------------

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of an attention layer (the model's index): ``[pages, page_tokens, kv_heads, head_dim]``, zero-copy.
        V is None for a layer that stores K only."""
        return self._views().kv[self._known_layer(layer, self._views().kv, "attention")]

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The parts of a state layer (the model's index), each ``[slots, *part_shape]``, zero-copy."""
        return self._views().state[self._known_layer(layer, self._views().state, "state")]

    def _views(self) -> Views:
        if self.views is None:
            raise InvalidArgument("this pool was made from unit sizes; views need a geometry")
        return self.views

    @staticmethod
    def _known_layer(layer: int, known: dict[int, Any], what: str) -> int:
        if layer not in known:
            raise InvalidArgument(f"layer {layer} is no {what} layer of this model; those are {sorted(known)}")
        return layer

    @property
    def relocation_epoch(self) -> int:
        """Changes whenever a unit has moved: physical ids read before are stale then."""
        return self._space.counters.relocations

    # -- a step ----------------------------------------------------------------------------------------------------

    def batch(  # type: ignore[override]
        self, sequences: Handles, query_lens: Counts | None = None, pad_to: int | None = None
    ) -> Batch:
        """This step's tables on the device, after everything that was decided before has been carried out there.
        See ``Allocator.batch`` for the query lengths, and ``Batch``."""
        self._require_whole()
        host, begin = make_batch(self._ledger, self._rows(sequences), query_lens, pad_to)
        table, tables = self._ledger.table, self.tables
        tables.require_room(len(host.seq_lens), host.num_tokens)
        self._take_up(host, begin)
        with self._carrying_out():
            changes = self._run_effects()
            handles = table.handle[table.ids(host.rows)]
            self._upload(changes + tables.changes_of_batch(host, handles, table.dirty.drain()))
        rows = len(host.seq_lens)
        batch = Batch(
            counters=self._space.counters,
            epoch=self.relocation_epoch,
            block_table=tables.block_table[:rows],
            seq_lens=tables.seq_lens[:rows],
            query_start_loc=tables.query_start_loc[: rows + 1],
            slot_mapping=tables.slot_mapping[: len(host.slot_mapping)],
            state_indices=tables.state_indices[:rows],
            has_initial_state=tables.has_initial_state[:rows],
            page_table=tables.page_table,
            slot_table=tables.slot_table,
            num_sequences=host.num_sequences,
            num_tokens=host.num_tokens,
            max_query_len=host.max_query_len,
            max_seq_len=host.max_seq_len,
            columns=table.column_counts(table.ids(host.rows)),
            page_tokens=self.layout.page_tokens,
            tables=tables,
            number=tables.batches,
            backend=self.backend.name,
            held=Held(self._ledger, host.rows) if self._checks else None,
        )
        if batch.limits is not None:
            check_batch(batch, batch.limits, self.layout, self.backend.name)
        return batch

    def flush(self) -> None:
        """Carries out everything decided so far, on the current stream: data first, then the page tables."""
        self._require_whole()
        with self._carrying_out():
            self._upload(self._run_effects())

    def drain(self) -> NoReturn:
        """Not for a pool, which carries its effects out itself: raises Unsupported."""
        raise Unsupported("a CachePool carries out its own effects; use flush, or an Allocator with a device of yours")

    @contextmanager
    def _carrying_out(self) -> Iterator[None]:
        """What fails from here on leaves the arena torn, for what was decided is only known in part on the device:
        nothing may go on from there."""
        self._committing = True
        yield
        self._committing = False
        if self._checks:
            self.tables.limits = limits_of(*self._space.pools)
            self.check_mirrors()

    def _run_effects(self) -> list[Change]:
        """Enqueues all data effects; returns the changes of the page tables, which come after them."""
        launches, changes = self._drain(cells_too=False)  # the block table of the device is that of the last batch
        for launch in launches:
            self._launch(launch)
        self.launches += len(launches)
        return [
            (changes.page_ids + self.tables.begin["page_table"], changes.page_values),
            (changes.slot_ids + self.tables.begin["slot_table"], changes.slot_values),
        ]

    def _launch(self, launch: Launch) -> None:
        if self._checks:
            check_launch(launch, self._space.pages if launch.pool == "page" else self._space.slots)
        if launch.operation == "swap_out":
            self._host.leave(launch)
        elif launch.operation == "swap_in":
            self._host.come_back(launch)
        elif launch.operation in ("zero", "poison"):
            getattr(self.backend, launch.operation)(launch.pool, launch.destinations)
        else:
            getattr(self.backend, launch.operation)(launch.pool, launch.sources, launch.destinations)

    def _upload(self, changes: list[Change]) -> None:
        changes = [change for change in changes if len(change[0])]
        if changes:
            indices = np.concatenate([index for index, _ in changes])
            self._uploader.upload(indices, np.concatenate([values for _, values in changes]))

    def check_mirrors(self) -> None:
        """Raises Inconsistent unless the device's page tables equal the host's. Waits for the device."""
        for pool, mirror in zip(self._space.pools, (self.tables.page_table, self.tables.slot_table), strict=True):
            if not np.array_equal(mirror.cpu().numpy(), pool.physical):
                raise Inconsistent(f"the device's {pool.kind} table differs from the host's")

    # -- operations that need a step to be complete ------------------------------------------------------------------

    def fits(self, operation: str, *arguments: Any, **keywords: Any) -> bool:
        """See ``Allocator.fits``. Raises what the operation would raise for tokens that no batch has taken up."""
        if operation in ("fork", "reorder", "snapshot", "swap_out") and arguments:
            arguments = (arguments[0] if operation == "fork" else as_handles(arguments[0]), *arguments[1:])
            self._require_batched(operation, arguments[0])
        return super().fits(operation, *arguments, **keywords)

    def fork(self, sequence: int, n: int = 1) -> Int64Array:
        """See ``Allocator.fork``. Raises InvalidArgument where tokens were added that no batch has taken up."""
        self._require_batched("fork", sequence)
        return super().fork(sequence, n)

    def reorder(self, sequences: Handles, parents: Iterable[int]) -> None:
        """See ``Allocator.reorder``. Raises InvalidArgument where tokens were added that no batch has taken up."""
        sequences = as_handles(sequences)
        self._require_batched("reorder", sequences)
        super().reorder(sequences, parents)

    def snapshot(self, sequence: Any) -> Any:
        """See ``Allocator.snapshot``. Raises InvalidArgument where tokens were added that no batch has taken up."""
        if not isinstance(sequence, (int, np.integer)):
            sequence = as_handles(sequence)
        self._require_batched("snapshot", sequence)
        return super().snapshot(sequence)

    def swap_out(self, sequences: Handles) -> Int64Array:
        """See ``Allocator.swap_out``. Raises InvalidArgument where tokens were added that no batch has taken up, and
        what torch raises where the host has no memory for the sequences; nothing has changed then."""
        sequences = as_handles(sequences)
        self._require_batched("swap_out", sequences)
        table = self._ledger.table
        rows = self._ids(sequences)
        wanted = [
            (pool, units)
            for row, pages in zip(rows.tolist(), (table.column_counts(rows) - table.front[rows]).tolist(), strict=True)
            for pool, units in (("page", pages), ("slot", int(table.slot[row] > 0)))
        ]
        with torch.inference_mode(False):  # they may be filled outside of it
            buffers = self._host.prepare(wanted)
        swapped = super().swap_out(sequences)
        self._host.expect(buffers)
        return swapped

    def discard(self, swapped: Handles) -> None:
        """See ``Allocator.discard``; the host buffers are gone at once."""
        super().discard(swapped)
        self.flush()
        self._host.forget(self._ledger.swapped)

    def _require_batched(self, operation: str, sequences: Handles) -> None:
        table = self._ledger.table
        rows = self._ids(sequences)
        pending = rows[table.mark[rows] != table.length[rows]]
        if len(pending):
            row = int(pending[0])
            raise InvalidArgument(
                f"{operation}: {int(table.length[row] - table.mark[row])} tokens of a sequence have been added, but no "
                "batch has taken them up: their keys, values and states are not there yet; call batch and run the step"
            )
