"""The build that checks: each kind of wrong id is found, by both implementations, and named the same; nothing else is;
and where nobody asks for checks nothing is launched for them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from avmp import bounds
from avmp.bounds import use_bounds_checks, wanted
from avmp.cache_pool import CachePool
from avmp.effects import Launch
from avmp.errors import AvmpError, Inconsistent, InvalidArgument
from avmp.kernels import bounds as kernels
from avmp.kernels import bounds_reference, tuning
from avmp.kernels.bounds_reference import ANY_NUMBER, NOTHING_FOUND
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.count_compilations import compilations
from tests.driver import Driver
from tests.test_cache_pool_machine import PoolDriver
from tests.test_machine import LAYOUTS

pytestmark = pytest.mark.usefixtures("interpreter")

BACKENDS = ("torch", "triton")


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- the search ------------------------------------------------------------------------------------------------------


def plainly(ids: torch.Tensor, low: int, high: int, **given: Any) -> int:
    """The same by loops."""
    first, divisor, table = given["first_valid_id"], given["divisor"], given.get("page_table")
    width = ids.shape[1]
    for row in range(len(ids)):
        begin = int(given["begins"][row]) if "begins" in given else 0
        end = int(given["ends"][row]) if "ends" in given else width
        for column in range(width + 1):
            outside = (column == 0 and begin < 0) or (column == width and end > width)
            bad = outside and end > begin
            if not bad and column < width and begin <= column < end:
                value = int(ids[row, column])
                number = value // divisor
                if value < first * divisor:
                    bad = given["null_is_bad"]
                elif table is None:
                    bad = not low <= number < high
                else:
                    bad = number >= len(table) or int(table[number]) < first or not low <= int(table[number]) < high
            if bad:
                return row * (width + 1) + column
    return NOTHING_FOUND


def problem(seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """A table of ids of which some may be bad; the rows of a wider tensor."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = rng.randrange(6), rng.randrange(7)
    ids = torch.randint(-2, 14, (rows, width + 2), generator=generator)[:, :width]
    ids = ids.clamp(1, 9) if rng.random() < 0.6 else ids
    given: dict[str, Any] = dict(low=rng.randrange(3), high=rng.randrange(8, 14), first_valid_id=rng.randrange(3))
    given |= dict(divisor=rng.choice([1, 1, 3]), null_is_bad=rng.random() < 0.5)
    if rng.random() < 0.5:
        given["page_table"] = torch.randint(0, 12, (12,), generator=generator).int()
    if rng.random() < 0.7:
        given["begins"] = torch.randint(-1 if rng.random() < 0.2 else 0, 4, (rows,), generator=generator)
    if rng.random() < 0.7:
        given["ends"] = torch.randint(0, width + 1 + (rng.random() < 0.2), (rows,), generator=generator)
    return ids.to(rng.choice([torch.int32, torch.int64])), given


