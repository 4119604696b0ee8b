"""From a transformers configuration to the sizes of the model's cache; transformers itself is not imported.

``READERS`` has one entry per model type: a function from the configuration's fields to :class:`ModelCaches`. A new
model is one entry. Layer kinds and defaults follow transformers 5.24 (``configuration_<model type>.py``); a default is
taken only where published config.json files leave the field out, any other missing field raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from avmp.config_fields import Fields, config_dtype, dtype_name, field, load_config
from avmp.errors import InvalidArgument, Unsupported

# Layer kinds as transformers names them, today and in older files.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid"}
STATE_KINDS = {"linear_attention", "mamba", "conv", "hybrid"}
OTHER_KINDS = {"mlp", "moe"}
PATTERN_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True)
class ModelCaches:
    """Cache of one model: layer indices, and the sizes that all its attention layers or all its state layers share.

    The convolution has ``conv_dim`` rows, of which ``conv_groups * conv_group_rows`` belong to groups, and a width of
    ``conv_kernel``. ``ssm_shape`` is empty for conv-only layers. ``dtype`` is the model's, None if the configuration
    does not say; ``engine_ssm_dtype`` is that of the ssm state in vLLM, None for the model's.
    """

    attention_layers: tuple[int, ...] = ()
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    state_layers: tuple[int, ...] = ()
    conv_dim: int = 0
    conv_kernel: int = 0
    conv_groups: int = 0
    conv_group_rows: int = 0
    ssm_shape: tuple[int, ...] = ()
    model_type: str = ""
    max_position_embeddings: int | None = None
    dtype: str | None = None
    engine_ssm_dtype: str | None = None


def read_model_caches(config: object) -> ModelCaches:
    """The caches of ``config``: an object with attributes, a mapping, or the path of a config.json (or its folder)."""
    outer = load_config(config)
    inner = field(outer, "text_config")
    text = outer if inner is None else inner
    model_type = field(text, "model_type") or field(outer, "model_type")
    if model_type is None:
        raise InvalidArgument("config: field model_type is missing")
    if model_type not in READERS:
        raise Unsupported(
            f"model type {model_type!r} is not known: build a Geometry from its layers, or use one of "
            f"{', '.join(sorted(READERS))}"
        )
    fields = Fields(text, model_type)
    caches = READERS[model_type](fields)
    ssm_dtype = dtype_name(fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    return replace(
        caches,
        model_type=model_type,
        max_position_embeddings=fields.optional_count("max_position_embeddings"),
        dtype=config_dtype(text) or config_dtype(outer),
        engine_ssm_dtype=caches.engine_ssm_dtype if ssm_dtype is None else ssm_dtype,
    )


# Layers: one list of kinds per model, in the order of its layers.


def _listed_kinds(fields: Fields) -> Sequence[str] | None:
    return fields.list("layer_types", "layers_block_type")


def _jamba_kinds(fields: Fields) -> Sequence[str]:
    period, layers = fields.count("attn_layer_period"), fields.count("num_hidden_layers")
    offset = fields.get("attn_layer_offset")
    if not isinstance(offset, int):
        raise fields.missing("attn_layer_offset")
    return ["attention" if layer % period == offset else "mamba" for layer in range(layers)]


def _required_kinds(fields: Fields) -> Sequence[str]:
    kinds = _listed_kinds(fields)
    if kinds is None:
        raise fields.missing("layer_types", "layers_block_type")
    return kinds


def _kinds_by_indices(fields: Fields, indices_name: str, other_kind: str) -> Sequence[str]:
    kinds = _listed_kinds(fields)
    if kinds is not None:
        return kinds
    indices = fields.list(indices_name)
    if indices is None:
        raise fields.missing(indices_name, "layer_types")
    layers = fields.count("num_hidden_layers")
    return ["full_attention" if layer in indices else other_kind for layer in range(layers)]


def _pattern_kinds(fields: Fields) -> Sequence[str]:
    kinds = _listed_kinds(fields)
    if kinds is not None:
        return kinds
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        raise fields.missing("hybrid_override_pattern", "layers_block_type")
    unknown = set(pattern) - set(PATTERN_KINDS)
    if unknown:
        raise InvalidArgument(f"{fields.model_type} config: hybrid_override_pattern has {sorted(unknown)}")
    return [PATTERN_KINDS[letter] for letter in pattern]


def _interval_kinds(fields: Fields) -> Sequence[str]:
    kinds = _listed_kinds(fields)
    if kinds is not None:
        return kinds
    interval = fields.count("full_attention_interval", default=4)
    layers = fields.count("num_hidden_layers")
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _uniform_kinds(kind: str, fields: Fields) -> Sequence[str]:
    return [kind] * fields.count("num_hidden_layers")


def _caches(fields: Fields, kinds: Sequence[str]) -> ModelCaches:
    """Which layers have which cache; an unknown kind raises rather than being taken for a layer without cache."""
    unknown = set(kinds) - ATTENTION_KINDS - STATE_KINDS - OTHER_KINDS
    if unknown:
        raise Unsupported(
            f"{fields.model_type} config: layers of kind {sorted(unknown)}: build a Geometry from its layers"
        )
    return ModelCaches(
        attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENTION_KINDS),
        state_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in STATE_KINDS),
    )


# Sizes of attention and of state.


def _with_kv(
    caches: ModelCaches,
    fields: Fields,
    head_dim: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    multi_head: bool = False,
) -> ModelCaches:
    """``caches`` with K and V of equal size; the arguments are defaults for fields left out.

    Without one, head_dim is hidden_size / heads and the others are required. ``multi_head``: as many KV heads as heads.
    """
    if not caches.attention_layers:
        return caches
    dim = fields.optional_count("head_dim", "attention_head_dim") or head_dim
    if dim is None:
        dim = _quotient(fields, fields.count("hidden_size"), fields.count("num_attention_heads", default=heads))
    if multi_head and fields.get("num_key_value_heads") is None:
        kv_heads = fields.count("num_attention_heads", default=heads)
    return replace(caches, kv_heads=fields.count("num_key_value_heads", default=kv_heads), key_dim=dim, value_dim=dim)


def _with_mamba2(
    caches: ModelCaches, fields: Fields, d_inner: int, heads: int, groups: int, d_state: int, kernel: int
) -> ModelCaches:
    """Mamba-2: conv over x, B and C, d_inner + 2 * groups * d_state rows; ssm (heads, d_inner / heads, d_state)."""
    return replace(
        caches,
        conv_dim=d_inner + 2 * groups * d_state,
        conv_kernel=kernel,
        conv_groups=groups,
        conv_group_rows=2 * d_state,
        ssm_shape=(heads, _quotient(fields, d_inner, heads), d_state),
    )


def _with_mamba_fields(caches: ModelCaches, fields: Fields, d_inner: int | None = None) -> ModelCaches:
    """Mamba-2 in the field names of Bamba, Falcon-H1 and Granite."""
    return _with_mamba2(
        caches,
        fields,
        d_inner=d_inner or fields.count("mamba_expand") * fields.count("hidden_size"),
        heads=fields.count("mamba_n_heads"),
        groups=fields.count("mamba_n_groups"),
        d_state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv"),
    )


def _quotient(fields: Fields, dividend: int, divisor: int) -> int:
    if dividend % divisor:
        raise InvalidArgument(f"{fields.model_type} config: {divisor} heads do not divide {dividend} dimensions")
    return dividend // divisor


# Readers, one per family.


def _plain(
    fields: Fields,
    head_dim: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    multi_head: bool = False,
) -> ModelCaches:
    """KV in every layer; a sliding window bounds how much of it is needed, and does not change its size."""
    caches = _caches(fields, _uniform_kinds("full_attention", fields))
    return _with_kv(caches, fields, head_dim, heads, kv_heads, multi_head)


def _jamba(fields: Fields) -> ModelCaches:
    """Mamba-1: conv over d_inner, state (d_inner, d_state)."""
    d_inner = fields.count("mamba_expand") * fields.count("hidden_size")
    return replace(
        _with_kv(_caches(fields, _jamba_kinds(fields)), fields),
        conv_dim=d_inner,
        conv_kernel=fields.count("mamba_d_conv"),
        ssm_shape=(d_inner, fields.count("mamba_d_state")),
    )


def _zamba2(fields: Fields) -> ModelCaches:
    # The shared attention block reads the hidden state and the embeddings side by side: heads of 2 * hidden / heads.
    hidden = fields.count("hidden_size")
    head_dim = _quotient(fields, 2 * hidden, fields.count("num_attention_heads"))
    return _with_mamba2(
        _with_kv(_caches(fields, _required_kinds(fields)), fields, head_dim=head_dim, multi_head=True),
        fields,
        d_inner=fields.count("mamba_expand") * hidden,
        heads=fields.count("n_mamba_heads"),
        groups=fields.count("mamba_ngroups"),
        d_state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv"),
    )


def _bamba(fields: Fields) -> ModelCaches:
    kinds = _kinds_by_indices(fields, "attn_layer_indices", "linear_attention")
    return _with_mamba_fields(_with_kv(_caches(fields, kinds), fields), fields)


def _falcon_h1(fields: Fields) -> ModelCaches:
    caches = _with_kv(_caches(fields, _uniform_kinds("hybrid", fields)), fields)
    return _with_mamba_fields(caches, fields, d_inner=fields.optional_count("mamba_d_ssm"))


def _granite_hybrid(fields: Fields) -> ModelCaches:
    return _with_mamba_fields(_with_kv(_caches(fields, _required_kinds(fields)), fields, multi_head=True), fields)


def _nemotron_h(fields: Fields) -> ModelCaches:
    heads = fields.count("mamba_num_heads")
    caches = _with_mamba2(
        _with_kv(_caches(fields, _pattern_kinds(fields)), fields, head_dim=128),
        fields,
        d_inner=heads * fields.count("mamba_head_dim"),
        heads=heads,
        groups=fields.count("n_groups", "mamba_n_groups"),
        d_state=fields.count("ssm_state_size"),
        kernel=fields.count("conv_kernel", "mamba_d_conv"),
    )
    return replace(caches, engine_ssm_dtype="float32")


def _gated_delta_net(fields: Fields, engine_ssm_dtype: str | None = None) -> ModelCaches:
    """Conv over queries, keys and values; state (value_heads, key_dim, value_dim)."""
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    return replace(
        _with_kv(_caches(fields, _interval_kinds(fields)), fields, head_dim=256),
        conv_dim=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=fields.count("linear_conv_kernel_dim"),
        conv_groups=key_heads,
        conv_group_rows=2 * key_dim,
        ssm_shape=(value_heads, key_dim, value_dim),
        engine_ssm_dtype=engine_ssm_dtype,
    )


def _lfm2(fields: Fields) -> ModelCaches:
    """Short convolutions over hidden_size, without a recurrent state."""
    caches = _with_kv(_caches(fields, _kinds_by_indices(fields, "full_attn_idxs", "conv")), fields)
    return replace(caches, conv_dim=fields.count("hidden_size"), conv_kernel=fields.count("conv_L_cache"))


def _mamba(fields: Fields) -> ModelCaches:
    # Falcon-Mamba names an expand that is not intermediate_size / hidden_size; the latter is what its layers use.
    d_inner = fields.optional_count("intermediate_size") or fields.count("expand") * fields.count("hidden_size")
    return replace(
        _caches(fields, _uniform_kinds("linear_attention", fields)),
        conv_dim=d_inner,
        conv_kernel=fields.count("conv_kernel"),
        ssm_shape=(d_inner, fields.count("state_size")),
    )


def _mamba2(fields: Fields) -> ModelCaches:
    return _with_mamba2(
        _caches(fields, _uniform_kinds("linear_attention", fields)),
        fields,
        d_inner=fields.count("expand") * fields.count("hidden_size"),
        heads=fields.count("num_heads"),
        groups=fields.count("n_groups"),
        d_state=fields.count("state_size"),
        kernel=fields.count("conv_kernel"),
    )


_multi_head = partial(_plain, multi_head=True)
_qwen3_5 = partial(_gated_delta_net, engine_ssm_dtype="float32")

READERS: dict[str, Callable[[Fields], ModelCaches]] = {
    "jamba": _jamba,
    "zamba2": _zamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "apertus": _multi_head,
    "arcee": _multi_head,
    "cohere": _multi_head,
    "cohere2": _multi_head,
    "ernie4_5": partial(_plain, head_dim=128),
    "exaone4": _plain,
    "gemma": partial(_plain, head_dim=256),
    "gemma2": partial(_plain, head_dim=256),
    "gemma3_text": partial(_plain, head_dim=256, heads=8, kv_heads=4),
    "glm": partial(_plain, head_dim=128),
    "glm4": partial(_plain, head_dim=128),
    "gpt_neox": _multi_head,
    "gpt_oss": partial(_plain, head_dim=64),
    "granite": _multi_head,
    "granitemoe": _multi_head,
    "llama": _multi_head,
    "mistral": _plain,
    "mixtral": _plain,
    "nemotron": _plain,
    "olmo": _multi_head,
    "olmo2": _multi_head,
    "olmo3": _multi_head,
    "olmoe": _multi_head,
    "phi": _multi_head,
    "phi3": _multi_head,
    "phimoe": _plain,
    "qwen2": _plain,
    "qwen2_moe": _plain,
    "qwen3": partial(_plain, head_dim=128),
    "qwen3_moe": _plain,
    "seed_oss": partial(_plain, head_dim=128),
    "smollm3": _plain,
    "stablelm": _plain,
    "starcoder2": _plain,
}
