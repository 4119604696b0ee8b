"""Every effect on an arena by Triton kernels: one launch each, on the current stream of the arena's device."""

from __future__ import annotations

import torch

from avmp.kernels import units
from avmp.kernels.launch import require_runnable
from avmp.kernels.reference import TorchBackend
from avmp.kernels.tables import apply_table_changes


class TritonBackend(TorchBackend):
    """The methods of ``TorchBackend``, to the same bytes; see there. Raises InvalidArgument for a device that Triton
    does not run on."""

    name = "triton"
    operations = units

    def __init__(self, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> None:
        require_runnable(lanes)
        super().__init__(lanes, unit_bytes)

    def apply_table_changes(self, tables: torch.Tensor, changes: torch.Tensor) -> None:
        """See ``TorchBackend``."""
        apply_table_changes(tables, changes)
