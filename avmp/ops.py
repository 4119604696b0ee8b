"""The public operations: what the GPU does, under one flat signature each, on the backend that suits the tensors.

Each operation is implemented twice below ``avmp.kernels``, in plain torch (the specification, and what runs on a CPU)
and in Triton, under the same name and signature; ``avmp.backends`` says who runs.
"""

from __future__ import annotations

from typing import Any

import torch

from avmp.backends import implementation, use_backend

__all__ = ["gather_kv", "paged_attention", "use_backend", "write_kv"]


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, *arguments: Any, backend: str | None = None, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``kernels/attention_reference.py``."""
    result: tuple[torch.Tensor, torch.Tensor | None]
    result = implementation("paged_attention", q, backend)(q, key_cache, *arguments, **keywords)
    return result


def write_kv(key: torch.Tensor, *arguments: Any, backend: str | None = None, **keywords: Any) -> None:
    """See ``kernels/kv_reference.py``."""
    implementation("write_kv", key, backend)(key, *arguments, **keywords)


def gather_kv(
    key_cache: torch.Tensor, *arguments: Any, backend: str | None = None, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``kernels/kv_reference.py``."""
    result: tuple[torch.Tensor, torch.Tensor | None]
    result = implementation("gather_kv", key_cache, backend)(key_cache, *arguments, **keywords)
    return result
