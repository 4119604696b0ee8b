"""Pages and slots held by handles rather than by sequences: take, retain, give, pin, unpin.

For engines with a bookkeeping or a prefix cache of their own.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from avmp.address_space import AddressSpace
from avmp.errors import InvalidArgument, StaleHandle
from avmp.handles import KIND_SHIFT, PAGE, SLOT, Int64Array, as_counts, describe_handle
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


def by_pool(space: AddressSpace, handles: Int64Array) -> list[tuple[Pool, Int64Array]]:
    """Live handles sorted by pool, as virtual ids. Raises StaleHandle for any that is not a live page or slot."""
    kinds = handles >> KIND_SHIFT
    foreign = (kinds != PAGE) & (kinds != SLOT)
    if foreign.any():
        raise StaleHandle(f"{describe_handle(int(handles[np.argmax(foreign)]))} is foreign: expected a page or slot")
    split = ((space.pages, handles[kinds == PAGE]), (space.slots, handles[kinds == SLOT]))
    return [(pool, pool.resolve(mine)) for pool, mine in split if len(mine)]


def plan_take(ledger: Ledger, kind: str, n: int = 1) -> Planned[Int64Array]:
    """``n`` units of a kind, held by handles; yields those."""
    pool = pool_of(ledger.space, kind)
    count = int(as_counts(n, 1, "take: n")[0])

    def commit() -> Int64Array:
        virtual = ledger.space.bind(pool, count)
        pool.loose[virtual] = 1
        return pool.handles(virtual)

    return Planned(count if kind == "page" else 0, count if kind == "slot" else 0, commit)


def plan_retain(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One more holder for each entry."""
    split = by_pool(ledger.space, handles)

    def commit() -> None:
        for pool, virtual in split:
            np.add.at(pool.loose, virtual, 1)
            pool.share(virtual)

    return Planned(0, 0, commit)


def plan_give(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One holder fewer for each entry. Raises StaleHandle if handles do not hold an entry that often."""
    split = by_pool(ledger.space, handles)
    for pool, virtual in split:
        for which, count in Counter(virtual.tolist()).items():
            if pool.loose[which] < count:
                raise StaleHandle(
                    f"give: {describe_handle(pool.handle_of(which))} is given back {count} times, but take and retain "
                    f"hold it {pool.loose[which]} times; what sequences and snapshots hold is theirs"
                )

    def commit() -> None:
        for pool, virtual in split:
            np.subtract.at(pool.loose, virtual, 1)
            ledger.space.drop(pool, virtual)

    return Planned(0, 0, commit)


def plan_pin(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One more pin for each entry: a holder, and a reason not to move."""
    split = by_pool(ledger.space, handles)

    def commit() -> None:
        for pool, virtual in split:
            pool.pins.update(virtual.tolist())
            pool.share(virtual)

    return Planned(0, 0, commit)


def plan_unpin(ledger: Ledger, handles: Int64Array) -> Planned[None]:
    """One pin fewer for each entry. Raises StaleHandle if an entry is not pinned that often."""
    split = by_pool(ledger.space, handles)
    for pool, virtual in split:
        for which, count in Counter(virtual.tolist()).items():
            if pool.pins[which] < count:
                raise StaleHandle(
                    f"unpin: {describe_handle(pool.handle_of(which))} is unpinned {count} times, "
                    f"but pinned {pool.pins[which]} times"
                )

    def commit() -> None:
        for pool, virtual in split:
            pool.pins.subtract(virtual.tolist())
            for which in set(virtual.tolist()):
                if not pool.pins[which]:
                    del pool.pins[which]
            ledger.space.drop(pool, virtual)

    return Planned(0, 0, commit)
