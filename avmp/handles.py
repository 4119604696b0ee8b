"""Handles: 64-bit integers that say what they name, and which life of it.

Bits 0 to 31 hold an id (the virtual id of a page or slot, or a row), bits 32 to 58 a generation, bits 59 to 61 the
kind. The generation of an id advances each time that it is freed, so a handle kept for too long never matches again
(until 2**27 lives later). Arrays of handles are int64; single ones may be plain integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.errors import InvalidArgument

Int64Array: TypeAlias = NDArray[np.int64]
Kind: TypeAlias = Literal["page", "slot"]
Handles: TypeAlias = "int | np.integer | Iterable[int] | Int64Array"

NOTHING: Int64Array = np.empty(0, dtype=np.int64)

MOST = 2**31 - 1
"""The largest count of tokens or units in one argument: tables are int32."""

ID_MASK = 0xFFFFFFFF
GENERATION_BITS = 27
GENERATION_MASK = (1 << GENERATION_BITS) - 1
KIND_SHIFT = 32 + GENERATION_BITS

KINDS = ("nothing", "page", "slot", "sequence", "snapshot", "swapped")
PAGE, SLOT, SEQUENCE, SNAPSHOT, SWAPPED = range(1, len(KINDS))


def make_handle(kind: int, identifier: int, generation: int) -> int:
    """One handle from its three fields."""
    return kind << KIND_SHIFT | generation << 32 | identifier


def describe_handle(handle: int) -> str:
    """``page 17 (generation 3)``: for error messages."""
    handle = int(handle)
    kind = handle >> KIND_SHIFT
    if handle <= 0 or kind >= len(KINDS) or kind == 0:
        return f"{handle} (not a handle)"
    return f"{KINDS[kind]} {handle & ID_MASK} (generation {handle >> 32 & GENERATION_MASK})"


def as_handles(handles: Handles) -> Int64Array:
    """One handle or any iterable of handles as a one-dimensional int64 array; an int64 array is not copied."""
    if isinstance(handles, np.ndarray):
        if handles.dtype.char == "l" and handles.ndim == 1:  # int64, the usual case
            return handles
    else:
        handles = np.array([handles] if isinstance(handles, (int, np.integer)) else as_list(handles, "handles"))
    if handles.size == 0:
        return NOTHING
    if handles.dtype.kind not in "iu" or handles.ndim > 1:
        raise InvalidArgument(f"expected integer handles in one dimension, got {handles.dtype} {handles.shape}")
    return np.atleast_1d(handles).astype(np.int64, copy=False)


def as_list(values: Iterable[int], what: str) -> list[int]:
    """The items of an iterable. Raises InvalidArgument for what is none."""
    try:
        return list(values)
    except TypeError:
        raise InvalidArgument(f"{what}: expected integers, got {values!r}") from None


def as_count(count: int, what: str) -> int:
    """One count. Raises InvalidArgument unless it is an integer from 0 to MOST."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 0 <= count <= MOST:
        raise InvalidArgument(f"{what}: expected an integer from 0 to {MOST}, got {count!r}")
    return int(count)


def as_counts(counts: int | Iterable[int] | NDArray[np.integer], rows: int, what: str) -> Int64Array:
    """A count for each of ``rows`` rows, int64 ``[rows]``, from one integer or as many as there are rows.

    Raises InvalidArgument for anything else, negative counts and those above MOST included.
    """
    if isinstance(counts, (int, np.integer)):
        return np.full(rows, as_count(counts, what), dtype=np.int64)
    values = counts if isinstance(counts, np.ndarray) else np.array(as_list(counts, what))
    if values.size == 0:
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu" or values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        raise InvalidArgument(f"{what}: expected one integer or {rows}, got {values.dtype} {values.shape}")
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= MOST:
        raise InvalidArgument(f"{what}: {values.tolist()[:8]} has a number that is not from 0 to {MOST}")
    if values.ndim == 0:
        return np.full(rows, values, dtype=np.int64)
    return values.astype(np.int64, copy=False)
