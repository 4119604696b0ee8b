"""Tile sizes and warps of the state operations, each with its reason.

Chosen from shapes and the kind of device only: nothing is searched while serving, and no batch size compiles anew.
"""

from __future__ import annotations

from typing import NamedTuple


class StateTile(NamedTuple):
    """One program's part of a state: ``dims`` rows of ``block`` (dstate rounded up to a power of two), on ``warps``."""

    dims: int
    block: int
    warps: int


STATE_ELEMENTS = 2048
"""16 by 128 on 4 warps: 16 elements per thread, which are four 16-byte loads of an fp32 state, under way together. At
some 48 registers ten such programs fit a multiprocessor of sm_90: 80 KiB in flight, three times the 25 KiB that hide
the latency of an H200's memory (4.8 TB/s, 0.7 µs, 132 multiprocessors), and still 40 KiB with a state of 2 bytes."""
STATE_ELEMENTS_UNTIED = 1024
"""Where every element has a decay of its own, A takes as many registers as the state."""
STATE_WARPS = 4
STATE_ELEMENTS_INTERPRETED = 2**18
"""In the interpreter a program costs milliseconds whatever its size."""

CHANNEL_BYTES = 16
CONV_WARPS = 1
"""One 16-byte access per thread and column where channels lie side by side: 256 channels of 2 bytes to a program of one
warp. A step of 8,448 such channels is 33 programs per row; it is bound by its launch."""
CHANNELS_INTERPRETED = 2**14

CONV_TOKENS = 64
"""Tokens of a row that one program takes: each re-reads ``width - 1`` tokens before its own, 5 % at width 4, and a
prompt of 2,048 tokens by 8,448 channels fills 1,056 programs. Not fewer than MOST_HISTORY, so that a tile's window lies
within the tile before."""


def state_tile(dim: int, dstate: int, tied: bool, interpreted: bool, lanes: int = 32) -> StateTile:
    """Every element has one thread, which alone reads and writes it: no tile is smaller than its threads."""
    block = next_power_of_2(dstate)
    elements = STATE_ELEMENTS if tied else STATE_ELEMENTS_UNTIED
    most = max((STATE_ELEMENTS_INTERPRETED if interpreted else elements) // block, 1)
    dims = max(min(next_power_of_2(dim), most), -(-lanes // block))
    warps = STATE_WARPS
    while warps > 1 and warps * lanes > dims * block:
        warps //= 2
    return StateTile(dims, block, warps)


def conv_channels(dim: int, element_bytes: int, interpreted: bool, lanes: int = 32) -> int:
    """Channels of a program: not fewer than its threads, so that each has one thread."""
    most = CHANNELS_INTERPRETED if interpreted else CHANNEL_BYTES // element_bytes * lanes * CONV_WARPS
    return max(min(next_power_of_2(dim), most), lanes * CONV_WARPS)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (number - 1).bit_length()
