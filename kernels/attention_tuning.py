"""Tile sizes, warps and stages of paged attention, each with its reason.

Chosen from shapes and the device's class only: nothing is searched while serving, and equal calls give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """``keys`` of a tile, ``rows`` of packed queries, warps of a program and depth of its pipeline: ``stages - 1``
    tiles of keys and values are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


LEAST_ROWS = 16
"""The least that a matrix instruction takes."""
MOST_DECODE_ROWS = 64
"""Beyond, registers spill; the rows are cut into tiles that read the same keys through the L2 cache."""
MOST_DECODE_QUERIES = 8
"""Rows with more new tokens are prefill. Speculative decoding verifies a handful: with splits, that stays bound by
memory; without them, one program per row would walk the whole context alone."""

DECODE_SHARED_BYTES = 72 * 1024
"""Keys and values in flight per program. Where a multiprocessor has 227 KiB, three such programs fit: 192 KiB in
flight, several times the 25 KiB that hide an H200's latency (4.8 TB/s, 0.7 µs, 132 multiprocessors)."""
DECODE_SHARED_BYTES_SMALL = 40 * 1024
"""Where it has 100 KiB (sm_86, sm_89) two fit, 64 KiB in flight against 8 KiB needed; likewise 64 KiB on gfx942."""

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Splitting the context goes on until there are so many: what fits at once, and one more to even out the rest."""
LEAST_SPLIT_KEYS = 256
"""Fewer keys per split and merging costs more than the split gains."""
MOST_SPLITS = 64
MERGE_WARPS = 4
"""64 splits by 128 values in fp32: 32 KiB, sixteen 16-byte accesses per thread."""

INTERPRETED_PROGRAMS = 16
"""Splits aimed at in the interpreter: enough to be tested; every program costs milliseconds."""

KV_TILE = 2048
"""Elements of keys, and as many of values, that one program of KV_WARPS warps writes or gathers: two 16-byte accesses
per thread and part at 2 bytes per element; a decode step of 256 tokens by 8 heads of 128 fills 128 programs."""
KV_WARPS = 4
KV_TILE_INTERPRETED = 2**16
"""In the interpreter a program costs milliseconds whatever its size."""


LARGE, SMALL, AMD = "large", "small", "amd"


class Sizes(NamedTuple):
    """What tiles are chosen by: head_dims rounded up to powers of two, bytes per element of q and of the caches, and
    the class of the device: LARGE where one program may have 160 KiB of shared memory (sm_80, sm_90, sm_100), SMALL
    where it may have 99 KiB (sm_86, sm_89, sm_120), AMD with 64 KiB and 64 lanes to a warp."""

    head_dim: int
    head_dim_v: int
    query_bytes: int
    cache_bytes: int
    device: str


def decode_tiles(rows: int, sizes: Sizes) -> Tiles:
    """For so many packed query rows per KV head."""
    budget = DECODE_SHARED_BYTES if sizes.device == LARGE else DECODE_SHARED_BYTES_SMALL
    stored = sizes.query_bytes if sizes.device == AMD else sizes.cache_bytes  # AMD stages fp8 decoded
    keys = 64 if sizes.query_bytes <= 2 else 16  # fp32 has no matrix instruction of its precision: wider tiles spill
    while keys > 16 and 2 * keys * (sizes.head_dim + sizes.head_dim_v) * stored > budget:
        keys //= 2
    return Tiles(min(max(rows, LEAST_ROWS), MOST_DECODE_ROWS), keys, 4, 3)


def prefill_tiles(sizes: Sizes) -> Tiles:
    """128 rows on 8 warps feed the warpgroup instructions of sm_90. The accumulator, rows by head_dim_v in fp32, lives
    in registers: wider heads get narrower tiles of keys, and small devices fewer rows. fp8 is decoded in registers,
    which takes narrower tiles there. fp32 has no matrix instruction of its precision; larger tiles spill."""
    wide = max(sizes.head_dim, sizes.head_dim_v) > 128
    if sizes.query_bytes > 2:
        return Tiles(16, 16, 4, 2)
    if sizes.device == LARGE:
        return Tiles(128, 32 if wide else 64, 8, 3)
    if wide:
        return Tiles(64, 16, 8, 2)
    if sizes.device == AMD:
        return Tiles(64, 32, 4, 3)
    return Tiles(64, 32 if sizes.cache_bytes == 1 else 64, 8, 3)


def split_count(programs: int, max_seq_len: int, aim: int) -> int:
    """Into how many parts a context is cut where unsplit rows give so many programs and ``aim`` would fill the device:
    a power of two, so that few variants are compiled."""
    wanted = min(-(-aim // programs), -(-max_seq_len // LEAST_SPLIT_KEYS))
    splits = 1
    while splits < wanted and splits < MOST_SPLITS:
        splits *= 2
    return splits
