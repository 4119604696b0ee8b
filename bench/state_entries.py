"""The state operations: what is compiled offline, and what must hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from avmp.kernels import state_tuning as tuning
from bench.offline import TARGETS
from bench.static_entries import Entry, Limits

LANES = {target: 64 if target.startswith("gfx") else 32 for target in TARGETS}
ROWS: dict[str, Any] = {
    "sources": "*i32",
    "targets": None,
    "slot_table": "*i32",
    "accepted": None,
    "query_start_loc": "*i32",
    "has_initial_state": None,
    "COLUMNS": 1,
    "TARGET_COLUMNS": 0,
    "SINGLE": True,
} | dict.fromkeys(
    ("rows", "tokens", "most", "first_valid_id", "table_limit", "slots", "source_row", "target_row"), "i32"
)
SPECULATIVE: dict[str, Any] = {"targets": "*i32", "accepted": "*i32", "SINGLE": False} | dict.fromkeys(
    ("COLUMNS", "TARGET_COLUMNS"), 4
)

# Of the strides of a state nothing is known but what HINT says.
STATE_STRIDES = (
    dict.fromkeys(("state_slot", "state_head", "state_dim"), "i32")
    | dict.fromkeys(("x_token", "x_head", "dt_token", "z_token", "z_head", "out_token", "out_head"), "i32:16")
    | dict.fromkeys(("B_token", "B_group", "C_token", "C_group"), "i32:16")
    | dict.fromkeys(("dt_dim", "A_dim", "A_state", "D_dim", "bias_dim"), 0)
    | dict.fromkeys(("entry_stride", "step_stride", "kept_head", "kept_dim"), 0)
)


def update_arguments(dtype: str, heads: int, dim: int, dstate: int, tied: bool) -> dict[str, Any]:
    """64 x 128 per head as Mamba-2 has it, or Mamba-1 with one head; x in bfloat16."""
    arguments: dict[str, Any] = {**ROWS, **STATE_STRIDES, "state": f"*{dtype}:16", "intermediate": None, "entries": 0}
    arguments |= dict.fromkeys(("x", "dt", "B", "C", "out"), "*bf16:16") | {"intermediate_indices": None, "z": None}
    arguments |= dict.fromkeys(("A", "D", "dt_bias"), "*fp32:16")
    arguments |= {"HEADS": heads, "GROUPS": 1, "DIM": dim, "DSTATE": dstate, "TIED": tied, "SOFTPLUS": True}
    arguments |= dict.fromkeys(("dt_head", "A_head", "D_head", "bias_head"), 1 if tied else 0)
    if not tied:
        arguments |= {"dt_dim": 1, "A_dim": "i32:16", "A_state": 1, "D_dim": 1, "bias_dim": 1, "z": "*bf16:16"}
    return arguments | {"STORE": True, "HINT": 16, "KEPT_HINT": 1}


def intermediate_arguments() -> dict[str, Any]:
    """As speculative decoding in some engines has it: the states after all tokens beside the pool, which stays."""
    kept: dict[str, Any] = dict.fromkeys(("entry_stride", "step_stride", "kept_head", "kept_dim"), "i32:16")
    kept |= {"entries": "i32", "intermediate": "*fp32:16", "intermediate_indices": "*i32", "has_initial_state": "*u8"}
    return kept | {"SINGLE": False, "STORE": False, "KEPT_HINT": 16}


# Registers at most, in the order of TARGETS. vLLM's kernel takes 48 for fp32 with 16 elements of a state per thread,
# which is what a thread has here. Its other figures are of 4 elements: for bf16 33 on sm_86 and 31 on sm_90, for
# several tokens 36 on sm_90, for one decay per element 35 and 32. More elements are more bytes in flight, and registers
# that hold them:
# - fp32 on sm_86: 9 programs are resident instead of 10, with 72 KiB in flight; the memory of an RTX 3090 needs 8.
# - bf16: 9 programs and more, with 36 KiB in flight; an H200's memory needs 25.
# - One decay per element: a thread has 8 elements, and as many of A. 10 programs and more, with 80 KiB in flight.
# - Several tokens: the state stays in registers while a token is read. Up to 64 leave room for 8 programs, with 64 KiB
#   in flight for fp32 and 32 for bf16; up to 72, on sm_86, for 7.
# - Intermediate states go elsewhere, in fp32, with addresses of their own: 7 programs for the 70 registers of triton
#   3.9, with 28 KiB in flight. That of 3.6 takes 116 on sm_90 and sm_100, so that the limits there are wider.
# - gfx942: up to 64 registers all programs are resident.
UPDATE: dict[str, tuple[str, tuple[int, int, int, bool], dict[str, Any], tuple[int, ...]]] = {
    "fp32, 64 x 128": ("fp32", (64, 64, 128, True), {}, (56, 48, 48, 39)),
    "bf16, 64 x 128": ("bf16", (64, 64, 128, True), {}, (48, 42, 46, 38)),
    "fp32, 64 x 128, physical ids": ("fp32", (64, 64, 128, True), {"slot_table": None}, (56, 48, 48, 39)),
    "fp32, 64 x 64": ("fp32", (80, 64, 64, True), {}, (56, 48, 48, 38)),
    "fp32, mamba-1, 16": ("fp32", (1, 8192, 16, False), {}, (42, 39, 36, 35)),
    "fp32, 64 x 128, speculative": ("fp32", (64, 64, 128, True), SPECULATIVE, (72, 64, 64, 56)),
    "bf16, 64 x 128, speculative": ("bf16", (64, 64, 128, True), SPECULATIVE, (64, 64, 64, 58)),
    "bf16, intermediate states": ("bf16", (64, 64, 128, True), intermediate_arguments(), (72, 80, 80, 62)),
}


def update_entries() -> Iterator[Entry]:
    """One token and several, states of 4 and 2 bytes, one decay per head and one per element."""
    kernel = "avmp.kernels.selective_state_update:selective_state_update_kernel"
    for target, (name, (dtype, shape, changed, registers)) in ((t, item) for t in TARGETS for item in UPDATE.items()):
        vectors = 128 // LANES[target]
        tied = shape[-1]
        wide = vectors if dtype == "fp32" and tied else vectors // 2
        kept = vectors if "intermediate" in changed else wide
        narrowest = 8 if "has_initial_state" in changed else 16
        most = registers[TARGETS.index(target)]
        limits = Limits(wide, kept, narrowest_load=narrowest, narrowest_store=16, registers=most)
        tile = tuning.state_tile(*shape[1:], False, LANES[target])
        arguments = update_arguments(dtype, *shape) | {"M": tile.dims, "BLOCK": tile.block} | changed
        yield Entry(f"state update, {name}", kernel, arguments, {"num_warps": tile.warps}, limits, (target,))


def conv_arguments(width: int, state_len: int, channels_first: bool, dtype: str = "bf16") -> dict[str, Any]:
    """8,448 channels, as models of some 8 billion parameters have them; all in one dtype."""
    arguments: dict[str, Any] = {**ROWS, "tiles": "i32", "tile_tokens": "i32", "state_slot": "i32"}
    arguments |= dict.fromkeys(("x", "conv_state", "weight", "bias", "out"), f"*{dtype}:16")
    arguments |= {"state_channel": "i32" if channels_first else 1, "state_column": 1 if channels_first else "i32"}
    arguments |= {"x_token": "i32:16", "out_token": "i32:16", "weight_channel": "i32", "weight_tap": 1}
    arguments |= {"bias_channel": 1, "DIM": 8448, "WIDTH": width, "STATE_LEN": state_len, "SILU": True}
    packed = channels_first and state_len in (2, 4)
    arguments |= {"HISTORY": min(state_len, 5), "PACKED_STATE": packed, "PACKED_WEIGHT": width in (2, 4)}
    return arguments | {"SHIFTED": False, "HINT": 1 if channels_first and not packed else 16}


SEVERAL: dict[str, Any] = {"SINGLE": False}
SHIFTED = SEVERAL | {"SHIFTED": True, "HISTORY": 3, "accepted": "*i32"}
LONG = SEVERAL | {"HISTORY": 3}
STORED = SEVERAL | {"targets": "*i32", "accepted": "*i32", "COLUMNS": 4, "TARGET_COLUMNS": 4}
FRESH: dict[str, Any] = {"targets": "*i64", "has_initial_state": "*u8"}
WIDE_STATE = dict.fromkeys(("conv_state", "weight"), "*fp32:16")

WIDE = Limits(wide_loads=5, wide_stores=4, narrowest_load=32, narrowest_store=32, shared=4096)
BYTES = replace(WIDE, narrowest_load=8)
NARROW = replace(WIDE, wide_stores=1, narrowest_load=16, narrowest_store=16)
"""The state moves in vectors where channels lie side by side, or where a channel's columns are 2 or 4, as in a cache of
transformers; else one element at a time, and x and weights in vectors."""

# Registers at most, in the order of TARGETS. vLLM's kernel takes 30 for width 4 with columns first, and with channels
# first 35 on sm_86 and 32 on sm_90, all for two channels per thread; with as many, this one takes 29 to 31. It has
# eight, so that columns of 2 bytes move in 128 bits: three columns, four taps, a token and a bias of each are held,
# mostly in fp32. A program is one warp, and there are as many as are needed:
# - One token: a multiprocessor holds 16 programs on sm_86, whatever they take up to 128 registers, and 32 on sm_90 and
#   sm_100, up to 64. Three columns with channels first leave room for 25, but a step of 8,448 channels is 33 programs a
#   row, for all of 132 multiprocessors.
# - Several tokens: the next ones are read besides. 16 programs and more, each with three columns and a token in flight:
#   32 KiB, where an H200's memory needs 25.
# - gfx942: up to 64 registers all programs are resident. Packed columns cross threads through shared memory, which
#   leaves room for 16; of the others, no fewer than 18 are.
CONV: dict[str, tuple[dict[str, Any], Limits, tuple[int, ...]]] = {
    "width 4, columns first": (conv_arguments(4, 3, False), WIDE, (78, 64, 64, 64)),
    "width 4 of 4, channels first": (conv_arguments(4, 4, True), WIDE, (74, 64, 64, 80)),
    "width 4, channels first": (conv_arguments(4, 3, True), NARROW, (90, 76, 74, 64)),
    "width 4 of 4, columns first": (conv_arguments(4, 4, False), WIDE, (78, 64, 64, 64)),
    "width 4, several tokens": (conv_arguments(4, 3, False) | SEVERAL, WIDE, (122, 120, 114, 108)),
    "width 4 of 4, several tokens": (conv_arguments(4, 4, True) | SEVERAL, WIDE, (125, 124, 124, 112)),
    "width 4, speculative": (conv_arguments(4, 6, False) | SHIFTED, WIDE, (116, 101, 110, 98)),
    "width 3": (conv_arguments(3, 3, False), replace(WIDE, wide_loads=4, narrowest_load=16), (67, 64, 64, 63)),
    "fp32, width 4": (conv_arguments(4, 3, False, "fp32"), WIDE, (74, 64, 64, 64)),
    "width 4, stored after each token": (conv_arguments(4, 3, False) | STORED, WIDE, (116, 101, 101, 100)),
    "width 4, snapshot, fresh rows": (conv_arguments(4, 3, False) | FRESH, BYTES, (76, 61, 64, 70)),
    "width 4 of 9, several tokens": (conv_arguments(4, 9, False) | LONG, WIDE, (122, 119, 120, 108)),
    "width 4, fp32 state": (conv_arguments(4, 3, False) | WIDE_STATE, replace(WIDE, wide_stores=3), (72, 64, 64, 64)),
}


def conv_entries() -> Iterator[Entry]:
    """Both orders of a state, one token and several, and what engines ask for now and then."""
    kernel = "avmp.kernels.causal_conv1d_update:causal_conv1d_update_kernel"
    options = {"num_warps": tuning.CONV_WARPS}
    for target, (name, (arguments, limits, registers)) in ((t, item) for t in TARGETS for item in CONV.items()):
        element_bytes = 4 if arguments["conv_state"] == "*fp32:16" else 2
        channels = tuning.conv_channels(8448, element_bytes, False, LANES[target])
        limits = replace(limits, registers=registers[TARGETS.index(target)])
        yield Entry(f"conv update, {name}", kernel, arguments | {"CHANNELS": channels}, options, limits, (target,))


def state_entries() -> Iterator[Entry]:
    """All of them."""
    yield from update_entries()
    yield from conv_entries()
