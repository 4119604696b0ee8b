"""What a pool at ``debug=2`` checks beyond the allocator's own tables: the ids of a step, and those of effects."""

from __future__ import annotations

from typing import Any

import numpy as np

from avmp.bounds import Limits, check_gather, check_slot_mapping, check_state_indices
from avmp.device_batch import Batch
from avmp.effects import Launch
from avmp.errors import Inconsistent
from avmp.layout import Layout
from avmp.page_pool import Pool


def limits_of(pages: Pool, slots: Pool) -> Limits:
    """The physical ids that each pool owns now: its extent."""
    return Limits((pages.unit_count - pages.extent, pages.unit_count), (slots.first, slots.first + slots.extent))


def check_batch(batch: Batch, limits: Limits, layout: Layout, backend: str) -> None:
    """Raises for the first id in a step's tables that does not lead to a unit of its pool. Waits for the device.
    Columns that ``release_front`` has given up are null."""
    if layout.has_pages:
        known: dict[str, Any] = dict(page_tokens=layout.page_tokens, num_pages=layout.page_count, backend=backend)
        known |= dict(page_table=batch.page_table, limits=limits.pages)
        check_gather("batch", batch.block_table, batch.seq_lens, **known)
        check_slot_mapping("batch", batch.slot_mapping, **known)
    if layout.has_slots:
        known = dict(num_slots=layout.slot_count, slot_table=batch.slot_table, backend=backend)
        check_state_indices("batch", batch.state_indices, limits=limits.slots, **known)


def check_launch(launch: Launch, pool: Pool) -> None:
    """Raises Inconsistent for an effect on the null area, or beyond the lane. Only that: of what its pool owned when
    the effect was decided, some may have been given up since."""
    ids = {"sources": launch.sources, "destinations": launch.destinations}
    if launch.operation in ("swap_out", "swap_in"):
        del ids["destinations" if launch.operation == "swap_out" else "sources"]  # those are places in host memory
    for name, units in ids.items():
        wrong = np.flatnonzero((units < pool.first) | (units >= pool.unit_count))
        if len(wrong):
            raise Inconsistent(
                f"{launch.operation}: {name}[{wrong[0]}] = {units[wrong[0]]}: the {pool.kind}s of this arena are "
                f"{pool.first} to {pool.unit_count - 1}"
            )
