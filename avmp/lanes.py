"""Which layer lies in which lane, and where inside a page or slot its tensors begin.

With L attention layers and M state layers in ``lane_count`` lanes, attention layer i (in order) lies in lane
``i // (L / lane_count)`` and state layer j in lane ``j // ceil(M / lane_count)``; the last lane may have fewer state
layers than there is room for. Inside a unit, parts follow each other, each rounded up to 256 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from avmp.errors import InvalidArgument
from avmp.geometry import AttentionLayer, Geometry, StateLayer, dtype_bytes, require_count
from avmp.units import align_up, ceil_div

UNIT_ALIGNMENT = 256

# Above this share of the state bytes, empty state layers that fill up the last lanes cost more than fewer lanes do.
MAX_PADDING = 0.05


@dataclass(frozen=True)
class Part:
    """One tensor of one layer inside every page or slot of its lane.

    Its first element in unit u lies at byte ``lane * lane_bytes + u * unit_bytes + offset`` of the arena. ``shape``
    is logical: ``(page_tokens, kv_heads, head_dim)`` for ``key`` and ``value``, the state part's own otherwise;
    ``strides`` are in elements of ``dtype``. ``offset`` and ``nbytes`` are bytes, ``offset`` a multiple of 256.
    """

    name: str
    lane: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """product(shape) * dtype_bytes, before rounding."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Placement:
    """The parts of each layer, by the model's layer index, and the bytes per lane of the unit they make up."""

    unit_bytes: int
    parts: dict[int, tuple[Part, ...]]


def choose_lane_count(geometry: Geometry, requested: int | None = None) -> int:
    """``requested`` if the geometry allows it, by default the largest count that wastes at most 5 % of the state.

    Candidates are the divisors of the number of attention layers. One lane without attention layers, and where
    attention layers or state layers differ in shape among themselves. InvalidArgument for a count not allowed.
    """
    allowed = _divisors(len(geometry.attention_layers)) if _is_uniform(geometry) else [1]
    if requested is not None:
        if require_count("lane_count", requested) not in allowed:
            why = "attention layers" if _is_uniform(geometry) else "attention layers, as layers differ in shape"
            raise InvalidArgument(
                f"lane_count={requested}: expected one of {allowed} for {len(geometry.attention_layers)} {why}"
            )
        return requested
    state_layers = len(geometry.state_layers)
    return max(lanes for lanes in allowed if padding_layers(state_layers, lanes) <= MAX_PADDING * state_layers)


def padding_layers(state_layers: int, lane_count: int) -> int:
    """Empty state layers that make the lanes equal: ceil(M / lane_count) * lane_count - M."""
    return ceil_div(state_layers, lane_count) * lane_count - state_layers


def place_kv(geometry: Geometry, lane_count: int, kv_order: str) -> Placement:
    """K block, then V block, of each of a lane's attention layers; ``kv_order`` "NHD" or "HND" inside a block."""
    layers = [(layer.layer, _kv_blocks(layer, geometry.page_tokens, kv_order)) for layer in geometry.attention_layers]
    return _place(layers, ceil_div(len(layers), lane_count))


def place_state(geometry: Geometry, lane_count: int) -> Placement:
    """All parts of each of a lane's state layers."""
    layers = [(layer.layer, _state_blocks(layer)) for layer in geometry.state_layers]
    return _place(layers, ceil_div(len(layers), lane_count))


def _place(layers: Iterable[tuple[int, list[Part]]], layers_per_lane: int) -> Placement:
    parts: dict[int, tuple[Part, ...]] = {}
    offset = unit_bytes = 0
    for index, (layer, blocks) in enumerate(layers):
        lane, index_in_lane = divmod(index, layers_per_lane)
        offset = offset if index_in_lane else 0
        placed = []
        for block in blocks:
            placed.append(replace(block, lane=lane, offset=offset))
            offset += align_up(block.nbytes, UNIT_ALIGNMENT)
        parts[layer] = tuple(placed)
        unit_bytes = max(unit_bytes, offset)
    return Placement(unit_bytes, parts)


def _kv_blocks(layer: AttentionLayer, page_tokens: int, kv_order: str) -> list[Part]:
    blocks = []
    for name, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
        shape = (page_tokens, layer.kv_heads, dim)
        strides = (layer.kv_heads * dim, dim, 1) if kv_order == "NHD" else (dim, page_tokens * dim, 1)
        if dim:
            blocks.append(Part(name, 0, 0, shape, strides, layer.dtype))
    return blocks


def _state_blocks(layer: StateLayer) -> list[Part]:
    blocks = []
    for part in layer.parts:
        strides = tuple(math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape)))
        blocks.append(Part(part.name, 0, 0, part.shape, strides, part.dtype))
    return blocks


def _is_uniform(geometry: Geometry) -> bool:
    """Whether any layer of a kind could take the place of any other in the arena."""
    attention = {replace(layer, layer=0) for layer in geometry.attention_layers}
    state = {layer.parts for layer in geometry.state_layers}
    return len(attention) <= 1 and len(state) <= 1


def _divisors(count: int) -> list[int]:
    """Ascending; [1] for 0, as an arena has at least one lane."""
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0] or [1]
