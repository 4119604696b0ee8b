"""Words of a device table overwritten: the page tables and the tables of a step, brought up to date in one launch.

Floor: 8 bytes read and 4 written per change; scattered, so that each write touches 32 bytes of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument
from avmp.kernels import tuning
from avmp.kernels.launch import cdiv, device_guard


@triton.jit(do_not_specialize=["count", "words"], do_not_specialize_on_alignment=["tables", "changes"])
def apply_table_changes_kernel(tables, changes, count, words, BLOCK: tl.constexpr):
    """``tables[changes[i]] = changes[count + i]``; what lies outside the table is left out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(changes + at, mask=at < count, other=-1)
    value = tl.load(changes + count.to(tl.int64) + at, mask=at < count, other=0)
    tl.store(tables + index, value, mask=(index >= 0) & (index < words))


def apply_table_changes(tables: torch.Tensor, changes: torch.Tensor) -> None:
    """``tables[changes[0]] = changes[1]``: tables int32 ``[words]``, changes int32 ``[2, count]``, contiguous, on its
    device; indices are distinct. Raises InvalidArgument."""
    if tables.dtype != torch.int32 or tables.dim() != 1 or not tables.is_contiguous():
        raise InvalidArgument(f"tables {tables.dtype} {tuple(tables.shape)}: expected int32 [words], contiguous")
    if changes.dtype != torch.int32 or changes.dim() != 2 or len(changes) != 2 or not changes.is_contiguous():
        raise InvalidArgument(f"changes {changes.dtype} {tuple(changes.shape)}: expected int32 [2, count], contiguous")
    count = changes.shape[1]
    if not count:
        return
    with device_guard(tables):
        apply_table_changes_kernel[(cdiv(count, tuning.TABLE_BLOCK),)](
            tables, changes, count, len(tables), BLOCK=tuning.TABLE_BLOCK, num_warps=tuning.TABLE_WARPS
        )
