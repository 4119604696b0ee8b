"""How far the kernels of attention and KV reach: addresses alone, sizes of grids, and how often launches compile."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from avmp.errors import InvalidArgument
from avmp.kernels import (
    attention_launch,
    attention_reference,
    attention_tiles,
    fp8_formats,
    kv,
    kv_reference,
    paged_attention,
)
from avmp.kernels import attention_tuning as tuning
from avmp.kernels.launch import GRID_X_LIMIT, GRID_YZ_LIMIT
from tests.attention_problems import Shape, make_problem
from tests.count_compilations import compilations

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

MANY = 65_536 + 4_464
COUNTS = (1, 3, 16, 17, 1024)


# -- addresses -------------------------------------------------------------------------------------------------------
#
# Nothing but an address is computed, at numbers where 32 bits would wrap, in bytes or in elements. All numbers are
# given at run time: what a kernel knows when it is compiled is a Python integer in the interpreter, which never wraps.


@triton.jit
def address_kernel(a, b, c, d, out, first, second, third, FORMULA: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, b, c, d = tl.load(a + i), tl.load(b + i), tl.load(c + i), tl.load(d + i)
    if FORMULA == "cache":
        found = attention_tiles.token_offsets(a, b, c, first, second, third, 1)
    elif FORMULA == "query":
        found = attention_tiles.query_offsets(a, b, first, second)
    elif FORMULA == "new":
        found = kv.new_offsets(a, b, first, second, 1)
    elif FORMULA == "row":
        found = attention_tiles.row_offset(a, first)
    elif FORMULA == "part":
        found = paged_attention.part_places(a, b, c, d, first, second, third)
    elif FORMULA == "result":
        found = kv.result_offsets(a, b, first, second)
    else:
        found = paged_attention.first_tile(a, b, first, second)
    tl.store(out + i, found)


def addresses(formula: str, numbers: list[tuple[int, ...]], constants: tuple[int, ...]) -> list[int]:
    """What a formula gives for rows of up to four int32 numbers."""
    columns = torch.zeros(4, len(numbers), dtype=torch.int32)
    columns[: len(numbers[0])] = torch.tensor(numbers, dtype=torch.int64).T.int()
    out = torch.empty(len(numbers), dtype=torch.int64)
    address_kernel[(1,)](*columns, out, *constants, *[0] * (3 - len(constants)), formula, len(numbers))
    return out.tolist()


PAGE_STRIDES = {
    "an envelope of 1.4 MB": (716_800, 1024, 128),
    "one page a lane apart": (2**31 + 256, 1024, 128),
    "heads outermost": (2048, 128, 2**30),
    "tokens outermost": (2048, 2**28, 128),
}


@pytest.mark.parametrize("strides", PAGE_STRIDES)
def test_addresses_of_pages_tokens_and_heads(strides: str) -> None:
    page, token, head = PAGE_STRIDES[strides]
    crossing = [2**power // page + step for power in (30, 31, 32, 33) for step in (0, 1)]
    numbers = [(a, b, c) for a in (*crossing, 0, 2**31 - 1) for b, c in ((0, 0), (15, 7), (255, 63))]
    numbers = [*numbers, *numbers[:2]]
    expected = [a * page + b * token + c * head for a, b, c in numbers]
    assert any(one >= 2**32 for one in expected)
    assert addresses("cache", numbers, PAGE_STRIDES[strides]) == expected


@pytest.mark.parametrize("formula", ["query", "new"])
@pytest.mark.parametrize("strides", [(8192, 128), (2**31 + 64, 2**20), (128, 2**26)])
def test_addresses_of_queries_results_and_new_tokens(formula: str, strides: tuple[int, int]) -> None:
    """In q, in what attention writes, in the keys and values that are written into pages."""
    numbers = [(262_144, 0), (262_145, 63), (2**20, 7), (2**31 - 1, 127), (0, 127), (1, 32), (2, 33), (3, 0)]
    assert addresses(formula, numbers, strides) == [a * strides[0] + b * strides[1] for a, b in numbers]


@pytest.mark.parametrize("stride", [1, 8, 32_768, 2**31 - 1, 2**31 + 64])
def test_addresses_of_rows_of_tables(stride: int) -> None:
    """Of block tables, of slopes and scales by row, of a dense gather."""
    numbers = [(row,) for row in (0, 1, 2, 3, 65_535, 65_536, 2**20, 2**31 - 1)]
    assert addresses("row", numbers, (stride,)) == [row * stride for (row,) in numbers]


@pytest.mark.parametrize("shape", [(128, 8, 64), (8, 1, 2), (64, 8, 16)])
def test_addresses_of_parts_of_a_split(shape: tuple[int, int, int]) -> None:
    heads, queries, splits = shape
    rows = (0, 65_536, 2**31 // (heads * queries * splits), 2**32 // (heads * queries * splits) + 1)
    numbers = [
        (row, head, query, split)
        for row in rows
        for head, query, split in ((0, 0, 0), (heads - 1, queries - 1, splits - 1))
    ]
    expected = [((row * heads + head) * queries + query) * splits + split for row, head, query, split in numbers]
    assert max(expected) > 2**32
    assert addresses("part", numbers, shape) == expected


def test_addresses_of_what_is_gathered() -> None:
    numbers = [(0, 0), (2**31 // 1024 - 1, 7), (2**31 // 1024, 0), (2**22, 7), (2**22 + 1, 3), (2**31 - 1, 7), (1, 1)]
    numbers = [*numbers, (65_536, 2)]
    assert addresses("result", numbers, (8, 128)) == [(a * 8 + b) * 128 for a, b in numbers]


def test_tiles_of_rows_are_counted_where_tokens_times_heads_exceed_32_bits() -> None:
    numbers = [(0, 0), (2**26, 5), (2**26 - 1, 4), (2**27, 65_536)]
    assert addresses("tile", numbers, (64, 128)) == [token * 64 // 128 + row for token, row in numbers]


STRIDED = {
    "dense": torch.empty(3, 16, 2, 64),
    "heads before tokens": torch.empty(3, 2, 16, 64).transpose(1, 2),
    "a slice of 80": torch.empty(3, 16, 2, 80)[..., :64],
    "a slice of 73": torch.empty(3, 16, 2, 73)[..., 5:69],
    "a slice of 66": torch.empty(3, 16, 2, 66)[..., :64],
    "a slice of 68 in one head": torch.empty(3, 16, 1, 68)[..., :64],
    "an odd page": torch.empty(10_000).as_strided((3, 16, 2, 64), (2052, 128, 64, 1)),
    "one page of odd size": torch.empty(10_000).as_strided((1, 16, 2, 64), (2051, 128, 64, 1)),
    "one token": torch.empty(3, 1, 1, 8),
}


@pytest.mark.parametrize("name", STRIDED)
def test_the_hint_divides_every_offset(name: str) -> None:
    """Where it did not, wide loads would be misaligned; a larger power of two does not, up to the most that is told."""
    cache = STRIDED[name]
    places = itertools.product(*(range(size) for size in cache.shape[:3]))
    offsets = [sum(a * b for a, b in zip(place, cache.stride(), strict=False)) for place in places]
    hint = attention_launch.stride_hint(cache)
    assert hint & (hint - 1) == 0 and all(offset % hint == 0 for offset in offsets)
    assert hint == attention_launch.MOST_HINT or any(offset % (2 * hint) for offset in offsets)


@triton.jit
def tile_pages_kernel(
    table, page_table, out, begin, end, first_valid_id, PAGE: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr
):
    ids = attention_tiles.chunk_ids(table, page_table, begin, end, first_valid_id, PAGE, CHUNK, N)
    tl.store(out + tl.arange(0, N), attention_tiles.token_pages(ids, CHUNK, N))


@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "physical"])
@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize("page", [1, 8, 16, 17, 24, 48, 64, 256])
def test_each_token_of_a_tile_finds_its_page(page: int, keys: int, virtual: bool) -> None:
    """Whether ids are carried as scalars or as a tensor; null ids stay null, what lies behind the end is -1."""
    chunk = attention_launch.chunk_tokens(page, keys)
    table = torch.randperm(100, generator=torch.Generator().manual_seed(page)).int()
    page_table = torch.randperm(100, generator=torch.Generator().manual_seed(keys)).int() + 2**20
    page_table[table[1]] = 0
    for begin, end in ((0, 3 * keys), (5 * chunk, 5 * chunk + keys - 3), (7 * chunk, 7 * chunk + 1)):
        out = torch.empty(keys, dtype=torch.int32)
        tile_pages_kernel[(1,)](table, page_table if virtual else None, out, begin, end, 1, page, chunk, keys)
        for place, found in enumerate(out.tolist()):
            token = begin + place
            known = int(table[token // page]) if token // chunk * chunk < end else -1
            if virtual:
                known = int(page_table[known]) if known >= 1 else -1
            assert found == known, (token, begin, end)


@pytest.mark.parametrize("queries", [1, 12], ids=["decode", "prefill"])
@pytest.mark.parametrize("page", [1, 16, 17, 24, 48, 64, 256])
def test_one_id_is_read_for_each_chunk_of_a_row(monkeypatch: pytest.MonkeyPatch, page: int, queries: int) -> None:
    """And one entry of the page table: never for each token, and none behind the row's end."""
    shape = Shape(
        lens=(512 + 7,), queries=(queries,), heads=1, kv_heads=1, page_tokens=page, head_dim=16, head_dim_v=16
    )
    call = make_problem(shape).call
    tables = [call["block_table"], call["page_table"]]
    read = [0, 0]
    stock = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        addresses = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data).astype(bool)]
        for number, table in enumerate(tables):
            begin = table.data_ptr()
            read[number] += int(((addresses >= begin) & (addresses < begin + table.nbytes)).sum())
        return stock(self, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    paged_attention.paged_attention(**call, num_splits=1)
    sizes = tuning.Sizes(16, 16, 4, 4, tuning.INTERPRETER)
    keys = (tuning.decode_tiles(16, sizes) if queries == 1 else tuning.prefill_tiles(sizes)).keys
    chunks = -(-(512 + 7) // attention_launch.chunk_tokens(page, keys))
    assert read == [chunks, chunks]


# -- grids -----------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for kernels of a module; keeps the grid of each launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
        self.grids: dict[str, tuple[int, ...]] = {}
        for name in names:
            monkeypatch.setattr(module, name, SimpleNamespace())
            monkeypatch.setattr(module, name, _Recorded(self.grids, name))

    def fit(self, *counted: str) -> None:
        """Every grid is one that a GPU takes; the kernels ``counted`` have more programs than a second axis holds."""
        for name, (first, *others) in self.grids.items():
            assert first <= GRID_X_LIMIT and all(one <= GRID_YZ_LIMIT for one in others), (name, first, others)
        assert all(self.grids[name][0] > GRID_YZ_LIMIT for name in counted), self.grids


class _Recorded:
    def __init__(self, grids: dict[str, tuple[int, ...]], name: str) -> None:
        self.grids, self.name = grids, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids[self.name] = grid
        return lambda *args, **kwargs: None


def many_rows(queries: torch.Tensor, lens: torch.Tensor, heads: int = 1) -> dict[str, Any]:
    """Rows with these queries and contexts, all in one page of 16 tokens but for their tables."""
    g = torch.Generator().manual_seed(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
    caches = [torch.randn(9, 16, 1, 16, generator=g) for _ in range(2)]
    table = torch.randint(1, 9, (len(lens), 1), generator=g, dtype=torch.int32)
    return dict(
        q=torch.randn(int(starts[-1]), heads, 16, generator=g),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        seq_lens=lens.int(),
        query_start_loc=starts,
        scale=0.25,
        max_query_len=int(queries.max()),
        max_seq_len=int(lens.max()),
        return_lse=True,
    )


def test_more_rows_and_tokens_than_a_second_axis_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones(MANY, dtype=torch.int64)
    recorder = Recorder(monkeypatch, paged_attention, "decode_kernel", "merge_kernel", "prefill_kernel")
    paged_attention.paged_attention(**many_rows(one, one), num_splits=4)
    recorder.fit("decode_kernel", "merge_kernel")
    mixed = one.clone()
    mixed[7] = 40
    paged_attention.paged_attention(**many_rows(mixed, mixed, heads=2))
    recorder.fit("decode_kernel", "prefill_kernel")
    whole = torch.tensor([MANY * 128])
    paged_attention.paged_attention(**many_rows(whole, whole) | {"max_seq_len": int(whole[0])})
    recorder.fit("prefill_kernel")


def test_more_slots_and_rows_of_a_gather_than_a_second_axis_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, kv, "write_kv_kernel", "gather_kv_kernel")
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 16)
    cache, key = torch.zeros(2, 16, 1, 16), torch.zeros(MANY, 1, 16)
    kv.write_kv(key, key, cache, cache, torch.zeros(MANY, dtype=torch.int64))
    kv.gather_kv(cache, cache, torch.ones(MANY, 1, dtype=torch.int32), torch.ones(MANY).int(), max_seq_len=1)
    recorder.fit("write_kv_kernel", "gather_kv_kernel")


def test_a_gather_of_more_tiles_than_a_first_axis_holds_is_refused() -> None:
    """Whose bound on lengths is far above what there is: the result itself is small."""
    cache, rows = torch.zeros(2, 16, 1, 16), 8192
    table, lens = torch.ones(1, 1, dtype=torch.int32).expand(rows, 1), torch.zeros(rows, dtype=torch.int32)
    sums = torch.zeros(rows + 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="max_seq_len"):
        kv.gather_kv(cache, None, table, lens, max_seq_len=2**31 - 1, cu_seq_lens=sums, num_tokens=4)


def test_seventy_thousand_slots_are_written(program_order: str) -> None:
    pages = MANY // 16 + 2
    caches = [torch.zeros(pages, 16, 1, 16) for _ in range(4)]
    slots = torch.randperm((pages - 1) * 16, generator=torch.Generator().manual_seed(0))[:MANY] + 16
    key = torch.randn(MANY, 1, 16)
    kv.write_kv(key, -key, *caches[:2], slots)
    kv_reference.write_kv(key, -key, *caches[2:], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


@triton.jit
def row_of_tile_kernel(tiles, out, query_start_loc, rows, GROUP: tl.constexpr, M: tl.constexpr):
    i = tl.program_id(0)
    tl.store(out + i, paged_attention._row_of_tile(tl.load(tiles + i), query_start_loc, rows, GROUP, M))


@pytest.mark.parametrize("group", [1, 8])
def test_tiles_find_their_row_among_seventy_thousand(group: int) -> None:
    """Most rows have one token, some hundreds, some none."""
    queries = torch.ones(MANY, dtype=torch.int64)
    queries[::1000], queries[5::500] = 700, 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)])
    firsts = starts[:-1] * group // 128 + torch.arange(MANY)
    last = int(starts[-1]) * group // 128 + MANY - 1
    tiles = torch.cat([torch.tensor([0, 1, 65_535, 65_536, last]), torch.randint(0, last, (25,))]).int()
    out = torch.empty_like(tiles)
    row_of_tile_kernel[(len(tiles),)](tiles, out, starts.int(), MANY, group, 128)
    assert torch.equal(out.long(), torch.searchsorted(firsts, tiles.long(), right=True) - 1)


