"""Bytes per token, page, state and sequence of real models, against numbers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart, dtype_bytes
from avmp.layout import Layout
from avmp.model_configs import READERS
from avmp.named_models import MODEL_NAMES, named_model

# name: attention layers, state layers, KV heads, head_dim, conv_dim, conv width, ssm shape, KV bytes per token,
# MiB of state with ssm in float32 and K columns, the same with bfloat16, state bytes per layer in vLLM.
TABLE: dict[str, tuple[Any, ...]] = {
    "jamba-v0.1": (4, 28, 8, 128, 8192, 4, (8192, 16), 16_384, 15.75, 8.75, 311_296),
    "jamba-1.5-mini": (4, 28, 8, 128, 8192, 4, (8192, 16), 16_384, 15.75, 8.75, 311_296),
    "zamba2-2.7b": (9, 54, 32, 160, 5248, 4, (80, 64, 64), 184_320, 69.66, 35.91, 686_848),
    "zamba2-7b": (13, 81, 32, 224, 7424, 4, (112, 64, 64), 372_736, 146.34, 75.46, 962_048),
    "bamba-9b": (3, 29, 8, 128, 8448, 4, (128, 64, 128), 12_288, 117.87, 59.87, 2_147_840),
    "falcon-h1-1.5b": (24, 24, 2, 128, 3584, 4, (48, 64, 256), 24_576, 72.66, 36.66, 1_594_368),
    "falcon-h1-7b": (44, 44, 2, 128, 3584, 4, (24, 128, 256), 45_056, 133.20, 67.20, 1_594_368),
    "falcon-h1-34b": (72, 72, 4, 128, 5120, 4, (32, 128, 256), 147_456, 290.81, 146.81, 2_127_872),
    "granite-4.0-h-tiny": (4, 36, 4, 128, 3328, 4, (48, 64, 128), 8_192, 54.91, 27.91, 806_400),
    "granite-4.0-h-small": (4, 36, 8, 128, 8448, 4, (128, 64, 128), 16_384, 146.32, 74.32, 2_147_840),
    "nemotron-h-8b": (4, 24, 8, 128, 10240, 4, (128, 64, 128), 16_384, 97.88, 49.88, 4_255_744),
    "nemotron-nano-9b-v2": (4, 27, 8, 128, 12288, 4, (128, 80, 128), 16_384, 137.53, 70.03, 5_316_608),
    "nemotron-3-nano-30b-a3b": (6, 23, 2, 128, 6144, 4, (64, 64, 128), 6_144, 47.08, 24.08, 2_134_016),
    "qwen3-next-80b-a3b": (12, 36, 2, 256, 8192, 4, (32, 128, 128), 24_576, 74.25, 38.25, 1_097_728),
    "qwen3.5-4b": (8, 24, 4, 256, 8192, 4, (32, 128, 128), 32_768, 49.50, 25.50, 2_146_304),
    "qwen3.5-9b": (8, 24, 4, 256, 8192, 4, (32, 128, 128), 32_768, 49.50, 25.50, 2_146_304),
    "qwen3.5-27b": (16, 48, 4, 256, 10240, 4, (48, 128, 128), 65_536, 147.75, 75.75, 3_207_168),
    "qwen3.5-35b-a3b": (10, 30, 2, 256, 8192, 4, (32, 128, 128), 20_480, 61.88, 31.88, 2_146_304),
    "lfm2-1.2b": (6, 10, 8, 64, 2048, 3, (), 12_288, 0.12, 0.12, 8_192),
}

FLOAT32_IN_VLLM = ("nemotron", "qwen3.5")


def _product(shape: tuple[int, ...]) -> int:
    product = 1 if shape else 0
    for extent in shape:
        product *= extent
    return product


def test_every_named_model_is_in_the_table() -> None:
    """But for the two geometries of the published experiment, which have no convolution windows."""
    assert set(TABLE) | {"paper_jamba", "paper_mamba2"} == set(MODEL_NAMES)


@pytest.mark.parametrize("name", TABLE)
def test_named_model_has_the_hand_computed_bytes(name: str) -> None:
    layers, state_layers, heads, dim, conv_dim, width, ssm, kv_bytes, mib, mib_bfloat16, _ = TABLE[name]
    geometry = named_model(name)
    assert (len(geometry.attention_layers), len(geometry.state_layers)) == (layers, state_layers)
    assert geometry.kv_bytes_per_token == kv_bytes == layers * heads * 2 * dim * 2
    assert geometry.kv_bytes_per_page == 16 * kv_bytes
    state_bytes = state_layers * (conv_dim * width * 2 + _product(ssm) * 4)
    assert geometry.state_bytes_per_sequence == state_bytes
    assert round(state_bytes / 2**20, 2) == mib
    assert round(named_model(name, ssm_dtype="bfloat16").state_bytes_per_sequence / 2**20, 2) == mib_bfloat16
    assert geometry.name == name


@pytest.mark.parametrize("name", TABLE)
def test_named_model_has_the_hand_computed_bytes_in_the_vllm_convention(name: str) -> None:
    _, state_layers, _, _, conv_dim, width, ssm, kv_bytes, _, _, layer_bytes = TABLE[name]
    geometry = named_model(name, convention="vllm")
    ssm_element = 4 if name.startswith(FLOAT32_IN_VLLM) else 2
    assert {layer.nbytes for layer in geometry.state_layers} == {layer_bytes}
    assert layer_bytes == conv_dim * (width - 1) * 2 + _product(ssm) * ssm_element
    assert geometry.state_bytes_per_sequence == state_layers * layer_bytes
    assert geometry.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("name", "block_tokens"),
    [("qwen3.5-4b", 528), ("qwen3.5-27b", 784), ("qwen3.5-35b-a3b", 1056), ("zamba2-7b", 48), ("falcon-h1-7b", 1568)],
)
def test_inflated_block_of_an_engine_follows_from_the_geometry(name: str, block_tokens: int) -> None:
    """Attention blocks raised to one layer's state: 16 * ceil(S / (16 * t1)) tokens, as engine logs print them."""
    geometry = named_model(name, convention="vllm")
    token_bytes = geometry.kv_bytes_per_token // len(geometry.attention_layers)
    assert 16 * -(-geometry.state_layers[0].nbytes // (16 * token_bytes)) == block_tokens


def test_unknown_name_lists_the_names_and_hints_at_the_closest() -> None:
    with pytest.raises(InvalidArgument, match=r"did you mean 'jamba-v0\.1'") as error:
        named_model("jamba-v0.2")
    assert all(name in str(error.value) for name in MODEL_NAMES)
    assert named_model("Jamba-v0.1").name == "jamba-v0.1"


def test_conventions_differ_in_columns_and_ssm_dtype() -> None:
    conv, ssm = named_model("bamba-9b").state_layers[0].parts
    assert (conv.shape, conv.dtype, ssm.dtype) == ((8448, 4), "bfloat16", "float32")
    conv, ssm = named_model("bamba-9b", convention="vllm").state_layers[0].parts
    assert (conv.shape, conv.dtype, ssm.dtype) == ((8448, 3), "bfloat16", "bfloat16")
    for convention in ("transformers", "vllm"):
        ssm = named_model("nemotron-h-8b", convention=convention, ssm_dtype="float16").state_layers[0].parts[1]
        assert ssm.dtype == "float16"
    with pytest.raises(InvalidArgument, match="convention 'hf': expected one of transformers, vllm"):
        named_model("bamba-9b", convention="hf")


def test_layers_are_the_models_own_indices() -> None:
    assert [layer.layer for layer in named_model("jamba-v0.1").attention_layers] == [4, 12, 20, 28]
    assert [layer.layer for layer in named_model("lfm2-1.2b").attention_layers] == [2, 5, 8, 10, 12, 14]
    hybrid = named_model("falcon-h1-1.5b")
    assert [layer.layer for layer in hybrid.attention_layers] == [layer.layer for layer in hybrid.state_layers]


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_draft_tokens_widen_every_convolution_window(draft_tokens: int) -> None:
    columns = 3 + draft_tokens
    geometry = named_model("jamba-v0.1", conv_columns=columns)
    assert {layer.parts[0].shape for layer in geometry.state_layers} == {(8192, columns)}
    assert geometry.state_bytes_per_sequence == 28 * (8192 * columns * 2 + 8192 * 16 * 4)
    assert Layout.plan(geometry, "1GiB").slot_total_bytes == geometry.state_bytes_per_sequence


def test_conv_columns_without_a_convolution_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no state layer has a part named 'conv'"):
        Geometry((AttentionLayer(0, 1, 64, 64, "bfloat16"),), (), conv_columns=4)


def test_page_bytes_are_the_sum_of_the_real_parts() -> None:
    """Keys wider than values, and keys alone, are counted as they are, not as twice the keys."""
    unequal = AttentionLayer(0, 8, 192, 128, "bfloat16")
    key_only = AttentionLayer(1, 1, 576, 0, "float8_e4m3fn")
    geometry = Geometry((unequal, key_only), (), page_tokens=32)
    assert geometry.kv_bytes_per_token == 8 * 192 * 2 + 8 * 128 * 2 + 576
    assert Layout.plan(geometry, "64MiB").page_total_bytes == 32 * (8 * 192 * 2 + 8 * 128 * 2 + 576)


def test_short_request_holds_its_state_and_one_page_beside_a_state_of_7800_tokens() -> None:
    token_bytes = 2 * 8 * 128 * 2
    part = StatePart("ssm", (7800, token_bytes), "uint8")
    attention = tuple(AttentionLayer(layer, 8, 128, 128, "bfloat16") for layer in range(2))
    geometry = Geometry(attention, tuple(StateLayer(layer, (part,)) for layer in range(2, 24)))
    layout = Layout.plan(geometry, "64GiB")
    held = layout.pages_per_sequence(12) * layout.page_total_bytes + layout.slot_total_bytes
    useful = geometry.state_bytes_per_sequence + 12 * geometry.kv_bytes_per_token
    assert held <= layout.slot_total_bytes + layout.page_total_bytes
    assert held <= 1.02 * useful + layout.page_total_bytes


def test_capacity_of_24_state_and_8_attention_layers() -> None:
    parts = (StatePart("conv", (8192, 4), "bfloat16"), StatePart("ssm", (32, 128, 128), "float32"))
    attention = tuple(AttentionLayer(layer, 4, 256, 256, "bfloat16") for layer in range(3, 32, 4))
    state = tuple(StateLayer(layer, parts) for layer in range(32) if layer % 4 != 3)
    geometry = Geometry(attention, state)
    assert geometry.kv_bytes_per_token == 8 * 4 * 512 * 2 == 32_768
    assert geometry.state_bytes_per_sequence == 24 * (65_536 + 2_097_152) == 51_904_512
    assert geometry.sequence_bytes(1000) == 63 * 16 * 32_768 + 51_904_512
    layout = Layout.plan(geometry, "8GiB")
    for sequences in (1, 7, 40):
        tokens = layout.max_tokens(sequences)
        assert tokens is not None and layout.max_sequences(tokens) >= sequences > layout.max_sequences(10 * tokens)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (1000, 63)])
