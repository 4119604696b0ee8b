"""Which id means what: pages beside kernel blocks, positions beside slots, virtual beside physical, padding."""

from __future__ import annotations

import numpy as np
import pytest

from avmp.effects import Launch
from avmp.errors import RowTooLong
from avmp.handles import ID_MASK
from avmp.layout import Layout
from avmp.options import Options
from tests.helpers import KIB, Whole, whole_allocators
from tests.serving import Serving

LAYOUT = Layout.from_unit_sizes(256, 5 * 256, 32 * KIB, page_tokens=4)


@pytest.fixture
def whole():
    yield from whole_allocators()


# -- pages and the smaller blocks of a kernel ----------------------------------------------------------------------


def carry_out(memory: np.ndarray, launches: list[Launch]) -> None:
    """Moves and copies of pages in ``memory``, ``[pages, 64]``."""
    for launch in launches:
        if launch.pool == "page":
            assert launch.operation in ("move", "copy")
            memory[launch.destinations] = memory[launch.sources]


def test_pages_of_64_tokens_read_as_kernel_blocks_of_16_give_back_every_token(whole: Whole):
    layout = Layout.from_unit_sizes(256, 5 * 256, 64 * KIB, page_tokens=64)
    allocator = whole(layout, max_tokens=1024, chaos=6)
    memory = np.zeros((layout.page_count, 64), dtype=np.int64)
    dense: dict[int, list[int]] = {int(handle): [] for handle in allocator.admit([0, 0, 0])}
    rng = np.random.default_rng(9)
    token = 0
    for _ in range(25):
        handles = list(dense)
        counts = rng.integers(1, 40, len(handles))
        allocator.extend(np.array(handles), counts)
        carry_out(memory, allocator.drain()[0])
        tables = allocator.batch(np.array(handles))
        physical = allocator._space.pages.physical.astype(np.int64)
        for row, handle in enumerate(handles):
            slots = tables.slot_mapping[tables.query_start_loc[row] : tables.query_start_loc[row + 1]]
            assert len(slots) == counts[row]
            for slot in slots.tolist():
                token += 1
                dense[handle].append(token)
                # The kernel's view of the same bytes: four blocks of 16 tokens in a row for each page.
                place = int(physical[slot // 64]) * 64 + slot % 64
                memory.reshape(-1, 16)[place // 16, place % 16] = token
        blocks = (physical[tables.block_table][:, :, None] * 4 + np.arange(4)).reshape(len(handles), -1)
        for row, handle in enumerate(handles):
            length = int(tables.seq_lens[row])
            gathered = memory.reshape(-1, 16)[blocks[row]].reshape(-1)[:length]
            assert gathered.tolist() == dense[handle]


# -- positions and state slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_tokens", "column"), [(128, 781), (2176, 45)])
def test_at_100096_tokens_the_column_follows_the_page_size_and_the_state_index_follows_no_position(
    page_tokens: int, column: int, whole: Whole
):
    layout = Layout.from_unit_sizes(256, 5 * 256, 512 * KIB, page_tokens=page_tokens)
    allocator = whole(layout, max_tokens=100_200, chaos=2, options=Options(debug=1))
    first = int(allocator.admit([100_096])[0])
    snapshot = allocator.snapshot(first)
    for handle in (first, int(allocator.admit([100_096], snapshot)[0])):
        pages = allocator.pages(handle) & ID_MASK
        assert len(pages) == column + 1 == layout.pages_per_sequence(100_096)
        offset = (100_096 - 1) % page_tokens
        assert allocator.slot_mapping(handle).tolist() == [pages[column] * page_tokens + offset]
        state = int(allocator.batch(handle).state_indices[0])
        assert state == allocator.slot(handle) & ID_MASK and 1 <= state <= 3  # three slots are taken in all
        allocator.extend(handle)
        assert int(allocator.batch(handle).state_indices[0]) == state


def test_a_column_beyond_the_row_is_refused_on_the_host(whole: Whole):
    layout = Layout.from_unit_sizes(256, 5 * 256, 512 * KIB, page_tokens=128)
    allocator = whole(layout, max_tokens=100_096)
    sequence = allocator.admit([100_000])
    allocator.extend(sequence, 96)
    for call in (lambda: allocator.extend(sequence), lambda: allocator.admit([100_097])):
        before = allocator.digest()
        with pytest.raises(RowTooLong, match="100097 tokens in one sequence, a row holds 100096"):
            call()
        assert allocator.digest() == before
    assert allocator.block_table(sequence).shape == (1, 782)


# -- virtual and physical ------------------------------------------------------------------------------------------


def test_every_table_that_a_kernel_reads_stays_as_it_is_while_everything_moves_below_it(whole: Whole):
    allocator = whole(LAYOUT, chaos=11)
    sequences = allocator.admit([30, 17, 9])
    tables = allocator.batch(sequences)
    held = [tables.block_table.copy(), tables.slot_mapping.copy(), tables.state_indices.copy()]
    handles = [allocator.pages(sequences[0]).tolist(), allocator.slot(sequences[1])]
    seen: list[set[bytes]] = [set(), set()]
    for _ in range(60):
        allocator.give(allocator.take("page", 3))
        for places, pool in zip(seen, allocator._space.pools, strict=True):
            places.add(pool.physical[pool.references > 0].tobytes())
        again = allocator.batch(sequences)
        assert (again.block_table == held[0]).all() and (again.state_indices == held[2]).all()
        assert (again.slot_mapping == held[1]).all()
        assert [allocator.pages(sequences[0]).tolist(), allocator.slot(sequences[1])] == handles
    assert len(seen[0]) > 20 and len(seen[1]) > 20


def test_a_table_read_as_physical_ids_is_wrong_after_the_first_disturbance(whole: Whole):
    """Guards the other tests: with the disturbance on, taking one kind of id for the other cannot go unnoticed."""
    allocator = whole(LAYOUT, chaos=1)
    model = Serving(allocator)
    sequence = model.admit(list(range(1, 31)))
    for _ in range(10):
        allocator.give(allocator.take("slot", 1))
    model.verify(sequence)
    pages = allocator.pages(sequence) & ID_MASK
    physical = allocator._space.pages.physical[pages]
    naive = [int(model.device.unit("page", int(page))[0]) for page in pages]
    assert naive != [1 + 4 * column for column in range(8)]
    assert sorted(set(physical.tolist())) != sorted(set(pages.tolist()))
    assert (np.diff(physical) != -1).any()  # nor is it merely the order of a fresh arena


# -- padding -------------------------------------------------------------------------------------------------------


def test_padding_names_the_null_units_whose_bytes_nobody_has(whole: Whole):
    allocator = whole(LAYOUT, chaos=4)
    model = Serving(allocator)
    sequences = [model.admit(list(range(1, 8 + row))) for row in range(3)]
    tables = allocator.batch(np.array(sequences), pad_to=8)
    assert tables.num_sequences == 3 and tables.first_valid_id == 1
    assert not tables.block_table[3:].any() and not tables.state_indices[3:].any() and not tables.seq_lens[3:].any()
    assert not tables.has_initial_state[3:].any()
    # Behind a row's own columns there is nothing either.
    for row, length in enumerate(tables.seq_lens[:3].tolist()):
        assert (tables.block_table[row] > 0).tolist() == [column < -(-length // 4) for column in range(16)]
    for pool, table in (("page", model.device.page_table), ("slot", model.device.slot_table)):
        assert table[0] == 0
        model.device.unit(pool, int(table[0]))[:] = 12345  # what a kernel that forgot its mask would do
    for sequence in sequences:
        model.verify(sequence)
    assert not any((pool.references[0], pool.loose[0]) != (0, 0) for pool in allocator._space.pools)


# -- the tables of a step ------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_asked_for(whole: Whole):
    allocator = whole(LAYOUT, chaos=5)
    sequences = allocator.admit([5, 0, 17, 4]).tolist()
    alone = {handle: allocator.batch(handle) for handle in sequences}
    for order in ([3, 0, 2, 1], [1, 2], [2, 1], [0, 1, 2, 3]):
        chosen = [sequences[index] for index in order]
        tables = allocator.batch(np.array(chosen))
        starts = tables.query_start_loc
        for row, handle in enumerate(chosen):
            single = alone[handle]
            assert (tables.block_table[row] == single.block_table[0]).all()
            assert tables.seq_lens[row] == single.seq_lens[0] and tables.state_indices[row] == single.state_indices[0]
            assert tables.slot_mapping[starts[row] : starts[row + 1]].tolist() == single.slot_mapping.tolist()
        assert tables.num_tokens == starts[-1] == sum(alone[handle].num_tokens for handle in chosen)
        assert tables.max_query_len == tables.max_seq_len == max(alone[handle].num_tokens for handle in chosen)


def test_query_lengths_are_the_tokens_added_since_the_step_before_however_often_one_asks(whole: Whole):
    allocator = whole(LAYOUT)
    sequence = allocator.admit([0])

    def queries() -> tuple[int, bool]:
        tables = allocator.batch(sequence)
        assert len(tables.slot_mapping) == tables.num_tokens
        return tables.num_tokens, bool(tables.has_initial_state[0])

    assert queries() == (0, False)
    allocator.extend(sequence, 7)  # a prompt in chunks
    assert queries() == queries() == (7, False)
    allocator.extend(sequence, 5)
    allocator.extend(sequence, 1)
    assert queries() == queries() == (6, True)
    allocator.extend(sequence, 0)
    assert queries() == (0, True)
    allocator.extend(sequence)
    allocator.fork(int(sequence[0]))
    assert queries() == (0, True)  # a fork ends what was pending
    tables = allocator.batch(sequence, query_lens=[9])
    assert tables.num_tokens == 9 and tables.slot_mapping[-1] == allocator.slot_mapping(sequence)[0]
