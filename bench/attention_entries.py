"""Attention, and keys and values into pages and out of them: what is compiled offline, and what must hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from avmp.kernels import attention_tuning as tuning
from avmp.kernels import fp8_formats
from avmp.kernels.attention_arguments import ALIBI_FORMS
from avmp.kernels.attention_launch import chunk_tokens
from bench.offline import TARGETS
from bench.static_entries import Entry, Limits

DEVICES = {"sm_86": tuning.SMALL, "sm_90": tuning.LARGE, "sm_100": tuning.LARGE, "gfx942": tuning.AMD}
LANES = {target: 64 if target.startswith("gfx") else 32 for target in TARGETS}
UNITS = {"sm_86": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
NARROW_UNITS = UNITS | {"sm_90": "HMMA", "sm_100": "HMMA"}
"""What multiplies tiles of 64 rows and more, and of fewer: warpgroups take no less than 64."""
HEADS, GROUP = 64, 8
POINTERS = {
    "block_table": "*i32",
    "seq_lens": "*i32",
    "query_start_loc": "*i32",
    "page_table": "*i32",
    "slopes": None,
    "sinks": None,
    "key_scale": None,
    "value_scale": None,
}
NUMBERS = {"scale": "fp32", "cap": "fp32"} | dict.fromkeys(
    ("left", "right", "rows", "tokens", "most_queries", "first_valid_id", "table_row"), "i32"
)
CACHE_STRIDES = ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")
STRIDES = dict.fromkeys(("q_token", "q_head", *CACHE_STRIDES, "out_token", "out_head"), "i32:16") | dict.fromkeys(
    ("slope_row", "key_scale_row", "key_scale_head", "value_scale_row", "value_scale_head"), 0
)

PHYSICAL: dict[str, Any] = {"page_table": None}
FEATURES: dict[str, Any] = {"slopes": "*fp32", "sinks": "*fp32", "LEFT": True, "CAP": True}
# Strides of any value, as launchers pass those that are no multiple of 16 elements: only HINT is known of them.
ODD: dict[str, Any] = dict.fromkeys(CACHE_STRIDES, "i32") | {"HINT_K": 8, "HINT_V": 8}


def bytes_of(form: int) -> dict[str, Any]:
    """Caches of fp8."""
    caches = {"key_cache": "*u8:16", "value_cache": "*u8:16", "FORMAT_K": form, "FORMAT_V": form}
    return caches | {"key_scale": "*fp32", "value_scale": "*fp32"}


@dataclass(frozen=True)
class Shape:
    """What a batch looks like; ``rows``: packed query rows of a KV head in decode."""

    dtype: str
    dim: int
    page: int
    rows: int = tuning.LEAST_ROWS

    @property
    def block(self) -> int:
        return 1 << (self.dim - 1).bit_length()

    def sizes(self, changed: dict[str, Any], device: str) -> tuning.Sizes:
        """As a launcher sees them."""
        element = 4 if self.dtype == "fp32" else 2
        return tuning.Sizes(self.block, self.block, element, 1 if "FORMAT_K" in changed else element, device)


USUAL = Shape("bf16", 128, 16)

# Registers at most, in the order of TARGETS; None: not for this target. For decode these are what vLLM's kernel takes
# for the same heads, with tiles of 16 keys (of 32 with fp8), one of them in flight: these have two or three of 32.
# It has no figure for features beyond window, cap and sinks, for pages of one token, for fp32 and for gfx942, where the
# limits leave room for as many programs as shared memory does: four waves to a SIMD of gfx942, with fp8 three.
# - sm_100: vLLM takes 64, for a sixth of the bytes in flight; 80 leave room for more programs than shared memory does.
# - d 80 on sm_86: vLLM takes 92 for d 96, with one id per tile; pages of 24 tokens have four.
# - page 1, an id for each token: 96 leave room for five programs, shared memory for four.
# - e4m3 on sm_86, for which vLLM's does not compile: 128 leave room for four programs, shared memory for two.
# - 64 rows: shared memory leaves room for two programs, 168 for three. Of wider heads 32 rows are taken at once.
# - d 192 with features: two programs of 64 KiB in flight.
DECODE: dict[str, tuple[Shape, dict[str, Any], tuple[int | None, ...]]] = {
    "virtual ids": (USUAL, {}, (90, 80, 80, 128)),
    "physical ids": (USUAL, PHYSICAL, (90, 80, 80, 128)),
    "every feature": (USUAL, FEATURES, (96, 94, 94, 144)),
    "odd strides": (USUAL, ODD, (90, 80, 80, 128)),
    "e4m3": (USUAL, bytes_of(fp8_formats.E4M3), (128, 112, 108, 168)),
    "e4m3 by hardware": (USUAL, bytes_of(fp8_formats.NATIVE_E4M3), (None, 112, 108, None)),
    "e5m2": (USUAL, bytes_of(fp8_formats.E5M2), (128, 112, 108, 168)),
    "64 rows": (replace(USUAL, rows=64), {}, (168, 168, 168, 128)),
    "fp16, d 80, page 24": (Shape("fp16", 80, 24), {}, (96, 72, 72, 128)),
    "page 1": (replace(USUAL, page=1), {}, (96, 96, 96, 144)),
    "d 64, page 64": (Shape("bf16", 64, 64), {}, (72, 62, 62, 128)),
    "d 256, page 64": (Shape("bf16", 256, 64), {}, (126, 124, 124, 168)),
    "d 192, every feature": (Shape("bf16", 192, 16), FEATURES, (128, 255, 255, 168)),
    "d 192, 64 rows": (Shape("bf16", 192, 16, 64), {}, (255, 255, 255, 256)),
    "d 32": (Shape("bf16", 32, 16), {}, (128, 128, 128, 128)),
    "fp32": (replace(USUAL, dtype="fp32"), {}, (128, 128, 128, 168)),
    "fp32, e4m3": (replace(USUAL, dtype="fp32"), bytes_of(fp8_formats.E4M3), (255, 255, 255, 168)),
    "fp32, d 256": (Shape("fp32", 256, 16), {}, (168, 168, 168, 256)),
}

# For prefill, what vLLM's kernel takes in tiles of 64 keys with 64 rows on 4 warps: 255 on sm_86, where it spills, 227
# on sm_90, 238 on sm_100. With 128 rows on 8 warps it takes 202 and 224, with one tile in flight and no page table; on
# sm_90 these take more, which costs nothing: shared memory leaves room for one program there, 255 registers do, too.
# For features, wider heads, pages of 24 tokens and gfx942 there is no figure: what leaves room for as many programs as
# shared memory does.
PREFILL: dict[str, tuple[Shape, dict[str, Any], tuple[int | None, ...]]] = {
    "virtual ids": (USUAL, {}, (255, 227, 224, 128)),
    "physical ids": (USUAL, PHYSICAL, (255, 227, 224, 128)),
    "every feature": (USUAL, FEATURES, (255, 255, 255, 128)),
    "odd strides": (USUAL, ODD, (255, 227, 224, 128)),
    "e4m3": (USUAL, bytes_of(fp8_formats.E4M3), (255, 227, 224, 256)),
    "e4m3 by hardware": (USUAL, bytes_of(fp8_formats.NATIVE_E4M3), (None, 227, 224, None)),
    "fp16, d 80, page 24": (Shape("fp16", 80, 24), {}, (255, 227, 255, 128)),
    "d 64, page 64": (Shape("bf16", 64, 64), {}, (255, 227, 224, 168)),
    "d 256, page 64": (Shape("bf16", 256, 64), {}, (255, 255, 255, 256)),
    "d 192, every feature": (Shape("bf16", 192, 16), FEATURES, (255, 255, 255, 256)),
    "d 256, e4m3": (Shape("bf16", 256, 16), bytes_of(fp8_formats.E4M3), (255, 255, 255, 256)),
    "fp32": (replace(USUAL, dtype="fp32"), {}, (255, 255, 255, 128)),
    "fp32, e4m3": (replace(USUAL, dtype="fp32"), bytes_of(fp8_formats.E4M3), (255, 255, 255, 168)),
    "fp32, d 256": (Shape("fp32", 256, 16), {}, (255, 255, 255, 256)),
}
# gfx942 keeps the masks of a tile's keys in scalar registers, two for each key. Few keys leave enough of them; of these
# heads, so few would be read in half vectors.
SCALAR_SPILLS = {"prefill": {"e4m3": 16, "d 64, page 64": 16}, "decode": {"d 32": 24}}
VECTORS = {"fp32, e4m3": dict.fromkeys(("sm_86", "sm_90", "sm_100"), 64) | {"gfx942": 32}}
"""Bits of an access to keys and values, where they are fewer than 128: a tile of 16 keys of one byte has so many for
each thread of 8 warps. Wider tiles, or fewer warps, would spill."""


def attention_arguments(shape: Shape, tiles: tuning.Tiles, changed: dict[str, Any]) -> dict[str, Any]:
    """What the decode and the prefill kernel have in common."""
    arguments: dict[str, Any] = {**POINTERS, **NUMBERS, **STRIDES, "lse": "*fp32:16"}
    arguments |= dict.fromkeys(("q", "key_cache", "value_cache", "out"), f"*{shape.dtype}:16")
    arguments |= {"HEADS": HEADS, "GROUP": GROUP, "PAGE": shape.page, "CHUNK": chunk_tokens(shape.page, tiles.keys)}
    arguments |= {"DIM": shape.dim, "DIM_V": shape.dim, "BLOCK_DIM": shape.block, "BLOCK_DIM_V": shape.block}
    arguments |= {"M": tiles.rows, "N": tiles.keys, "LEFT": False, "RIGHT": True, "CAP": False}
    arguments |= {"FORMAT_K": fp8_formats.PLAIN, "FORMAT_V": fp8_formats.PLAIN, "HINT_K": 16, "HINT_V": 16}
    arguments["ALIBI"] = ALIBI_FORMS.index("distance")
    return arguments | changed


def accesses(tiles: tuning.Tiles, sizes: tuning.Sizes, target: str, vector: int) -> int:
    """Of so many bits, that each thread reads a tile of keys and values with."""
    return 8 * tiles.keys * sizes.key_bytes // (vector * tiles.warps * LANES[target])


def reads(name: str, tiles_read: int, tiles: tuning.Tiles, sizes: tuning.Sizes, target: str) -> Limits:
    """Limits for so many tiles that the code reads, loops taken once: all in 128 bits but for those of VECTORS, and
    asynchronously on NVIDIA."""
    vector = VECTORS[name][target] if name in VECTORS else 128
    wide = tiles_read * accesses(tiles, sizes, target, vector)
    limits = Limits(wide_loads=wide, vector=vector, narrowest_load=32, narrowest_store=16)
    return limits if DEVICES[target] == tuning.AMD else replace(limits, copies=wide)


def decode_entries() -> Iterator[Entry]:
    """As many tiles of keys and values as there are stages, all but one of them before the loop, so that two are in
    flight at least; AMD has two before it, whatever its stages."""
    kernel = "avmp.kernels.paged_attention:decode_kernel"
    for target, (name, (shape, changed, registers)) in ((t, item) for t in TARGETS for item in DECODE.items()):
        most = registers[TARGETS.index(target)]
        if most is None:
            continue
        sizes = shape.sizes(changed, DEVICES[target])
        tiles = tuning.decode_tiles(shape.rows, sizes)
        arguments = attention_arguments(shape, tiles, changed) | {"LEAST_KEYS": tuning.LEAST_SPLIT_KEYS, "SPLITS": 8}
        arguments |= {"parts": "*fp32:16", "part_lse": "*fp32:16"}
        tiles_read = 3 if DEVICES[target] == tuning.AMD else tiles.stages
        limits = replace(reads(name, tiles_read, tiles, sizes, target), registers=most)
        if DEVICES[target] == tuning.AMD:
            limits = replace(limits, scalar_spills=SCALAR_SPILLS["decode"].get(name, 0))
        if shape.dtype != "fp32":
            limits = replace(limits, matrix=4, unit=(UNITS if tiles.rows >= 64 else NARROW_UNITS)[target])
        yield Entry(f"decode, {name}", kernel, arguments, tiles.options, limits, (target,))


def prefill_entries() -> Iterator[Entry]:
    """Two loops, of tiles that need no mask and of the rest, each with as many tiles as there are stages, so that one
    is in flight at least; AMD has two, whatever its stages."""
    kernel = "avmp.kernels.paged_attention:prefill_kernel"
    for target, (name, (shape, changed, registers)) in ((t, item) for t in TARGETS for item in PREFILL.items()):
        most = registers[TARGETS.index(target)]
        if most is None:
            continue
        sizes = shape.sizes(changed, DEVICES[target])
        tiles = tuning.prefill_tiles(sizes)
        arguments = attention_arguments(shape, tiles, changed)
        tiles_read = 2 * (2 if DEVICES[target] == tuning.AMD else tiles.stages)
        limits = replace(reads(name, tiles_read, tiles, sizes, target), registers=most)
        if DEVICES[target] == tuning.AMD:
            limits = replace(limits, scalar_spills=SCALAR_SPILLS["prefill"].get(name, 0))
        if shape.dtype != "fp32":
            limits = replace(limits, matrix=16, unit=UNITS[target])
        yield Entry(f"prefill, {name}", kernel, arguments, tiles.options, limits, (target,))


# Registers at most, in the order of TARGETS. vLLM's kernel takes 40, 32 and 32 for 16 parts.
# - 16 on sm_100: 12 programs instead of 16 are resident, with 96 KiB of parts in flight, four times what hides the
#   latency of memory.
# - All parts that there are, for which there is no figure: 7 programs and more, with 32 KiB in flight each.
MERGE = {16: (40, 32, 40, 24), tuning.MOST_SPLITS: (68, 68, 70, 56)}


def merge_entries() -> Iterator[Entry]:
    """The parts are read in 128 bits."""
    arguments: dict[str, Any] = dict.fromkeys(("parts", "part_lse", "lse"), "*fp32:16")
    arguments |= {
        "out": "*bf16:16",
        "query_start_loc": "*i32",
        "sinks": "*fp32",
        "most_queries": "i32",
        "tokens": "i32",
    }
    arguments |= {"out_token": "i32:16", "out_head": "i32:16"}
    kernel = "avmp.kernels.paged_attention:merge_kernel"
    options = {"num_warps": tuning.MERGE_WARPS}
    for splits, registers in MERGE.items():
        changed = {"HEADS": HEADS, "DIM_V": 128, "BLOCK_DIM_V": 128, "SPLITS": splits}
        limits = Limits(wide_loads=splits // 8, narrowest_load=32, narrowest_store=16)
        for target, most in zip(TARGETS, registers, strict=True):
            kept = replace(limits, registers=most)
            yield Entry(f"merge, {splits} splits", kernel, arguments | changed, options, kept, (target,))


def attention_entries() -> Iterator[Entry]:
    """The usual shape with and without features, and the shapes at the edges."""
    yield from decode_entries()
    yield from prefill_entries()
    yield from merge_entries()


KV_CACHES = {
    "bf16": ("bf16", fp8_formats.PLAIN, "i32:16", 16),
    "bf16, odd strides": ("bf16", fp8_formats.PLAIN, "i32", 8),
    "e4m3": ("u8", fp8_formats.E4M3, "i32:16", 16),
    "e5m2": ("u8", fp8_formats.E5M2, "i32:16", 16),
}


def kv_arguments(cache: str, form: int, stride: str, hint: int) -> dict[str, Any]:
    """What writing and gathering have in common: 8 heads of 128, pages of 16 tokens."""
    scales = "*fp32" if form else None
    arguments: dict[str, Any] = dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16")
    arguments |= {"page_table": "*i32", "key_scale": scales, "value_scale": scales}
    arguments |= dict.fromkeys(("key_scale_head", "value_scale_head"), 1 if form else 0)
    arguments |= dict.fromkeys(("first_valid_id", "table_limit", "page_limit"), "i32")
    arguments |= dict.fromkeys(CACHE_STRIDES, stride)
    arguments |= {"HEADS": 8, "PAGE": 16, "DIM": 128, "DIM_V": 128, "BLOCK_DIM": 128, "BLOCK_DIM_V": 128}
    arguments |= {"PAIRS": tuning.KV_TILE // 128, "FORMAT_K": form, "FORMAT_V": form}
    return arguments | {"HINT_K": hint, "HINT_V": hint}


# Registers at most, in the order of TARGETS: plain, and through fp8. vLLM's kernel takes 20, 18 and 16 to write plain,
# and 18 through fp8 on sm_90, which converts by hardware; it has no figure for gathering.
# - Plain: a thread has 32 bytes of keys and 32 of values under way, vLLM's 8 of each. With half as many this kernel
#   takes 32 and 26, for nothing: up to 40 registers on sm_86, and up to 32 on sm_90 and sm_100, all programs that fit
#   by their warps are resident.
# - Writing through fp8: arithmetic converts, so that every target does it alike, in fp32. On sm_90 and sm_100 12
#   programs of 16 are resident, with 96 KiB in flight; an H200's memory needs 25.
# - gfx942: up to 64 registers all programs are resident.
KV_WRITE = {"plain": (40, 32, 32, 36), "fp8": (40, 40, 40, 44)}
KV_GATHER = {"plain": (40, 32, 32, 30), "fp8": (40, 32, 32, 42)}


def kv_entries() -> Iterator[Entry]:
    """Plain, and through fp8, which every target encodes and decodes alike. Keys and values move in 128 bits; ids are
    read one by one."""
    limits = Limits(narrowest_load=32, narrowest_store=128, shared=4096)
    for place, target in enumerate(TARGETS):
        options = {"num_warps": tuning.kv_warps(DEVICES[target])}
        for name, (cache, form, stride, hint) in KV_CACHES.items():
            arguments = kv_arguments(cache, form, stride, hint)
            plain, packed = 4, 2 if form else 4
            kind = "fp8" if form else "plain"
            writing = arguments | {"key": "*bf16:16", "value": "*bf16:16", "slot_mapping": "*i64", "count": "i32"}
            writing |= dict.fromkeys(("key_token", "key_head", "value_token", "value_head"), stride)
            writing |= {"HINT_KEY": hint, "HINT_VALUE": hint}
            kept = replace(limits, wide_loads=plain, wide_stores=packed, registers=KV_WRITE[kind][place])
            yield Entry(f"write_kv, {name}", "avmp.kernels.kv:write_kv_kernel", writing, options, kept, (target,))
            reading = arguments | {"key_out": "*bf16:16", "value_out": "*bf16:16"}
            reading |= {"block_table": "*i32", "seq_lens": "*i32", "starts": None, "cu_seq_lens": "*i32"}
            reading |= dict.fromkeys(("rows", "total", "longest", "tiles", "table_row"), "i32")
            kept = replace(limits, wide_loads=packed, wide_stores=plain, registers=KV_GATHER[kind][place])
            yield Entry(f"gather_kv, {name}", "avmp.kernels.kv:gather_kv_kernel", reading, options, kept, (target,))
