"""What of an operation's arguments is checked before it runs, where that is asked for: shapes, then ids
(``bounds.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from avmp import bounds
from avmp.kernels import attention_arguments, state_arguments, unit_arguments
from avmp.kernels.attention_arguments import window_bounds

Arguments = dict[str, Any]
Range = bounds.Range


def check_arguments(operation: str, arguments: Arguments) -> None:
    """Raises what the operation itself raises for shapes, dtypes, strides and devices. Reads no values."""
    _ARGUMENTS[operation](**arguments)


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
        max_query_len=given["max_query_len"],
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
        distinct=True,
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
        max_seq_len=given["max_seq_len"],
        limits=limits,
        backend=backend,
    )
    if given["cu_seq_lens"] is not None:
        from avmp.kernels.kv_reference import check_sums

        check_sums(given["cu_seq_lens"].tolist(), given["seq_lens"].tolist(), given["num_tokens"])


def _states(cache: str) -> Callable[[str, Arguments, Range | None, str], None]:
    def check(operation: str, given: Arguments, limits: Range | None, backend: str) -> None:
        """Entries of ``intermediate_states`` are not: an index outside of them is legal, and means nowhere."""
        starts, most = given["query_start_loc"], given["max_query_len"]
        if starts is not None:
            attention_arguments.check_starts(operation, starts.tolist(), len(given["x"]), most)
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
        sources, destinations = given["state_indices"], given["destination_indices"]
        ids = sources if destinations is None else destinations
        if ids is not None and given.get("update_state", True):
            counts = torch.full((len(ids),), 1 if most is None else most) if starts is None else starts.diff().cpu()
            rule = dict(slot_table=given["slot_table"], first_valid_id=given["first_valid_id"])
            bounds.check_state_writes(operation, sources, destinations, counts.long(), **rule)

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


def _attention_arguments(scale: float, max_query_len: int, max_seq_len: int, **given: Any) -> None:
    attention_arguments.check_attention(**{"out": None} | given | {"return_lse": False})


def _write_arguments(first_valid_id: int, **given: Any) -> None:
    from avmp.kernels.kv_reference import check_write  # which loads triton

    check_write(**given)


def _gather_arguments(max_seq_len: int, first_valid_id: int, dtype: Any, **given: Any) -> None:
    from avmp.kernels.kv_reference import check_gather  # which loads triton

    check_gather(**given)


def _state_arguments(dt_softplus: bool, update_state: bool, **given: Any) -> None:
    state_arguments.check_state_update(**{"out": None} | given)


def _convolution_arguments(**given: Any) -> None:
    state_arguments.check_convolution(**{"out": None} | given)


def _unit_arguments(
    lanes: torch.Tensor,
    unit_bytes: int,
    page_table: torch.Tensor | None,
    first_valid_id: int,
    sources: torch.Tensor | None = None,
    destinations: torch.Tensor | None = None,
    host: torch.Tensor | None = None,
) -> None:
    unit_arguments.check_lanes(lanes, unit_bytes, first_valid_id)
    for ids in (sources, destinations):
        if ids is not None:
            unit_arguments.check_ids(lanes, ids, page_table)
            if host is not None:
                unit_arguments.check_packed(lanes, unit_bytes, host, len(ids))
    if sources is not None and destinations is not None:
        unit_arguments.check_pairs(sources, destinations)


def _move_arguments(
    lanes: torch.Tensor,
    unit_bytes: int,
    moves: torch.Tensor,
    count: int | None,
    device_count: torch.Tensor | None,
    first_valid_id: int,
) -> None:
    unit_arguments.check_lanes(lanes, unit_bytes, first_valid_id)
    unit_arguments.check_moves(lanes, moves, count, device_count)


_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "paged_attention": _attention_arguments,
    "write_kv": _write_arguments,
    "gather_kv": _gather_arguments,
    "selective_state_update": _state_arguments,
    "causal_conv1d_update": _convolution_arguments,
    **dict.fromkeys(("copy_units", "zero_units", "poison_units", "swap_out", "swap_in"), _unit_arguments),
    "migrate": _move_arguments,
    "apply_table_changes": unit_arguments.check_table_changes,
}
"""For each operation the check that it makes itself, of the arguments that this takes."""

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
