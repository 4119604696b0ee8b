"""The layers of the cache, as transformers knows them: what they are asked to keep lies in the arena."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import transformers
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from avmp import ops
from avmp.errors import InvalidArgument, Unsupported
from avmp.handles import Int64Array
from avmp.integrations.transformers_rows import Rows
from avmp.integrations.transformers_support import Model
from avmp.integrations.transformers_versions import reads_in_place
from avmp.views import torch_dtype

Value = TypeVar("Value")

CONV, RECURRENT = 0, 1
"""The parts of a state layer, in the order of its geometry."""

MODELS_ASK_THE_CACHE = hasattr(Cache, "get_conv_state")
"""Models call ``cache.get_conv_state`` in each forward, once in each state layer; before transformers 5.22 they read
``cache.layers[i].conv_states`` instead, as does whoever only looks."""


INPUTS, TOKENS, MASK = "hidden_states", "seq_len", "attention_mask"
"""What all models call the inputs of a state layer, ``[rows, ...]``, how many tokens of each row these are, and a mask
``[rows, tokens]`` that is 0 where they are padding, or None."""


class Place(NamedTuple):
    """Which layer of which rows, of which model."""

    rows: Rows
    layer: int
    model: Model

    @property
    def is_ahead(self) -> bool:
        """Whether this is the first state layer and runs before any attention layer: it would go ahead of keys and
        values that find no room."""
        geometry = self.model.geometry
        attention = min((layer.layer for layer in geometry.attention_layers), default=-1)
        return self.layer == geometry.state_layers[0].layer <= attention


class Pages(NamedTuple):
    """What the cache hands to ``attn_implementation="avmp"`` through the arguments of a model's attention."""

    rows: Rows
    layer: int


