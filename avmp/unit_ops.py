"""The public operations on whole units, pages or state slots of an arena, in all lanes, and on tables of ids.

``lanes`` is uint8 ``[lanes, lane_bytes]`` (``CachePool.lanes``), unit u the bytes ``[u * unit_bytes, (u + 1) *
unit_bytes)`` of every lane; ``unit_bytes`` is ``Layout.page_bytes`` or ``Layout.slot_bytes``, a multiple of 16. Ids are
int32 or int64 ``[count]`` on the lanes' device: physical, or virtual with a ``page_table``, int32, that translates
them. An id below ``first_valid_id`` (by default 1 with a page table, 0 without), before or after translation, or beyond
the pool is null: nothing is read or written for its unit or pair.

A ``CachePool`` does all this by itself. These are for engines that keep their own books.

By Triton each is one launch on the current stream and returns at once, but for swaps: to memory that the device does
not reach they go through a staging buffer, part by part. In plain torch each is several operations, on a CPU done on
return. All raise InvalidArgument before anything changes.
"""

from __future__ import annotations

import torch

from avmp.registration import run
from avmp.step_tables import first_valid


def copy_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    backend: str | None = None,
) -> None:
    """Units ``sources`` are written to units ``destinations`` too: fork, tail copy, snapshot, restore, reorder.

    No unit written is read or written for another pair; one may be read for many.

    Floor: every byte is read once and written once, 8 bytes of ids per pair.
    """
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "sources": sources,
        "destinations": destinations,
        "page_table": page_table,
        "first_valid_id": first_valid(first_valid_id, page_table),
    }
    run("copy_units", arguments, backend)


def zero_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    backend: str | None = None,
) -> None:
    """Units become zero. Floor: every byte is written once."""
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "destinations": destinations,
        "page_table": page_table,
        "first_valid_id": first_valid(first_valid_id, page_table),
    }
    run("zero_units", arguments, backend)


def poison_units(
    lanes: torch.Tensor,
    unit_bytes: int,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    backend: str | None = None,
) -> None:
    """Every byte of the units becomes 0xFF, which is NaN in every floating-point format. Floor: as ``zero_units``."""
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "destinations": destinations,
        "page_table": page_table,
        "first_valid_id": first_valid(first_valid_id, page_table),
    }
    run("poison_units", arguments, backend)


def migrate(
    lanes: torch.Tensor,
    unit_bytes: int,
    moves: torch.Tensor,
    *,
    count: int | torch.Tensor | None = None,
    first_valid_id: int = 0,
    backend: str | None = None,
) -> None:
    """A relocation plan of one pool, bytes only: unit ``moves[0, i]`` comes to lie at ``moves[1, i]``.

    ``moves`` is int32 or int64 ``[2, n]``, physical ids; sources and destinations are disjoint, as a plan of
    ``migration.py`` has them. ``count``: only the first so many, an integer, or int32 of one element, ``[]`` or
    ``[1]``, on the device, which nobody waits for. Page tables are brought up to date afterwards, by
    ``apply_table_changes``.

    Floor: every byte is read once and written once, 8 bytes of ids per move.
    """
    on_device = isinstance(count, torch.Tensor)
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "moves": moves,
        "count": None if on_device else count,
        "device_count": count if on_device else None,
        "first_valid_id": first_valid_id,
    }
    run("migrate", arguments, backend)


def swap_out(
    lanes: torch.Tensor,
    unit_bytes: int,
    sources: torch.Tensor,
    host: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    backend: str | None = None,
) -> None:
    """Units to host memory, bit for bit: ``host`` uint8 ``[count, lanes, unit_bytes]``, contiguous.

    Asynchronous where the host memory is pinned: read it after waiting for the stream. Zeros for a null id.

    Floor: every byte crosses to the host once, and is read and written once more where units are packed first.
    """
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "sources": sources,
        "host": host,
        "page_table": page_table,
        "first_valid_id": first_valid(first_valid_id, page_table),
    }
    run("swap_out", arguments, backend)


def swap_in(
    lanes: torch.Tensor,
    unit_bytes: int,
    host: torch.Tensor,
    destinations: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    first_valid_id: int | None = None,
    backend: str | None = None,
) -> None:
    """The inverse of ``swap_out``, into any units. Pinned host memory may change only after the stream has passed."""
    arguments = {
        "lanes": lanes,
        "unit_bytes": unit_bytes,
        "host": host,
        "destinations": destinations,
        "page_table": page_table,
        "first_valid_id": first_valid(first_valid_id, page_table),
    }
    run("swap_in", arguments, backend)


def apply_table_changes(tables: torch.Tensor, changes: torch.Tensor, *, backend: str | None = None) -> None:
    """``tables[changes[0]] = changes[1]``: all final values of a flush, page tables included, in one launch, after the
    data has moved. ``tables`` int32 ``[words]``, ``changes`` int32 ``[2, count]``, both contiguous; indices are
    distinct, those outside the table are left out.

    Floor: 8 bytes read and 4 written per change.
    """
    run("apply_table_changes", {"tables": tables, "changes": changes}, backend)
