"""The programs of a kernel in other orders than the one in which Triton's interpreter runs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

from avmp.kernels.interpreter import install

__all__ = ["ORDERS", "install", "program_order"]

ORDERS = ("forward", "reverse", "shuffle")


@lru_cache(maxsize=64)
def places(order: str, programs: int, seed: int) -> tuple[int, ...]:
    """Which program runs when."""
    found = list(range(programs))
    if order == "reverse":
        found.reverse()
    elif order == "shuffle":
        random.Random(seed).shuffle(found)
    return tuple(found)


@contextmanager
def program_order(order: str, seed: int = 0) -> Iterator[None]:
    """The programs of every launch inside run in this order, one of ORDERS. A GPU promises none; the interpreter runs
    the last axis fastest, always: a fault that shows in one order only is a race."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: expected one of {', '.join(ORDERS)}")
    stock = InterpreterBuilder.set_grid_idx

    def set_grid_idx(self: Any, *index: int) -> None:
        turn = np.ravel_multi_index(index, self.grid_dim)
        place = places(order, int(np.prod(self.grid_dim)), seed)[turn]
        stock(self, *(int(axis) for axis in np.unravel_index(place, self.grid_dim)))

    InterpreterBuilder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = stock
