"""Random operations on an allocator, beside a model of plain lists and a device of real bytes.

Every operation draws its arguments from ``choose(n)``, an integer below n: hypothesis or a seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from avmp.allocator import Allocator
from avmp.errors import AvmpError, InvalidArgument, OutOfMemory, RowsExhausted, RowTooLong, StaleHandle
from avmp.layout import Layout
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.fake_device import FakeDevice

Choose = Callable[[int], int]
MOST_KEPT = 4
"""Above this many loose units, snapshots or swapped sequences, operations that make more of them let go of some
instead: otherwise a long run ends with an arena full of them, in which nothing happens any more."""
REFUSALS = (OutOfMemory, RowsExhausted, RowTooLong)


@dataclass
class Content:
    """What a sequence, snapshot or swapped sequence must hold: a value per token, and a state."""

    tokens: list[int] = field(default_factory=list)
    state: int = 0
    front: int = 0
    window: int | None = None
    history: list[int] = field(default_factory=list)

    def copy(self) -> Content:
        return Content(list(self.tokens), self.state, self.front, self.window, list(self.history))


class Driver:
    """One allocator, its model and its device."""

    make_allocator: Callable[..., Allocator] = Allocator
    make_device: Callable[[Any], Any] = FakeDevice

    def __init__(
        self,
        layout: Layout,
        max_rows: int = 12,
        max_tokens: int = 64,
        chaos_seed: int | None = 0,
        options: Options | None = None,
        verify_bytes: bool = True,
    ) -> None:
        chaos = None if chaos_seed is None else ChaosMigration(chaos_seed)
        self.zeroed = options is None or options.zero_slots
        self.layout, self.verify_bytes = layout, verify_bytes
        self.allocator = self.make_allocator(
            layout,
            max_rows=max_rows,
            max_tokens_per_sequence=max_tokens,
            options=options or Options(poison=True, events=True, zero_pages=True),
            disturbance=chaos,
        )
        self.device = self.make_device(self.allocator)
        self.sequences: dict[int, Content] = {}
        self.snapshots: dict[int, Content] = {}
        self.swapped: dict[int, Content] = {}
        self.loose: list[int] = []
        self.pinned: list[int] = []
        self.dead: list[int] = []
        self.tickets: list[int] = []
        self.next_value = 0
        self.refused = 0
        self.placed: dict[tuple[str, int], int] = {}

    # -- running ---------------------------------------------------------------------------------------------------

    def attempt(self, operation: str, *arguments: object) -> object:
        """Runs an operation; a refusal must have been foretold by ``fits`` and must leave no trace."""
        foretold = self.allocator.fits(operation, *arguments)
        before = self.allocator.digest()
        try:
            result = getattr(self.allocator, operation)(*arguments)
        except REFUSALS as refusal:
            assert not foretold, f"fits said yes, then: {refusal}"
            assert self.allocator.digest() == before
            self.refused += 1
            return None
        assert foretold, f"fits said no, but {operation} succeeded"
        return () if result is None else result

    def refuse(self, error: type[AvmpError], operation: str, *arguments: object) -> None:
        """The operation must raise this error and leave no trace."""
        before = self.allocator.digest()
        try:
            getattr(self.allocator, operation)(*arguments)
        except error:
            assert self.allocator.digest() == before
            return
        raise AssertionError(f"{operation}{arguments} was accepted")

    def some(self, choose: Choose, handles: dict[int, Content] | list[int]) -> list[int]:
        """One to three of these handles, in random order."""
        pool = list(handles)
        return [pool.pop(choose(len(pool))) for _ in range(min(len(pool), 1 + choose(3)))]

    def step(self, handles: list[int], counts: list[int]) -> None:
        """One forward pass over the pending tokens of these sequences (``counts`` of them), written through the
        device's own tables."""
        self.flush()
        if not handles:
            return
        batch = self.allocator.batch(np.array(handles, dtype=np.int64))
        again = self.allocator.batch(np.array(handles, dtype=np.int64))
        assert (batch.slot_mapping == again.slot_mapping).all()
        for index, handle in enumerate(handles):
            content = self.sequences[handle]
            begin, end = batch.query_start_loc[index : index + 2].tolist()
            assert int(batch.seq_lens[index]) == len(content.tokens)
            assert end - begin == counts[index]
            new = content.tokens[len(content.tokens) - (end - begin) :]
            assert bool(batch.has_initial_state[index]) == (len(content.tokens) > len(new))
            if self.layout.has_pages:
                for value, where in zip(new, batch.slot_mapping[begin:end].tolist(), strict=True):
                    self.device.write_token(where, value)
            if self.layout.has_slots and new:
                slot = int(batch.state_indices[index])
                if self.zeroed or batch.has_initial_state[index]:
                    assert self.device.read_state(slot) == content.state
                content.state = hash((content.state, *new)) & 0x7FFFFFFF
                self.device.write_state(slot, content.state)

    def values(self, count: int) -> list[int]:
        self.next_value += count
        return list(range(self.next_value - count + 1, self.next_value + 1))

    def flush(self) -> None:
        self.device.flush(self.allocator)
        if self.allocator._space.events is not None:
            for event in self.allocator.events():
                for virtual, physical in zip(event.virtual.tolist(), event.physical.tolist(), strict=True):
                    if event.what == "freed":
                        assert self.placed.pop((event.pool, virtual)) == physical
                    else:
                        assert (event.what == "moved") == ((event.pool, virtual) in self.placed)
                        self.placed[event.pool, virtual] = physical

    # -- operations ------------------------------------------------------------------------------------------------

    def admit(self, choose: Choose) -> None:
        counts = [choose(2 * self.layout.page_tokens + 3) for _ in range(1 + choose(3))]
        handles = self.attempt("admit", counts)
        if handles is not None:
            for handle, count in zip(handles.tolist(), counts, strict=True):
                self.sequences[handle] = Content(self.values(count))
            self.step(handles.tolist(), counts)

    def admit_prefix(self, choose: Choose) -> None:
        if not self.snapshots:
            return self.admit(choose)
        chosen = [None if choose(3) == 0 else self.some(choose, self.snapshots)[0] for _ in range(1 + choose(2))]
        starts = [Content() if handle is None else self.snapshots[handle] for handle in chosen]
        counts = [len(start.tokens) + choose(self.layout.page_tokens + 2) for start in starts]
        handles = self.attempt("admit", counts, chosen)
        if handles is None:
            return None
        for handle, count, start, snapshot in zip(handles.tolist(), counts, starts, chosen, strict=True):
            content = start.copy()
            content.tokens += self.values(count - len(start.tokens))
            content.history = [] if snapshot is None else [*start.history, snapshot]
            self.sequences[handle] = content
        added = [count - len(start.tokens) for count, start in zip(counts, starts, strict=True)]
        return self.step(handles.tolist(), added)

    def extend(self, choose: Choose) -> None:
        if not self.sequences:
            return self.admit(choose)
        handles = self.some(choose, self.sequences)
        if choose(2):
            handles = list(self.sequences)
        counts = [1] * len(handles) if choose(2) else [choose(self.layout.page_tokens + 2) for _ in handles]
        argument = 1 if counts == [1] * len(handles) and choose(2) else counts
        if self.attempt("extend", np.array(handles), argument) is not None:
            for handle, count in zip(handles, counts, strict=True):
                self.sequences[handle].tokens += self.values(count)
            self.step(handles, counts)
        return None

    def release(self, choose: Choose) -> None:
        handles = self.some(choose, self.sequences)
        ticket = None if choose(2) else choose(5)
        if handles:
            expected = self.allocator.releasable(handles)
            before = self.allocator.stats()
            self.attempt("release", handles, ticket)
            after = self.allocator.stats()
            if ticket is None:
                assert expected == (before.pages_live - after.pages_live, before.slots_live - after.slots_live)
            else:
                self.tickets.append(ticket)
            self.dead += handles
            for handle in handles:
                del self.sequences[handle]

    def retire(self, choose: Choose) -> None:
        ticket = choose(5)
        self.attempt("retire", ticket)
        self.tickets = [waiting for waiting in self.tickets if waiting > ticket]
        if not self.tickets:
            stats = self.allocator.stats()
            assert stats.pages_awaiting == stats.slots_awaiting == 0

    def fork(self, choose: Choose) -> None:
        for parent in self.some(choose, self.sequences)[:1]:
            children = self.attempt("fork", parent, choose(3))
            if children is not None:
                for child in children.tolist():
                    self.sequences[child] = self.sequences[parent].copy()

    def reorder(self, choose: Choose) -> None:
        handles = self.some(choose, self.sequences)
        parents = [choose(len(handles)) for _ in handles]
        if handles and self.attempt("reorder", handles, parents) is not None:
            contents = [self.sequences[handle] for handle in handles]
            for handle, parent in zip(handles, parents, strict=True):
                self.sequences[handle] = contents[parent].copy()

    def snapshot(self, choose: Choose) -> None:
        if len(self.snapshots) > MOST_KEPT:
            return self.drop(choose)
        handles = self.some(choose, self.sequences)
        taken = self.attempt("snapshot", handles)
        if taken is not None:
            for handle, snapshot in zip(handles, np.atleast_1d(taken).tolist(), strict=True):
                self.snapshots[snapshot] = self.sequences[handle].copy()
                self.sequences[handle].history.append(snapshot)
        return None

    def restore(self, choose: Choose) -> None:
        if self.sequences and self.snapshots:
            sequence, snapshot = self.some(choose, self.sequences)[0], self.some(choose, self.snapshots)[0]
            self.attempt("restore", sequence, snapshot)
            content = self.snapshots[snapshot].copy()
            content.history.append(snapshot)
            self.sequences[sequence] = content

    def drop(self, choose: Choose) -> None:
        for snapshot in self.some(choose, self.snapshots)[:1]:
            self.attempt("drop", snapshot)
            del self.snapshots[snapshot]
            self.dead.append(snapshot)

    def truncate(self, choose: Choose) -> None:
        for handle in self.some(choose, self.sequences)[:1]:
            content = self.sequences[handle]
            length = choose(len(content.tokens) + 1)
            position, state = self.expected_position(content, length)
            gone = content.front * self.layout.page_tokens
            window = len(content.tokens) if content.window is None else content.window
            if position and position != len(content.tokens) and gone and position - window < gone:
                self.refuse(InvalidArgument, "truncate", handle, length)
                continue
            assert self.attempt("truncate", handle, length) == position
            if length != len(content.tokens):
                content.tokens, content.state = content.tokens[:position], state
                content.history = [
                    h for h in content.history if h in self.snapshots and len(self.snapshots[h].tokens) <= position
                ]
                if not position:
                    content.front, content.window = 0, None

    def expected_position(self, content: Content, length: int) -> tuple[int, int]:
        if length == len(content.tokens) or not self.layout.has_slots:
            return length, content.state
        past = [self.snapshots[h] for h in content.history if h in self.snapshots]
        past = [s for s in past if len(s.tokens) <= length]
        return (len(past[-1].tokens), past[-1].state) if past else (0, 0)

    def release_front(self, choose: Choose) -> None:
        for handle in self.some(choose, self.sequences)[:1]:
            content = self.sequences[handle]
            tokens = choose(len(content.tokens) + 1)
            self.attempt("release_front", handle, tokens)
            if tokens:
                left = len(content.tokens) - tokens
                content.window = left if content.window is None else min(content.window, left)
            if self.layout.has_pages:
                content.front = max(content.front, tokens // self.layout.page_tokens)

    def swap_out(self, choose: Choose) -> None:
        handles = self.some(choose, self.sequences if len(self.swapped) <= MOST_KEPT else {})
        if handles:
            swapped = self.attempt("swap_out", handles)
            for handle, left in zip(handles, swapped.tolist(), strict=True):
                self.swapped[left] = self.sequences.pop(handle)
            self.dead += handles

    def swap_in(self, choose: Choose) -> None:
        chosen = self.some(choose, self.swapped)
        handles = self.attempt("swap_in", chosen) if chosen else None
        if handles is not None:
            for left, handle in zip(chosen, handles.tolist(), strict=True):
                self.sequences[handle] = self.swapped.pop(left)
            self.dead += chosen

    def discard(self, choose: Choose) -> None:
        for left in self.some(choose, self.swapped)[:1]:
            self.attempt("discard", left)
            del self.swapped[left]

    def take(self, choose: Choose) -> None:
        if len(self.loose) > MOST_KEPT:
            return self.give(choose)
        kinds = [k for k, has in (("page", self.layout.has_pages), ("slot", self.layout.has_slots)) if has]
        taken = self.attempt("take", kinds[choose(len(kinds))], 1 + choose(3))
        self.loose += [] if taken is None else taken.tolist()
        return None

    def take_one(self, choose: Choose) -> None:
        if len(self.loose) > MOST_KEPT:
            return self.give(choose)
        taken = self.attempt("take", "page" if self.layout.has_pages else "slot")
        if taken is not None:
            self.loose.append(int(taken))
        return None

    def retain(self, choose: Choose) -> None:
        handles = self.units(choose)
        if handles and len(self.loose) <= MOST_KEPT:
            self.attempt("retain", handles)
            self.loose += handles

    def give(self, choose: Choose) -> None:
        handles = self.some(choose, self.loose)
        if handles:
            self.attempt("give", handles[0] if len(handles) == 1 else handles)
            for handle in handles:
                self.loose.remove(handle)

    def pin(self, choose: Choose) -> None:
        handles = self.units(choose)
        if handles and len(self.pinned) <= MOST_KEPT:
            self.attempt("pin", handles)
            self.pinned += handles

    def unpin(self, choose: Choose) -> None:
        handles = self.some(choose, self.pinned)
        if handles:
            self.attempt("unpin", handles)
            for handle in handles:
                self.pinned.remove(handle)

    def units(self, choose: Choose) -> list[int]:
        """Handles of units that a random sequence holds, or that are loose."""
        if self.loose and choose(2):
            return self.some(choose, self.loose)[:1]
        for sequence in self.some(choose, self.sequences)[:1]:
            pages = [handle for handle in self.allocator.pages(sequence).tolist() if handle]
            units = pages + ([self.allocator.slot(sequence)] if self.layout.has_slots else [])
            return self.some(choose, units) if units else []
        return []

    def misuse(self, choose: Choose) -> None:
        """Stale, foreign and doubled handles are refused."""
        for handle in self.some(choose, self.dead)[:1]:
            self.refuse(StaleHandle, "extend", [handle])
            self.refuse(StaleHandle, "release", [handle])
            self.refuse(StaleHandle, "give", [handle])
        for handle in self.some(choose, self.sequences)[:1]:
            self.refuse(InvalidArgument, "extend", [handle, handle])
            self.refuse(StaleHandle, "give", [handle])
            self.refuse(StaleHandle, "drop", [handle])
            free = [h for h in self.allocator.pages(handle).tolist() if h and h not in self.loose]
            if free:
                self.refuse(StaleHandle, "give", free[:1])

    OPERATIONS = (
        "admit", "admit_prefix", "extend", "release", "retire", "fork", "reorder", "snapshot", "restore", "drop",
        "truncate", "release_front", "swap_out", "swap_in", "discard", "take", "take_one", "retain", "give", "pin",
        "unpin", "misuse",
    )  # fmt: skip

    def run(self, operation: str, choose: Choose, check: bool = True) -> None:
        getattr(self, operation)(choose)
        self.flush()
        if check:
            self.verify()

    # -- verifying -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        self.allocator.check()
        if not self.verify_bytes:
            return
        self.device.verify(self.allocator)
        table = self.allocator._ledger.table
        for handle, content in self.sequences.items():
            row = table.row(handle)
            assert int(table.length[row]) == len(content.tokens)
            self.verify_content(content, table.pages(row), int(table.slot[row]))
        for handle, content in self.snapshots.items():
            snapshot = self.allocator._ledger.snapshots[handle]
            self.verify_content(content, snapshot.pages, snapshot.slot)

    def verify_content(self, content: Content, pages: np.ndarray, slot: int) -> None:
        size = self.layout.page_tokens
        if self.layout.has_pages:
            assert len(pages) == -(-len(content.tokens) // size)
            for position in range(content.front * size, len(content.tokens)):
                found = self.device.read_token(int(pages[position // size]), position % size)
                assert found == content.tokens[position], f"token {position}"
            assert not pages[: content.front].any()
        if self.layout.has_slots and (self.zeroed or content.tokens):
            assert self.device.read_state(slot) == content.state

    def empty(self) -> None:
        """Lets go of everything; the allocator must be whole and empty again."""
        allocator = self.allocator
        if self.sequences:
            allocator.release(list(self.sequences))
        if self.snapshots:
            allocator.drop(list(self.snapshots))
        if self.swapped:
            allocator.discard(list(self.swapped))
        if self.loose:
            allocator.give(self.loose)
        if self.pinned:
            allocator.unpin(self.pinned)
        allocator.retire(1 << 40)
        allocator.check()
        stats = allocator.stats()
        assert stats.pages_live == stats.slots_live == stats.sequences == 0
        self.flush()
        assert not self.placed or allocator._space.events is None
