"""What one model keeps per sequence: layers, heads, dimensions and dtypes, turned into bytes.

Everything here is raw, that is what the data needs. Rounding to whole units belongs to :mod:`avmp.layout`.

    kv_bytes_per_token      = sum over attention layers of kv_heads * (key_dim + value_dim) * dtype_bytes
    kv_bytes_per_page       = page_tokens * kv_bytes_per_token
    state_bytes_per_sequence = sum over state layers and their parts of product(shape) * dtype_bytes
    sequence_bytes(tokens)  = ceil(tokens / page_tokens) * kv_bytes_per_page + state_bytes_per_sequence
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from avmp.config_fields import dtype_name
from avmp.errors import InvalidArgument, Unsupported
from avmp.model_configs import ModelCaches, read_model_caches
from avmp.units import ceil_div, format_bytes

_DTYPES = {
    8: "float64 int64",
    4: "float32 int32",
    2: "bfloat16 float16 int16",
    1: "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int8 uint8",
}
DTYPE_BYTES = {name: size for size, names in _DTYPES.items() for name in names.split()}

CONVENTIONS = ("transformers", "vllm")


def dtype_bytes(name: str) -> int:
    """Bytes of one element of the dtype called ``name`` ("bfloat16"); InvalidArgument for a name not in the table."""
    if name not in DTYPE_BYTES:
        raise InvalidArgument(f"dtype {name!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def require_count(name: str, value: object, minimum: int = 1) -> int:
    """``value`` if it is an integer of at least ``minimum``; otherwise InvalidArgument naming ``name``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgument(f"{name}={value!r}: expected an integer of at least {minimum}")
    return value


@dataclass(frozen=True)
class StatePart:
    """One tensor of one state layer of one sequence: ``shape`` (without the slot axis) and ``dtype`` by name.

    A convolution window is ``conv``, shape ``(conv_dim, columns)``; a recurrent state is ``ssm``, shape
    ``(heads, head_dim, d_state)`` or ``(d_inner, d_state)``. Under tensor parallelism the first axis is divided.
    Of it, ``groups * group_rows`` rows belong to groups (B and C of Mamba-2, keys and queries of a gated delta
    net), which are divided too, or replicated where there are more ranks than groups.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    groups: int = 0
    group_rows: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape:
            raise InvalidArgument(f"state part {self.name!r}: expected at least one dimension")
        for extent in self.shape:
            require_count(f"state part {self.name!r}: dimension", extent)
        dtype_bytes(self.dtype)
        grouped_rows = require_count("groups", self.groups, 0) * require_count("group_rows", self.group_rows, 0)
        if grouped_rows > self.shape[0]:
            raise InvalidArgument(f"state part {self.name!r}: {grouped_rows} rows in groups, of {self.shape[0]}")

    @property
    def nbytes(self) -> int:
        """product(shape) * dtype_bytes."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    def shard(self, tp_size: int) -> StatePart:
        """The part that each of ``tp_size`` ranks holds; Unsupported where ranks would differ."""
        grouped_rows = self.groups * self.group_rows
        groups = _share(f"groups of state part {self.name!r}", self.groups, tp_size, replicable=True)
        other_rows = _share(f"first axis of state part {self.name!r}", self.shape[0] - grouped_rows, tp_size)
        rows = other_rows + groups * self.group_rows
        return replace(self, shape=(rows, *self.shape[1:]), groups=groups)


@dataclass(frozen=True)
class AttentionLayer:
    """KV of one attention layer: ``kv_heads`` heads of ``key_dim`` and ``value_dim`` elements per token.

    ``layer`` is the model's layer index. ``value_dim=0`` is a K-only cache (latent attention).
    """

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    def __post_init__(self) -> None:
        require_count("layer", self.layer, 0)
        require_count(f"attention layer {self.layer}: kv_heads", self.kv_heads)
        require_count(f"attention layer {self.layer}: key_dim", self.key_dim)
        require_count(f"attention layer {self.layer}: value_dim", self.value_dim, 0)
        dtype_bytes(self.dtype)

    @property
    def key_bytes_per_token(self) -> int:
        """kv_heads * key_dim * dtype_bytes."""
        return self.kv_heads * self.key_dim * dtype_bytes(self.dtype)

    @property
    def value_bytes_per_token(self) -> int:
        """kv_heads * value_dim * dtype_bytes; 0 for a K-only layer."""
        return self.kv_heads * self.value_dim * dtype_bytes(self.dtype)

    def shard(self, tp_size: int) -> AttentionLayer:
        """The layer that each of ``tp_size`` ranks holds; Unsupported where ranks would differ."""
        heads = _share(f"kv_heads of layer {self.layer}", self.kv_heads, tp_size, replicable=True)
        return replace(self, kv_heads=heads)


