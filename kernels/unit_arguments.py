"""What both implementations of the operations on units and tables accept. Reads shapes and dtypes, no values."""

from __future__ import annotations

import torch

from avmp.errors import InvalidArgument

VECTOR_BYTES = 16
"""Every address and size is a multiple of this: the widest access of a GPU."""

POISON_BYTE = 0xFF
"""Fills freed units: NaN in float64, float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 alike."""


def check_lanes(lanes: torch.Tensor, unit_bytes: int, first_valid_id: int) -> int:
    """How many units of ``unit_bytes`` there are in ``lanes``, uint8 ``[lanes, lane_bytes]``."""
    if lanes.dtype != torch.uint8 or lanes.dim() != 2 or lanes.stride(1) != 1:
        raise InvalidArgument(f"lanes {lanes.dtype} {tuple(lanes.shape)}: expected uint8 [lanes, lane_bytes], dense")
    if len(lanes) > 1 and lanes.stride(0) < lanes.shape[1]:
        raise InvalidArgument(
            f"lanes {tuple(lanes.shape)} with strides {lanes.stride()} overlap: expected each its own"
        )
    _require_vectors(lanes, unit_bytes, lanes.stride(0), lanes.shape[1])
    if not 0 < unit_bytes <= lanes.shape[1]:
        raise InvalidArgument(f"units of {unit_bytes} bytes in a lane of {lanes.shape[1]}: expected at least one unit")
    if first_valid_id < 0:
        raise InvalidArgument(f"first_valid_id {first_valid_id}: expected 0 or more")
    return lanes.shape[1] // unit_bytes


def check_ids(lanes: torch.Tensor, ids: torch.Tensor, page_table: torch.Tensor | None = None) -> None:
    """Ids int32 or int64 ``[count]``, and the int32 table that translates them, on the device of the lanes."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or (len(ids) > 1 and ids.stride(0) != 1):
        raise InvalidArgument(f"ids {ids.dtype} {tuple(ids.shape)}: expected int32 or int64 [count], dense")
    _require_device(lanes, "ids", ids)
    if page_table is not None:
        dense = page_table.dtype == torch.int32 and page_table.dim() == 1 and page_table.is_contiguous()
        if not dense or not len(page_table):
            raise InvalidArgument(f"page_table {page_table.dtype} {tuple(page_table.shape)}: expected int32 [ids]")
        _require_device(lanes, "page_table", page_table)


def check_pairs(sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """As many sources as destinations."""
    if len(sources) != len(destinations):
        raise InvalidArgument(f"{len(sources)} and {len(destinations)} ids: expected as many sources as destinations")


def check_packed(lanes: torch.Tensor, unit_bytes: int, packed: torch.Tensor, count: int) -> None:
    """``count`` units packed, uint8 ``[count, lanes, unit_bytes]``, in any memory."""
    shape = (count, len(lanes), unit_bytes)
    if packed.dtype != torch.uint8 or packed.shape != shape or not packed.is_contiguous():
        raise InvalidArgument(f"packed units {packed.dtype} {tuple(packed.shape)}: expected uint8 {shape}, contiguous")
    _require_vectors(packed)


def check_packed_beside(lanes: torch.Tensor, unit_bytes: int, packed: torch.Tensor, count: int) -> None:
    """The same on the device of the lanes."""
    check_packed(lanes, unit_bytes, packed, count)
    _require_device(lanes, "packed units", packed)


def check_moves(
    lanes: torch.Tensor, moves: torch.Tensor, count: int | None, device_count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations of a list of moves, ``[2, moves]``, as many as the host knows of."""
    if moves.dim() != 2 or len(moves) != 2:
        raise InvalidArgument(f"moves {tuple(moves.shape)}: expected [2, moves], sources above destinations")
    if count is not None and device_count is not None:
        raise InvalidArgument("count and device_count: expected one of them at most")
    if count is not None and not 0 <= count <= moves.shape[1]:
        raise InvalidArgument(f"count {count}: the list has {moves.shape[1]} moves")
    if device_count is not None:
        if device_count.dtype != torch.int32 or tuple(device_count.shape) not in {(), (1,)}:
            raise InvalidArgument(
                f"device_count {device_count.dtype} {tuple(device_count.shape)}: expected int32 of one element, [] or "
                "[1]"
            )
        _require_device(lanes, "device_count", device_count)
    listed = moves if count is None else moves[:, :count]
    check_ids(lanes, listed[0])
    return listed[0], listed[1]


def check_table_changes(tables: torch.Tensor, changes: torch.Tensor) -> None:
    """Tables int32 ``[words]`` and changes int32 ``[2, count]``, contiguous, on one device."""
    if tables.dtype != torch.int32 or tables.dim() != 1 or not tables.is_contiguous():
        raise InvalidArgument(f"tables {tables.dtype} {tuple(tables.shape)}: expected int32 [words], contiguous")
    if changes.dtype != torch.int32 or changes.dim() != 2 or len(changes) != 2 or not changes.is_contiguous():
        raise InvalidArgument(f"changes {changes.dtype} {tuple(changes.shape)}: expected int32 [2, count], contiguous")
    _require_device(tables, "changes", changes)


def unit_view(lanes: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """uint8 ``[lane_count, lane_bytes // unit_bytes, unit_bytes]`` of lanes uint8 ``[lane_count, lane_bytes]``."""
    lane_count, lane_bytes = lanes.shape
    shape = (lane_count, lane_bytes // unit_bytes, unit_bytes)
    return lanes.as_strided(shape, (lanes.stride(0), unit_bytes, 1), lanes.storage_offset())


def _require_vectors(tensor: torch.Tensor, *numbers: int) -> None:
    real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta  # fake ones have no address
    address = tensor.data_ptr() if real else 0
    if address % VECTOR_BYTES or any(number % VECTOR_BYTES for number in numbers):
        raise InvalidArgument(f"address and sizes {(address, *numbers)}: expected multiples of {VECTOR_BYTES} bytes")


def _require_device(lanes: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != lanes.device:
        raise InvalidArgument(f"{name} on {tensor.device}: expected {lanes.device}, where the bytes are")
