"""Table changes on their way to the device: packed on the host, copied once, applied in one launch.

The device never reads live host tables. Changes are packed into a ring of pinned staging buffers, each of which is
written again only after the copy out of it has finished.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from avmp.backends import Backend
from avmp.handles import Int64Array

RING_BUFFERS = 3
MOST_CHANGES = 1 << 18
"""Changes per copy. A flush with more of them (the admission of very many pages at once) takes several."""


class Transport(Protocol):
    """Copies from pinned host memory to the device, in the order of the device's stream."""

    def pinned(self, words: int) -> torch.Tensor:
        """An int32 host tensor ``[words]`` to copy from."""

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Starts to copy; it may be carried out at any later time before ``finished`` returns."""

    def mark(self) -> object:
        """A point in the order of copies."""

    def finished(self, mark: object) -> None:
        """Returns when everything sent before the mark has been copied."""


class StreamTransport:
    """The current stream of a CUDA device, or plain copies on any other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asynchronous = device.type == "cuda"

    def pinned(self, words: int) -> torch.Tensor:
        """Page-locked where the device copies asynchronously."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=self._asynchronous)

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """One copy on the current stream."""
        destination.copy_(source, non_blocking=self._asynchronous)

    def mark(self) -> object:
        """An event on the current stream; None where copies are done when ``send`` returns."""
        if not self._asynchronous:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finished(self, mark: object) -> None:
        """Waits for the event, on the host."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()


def send_array(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A fresh copy of a host array on the device, without waiting for it; the array may change afterwards."""
    host = torch.from_numpy(array.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Uploader:
    """Brings words of one device table, int32, up to date."""

    def __init__(self, tables: torch.Tensor, backend: Backend, transport: Transport) -> None:
        self.tables, self._backend, self._transport = tables, backend, transport
        size = min(MOST_CHANGES, max(tables.numel(), 1))
        self._most = size
        self._ring = [transport.pinned(2 * size) for _ in range(RING_BUFFERS)]
        self._arrays = [buffer.numpy() for buffer in self._ring]
        self._marks: list[object] = [None] * RING_BUFFERS
        self._device = torch.zeros(2 * size, dtype=torch.int32, device=tables.device)
        self._next = 0
        self.launches = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host and device memory for staging."""
        return sum(buffer.nbytes for buffer in self._ring) + self._device.nbytes

    def upload(self, indices: Int64Array, values: NDArray[np.int32]) -> None:
        """``tables[indices] = values`` on the device; indices are distinct."""
        for begin in range(0, len(indices), self._most):
            self._send(indices[begin : begin + self._most], values[begin : begin + self._most])

    def _send(self, indices: Int64Array, values: NDArray[np.int32]) -> None:
        turn, count = self._next, len(indices)
        self._next = (turn + 1) % RING_BUFFERS
        if self._marks[turn] is not None:
            self._transport.finished(self._marks[turn])
        packed = self._arrays[turn]
        packed[:count] = indices
        packed[count : 2 * count] = values
        received = self._device[: 2 * count]
        self._transport.send(self._ring[turn][: 2 * count], received)
        self._marks[turn] = self._transport.mark()
        self._backend.apply_table_changes(self.tables, received.view(2, count))
        self.launches += 1
