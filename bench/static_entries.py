"""Which kernels are compiled offline, with what parameters, and what must hold for the code that comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from avmp.kernels import tuning
from bench.offline import TARGETS


@dataclass(frozen=True)
class Limits:
    """What a row has to keep to; nothing may spill to memory, and one program must fit, whatever else holds.

    ``wide_loads`` and ``wide_stores``: at least so many accesses to global memory of ``vector`` bits, asynchronous ones
    included; ``narrowest_load`` and ``narrowest_store``: no access of fewer bits; ``copies``: at least so many
    asynchronous loads, all of them of ``vector`` bits; ``registers``, ``shared`` and ``scalar_spills``: at most;
    ``matrix``: at least so many matrix instructions, all of them of the ``unit`` whose names begin so.
    """

    wide_loads: int = 0
    wide_stores: int = 0
    narrowest_load: int = 8
    narrowest_store: int = 8
    copies: int = 0
    vector: int = 128
    registers: int | None = None
    shared: int | None = None
    scalar_spills: int = 0
    matrix: int = 0
    unit: str = ""


@dataclass(frozen=True)
class Entry:
    """One kernel with one set of parameters; see ``bench.offline.compiled`` for how arguments are written."""

    name: str
    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    limits: Limits
    targets: tuple[str, ...] = field(default=TARGETS)


def complaints(row: dict[str, Any], limits: Limits, slack: float = 1.0) -> list[str]:
    """What is wrong with a row; the limit on registers is multiplied by ``slack``."""
    found = [f"{row['spills']} spills"] if row["spills"] else []
    if not row["programs"]:
        found.append(f"{row['registers']} registers and {row['shared']} bytes of shared memory: no program fits")
    loads = [(int(bits), number) for kind in ("loads", "async") for bits, number in row[kind].items()]
    stores = [(int(bits), number) for bits, number in row["stores"].items()]
    copies = [(int(bits), number) for bits, number in row["async"].items()]
    for what, accesses, least, narrowest in (
        ("loads", loads, limits.wide_loads, limits.narrowest_load),
        ("stores", stores, limits.wide_stores, limits.narrowest_store),
        ("copies", copies, limits.copies, limits.vector if limits.copies else 0),
    ):
        wide = sum(number for bits, number in accesses if bits >= limits.vector)
        if wide < least:
            found.append(f"{wide} {what} of {limits.vector} bits, expected {least}")
        found += [f"{number} {what} of {bits} bits" for bits, number in accesses if bits < narrowest]
    for what in ("registers", "shared", "scalar_spills"):
        most = getattr(limits, what)
        if most is not None and row[what] > int(most * (slack if what == "registers" else 1)):
            found.append(f"{row[what]} {what.replace('_', ' ')}, expected at most {most}")
    unit = sum(number for name, number in row["matrix"].items() if name.startswith(limits.unit))
    if unit < limits.matrix or (limits.unit and unit < sum(row["matrix"].values())):
        wanted = f"{limits.matrix} of {limits.unit or 'any unit'}"
        found.append(f"matrix instructions {row['matrix']}, expected {wanted}")
    return found


# -- units -----------------------------------------------------------------------------------------------------------

UNIT_BYTES = (65_536, 4_352, 256)
"""A page of 16 tokens by 8 heads of 128 in bfloat16, K and V; one that fills no power of two; the smallest."""

COPY = Limits(wide_loads=1, wide_stores=1, narrowest_load=32, narrowest_store=128, registers=48, shared=0)
FILL = Limits(wide_stores=1, narrowest_load=32, narrowest_store=128, registers=48, shared=0)
COUNTS = dict.fromkeys(("count", "lanes", "columns", "items", "unit_vectors", "table_limit", "first_valid_id"), "i32")


def tile(unit_bytes: int) -> dict[str, int]:
    """The shape of a tile, as launchers choose it."""
    piece = tuning.piece_bytes(unit_bytes, tuning.BULK.tile_bytes)
    return {"ROWS": tuning.BULK.tile_bytes // piece, "WORDS": piece // 4}


def copying(
    name: str, unit_bytes: int, source_ids: str | None, destination_ids: str | None, **others: str | None
) -> Entry:
    """One use of the kernel that copies. Strides are of any value: no alignment is promised but that of addresses."""
    sides = {f"{side}_{what}": "i32" for side in ("source", "destination") for what in ("unit", "lane", "limit")}
    arguments = {"source": "*i32:16", "destination": "*i32:16", **COUNTS, **sides, **tile(unit_bytes)}
    arguments |= {"source_ids": source_ids, "destination_ids": destination_ids}
    arguments |= {"page_table": None, "device_count": None, **others}
    options = {"num_warps": tuning.BULK.warps}
    return Entry(f"{name}, {unit_bytes:,} B", "avmp.kernels.units:copy_units_kernel", arguments, options, COPY)


def unit_entries() -> Iterator[Entry]:
    """Everything that moves bytes."""
    for unit_bytes in UNIT_BYTES:
        yield copying("copy and move", unit_bytes, "*i32", "*i32")
        yield copying("move, counted on the device", unit_bytes, "*i32", "*i32", device_count="*i32")
        yield copying("copy, virtual ids", unit_bytes, "*i32", "*i32", page_table="*i32")
        yield copying("gather", unit_bytes, "*i32", None)
        yield copying("scatter", unit_bytes, None, "*i32")
        arguments = {"arena": "*i32:16", "ids": "*i32", "page_table": None, **COUNTS, **tile(unit_bytes)}
        arguments |= dict.fromkeys(("lane_stride", "limit", "word"), "i32")
        options = {"num_warps": tuning.BULK.warps}
        yield Entry(f"fill, {unit_bytes:,} B", "avmp.kernels.units:fill_units_kernel", arguments, options, FILL)


def table_entries() -> Iterator[Entry]:
    """Changes of tables: their places are anywhere, so that words are written one by one."""
    arguments = {"tables": "*i32", "changes": "*i32", "count": "i32", "words": "i32", "BLOCK": tuning.TABLE_BLOCK}
    options = {"num_warps": tuning.TABLE_WARPS}
    limits = Limits(narrowest_load=32, narrowest_store=32, registers=48, shared=0)
    kernel = "avmp.kernels.tables:apply_table_changes_kernel"
    yield Entry("apply_table_changes", kernel, arguments, options, limits)


def bounds_entries() -> Iterator[Entry]:
    """The search for a bad id, with everything that it can look at; ids are read one by one."""
    numbers = ("rows", "width", "row_stride", "table_limit", "divisor", "first_valid_id", "low", "high")
    arguments: dict[str, Any] = dict.fromkeys(numbers, "i32")
    arguments |= {"ids": "*i32", "begins": "*i64", "ends": "*i64", "page_table": "*i32", "least": "*i64:16"}
    arguments |= {"NULL_IS_BAD": True, "BLOCK": tuning.BOUNDS_BLOCK}
    options = {"num_warps": tuning.BOUNDS_WARPS}
    kernel = "avmp.kernels.bounds:first_bad_id_kernel"
    yield Entry("first_bad_id", kernel, arguments, options, Limits(narrowest_load=32, narrowest_store=64))
