"""Policies that are nothing but a count of units: everything except the rule that says which counts fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avmp.baselines.protocol import Counts, IntArray, PolicyFull, PolicySetup
from avmp.errors import InvalidArgument, StaleHandle
from avmp.geometry import require_count
from avmp.handles import as_counts, as_handles
from avmp.units import largest

_GONE, _RESIDENT, _SWAPPED = range(3)


@dataclass(frozen=True)
class Units:
    """What a sequence of n tokens takes: ``kv_per_block * ceil(n / block_tokens)`` KV units of ``kv_bytes`` and
    ``state_per_sequence`` state units of ``state_bytes``. A pool that the model lacks has a count of 0."""

    block_tokens: int
    kv_per_block: int
    kv_bytes: int
    state_per_sequence: int
    state_bytes: int

    def kv_units(self, tokens: Any) -> Any:
        """KV units for a number of tokens, or for each of an array."""
        return -(-tokens // self.block_tokens) * self.kv_per_block

    @classmethod
    def of_pages_and_slots(cls, setup: PolicySetup) -> Units:
        """avmp's own units: one page per ``page_tokens`` tokens and one slot, rounded as in its layout."""
        layout = setup.layout
        return cls(
            block_tokens=layout.page_tokens,
            kv_per_block=int(layout.has_pages),
            kv_bytes=layout.page_total_bytes,
            state_per_sequence=int(layout.has_slots),
            state_bytes=layout.slot_total_bytes,
        )


