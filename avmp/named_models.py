"""Cache geometries of well-known hybrid models, by name: one entry per model, in the fields of its configuration.

The numbers are those of public configurations; only what the cache depends on is listed. ``jamba-1.5-mini`` is taken
to equal ``jamba-v0.1``, and the value heads of ``qwen3.5-27b`` and ``qwen3.5-35b-a3b`` to equal those of their
successors; neither has been compared with the published files. To add a model, add an entry here, or pass its
config.json to :meth:`avmp.geometry.Geometry.from_config`.

``paper_jamba`` and ``paper_mamba2`` are no models but the two geometries of the published AVMP experiment (arXiv
2605.22416), which leaves out convolution windows and counts two bytes per element: 4 attention layers with KV pages
of 64 KiB each, 28 state layers of 256 KiB or 2 MiB each.
"""

from __future__ import annotations

import difflib
from typing import Any

from avmp.config_fields import dtype_name
from avmp.errors import InvalidArgument
from avmp.geometry import CONVENTIONS, AttentionLayer, Geometry, StateLayer, StatePart


def _zamba2(layers: int, hybrid_layers: list[int], **fields: Any) -> dict[str, Any]:
    kinds = ["hybrid" if layer in hybrid_layers else "mamba" for layer in range(layers)]
    shared = {"model_type": "zamba2", "mamba_expand": 2, "mamba_d_state": 64, "mamba_d_conv": 4}
    attention = {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096}
    return {**shared, **attention, "layers_block_type": kinds, **fields}


def _granite(**fields: Any) -> dict[str, Any]:
    attention_layers = (5, 15, 25, 35)
    return {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if layer in attention_layers else "mamba" for layer in range(40)],
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "max_position_embeddings": 131072,
        **fields,
    }


def _falcon_h1(**fields: Any) -> dict[str, Any]:
    return {"model_type": "falcon_h1", "head_dim": 128, "mamba_d_state": 256, "mamba_d_conv": 4, **fields}


def _nemotron_h(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "head_dim": 128,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mamba_head_dim": 64,
        **fields,
    }


def _qwen(model_type: str, layers: int, kv_heads: int, value_heads: int = 32) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
    }


_JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "max_position_embeddings": 262144,
}

_BAMBA = {
    "model_type": "bamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "max_position_embeddings": 262144,
}

_LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "max_position_embeddings": 128000,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "jamba-v0.1": _JAMBA,
    "jamba-1.5-mini": _JAMBA,
    "zamba2-2.7b": _zamba2(
        54, [6, 12, 18, 24, 30, 36, 42, 47, 51], hidden_size=2560, n_mamba_heads=80, mamba_ngroups=1
    ),
    "zamba2-7b": _zamba2(
        81, [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77], hidden_size=3584, n_mamba_heads=112, mamba_ngroups=2
    ),
    "bamba-9b": _BAMBA,
    "falcon-h1-1.5b": _falcon_h1(
        num_hidden_layers=24,
        num_key_value_heads=2,
        mamba_d_ssm=3072,
        mamba_n_heads=48,
        mamba_n_groups=1,
        max_position_embeddings=131072,
    ),
    "falcon-h1-7b": _falcon_h1(
        num_hidden_layers=44,
        num_key_value_heads=2,
        mamba_d_ssm=3072,
        mamba_n_heads=24,
        mamba_n_groups=1,
        max_position_embeddings=262144,
    ),
    "falcon-h1-34b": _falcon_h1(
        num_hidden_layers=72,
        num_key_value_heads=4,
        mamba_d_ssm=4096,
        mamba_n_heads=32,
        mamba_n_groups=2,
        max_position_embeddings=262144,
    ),
    "granite-4.0-h-tiny": _granite(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48),
    "granite-4.0-h-small": _granite(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, mamba_n_heads=128),
    "nemotron-h-8b": _nemotron_h(
        hybrid_override_pattern="M-M-M-M" + 4 * "*-M-M-M-M-M" + "-",
        num_key_value_heads=8,
        mamba_num_heads=128,
        max_position_embeddings=8192,
    ),
    "nemotron-nano-9b-v2": _nemotron_h(
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        num_key_value_heads=8,
        mamba_num_heads=128,
        mamba_head_dim=80,
        max_position_embeddings=131072,
    ),
    "nemotron-3-nano-30b-a3b": _nemotron_h(
        hybrid_override_pattern="MEMEM" + 4 * "*EMEMEM" + 2 * "*EMEMEMEM" + "E",
        num_key_value_heads=2,
        mamba_num_heads=64,
        mamba_ssm_cache_dtype="float32",
        max_position_embeddings=262144,
    ),
    "qwen3-next-80b-a3b": _qwen("qwen3_next", layers=48, kv_heads=2),
    "qwen3.5-4b": _qwen("qwen3_5_text", layers=32, kv_heads=4),
    "qwen3.5-9b": _qwen("qwen3_5_text", layers=32, kv_heads=4),
    "qwen3.5-27b": _qwen("qwen3_5_text", layers=64, kv_heads=4, value_heads=48),
    "qwen3.5-35b-a3b": _qwen("qwen3_5_moe_text", layers=40, kv_heads=2),
    "lfm2-1.2b": _LFM2,
}

_PAPER_D_STATE = {"paper_jamba": 16, "paper_mamba2": 128}

MODEL_NAMES: tuple[str, ...] = (*_CONFIGS, *_PAPER_D_STATE)


def named_model(name: str, **options: Any) -> Geometry:
    """The geometry of the model called ``name``, in any case; ``options`` are those of ``Geometry.from_config``.

    Raises InvalidArgument for a name not in ``MODEL_NAMES``; the message lists them and hints at the closest.
    """
    key = name.lower()
    if key in _PAPER_D_STATE:
        return _paper_geometry(key, **options)
    config = _CONFIGS.get(key)
    if config is None:
        close = difflib.get_close_matches(key, MODEL_NAMES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InvalidArgument(f"unknown model {name!r}{hint}: expected one of {', '.join(MODEL_NAMES)}")
    return Geometry.from_config(config, **{"name": key, **options})


def _paper_geometry(
    model: str,
    page_tokens: int = 16,
    convention: str = "transformers",
    dtype: object = None,
    ssm_dtype: object = None,
    conv_columns: int | None = None,
    name: str | None = None,
) -> Geometry:
    """Both conventions agree on it, as they differ in windows, which are not there, and in the dtype of the states,
    which the paper fixes at two bytes."""
    if convention not in CONVENTIONS:
        raise InvalidArgument(f"convention {convention!r}: expected one of {', '.join(CONVENTIONS)}")
    attention = [layer for layer in range(32) if layer % 8 == 4]
    state = StatePart("ssm", (8192, _PAPER_D_STATE[model]), dtype_name(ssm_dtype) or "bfloat16")
    return Geometry(
        attention_layers=tuple(
            AttentionLayer(layer, 8, 128, 128, dtype_name(dtype) or "bfloat16") for layer in attention
        ),
        state_layers=tuple(StateLayer(layer, (state,)) for layer in range(32) if layer not in attention),
        page_tokens=page_tokens,
        max_position_embeddings=262144,
        name=name or model,
        conv_columns=conv_columns,
    )