def nearly_all_empty(lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and contexts of MANY rows, of which the last ones have something: an empty row costs a millisecond."""
    queries, contexts = torch.zeros(MANY, dtype=torch.int64), torch.zeros(MANY, dtype=torch.int64)
    queries[-len(lens) :] = 1
    contexts[-len(lens) :] = torch.tensor(lens)
    return queries, contexts


@pytest.mark.slow
def test_rows_beyond_a_second_axis_are_decoded() -> None:
    call = many_rows(*nearly_all_empty((16, 1, 9, 0, 5)), heads=2)
    found = paged_attention.paged_attention(**call, num_splits=1)
    for mine, theirs in zip(found, attention_reference.paged_attention(**call), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_seventy_thousand_tokens_are_prefilled() -> None:
    """In rows of which each query sees itself and the seven tokens before it."""
    lens = torch.tensor([MANY - 21, 20, 1])
    call = many_rows(lens, lens) | {"window": 8, "max_seq_len": MANY}
    columns = -(-MANY // 16)
    call["block_table"] = torch.randint(1, 9, (3, columns), dtype=torch.int32)
    found = paged_attention.paged_attention(**call)
    for mine, theirs in zip(found, attention_reference.paged_attention(**call), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- compilations ----------------------------------------------------------------------------------------------------

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
MULTIPROCESSORS = 132
CONTEXTS = (*COUNTS, 131_072)


def sweep_attention() -> None:
    """All launches of attention over batch sizes, contexts, new tokens, widths and places of tables."""
    _on_an_idle_gpu(paged_attention)
    caches = [torch.empty(64, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    for rows, context, new in itertools.product(COUNTS, CONTEXTS, COUNTS):
        q = torch.empty(rows * new if new < 1024 else 1024, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        table = torch.ones(rows + 1, max(context // PAGE, 1) + context % 3, dtype=torch.int32)[1:]
        numbers = torch.zeros(2 * rows + 3, dtype=torch.int32)[context % 2 :]
        paged_attention.paged_attention(
            q,
            *caches,
            table,
            numbers[:rows],
            numbers[rows : 2 * rows + 1],
            scale=0.1,
            max_query_len=new,
            max_seq_len=context,
            page_table=torch.zeros(200 + rows, dtype=torch.int32)[rows % 2 :],
            first_valid_id=1 + rows % 2,
            window=None if context % 2 else (-1, 0),
            return_lse=True,
        )


def sweep_kv() -> None:
    """Writing and gathering, over counts of tokens, rows, lengths, and places of tables."""
    _on_an_idle_gpu(kv)
    caches = [torch.empty(64, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    for rows, count in itertools.product(COUNTS, COUNTS):
        new = torch.empty(count, KV_HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16).split(HEAD_DIM, dim=2)
        tables: dict[str, Any] = dict(page_table=torch.zeros(100 + rows, dtype=torch.int32)[rows % 2 :])
        tables["first_valid_id"] = rows % 3
        kv.write_kv(*new, *caches, torch.zeros(count + 1, dtype=torch.int64)[count % 2 :][:count], **tables)
        block_table = torch.zeros(rows + 1, count, dtype=torch.int32)[1:]
        lens, sums = torch.zeros(2 * rows + 2, dtype=torch.int32)[rows % 2 :].split([rows, rows + 2 - rows % 2])
        kv.gather_kv(*caches, block_table, lens, max_seq_len=count, **tables)
        kv.gather_kv(
            *caches, block_table, lens, max_seq_len=count, cu_seq_lens=sums[: rows + 1], num_tokens=count, **tables
        )


def _on_an_idle_gpu(module: Any) -> None:
    """As launchers decide on one with MULTIPROCESSORS; nothing is launched, so that no tensor has to lie there."""
    module.require_runnable = lambda tensor: None
    if hasattr(module, "multiprocessors"):
        module.multiprocessors = lambda tensor: MULTIPROCESSORS


def decode_variants() -> set[tuple[int, int]]:
    """Rows of a tile and splits, which are all that decode is compiled for beside what a model decides."""
    group, found = QUERY_HEADS // KV_HEADS, set()
    sizes = tuning.Sizes(HEAD_DIM, HEAD_DIM, 2, 2, tuning.INTERPRETER)
    for rows, context, new in itertools.product(COUNTS, CONTEXTS, COUNTS):
        if rows > 1 or new <= tuning.MOST_DECODE_QUERIES:
            most = group * min(new, tuning.MOST_DECODE_QUERIES)
            tile = tuning.decode_tiles(triton.next_power_of_2(most), sizes).rows
            programs = rows * KV_HEADS * -(-most // tile)
            aim = tuning.PROGRAMS_PER_MULTIPROCESSOR * MULTIPROCESSORS
            found.add((tile, tuning.split_count(programs, context, aim)))
    return found


def sweep() -> None:
    """Both."""
    sweep_attention()
    sweep_kv()


def test_launches_compile_once_for_each_tile_and_number_of_splits_and_for_no_count() -> None:
    """Whatever the batch: decode for 3 tiles by 7 numbers of splits, merge for 6, all others once."""
    variants = decode_variants()
    splits = {splits for _, splits in variants}
    assert splits <= {1 << power for power in range(7)} and {tile for tile, _ in variants} <= {16, 32, 64}
    assert len(variants) == 9
    assert compilations("tests.test_attention_limits:sweep") == {
        "decode_kernel": len(variants),
        "merge_kernel": len(splits - {1}),
        "prefill_kernel": 1,
        "write_kv_kernel": 1,
        "gather_kv_kernel": 2,  # dense and ragged
    }


# -- what the hardware decodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "hip", "capability", "expected"),
    [
        (torch.float8_e4m3fn, None, (9, 0), fp8_formats.NATIVE_E4M3),
        (torch.float8_e4m3fn, None, (8, 9), fp8_formats.NATIVE_E4M3),
        (torch.float8_e4m3fn, None, (8, 6), fp8_formats.E4M3),
        (torch.float8_e4m3fn, "6.4", (9, 4), fp8_formats.E4M3),
        (torch.float8_e5m2, None, (9, 0), fp8_formats.E5M2),
        (torch.bfloat16, None, (9, 0), fp8_formats.PLAIN),
    ],
)
def test_who_decodes(monkeypatch: pytest.MonkeyPatch, dtype: Any, hip: Any, capability: Any, expected: int) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache: Any = SimpleNamespace(dtype=dtype, is_cuda=True, device=None)
    assert fp8_formats.decoding(cache) == expected


def test_the_hardware_s_decoding_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(lens=(70, 9), queries=(1, 12), dtype=torch.bfloat16, fp8="e4m3", scales="head")
    call = make_problem(shape).call
    expected = paged_attention.paged_attention(**call)
    monkeypatch.setattr(attention_launch, "decoding", lambda cache: fp8_formats.NATIVE_E4M3)
    for mine, theirs in zip(paged_attention.paged_attention(**call), expected, strict=True):
        assert torch.equal(mine, theirs)
