"""The arena of a CachePool, seen the way the driver wants it: tokens and states that fill their bytes in every lane."""

from __future__ import annotations

import numpy as np
import torch

from avmp.cache_pool import CachePool

WORD = 8
GUARD = 0x5A
LANE_STRIDE = 1 << 40
"""Added once per lane to what is written, so that no lane can stand in for another."""


class PoolDevice:
    """Writes and reads through the device's own tables. Every byte of a token's share of a page, and of a slot, holds
    its value: a unit that was moved in part, or in one lane only, is found out."""

    def __init__(self, pool: CachePool) -> None:
        self.pool, self.layout = pool, pool.layout
        self.lanes = pool.lanes.numpy().view(np.int64)
        self.words = {"page": self.layout.page_bytes // WORD, "slot": self.layout.slot_bytes // WORD}
        self.token_words = self.words["page"] // self.layout.page_tokens
        memory = torch.empty(0, dtype=torch.uint8).set_(pool.lanes.untyped_storage())
        begin = pool.lanes.storage_offset()
        end = begin + pool.lanes.numel()
        self.guards = [memory[max(begin - 4096, 0) : begin], memory[end : end + 4096]]
        for guard in self.guards:
            guard.fill_(GUARD)
        self.offsets = np.arange(self.layout.lane_count)[:, None] * LANE_STRIDE

    def flush(self, pool: CachePool) -> None:
        pool.flush()

    def _token(self, page: int, offset: int) -> np.ndarray:
        physical = int(self.pool.tables.page_table[page])
        assert page >= 1 and physical >= self.layout.first_page
        begin = physical * self.words["page"] + offset * self.token_words
        return self.lanes[:, begin : begin + self.token_words]

    def _slot(self, slot: int) -> np.ndarray:
        physical = int(self.pool.tables.slot_table[slot])
        assert slot >= 1 and physical >= self.layout.first_slot
        return self.lanes[:, physical * self.words["slot"] : (physical + 1) * self.words["slot"]]

    def write_token(self, virtual_slot: int, value: int) -> None:
        self._token(*divmod(virtual_slot, self.layout.page_tokens))[:] = self.offsets + value

    def read_token(self, page: int, offset: int) -> int:
        return self._one(self._token(page, offset) - self.offsets)

    def write_state(self, slot: int, value: int) -> None:
        # A state of 0 is what zeroing gives: the same in all lanes.
        self._slot(slot)[:] = self.offsets + value if value else 0

    def read_state(self, slot: int) -> int:
        words = self._slot(slot)
        return 0 if not words.any() else self._one(words - self.offsets)

    @staticmethod
    def _one(words: np.ndarray) -> int:
        assert (words == words.flat[0]).all()
        return int(words.flat[0])

    def verify(self, pool: CachePool) -> None:
        pool.check_mirrors()
        null = self.layout.null_bytes // self.layout.lane_count // WORD
        assert not self.lanes[:, :null].any()
        assert all((guard == GUARD).all() for guard in self.guards)
