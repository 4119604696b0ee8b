"""What rules that count by layer need to know of a model."""

from __future__ import annotations

from avmp.baselines.protocol import PolicySetup
from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import Geometry


def geometry_of(setup: PolicySetup, policy: str) -> Geometry:
    """The model's layers. Raises InvalidArgument for a layout that was given by unit sizes."""
    geometry = setup.layout.geometry
    if geometry is None:
        raise InvalidArgument(f"policy {policy}: needs the model's layers; this layout was given by unit sizes only")
    return geometry


def layer_bytes(geometry: Geometry, policy: str) -> tuple[int, int]:
    """KV bytes of one token and state bytes of one sequence, both in one layer; 0 for a kind that the model lacks.

    Raises Unsupported where layers of one kind differ in bytes.
    """
    per_token = {layer.key_bytes_per_token + layer.value_bytes_per_token for layer in geometry.attention_layers}
    per_state = {layer.nbytes for layer in geometry.state_layers}
    if len(per_token) > 1 or len(per_state) > 1:
        raise Unsupported(
            f"policy {policy}: layers of {geometry.name} differ in bytes (KV per token {sorted(per_token)}, "
            f"state {sorted(per_state)}); name the other policies instead"
        )
    return sum(per_token), sum(per_state)
