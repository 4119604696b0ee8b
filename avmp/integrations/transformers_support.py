"""Which models work with the arena, and how much one sequence of a model keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from avmp.config_fields import dtype_name
from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import Geometry
from avmp.model_configs import READERS

ATTENTION, STATE, BOTH, NEITHER = "attention", "state", "both", "neither"
_KINDS: dict[type, str] = {
    DynamicLayer: ATTENTION,
    LinearAttentionLayer: STATE,
    LinearAttentionAndFullAttentionLayer: BOTH,
}


class Model(NamedTuple):
    """What the cache has to know of a model: the configuration of its decoder; the kind of each layer, with the layer
    that transformers itself would use; what a sequence keeps, and whether recurrent states may come in a wider dtype
    than that; and the device, None where only the configuration is known."""

    config: Any
    layers: list[tuple[str, Any]]
    geometry: Geometry
    casts: bool
    device: torch.device | None

    @property
    def paged(self) -> bool:
        """Whether its attention reads pages in place; users may change that at any time."""
        return bool(self.config._attn_implementation == "avmp")


def read_model(
    model_or_config: Any, dtype: torch.dtype | str | None, ssm_dtype: torch.dtype | str | None, page_tokens: int
) -> Model:
    """Reads a model, or the configuration of one. Raises Unsupported for what does not work, with what does."""
    is_model = isinstance(model_or_config, torch.nn.Module)
    config = model_or_config.config if is_model else model_or_config
    if not hasattr(config, "get_text_config"):
        raise InvalidArgument(f"{type(config).__name__}: expected a transformers model or its configuration")
    if config.is_encoder_decoder:
        raise Unsupported(f"{config.model_type}: encoder-decoder models are not offered; {_what_works()}")
    config = config.get_text_config(decoder=True)
    if config.model_type not in READERS:
        raise Unsupported(f"model type {config.model_type!r} does not work with AvmpCache; {_what_works()}")
    if dtype is None:
        dtype = (model_or_config.dtype if is_model else config.dtype) or torch.get_default_dtype()
    geometry = Geometry.from_config(config, page_tokens, dtype=dtype_name(dtype), ssm_dtype=dtype_name(ssm_dtype))
    device = _device(model_or_config) if is_model else None
    return Model(config, _layers(config, geometry), geometry, ssm_dtype is not None, device)


def _layers(config: Any, geometry: Geometry) -> list[tuple[str, Any]]:
    """The kind of each layer. Raises Unsupported for a kind that is not offered."""
    attention, state = ({layer.layer for layer in part} for part in (geometry.attention_layers, geometry.state_layers))
    layers = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        kind = _KINDS.get(type(layer), NEITHER)
        if index not in attention | state:
            kind = NEITHER  # layers of experts only, for which older versions put a layer of states that stays empty
        elif kind != (BOTH if index in attention & state else ATTENTION if index in attention else STATE):
            raise Unsupported(
                f"{config.model_type}: layer {index} needs a {type(layer).__name__}, which the arena does not offer "
                f"(no sliding or chunked windows, no indexers); {_what_works()}"
            )
        if getattr(layer, "number_of_states", 1) != 1:
            raise Unsupported(f"{config.model_type}: layer {index} keeps several states; {_what_works()}")
        layers.append((kind, layer))
    return layers


def _device(model: Any) -> torch.device:
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise Unsupported(f"a model on devices {devices}: an arena lies on one; load the model onto a single device")
    device: torch.device = model.device
    return device


def _what_works() -> str:
    return (
        f"with transformers 5.20 to 5.24, models of type {', '.join(sorted(READERS))} work, as long as their layers "
        "are full attention, state-space, gated delta or convolution layers"
    )
