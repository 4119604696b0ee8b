"""Tiny models of every family, with random weights, made from their configurations; prompts; and what they generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers

from avmp.errors import ArenaTooSmall
from avmp.geometry import Geometry
from avmp.layout import Layout

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
IN_PLACE = VERSION >= (5, 24)
VOCABULARY, NEW_TOKENS = 97, 64
LENGTHS = (5, 17, 11, 9)

COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8)
DELTA_NET = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in names}


CONFIGS: dict[str, Callable[[], Any]] = {
    "jamba": lambda: transformers.JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **_without("num_key_value_heads"),
        num_hidden_layers=5,
        layers_block_type=["mamba", "hybrid", "mamba", "mamba", "hybrid"],
        n_mamba_heads=4,
        mamba_d_state=8,
        mamba_ngroups=2,
        chunk_size=8,
        adapter_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": lambda: transformers.BambaConfig(**COMMON, **MAMBA2, num_hidden_layers=4, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: transformers.FalconH1Config(**COMMON, **MAMBA2, num_hidden_layers=3, mamba_d_ssm=64),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **COMMON,
        **MAMBA2,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=4,
        shared_intermediate_size=32,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_without("head_dim"),
        head_dim=8,
        layers_block_type=["mamba", "attention", "moe", "mamba", "mlp", "attention"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        use_mamba_kernels=False,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**COMMON, **DELTA_NET, **EXPERTS),
    "lfm2": lambda: transformers.Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**COMMON, **DELTA_NET),
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_hidden_layers=3),
    "mamba2": lambda: transformers.Mamba2Config(
        **_without("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        expand=2,
        chunk_size=8,
    ),
}
ARRANGED: dict[str, Callable[[], Any]] = {
    "bamba_attention_first": lambda: transformers.BambaConfig(
        **COMMON, **MAMBA2, num_hidden_layers=4, attn_layer_indices=[0, 2]
    ),
    "bamba_attention_last": lambda: transformers.BambaConfig(
        **COMMON, **MAMBA2, num_hidden_layers=4, attn_layer_indices=[2, 3]
    ),
}
"""Families with their layers in another order."""

FULL = dict(layer_types=["full_attention"] * 2)
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": FULL,
    "ernie4_5": {},
    "exaone4": FULL,
    "falcon_mamba": {},
    "gemma": {},
    "gemma2": FULL,
    "gemma3_text": FULL,
    "glm": {},
    "glm4": {},
    "gpt_neox": dict(num_key_value_heads=None),
    "gpt_oss": dict(FULL, num_local_experts=4),
    "granite": {},
    "granitemoe": {},
    "lfm2_moe": dict(
        layer_types=["conv", "full_attention"], num_dense_layers=1, num_experts=4, moe_intermediate_size=16
    ),
    "mamba": {},
    "mistral": dict(sliding_window=None),
    "mixtral": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": FULL,
    "olmoe": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": {},
    "qwen3_5_moe_text": dict(DELTA_NET, **EXPERTS),
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
"""The other model types that a geometry can be read of, and what their configurations need beyond the common fields."""

FAMILIES = tuple(CONFIGS)
WITH_ATTENTION = tuple(name for name in FAMILIES if name != "mamba2")


def _config(family: str) -> Any:
    if family in CONFIGS | ARRANGED:
        return (CONFIGS | ARRANGED)[family]()
    fields = dict(COMMON, num_hidden_layers=2, head_dim=8) | OTHERS[family]
    return transformers.AutoConfig.for_model(family, **fields)


@cache
def _model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in name:  # as large as trained ones, so that tokens differ
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return model.to(dtype)


def tiny_model(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """The model of that family; the same object for the same family and dtype, so say what attention it is to have."""
    model = _model(family, dtype)
    if "mamba" not in model.config.model_type:
        model.set_attn_implementation(attention)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded ``input_ids`` and ``attention_mask``, both ``[rows, longest]``."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def keyword(model: Any) -> str:
    """Under which name this model takes its cache."""
    if IN_PLACE:
        return "cache"
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any = None, **keywords: Any) -> Any:
    """Greedy by default, ``NEW_TOKENS`` tokens, with the logits of every step; sampling begins from one seed."""
    torch.manual_seed(1)
    options: dict[str, Any] = dict(
        max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    if cache is not None:
        options[keyword(model)] = cache
    return model.generate(**inputs, **(options | keywords))


def forward(model: Any, cache: Any, **inputs: Any) -> torch.Tensor:
    """Logits of one forward with this cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, **{keyword(model): cache}).logits
    return logits


@cache
def _reference(family: str, attention: str, dtype: torch.dtype, seed: int, extra: tuple[tuple[str, Any], ...]) -> Any:
    return generate(tiny_model(family, attention, dtype), prompts(seed=seed), **dict(extra))


def reference(
    family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0, **keywords: Any
) -> Any:
    """What transformers generates with its own cache from ``prompts(seed=seed)``; computed once. The model may have
    another attention afterwards: ask for it before making a cache."""
    return _reference(family, attention, dtype, seed, tuple(sorted(keywords.items())))


def largest_difference(one: Any, other: Any) -> float:
    """Over the logits of all steps of two results of ``generate``."""
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


def memory_for(model: Any, rows: int, tokens: int, page_tokens: int) -> int:
    """The least bytes of an arena that holds so many rows of so many tokens, in float32."""
    geometry = Geometry.from_config(model.config, page_tokens, dtype="float32")
    size = 4096
    while True:
        try:
            if Layout.plan(geometry, size).max_sequences(tokens) >= rows:
                return size
        except ArenaTooSmall:
            pass
        size += 256