def _refuse(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise Unsupported(f"{what} of one layer: all layers share the rows of the cache; use {instead}")

    return refuse


class _Together:
    """What concerns all layers at once is done by the cache."""

    is_compileable = False
    supports_early_init = False
    reset = _refuse("reset", "the cache's reset")
    crop = _refuse("crop", "the cache's crop")
    reorder_cache = _refuse("reorder_cache", "the cache's reorder_cache")
    batch_repeat_interleave = _refuse("batch_repeat_interleave", "the cache's batch_repeat_interleave")
    batch_select_indices = _refuse("batch_select_indices", "the cache's batch_select_indices")
    offload = _refuse("offload", "the cache's swap_out")
    prefetch = _refuse("prefetch", "the cache's swap_in")


def require_in_place() -> None:
    """Raises Unsupported where models do not tell the cache of their attention."""
    if not reads_in_place():
        raise Unsupported(
            f"attn_implementation='avmp' needs transformers 5.24, this is {transformers.__version__}; use another "
            "attn_implementation"
        )


def require_inference() -> None:
    """Raises InvalidArgument where gradients are recorded: what is changed in place could not have any."""
    if torch.is_grad_enabled():
        raise InvalidArgument("AvmpCache keeps no gradients: run the model under torch.no_grad() or inference_mode()")


def require_storable(what: str, place: Place, tensor: torch.Tensor, dtype: str, narrower: bool = False) -> None:
    """Raises InvalidArgument for a tensor that the arena cannot keep as it is."""
    require_inference()
    if tensor.device != place.rows.pool.device:
        raise InvalidArgument(
            f"{what} of layer {place.layer} are on {tensor.device}, the arena on {place.rows.pool.device}"
        )
    if tensor.dtype != torch_dtype(dtype) and not narrower:
        raise InvalidArgument(
            f"{what} of layer {place.layer} are {tensor.dtype}, the arena was made for {dtype}: make the cache from "
            "the model itself, or with its dtype"
        )


class AttentionLayer(_Together, DynamicLayer):
    """Keys and values of one layer. ``update`` gives them all back, gathered from their pages, or, where the model's
    attention is ``"avmp"``, leaves it to that to store the new ones and to read the pages in place."""

    is_sliding = False
    is_croppable = True

    def __init__(self, place: Place) -> None:
        DynamicLayer.__init__(self)
        self._open_pages(place)

    def _open_pages(self, place: Place) -> None:
        self._place = place
        self._kv = next(layer for layer in place.model.geometry.attention_layers if layer.layer == place.layer)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, kwargs: Any = None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values, ``[rows, kv_heads, tokens, head_dim]``."""
        kv, rows, layer = self._kv, self._place.rows, self._place.layer
        for what, states, dim in (("keys", key_states, kv.key_dim), ("values", value_states, kv.value_dim)):
            require_storable(what, self._place, states, kv.dtype)
            if states.dim() != 4 or (states.shape[1], states.shape[3]) != (kv.kv_heads, dim):
                raise InvalidArgument(
                    f"{what} of layer {layer}: expected [rows, {kv.kv_heads}, tokens, {dim}], got {tuple(states.shape)}"
                )
        count, _, tokens, _ = key_states.shape
        if self._place.model.paged:
            require_in_place()
            if kwargs is None:
                rows.give_up()
                raise Unsupported(
                    "attn_implementation='avmp' needs a model that hands the arguments of its attention to the cache, "
                    "and this one does not; use another attn_implementation"
                )
            rows.require(count)
            rows.unread, kwargs["avmp"] = layer, Pages(rows, layer)
            return key_states, value_states
        rows.begin(layer, count, tokens)
        store(rows, layer, tokens_of(key_states), tokens_of(value_states))
        return gather(rows, layer)

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self._place.rows.progress.seen[self._place.layer]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(keys, offset)`` of the next step's attention mask."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """Tokens that a row can have."""
        return self._place.rows.pool.max_tokens_per_sequence

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the arena is there from the beginning."""


def tokens_of(states: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, tokens, dim]`` as ``[rows * tokens, heads, dim]``."""
    return states.transpose(1, 2).flatten(0, 1)


def store(rows: Rows, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the step's tokens, ``[tokens, kv_heads, head_dim]``, to their pages."""
    batch = rows.tables()
    ops.write_kv(
        keys,
        values,
        *rows.pool.kv(layer),
        batch.slot_mapping,
        page_table=batch.page_table,
        backend=rows.pool.backend.name,
    )
    rows.progress.seen[layer] = rows.length


def gather(rows: Rows, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of one layer, ``[rows, kv_heads, length, head_dim]``: a copy, rounded up to whole pages."""
    pages, parts = rows.pages(), []
    for cache in rows.pool.kv(layer):
        assert cache is not None  # no model with keys only is offered
        gathered = cache.index_select(0, pages).view(rows.count, -1, *cache.shape[2:])
        parts.append(gathered[:, : rows.length].transpose(1, 2))
    return parts[0], parts[1]


class _Live(Mapping[int, Value]):
    """What a layer has by state index (there is one state), looked up when it is asked for."""

    def __init__(self, read: Callable[[], Value]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> Value:
        if index != 0:
            raise KeyError(index)
        return self._read()

    def __iter__(self) -> Iterator[int]:
        return iter((0,))

    def __len__(self) -> int:
        return 1


def _has_state(place: Place) -> bool:
    return place.rows.progress.advanced[place.layer] > 0


def _read(place: Place, part: int) -> torch.Tensor | None:
    if not _has_state(place):
        return None
    require_inference()
    place.rows.require(place.rows.count)
    return place.rows.read_state(place.layer, part)


def _begin_step(place: Place, caller: FrameType) -> None:
    """A state layer's forward, if that is what ``caller`` is, will read its state, if there is one, and may change it.
    What for, it keeps to itself: how many rows and tokens it has, and which of them are padding, is among its local
    variables. They are read, not changed."""
    if TOKENS in caller.f_locals and _has_state(place):
        require_inference()
        inputs, tokens, mask = (caller.f_locals.get(name) for name in (INPUTS, TOKENS, MASK))
        tokens = tokens if isinstance(tokens, int) else None
        count = len(inputs) if isinstance(inputs, torch.Tensor) else place.rows.count
        _enter(place, count)
        if place.is_ahead:
            counts: int | Int64Array = tokens or 1
            paged = place.model.paged
            if paged and isinstance(mask, torch.Tensor) and mask.shape == (count, tokens):
                counts = (mask != 0).sum(1).cpu().numpy()
            place.rows.foresee(counts, paged)
        place.rows.progress.ask(place.layer, tokens)


def _begin_step_and_read(place: Place) -> torch.Tensor | None:
    # 0 is this, 1 the mapping, which calls it through a partial, that has no frame of its own, and 2 who looks.
    _begin_step(place, sys._getframe(2))
    return _read(place, CONV)


def _enter(place: Place, count: int) -> None:
    """There are ``count`` rows."""
    if place.is_ahead and place.model.paged:
        require_in_place()
    place.rows.require(count)


class StateLayer(_Together, LinearAttentionLayer):
    """Convolution window and recurrent state of one layer. Models change both in place in decoding, and have them
    replaced otherwise."""

    is_croppable = False

    def __init__(self, place: Place) -> None:
        LinearAttentionLayer.__init__(self)
        self._open_states(place)

    def _open_states(self, place: Place) -> None:
        self._place = place
        self._parts = next(layer.parts for layer in place.model.geometry.state_layers if layer.layer == place.layer)
        # None of these may know the layer itself: a cache that is gone has to be gone at once, and its memory free.
        read = partial(_read, place, CONV) if MODELS_ASK_THE_CACHE else partial(_begin_step_and_read, place)
        self.conv_states = _Live(read)
        self.has_previous_state = self.is_conv_states_initialized = _Live(partial(_has_state, place))
        if len(self._parts) > RECURRENT:
            self.recurrent_states = _Live(partial(_read, place, RECURRENT))
            self.is_recurrent_states_initialized = self.has_previous_state
        self.conv_kernel_size[0] = self._parts[CONV].shape[-1]

    def begin_step(self, caller: FrameType) -> None:
        """The layer's forward, or somebody else, which is ``caller``, asks for its window."""
        _begin_step(self._place, caller)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **keywords: Any
    ) -> torch.Tensor:
        """New inputs of the convolution, ``[rows, channels, tokens]``; keeps the last columns, returns the inputs
        behind what was kept before (at the beginning: zeros, where there are fewer than columns)."""
        rows, columns = self._place.rows, self._parts[CONV].shape[-1]
        rows.progress.take_back(self._place.layer)
        self._check("convolution windows", conv_states, CONV, state_idx, conv_kernel_size or columns)
        _enter(self._place, conv_states.shape[0])
        # What reads in place has been counted without padding where there is a state; else nothing could get ahead.
        if self._place.is_ahead and not self._place.model.paged:
            rows.foresee(conv_states.shape[-1], paged=False)
        if self.has_previous_state[0]:
            window = rows.read_state(self._place.layer, CONV)
            inputs = torch.cat([window, conv_states], dim=-1)
        else:
            missing = max(columns - conv_states.shape[-1], 0)
            inputs = torch.nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
        rows.progress.advance(self._place.layer, conv_states.shape[-1], halfway=len(self._parts) > RECURRENT)
        rows.write_state(self._place.layer, CONV, inputs[..., -columns:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **keywords: Any
    ) -> torch.Tensor:
        """New recurrent states, ``[rows, *shape]``; returns them."""
        self._check("recurrent states", recurrent_states, RECURRENT, state_idx)
        self._place.rows.require(recurrent_states.shape[0])
        self._place.rows.write_state(self._place.layer, RECURRENT, recurrent_states)
        self._place.rows.progress.halfway = None
        return recurrent_states

    def _check(self, what: str, states: torch.Tensor, part: int, index: int, columns: int | None = None) -> None:
        if part >= len(self._parts) or index != 0:
            raise InvalidArgument(f"{what} {index} of layer {self._place.layer}: the arena was made without")
        expected = self._parts[part]
        narrower = part == RECURRENT and (
            self._place.model.casts or states.dtype.itemsize <= torch_dtype(expected.dtype).itemsize
        )
        require_storable(what, self._place, states, expected.dtype, narrower)
        shape, given = expected.shape, tuple(states.shape[1:])
        if part == CONV:
            given = (*given[:-1], columns or 0)
        if given != shape:
            raise InvalidArgument(f"{what} of layer {self._place.layer}: expected {shape} each, got {given}")

    def activate_past_recording(self) -> None:
        """Raises Unsupported: windows that keep everything would outgrow the arena."""
        raise Unsupported(
            "recording past states (assisted decoding, deferred stopping) is not offered for models with states; take "
            "a checkpoint() of the cache and crop back to it"
        )

    def lazy_initialization(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: the arena is there from the beginning."""

    def get_max_length(self) -> int:
        """-1: states do not grow."""
        return -1


class HybridLayer(StateLayer, AttentionLayer, LinearAttentionAndFullAttentionLayer):
    """Both."""

    def __init__(self, place: Place) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self)
        self._open_pages(place)
        self._open_states(place)

    get_max_length = AttentionLayer.get_max_length
    lazy_initialization = AttentionLayer.lazy_initialization
