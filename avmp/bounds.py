"""A build that checks: every id is looked at before an operation uses it, and the first bad one is named.

Without checks the kernels leave out ids that name no unit and tokens that are not there, so that nothing is written to
foreign memory; but an engine that hands out wrong tables computes nonsense from then on. Attention, which only reads,
takes its ids for granted: those beyond the pool lead anywhere, as does, there and in gathering, what lies behind a
block table whose rows are longer than it. With checks (``use_bounds_checks``, or the batches of a pool at ``debug=2``)
one more launch per table finds the first bad id, the host waits for its answer, and an error names the operation, the
row, the column, the id, and what was allowed. Running sums and lengths are checked on the host. Not for the capture of
a CUDA graph, which must not wait. Under ``torch.compile`` the batches of a pool are not checked.

InvalidArgument is raised for what is wrong in itself: ids outside the pool, rows longer than their table, tokens beyond
those that there are, two tokens or rows that write to one place, no page where one has to be read. Null pages in front
of a row are what ``release_front`` has given up: their keys are invisible, and that is legal, with or without a window;
a null page behind one that is there is not. Inconsistent is raised for what may have been right once: a virtual id that
is not bound (any more), a page or slot that lies outside what its pool owns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from avmp.backends import implementation
from avmp.errors import Inconsistent, InvalidArgument
from avmp.kernels import unit_arguments
from avmp.kernels.attention_arguments import check_starts
from avmp.kernels.bounds_reference import ANY_NUMBER, NOTHING_FOUND

Range = tuple[int, int]
"""Physical ids from the first to, not including, the second."""


class Limits(NamedTuple):
    """What each pool of an arena owns: its extent."""

    pages: Range
    slots: Range


_checking: ContextVar[bool] = ContextVar("avmp_bounds", default=False)


@contextmanager
def use_bounds_checks() -> Iterator[None]:
    """Operations inside check every id that they are given. They wait for the device. For this thread: one that is
    started inside does not inherit it. Enter it around a compiled function, not inside."""
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def wanted(limits: Limits | None = None) -> bool:
    """Whether an operation has to check: inside ``use_bounds_checks``, or for a batch that brings its limits."""
    return limits is not None or _checking.get()


def check_attention(
    operation: str,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    page_tokens: int,
    num_pages: int,
    num_tokens: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    left: int = -1,
    max_query_len: int | None = None,
    limits: Range | None = None,
    backend: str | None = None,
) -> None:
    """The pages that queries see, of caches with ``num_pages`` pages, for ``num_tokens`` query tokens; ``left`` is how
    many keys left of its own position a query sees, -1 for all. A page that no query sees may be anything; those that
    ``release_front`` has given up, in front of all others, are null."""
    check_starts(operation, query_start_loc.tolist(), num_tokens, max_query_len)
    lengths, queries = seq_lens.long(), query_start_loc.diff().long()
    first_key = (lengths - queries - left).clamp(min=0) if left >= 0 else torch.zeros_like(lengths)
    reads = (queries > 0) & (lengths > 0)
    given_up = (block_table < first_valid_id).cumprod(1).sum(1)  # null columns in front
    ids = _Ids(operation, "block_table", block_table, "page", num_pages, first_valid_id, limits, page_table)
    ids.check(
        backend,
        begins=torch.where(reads, torch.maximum(first_key // page_tokens, given_up), 0),
        ends=torch.where(reads, (lengths + page_tokens - 1) // page_tokens, 0),
        null_is_bad=True,
    )


def check_gather(
    operation: str,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_tokens: int,
    num_pages: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    starts: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    limits: Range | None = None,
    backend: str | None = None,
) -> None:
    """The pages of tokens ``starts`` (0 by default) to ``starts + seq_lens`` of each row, of which none is longer than
    ``max_seq_len``; null pages read as zeros."""
    if max_seq_len is not None:
        check_numbers(operation, "seq_lens", seq_lens, max_seq_len + 1, f"at most {max_seq_len} in a row", backend)
    lengths = seq_lens.long()
    first = torch.zeros_like(lengths) if starts is None else starts.long()
    reads = lengths > 0
    ids = _Ids(operation, "block_table", block_table, "page", num_pages, first_valid_id, limits, page_table)
    ids.check(
        backend,
        begins=torch.where(reads, torch.div(first, page_tokens, rounding_mode="floor"), 0),
        ends=torch.where(reads, torch.div(first + lengths + page_tokens - 1, page_tokens, rounding_mode="floor"), 0),
    )


def check_slot_mapping(
    operation: str,
    slot_mapping: torch.Tensor,
    *,
    page_tokens: int,
    num_pages: int,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    limits: Range | None = None,
    backend: str | None = None,
    distinct: bool = False,
) -> None:
    """The pages that tokens are written to; null places are left out by the operation. ``distinct``: and that no two
    tokens go to one place."""
    places = slot_mapping[:, None]
    ids = _Ids(operation, "slot_mapping", places, "page", num_pages, first_valid_id, limits, page_table, page_tokens)
    ids.check(backend)
    if distinct:
        slots = slot_mapping.cpu().long()
        pages = torch.where(slots >= first_valid_id * page_tokens, slots // page_tokens, -1)
        physical = _on_host(pages, page_table, first_valid_id)
        written = np.where(physical >= 0, physical * page_tokens + slots.numpy() % page_tokens, -1)
        _check_distinct(operation, "token", "place", written)


def check_state_indices(
    operation: str,
    state_indices: torch.Tensor,
    *,
    num_slots: int,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
    limits: Range | None = None,
    backend: str | None = None,
    name: str = "state_indices",
) -> None:
    """State slots, ``[rows]`` or ``[rows, columns]``, of states with ``num_slots`` slots; null ones are left out."""
    indices = state_indices[:, None] if state_indices.dim() == 1 else state_indices
    _Ids(operation, name, indices, "slot", num_slots, first_valid_id, limits, slot_table).check(backend)


def check_state_writes(
    operation: str,
    sources: torch.Tensor | None,
    destinations: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    slot_table: torch.Tensor | None = None,
    first_valid_id: int = 1,
) -> None:
    """That no slot is written for two rows or tokens, of ids that have been found good. Indices are ``[rows]`` or
    ``[rows, columns]``, destinations None: the sources; ``counts`` int64 ``[rows]`` of tokens, on the host: of columns
    so many are written."""
    targets = sources if destinations is None else destinations
    if targets is None:
        return
    physical = _on_host(targets, slot_table, first_valid_id)
    started = counts.numpy() > 0
    if sources is not None:
        started &= (_on_host(sources, slot_table, first_valid_id).reshape(len(started), -1) >= 0).any(1)
    if physical.ndim == 1:
        written = np.where(started, physical, -1)
        _check_distinct(operation, "row", "slot", written)
    else:
        used = started[:, None] & (np.arange(physical.shape[1]) < counts.numpy()[:, None])
        _check_distinct(operation, "row", "slot", np.where(used, physical, -1).reshape(-1), physical.shape[1])


def check_units(
    operation: str,
    lanes: torch.Tensor,
    unit_bytes: int,
    *,
    sources: torch.Tensor | None = None,
    destinations: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    first_valid_id: int = 0,
    limits: Range | None = None,
    backend: str | None = None,
) -> None:
    """Units that are read and written; also that none is written twice, nor read for another pair. Null ones are left
    out."""
    count = unit_arguments.check_lanes(lanes, unit_bytes, first_valid_id)
    for name, ids in (("sources", sources), ("destinations", destinations)):
        if ids is not None:
            _Ids(operation, name, ids[:, None], "unit", count, first_valid_id, limits, page_table).check(backend)
    read, written = (_on_host(ids, page_table, first_valid_id) for ids in (sources, destinations))
    if written is not None:
        _check_disjoint(operation, read, written)


def check_moves(
    operation: str,
    lanes: torch.Tensor,
    unit_bytes: int,
    moves: torch.Tensor,
    *,
    count: int | None = None,
    device_count: torch.Tensor | None = None,
    first_valid_id: int = 0,
    limits: Range | None = None,
    backend: str | None = None,
) -> None:
    """The moves that count, as ``check_units``; and that a count on the device is one of these."""
    if device_count is not None:
        what = f"{moves.shape[1]} moves"
        check_numbers(operation, "device_count", device_count.reshape(1), moves.shape[1] + 1, what, backend)
        count = int(device_count)
    sources, destinations = moves[:, :count]
    rule: dict[str, Any] = dict(first_valid_id=first_valid_id, limits=limits, backend=backend)
    check_units(operation, lanes, unit_bytes, sources=sources, destinations=destinations, **rule)


def check_table_changes(
    operation: str, tables: torch.Tensor, changes: torch.Tensor, *, backend: str | None = None
) -> None:
    """Words that are changed: inside the tables, and each once."""
    check_numbers(operation, "changes", changes[0], len(tables), f"tables of {len(tables)} words", backend)
    _check_distinct(operation, "change", "word", changes[0].cpu().numpy())


def check_numbers(
    operation: str, name: str, numbers: torch.Tensor, high: int, what: str, backend: str | None = None
) -> None:
    """Raises InvalidArgument for the first of ``numbers``, ``[count]``, that is not in 0 to ``high - 1``."""
    find = implementation("first_bad_id", numbers, backend)
    place = find(numbers[:, None], low=0, high=high, first_valid_id=ANY_NUMBER)
    if place != NOTHING_FOUND:
        at = place // 2
        raise InvalidArgument(
            f"{operation}: {name}[{at}] = {int(numbers[at])}: expected 0 to {high - 1}, there are {what}"
        )


@dataclass(frozen=True)
class _Ids:
    """Ids of one table, ``[rows, width]``, and what they may be; ``divisor`` tokens are one id."""

    operation: str
    name: str
    ids: torch.Tensor
    unit: str
    count: int
    first_valid_id: int
    limits: Range | None
    page_table: torch.Tensor | None
    divisor: int = 1

    @property
    def owned(self) -> Range:
        """What the pool owns, as far as it is known."""
        low, high = self.limits or (self.first_valid_id, self.count)
        return low, min(high, self.count)

    def check(
        self,
        backend: str | None,
        begins: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        null_is_bad: bool = False,
    ) -> None:
        """Raises for the first bad id; see ``kernels/bounds_reference.py`` for which are."""
        low, high = self.owned
        place = implementation("first_bad_id", self.ids, backend)(
            self.ids,
            low=low,
            high=high,
            begins=begins,
            ends=ends,
            page_table=self.page_table,
            divisor=self.divisor,
            first_valid_id=self.first_valid_id,
            null_is_bad=null_is_bad,
        )
        if place == NOTHING_FOUND:
            return
        row, column = divmod(place, self.ids.shape[1] + 1)
        width = self.ids.shape[1]
        begin, end = (0 if begins is None else int(begins[row])), (width if ends is None else int(ends[row]))
        if begin < 0 or column == width:
            raise InvalidArgument(
                f"{self.operation}: row {row} reads columns {begin} to {end - 1} of {self.name}: it has {width} columns"
            )
        self._refuse(row, column)

    def _refuse(self, row: int, column: int) -> NoReturn:
        value, first, unit = int(self.ids[row, column]), self.first_valid_id, self.unit
        place = f"{row}, {column}" if self.ids.shape[1] > 1 else f"{row}"
        where = f"{self.operation}: row {row}: {self.name}[{place}] = {value}"
        if value < first * self.divisor:
            raise InvalidArgument(f"{where} is null, where a {unit} has to be read: expected an id of {first} or more")
        number = value // self.divisor
        most = (self.count if self.page_table is None else len(self.page_table)) - 1
        if number > most:
            raise InvalidArgument(f"{where}: {unit} {number} is outside the pool, which has {first} to {most}")
        lies = f"{unit}"
        if self.page_table is not None:
            virtual, number = number, int(self.page_table[number])
            if number < first:
                raise Inconsistent(
                    f"{where}: {unit} {virtual} is owned by nobody (the page table has {number} for it): freed, or "
                    "never handed out"
                )
            lies = f"{unit} {virtual} lies at"
        low, high = self.owned
        raise Inconsistent(f"{where}: {lies} {number}, which the pool does not own: it owns {low} to {high - 1}")


def _on_host(ids: torch.Tensor | None, page_table: torch.Tensor | None, first_valid_id: int) -> Any:
    """Physical ids, int64, of ids that have been found good; -1 for null ones."""
    if ids is None:
        return None
    found = ids.cpu().long()
    valid = found >= first_valid_id
    if page_table is not None:
        found = page_table.cpu()[torch.where(valid, found, 0)].long()
    return torch.where(valid, found, -1).numpy()


def _check_disjoint(operation: str, read: Any, written: Any) -> None:
    """Raises InvalidArgument for the first pair whose unit is written for, or read by, another pair."""
    used = written >= 0 if read is None else (written >= 0) & (read >= 0)
    _check_distinct(operation, "pair", "unit", np.where(used, written, -1))
    if read is not None:
        clash = used & (read != written) & np.isin(written, read[used & (read != written)])
        if clash.any():
            pair = int(clash.argmax())
            reader = int((used & (read == written[pair]) & (read != written)).argmax())
            raise InvalidArgument(
                f"{operation}: pair {pair} writes unit {written[pair]}, which pair {reader} reads: expected disjoint "
                "sources and destinations"
            )


def _check_distinct(operation: str, row: str, what: str, numbers: Any, width: int = 1) -> None:
    """Raises InvalidArgument for the first number, of those that are not negative, that stood there before; a row has
    ``width`` of them."""
    known = np.flatnonzero(numbers >= 0)
    _, first = np.unique(numbers[known], return_index=True)
    if len(first) < len(known):
        again = int(known[np.setdiff1d(np.arange(len(known)), first)[0]])
        before = int((numbers == numbers[again]).argmax())
        raise InvalidArgument(
            f"{operation}: {row}s {before // width} and {again // width} both write {what} {numbers[again]}: expected "
            "each once"
        )
