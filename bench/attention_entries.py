"""Attention, and keys and values into pages and out of them: what is compiled offline, and what must hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from avmp.kernels import attention_tuning as tuning
from avmp.kernels import fp8
from bench.static_entries import Entry, Limits

TARGETS = {tuning.LARGE: ("sm_90", "sm_100"), tuning.SMALL: ("sm_86",), tuning.AMD: ("gfx942",)}
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
STRIDES = dict.fromkeys(
    ("q_token", "q_head", "k_page", "k_token", "k_head", "v_page", "v_token", "v_head", "out_token", "out_head"),
    "i32:16",
) | dict.fromkeys(("slope_row", "key_scale_row", "key_scale_head", "value_scale_row", "value_scale_head"), 0)

FEATURES: dict[str, dict[str, Any]] = {
    "virtual ids": {},
    "physical ids": {"page_table": None},
    "every feature": {"slopes": "*fp32", "sinks": "*fp32", "LEFT": True, "CAP": True},
}
BYTES: dict[str, Any] = {"key_cache": "*u8:16", "value_cache": "*u8:16", "FORMAT_K": fp8.E4M3, "FORMAT_V": fp8.E4M3}
SCALES = {"key_scale": "*fp32", "value_scale": "*fp32"}


def attention_arguments(
    dtype: str, dim: int, page: int, tiles: tuning.Tiles, changed: dict[str, Any]
) -> dict[str, Any]:
    """What the decode and the prefill kernel have in common."""
    block = 1 << (dim - 1).bit_length()
    arguments: dict[str, Any] = {**POINTERS, **NUMBERS, **STRIDES, "lse": "*fp32:16"}
    arguments |= dict.fromkeys(("q", "key_cache", "value_cache", "out"), f"*{dtype}:16")
    arguments |= {"HEADS": HEADS, "GROUP": GROUP, "PAGE": page, "CHUNK": min(page & -page, tiles.keys)}
    arguments |= {"DIM": dim, "DIM_V": dim, "BLOCK_DIM": block, "BLOCK_DIM_V": block, "M": tiles.rows, "N": tiles.keys}
    arguments |= {"LEFT": False, "RIGHT": True, "CAP": False, "FORMAT_K": fp8.PLAIN, "FORMAT_V": fp8.PLAIN}
    return arguments | {"HINT_K": 16, "HINT_V": 16} | changed


def sizes(dtype: str, dim: int, changed: dict[str, Any], device: str) -> tuning.Sizes:
    """As a launcher sees them."""
    block, query_bytes = 1 << (dim - 1).bit_length(), 4 if dtype == "fp32" else 2
    return tuning.Sizes(block, block, query_bytes, 1 if "FORMAT_K" in changed else query_bytes, device)


def decode_entry(name: str, dtype: str, dim: int, page: int, changed: dict[str, Any], device: str) -> Entry:
    """Two tiles of keys and values in flight: both are held in shared memory while a third is used."""
    chosen = sizes(dtype, dim, changed, device)
    tiles = tuning.decode_tiles(tuning.LEAST_ROWS, chosen)
    arguments = attention_arguments(dtype, dim, page, tiles, changed)
    arguments |= {"parts": "*fp32:16", "part_lse": "*fp32:16", "SPLITS": 8, "LEAST_KEYS": tuning.LEAST_SPLIT_KEYS}
    limits = Limits(wide_loads=4, narrowest_load=32, narrowest_store=32, registers=224, matrix=int(dtype != "fp32"))
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Entry(
        f"decode, {name}", "avmp.kernels.paged_attention:decode_kernel", arguments, options, limits, TARGETS[device]
    )


def prefill_entry(name: str, dtype: str, dim: int, page: int, changed: dict[str, Any], device: str) -> Entry:
    """Tiles that feed the matrix units: HGMMA on sm_90, UTCHMMA on sm_100."""
    tiles = tuning.prefill_tiles(sizes(dtype, dim, changed, device))
    arguments = attention_arguments(dtype, dim, page, tiles, changed)
    limits = Limits(wide_loads=4, narrowest_load=32, narrowest_store=32, matrix=int(dtype != "fp32"))
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Entry(
        f"prefill, {name}", "avmp.kernels.paged_attention:prefill_kernel", arguments, options, limits, TARGETS[device]
    )


def attention_entries() -> Iterator[Entry]:
    """The usual shape with and without features, and the shapes at the edges."""
    for make in (decode_entry, prefill_entry):
        for device in TARGETS:
            for name, changed in FEATURES.items():
                yield make(f"bf16, d 128, page 16, {name}", "bf16", 128, 16, changed, device)
            yield make("bf16, d 128, page 16, e4m3", "bf16", 128, 16, BYTES | SCALES, device)
            yield make("fp16, d 80, page 24", "fp16", 80, 24, {}, device)
            yield make("bf16, d 256, page 64", "bf16", 256, 64, {}, device)
            yield make("fp32, d 128, page 16", "fp32", 128, 16, {}, device)
    arguments: dict[str, Any] = dict.fromkeys(("parts", "part_lse", "lse"), "*fp32:16")
    arguments |= {"out": "*bf16:16", "query_start_loc": "*i32", "sinks": "*fp32", "most_queries": "i32"}
    arguments |= {"out_token": "i32:16", "out_head": "i32:16"}
    arguments |= {"HEADS": HEADS, "DIM_V": 128, "BLOCK_DIM_V": 128, "SPLITS": tuning.MOST_SPLITS}
    limits = Limits(wide_loads=4, narrowest_load=32, narrowest_store=16, registers=128)
    kernel = "avmp.kernels.paged_attention:merge_kernel"
    yield Entry("merge, 64 splits", kernel, arguments, {"num_warps": tuning.MERGE_WARPS}, limits)


def kv_arguments(dtype: str, cache: str, form: int) -> dict[str, Any]:
    """What writing and gathering have in common: 8 heads of 128, pages of 16 tokens."""
    scales = "*fp32" if form else None
    arguments: dict[str, Any] = dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16")
    arguments |= {"page_table": "*i32", "key_scale": scales, "value_scale": scales}
    arguments |= dict.fromkeys(("key_scale_head", "value_scale_head"), 1 if form else 0)
    arguments |= dict.fromkeys(("first_valid_id", "table_limit", "page_limit"), "i32")
    arguments |= dict.fromkeys(("k_page", "k_token", "k_head", "v_page", "v_token", "v_head"), "i32:16")
    arguments |= {"HEADS": 8, "PAGE": 16, "DIM": 128, "DIM_V": 128, "BLOCK_DIM": 128, "BLOCK_DIM_V": 128}
    return arguments | {"PAIRS": tuning.KV_TILE // 128, "FORMAT_K": form, "FORMAT_V": form, "HINT_K": 16, "HINT_V": 16}


def kv_entries() -> Iterator[Entry]:
    """Plain, and through fp8, which every target encodes and decodes alike."""
    options, limits = {"num_warps": tuning.KV_WARPS}, Limits(narrowest_load=32, narrowest_store=32, registers=64)
    for name, cache, form in (("bf16", "bf16", fp8.PLAIN), ("e4m3", "u8", fp8.E4M3), ("e5m2", "u8", fp8.E5M2)):
        arguments = kv_arguments("bf16", cache, form)
        writing = arguments | {"key": "*bf16:16", "value": "*bf16:16", "slot_mapping": "*i64", "count": "i32"}
        writing |= dict.fromkeys(("key_token", "key_head", "value_token", "value_head"), "i32:16")
        writing |= {"HINT_KEY": 16, "HINT_VALUE": 16}
        wide = replace(limits, wide_loads=2, wide_stores=0 if form else 2)
        yield Entry(f"write_kv, {name}", "avmp.kernels.kv:write_kv_kernel", writing, options, wide)
        reading = arguments | {"key_out": "*bf16:16", "value_out": "*bf16:16"}
        reading |= {"block_table": "*i32", "seq_lens": "*i32", "starts": None, "cu_seq_lens": "*i32"}
        reading |= dict.fromkeys(("rows", "total", "longest", "tiles", "table_row"), "i32")
        wide = replace(limits, wide_loads=0 if form else 2, wide_stores=2)
        yield Entry(f"gather_kv, {name}", "avmp.kernels.kv:gather_kv_kernel", reading, options, wide)
