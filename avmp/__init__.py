"""avmp: one arena for the KV pages and the state slots of hybrid models, with capacity that migrates between them.

Importing this package loads nothing else: each public name is fetched from its module on first use, so that planning
and replay never pay for torch, and work where it is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from avmp.allocator import Allocator
    from avmp.bounds import use_bounds_checks
    from avmp.cache_pool import CachePool
    from avmp.device_batch import Batch
    from avmp.errors import (
        ArenaTooSmall,
        AvmpError,
        Inconsistent,
        InvalidArgument,
        OutOfMemory,
        RowsExhausted,
        RowTooLong,
        StaleHandle,
        Unsupported,
    )
    from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
    from avmp.growth import Prefix
    from avmp.layout import Layout
    from avmp.named_models import named_model
    from avmp.ops import (
        apply_table_changes,
        causal_conv1d_update,
        copy_units,
        gather_kv,
        migrate,
        paged_attention,
        poison_units,
        selective_state_update,
        swap_in,
        swap_out,
        use_backend,
        write_kv,
        zero_units,
    )
    from avmp.options import Options

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "ArenaTooSmall",
    "AttentionLayer",
    "AvmpError",
    "Batch",
    "CachePool",
    "Geometry",
    "Inconsistent",
    "InvalidArgument",
    "Layout",
    "Options",
    "OutOfMemory",
    "Prefix",
    "RowTooLong",
    "RowsExhausted",
    "StaleHandle",
    "StateLayer",
    "StatePart",
    "Unsupported",
    "__version__",
    "apply_table_changes",
    "causal_conv1d_update",
    "copy_units",
    "gather_kv",
    "migrate",
    "named_model",
    "paged_attention",
    "poison_units",
    "selective_state_update",
    "swap_in",
    "swap_out",
    "use_backend",
    "use_bounds_checks",
    "write_kv",
    "zero_units",
]

_NAMES_BY_MODULE = {
    "avmp.allocator": ("Allocator",),
    "avmp.bounds": ("use_bounds_checks",),
    "avmp.cache_pool": ("CachePool",),
    "avmp.device_batch": ("Batch",),
    "avmp.errors": (
        "ArenaTooSmall",
        "AvmpError",
        "Inconsistent",
        "InvalidArgument",
        "OutOfMemory",
        "RowTooLong",
        "RowsExhausted",
        "StaleHandle",
        "Unsupported",
    ),
    "avmp.geometry": ("AttentionLayer", "Geometry", "StateLayer", "StatePart"),
    "avmp.growth": ("Prefix",),
    "avmp.layout": ("Layout",),
    "avmp.named_models": ("named_model",),
    "avmp.ops": (
        "apply_table_changes",
        "causal_conv1d_update",
        "copy_units",
        "gather_kv",
        "migrate",
        "paged_attention",
        "poison_units",
        "selective_state_update",
        "swap_in",
        "swap_out",
        "use_backend",
        "write_kv",
        "zero_units",
    ),
    "avmp.options": ("Options",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


if not TYPE_CHECKING:  # type checkers see the imports above; with this function, they would let any name through

    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
