"""Pages and slots held by handles rather than by sequences: take, retain, give, pin, unpin.

For engines with a bookkeeping or a prefix cache of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from avmp.address_space import AddressSpace
from avmp.errors import InvalidArgument, StaleHandle
from avmp.handles import KIND_SHIFT, PAGE, SLOT, Int64Array, as_count, describe_handle
from avmp.ledger import Ledger, Planned
from avmp.page_pool import Pool


def pool_of(space: AddressSpace, kind: str) -> Pool:
    """The pool of a kind. Raises InvalidArgument for a kind that does not exist, or not in this arena."""
    if kind not in ("page", "slot"):
        raise InvalidArgument(f'kind {kind!r}: expected "page" or "slot"')
    pool = space.pages if kind == "page" else space.slots
    if not pool.unit_bytes:
        raise InvalidArgument(f"this arena has no {kind}s")
    return pool


class Units(NamedTuple):
    """Some units of one pool: distinct virtual ids, int64, and how often each was named."""

    pool: Pool
    virtual: Int64Array
    counts: Int64Array


def by_pool(space: AddressSpace, handles: Int64Array) -> list[Units]:
    """Live handles sorted by pool. Raises StaleHandle for any that is not a live page or slot."""
    kinds = handles >> KIND_SHIFT
    foreign = (kinds != PAGE) & (kinds != SLOT)
    if foreign.any():
        raise StaleHandle(f"{describe_handle(int(handles[np.argmax(foreign)]))} is foreign: expected a page or slot")
    split = ((space.pages, handles[kinds == PAGE]), (space.slots, handles[kinds == SLOT]))
    return [Units(pool, *np.unique(pool.resolve(mine), return_counts=True)) for pool, mine in split if len(mine)]


def plan_take(ledger: Ledger, kind: str, n: int = 1) -> Planned[Int64Array]:
    """``n`` units of a kind, held by handles; yields those."""
    pool = pool_of(ledger.space, kind)
    count = as_count(n, "take: n")

    def commit() -> Int64Array:
        virtual = ledger.space.bind(pool, count)
        pool.loose[virtual] = 1
        return pool.handles(virtual)

    return Planned(count if kind == "page" else 0, count if kind == "slot" else 0, commit)


def plan_retain(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One more holder for each entry."""
    split = by_pool(ledger.space, handles)

    def commit() -> None:
        for pool, virtual, counts in split:
            pool.loose[virtual] += counts
            pool.share(virtual, counts)

    return Planned(0, 0, commit)


def plan_give(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One holder fewer for each entry. Raises StaleHandle if handles do not hold an entry that often."""
    split = by_pool(ledger.space, handles)
    for units in split:
        _require_held("give", "take and retain hold it", units, units.pool.loose[units.virtual])

    def commit() -> None:
        for pool, virtual, counts in split:
            pool.loose[virtual] -= counts
            ledger.space.drop(pool, virtual, counts)

    return Planned(0, 0, commit)


def _require_held(operation: str, held_by: str, units: Units, held: NDArray[np.integer]) -> None:
    short = held < units.counts
    if short.any():
        first = int(np.argmax(short))
        what = describe_handle(units.pool.handle_of(int(units.virtual[first])))
        raise StaleHandle(
            f"{operation}: {what} is named {units.counts[first]} times, but {held_by} {held[first]} times; "
            "what sequences and snapshots hold is theirs"
        )


def plan_pin(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One more pin for each entry: a holder, and a reason not to move."""
    split = by_pool(ledger.space, handles)

    def commit() -> None:
        for pool, virtual, counts in split:
            pool.pins.update(dict(zip(virtual.tolist(), counts.tolist(), strict=True)))
            pool.share(virtual, counts)

    return Planned(0, 0, commit)


def plan_unpin(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One pin fewer for each entry. Raises StaleHandle if an entry is not pinned that often."""
    split = by_pool(ledger.space, handles)
    for units in split:
        pinned = np.array([units.pool.pins[which] for which in units.virtual.tolist()])
        _require_held("unpin", "it is pinned", units, pinned)

    def commit() -> None:
        for pool, virtual, counts in split:
            pool.pins.subtract(dict(zip(virtual.tolist(), counts.tolist(), strict=True)))
            for which in virtual.tolist():
                if not pool.pins[which]:
                    del pool.pins[which]
            ledger.space.drop(pool, virtual, counts)

    return Planned(0, 0, commit)
