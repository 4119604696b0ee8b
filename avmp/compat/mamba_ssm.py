"""mamba-ssm's ``selective_state_update``."""

from __future__ import annotations

import torch

from avmp import ops
from avmp.compat.arguments import unit_stride


@torch.no_grad()
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of states ``[slots, [heads,] dim, dstate]`` in place; returns the output ``[rows, [heads,] dim]``.

    ``state_batch_indices`` int32 ``[rows]`` says whose state is whose; below 0, the state stays as it is and the
    output is 0, while slot 0 is ordinary. ``D``, ``z`` and ``dt_bias``, in this order, may each be left out.
    """
    result: torch.Tensor = ops.selective_state_update(
        state,
        unit_stride(x),
        dt,
        A,
        unit_stride(B),
        unit_stride(C),
        D=D,
        z=None if z is None else unit_stride(z),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        state_indices=state_batch_indices,
        first_valid_id=0,
    )
    return result
