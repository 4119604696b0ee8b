"""The sequences of one transformers cache: one for each row of a batch, all of them equally far."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from avmp.device_batch import Batch
from avmp.errors import Inconsistent, InvalidArgument, OutOfMemory, RowTooLong, Unsupported
from avmp.handles import ID_MASK, NOTHING, Int64Array
from avmp.integrations.transformers_arena import SharedArena, Staged
from avmp.integrations.transformers_progress import Progress


class Added(NamedTuple):
    """The tokens of one step: how many of each row take memory, int64 ``[rows]`` or one number for all; ``padding`` of
    the rows with them; ``real`` are those that take memory, int64 indices into ``[rows * tokens]`` (None: all)."""

    counts: int | Int64Array
    padding: torch.Tensor | None = None
    real: torch.Tensor | None = None


class Rows:
    """Rows come to life with the first forward. Every layer brings the same tokens; memory for them is made when the
    first attention layer brings them.

    ``length`` counts tokens as transformers does, padding included: those that there is memory for, which ``opener``,
    an attention layer, made last; ``progress`` counts those of each layer. Where a forward or a way back was
    interrupted, the pool's sequences may have fewer tokens than ``length``, but no fewer than ``progress.whole``. With
    ``padding`` (bool ``[rows, length]``, True for padding; None where there is none) padding takes no memory: the
    pool's sequences are shorter than ``length`` by it. ``held`` are the handles of what the rows hold, by the operation
    that lets go of it, and ``unread`` is a layer whose attention has to read its pages next.
    """

    def __init__(
        self, arena: SharedArena, attention_layers: Iterable[int], state_layers: Iterable[int], evictable: bool
    ) -> None:
        self.arena, self.pool, self.evictable = arena, arena.pool, evictable
        self.held = {"release": NOTHING, "discard": NOTHING, "drop": NOTHING}
        self.progress = Progress(attention_layers, state_layers)
        self.length = self.used = 0
        self.opener: int | None = None
        self.padding: torch.Tensor | None = None
        self.unread: int | None = None
        self.added = Added(0)
        self._batch: Batch | None = None
        self._pages: torch.Tensor | None = None
        self._places: slice | torch.Tensor | None = None
        self._epoch = -1
        arena.join(self)

    # -- coming and going ------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> Int64Array:
        """Handles of the pool's sequences, one per row; empty before the first forward, and while swapped out."""
        return self.held["release"]

    @property
    def count(self) -> int:
        """How many rows there are, in the arena or swapped out."""
        return len(self.sequences) + len(self.held["discard"])

    def become(self, sequences: Int64Array) -> None:
        """These are the rows from now on, or their places have changed."""
        self.held["release"] = sequences
        self.forget_step()

    def forget_step(self) -> None:
        """Nothing is under way; tables are made anew."""
        self.added = Added(0)
        self._batch = self._pages = self._places = None

    def require(self, count: int) -> None:
        """There are so many rows, in the arena: they are made, or brought back. Raises InvalidArgument where there
        are others, OutOfMemory."""
        if self.unread is not None:
            raise Inconsistent(
                f"the attention of layer {self.unread} has not read its pages: either it was interrupted there (crop "
                "the cache, or reset() it), or the cache was made for a configuration with "
                "attn_implementation='avmp', and the model that runs has another (make the cache from that model)"
            )
        if self.count == 0:
            sequences = self.arena.run(self, "admit", [0] * count)
            # They are all alike still: ascending slots are what states can be changed in place in.
            self.become(sequences[np.argsort(self._physical_slots(sequences))])
        elif self.count != count:
            raise InvalidArgument(
                f"a batch of {count} rows for a cache that holds {self.count}; reset() it, or use "
                "batch_select_indices or batch_repeat_interleave"
            )
        self.wake()
        self.used = self.arena.tick()

    def wake(self) -> None:
        """Brings the rows back if they were swapped out. Raises OutOfMemory."""
        swapped = self.held["discard"]
        if len(swapped):
            # In one: no interrupt finds the rows in both places, or in neither.
            self.held.update(release=self.arena.run(self, "swap_in", swapped), discard=NOTHING)
            self.forget_step()

    def swap_out(self) -> None:
        """The rows leave for host memory."""
        if len(self.sequences):
            self.held.update(discard=self.arena.run(self, "swap_out", self.sequences), release=NOTHING)
            self.forget_step()

    def reset(self) -> None:
        """No rows, as before the first forward."""
        self.unread = None
        self.progress.tear(0)
        for operation, handles in self.held.items():
            if len(handles):
                self.arena.run(self, operation, handles)
                self.held[operation] = NOTHING
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """So many tokens are left, the first ones; the pool's sequences have been cut to fit."""
        self.length, self.opener = length, None
        self.set_padding(None if self.padding is None else self.padding[:, :length])
        self.forget_step()
        self.progress.set_length(length)  # last: an interrupt before it is found out

    def set_padding(self, padding: torch.Tensor | None) -> None:
        """That of the tokens there are; None where none of them is padding any more."""
        self.padding = padding if padding is not None and padding.any() else None

    def take_after(self, origin: Rows) -> None:
        """As far as the rows that these are copies of; where their forward was interrupted, so was that of these."""
        self.set_length(origin.length)
        self.padding, self.opener, self.progress = origin.padding, origin.opener, copy.deepcopy(origin.progress)

    def stored(self, length: int) -> Int64Array:
        """How many of the first ``length`` tokens take memory, int64 ``[rows]``."""
        stored = np.full(self.count, length, dtype=np.int64)
        if self.padding is not None:
            stored -= self.padding[:, :length].sum(1).cpu().numpy()
        return stored

    # -- a step ----------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """A forward has been refused. Rows that had no tokens before it are let go of."""
        if self.progress.is_first:
            self.reset()

    def begin(self, layer: int, count: int, tokens: int, mask: torch.Tensor | None = None, paged: bool = False) -> None:
        """An attention layer brings ``tokens`` more of each row; the first one to do so makes room for them, and
        ``store`` follows.

        With ``paged``, padding takes no memory: ``mask`` ``[rows, tokens so far and these]`` is 0 where it is, None if
        there is none. Raises OutOfMemory, and Inconsistent where layers have brought different numbers of tokens.
        """
        self.require(count)
        self.progress.no_longer_asking()
        before = self.progress.seen[layer]
        if before != self.length and layer == self.opener:
            self.progress.require_whole()  # it made room for these tokens before, and was interrupted there
        self.progress.go_on(layer, before, tokens)
        if before != self.length:
            return
        self._require_readable(paged)
        with self._giving_up():
            added = self._added(tokens, mask) if paged else Added(tokens)
            # Ahead of the pool, and this first: an interrupt in between is found out by the next forward.
            self.progress.reach = self.length + tokens
            self.opener, self.length = layer, self.length + tokens
            self._make_room("run", added.counts)
        self._batch = self._pages = None
        self.added, self.padding = added, added.padding

    def foresee(self, counts: int | Int64Array, paged: bool) -> None:
        """For a state layer in front of all attention layers: raises what ``begin`` would raise for so many tokens more
        that take memory, before a state has gone ahead of keys and values."""
        self._require_readable(paged)
        with self._giving_up():
            self._make_room("require", counts)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A refusal leaves the rows as they were; those without tokens are let go of."""
        before = self.opener, self.length, self.progress.reach
        try:
            yield
        except (InvalidArgument, OutOfMemory, RowTooLong, Unsupported):
            self.opener, self.length, self.progress.reach = before
            self.give_up()
            raise

    def _require_readable(self, paged: bool) -> None:
        if self.padding is not None and not paged:
            raise Unsupported(
                "attn_implementation='avmp' has left the padding out of this cache, which other attention cannot read; "
                "go on with 'avmp', or reset() the cache"
            )

    def _make_room(self, how: str, counts: int | Int64Array) -> None:
        """Room for so many more tokens: ``how`` is ``"run"``, or ``"require"`` to make sure that there would be."""
        total, most = int(np.broadcast_to(counts, self.count).sum()), self.pool.tables.max_tokens
        if total > most:
            layout = self.pool.layout
            try:
                self.arena.require_free("extend", self.sequences, counts)  # nobody has to leave for what is refused
            except OutOfMemory:
                if total > layout.max_pages() * layout.page_tokens:  # the tables are made for what may fit
                    raise
            raise InvalidArgument(
                f"{total} tokens in one forward, the cache takes max_batch_tokens={most}: generate with "
                "prefill_chunk_size, or make the cache with more"
            )
        getattr(self.arena, how)(self, "extend", self.sequences, counts)

    def _added(self, tokens: int, mask: torch.Tensor | None) -> Added:
        """Raises Unsupported where the mask says something else of earlier tokens than it did then."""
        if mask is None:
            if self.padding is not None:
                raise Unsupported("attention mask: earlier steps had padding, this one has no mask at all")
            return Added(tokens)
        shape = self.count, self.length + tokens
        if mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
            raise InvalidArgument(f"attention mask {tuple(mask.shape)}: attn_implementation='avmp' expects {shape}")
        padding = mask[:, : shape[1]] == 0
        before, new = padding[:, : self.length], padding[:, self.length :]
        changed = before.any() if self.padding is None else (before != self.padding).any()
        *hidden, differs = torch.cat([new.sum(1), changed.view(1)]).tolist()  # the one wait for the device
        if differs:
            raise Unsupported("attention mask: it hides other earlier tokens than it did when they were new")
        if any(hidden):
            return Added(tokens - np.array(hidden), padding, (~new).flatten().nonzero()[:, 0])
        return Added(tokens, None if self.padding is None else padding)

    # -- where things lie ------------------------------------------------------------------------------------------

    def tables(self) -> Batch:
        """The tables of this step, and the arena as they say, though other caches may have had their steps since."""
        pool = self.pool
        if self._batch is None or self._batch.number != pool.tables.batches:
            self._batch = pool.batch(self.sequences, self.added.counts)
        elif len(pool._space.effects):  # a state that waits to be moved or copied must not change before that
            pool.flush()
        if self._epoch != pool.relocation_epoch:
            self._pages = self._places = None
            self._epoch = pool.relocation_epoch
        return self._batch

    def pages(self) -> torch.Tensor:
        """Physical ids of the pages of all rows, row by row, int64 ``[rows * pages of a row]``; without padding left
        out, all rows have equally many."""
        batch = self.tables()
        if self._pages is None:
            columns = self.pool.layout.pages_per_sequence(self.length)
            self._pages = batch.page_table[batch.block_table[:, :columns].flatten().long()].long()
        return self._pages

    def places(self) -> slice | torch.Tensor:
        """Physical slots of the rows: a slice where they are equally spaced, else int64 ``[rows]`` on the device."""
        batch = self.tables()
        if self._places is None:
            physical = self._physical_slots(self.sequences)
            steps = np.diff(physical)
            if len(steps) == 0 or (steps[0] > 0 and (steps == steps[0]).all()):
                step = int(steps[0]) if len(steps) else 1
                self._places = slice(int(physical[0]), int(physical[-1]) + 1, step)
            else:
                self._places = batch.slot_table[batch.state_indices.long()].long()
        return self._places

    def _physical_slots(self, sequences: Int64Array) -> Int64Array:
        """Where the states of these sequences lie at present, as the host knows it."""
        virtual = np.array([self.pool.slot(sequence) & ID_MASK for sequence in sequences.tolist()], dtype=np.int64)
        return self.pool._space.slots.physical[virtual].astype(np.int64)

    # -- states ----------------------------------------------------------------------------------------------------

    def read_state(self, layer: int, part: int) -> torch.Tensor:
        """One part of a layer's states, ``[rows, *part_shape]``, to be changed in place: a view of the arena where the
        rows are equally spaced, else staged until anything else happens."""
        places, staged = self.places(), self._staged(layer)
        view = self.pool.state(layer)[part]
        if isinstance(places, slice):
            self.arena.settle()
            return view[places].detach()
        if staged is None:
            self.arena.settle()
            staged = self.arena.staged = Staged(self, layer)
        if part not in staged.parts:
            with torch.inference_mode(False):  # the next forward may run without inference mode, and change it
                staged.parts[part] = view.index_select(0, places)
        return staged.parts[part]

    def write_state(self, layer: int, part: int, states: torch.Tensor) -> None:
        """Replaces one part of a layer's states."""
        staged = self._staged(layer)
        if staged is not None:
            staged.parts.pop(part, None)
        self._put(layer, part, states)

    def write_back(self, staged: Staged) -> None:
        """Puts staged states where they belong."""
        for part, states in staged.parts.items():
            self._put(staged.layer, part, states)

    def _put(self, layer: int, part: int, states: torch.Tensor) -> None:
        places, view = self.places(), self.pool.state(layer)[part]
        if isinstance(places, slice):
            view[places].copy_(states)
        else:
            view.index_copy_(0, places, states.to(view.dtype))

    def _staged(self, layer: int) -> Staged | None:
        staged = self.arena.staged
        return staged if staged is not None and staged.rows() is self and staged.layer == layer else None
