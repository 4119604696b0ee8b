"""A device that does nothing until it must: copies and launches wait in a queue, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from avmp.kernels.reference import TorchBackend


class LateQueue:
    """What the device still has to do. ``patient`` False forgets to wait for marks: the fault that a ring of staging
    buffers must not have."""

    def __init__(self, patient: bool = True) -> None:
        self.patient = patient
        self.done = self.issued = 0
        self._work: deque[Callable[[], Any]] = deque()

    def put(self, work: Callable[[], Any]) -> None:
        self._work.append(work)
        self.issued += 1

    def run(self, until: int | None = None) -> None:
        while self._work and (until is None or self.done < until):
            self._work.popleft()()
            self.done += 1

    # -- the transport of an uploader --------------------------------------------------------------------------------

    def pinned(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self.put(lambda: destination.copy_(source))

    def mark(self) -> object:
        return self.issued

    def finished(self, mark: object) -> None:
        if self.patient:
            assert isinstance(mark, int)
            self.run(mark)


class LateBackend:
    """The torch backend behind the queue."""

    name = "late"

    def __init__(self, queue: LateQueue, lanes: torch.Tensor, unit_bytes: dict[str, int]) -> None:
        self._queue, self._backend = queue, TorchBackend(lanes, unit_bytes)
        self.units = self._backend.units

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._backend, name)
        return lambda *arguments: self._queue.put(partial(method, *arguments))


def copied(values: torch.Tensor) -> np.ndarray:
    return values.numpy().copy()
