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


def update_entries() -> Iterator[Entry]:
    """One token and several, states of 4 and 2 bytes, one decay per head and one per element."""
    kernel = "avmp.kernels.selective_state_update:selective_state_update_kernel"
    for target in TARGETS:
        vectors = 128 // LANES[target]
        one = Limits(vectors, vectors, narrowest_load=16, narrowest_store=16, registers=56)
        half, most = replace(one, wide_loads=vectors // 2, wide_stores=vectors // 2), replace(one, registers=80)
        for name, dtype, shape, changed, limits in (
            ("fp32, 64 x 128", "fp32", (64, 64, 128, True), {}, one),
            ("bf16, 64 x 128", "bf16", (64, 64, 128, True), {}, half),
            ("fp32, 64 x 128, physical ids", "fp32", (64, 64, 128, True), {"slot_table": None}, one),
            ("fp32, 64 x 64", "fp32", (80, 64, 64, True), {}, one),
            ("fp32, mamba-1, 16", "fp32", (1, 8192, 16, False), {}, half),
            ("fp32, 64 x 128, speculative", "fp32", (64, 64, 128, True), SPECULATIVE, most),
            ("bf16, 64 x 128, speculative", "bf16", (64, 64, 128, True), SPECULATIVE, replace(half, registers=72)),
        ):
            tile = tuning.state_tile(*shape[1:], False, LANES[target])
            arguments = update_arguments(dtype, *shape) | {"M": tile.dims, "BLOCK": tile.block} | changed
            options = {"num_warps": tile.warps}
            yield Entry(f"state update, {name}", kernel, arguments, options, limits, (target,))
    shape = (64, 64, 128, True)
    tile = tuning.state_tile(*shape[1:], False, LANES["sm_90"])
    arguments = update_arguments("bf16", *shape) | {"M": tile.dims, "BLOCK": tile.block} | intermediate_arguments()
    options = {"num_warps": tile.warps}
    yield Entry("state update, bf16, intermediate states", kernel, arguments, options, Limits(), ("sm_90",))


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


def conv_entries() -> Iterator[Entry]:
    """Both orders of a state, one token and several. The state moves in vectors where channels lie side by side, or
    where a channel's columns are 2 or 4, as in a cache of transformers."""
    kernel = "avmp.kernels.causal_conv1d_update:causal_conv1d_update_kernel"
    several: dict[str, Any] = {"SINGLE": False}
    shifted = several | {"SHIFTED": True, "HISTORY": 3, "accepted": "*i32"}
    narrow = Limits(narrowest_load=16, narrowest_store=16, registers=128, shared=4096)
    wide = replace(narrow, wide_loads=5, wide_stores=4, narrowest_load=32, narrowest_store=32)
    for target in TARGETS:
        for name, arguments, limits in (
            ("width 4, columns first", conv_arguments(4, 3, False), wide),
            ("width 4 of 4, channels first", conv_arguments(4, 4, True), wide),
            ("width 4, channels first", conv_arguments(4, 3, True), narrow),
            ("width 4 of 4, columns first", conv_arguments(4, 4, False), wide),
            ("width 4, several tokens", conv_arguments(4, 3, False) | several, wide),
            ("width 4 of 4, several tokens", conv_arguments(4, 4, True) | several, wide),
            ("width 4, speculative", conv_arguments(4, 6, False) | shifted, wide),
            ("width 3", conv_arguments(3, 3, False), replace(wide, wide_loads=4, narrowest_load=16)),
            ("fp32, width 4", conv_arguments(4, 3, False, "fp32"), wide),
        ):
            element_bytes = 4 if name.startswith("fp32") else 2
            channels = tuning.conv_channels(8448, element_bytes, False, LANES[target])
            arguments = arguments | {"CHANNELS": channels}
            yield Entry(f"conv update, {name}", kernel, arguments, {"num_warps": tuning.CONV_WARPS}, limits, (target,))
    for name, arguments in seldom().items():
        element_bytes = 4 if "fp32 state" in name else 2
        arguments["CHANNELS"] = tuning.conv_channels(8448, element_bytes, False, LANES["sm_90"])
        options = {"num_warps": tuning.CONV_WARPS}
        yield Entry(f"conv update, {name}", kernel, arguments, options, Limits(), ("sm_90",))


def seldom() -> dict[str, dict[str, Any]]:
    """What engines ask for now and then. Nothing may spill."""
    several: dict[str, Any] = {"SINGLE": False}
    stored = several | {"targets": "*i32", "accepted": "*i32", "COLUMNS": 4, "TARGET_COLUMNS": 4}
    return {
        "width 4, stored after each token": conv_arguments(4, 3, False) | stored,
        "width 4, snapshot, fresh rows": conv_arguments(4, 3, False) | {"targets": "*i64", "has_initial_state": "*u8"},
        "width 4 of 9, several tokens": conv_arguments(4, 9, False) | several | {"HISTORY": 3},
        "width 4, fp32 state": conv_arguments(4, 3, False) | {"conv_state": "*fp32:16", "weight": "*fp32:16"},
    }


def state_entries() -> Iterator[Entry]:
    """All of them."""
    yield from update_entries()
    yield from conv_entries()
