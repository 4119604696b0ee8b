"""causal-conv1d's ``causal_conv1d_update``."""

from __future__ import annotations

import torch

from avmp import ops
from avmp.compat.arguments import refuse, require, unit_stride


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution of ``x`` ``[rows, dim]`` or ``[rows, dim, tokens]`` with the last columns of the states
    ``[slots, dim, state_len]`` before it, which move on by as many columns in place. Returns a new tensor like x.

    ``conv_state_indices`` int32 ``[rows]`` says whose state is whose; below 0, the state stays as it is and the output
    is 0, while slot 0 is ordinary. Raises Unsupported for cache_seqlens (circular states).
    """
    name = "causal_conv1d_update"
    refuse(name, "let the state shift: leave it out", cache_seqlens=cache_seqlens)
    require(x.dim() in (2, 3), name, f"x must be [rows, dim] or [rows, dim, tokens], is {tuple(x.shape)}")
    tokens = 1 if x.dim() == 2 else x.shape[2]
    result = ops.causal_conv1d_update(
        unit_stride(x if x.dim() == 2 else x.transpose(1, 2).reshape(-1, x.shape[1])),
        conv_state,
        weight,
        bias,
        activation=activation,
        state_indices=conv_state_indices,
        first_valid_id=0,
        max_query_len=tokens,
    )
    return result if x.dim() == 2 else result.view(len(x), tokens, x.shape[1]).transpose(1, 2)
