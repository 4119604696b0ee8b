"""Block sizes and warps of every kernel, each with its reason.

No kernel is tuned while it serves: a search would stall the step that starts it, and breaks the capture of a CUDA
graph. All choices depend on shapes only, so that results and compilations are the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bulk:
    """How units are copied and filled: one tile is ``tile_bytes``, taken by one program of ``warps`` warps at a time;
    at most ``programs`` programs per multiprocessor walk over all tiles."""

    tile_bytes: int
    warps: int
    programs: int


BULK = Bulk(tile_bytes=16 * 1024, warps=8, programs=6)
"""Four 16-byte accesses per thread are under way before the first store waits for one. Six such programs fit a
multiprocessor of any NVIDIA target, by warps (48 on sm_86) and by registers (40 per thread; 46 where small units have
virtual ids, of which five fit): all are resident, and take equal shares. Their 96 KiB in flight are several times the
25 KiB that hide the latency of an H200's memory (4.8 TB/s, 0.7 µs, 132 multiprocessors)."""

BULK_INTERPRETED = Bulk(tile_bytes=64 * 1024, warps=1, programs=8)
"""In the interpreter a program costs a millisecond whatever its size; tiles much larger than most work cost more."""

LEAST_PIECE_BYTES = 256
"""Units are multiples of this, so that a piece of this size always divides them."""

MOST_MASKED_SHARE = 0.25
"""Of a tile. Masked lanes read nothing, but they hold less in flight; shorter pieces scatter a unit over more tiles."""

TABLE_BLOCK = 1024
TABLE_WARPS = 4
"""A flush changes tens to thousands of words: a few programs, whose scattered 4-byte stores are bound by latency."""

BOUNDS_BLOCK = 256
BOUNDS_BLOCK_INTERPRETED = 32 * 1024
BOUNDS_WARPS = 4
BOUNDS_PROGRAMS = 1024
"""Checks are for finding faults: enough programs to fill any device, few enough that their answers are read at once."""


def piece_bytes(unit_bytes: int, tile_bytes: int) -> int:
    """Bytes of a unit that one row of a tile covers, a power of two: the longest that leaves at most
    MOST_MASKED_SHARE of the tile without work."""
    piece = LEAST_PIECE_BYTES
    longest = piece
    while piece < tile_bytes and piece < unit_bytes:
        piece *= 2
        pieces = -(-unit_bytes // piece)
        if unit_bytes >= (1 - MOST_MASKED_SHARE) * pieces * piece:
            longest = piece
    return longest
