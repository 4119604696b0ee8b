"""What an arena has to hold at the very least, checked before anything is built."""

from __future__ import annotations

from avmp.errors import ArenaTooSmall, InvalidArgument
from avmp.handles import MOST
from avmp.layout import Layout
from avmp.options import Options


def longest_sequence(layout: Layout, options: Options, asked: int | None = None) -> int:
    """Tokens that one sequence may have: ``asked``, or the smaller of the model's ``max_position_embeddings`` and what
    fits beside the floors; without attention layers any number fits.

    Raises InvalidArgument where the number cannot be known, ArenaTooSmall if one such sequence does not fit.
    """
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= MOST):
        raise InvalidArgument(f"max_tokens_per_sequence={asked!r}: expected an integer from 1 to {MOST}")
    known = layout.geometry.max_position_embeddings if layout.geometry else None
    if asked is None and known is None and layout.has_pages:
        raise InvalidArgument("max_tokens_per_sequence must be given: the model's configuration names no maximum")
    slots = max(int(layout.has_slots), options.floor_slots)
    tokens = asked or known or MOST
    if asked is None and layout.has_pages:
        tokens = max(min(tokens, layout.max_pages(slots) * layout.page_tokens), 1)
    pages = layout.pages_per_sequence(tokens)
    if not layout.fits(max(pages, options.floor_pages), slots):
        raise ArenaTooSmall(
            f"arena of {layout.arena_bytes:,} B cannot hold one sequence of {tokens} tokens ({pages} pages of "
            f"{layout.page_total_bytes:,} B, {int(layout.has_slots)} slots of {layout.slot_total_bytes:,} B) beside "
            f"the null area of {layout.null_bytes:,} B and floors of {options.floor_pages} pages and "
            f"{options.floor_slots} slots; use more memory or a smaller max_tokens_per_sequence"
        )
    return tokens