class CountedPolicy(ABC):
    """A :class:`MemoryPolicy` whose units have no place, so that nothing is ever in the way of anything; a subclass
    may give them one (``_place``, ``_vacate``).

    Handles are serial numbers from 1 and are never used again. ``_kv_units`` and ``_state_units`` are the sums over
    the resident sequences.
    """

    def __init__(self, name: str, setup: PolicySetup, units: Units) -> None:
        self.name = name
        self.arena_bytes = setup.layout.arena_bytes
        self.units = units
        self._rows = setup.max_sequences
        self._length: IntArray = np.zeros(64, dtype=np.int64)
        self._status: NDArray[np.int8] = np.zeros(64, dtype=np.int8)
        self._issued = self._resident = self._kv_units = self._state_units = 0
        self._one_more = units.kv_per_block
        self._checked: IntArray | None = None
        """The handles of the last ``extend``, if nobody can change them, as long as all are resident: a batch that
        decodes comes again and again."""

    @property
    def moved_bytes(self) -> int:
        """Nothing moves."""
        return 0

    @abstractmethod
    def holds(self, kv_units: Any, state_units: Any) -> Any:
        """Whether so many units fit into an empty arena together; numbers, or arrays of them."""

    def fits(self, token_counts: IntArray, spare_tokens: int = 0) -> bool:
        """Whether ``admit(token_counts)`` would succeed now and leave room for ``spare_tokens`` more tokens."""
        counts = self._counts(token_counts)
        kv_units = int(self.units.kv_units(counts).sum()) + self.units.kv_units(spare_tokens)
        return self._has_room(kv_units, len(counts))

    def admit(self, token_counts: IntArray) -> IntArray:
        """New sequences; their handles. Raises PolicyFull."""
        return self._enter("admit", self._counts(token_counts))

    def extend(self, handles: IntArray, counts: Counts = 1) -> None:
        """More tokens for each sequence. Raises PolicyFull."""
        if handles is not self._checked:
            handles = self._live(handles, _RESIDENT)
        before = self._length[handles]
        if type(counts) is int and counts == 1:
            after = before + 1
            grown = self._one_more * (before % self.units.block_tokens == 0)
        else:
            after = before + as_counts(counts, len(handles), "extend")
            grown = self.units.kv_units(after) - self.units.kv_units(before)
        added = int(grown.sum())
        if added and not self._has_room(added, 0):
            raise self._full("extend", added, 0)
        self._length[handles] = after
        if added:
            self._kv_units += added
            self._place(handles, grown, 0)
        self._checked = None if handles.flags.writeable else handles

    def release(self, handles: IntArray) -> None:
        """The sequences are gone."""
        self._leave(self._live(handles, _RESIDENT))

    def swap_out(self, handles: IntArray) -> IntArray:
        """The sequences leave; handles to bring them back with."""
        handles = self._live(handles, _RESIDENT)
        self._leave(handles)
        return self._issue(self._length[handles], _SWAPPED)

    def swap_in(self, swapped: IntArray) -> IntArray:
        """They are back; their new handles. Raises PolicyFull."""
        swapped = self._live(swapped, _SWAPPED)
        handles = self._enter("swap_in", self._length[swapped])
        self._status[swapped] = _GONE
        return handles

    def used_bytes(self) -> dict[str, int]:
        """Bytes held at present, by kind."""
        return {"kv": self._kv_units * self.units.kv_bytes, "state": self._state_units * self.units.state_bytes}

    def extents(self) -> dict[str, int]:
        """What is used: any free byte serves either kind."""
        return self.used_bytes()

    def counters(self) -> dict[str, int]:
        """All zero: nothing moves."""
        return {"retractions": 0, "migrations": 0, "bytes_moved": 0}

    def impossible(self, token_counts: IntArray) -> NDArray[np.bool_]:
        """For each length, whether it does not fit even alone."""
        kv_units = self.units.kv_units(self._counts(token_counts))
        alone: NDArray[np.bool_] = np.asarray(self.holds(kv_units, self.units.state_per_sequence), dtype=np.bool_)
        return ~alone

    def max_sequences(self, tokens: int) -> int:
        """How many sequences of this length an empty arena holds."""
        kv_units = self.units.kv_units(require_count("tokens", tokens))
        state_units = self.units.state_per_sequence
        return largest(self.arena_bytes, lambda count: bool(self.holds(count * kv_units, count * state_units)))

    def _has_room(self, kv_units: int, sequences: int) -> bool:
        state_units = sequences * self.units.state_per_sequence
        fits = self.holds(self._kv_units + kv_units, self._state_units + state_units)
        return bool(fits) and self._resident + sequences <= self._rows

    def _enter(self, operation: str, lengths: IntArray) -> IntArray:
        by_sequence = self.units.kv_units(lengths)
        kv_units = int(by_sequence.sum())
        if not self._has_room(kv_units, len(lengths)):
            raise self._full(operation, kv_units, len(lengths))
        self._resident += len(lengths)
        self._kv_units += kv_units
        self._state_units += len(lengths) * self.units.state_per_sequence
        handles = self._issue(lengths, _RESIDENT)
        self._place(handles, by_sequence, self.units.state_per_sequence)
        return handles

    def _place(self, handles: IntArray, kv_units: IntArray, state_units: int) -> None:
        """So many more KV units for each sequence, and state units for each, fit and are counted: for policies whose
        units have a place."""
        return

    def _vacate(self, handles: IntArray) -> None:
        """These sequences give up what was placed."""
        return

    def _leave(self, handles: IntArray) -> None:
        self._vacate(handles)
        self._checked = None
        self._resident -= len(handles)
        self._kv_units -= int(self.units.kv_units(self._length[handles]).sum())
        self._state_units -= len(handles) * self.units.state_per_sequence
        self._status[handles] = _GONE

    def _issue(self, lengths: IntArray, status: int) -> IntArray:
        handles = np.arange(self._issued + 1, self._issued + 1 + len(lengths))
        self._issued += len(lengths)
        if self._issued >= len(self._length):
            size = 2 * self._issued
            self._length = np.concatenate([self._length, np.zeros(size, dtype=np.int64)])
            self._status = np.concatenate([self._status, np.zeros(size, dtype=np.int8)])
        self._length[handles] = lengths
        self._status[handles] = status
        return handles

    def _live(self, handles: IntArray, status: int) -> IntArray:
        """The handles, checked: each of them has this status and is there once."""
        handles = as_handles(handles)
        known = (handles > 0) & (handles <= self._issued)
        good = known & (self._status[np.where(known, handles, 0)] == status)
        if not good.all():
            what = "resident" if status == _RESIDENT else "swapped"
            raise StaleHandle(f"{self.name}: {int(handles[np.argmin(good)])} names no {what} sequence")
        if not (handles[1:] > handles[:-1]).all() and len(np.unique(handles)) < len(handles):
            raise InvalidArgument(f"{self.name}: a sequence is named twice in one call")
        return handles

    def _counts(self, token_counts: IntArray) -> IntArray:
        values = np.atleast_1d(np.asarray(token_counts))
        return as_counts(values, len(values), f"{self.name}: token counts")

    def _full(self, operation: str, kv_units: int, sequences: int) -> PolicyFull:
        state_units = sequences * self.units.state_per_sequence
        return PolicyFull(
            f"{self.name}: {operation} wants {kv_units} KV and {state_units} state units, {sequences} sequences; held: "
            f"{self._kv_units} KV and {self._state_units} state units, {self._resident} of {self._rows} sequences"
        )
