"""The cache that is passed to ``generate`` and ``forward``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from avmp.address_space import Disturbance
from avmp.branching import live_history
from avmp.cache_pool import CachePool
from avmp.errors import InvalidArgument, Unsupported
from avmp.handles import NOTHING, Int64Array
from avmp.integrations.transformers_arena import SharedArena
from avmp.integrations.transformers_generate import Request, announced
from avmp.integrations.transformers_layers import AttentionLayer, HybridLayer, Place, StateLayer, require_in_place
from avmp.integrations.transformers_rows import Rows
from avmp.integrations.transformers_support import ATTENTION, BOTH, STATE, Model, read_model
from avmp.layout import Layout
from avmp.options import Options

LEAST_BATCH_TOKENS, MOST_BATCH_TOKENS = 1 << 16, 1 << 20
"""Tokens of one forward that there is room for in the tables, unless the caller says how many, or fewer fit the arena
anyway."""

_LAYERS = {ATTENTION: AttentionLayer, STATE: StateLayer, BOTH: HybridLayer}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All rows of a cache at ``length`` tokens; ``snapshots`` are the pool's handles, one per row."""

    length: int
    snapshots: Int64Array


class AvmpCache(Cache):
    """All keys and values, convolution windows and recurrent states of a model, in one arena that is allocated once.

    Pass it as the cache to ``generate`` and to ``forward``: ``cache=`` from transformers 5.24 on, before that
    ``past_key_values=`` (``cache_params=`` for Mamba-2). Rows of a batch are sequences of a ``CachePool``: beams share
    pages, and reordering them changes tables and copies one page and one state at most per new row. Tokens come one
    step, one chunk or one conversation turn at a time; ``reset()`` makes room for the next batch. Inference only.

    Memory: ``memory`` bytes of arena (and 2 MiB to align it), tables of T bytes, and 8 T, but 8 MiB at most, for
    changing them, all allocated here; ``nbytes`` is the sum, and does not change. T is 4 bytes for each page and slot
    that the arena could have, ``4 * max_rows * (pages of the longest row + 4)``, ``8 * max_batch_tokens``, and less
    than 256. Beyond that: with any ``attn_implementation`` but ``"avmp"``, a copy of the keys and values of one layer,
    the one that is being computed, rounded up to whole pages; with ``"avmp"``, which reads pages in place and leaves
    out padding, none, but for the buffers of constant size of the plain-torch backend. States are changed in place as
    long as the rows lie equally spaced in the arena; where they do not, those of one layer at a time are staged beside
    it.

    ``share()`` makes another cache in the same arena, and ``fork()`` (or ``copy.deepcopy``) one that starts with the
    same tokens. Where memory is short, ``evictable`` caches of the arena are moved to host memory, the one used
    longest ago first, and come back by themselves when they are used.

    Raises OutOfMemory with the numbers, before anything is computed: in ``generate`` for all tokens that the request
    may come to (unless ``check_ahead=False``), in ``forward`` for the tokens it brings. Everything in the arena is as
    it was then; rows that had no tokens yet are gone.

    A forward that was interrupted (an error, Ctrl-C) leaves layers with different numbers of tokens: the next one
    raises Inconsistent, until the cache is taken back by ``crop`` or ``reset()``. ``get_seq_length()`` is what all
    layers have then, and ``crop(0)`` goes back to that (with states, if a checkpoint is there); with states only, there
    is ``reset()`` alone. A forward counts as done once the last layer has stored its keys and values, or its state: one
    that stops behind that, with an error in the last MLP say, has brought its tokens, and must not bring them again.
    The same holds for a decoding step that stops inside of the last layer, if that has a state, which models change in
    place and tell nobody.
    """

    is_compileable = False

    def __init__(
        self,
        model_or_config: Any,
        memory: int | str | float = "2GiB",
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        ssm_dtype: torch.dtype | str | None = None,
        page_tokens: int = 16,
        max_rows: int = 256,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        evictable: bool = False,
        check_ahead: bool = True,
        options: Options | None = None,
        disturbance: Disturbance | None = None,
        backend: str | None = None,
    ) -> None:
        """An arena of ``memory`` (bytes, "8GiB", or a share of what is free) on the model's device.

        ``dtype`` is that of keys, values and windows, by default the model's; ``ssm_dtype`` that of recurrent states,
        by default float32. A page holds ``page_tokens`` tokens. ``max_rows`` bounds the rows of all caches in the
        arena, ``max_length`` the tokens of a row (default: what the model is made for, or what fits), and
        ``max_batch_tokens`` the tokens of one forward (default: 65,536 or one longest row, or what fits). The rest is
        as in ``CachePool``.

        Raises Unsupported for a model that does not work, with a list of those that do, or an attention that needs a
        later version of transformers, and ArenaTooSmall.
        """
        model = read_model(model_or_config, dtype, ssm_dtype, page_tokens)
        if model.paged:
            require_in_place()
        with torch.inference_mode(False):
            pool = CachePool(
                model.geometry,
                memory,
                device=device or model.device,
                max_rows=max_rows,
                max_tokens_per_sequence=max_length,
                max_batch_tokens=max_batch_tokens or _batch_tokens(model, memory, max_rows, max_length),
                options=options,
                disturbance=disturbance,
                backend=backend,
            )
        self._assemble(model, SharedArena(pool), evictable, check_ahead)

    def _assemble(self, model: Model, arena: SharedArena, evictable: bool, check_ahead: bool) -> None:
        self._model, self._arena, self.check_ahead = model, arena, check_ahead
        self._user_defined = False
        geometry = model.geometry
        attention, states = (
            [layer.layer for layer in part] for part in (geometry.attention_layers, geometry.state_layers)
        )
        self._rows = Rows(arena, attention, states, evictable)
        self._checkpoints: list[Checkpoint] = []
        layers = [
            _LAYERS[kind](Place(self._rows, index, model)) if kind in _LAYERS else layer
            for index, (kind, layer) in enumerate(model.layers)
        ]
        super().__init__(layers=layers)

    # -- what is in it ---------------------------------------------------------------------------------------------

    @property
    def pool(self) -> CachePool:
        """The pool, with everything in its place: for ``stats``, ``check`` and the like. Units may be taken from it;
        the sequences of its caches are theirs."""
        self._arena.settle()
        self._arena.pool.flush()
        return self._arena.pool

    @property
    def sequences(self) -> Int64Array:
        """Handles of the pool's sequences, int64, one per row; empty before the first forward and while swapped out."""
        return self._rows.sequences.copy()

    @property
    def batch_size(self) -> int:
        """How many rows it holds; -1 before the first forward."""
        return self._rows.count or -1

    @property
    def is_initialized(self) -> bool:
        """Whether it holds rows."""
        return self._rows.count > 0

    @property
    def nbytes(self) -> int:
        """Bytes that the arena, its tables and the buffers for changing them take, for all caches in it; the latter lie
        in host memory for the most part. It does not change."""
        pool = self._arena.pool
        return int(pool.lanes.untyped_storage().nbytes() + pool.tables.words.nbytes + pool._uploader.nbytes)

    @property
    def evictable(self) -> bool:
        """Whether the rows may be moved to host memory when another cache of the arena needs the room."""
        return self._rows.evictable

    @evictable.setter
    def evictable(self, value: bool) -> None:
        self._rows.evictable = value

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens of each row that all layers have, padding included, or those of one layer, which has more while a
        forward is under way, or where it was interrupted."""
        progress = self._rows.progress
        if layer_idx is None and progress.seen:
            return progress.whole
        return int(super().get_seq_length(layer_idx or 0))

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The same as ``get_max_length``, under its older name."""
        length: int = self.get_max_length(layer_idx)
        return length

    def __repr__(self) -> str:
        rows, pool = self._rows, self._arena.pool
        return f"AvmpCache({rows.count} rows of {rows.length} tokens, {pool.layout.arena_bytes:,} B of arena)"

    # -- beginning again -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """No rows and no checkpoints, as at the beginning."""
        self._checkpoints = []
        self._rows.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens of every row (0 or less, as transformers counts).

        It counts from ``get_seq_length()``: the tokens of a forward that was interrupted are not among them, and 0
        takes back what it has done; 0 does nothing behind one that was not. With states, only to where a ``checkpoint``
        is, or to the beginning: raises Unsupported otherwise.
        """
        rows = self._require_tokens("crop")
        present = rows.progress.whole
        length = present + int(tokens_to_remove)
        if tokens_to_remove > 0 or length < 0:
            raise InvalidArgument(f"crop({tokens_to_remove}): expected 0 to {-present}")
        changes = rows.count > 0 and (tokens_to_remove < 0 or bool(rows.progress.behind))
        marks = sorted({mark.length for mark in self._checkpoints} | {0})
        if changes and self._has_states and length not in marks:
            raise Unsupported(
                f"crop to {length} tokens: states go back to a checkpoint() only, and those are at {marks}"
            )
        rows.unread = None
        if not changes:
            return
        rows.wake()
        self._keep_checkpoints([mark for mark in self._checkpoints if mark.length <= length])
        rows.progress.tear(length)  # checkpoints first: rows at 0 may be let go of, with theirs
        if self._has_states and length:
            self._restore({handle for mark in self._checkpoints if mark.length == length for handle in mark.snapshots})
        else:
            self._arena.run(rows, "truncate", rows.sequences, rows.stored(length))
        rows.set_length(length)

    def _restore(self, snapshots: set[int]) -> None:
        """Each row becomes what that one of the snapshots holds which it comes from; rows may have changed places
        since, and ``truncate`` would do nothing where all tokens that are taken back were padding."""
        ledger = self._arena.pool._ledger
        for sequence in self._rows.sequences.tolist():
            history = live_history(ledger, ledger.table.row(sequence))
            snapshot = next(handle for handle in reversed(history) if handle in snapshots)
            self._arena.run(self._rows, "restore", sequence, snapshot)

    @property
    def _has_states(self) -> bool:
        return self._arena.pool.layout.has_slots

    def checkpoint(self) -> Checkpoint:
        """A point to ``crop`` back to: references to the pages, and a slot per row for its state. Lasts until the cache
        is cropped to before it, or reset, and stays in the arena when the rows are swapped out. Raises OutOfMemory."""
        rows = self._require_tokens("checkpoint")
        if rows.progress.is_first:
            raise InvalidArgument("checkpoint of an empty cache: there is nothing to come back to")
        rows.progress.require_whole()
        rows.require(rows.count)
        mark = Checkpoint(rows.length, self._arena.run(rows, "snapshot", rows.sequences))
        self._checkpoints.append(mark)
        rows.held["drop"] = np.concatenate([rows.held["drop"], mark.snapshots])
        return mark

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those that ``crop`` can go back to, oldest first."""
        return tuple(self._checkpoints)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Lets go of a checkpoint, and of what only it holds."""
        if checkpoint not in self._checkpoints:
            raise InvalidArgument(f"forget: {checkpoint} is no checkpoint of this cache")
        self._keep_checkpoints([mark for mark in self._checkpoints if mark is not checkpoint])

    def _require_tokens(self, what: str) -> Rows:
        """The rows. Raises Unsupported without attention layers, which are what counts tokens."""
        progress = self._rows.progress
        if not progress.seen:
            instead = progress.remedy if progress.behind else "fork() the cache instead"
            raise Unsupported(f"{what}: a model with states only does not count its tokens; {instead}")
        return self._rows

    def _keep_checkpoints(self, kept: list[Checkpoint]) -> None:
        lost = [mark.snapshots for mark in self._checkpoints if mark not in kept]
        if lost:
            self._arena.run(self._rows, "drop", np.concatenate(lost))
        self._checkpoints = kept
        self._rows.held["drop"] = np.concatenate([NOTHING, *(mark.snapshots for mark in kept)])

    # -- rows ------------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row ``beam_idx[i]`` was. Raises OutOfMemory."""
        parents = beam_idx.tolist()
        if len(parents) != self._rows.count:
            raise InvalidArgument(f"reorder_cache: {len(parents)} indices for {self._rows.count} rows")
        if parents:
            self._rows.require(len(parents))
            self._arena.run(self._rows, "reorder", self._rows.sequences, parents)
            self._rearranged(self._rows.sequences, parents)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one behind the other. Raises OutOfMemory."""
        self.batch_select_indices(torch.arange(self._rows.count).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i becomes what row ``indices[i]`` was; rows that are not named are gone. Raises OutOfMemory."""
        rows, chosen = self._rows, torch.arange(self._rows.count)[indices.cpu()].tolist()
        if not chosen:
            return self.reset()
        rows.require(rows.count)
        again = [row for place, row in enumerate(chosen) if chosen.index(row) < place]
        forks = iter(self._forks(again))
        selected = [
            next(forks) if chosen.index(row) < place else rows.sequences[row] for place, row in enumerate(chosen)
        ]
        lost = [sequence for row, sequence in enumerate(rows.sequences.tolist()) if row not in chosen]
        self._arena.run(rows, "release", lost)
        self._rearranged(np.array(selected, dtype=np.int64), chosen)

    def _forks(self, parents: list[int]) -> list[int]:
        """One more sequence like each of these rows, all or none."""
        forks: list[int] = []
        try:
            for row in parents:
                forks += self._arena.run(self._rows, "fork", int(self._rows.sequences[row]), 1).tolist()
        except BaseException:
            self._arena.run(self._rows, "release", forks)
            raise
        return forks

    def _rearranged(self, sequences: Int64Array, parents: list[int]) -> None:
        rows = self._rows
        rows.become(sequences)
        if rows.padding is not None:
            rows.set_padding(rows.padding[torch.tensor(parents, device=rows.padding.device)])

    # -- other caches ----------------------------------------------------------------------------------------------

    def share(self, evictable: bool = False) -> AvmpCache:
        """An empty cache in the same arena, for another batch or conversation with the same model."""
        cache = type(self).__new__(type(self))
        cache._assemble(self._model, self._arena, evictable, self.check_ahead)
        return cache

    def fork(self) -> AvmpCache:
        """A cache in the same arena with the same rows, sharing their pages; checkpoints stay behind. Raises
        OutOfMemory."""
        cache, rows = self.share(self.evictable), self._rows
        if rows.count:
            rows.require(rows.count)
            cache._rows.become(np.array(self._forks(list(range(rows.count))), dtype=np.int64))
            cache._rows.take_after(rows)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> AvmpCache:
        return self.fork()

    def swap_out(self) -> None:
        """The rows leave for host memory, bit by bit as they are, until ``swap_in`` or the next use. Pages that rows or
        caches had in common are no longer shared when they come back, and take more room."""
        if self._rows.count:
            self._rows.swap_out()
            self._arena.pool.flush()

    def swap_in(self) -> None:
        """They are back. Raises OutOfMemory."""
        self._rows.wake()

    # -- what transformers calls -----------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The window of a layer. Where a model calls this, it is the first thing that the layer's step asks for."""
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            layer.begin_step(sys._getframe(1))
        window: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return window

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether that layer, by default the last one with states, has any. Older models ask before each step."""
        self._rows.progress.no_longer_asking()
        return bool(super().has_previous_state(layer_idx, state_idx))

    @property
    def _is_user_defined(self) -> bool:
        """Set by ``generate`` on a cache that it is given, before it computes anything."""
        return self._user_defined

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._user_defined = value
        request = announced()
        if request is None:
            return
        if self._model.paged:
            require_in_place()
            if request.attentions:
                raise Unsupported("attn_implementation='avmp' does not do output_attentions; use 'eager'")
        if self.check_ahead:
            self._require_room(request)

    def _require_room(self, request: Request) -> None:
        """Raises OutOfMemory or RowTooLong if the request might come to find no room, after evictions."""
        rows, tokens = self._rows, np.full(request.rows, request.tokens, dtype=np.int64)
        if request.mask is not None and self._model.paged:
            tokens -= (request.mask == 0).sum(1).cpu().numpy()
        if rows.count == 0:
            self._arena.require(rows, "admit", tokens)
        elif rows.count == request.rows:
            rows.wake()
            more = np.maximum(tokens - rows.stored(rows.length), 0)
            self._arena.require(rows, "extend", rows.sequences, more)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Raises Unsupported: rows leave whole."""
        raise Unsupported("offload of one layer: a page holds all layers; use swap_out(), or an evictable cache")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Raises Unsupported: rows come back whole."""
        raise Unsupported("prefetch of one layer: a page holds all layers; use swap_in()")

    def early_initialization(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: the arena is there from the beginning."""


def _batch_tokens(model: Model, memory: int | str | float, max_rows: int, max_length: int | None) -> int:
    longest = max_length or model.geometry.max_position_embeddings or 0
    tokens = max(LEAST_BATCH_TOKENS, min(longest, MOST_BATCH_TOKENS))
    if isinstance(memory, float):  # a share of what is free: no small arena, whose tables would outgrow it
        return tokens
    layout = Layout.plan(model.geometry, memory)
    return min(tokens, max(layout.max_pages() * layout.page_tokens if layout.has_pages else 0, max_rows))
