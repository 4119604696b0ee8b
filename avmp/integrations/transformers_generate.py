"""How long ``generate`` may make the rows of a cache, known before it computes anything."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch


class Request(NamedTuple):
    """``rows`` rows that may come to have ``tokens`` tokens each, padding included; ``mask`` ``[rows, prompt]`` is 0
    where there is padding in the prompts, None if there is none; ``attentions``: whether it wants the weights of its
    attention."""

    rows: int
    tokens: int
    mask: torch.Tensor | None
    attentions: bool


def announced(frame: FrameType | None = None) -> Request | None:
    """What ``generate`` is about to do, if the caller's caller is its preparation of the cache.

    ``generate`` tells a cache that it will be used, and keeps to itself for how long: the length is only to be found
    among the local variables of that call. They are read, not changed; None where they are not there.
    """
    frame = frame or sys._getframe(2)
    if frame.f_code.co_name != "_prepare_cache_for_generation" or frame.f_back is None:
        return None
    here, caller = frame.f_locals, frame.f_back.f_locals
    config, arguments = here.get("generation_config"), here.get("model_kwargs", {})
    batch_size, tokens = here.get("batch_size"), here.get("max_cache_length")
    if config is None or not isinstance(batch_size, int) or not isinstance(tokens, int):
        return None
    mask, given = arguments.get("attention_mask"), caller.get("inputs_tensor")
    # Behind an old cache only the new tokens may be given; the mask is always that of the whole.
    whole = mask.shape[1] if mask is not None else getattr(config, "_mask_length", None)
    if isinstance(given, torch.Tensor) and isinstance(whole, int):
        tokens += max(whole - given.shape[1], 0)
    rows = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
    return Request(rows, tokens, mask, bool(config.output_attentions))
