"""The first id of a table that names no unit, or one that is not there to be used; in plain torch: the specification
of the Triton kernel, and what runs where it does not.

For a build that checks. Without it kernels leave such ids out, without a word, so that no memory but their own is
touched; but attention takes for granted that every id is null or names a page.
"""

from __future__ import annotations

import torch

from avmp.errors import InvalidArgument

NOTHING_FOUND = 2**63 - 1
ANY_NUMBER = -(2**31)
"""As ``first_valid_id``, with a divisor of 1 and no page table: no number is null."""


def first_bad_id(
    ids: torch.Tensor,
    *,
    low: int,
    high: int,
    begins: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    divisor: int = 1,
    first_valid_id: int = 1,
    null_is_bad: bool = False,
) -> int:
    """Where the first bad id stands, ``row * (width + 1) + column``; NOTHING_FOUND if there is none. Waits for the
    device.

    * ``ids`` int32 or int64 ``[rows, width]``, rows at any stride; ``divisor`` tokens are one id (of a slot mapping);
    * ``begins`` and ``ends`` int64 ``[rows]``: the columns of a row that are looked at, all by default. A row that
      begins before column 0 is bad at column 0, one that ends behind its last column at column ``width``;
    * an id below ``first_valid_id`` (tested before it is divided) is null: bad if ``null_is_bad``;
    * ``page_table`` int32 maps ids to physical ones; an id beyond it is bad, and so is one that it maps below
      ``first_valid_id``. Without one, ids are physical;
    * a physical id is bad outside ``low`` to ``high - 1``.

    The first in this order whatever order the work is done in. Floor: every id looked at is read once, and its entry.
    """
    check_bounds(ids, begins, ends, page_table, divisor)
    rows, width = ids.shape
    columns = torch.arange(width + 1, device=ids.device)
    begin = 0 if begins is None else begins[:, None]
    end = torch.full((rows, 1), width, device=ids.device) if ends is None else ends[:, None]
    wide = torch.nn.functional.pad(ids.long(), (0, 1))
    looked_at = (columns >= begin) & (columns < end) & (columns < width)
    found = looked_at & (wide >= first_valid_id * divisor)
    number = torch.where(found, wide, 0).div(divisor, rounding_mode="trunc")
    bad = looked_at & ~found if null_is_bad else torch.zeros_like(looked_at)
    if page_table is not None:
        beyond = found & (number >= len(page_table))
        found &= ~beyond
        number = page_table[torch.where(found, number, 0)].long()
        bad |= beyond | (found & (number < first_valid_id))
    bad |= found & ((number < low) | (number >= high))
    outside = ((columns == 0) & (torch.as_tensor(begin) < 0)) | ((columns == width) & (end > width))
    bad |= outside & (end > begin)
    places = torch.arange(rows * (width + 1), device=ids.device).view(rows, width + 1)
    return int(torch.where(bad, places, NOTHING_FOUND).min()) if bad.numel() else NOTHING_FOUND


def check_bounds(
    ids: torch.Tensor,
    begins: torch.Tensor | None,
    ends: torch.Tensor | None,
    page_table: torch.Tensor | None,
    divisor: int,
) -> None:
    """Raises InvalidArgument for shapes and dtypes."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or (ids.shape[1] > 1 and ids.stride(1) != 1):
        raise InvalidArgument(f"ids {ids.dtype} {tuple(ids.shape)}: expected int32 or int64 [rows, width], dense rows")
    for name, columns in (("begins", begins), ("ends", ends)):
        if columns is not None and (columns.dtype != torch.int64 or columns.shape != (len(ids),)):
            raise InvalidArgument(f"{name} {columns.dtype} {tuple(columns.shape)}: expected int64 [{len(ids)}]")
    if page_table is not None and (page_table.dtype != torch.int32 or page_table.dim() != 1 or not len(page_table)):
        raise InvalidArgument(f"page_table {page_table.dtype} {tuple(page_table.shape)}: expected int32 [ids]")
    if divisor < 1:
        raise InvalidArgument(f"divisor {divisor}: expected 1 or more")
