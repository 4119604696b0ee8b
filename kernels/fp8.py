"""8-bit floats by integer arithmetic: the same bits on every device, also where the hardware knows no fp8 or another.

float8_e4m3fn has 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity, NaN 0x7F; float8_e5m2 is the upper byte
of an IEEE half. Encoding rounds to nearest even and saturates at the largest finite value; NaN stays NaN. Decoding is
exact: every value of either format is a half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avmp.kernels import fp8_formats

_E4M3 = tl.constexpr(fp8_formats.E4M3)
_E5M2 = tl.constexpr(fp8_formats.E5M2)
_NATIVE_E4M3 = tl.constexpr(fp8_formats.NATIVE_E4M3)


@triton.jit
def decode(stored, FORMAT: tl.constexpr):
    """Values of what was loaded: fp16 from bytes of a format, anything else as it is."""
    if FORMAT == _E4M3:
        # The sign fills the upper byte. Exponent and mantissa land in a half's fields; the two biases differ by 8,
        # subnormals included.
        bits = (stored.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
        # Only the size of NaN carries into the one bit of the exponent that no number sets: that makes it a half's NaN.
        bits = bits | ((bits + 0x80) & 0x4000)
        values = bits.to(tl.float16, bitcast=True) * 256.0
    elif FORMAT == _NATIVE_E4M3:
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == _E5M2:
        values = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        values = stored
    return values


@triton.jit
def encode(values, FORMAT: tl.constexpr):
    """uint8 bits of fp32 values."""
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FORMAT == _E4M3:
        size = tl.minimum(tl.abs(values), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Half an ulp of the 3-bit mantissa, less one where the last bit is even; the carry enters the exponent.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # 2^14 + x: its ulp is 2^-9, the step of the subnormals, so that the addition rounds.
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0.015625, subnormal, normal)
    else:
        size = tl.minimum(tl.abs(values), 57344.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - ((127 - 15) << 2)
        subnormal = (size + 128.0).to(tl.int32, bitcast=True) & 0x7  # ulp of 128: 2^-16
        code = tl.where(size < 0.00006103515625, subnormal, normal)
    return (tl.where(values != values, 0x7F, code) | sign).to(tl.uint8)
