"""What writing and gathering keys and values refuse, and what they do at the edges of what they accept."""

import pytest
import torch

import avmp
from avmp.backends import load
from avmp.errors import InvalidArgument, Unsupported
from tests.state_problems import poisoned_allocations

pytestmark = pytest.mark.usefixtures("interpreter")

PAGES, PAGE_TOKENS, HEADS, DIM = 6, 4, 2, 8


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param


def caches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(PAGES, PAGE_TOKENS, HEADS, DIM, generator=generator)
    return cache.to(dtype), (2 * cache).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def gather(backend, key_cache, value_cache, *, lengths, block_table, **options):
    options = {"max_seq_len": 8, "first_valid_id": 0} | options
    with poisoned_allocations():
        return load("gather_kv", backend)(key_cache, value_cache, block_table, int32(*lengths), **options)


def test_places_with_a_stride_are_refused(backend):
    key_cache, _ = caches()
    before, places = key_cache.clone(), torch.tensor([[4, 99], [5, 99], [6, 99]])[:, 0]
    with pytest.raises(InvalidArgument, match="slot_mapping"):
        load("write_kv", backend)(torch.ones(3, HEADS, DIM), None, key_cache, None, places)
    assert key_cache.equal(before)


@pytest.mark.parametrize("table", [torch.zeros(2, 3, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)])
def test_a_page_table_has_one_dimension(backend, table):
    key_cache, _ = caches()
    with pytest.raises(InvalidArgument, match=r"page_table has \d dimensions, expected one"):
        load("write_kv", backend)(torch.ones(1, HEADS, DIM), None, key_cache, None, int32(4), page_table=table)
    with pytest.raises(InvalidArgument, match=r"page_table has \d dimensions, expected one"):
        gather(backend, key_cache, None, lengths=[1], block_table=int32(1).view(1, 1), page_table=table)


def test_caches_without_elements_are_refused(backend):
    for shape in ((PAGES, 0, HEADS, DIM), (PAGES, PAGE_TOKENS, 0, DIM), (PAGES, PAGE_TOKENS, HEADS, 0)):
        cache = torch.zeros(shape)
        with pytest.raises(InvalidArgument, match="cache"):
            load("write_kv", backend)(torch.ones(1, *shape[2:]), None, cache, None, int32(4))
        with pytest.raises(InvalidArgument, match="cache"):
            gather(backend, cache, None, lengths=[1], block_table=int32(1).view(1, 1))


def test_an_empty_page_table_maps_nothing(backend):
    key_cache, _ = caches()
    before, table = key_cache.clone(), torch.zeros(0, dtype=torch.int32)
    load("write_kv", backend)(torch.ones(1, HEADS, DIM), None, key_cache, None, int32(4), page_table=table)
    assert key_cache.equal(before)
    keys, _ = gather(backend, key_cache, None, lengths=[3], block_table=int32(1).view(1, 1), page_table=table)
    assert not keys.any()


def test_rows_without_tokens_need_no_columns(backend):
    keys, _ = gather(backend, *caches(), lengths=[0, 0], block_table=torch.zeros(2, 0, dtype=torch.int32))
    assert keys.shape == (2, 8, HEADS, DIM)
    assert not keys.any()


def test_a_row_that_is_longer_than_its_columns_is_refused_where_that_is_known():
    with pytest.raises(InvalidArgument, match="token 4 lies behind the 1 pages of 4 tokens"):
        gather("torch", *caches(), lengths=[5], block_table=int32(1).view(1, 1))


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(torch.ones(3), torch.float8_e4m3fn), (torch.ones(1, 2), torch.float8_e4m3fn), (torch.ones(2), torch.float32)],
)
@pytest.mark.parametrize("which", ["key_scale", "value_scale"])
def test_scales_that_do_not_fit_are_refused(backend, scale, dtype, which):
    with pytest.raises(InvalidArgument, match="scale"):
        gather(
            backend,
            *caches(dtype),
            lengths=[3],
            block_table=int32(1).view(1, 1),
            dtype=torch.bfloat16,
            **{which: scale},
        )


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [(torch.float32, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e5m2), (torch.float32, torch.int32)],
)
def test_dtypes_that_are_not_offered_are_refused(backend, cache, dtype):
    with pytest.raises(Unsupported, match=f"gather_kv: {cache} as {dtype}"):
        gather(backend, *caches(cache), lengths=[3], block_table=int32(1).view(1, 1), dtype=dtype)


@pytest.mark.parametrize("lengths", [[4], [0]])
def test_ragged_rows_are_zero_wherever_no_row_lies(backend, lengths):
    key_cache, value_cache = caches()
    sums = int32(2, 2 + lengths[0])
    found = gather(
        backend,
        key_cache,
        value_cache,
        lengths=lengths,
        block_table=int32(3).view(1, 1),
        cu_seq_lens=sums,
        num_tokens=9,
    )
    for gathered, cache in zip(found, (key_cache, value_cache), strict=True):
        expected = torch.zeros(9, HEADS, DIM)
        expected[2 : 2 + lengths[0]] = cache[3, : lengths[0]]
        assert gathered.equal(expected)


def test_of_rows_beyond_max_seq_len_the_rest_is_zero(backend):
    key_cache, value_cache = caches()
    found = gather(
        backend,
        key_cache,
        value_cache,
        lengths=[7, 2],
        block_table=int32(3, 4, 5, 0).view(2, 2),
        max_seq_len=3,
        cu_seq_lens=int32(0, 7, 9),
        num_tokens=9,
    )
    for gathered, cache in zip(found, (key_cache, value_cache), strict=True):
        expected = torch.zeros(9, HEADS, DIM)
        expected[:3], expected[7:] = cache[3, :3], cache[5, :2]
        assert gathered.equal(expected)


def test_tokens_in_front_of_the_first_are_zero(backend):
    key_cache, _ = caches()
    keys, _ = gather(backend, key_cache, None, lengths=[5], block_table=int32(3).view(1, 1), starts=int32(-2))
    expected = torch.zeros(1, 8, HEADS, DIM)
    expected[0, 2:5] = key_cache[3, :3]
    assert keys.equal(expected)


def test_refusals_of_the_public_operations_change_nothing():
    key_cache, value_cache = caches()
    before = key_cache.clone(), value_cache.clone()
    with pytest.raises(InvalidArgument, match="value and value_cache"):
        avmp.write_kv(torch.ones(1, HEADS, DIM), None, key_cache, value_cache, int32(4))
    assert key_cache.equal(before[0])
    assert value_cache.equal(before[1])
