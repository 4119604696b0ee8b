"""Zero-copy views of the arena, built once and never again: what attention and state layers are given."""

from __future__ import annotations

import torch

from avmp.errors import InvalidArgument
from avmp.lanes import Part
from avmp.layout import Layout
from avmp.places import Place, placed, require_place, view_at


def part_view(lanes: torch.Tensor, part: Part, unit_bytes: int, unit_count: int) -> torch.Tensor:
    """One part of every unit: ``[unit_count, *part.shape]`` in the part's dtype, sharing the arena's storage.

    ``lanes`` is uint8 ``[lane_count, lane_bytes]``, from ``allocate_arena``. The view spans the whole lane, the null
    area and what belongs to the other pool included.
    """
    dtype = torch_dtype(part.dtype)
    memory, begin = require_place(lanes)
    place = Place(memory, begin + part.lane * lanes.stride(0) + part.offset)
    strides = (unit_bytes // dtype.itemsize, *part.strides)
    return placed(view_at(place, (unit_count, *part.shape), strides, dtype), place)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises InvalidArgument."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype {name!r}: this torch ({torch.__version__}) has none of that name")
    return dtype


class Views:
    """The views of all layers, by the model's layer index."""

    def __init__(self, lanes: torch.Tensor, layout: Layout) -> None:
        geometry = layout.geometry
        if geometry is None:
            raise InvalidArgument("views need the model's layers; this layout was given by unit sizes only")
        self.kv = {
            layer.layer: _pair(
                [part_view(lanes, part, layout.page_bytes, layout.page_count) for part in layout.kv_parts(layer.layer)]
            )
            for layer in geometry.attention_layers
        }
        self.state = {
            layer.layer: tuple(
                part_view(lanes, part, layout.slot_bytes, layout.slot_count) for part in layout.state_parts(layer.layer)
            )
            for layer in geometry.state_layers
        }


def _pair(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return parts[0], parts[1] if len(parts) > 1 else None
