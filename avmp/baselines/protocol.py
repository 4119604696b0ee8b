"""What a memory policy is to those who drive it: a replay, a serving simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from avmp.errors import AvmpError
from avmp.geometry import require_count
from avmp.layout import Layout
from avmp.options import Options

IntArray: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = "int | IntArray"


class PolicyFull(AvmpError):
    """The policy cannot hold what was asked for beside what it holds now; nothing has changed."""


@dataclass(frozen=True)
class PolicySetup:
    """What every policy is built from, so that all of them have the same arena and the same model.

    ``longest_tokens`` is the longest sequence that will be asked for, ``max_sequences`` how many may be there at once
    (rows of tables, not memory). ``options`` are those of avmp's allocator.
    """

    layout: Layout
    longest_tokens: int
    max_sequences: int
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        require_count("longest_tokens", self.longest_tokens)
        require_count("max_sequences", self.max_sequences)


class MemoryPolicy(Protocol):
    """The memory of one arena, shared by sequences that are named by int64 handles.

    Calls take and return arrays, one entry per sequence, and happen whole or not at all. ``admit``, ``extend`` and
    ``swap_in`` raise PolicyFull where they do not fit at present; a handle that is not live raises StaleHandle, one
    that comes twice in a call InvalidArgument.
    """

    name: str
    arena_bytes: int

    @property
    def moved_bytes(self) -> int:
        """``counters()["bytes_moved"]``, cheap enough to ask in every step."""

    def fits(self, token_counts: IntArray, spare_tokens: int = 0) -> bool:
        """Whether ``admit(token_counts)`` would succeed now and leave room for ``spare_tokens`` more tokens."""

    def admit(self, token_counts: IntArray) -> IntArray:
        """New sequences with room for these numbers of tokens; their handles."""

    def extend(self, handles: IntArray, counts: Counts = 1) -> None:
        """Room for ``counts`` more tokens in each sequence (one integer, or one for each)."""

    def release(self, handles: IntArray) -> None:
        """The sequences are gone, and their memory is free."""

    def swap_out(self, handles: IntArray) -> IntArray:
        """The sequences leave for host memory; handles to bring them back with."""

    def swap_in(self, swapped: IntArray) -> IntArray:
        """They are back; their new handles, in the same order."""

    def used_bytes(self) -> dict[str, int]:
        """Bytes held at present, by kind: ``"kv"`` and ``"state"``, padding inside units included."""

    def extents(self) -> dict[str, int]:
        """Bytes set aside at present, by kind: what is used, and what only this kind could use as things stand."""

    def counters(self) -> dict[str, int]:
        """What moving capacity has cost so far: at least ``retractions`` (capacity moved, nothing had to make way),
        ``migrations`` (live units had to) and ``bytes_moved``."""

    def impossible(self, token_counts: IntArray) -> NDArray[np.bool_]:
        """For each length, whether a sequence of that many tokens could not be held even alone."""

    def max_sequences(self, tokens: int) -> int:
        """How many sequences of ``tokens`` tokens (1 or more) an empty arena holds, the limit on rows aside."""
