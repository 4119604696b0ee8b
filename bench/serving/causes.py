"""Why avmp is behind where it is: the same cell with one thing changed at a time.

The splits here pay for no null unit, and avmp does; a split bounds the batch, and avmp does not. So the other policy is
run on the arena less avmp's null area, and avmp on the arena and as much more, with a batch of at most the other's
largest, and with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from avmp.serving.arrivals import at_rate
from avmp.serving.metrics import summarize
from bench.serving.grid import SPLITS_TRIED, Cell, Ground, settings_of

Record = Mapping[str, Any]

NULL_AREA, BATCH, EITHER, BOTH, ORDER, NEITHER = (
    "null area",
    "bound on the batch",
    "either of the two",
    "both together",
    "order only",
    "neither",
)


def find_out(ground: Ground, cell: Cell, ours: Record, theirs: Record) -> dict[str, Any]:
    """Tokens per second over the whole run of what is changed, for one cell of the other policy."""
    trace, server = at_rate(ground.trace, theirs["rate"]), ground.server
    arena, null = server.layout.arena_bytes, server.layout.null_bytes
    wider = replace(server, cache_bytes=arena + null)
    bounded = replace(server.rules, max_batch=theirs["result"]["most_batch"])
    less = replace(server, cache_bytes=arena - null)
    if cell.policy == "best-static":
        used, most_runs = theirs["result"]["used_bytes"], SPLITS_TRIED[cell.load]
        less_null = less.best_static(trace, used, most_runs=most_runs).result
    else:
        less_null = summarize(less.serve(cell.policy, trace))
    runs = {
        "null_given_back": wider,
        "batch_bounded": replace(server, rules=bounded),
        "both": replace(wider, rules=bounded),
    }
    return {
        "key": cell.key,
        "settings": _settings(cell),
        "avmp": ours["result"]["tokens_per_second"],
        "other": theirs["result"]["tokens_per_second"],
        "other_less_null": less_null.tokens_per_second,
        **{name: summarize(changed.serve("avmp", trace)).tokens_per_second for name, changed in runs.items()},
    }


def is_of(record: Record | None, cell: Cell, ours: Record, theirs: Record) -> bool:
    """Whether a record says why these two differ, and not why two earlier ones did."""
    now = (_settings(cell), ours["result"]["tokens_per_second"], theirs["result"]["tokens_per_second"])
    return record is not None and (record["settings"], record["avmp"], record["other"]) == now


def cause(record: Record, nothing: float) -> str:
    """What the loss is due to: the change that undoes it. ``nothing`` is a share that is no difference. The null area
    is the cause only where taking it from the other policy makes it fall behind, and giving it back to avmp is enough.
    """
    ours, theirs = record["avmp"] * (1 + nothing), record["other"] * (1 - nothing)
    if ours >= record["other"]:
        return ORDER
    by_null = record["null_given_back"] >= theirs and record["other_less_null"] <= ours
    by_batch = record["batch_bounded"] >= theirs
    if by_null or by_batch:
        return EITHER if by_null and by_batch else NULL_AREA if by_null else BATCH
    return BOTH if record["both"] >= theirs else NEITHER


def _settings(cell: Cell) -> str:
    return f"{settings_of(cell.model, 'avmp')}-{settings_of(cell.model, cell.policy)}"