def test_sequence_bytes_are_whole_pages_and_one_state(tokens: int, pages: int) -> None:
    geometry = named_model("jamba-v0.1")
    assert geometry.sequence_bytes(tokens) == pages * 262_144 + geometry.state_bytes_per_sequence


# Configurations.

MAMBA2_FIELDS = {
    "mamba_expand": 2, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4
}  # fmt: skip
ATTENTION_FIELDS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_FIELDS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "head_dim": 40,
}  # fmt: skip
EXTRA_FIELDS: dict[str, dict[str, Any]] = {
    "jamba": {
        "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_d_state": 8,
        "mamba_d_conv": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "linear_attention", "hybrid"], "num_key_value_heads": 4,
        "mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    },
    "bamba": {**MAMBA2_FIELDS, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2_FIELDS, "mamba_d_ssm": 192, "mamba_n_groups": 1, "head_dim": 48},
    "granitemoehybrid": {**MAMBA2_FIELDS, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*ME", "attention_head_dim": 48, "mamba_num_heads": 6, "mamba_head_dim": 20,
        "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    },
    "qwen3_next": DELTA_FIELDS,
    "qwen3_5": DELTA_FIELDS,
    "qwen3_5_text": DELTA_FIELDS,
    "qwen3_5_moe": DELTA_FIELDS,
    "qwen3_5_moe_text": DELTA_FIELDS,
    "lfm2": {"full_attn_idxs": [1, 3], "conv_L_cache": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
    "mamba": {"num_hidden_layers": 3, "expand": 2, "state_size": 16, "conv_kernel": 4},
    "falcon_mamba": {
        "num_hidden_layers": 3, "expand": 16, "intermediate_size": 256, "state_size": 16, "conv_kernel": 4
    },
    "mamba2": {
        "num_hidden_layers": 3, "expand": 2, "num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16,
        "conv_kernel": 4,
    },
}  # fmt: skip

# KV bytes per token and state bytes that tiny models of transformers 5.24 with these fields hold in bfloat16.
MEASURED = {
    "jamba": (256, 71_680),
    "zamba2": (2_048, 75_776),
    "bamba": (256, 56_832),
    "falcon_h1": (1_536, 56_320),
    "granitemoehybrid": (256, 56_832),
    "nemotron_h": (384, 27_456),
    "qwen3_next": (320, 22_272),
    "qwen3_5": (320, 22_272),
    "qwen3_5_text": (320, 22_272),
    "qwen3_5_moe": (320, 22_272),
    "qwen3_5_moe_text": (320, 22_272),
    "lfm2": (512, 1_536),
    "lfm2_moe": (256, 2_304),
    "mamba": (0, 55_296),
    "falcon_mamba": (0, 55_296),
    "mamba2": (0, 56_832),
}

# Model types for which transformers does not take hidden_size / heads where head_dim is left out.
FIXED_HEAD_DIM = {
    "ernie4_5": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "glm": 128, "glm4": 128, "gpt_oss": 64,
    "qwen3": 128, "seed_oss": 128,
}  # fmt: skip


def _config(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **ATTENTION_FIELDS, **EXTRA_FIELDS.get(model_type, {})}


def _bytes(geometry: Geometry) -> tuple[int, int]:
    return geometry.kv_bytes_per_token, geometry.state_bytes_per_sequence


@pytest.mark.parametrize("model_type", READERS)
def test_each_model_type_from_a_dict_a_file_and_an_object(model_type: str, tmp_path: Path) -> None:
    config = _config(model_type)
    expected = MEASURED.get(model_type, (4 * 2 * 2 * FIXED_HEAD_DIM.get(model_type, 32) * 2, 0))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for source in (config, file, str(file), tmp_path, SimpleNamespace(**config)):
        geometry = Geometry.from_config(source)
        assert _bytes(geometry) == expected
        assert geometry.name == model_type


def test_layer_kinds_may_be_spelt_out_or_derived() -> None:
    interval = {**_config("qwen3_next"), "full_attention_interval": 2}
    listed = {**_config("qwen3_next"), "layer_types": ["linear_attention", "full_attention"] * 2}
    assert Geometry.from_config(interval) == Geometry.from_config(listed)
    pattern = _config("nemotron_h")
    listed = {**pattern, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mamba", "moe"]}
    del listed["hybrid_override_pattern"]
    assert Geometry.from_config(pattern) == Geometry.from_config(listed)


def test_nested_text_config_is_followed() -> None:
    text = {**_config("qwen3_5_text"), "dtype": None, "mamba_ssm_dtype": "float16", "max_position_embeddings": 4096}
    outer = {"model_type": "qwen3_5", "dtype": "float16", "text_config": text, "vision_config": {"hidden_size": 7}}
    geometry = Geometry.from_config(outer, convention="vllm")
    assert geometry.max_position_embeddings == 4096
    assert [part.dtype for part in geometry.state_layers[0].parts] == ["float16", "float16"]
    assert geometry.attention_layers[0].dtype == "float16"


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_model_dtype_comes_from_the_configuration_unless_given(field: str, value: str) -> None:
    config = {**_config("jamba"), field: value}
    assert Geometry.from_config(config).attention_layers[0].dtype == "float16"
    assert Geometry.from_config(config, dtype="float32").attention_layers[0].dtype == "float32"
    assert Geometry.from_config(_config("jamba")).attention_layers[0].dtype == "bfloat16"


def test_ssm_dtype_of_the_configuration_counts_in_the_vllm_convention_only() -> None:
    config = {**_config("nemotron_h"), "mamba_ssm_cache_dtype": "float16"}
    assert Geometry.from_config(config, convention="vllm").state_layers[0].parts[1].dtype == "float16"
    assert Geometry.from_config(config).state_layers[0].parts[1].dtype == "float32"
    config["mamba_ssm_cache_dtype"] = "auto"
    assert Geometry.from_config(config, convention="vllm").state_layers[0].parts[1].dtype == "float32"


def test_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="'t5'") as error:
        Geometry.from_config({"model_type": "t5"})
    assert all(model_type in str(error.value) for model_type in READERS)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("jamba", "attn_layer_period"), ("jamba", "attn_layer_offset"), ("jamba", "num_key_value_heads"),
        ("jamba", "mamba_d_state"), ("zamba2", "layers_block_type"), ("bamba", "attn_layer_indices"),
        ("granitemoehybrid", "layer_types"), ("nemotron_h", "hybrid_override_pattern"), ("lfm2", "full_attn_idxs"),
        ("lfm2", "conv_L_cache"), ("mamba", "expand"), ("llama", "num_hidden_layers"), ("llama", "hidden_size"),
        ("qwen2", "num_key_value_heads"), ("qwen3_next", "linear_num_value_heads"),
    ],
)  # fmt: skip
def test_missing_field_is_named(model_type: str, field: str) -> None:
    config = _config(model_type)
    del config[field]
    with pytest.raises(InvalidArgument, match=rf"{model_type} config: field .*{field}.* is missing"):
        Geometry.from_config(config)