def test_the_first_bad_id_is_found_in_any_order(program_order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BOUNDS_BLOCK_INTERPRETED", 8)  # several programs
    monkeypatch.setattr(tuning, "BOUNDS_PROGRAMS", 3)  # some of which have several turns
    found = []
    for seed in range(80):
        ids, given = problem(seed)
        found.append(plainly(ids, **given))
        assert kernels.first_bad_id(ids, **given) == bounds_reference.first_bad_id(ids, **given) == found[-1], seed
    assert 20 < found.count(NOTHING_FOUND) < 60


@pytest.mark.parametrize("module", [kernels, bounds_reference], ids=BACKENDS[::-1])
def test_any_number_can_be_asked_for(module: Any) -> None:
    numbers = torch.tensor([[0], [5], [-(2**31)], [-1]])
    assert module.first_bad_id(numbers, low=0, high=6, first_valid_id=ANY_NUMBER) == 4
    assert module.first_bad_id(numbers[:2], low=0, high=6, first_valid_id=ANY_NUMBER) == NOTHING_FOUND
    for wrong, given in (
        (numbers[0], {}),
        (numbers.float(), {}),
        (torch.zeros(2, 4, dtype=torch.int32)[:, ::2], {}),
        (numbers, {"begins": torch.zeros(3, dtype=torch.int64)}),
        (numbers, {"ends": torch.zeros(4, dtype=torch.int32)}),
        (numbers, {"page_table": numbers}),
        (numbers, {"divisor": 0}),
    ):
        with pytest.raises(InvalidArgument):
            module.first_bad_id(wrong, low=0, high=6, **given)


@pytest.mark.parametrize("module", [kernels, bounds_reference], ids=BACKENDS[::-1])
def test_rows_beyond_2_to_the_31_elements(module: Any) -> None:
    """Real memory, of which the system gives only the pages that are touched."""
    stride = 2**30 + 4
    ids = torch.empty(2 * stride + 4, dtype=torch.int32).as_strided((3, 3), (stride, 1))
    ids.copy_(torch.tensor([[1, 2, 3], [1, 1, 1], [3, 2, 7]]))
    assert module.first_bad_id(ids, low=1, high=7) == 2 * 4 + 2


def test_more_rows_than_a_grid_s_second_axis_has_programs(program_order: str) -> None:
    slots = torch.arange(1, 65_537 * 4)
    slots[-3] = 2**40
    assert kernels.first_bad_id(slots[:, None], low=0, high=2**31 - 1, divisor=4) == 2 * (len(slots) - 3)


def sweep_sizes() -> None:
    for rows in (1, 3, 16, 17, 1024):
        ids = torch.ones(rows, 16 + rows % 2, dtype=torch.int32)
        columns = torch.zeros(2000, dtype=torch.int64)[rows % 3 :][:rows]
        table = torch.zeros(1200, dtype=torch.int32)[rows % 5 :][: rows + 1]
        given: dict[str, Any] = dict(low=rows % 2, high=rows, divisor=rows, first_valid_id=rows % 2)
        kernels.first_bad_id(ids, begins=columns, ends=columns, page_table=table, null_is_bad=True, **given)
        kernels.first_bad_id(columns[:, None], page_table=table, **given)


def test_no_size_leads_to_a_compilation() -> None:
    assert compilations("tests.test_bounds:sweep_sizes") == {"first_bad_id_kernel": 2}


# -- what is said ----------------------------------------------------------------------------------------------------

TABLE = int32(0, 9, 5, 0, 7, 3, 12)
"""Virtual page 3 is nobody's; physical pages 4 to 9 are owned, of 10: page 5 lies outside, page 6 beyond all."""

LENGTHS, STARTS = int32(5, 0, 9), int32(0, 1, 1, 4)  # pages of 4 tokens; one, no and three query tokens


def attention(
    cells: list[list[int]], lengths: torch.Tensor = LENGTHS, starts: torch.Tensor = STARTS, **more: Any
) -> Any:
    given = dict(page_tokens=4, num_pages=10, num_tokens=4, page_table=TABLE, limits=(4, 10)) | more
    return lambda backend: bounds.check_attention(
        "paged_attention", int32(*cells).view(-1, 3), lengths, starts, backend=backend, **given
    )


def gather(cells: list[list[int]], lengths: torch.Tensor = LENGTHS, **more: Any) -> Any:
    given = dict(page_tokens=4, num_pages=10, page_table=TABLE, limits=(4, 10)) | more
    return lambda backend: bounds.check_gather("gather_kv", int32(*cells), lengths, backend=backend, **given)


def write(slots: list[int], **more: Any) -> Any:
    given = dict(page_tokens=4, num_pages=10, page_table=TABLE, limits=(4, 10)) | more
    return lambda backend: bounds.check_slot_mapping("write_kv", torch.tensor(slots).long(), backend=backend, **given)


def state(indices: Any, **more: Any) -> Any:
    given = dict(num_slots=10, slot_table=TABLE, limits=(4, 10)) | more
    return lambda backend: bounds.check_state_indices("update", torch.tensor(indices), backend=backend, **given)


def writes(sources: Any, destinations: Any, counts: list[int]) -> Any:
    ids = [None if one is None else torch.tensor(one) for one in (sources, destinations)]
    return lambda backend: bounds.check_state_writes("update", *ids, torch.tensor(counts), slot_table=TABLE)


LANES = torch.zeros(2, 10 * 256, dtype=torch.uint8)


def copy(sources: list[int] | None, destinations: list[int] | None, **more: Any) -> Any:
    lists = {"sources": sources, "destinations": destinations}
    ids = {name: torch.tensor(one, dtype=torch.int64) for name, one in lists.items() if one is not None}
    return lambda backend: bounds.check_units("copy_units", LANES, 256, backend=backend, **ids, **more)


def move(moves: list[list[int]], **more: Any) -> Any:
    return lambda backend: bounds.check_moves("migrate", LANES, 256, int32(*moves), backend=backend, **more)


def change(changes: list[list[int]]) -> Any:
    return lambda backend: bounds.check_table_changes("changes", torch.zeros(9).int(), int32(*changes), backend=backend)


NOBODY = " is owned by nobody (the page table has 0 for it): freed, or never handed out"
WANTED = ", where a page has to be read: expected an id of 1 or more"
GOOD = [[1, 2, 2**30], [-7, 2**30, 2**30], [4, 1, 2]]  # behind a row's pages anything may stand
FOUND = {
    "virtual page beyond the table": (
        attention([[1, 2**31 - 1, 0], *GOOD[1:]]),  # whoever looks there for a physical page does not come back
        InvalidArgument,
        "paged_attention: row 0: block_table[0, 1] = 2147483647: page 2147483647 is outside the pool, which has 1 to 6",
    ),
    "page of nobody": (
        attention([*GOOD[:2], [4, 3, 2]]),
        Inconsistent,
        "paged_attention: row 2: block_table[2, 1] = 3: page 3" + NOBODY,
    ),
    "page outside the extent": (
        attention([*GOOD[:2], [4, 1, 5]]),
        Inconsistent,
        "paged_attention: row 2: block_table[2, 2] = 5: page 5 lies at 3, which the pool does not own: it owns 4 to 9",
    ),
    "page table that leads out of the cache": (
        attention([*GOOD[:2], [6, 1, 5]], limits=None),
        Inconsistent,
        "paged_attention: row 2: block_table[2, 0] = 6: page 6 lies at 12, which the pool does not own: it owns 1 to 9",
    ),
    "no page where one is read": (
        attention([*GOOD[:2], [4, 0, 2]]),
        InvalidArgument,
        "paged_attention: row 2: block_table[2, 1] = 0 is null" + WANTED,
    ),
    "no page inside the window": (
        attention([*GOOD[:2], [0, 1, -1]], left=2),
        InvalidArgument,
        "paged_attention: row 2: block_table[2, 2] = -1 is null" + WANTED,
    ),
    "physical page outside the cache": (
        attention([[9, 10, 0], *GOOD[1:]], page_table=None),
        InvalidArgument,
        "paged_attention: row 0: block_table[0, 1] = 10: page 10 is outside the pool, which has 1 to 9",
    ),
    "physical page outside the extent": (
        attention([[9, 3, 0], *GOOD[1:]], page_table=None),
        Inconsistent,
        "paged_attention: row 0: block_table[0, 1] = 3: page 3, which the pool does not own: it owns 4 to 9",
    ),
    "row longer than its table": (
        attention(GOOD, int32(5, 0, 13)),
        InvalidArgument,
        "paged_attention: row 2 reads columns 0 to 3 of block_table: it has 3 columns",
    ),
    "query tokens that are not there": (
        attention(GOOD, LENGTHS, int32(0, 1, 1, 5)),
        InvalidArgument,
        "paged_attention: query_start_loc[3] = 5: expected 0 to 4, there are 4 tokens",
    ),
    "query tokens that go back": (
        attention(GOOD, LENGTHS, int32(0, 3, 2, 4)),
        InvalidArgument,
        "paged_attention: query_start_loc[2] = 2 is less than 3 before it: expected running sums",
    ),
    "more query tokens than a row may have": (
        attention(GOOD, max_query_len=2),
        InvalidArgument,
        "paged_attention: row 2 has 3 tokens by query_start_loc: expected at most 2, as max_query_len says",
    ),
    "a longer row than there may be": (
        gather(GOOD, max_seq_len=8),
        InvalidArgument,
        "gather_kv: seq_lens[2] = 9: expected 0 to 8, there are at most 8 in a row",
    ),
    "gathering from before a row": (
        gather(GOOD, starts=int32(0, 0, -1)),
        InvalidArgument,
        "gather_kv: row 2 reads columns -1 to 1 of block_table: it has 3 columns",
    ),
    "gathering a page of nobody": (
        gather([*GOOD[:2], [0, 3, 2]]),
        Inconsistent,
        "gather_kv: row 2: block_table[2, 1] = 3: page 3" + NOBODY,
    ),
    "token written outside the pool": (
        write([4, 17, -1, 0, 28]),
        InvalidArgument,
        "write_kv: row 4: slot_mapping[4] = 28: page 7 is outside the pool, which has 1 to 6",
    ),
    "token written to nobody's page": (
        write([4, 15, 28]),
        Inconsistent,
        "write_kv: row 1: slot_mapping[1] = 15: page 3" + NOBODY,
    ),
    "token written twice": (
        write([4, 0, 11, 0, -1, 11], distinct=True),
        InvalidArgument,
        "write_kv: tokens 2 and 5 both write place 23: expected each once",
    ),
    "state written twice": (
        writes([1, 0, 4, 0, 1], None, [1, 1, 1, 1, 2]),
        InvalidArgument,
        "update: rows 0 and 4 both write slot 9: expected each once",
    ),
    "destination written twice": (
        writes([1, 2, 4], [[1, 6], [2, 2], [4, 5]], [1, 2, 2]),
        InvalidArgument,
        "update: rows 1 and 1 both write slot 5: expected each once",
    ),
    "state of nobody": (
        state([1, 0, -1, 3]),
        Inconsistent,
        "update: row 3: state_indices[3] = 3: slot 3" + NOBODY,
    ),
    "state of the second token": (
        state([[1, 2], [4, 70]], name="destination_indices"),
        InvalidArgument,
        "update: row 1: destination_indices[1, 1] = 70: slot 70 is outside the pool, which has 1 to 6",
    ),
    "state where 0 is data": (
        state([0, 9, 10], slot_table=None, limits=None, first_valid_id=0),
        InvalidArgument,
        "update: row 2: state_indices[2] = 10: slot 10 is outside the pool, which has 0 to 9",
    ),
    "unit outside the arena": (
        copy([1, 2], [3, 10]),
        InvalidArgument,
        "copy_units: row 1: destinations[1] = 10: unit 10 is outside the pool, which has 0 to 9",
    ),
    "unit in the null area": (
        copy(None, [5, 1], limits=(2, 10)),
        Inconsistent,
        "copy_units: row 1: destinations[1] = 1: unit 1, which the pool does not own: it owns 2 to 9",
    ),
    "unit written twice": (
        copy([1, 2, 8, 3], [5, 6, 7, 6]),
        InvalidArgument,
        "copy_units: pairs 1 and 3 both write unit 6: expected each once",
    ),
    "unit read and written": (
        copy([1, 5, 8], [4, 6, 5]),
        InvalidArgument,
        "copy_units: pair 2 writes unit 5, which pair 1 reads: expected disjoint sources and destinations",
    ),
    "virtual units that are the same": (
        copy([1, 2], [2, 4], page_table=TABLE),
        InvalidArgument,
        "copy_units: pair 0 writes unit 5, which pair 1 reads: expected disjoint sources and destinations",
    ),
    "move outside the arena": (
        move([[1, 2, 99], [3, 44, 99]], count=2),
        InvalidArgument,
        "migrate: row 1: destinations[1] = 44: unit 44 is outside the pool, which has 0 to 9",
    ),
    "more moves than are listed": (
        move([[1], [3]], device_count=int32(2)),
        InvalidArgument,
        "migrate: device_count[0] = 2: expected 0 to 1, there are 1 moves",
    ),
    "word outside the tables": (
        change([[3, 9, 4], [1, 1, 1]]),
        InvalidArgument,
        "changes: changes[1] = 9: expected 0 to 8, there are tables of 9 words",
    ),
    "word changed twice": (
        change([[3, 5, 3], [1, 1, 1]]),
        InvalidArgument,
        "changes: changes 0 and 2 both write word 3: expected each once",
    ),
}
PASSED = {
    "pages that are read": attention(GOOD),
    "what no window sees": attention([*GOOD[:2], [0, 1, 2]], left=2),
    "what was given up in front of a row": attention([[0, 2, 0], [0, 0, 0], [-1, 0, 2]]),
    "rows all of which was given up": attention([[0, 0, 3], [0, 0, 0], [0, -1, 0]], left=2),
    "tokens written once": write([4, 0, 11, 0, -1, 10], distinct=True),
    "states written once": writes([1, 0, 1, 4], None, [1, 2, 0, 1]),
    "columns that no token reaches": writes([[1, 2], [4, 4], [4, 1]], None, [2, 1, 0]),
    "rows without a slot": writes([0, 1], [[4], [4]], [1, 1]),
    "rows without queries": attention([[1, 2, 0], [3, 3, 3], [4, 1, 2]], int32(5, 12, 9)),
    "rows without a context": attention([[9, 9, 9]], int32(0), int32(0, 4)),
    "physical pages": attention([[9, 8, 0], [0, 0, 0], [4, 5, 6]], page_table=None),
    "block 0 of others": attention([[0, 1, 0], [0, 0, 0], [2, 3, 9]], page_table=None, limits=None, first_valid_id=0),
    "no rows": lambda backend: attention([], int32(), int32(0), num_tokens=0)(backend),
    "gathered nulls": gather([*GOOD[:2], [0, -1, 2]], starts=int32(0, 0, 3)),
    "padding": write([4, -1, 3, 0, -(2**31), 11]),
    "slot 0 of others": write([0, 39], page_table=None, limits=None, first_valid_id=0),
    "no tokens": write([]),
    "padded states": state([[1, 0], [-1, 4]]),
    "copies": copy([1, 1, -1, 6, 9], [4, 5, 1, 6, -1]),
    "zeroing": copy(None, [4, 5, -1]),
    "moves that do not count": move([[1, 2, 99], [3, 4, 99]], device_count=int32(2)),
    "changes": change([[3, 0, 8], [1, 1, 1]]),
    "no changes": change([[], []]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FOUND)
def test_what_is_wrong_is_named(name: str, backend: str) -> None:
    check, error, message = FOUND[name]
    with pytest.raises(error) as caught:
        check(backend)
    assert str(caught.value) == message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PASSED)
def test_what_is_right_passes(name: str, backend: str) -> None:
    PASSED[name](backend)


# -- where it is asked for -------------------------------------------------------------------------------------------


def test_checks_are_wanted_inside_the_context_and_by_a_batch_with_limits() -> None:
    assert not wanted()
    with use_bounds_checks():
        assert wanted()
        with use_bounds_checks():
            pass
        assert wanted()
    assert not wanted() and wanted(bounds.Limits((1, 2), (1, 2)))


def pool_of(debug: int, backend: str = "torch") -> CachePool:
    layout, options = LAYOUTS["slot of five pages"], Options(debug=debug)
    return CachePool(layout, device="cpu", max_tokens_per_sequence=32, options=options, backend=backend)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend of each search from now on."""
    seen: list[str] = []
    implementation = bounds.implementation

    def counted(operation: str, tensor: torch.Tensor, backend: str | None = None) -> Any:
        assert operation == "first_bad_id"
        seen.append(str(backend))
        return implementation(operation, tensor, backend)

    monkeypatch.setattr(bounds, "implementation", counted)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("debug", [0, 1, 2])
def test_a_pool_checks_each_step_at_debug_2_only(debug: int, backend: str, searches: list[str]) -> None:
    pool = pool_of(debug, backend)
    batch = pool.batch(pool.admit([5, 9]), pad_to=4)
    pages, slots, layout = *pool._space.pools, pool.layout
    limits = (
        (layout.page_count - pages.extent, layout.page_count),
        (layout.first_slot, layout.first_slot + slots.extent),
    )
    assert batch.limits == (limits if debug == 2 else None)
    pool.fork(int(pool.admit([0])[0]))
    pool.flush()
    assert searches == ([backend] * 3 if debug == 2 else [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_an_engine_got_wrong_are_found_by_the_limits_of_the_batch(backend: str) -> None:
    pool = pool_of(2, backend)
    layout, batch = pool.layout, pool.batch(pool.admit([9, 5]))
    assert batch.limits is not None
    known: dict[str, Any] = dict(page_tokens=layout.page_tokens, num_pages=layout.page_count, backend=backend)
    tables = batch.block_table, batch.seq_lens, batch.query_start_loc
    known |= dict(num_tokens=batch.num_tokens, limits=batch.limits.pages)
    bounds.check_attention("decode", *tables, page_table=batch.page_table, **known)
    bounds.check_attention("decode", batch.physical().block_table, *tables[1:], **known)
    with pytest.raises(Inconsistent, match=r"decode: row 0: block_table\[0, 0\]"):  # virtual ids taken for physical
        bounds.check_attention("decode", *tables, **known)
    stale = int(batch.block_table[1, 0])
    batch.page_table[stale] = 0
    with pytest.raises(
        Inconsistent, match=rf"decode: row 1: block_table\[1, 0\] = {stale}: page {stale} is owned by nobody"
    ):
        bounds.check_attention("decode", *tables, page_table=batch.page_table, **known)


@pytest.mark.parametrize("table", ["block_table", "slot_mapping", "state_indices"])
def test_a_pool_whose_tables_go_wrong_says_so_before_a_kernel_sees_them(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(2)
    sequences = pool.admit([9, 5])
    changes_of_batch = pool.tables.changes_of_batch

    def wrong(*arguments: Any) -> Any:
        changes = changes_of_batch(*arguments)
        begin = pool.tables.begin[table]
        return [*changes, (np.array([begin]), np.array([10_000], dtype=np.int32))]

    pool.batch(sequences)
    pool.extend(sequences)
    monkeypatch.setattr(pool.tables, "changes_of_batch", wrong)
    with pytest.raises(InvalidArgument, match=rf"batch: row 0: {table}\[0(, 0)?\] = 10000: .* is outside the pool"):
        pool.batch(sequences)


@pytest.mark.parametrize("operation", ["zero", "poison", "copy", "move", "swap_out", "swap_in"])
def test_no_effect_reaches_the_null_area(operation: Any) -> None:
    pool = pool_of(2)
    layout, before = pool.layout, pool.lanes.clone()
    good, null = np.array([layout.page_count - 1]), np.array([layout.first_page - 1])
    sources = null if operation in ("copy", "move", "swap_out") else good
    launch = Launch(operation, "page", sources, good if sources is null else null)
    with pytest.raises(Inconsistent, match=rf"{operation}: .*\[0\] = {null[0]}: the pages of this arena are "):
        pool._launch(launch)
    assert torch.equal(pool.lanes, before)


class CheckedDriver(PoolDriver):
    """Everything is checked, on the backend of the class."""

    backend = "torch"

    @classmethod
    def make_allocator(cls, *arguments: Any, **keywords: Any) -> Any:
        return PoolDriver.make_allocator(*arguments, backend=cls.backend, **keywords)


class CheckedKernelDriver(CheckedDriver):
    backend = "triton"


@pytest.mark.parametrize(
    ("driver_class", "operations"), [(CheckedDriver, 150), (CheckedKernelDriver, 30)], ids=["torch", "triton"]
)
def test_pools_that_move_everything_about_pass_all_checks(
    driver_class: type[CheckedDriver], operations: int, searches: list[str]
) -> None:
    options = Options(debug=2, poison=True, events=True, zero_pages=True)
    driver = driver_class(LAYOUTS["sizes that do not divide"], max_tokens=40, chaos_seed=5, options=options)
    rng = random.Random(11)
    for _ in range(operations):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    driver.empty()
    assert len(searches) > 10 and isinstance(driver.allocator._space.disturbance, ChaosMigration)


def test_errors_are_those_of_the_library() -> None:
    assert all(issubclass(error, AvmpError) for _, error, _ in FOUND.values())