@dataclass(frozen=True)
class StateLayer:
    """State of one layer of one sequence: its parts in the order (conv, ssm, ...); conv alone is allowed.

    ``layer`` is the model's layer index.
    """

    layer: int
    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        require_count("layer", self.layer, 0)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise InvalidArgument(f"state layer {self.layer}: expected parts of different names, got {names}")

    @property
    def nbytes(self) -> int:
        """Sum of the parts' bytes."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Geometry:
    """The cache of one model (or of one tensor-parallel rank of it).

    A layer index may appear once among the attention layers and once among the state layers: a hybrid layer has
    both. ``conv_columns`` replaces the column count (last dimension) of every part named ``conv``: k draft tokens
    widen the window to ``d_conv - 1 + k`` columns. ``max_position_embeddings`` is the longest sequence the model
    is made for, None if unknown. Raises InvalidArgument for anything that cannot be a cache.
    """

    attention_layers: tuple[AttentionLayer, ...]
    state_layers: tuple[StateLayer, ...]
    page_tokens: int = 16
    max_position_embeddings: int | None = None
    name: str = "custom"
    conv_columns: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention_layers", tuple(self.attention_layers))
        object.__setattr__(self, "state_layers", tuple(self.state_layers))
        require_count("page_tokens", self.page_tokens)
        if self.max_position_embeddings is not None:
            require_count("max_position_embeddings", self.max_position_embeddings)
        if not self.attention_layers and not self.state_layers:
            raise InvalidArgument(f"geometry {self.name!r}: expected at least one attention or state layer, got none")
        _require_unique(f"geometry {self.name!r}: attention", (layer.layer for layer in self.attention_layers))
        _require_unique(f"geometry {self.name!r}: state", (layer.layer for layer in self.state_layers))
        if self.conv_columns is not None:
            object.__setattr__(self, "state_layers", _with_conv_columns(self.state_layers, self.conv_columns))

    @classmethod
    def from_config(
        cls,
        config: object,
        page_tokens: int = 16,
        convention: str = "transformers",
        dtype: object = None,
        ssm_dtype: object = None,
        conv_columns: int | None = None,
        name: str | None = None,
    ) -> Geometry:
        """The cache of a model given by its transformers configuration; transformers itself is not needed.

        ``config`` is a configuration object, a dict, or the path of a config.json (str or PathLike); a nested
        ``text_config`` is followed. ``dtype`` (KV and convolution windows) defaults to the configuration's
        ``dtype`` or ``torch_dtype``, else bfloat16. With K the convolution width:

        - ``convention="transformers"``: K columns, ssm state in float32;
        - ``convention="vllm"``: K - 1 columns, ssm state in the dtype the configuration asks for
          (``mamba_ssm_cache_dtype``, ``mamba_ssm_dtype``), else float32 for Nemotron-H and Qwen3.5, else ``dtype``.

        ``ssm_dtype`` and ``conv_columns`` override both. Raises Unsupported for a model type not known (the message
        lists those that are) and InvalidArgument for a file or a field that is missing or makes no sense.
        """
        if convention not in CONVENTIONS:
            raise InvalidArgument(f"convention {convention!r}: expected one of {', '.join(CONVENTIONS)}")
        caches = read_model_caches(config)
        kv_dtype = dtype_name(dtype) or caches.dtype or "bfloat16"
        if convention == "transformers":
            columns, state_dtype = caches.conv_kernel, "float32"
        else:
            columns, state_dtype = caches.conv_kernel - 1, caches.engine_ssm_dtype or kv_dtype
        attention = tuple(
            AttentionLayer(layer, caches.kv_heads, caches.key_dim, caches.value_dim, kv_dtype)
            for layer in caches.attention_layers
        )
        state = _state_layers(caches, conv_columns or columns, kv_dtype, dtype_name(ssm_dtype) or state_dtype)
        return cls(
            attention_layers=attention,
            state_layers=state,
            page_tokens=page_tokens,
            max_position_embeddings=caches.max_position_embeddings,
            name=name or caches.model_type,
            conv_columns=conv_columns,
        )

    @property
    def has_attention(self) -> bool:
        """Whether a sequence owns KV pages."""
        return bool(self.attention_layers)

    @property
    def has_state(self) -> bool:
        """Whether a sequence owns a state slot."""
        return bool(self.state_layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token in all attention layers."""
        return sum(layer.key_bytes_per_token + layer.value_bytes_per_token for layer in self.attention_layers)

    @property
    def kv_bytes_per_page(self) -> int:
        """KV bytes of ``page_tokens`` tokens in all attention layers."""
        return self.page_tokens * self.kv_bytes_per_token

    @property
    def state_bytes_per_sequence(self) -> int:
        """State bytes of one sequence in all state layers; they do not depend on its length."""
        return sum(layer.nbytes for layer in self.state_layers)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that one sequence of ``tokens`` tokens needs: whole pages and its state."""
        pages = ceil_div(require_count("tokens", tokens, 0), self.page_tokens)
        return pages * self.kv_bytes_per_page + self.state_bytes_per_sequence

    def shard(self, tp_size: int, rank: int) -> Geometry:
        """What rank ``rank`` of ``tp_size`` tensor-parallel ranks keeps; the same on every rank.

        KV heads are divided, or replicated (one head each) where ``tp_size`` is a multiple of their number. The
        first axis of every state part is divided, its groups as :class:`StatePart` says. Raises Unsupported where
        a count does not divide evenly, since ranks would then differ in page or slot bytes.
        """
        require_count("tp_size", tp_size)
        if require_count("rank", rank, 0) >= tp_size:
            raise InvalidArgument(f"rank={rank}: expected less than tp_size={tp_size}")
        attention = tuple(layer.shard(tp_size) for layer in self.attention_layers)
        state = tuple(
            StateLayer(layer.layer, tuple(part.shard(tp_size) for part in layer.parts)) for layer in self.state_layers
        )
        return replace(self, attention_layers=attention, state_layers=state)

    def describe(self) -> str:
        """One line for a person: layers, bytes per token, bytes per state."""
        return (
            f"{self.name}: {len(self.attention_layers)} attention and {len(self.state_layers)} state layers, "
            f"KV {self.kv_bytes_per_token:,} B per token, pages of {self.page_tokens} tokens "
            f"({format_bytes(self.kv_bytes_per_page)}), state {format_bytes(self.state_bytes_per_sequence)} a sequence"
        )


def _state_layers(caches: ModelCaches, columns: int, conv_dtype: str, ssm_dtype: str) -> tuple[StateLayer, ...]:
    if not caches.state_layers:
        return ()
    conv = StatePart("conv", (caches.conv_dim, columns), conv_dtype, caches.conv_groups, caches.conv_group_rows)
    ssm = (StatePart("ssm", caches.ssm_shape, ssm_dtype),) if caches.ssm_shape else ()
    return tuple(StateLayer(layer, (conv, *ssm)) for layer in caches.state_layers)


def _with_conv_columns(layers: tuple[StateLayer, ...], columns: int) -> tuple[StateLayer, ...]:
    require_count("conv_columns", columns)
    if not any(part.name == "conv" for layer in layers for part in layer.parts):
        raise InvalidArgument(f"conv_columns={columns}: no state layer has a part named 'conv'")
    return tuple(
        StateLayer(
            layer.layer,
            tuple(
                replace(part, shape=(*part.shape[:-1], columns)) if part.name == "conv" else part
                for part in layer.parts
            ),
        )
        for layer in layers
    )


def _share(what: str, count: int, tp_size: int, replicable: bool = False) -> int:
    """Each rank's part of ``count``: evenly divided, or 1 where fewer than ranks can be replicated evenly."""
    if count % tp_size == 0:
        return count // tp_size
    if replicable and tp_size % count == 0:
        return 1
    raise Unsupported(
        f"{what}: {count} cannot be divided evenly among tp_size={tp_size} ranks, so that ranks would differ in bytes; "
        "use a tp_size that divides it"
    )


def _require_unique(what: str, layers: Iterable[int]) -> None:
    seen: set[int] = set()
    for layer in layers:
        if layer in seen:
            raise InvalidArgument(f"{what} layer {layer} appears twice: expected each layer index once")
        seen.add(layer)
