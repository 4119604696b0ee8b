"""Which 8-bit float formats a cache may have, and how a kernel sees it."""

from __future__ import annotations

import torch

PLAIN, E4M3, E5M2, NATIVE_E4M3 = 0, 1, 2, 3
"""How a kernel sees a cache: in its own dtype, or as bytes of a format. NATIVE_E4M3: e4m3 that the hardware decodes,
two values an instruction."""
NATIVE_CAPABILITY = (8, 9)
"""From this on NVIDIA's hardware converts e4m3. That of gfx942 is another: of bias 8, without a negative zero."""

FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels get it: bytes for fp8."""
    return cache.view(torch.uint8) if cache.dtype in FORMATS else cache


def decoding(cache: torch.Tensor) -> int:
    """The format by which a kernel that its instructions bind decodes a cache: the hardware's, where it has it."""
    form = FORMATS.get(cache.dtype, PLAIN)
    if form == E4M3 and cache.is_cuda and not torch.version.hip:
        return NATIVE_E4M3 if torch.cuda.get_device_capability(cache.device) >= NATIVE_CAPABILITY else E4M3
    return form
