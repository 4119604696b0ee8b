"""Sizes: "8GiB" to bytes and back, and the two roundings that all layouts use."""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral

from avmp.errors import InvalidArgument

_FACTORS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _FACTORS[f"{_prefix}IB"] = 1024**_power
    _FACTORS[f"{_prefix}B"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def ceil_div(dividend: int, divisor: int) -> int:
    """The least integer n with ``n * divisor >= dividend``."""
    return -(-dividend // divisor)


def align_up(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is at least ``value``."""
    return ceil_div(value, alignment) * alignment


def largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 0 to limit for which ``holds(n)``, which is true up to some n and false beyond; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def parse_bytes(size: int | str) -> int:
    """Bytes of ``"8GiB"`` (binary), ``"8GB"`` (decimal), ``"4096"`` or a plain integer; always above zero.

    Raises InvalidArgument for anything else, negative and zero sizes included.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise InvalidArgument(f"memory size {size!r}: expected a positive number of B, KiB to TiB, or KB to TB")
        size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if isinstance(size, bool) or not isinstance(size, Integral) or size <= 0:
        raise InvalidArgument(f"memory size {size!r}: expected more than zero bytes")
    return int(size)


def format_bytes(count: int) -> str:
    """``15.75 MiB``: binary units, at most two decimals, exact below 1 KiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
