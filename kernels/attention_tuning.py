"""Tile sizes, warps and stages of paged attention, each with its reason.

Chosen from shapes and the device's class only: nothing is searched while serving, and equal calls give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """``keys`` of a tile, ``rows`` of packed queries, warps of a program and depth of its pipeline: ``stages - 1``
    tiles of keys and values are in flight. ``registers``: how many a thread may take (NVIDIA). Left to itself, the
    assembler aims at more programs than shared memory leaves room for, and spills a few to get there."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers else {})


LARGE, SMALL, AMD, INTERPRETER = "large", "small", "amd", "interpreter"

LEAST_ROWS = 16
"""The least that a matrix instruction takes."""
MOST_DECODE_ROWS = 64
"""Beyond, registers spill; the rows are cut into tiles that read the same keys through the L2 cache."""
MOST_DECODE_QUERIES = 8
"""Rows with more new tokens are prefill. Speculative decoding verifies a handful: with splits, that stays bound by
memory; without them, one program per row would walk the whole context alone."""

DECODE_KEYS = 32
"""Tiles of 64 keys take a tenth fewer instructions per key, but for K and V of 128 each the same bytes in flight are
then two tiles instead of three, in fewer programs that take 110 registers instead of 80."""
DECODE_STAGES = 4
DECODE_FLIGHT_BYTES = {LARGE: 72 * 1024, SMALL: 40 * 1024}
"""At most so many bytes of keys and values in flight per program. Four programs of 48 KiB fit a multiprocessor with 227
KiB: 192 KiB in flight, several times the 25 KiB that hide an H200's latency (4.8 TB/s, 0.7 µs, 132 multiprocessors).
Where it has 100 KiB (sm_86, sm_89) two of 32 KiB fit, against 8 KiB needed."""

FEW_CHUNKS = 4
"""So many ids of a tile at most are carried as scalars: each costs registers, and a select for every token."""

