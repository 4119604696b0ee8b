"""The device never reads live host tables: it may be late by as much as it likes."""

from functools import partial

import numpy as np
import pytest

from avmp import backends
from avmp.cache_pool import CachePool
from avmp.layout import Layout
from avmp.options import Options
from avmp.uploads import RING_BUFFERS
from tests.chaos import ChaosMigration
from tests.late_device import LateBackend, LateQueue, copied

LAYOUT = Layout.from_unit_sizes(256, 1280, 48 * 1024, lane_count=2, page_tokens=4)


def late_pool(monkeypatch: pytest.MonkeyPatch, queue: LateQueue) -> CachePool:
    monkeypatch.setitem(backends.BACKENDS, "late", partial(LateBackend, queue))
    return CachePool(
        LAYOUT,
        device="cpu",
        max_rows=8,
        max_tokens_per_sequence=64,
        max_batch_tokens=256,
        backend="late",
        transport=queue,
        disturbance=ChaosMigration(11),
        options=Options(poison=True),
    )


def steps(pool: CachePool, queue: LateQueue) -> tuple[list[tuple[np.ndarray, ...]], list[tuple[np.ndarray, ...]]]:
    """Twelve steps without waiting: what each saw on the device when its turn came, and what it should have seen."""
    seen: list[tuple[np.ndarray, ...]] = []
    expected: list[tuple[np.ndarray, ...]] = []
    sequences = pool.admit([9, 2, 5])
    for step in range(12):
        if step:
            pool.extend(sequences)
        batch = pool.batch(sequences)
        space, rows = pool._space, pool._ids(sequences)
        table = pool._ledger.table
        host = (
            table.block_table[rows],
            table.length[rows],
            table.slot[rows],
            space.pages.physical,
            space.slots.physical,
        )
        expected.append(tuple(array.copy() for array in host))
        views = (batch.block_table, batch.seq_lens, batch.state_indices, batch.page_table, batch.slot_table)
        queue.put(lambda views=views: seen.append(tuple(copied(view) for view in views)))
        if step == 6:
            pool.release(sequences[2:])
            sequences = sequences[:2]
    queue.run()
    return seen, expected


def same(seen: list[tuple[np.ndarray, ...]], expected: list[tuple[np.ndarray, ...]]) -> bool:
    pairs = [(a, b) for left, right in zip(seen, expected, strict=True) for a, b in zip(left, right, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)


def test_steps_enqueued_ahead_read_their_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LateQueue()
    pool = late_pool(monkeypatch, queue)
    assert same(*steps(pool, queue))
    assert pool._uploader.launches > 2 * RING_BUFFERS


def test_a_ring_that_does_not_wait_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LateQueue(patient=False)
    try:
        equal = same(*steps(late_pool(monkeypatch, queue), queue))
    except IndexError:  # overwritten indices may point anywhere
        equal = False
    assert not equal


def test_a_flush_larger_than_the_staging_buffers_takes_several_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avmp.uploads.MOST_CHANGES", 7)
    queue = LateQueue()
    pool = late_pool(monkeypatch, queue)
    assert same(*steps(pool, queue))


def test_bytes_follow_their_owners_on_a_late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LateQueue()
    pool = late_pool(monkeypatch, queue)
    sequences = pool.admit([6, 6, 6])
    batch = pool.batch(sequences)
    units = pool.backend.units["slot"]

    def write() -> None:
        for index, slot in enumerate(batch.state_indices.tolist()):
            units[:, int(pool.tables.slot_table[slot])] = index + 1

    queue.put(write)
    for _ in range(5):  # every commit moves a random slot and page
        pool.extend(sequences)
        pool.batch(sequences)
    twin = pool.fork(int(sequences[1]))
    pool.flush()
    queue.run()
    mirror = pool.tables.slot_table
    found = [units[:, int(mirror[s])].unique().tolist() for s in pool._ledger.table.slot[pool._ids(sequences)].tolist()]
    assert found == [[1], [2], [3]]
    copy = int(pool._ledger.table.slot[pool._ids(twin)][0])
    assert units[:, int(mirror[copy])].unique().tolist() == [2]
