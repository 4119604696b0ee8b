"""How long one step of an engine takes: a model, not a measurement. FORMULA is all of it.

Weights and operations are divided evenly among the ranks of tensor parallelism, caches as the geometry shards them;
communication is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from avmp.errors import ArenaTooSmall, InvalidArgument
from avmp.geometry import Geometry, dtype_bytes, require_count
from avmp.serving.devices import ASSUMED, Device, ModelCosts
from avmp.units import format_bytes

FORMULA = """\
    seconds    = overhead + max(bytes / (bandwidth * share), operations / (flops * share)) + moves + swaps
    bytes      = weights read + KV of every context read and of every new token written + states read and written
    operations = 2 * active parameters * tokens + 4 * query width * attention layers * (token, key) pairs
                 + 6 * state elements * tokens
    weights    = read once a step; where only part of them is active for a token (mixture of experts), the part that T
                 tokens touch is 1 - (1 - active / all) ** T of all: each token's experts are drawn independently
    moves      = 2 * bytes moved / (bandwidth * share);  swaps = bytes / bandwidth to the host"""

TIME_SHARES = ("weights", "KV", "states", "operations", "overhead")
"""What the time of a step goes to, moves and swaps aside: what is read, or else the operations, whichever is longer."""


@dataclass(frozen=True)
class Assumptions:
    """Constants of the model; ``devices.ASSUMED`` has their defaults, with what they rest on. Shares are of the data
    sheet's figures. ``overhead_seconds`` is a step's launches, sampling and scheduling; ``cache_share`` of the memory
    goes to weights, activations and caches, of which ``activation_bytes`` to the second.
    """

    bandwidth_share: float = ASSUMED["bandwidth_share"].value
    flops_share: float = ASSUMED["flops_share"].value
    overhead_seconds: float = ASSUMED["overhead_seconds"].value
    cache_share: float = ASSUMED["cache_share"].value
    activation_bytes: int = int(ASSUMED["activation_bytes"].value)

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "flops_share", "cache_share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected more than 0 and at most 1")
        if self.overhead_seconds < 0 or self.activation_bytes < 0:
            raise InvalidArgument("overhead_seconds and activation_bytes: expected 0 or more")


@dataclass(frozen=True)
class StepModel:
    """Step times of one model on ``tp_size`` devices; ``geometry`` is that of the whole model."""

    geometry: Geometry
    costs: ModelCosts
    device: Device
    tp_size: int = 1
    assumptions: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        require_count("tp_size", self.tp_size)

    @cached_property
    def rank_geometry(self) -> Geometry:
        """What one device keeps. Raises Unsupported where devices would differ."""
        return self.geometry.shard(self.tp_size, 0)

    @cached_property
    def _constants(self) -> tuple[float, float, float, float, float, float, float, float]:
        """What does not change from step to step: per device, and for the arithmetic of one token."""
        assumptions, device, rank = self.assumptions, self.device, self.rank_geometry
        per_token = 2 * self.costs.active_parameters + ASSUMED["update_operations"].value * self.state_elements
        return (
            self.costs.weights_bytes / self.tp_size,
            1 - self.costs.active_parameters / self.costs.parameters,
            rank.kv_bytes_per_token,
            2 * rank.state_bytes_per_sequence,
            per_token / self.tp_size,
            4 * self.costs.query_width * len(self.geometry.attention_layers) / self.tp_size,
            device.bytes_per_second * assumptions.bandwidth_share,
            device.flops_per_second * assumptions.flops_share,
        )

    @cached_property
    def state_elements(self) -> int:
        """Elements of all recurrent states of one sequence."""
        parts = [part for layer in self.geometry.state_layers for part in layer.parts if part.name != "conv"]
        return sum(part.nbytes // dtype_bytes(part.dtype) for part in parts)

    def arena_bytes(self) -> int:
        """What one device has for caches beside its share of the weights. Raises ArenaTooSmall where there is none."""
        assumptions, device = self.assumptions, self.device
        left = device.memory_bytes * assumptions.cache_share - self.costs.weights_bytes / self.tp_size
        arena = int(left) - assumptions.activation_bytes
        if arena <= 0:
            raise ArenaTooSmall(
                f"{self.geometry.name} on {self.tp_size} x {device.name}: weights of "
                f"{format_bytes(int(self.costs.weights_bytes / self.tp_size))} a device leave nothing for caches in "
                f"{format_bytes(int(device.memory_bytes * assumptions.cache_share))}; use more or larger devices"
            )
        return arena

    def require_room(self, cache_bytes: int) -> None:
        """InvalidArgument where one device's memory does not hold its share of the weights and so much for caches."""
        weights = int(self.costs.weights_bytes / self.tp_size)
        if weights + cache_bytes > self.device.memory_bytes:
            raise InvalidArgument(
                f"{self.geometry.name} on {self.tp_size} x {self.device.name}: weights of {format_bytes(weights)} and "
                f"{format_bytes(cache_bytes)} for caches a device are more than its "
                f"{format_bytes(self.device.memory_bytes)}; use less for caches, or more or larger devices"
            )

    def weights_read(self, tokens: int) -> float:
        """Bytes of weights that each device reads in a step of so many tokens."""
        weights, untouched = self._constants[:2]
        return weights * (1 - untouched**tokens if untouched else 1)

    def seconds(self, tokens: int, sequences: int, context_tokens: int, pairs: int) -> float:
        """One step of ``tokens`` tokens of ``sequences`` sequences with ``context_tokens`` tokens of KV in all after
        it; ``pairs`` sums over the tokens how many keys each sees."""
        _, _, kv_bytes, state_bytes, per_token, per_pair, bandwidth, flops = self._constants
        read = self.weights_read(tokens) + kv_bytes * (context_tokens + tokens) + state_bytes * sequences
        arithmetic = per_token * tokens + per_pair * pairs
        return self.assumptions.overhead_seconds + max(read / bandwidth, arithmetic / flops)

    def split_seconds(self, work: NDArray[np.int64]) -> dict[str, float]:
        """What the time of all steps went to, by TIME_SHARES; ``work`` has what ``seconds`` takes, a row a step."""
        all_weights, untouched, kv_bytes, state_bytes, per_token, per_pair, bandwidth, flops = self._constants
        tokens, sequences, context, pairs = work.T.astype(np.float64)
        weights = all_weights * (1 - untouched**tokens if untouched else np.ones(len(work)))
        read = np.array([weights, kv_bytes * (context + tokens), state_bytes * sequences]) / bandwidth
        arithmetic = (per_token * tokens + per_pair * pairs) / flops
        reads_longer = read.sum(axis=0) >= arithmetic
        parts = [*(read * reads_longer).sum(axis=1).tolist(), float((arithmetic * ~reads_longer).sum())]
        overhead = self.assumptions.overhead_seconds * len(work)
        return dict(zip(TIME_SHARES, [*parts, overhead], strict=True))

    def move_seconds(self, moved_bytes: int) -> float:
        """A migration of so many bytes on one device: each is read and written."""
        return 2 * moved_bytes / (self.device.bytes_per_second * self.assumptions.bandwidth_share)

    def swap_seconds(self, swapped_bytes: int) -> float:
        """So many bytes of one device to the host, or back."""
        return swapped_bytes / self.device.host_bytes_per_second

    def describe(self) -> str:
        """The terms, for a person."""
        a = self.assumptions
        return (
            f"{self.tp_size} x {self.device.name} ({self.device.source}): "
            f"{self.device.bytes_per_second / 1e9:,.0f} GB/s x {a.bandwidth_share}, "
            f"{self.device.flops_per_second / 1e12:,.0f} TFLOPS x {a.flops_share}, "
            f"{1e3 * a.overhead_seconds:g} ms a step; {self.costs.parameters / 1e9:g} B parameters, "
            f"{self.costs.active_parameters / 1e9:g} B active, {self.costs.weight_bytes} bytes each "
            f"({self.costs.source})"
        )