MOST_REGISTERS = 255
"""Of a thread, on NVIDIA: eight warps of it fill a multiprocessor."""

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Splitting the context goes on until there are so many: they fit at once."""
LEAST_SPLIT_KEYS = 256
"""Fewer keys per split and merging costs more than the split gains."""
MOST_SPLITS = 64
MERGE_WARPS = 4
"""64 splits by 128 values in fp32: 32 KiB, sixteen 16-byte accesses per thread."""

INTERPRETED_PROGRAMS = 16
"""Splits aimed at in the interpreter: enough to be tested; every program costs milliseconds."""
INTERPRETED_KEYS = 64
"""Of a tile there: a step of the loop costs milliseconds, too."""

KV_TILE = 2048
"""Elements of keys, and as many of values, that one program of KV_THREADS writes or gathers: two 16-byte accesses
per thread and part at 2 bytes per element; a decode step of 256 tokens by 8 heads of 128 fills 128 programs."""
KV_THREADS = 128
KV_TILE_INTERPRETED = 2**16
"""In the interpreter a program costs milliseconds whatever its size."""


class Sizes(NamedTuple):
    """What tiles are chosen by: head_dims rounded up to powers of two, bytes per element of q and of the caches, and
    the class of the device: LARGE where one program may have 160 KiB of shared memory (sm_80, sm_90, sm_100), SMALL
    where it may have 99 KiB (sm_86, sm_89, sm_120), AMD with 64 KiB and 64 lanes to a warp, or INTERPRETER."""

    head_dim: int
    head_dim_v: int
    query_bytes: int
    cache_bytes: int
    device: str

    @property
    def key_bytes(self) -> int:
        """Of one key and value."""
        return (self.head_dim + self.head_dim_v) * self.cache_bytes

    @property
    def amd_keys(self) -> int:
        """Of which four warps of 64 read the keys, or the values, with one access of 16 bytes for each thread."""
        return 4 * 64 * 16 // (min(self.head_dim, self.head_dim_v) * self.cache_bytes)

    @property
    def wide(self) -> bool:
        """Heads of which an accumulator takes half of all registers, or more."""
        return max(self.head_dim, self.head_dim_v) > 128

    @property
    def narrow(self) -> bool:
        """Heads of which shared memory holds more programs than registers do."""
        return max(self.head_dim, self.head_dim_v) <= 32


def decode_tiles(rows: int, sizes: Sizes) -> Tiles:
    """For so many packed query rows per KV head."""
    rows = min(max(rows, LEAST_ROWS), MOST_DECODE_ROWS // 2 if sizes.wide else MOST_DECODE_ROWS)
    keys, warps = DECODE_KEYS, 4
    if sizes.device == INTERPRETER:
        return Tiles(rows, INTERPRETED_KEYS, warps, DECODE_STAGES)
    if sizes.query_bytes > 2:
        # No matrix instruction has this precision but AMD's: larger tiles spill. fp8 is decoded before a thread
        # multiplies it, which takes registers for all that it multiplies.
        rows, keys, warps = LEAST_ROWS, 16, 8 if sizes.cache_bytes == 1 else 4
    if sizes.device != LARGE and rows * max(sizes.head_dim_v, 128) > 32 * 128:
        # An accumulator of more than 32 rows of 128: it takes the shared memory and the registers that more keys would.
        # Narrower heads count as 128, since scores and weights of a row take as much for them.
        keys = 16
    if sizes.device == AMD:
        # Loads go through registers, two tiles ahead; where fp8 is decoded on the way, one stage earlier.
        if sizes.wide:
            keys = 16
        elif keys == DECODE_KEYS:
            keys = min(max(keys, sizes.amd_keys), 64)
        return Tiles(rows, keys, warps, 3 if sizes.cache_bytes == 1 else 2)
    most = DECODE_FLIGHT_BYTES[sizes.device]
    while keys > 16 and 2 * keys * sizes.key_bytes > most:
        keys //= 2
    stages = DECODE_STAGES if 3 * keys * sizes.key_bytes <= most else DECODE_STAGES - 1
    return Tiles(rows, keys, warps, stages, 128 if sizes.narrow else None)


def prefill_tiles(sizes: Sizes) -> Tiles:
    """The accumulator, rows by head_dim_v in fp32, lives in registers: wider heads get narrower tiles of keys.

    128 rows on 8 warps feed the warpgroup instructions of sm_90. Small devices take 64 rows on 4 warps, 16 per warp, so
    that no sum crosses warps, and two programs at a time. AMD keeps a mask of a tile's keys in scalar registers, which
    are few: tiles are as narrow as one 16-byte access per thread allows. fp32 has no matrix instruction of its
    precision but on AMD; larger tiles spill, and with fp8 beside heads of more than 128 these do."""
    if sizes.query_bytes > 2:
        if sizes.cache_bytes == 1:
            return Tiles(LEAST_ROWS, 16, 8, 3)
        if sizes.device == AMD:
            return Tiles(32, 16, 8, 2)
        return Tiles(LEAST_ROWS, 16, 8, 2, 128) if sizes.wide else Tiles(32, 16, 8, 2, MOST_REGISTERS)
    if sizes.device == AMD:
        return Tiles(64, min(max(sizes.amd_keys, LEAST_ROWS), 64), 4, 2)
    if sizes.device == SMALL:
        return Tiles(64, 32, 8 if sizes.wide else 4, 2, MOST_REGISTERS)
    return Tiles(128, 16 if sizes.wide else 64, 8, 3, MOST_REGISTERS)


def kv_warps(device: str) -> int:
    """For KV_THREADS threads."""
    return KV_THREADS // (64 if device == AMD else 32)


def split_count(programs: int, max_seq_len: int, aim: int) -> int:
    """Into how many parts a context is cut where unsplit rows give so many programs and ``aim`` would fill the device:
    a power of two, so that few variants are compiled."""
    wanted = min(-(-aim // programs), -(-max_seq_len // LEAST_SPLIT_KEYS))
    splits = 1
    while splits < wanted and splits < MOST_SPLITS:
        splits *= 2
    return splits
