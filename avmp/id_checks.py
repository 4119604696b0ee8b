"""Which ids of an operation are checked before it runs, where that is asked for (``bounds.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from avmp import bounds
from avmp.kernels.attention_arguments import window_bounds

Arguments = dict[str, Any]
Range = bounds.Range


def check_ids(operation: str, arguments: Arguments, limits: bounds.Limits | None, backend: str) -> None:
    """Raises InvalidArgument or Inconsistent for the first bad id among the arguments, given by name."""
    pool, check = _CHECKS[operation]
    check(operation, arguments, None if limits is None else getattr(limits, pool), backend)


def _attention(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_attention(
        operation,
        given["block_table"],
        given["seq_lens"],
        given["query_start_loc"],
        page_tokens=given["key_cache"].shape[1],
        num_pages=given["key_cache"].shape[0],
        num_tokens=given["q"].shape[0],
        page_table=given["page_table"],
        first_valid_id=given["first_valid_id"],
        left=window_bounds(given["window"], given["causal"])[0],
        limits=limits,
        backend=backend,
    )


def _write(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_slot_mapping(
        operation,
        given["slot_mapping"],
        page_tokens=given["key_cache"].shape[1],
        num_pages=given["key_cache"].shape[0],
        page_table=given["page_table"],
        first_valid_id=given["first_valid_id"],
        limits=limits,
        backend=backend,
    )


def _gather(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_gather(
        operation,
        given["block_table"],
        given["seq_lens"],
        page_tokens=given["key_cache"].shape[1],
        num_pages=given["key_cache"].shape[0],
        page_table=given["page_table"],
        first_valid_id=given["first_valid_id"],
        starts=given["starts"],
        limits=limits,
        backend=backend,
    )


def _states(cache: str) -> Callable[[str, Arguments, Range | None, str], None]:
    def check(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
        for name in ("state_indices", "destination_indices"):
            if given[name] is not None:
                bounds.check_state_indices(
                    operation,
                    given[name],
                    num_slots=given[cache].shape[0],
                    slot_table=given["slot_table"],
                    first_valid_id=given["first_valid_id"],
                    limits=limits,
                    backend=backend,
                    name=name,
                )

    return check


def _units(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_units(
        operation,
        given["lanes"],
        given["unit_bytes"],
        sources=given.get("sources"),
        destinations=given.get("destinations"),
        page_table=given["page_table"],
        first_valid_id=given["first_valid_id"],
        limits=limits,
        backend=backend,
    )


def _moves(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_moves(
        operation,
        given["lanes"],
        given["unit_bytes"],
        given["moves"],
        count=given["count"],
        device_count=given["device_count"],
        first_valid_id=given["first_valid_id"],
        limits=limits,
        backend=backend,
    )


def _tables(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
    bounds.check_table_changes(operation, given["tables"], given["changes"], backend=backend)


_CHECKS = {
    "paged_attention": ("pages", _attention),
    "write_kv": ("pages", _write),
    "gather_kv": ("pages", _gather),
    "selective_state_update": ("slots", _states("state")),
    "causal_conv1d_update": ("slots", _states("conv_state")),
    **dict.fromkeys(("copy_units", "zero_units", "poison_units", "swap_out", "swap_in"), ("pages", _units)),
    "migrate": ("pages", _moves),
    "apply_table_changes": ("pages", _tables),
}
"""For each operation the pool whose limits count, and its check. Operations on units come without a batch, and so
without limits."""
