"""The one form in which requests reach everything else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from avmp.errors import InvalidArgument

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_TOKENS = 2**31 - 1
"""The longest prompt or output: what a 32-bit length can hold. More is taken for a corrupt value."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival; the arrays are read-only and of equal length.

    ``arrival_seconds`` never decreases and starts at or after 0. ``prompt_tokens`` lies in 1..MAX_TOKENS and
    ``output_tokens`` in 0..MAX_TOKENS: a request without output tokens is a prefill alone, as in logs that keep
    requests which failed or were cancelled before their first token.

    ``block_hashes``, where the source has them, gives for each request the ids of its prompt's blocks, equal ids
    standing for equal content. ``skipped`` counts entries of the source that hold no request. ``lines``, where the
    source is a file, gives the line of each request in it, from 1.
    """

    name: str
    arrival_seconds: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    block_hashes: tuple[IntArray, ...] | None = None
    skipped: int = 0
    lines: IntArray | None = None

    def __post_init__(self) -> None:
        self._freeze("arrival_seconds", _seconds(self.name, self.arrival_seconds))
        self._freeze("prompt_tokens", _lengths(self.name, "prompt_tokens", self.prompt_tokens, least=1))
        self._freeze("output_tokens", _lengths(self.name, "output_tokens", self.output_tokens, least=0))
        counts = {"prompt_tokens": len(self.prompt_tokens), "output_tokens": len(self.output_tokens)}
        if self.block_hashes is not None:
            counts["block_hashes"] = len(self.block_hashes)
        if self.lines is not None:
            counts["lines"] = len(self.lines)
        for field, count in counts.items():
            if count != len(self):
                raise InvalidArgument(
                    f"trace {self.name!r}: {field} has {count} entries, expected {len(self)} as in arrival_seconds"
                )

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    def _freeze(self, field: str, values: NDArray[np.float64] | NDArray[np.int64]) -> None:
        values.flags.writeable = False
        object.__setattr__(self, field, values)


def _seconds(trace: str, values: ArrayLike) -> FloatArray:
    seconds = np.array(values, dtype=np.float64)
    if seconds.ndim != 1 or not len(seconds):
        raise InvalidArgument(f"trace {trace!r}: expected a flat array of at least one request, got {seconds.shape}")
    if not np.isfinite(seconds).all() or seconds[0] < 0:
        raise InvalidArgument(f"trace {trace!r}: arrival_seconds must be finite and start at or after 0")
    backwards = np.flatnonzero(np.diff(seconds) < 0)
    if len(backwards):
        at = int(backwards[0]) + 1
        raise InvalidArgument(
            f"trace {trace!r}: request {at} arrives at {seconds[at]} s, before request {at - 1} at {seconds[at - 1]} s"
        )
    return seconds


def _lengths(trace: str, field: str, values: ArrayLike, least: int) -> IntArray:
    given = np.asarray(values)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise InvalidArgument(
            f"trace {trace!r}: {field} must be a flat array of integers, got {given.dtype} of shape {given.shape}"
        )
    wrong = np.flatnonzero((given < least) | (given > MAX_TOKENS))
    if len(wrong):
        at = int(wrong[0])
        raise InvalidArgument(
            f"trace {trace!r}: {field} of request {at} is {given[at]}, expected {least} to {MAX_TOKENS}"
        )
    return given.astype(np.int64)
