"""All operations by name: how each is planned, and what its first argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from avmp import branching, growth, loose_units, swapping
from avmp.errors import InvalidArgument
from avmp.handles import as_handles
from avmp.ledger import Ledger, Planned


class Operation(NamedTuple):
    """``planner(ledger, …)`` checks and counts; it gets rows, one row, handles or the plain first argument."""

    planner: Callable[..., Planned[Any]]
    first: Literal["rows", "row", "handles", "plain"]


OPERATIONS: dict[str, Operation] = {
    "admit": Operation(growth.plan_admit, "plain"),
    "extend": Operation(growth.plan_extend, "rows"),
    "release": Operation(growth.plan_release, "rows"),
    "release_front": Operation(growth.plan_release_front, "rows"),
    "retire": Operation(growth.plan_retire, "plain"),
    "fork": Operation(branching.plan_fork, "row"),
    "reorder": Operation(branching.plan_reorder, "rows"),
    "snapshot": Operation(branching.plan_snapshot, "rows"),
    "restore": Operation(branching.plan_restore, "row"),
    "drop": Operation(branching.plan_drop, "handles"),
    "truncate": Operation(branching.plan_truncate, "rows"),
    "swap_out": Operation(swapping.plan_swap_out, "rows"),
    "swap_in": Operation(swapping.plan_swap_in, "handles"),
    "discard": Operation(swapping.plan_discard, "handles"),
    "take": Operation(loose_units.plan_take, "plain"),
    "give": Operation(loose_units.plan_give, "handles"),
    "retain": Operation(loose_units.plan_retain, "handles"),
    "pin": Operation(loose_units.plan_pin, "handles"),
    "unpin": Operation(loose_units.plan_unpin, "handles"),
}


def plan(ledger: Ledger, name: str, first: Any, *others: Any, **keywords: Any) -> Planned[Any]:
    """Plans one operation. Raises for bad arguments; changes nothing."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise InvalidArgument(f"no operation {name!r}; expected one of {', '.join(OPERATIONS)}")
    if operation.first == "rows":
        first = ledger.table.ids(ledger.table.rows(first))
    elif operation.first == "row":
        first = ledger.table.row(first)
    elif operation.first == "handles":
        first = as_handles(first)
    return operation.planner(ledger, first, *others, **keywords)
