"""A model in miniature on a device of real bytes: what it reads back must be what its tokens say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from avmp.allocator import Allocator
from avmp.handles import ID_MASK
from tests.fake_device import FakeDevice


def state_after(tokens: Iterable[int]) -> int:
    """The state of the model after these tokens, from nothing; it depends on each of them and on their order."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state


class Serving:
    """Writes each token and the state through the tables of ``batch``; ``tokens`` is what each sequence has read.

    Token values are at least 1, so that neither zeroed nor poisoned memory passes for one.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.device = allocator, FakeDevice(allocator)
        self.tokens: dict[int, list[int]] = {}

    def admit(self, tokens: Sequence[int], prefix: object = None, reused: int = 0) -> int:
        """A new sequence that starts from a prefix of ``reused`` tokens."""
        handle = int(self.allocator.admit([len(tokens)], prefix)[0])  # type: ignore[arg-type]
        self.tokens[handle] = list(tokens)
        assert self.step([handle]) == [len(tokens) - reused]
        return handle

    def feed(self, handle: int, tokens: Sequence[int]) -> None:
        """Room for more tokens, and the step that reads them."""
        self.allocator.extend(handle, len(tokens))
        self.tokens[handle] += tokens
        assert self.step([handle]) == [len(tokens)]

    def step(self, handles: list[int]) -> list[int]:
        """One forward pass over what is pending; yields the query lengths."""
        self.device.flush(self.allocator)
        tables = self.allocator.batch(np.array(handles))
        lengths = np.diff(tables.query_start_loc).tolist()
        for row, handle in enumerate(handles):
            new = self.tokens[handle][len(self.tokens[handle]) - lengths[row] :]
            begin = int(tables.query_start_loc[row])
            for offset, token in enumerate(new if self.allocator.layout.has_pages else []):
                self.device.write_token(int(tables.slot_mapping[begin + offset]), token)
            if self.allocator.layout.has_slots and new:
                slot = int(tables.state_indices[row])
                state = self.device.read_state(slot)
                assert tables.has_initial_state[row] or state == 0, "a state that nobody asked for"
                for token in new:
                    state = (state * 31 + token + 1) % 1_000_003
                self.device.write_state(slot, state)
        return lengths

    def verify(self, handle: int) -> None:
        """Every token and the state, read back through the device's own tables."""
        self.device.flush(self.allocator)
        size, tokens = self.allocator.layout.page_tokens, self.tokens[handle]
        assert self.allocator.lengths(handle).tolist() == [len(tokens)]
        if self.allocator.layout.has_pages:
            pages = (self.allocator.pages(handle) & ID_MASK).tolist()
            assert len(pages) == -(-len(tokens) // size)
            found = [self.device.read_token(pages[at // size], at % size) for at in range(len(tokens))]
            assert found == tokens
        if self.allocator.layout.has_slots:
            assert self.state(handle) == state_after(tokens)

    def state(self, handle: int) -> int:
        """The bytes of the sequence's slot."""
        self.device.flush(self.allocator)
        return self.device.read_state(self.allocator.slot(handle) & ID_MASK)