@pytest.mark.parametrize("value", [0, -1, "8", 2.5, True, [8]])
def test_field_that_makes_no_sense_is_named(value: object) -> None:
    with pytest.raises(InvalidArgument, match="num_key_value_heads="):
        Geometry.from_config({**_config("llama"), "num_key_value_heads": value})


def test_layers_of_an_unknown_kind_are_not_taken_for_layers_without_cache() -> None:
    with pytest.raises(Unsupported, match="compressed_sparse_attention"):
        Geometry.from_config({**_config("lfm2"), "layer_types": ["conv", "compressed_sparse_attention"]})


def test_config_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("text.json", "list.json", "absent.json"):
        with pytest.raises(InvalidArgument, match=name):
            Geometry.from_config(tmp_path / name)
    with pytest.raises(InvalidArgument, match="model_type is missing"):
        Geometry.from_config({})


# Tensor parallelism.


def test_shard_divides_heads_and_first_axes() -> None:
    shard = named_model("nemotron-h-8b").shard(4, rank=3)
    assert {layer.kv_heads for layer in shard.attention_layers} == {2}
    conv, ssm = shard.state_layers[0].parts
    assert conv.shape == ((8192 + 2 * 8 * 128) // 4, 4) and ssm.shape == (32, 64, 128)
    assert shard == named_model("nemotron-h-8b").shard(4, rank=0)


def test_fewer_heads_or_groups_than_ranks_are_replicated() -> None:
    shard = named_model("falcon-h1-1.5b").shard(8, rank=0)
    assert {layer.kv_heads for layer in shard.attention_layers} == {1}
    conv, ssm = shard.state_layers[0].parts
    assert conv.shape == (3072 // 8 + 2 * 256, 4) and ssm.shape == (6, 64, 256)


def test_two_shards_in_a_row_equal_one() -> None:
    geometry = named_model("qwen3-next-80b-a3b")
    assert geometry.shard(2, 0).shard(4, 0) == geometry.shard(8, 0)


def test_shard_that_would_differ_between_ranks_is_refused() -> None:
    for name, tp_size in (("falcon-h1-7b", 16), ("granite-4.0-h-tiny", 5), ("qwen3-next-80b-a3b", 3)):
        with pytest.raises(Unsupported, match=f"tp_size={tp_size}"):
            named_model(name).shard(tp_size, 0)
    with pytest.raises(InvalidArgument, match="rank=2: expected less than tp_size=2"):
        named_model("jamba-v0.1").shard(2, 2)


# What cannot be a geometry.


def _attention(layer: int) -> AttentionLayer:
    return AttentionLayer(layer, 1, 64, 64, "bfloat16")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Geometry((), ()), "at least one attention or state layer"),
        (lambda: Geometry((_attention(3), _attention(3)), ()), "attention layer 3 appears twice"),
        (lambda: Geometry((_attention(0),), (), page_tokens=0), "page_tokens=0"),
        (lambda: Geometry((_attention(0),), (), max_position_embeddings=0), "max_position_embeddings=0"),
        (lambda: AttentionLayer(0, 0, 64, 64, "bfloat16"), "kv_heads=0"),
        (lambda: AttentionLayer(0, 1, 0, 64, "bfloat16"), "key_dim=0"),
        (lambda: AttentionLayer(0, 1, 64, 64, "bf16"), "dtype 'bf16'"),
        (lambda: AttentionLayer(-1, 1, 64, 64, "bfloat16"), "layer=-1"),
        (lambda: StateLayer(0, ()), "parts of different names"),
        (lambda: StateLayer(0, (StatePart("a", (1,), "int8"),) * 2), "parts of different names"),
        (lambda: StatePart("a", (), "int8"), "at least one dimension"),
        (lambda: StatePart("a", (4, 0), "int8"), "dimension=0"),
        (lambda: StatePart("a", (4,), "int8", groups=2, group_rows=3), "6 rows in groups, of 4"),
    ],
)
def test_what_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        build()


def test_hybrid_layer_has_kv_and_state_under_one_index() -> None:
    geometry = Geometry((_attention(5),), (StateLayer(5, (StatePart("conv", (64, 4), "float16"),)),))
    assert geometry.has_attention and geometry.has_state
    assert "1 attention and 1 state layers" in geometry.describe()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1),
        ("int8", 1), ("uint8", 1),
    ],
)  # fmt: skip
def test_dtype_bytes(name: str, size: int) -> None:
    assert dtype_bytes(name) == size


def test_geometry_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, triton=None); "
        "from avmp.named_models import named_model; from avmp.layout import Layout; "
        "print(Layout.plan(named_model('jamba-v0.1'), '1GiB').lane_count)"
    )
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "4\n"
