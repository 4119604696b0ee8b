"""Where in its arena a view lies: what a view cannot tell ``torch.compile`` by itself.

The views of an arena alias each other, and a graph that had several of them as inputs and wrote to one would copy the
whole storage to keep them apart. So every view of an arena carries its place, as an attribute of the tensor, and
traced code (``avmp/registration.py``) takes the arena as the graph's input and the view as integers instead.

Slices and copies of a view carry nothing; they are tensors like any other. A compiled function that writes to the arena
must not take up a view in another way than by an operation, such as indexing it: torch refuses that graph, whose
inputs alias. ``gather_kv`` reads pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from avmp.errors import InvalidArgument


class Place(NamedTuple):
    """``memory`` is uint8 ``[bytes]``, one and the same tensor for all views of an arena; the view begins at byte
    ``offset``. It is all of the storage, and nothing less: torch finds inputs that alias by comparing where they begin
    and end, which it counts in elements, whatever the size of these."""

    memory: torch.Tensor
    offset: int

    def __reduce__(self) -> tuple[Any, ...]:
        """As a file or a deep copy keeps it: nothing, for the tensor there is no view of this arena. (An empty one of
        the types that ``torch.load`` reads from anybody.)"""
        return OrderedDict, ()


def view_at(place: Place, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The view of that place, zero-copy; strides are in elements."""
    typed = place.memory.view(dtype)
    return typed.as_strided(size, stride, typed.storage_offset() + place.offset // dtype.itemsize)


def placed(view: torch.Tensor, place: Place) -> torch.Tensor:
    """The view itself, which says from now on where it lies."""
    view.avmp_place = place  # type: ignore[attr-defined]
    return view


def place_of(tensor: torch.Tensor) -> Place | None:
    """None for a tensor that is no view of an arena, or a slice of one."""
    place = getattr(tensor, "avmp_place", None)
    return place if isinstance(place, Place) else None


def require_place(lanes: torch.Tensor) -> Place:
    """Where the lanes of an arena lie. Raises InvalidArgument for any other tensor."""
    place = place_of(lanes)
    if place is None:
        raise InvalidArgument(f"a tensor {tuple(lanes.shape)} that is not the lanes of an arena")
    return place
