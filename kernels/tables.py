"""Words of a device table overwritten: the page tables and the tables of a step, brought up to date in one launch.

After no other kernel: places and words are one list, packed on the host, and each word is one masked store.

Floor: 8 bytes read and 4 written per change; scattered, so that each write touches 32 bytes of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avmp.kernels import tuning
from avmp.kernels.launch import cdiv, device_guard, require_runnable
from avmp.kernels.unit_arguments import check_table_changes


@triton.jit(do_not_specialize=["count", "words"], do_not_specialize_on_alignment=["tables", "changes"])
def apply_table_changes_kernel(tables, changes, count, words, BLOCK: tl.constexpr):
    """``tables[changes[i]] = changes[count + i]``; what lies outside the table is left out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(changes + at, mask=at < count, other=-1)
    value = tl.load(changes + count.to(tl.int64) + at, mask=at < count, other=0)
    tl.store(tables + index.to(tl.int64), value, mask=(index >= 0) & (index < words))


def apply_table_changes(tables: torch.Tensor, changes: torch.Tensor) -> None:
    """``units_reference.apply_table_changes`` by Triton, in one launch on the current stream."""
    check_table_changes(tables, changes)
    require_runnable(tables)
    count = changes.shape[1]
    if not count:
        return
    with device_guard(tables):
        apply_table_changes_kernel[(cdiv(count, tuning.TABLE_BLOCK),)](
            tables, changes, count, len(tables), BLOCK=tuning.TABLE_BLOCK, num_warps=tuning.TABLE_WARPS
        )
