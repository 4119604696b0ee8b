"""What a step's time is computed from: devices, and what of a model is not its cache.

Figures of devices are those of their data sheets: memory in decimal bytes as advertised, dense bfloat16 operations
without sparsity. None of them was compared with its source here: they are taken as widely known, and marked as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from avmp.config_fields import field, load_config
from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import Geometry, require_count
from avmp.units import parse_bytes

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True)
class Device:
    """One accelerator: bytes of memory, bytes per second from it, dense bf16 operations per second, and bytes per
    second to the host and back."""

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    host_bytes_per_second: float
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bytes_per_second", "flops_per_second", "host_bytes_per_second"):
            if not 1 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"device {self.name!r}: {name}={getattr(self, name)!r}, expected at least 1")


UNVERIFIED = "unverified: "
"""What a source begins with whose figures were not compared with it."""


@dataclass(frozen=True)
class Assumed:
    """A constant that no data sheet has, and what it rests on."""

    value: float
    source: str


_KERNELS = UNVERIFIED + "what good kernels are known to reach"
_LANES = UNVERIFIED + "sixteen lanes, four fifths of the raw rate, as copies from pinned memory are known to reach"
ASSUMED = {
    "bandwidth_share": Assumed(0.8, _KERNELS),
    "flops_share": Assumed(0.6, _KERNELS),
    "overhead_seconds": Assumed(0.003, UNVERIFIED + "launches, sampling and scheduling of an engine in Python"),
    "cache_share": Assumed(0.9, UNVERIFIED + "vLLM's default of gpu_memory_utilization"),
    "activation_bytes": Assumed(1 << 30, UNVERIFIED + "a round figure for a step of 8,192 tokens"),
    # Per element of a recurrent state and token: decay, input, sum, output, two operations each but for the decay's.
    "update_operations": Assumed(6, UNVERIFIED + "counted from the recurrence of Mamba2"),
    "pcie4_bytes_per_second": Assumed(25.0 * GB, _LANES),
    "pcie5_bytes_per_second": Assumed(50.0 * GB, _LANES),
}
_PCIE4, _PCIE5 = (ASSUMED[f"pcie{generation}_bytes_per_second"].value for generation in (4, 5))

DEVICES = {
    device.name: device
    for device in (
        # Name, memory, bandwidth, dense bf16 operations, to the host and back, source.
        # 28 multiprocessors at 1.777 GHz: 512 bf16 operations a clock each, half of what fp16 sums would allow.
        Device("rtx-3060-12gb", 12 * GB, 360.0 * GB, 25.5 * TFLOPS, _PCIE4, UNVERIFIED + "GeForce specifications"),
        Device("l4", 24 * GB, 300.0 * GB, 121.0 * TFLOPS, _PCIE4, UNVERIFIED + "NVIDIA L4 data sheet"),
        Device("a100-80gb", 80 * GB, 2039.0 * GB, 312.0 * TFLOPS, _PCIE4, UNVERIFIED + "NVIDIA A100 data sheet (SXM)"),
        Device("h100", 80 * GB, 3.35 * TB, 989.0 * TFLOPS, _PCIE5, UNVERIFIED + "NVIDIA H100 data sheet (SXM)"),
        Device("h200", 141 * GB, 4.8 * TB, 989.0 * TFLOPS, _PCIE5, UNVERIFIED + "NVIDIA H200 data sheet (SXM)"),
        Device("mi300x", 192 * GB, 5.3 * TB, 1307.0 * TFLOPS, _PCIE5, UNVERIFIED + "AMD Instinct MI300X data sheet"),
    )
}


def find_device(name: str) -> Device:
    """The device of that name. Raises InvalidArgument."""
    if name not in DEVICES:
        raise InvalidArgument(f"unknown device {name!r}; known: {', '.join(DEVICES)}; or give its figures")
    return DEVICES[name]


def custom_device(memory: str | int, gigabytes_per_second: float, teraflops: float) -> Device:
    """A device by its figures."""
    return Device(
        "custom", parse_bytes(memory), gigabytes_per_second * GB, teraflops * TFLOPS, _PCIE4, "given by the user"
    )


_MOST_PARAMETERS, _MOST_WEIGHT_BYTES = 1e18, 8
"""More is taken for a mistake."""


@dataclass(frozen=True)
class ModelCosts:
    """What a step of a model costs beside its caches. ``parameters`` are all, ``active_parameters`` those that one
    token goes through; ``query_width`` is query heads times head_dim of an attention layer. Raises InvalidArgument."""

    parameters: float
    active_parameters: float
    query_width: int
    weight_bytes: int
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.active_parameters <= self.parameters < _MOST_PARAMETERS:
            raise InvalidArgument(
                f"parameters={self.parameters!r}, active_parameters={self.active_parameters!r}: expected "
                f"0 < active <= all < {_MOST_PARAMETERS:g}"
            )
        if require_count("weight_bytes", self.weight_bytes) > _MOST_WEIGHT_BYTES:
            raise InvalidArgument(f"weight_bytes={self.weight_bytes!r}: expected 1 to {_MOST_WEIGHT_BYTES} a parameter")

    @property
    def weights_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.weight_bytes


BILLION = 1e9
_CARD = UNVERIFIED + "parameters as on the model card; query heads as in public copies of the configuration"
MODEL_COSTS = {
    "jamba-v0.1": ModelCosts(52 * BILLION, 12 * BILLION, 4096, 2, _CARD),
    "zamba2-2.7b": ModelCosts(2.7 * BILLION, 2.7 * BILLION, 5120, 2, _CARD + "; its shared blocks run more than once"),
    "nemotron-h-8b": ModelCosts(8.1 * BILLION, 8.1 * BILLION, 4096, 2, _CARD),
    "falcon-h1-1.5b": ModelCosts(1.55 * BILLION, 1.55 * BILLION, 1024, 2, _CARD),
    "qwen3-next-80b-a3b": ModelCosts(80 * BILLION, 3 * BILLION, 4096, 2, _CARD),
    "granite-4.0-h-small": ModelCosts(32 * BILLION, 9 * BILLION, 4096, 2, _CARD),
}


def model_costs(geometry: Geometry) -> ModelCosts:
    """The costs of a named model. Raises Unsupported for others: give their parameters."""
    if geometry.name not in MODEL_COSTS:
        raise Unsupported(
            f"model {geometry.name!r}: its parameters are not known here; give --parameters, --active-parameters where "
            f"they are fewer, and --query-heads, or use one of {', '.join(MODEL_COSTS)}"
        )
    return MODEL_COSTS[geometry.name]


def given_costs(
    geometry: Geometry, billions: float, active_billions: float | None, query_heads: int | None, weight_bytes: int = 2
) -> ModelCosts:
    """Costs from figures that the user gives. Raises InvalidArgument for those that make no sense."""
    active = billions if active_billions is None else active_billions
    if not 0 < active <= billions < _MOST_PARAMETERS / BILLION:
        raise InvalidArgument(
            f"parameters of {billions!r} billion, {active!r} billion active: expected 0 < active <= all < "
            f"{_MOST_PARAMETERS / BILLION:g}"
        )
    if geometry.has_attention and query_heads is None:
        raise InvalidArgument(f"model {geometry.name!r}: its number of query heads is not known; give --query-heads")
    heads = 0 if query_heads is None else require_count("query_heads", query_heads)
    width = heads * geometry.attention_layers[0].key_dim if geometry.has_attention else 0
    return ModelCosts(billions * BILLION, active * BILLION, width, weight_bytes, "given by the user")


def query_heads_of(config: str) -> int | None:
    """Query heads in a model's config.json; None where it does not say."""
    loaded = load_config(config)
    nested = field(loaded, "text_config")
    heads = field(loaded if nested is None else nested, "num_attention_heads")
    return heads if isinstance(heads, int) and not isinstance(heads, bool) else None
