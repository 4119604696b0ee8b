"""Keys and values into pages and out of them: bit for bit what the reference does, whatever the order of programs."""

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import fp8, fp8_formats, kv, kv_reference
from tests import triton_interpreter
from tests.attention_problems import FP8, arena_pages

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS, PAGES = 3, 9


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a view looks into: what lies around it is the canary."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).view(
        torch.uint8
    )


class Pools:
    """Equal caches for kernel and reference, filled with NaN, and the tables of some scattered tokens."""

    def __init__(self, cache_dtype: torch.dtype, page: int, dims: tuple[int, int], order: str, virtual: bool) -> None:
        self.g = torch.Generator().manual_seed(page + dims[0])
        parts = [(page, HEADS, dim) for dim in dims]
        self.caches = arena_pages(PAGES, parts, cache_dtype, order)
        self.expected = arena_pages(PAGES, parts, cache_dtype, order)
        self.page, self.dims = page, dims
        self.page_table = torch.zeros(PAGES, dtype=torch.int32)
        self.page_table[1:] = torch.randperm(PAGES - 1, generator=self.g).int() + 1
        self.page_table[4] = 0  # bound no longer: nothing may be written through it
        self.virtual = virtual

    def slots(self, count: int, first_valid_id: int) -> torch.Tensor:
        """Distinct places all over the pool, with every kind of null among them."""
        places = torch.randperm(PAGES * self.page, generator=self.g)[:count]
        places[::7], places[3::7] = -1, -self.page - 3
        places[1::11] = torch.arange(len(places[1::11])) % max(first_valid_id * self.page, 1)
        places[2::13] = PAGES * self.page + 5
        return places.unique()[torch.randperm(len(places.unique()), generator=self.g)]

    def new(self, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Keys and values as slices of a wider tensor, with what fp8 has to round, saturate and keep."""
        wide = torch.randn(tokens, HEADS, sum(self.dims) + 8, generator=self.g) * 3
        wide[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -70000.0, 0.0009765625])
        return list(wide.to(dtype).split([*self.dims, 8], dim=2)[:2])


BOTH = pytest.mark.parametrize(
    ("module", "program_order"),
    [(kv_reference, "forward"), *((kv, order) for order in triton_interpreter.ORDERS)],
    indirect=["program_order"],
    ids=["torch", *(f"triton {order}" for order in triton_interpreter.ORDERS)],
)


@pytest.fixture
def several_programs(monkeypatch):
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 2048)


def scales_of(scale: str | None, g: torch.Generator) -> dict[str, torch.Tensor]:
    """For keys and values, of the tensor or of each head."""
    size = (HEADS,) if scale == "head" else ()
    return {f"{name}_scale": torch.rand(size, generator=g) + 0.5 for name in ("key", "value")} if scale else {}


@pytest.mark.parametrize(
    ("dtype", "cache", "scale", "page", "dims", "order", "virtual"),
    [
        ("bf16", None, None, 16, (32, 32), "NHD", True),
        ("fp16", None, None, 24, (80, 48), "HND", False),
        ("fp32", None, None, 1, (16, 64), "NHD", True),
        ("bf16", "e4m3", "head", 16, (64, 32), "HND", True),
        ("fp32", "e5m2", "tensor", 8, (24, 24), "NHD", False),
        ("fp16", "e4m3", None, 256, (16, 16), "NHD", True),
    ],
)
def test_writing_is_bit_equal_in_any_order(program_order, monkeypatch, dtype, cache, scale, page, dims, order, virtual):
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 1024)  # several programs
    pools = Pools(FP8[cache] if cache else DTYPES[dtype], page, dims, order, virtual)
    slots = pools.slots(min(40, PAGES * page), 1)
    key, value = pools.new(len(slots) + 2, DTYPES[dtype])
    scales, table = scales_of(scale, pools.g), pools.page_table if virtual else None
    before = storage(pools.caches[0]).clone()
    kv.write_kv(key, value, *pools.caches, slots, page_table=table, **scales)
    kv_reference.write_kv(key, value, *pools.expected, slots, page_table=table, **scales)
    assert torch.equal(storage(pools.caches[0]), storage(pools.expected[0]))
    assert not torch.equal(storage(pools.caches[0]), before)


# -- virtual ids, and pages that have moved --------------------------------------------------------------------------

STORED = pytest.mark.parametrize(
    ("cache", "scale", "order"),
    [(torch.bfloat16, None, "NHD"), (torch.float8_e4m3fn, "head", "HND"), (torch.float8_e5m2, "tensor", "NHD")],
    ids=["bf16", "e4m3", "e5m2"],
)


def tables_of(g: torch.Generator) -> list[torch.Tensor]:
    """Two page tables that put pages at different places; the same virtual ids are null in both, for every reason."""
    places = [torch.randperm(PAGES - 1, generator=g) + 1 for _ in range(2)]
    tables = [torch.cat([torch.zeros(1), order, torch.full((8,), 2)]).int()[:PAGES] for order in places]
    for table in tables:  # behind whose end there is more to find
        table[3], table[5], table[6] = 0, -2, PAGES + 1
    return tables


def translated(ids: list[int], table: torch.Tensor) -> list[int]:
    """Physical pages, one after the other; -1 for null ones."""
    pages = [int(table[i]) if 1 <= i < len(table) else -1 for i in ids]
    return [page if 1 <= page < PAGES else -1 for page in pages]


@STORED
@BOTH
def test_where_pages_lie_changes_no_bit_of_what_is_written(
    several_programs, program_order, module, cache, scale, order
):
    """Virtual places do what the physical ones do that the table says, wherever it says they are."""
    pools = Pools(cache, 8, (32, 16), order, True)
    slots = pools.slots(PAGES * 8, 1)
    key, value = pools.new(len(slots), torch.bfloat16)
    scales, seen = scales_of(scale, pools.g), []
    for table in tables_of(pools.g):
        one, other = (Pools(cache, 8, (32, 16), order, True).caches for _ in range(2))
        module.write_kv(key, value, *one, slots, page_table=table, **scales)
        pages = translated([slot // 8 for slot in slots.tolist()], table)
        places = [-1 if page < 0 else page * 8 + slot % 8 for page, slot in zip(pages, slots.tolist(), strict=True)]
        module.write_kv(key, value, *other, torch.tensor(places), **scales)
        assert torch.equal(storage(one[0]), storage(other[0]))
        bound = [page for page in translated(list(range(PAGES)), table) if page > 0]
        seen.append([bits(part[bound]) for part in one])
    assert all(torch.equal(*parts) for parts in zip(*seen, strict=True))
    assert not (seen[0][0] == 0xFF).all()


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@STORED
@BOTH
def test_where_pages_lie_changes_no_bit_of_what_is_gathered(
    several_programs, program_order, module, cache, scale, order, ragged
):
    """Virtual ids give what the physical ones give that the table says; so do the same pages elsewhere."""
    g = torch.Generator().manual_seed(1)
    rows = [[1, 3, 2, 8], [PAGES, 4, -1, 7], [0, 5, 6, 2**30]]
    lens, arguments = torch.tensor([27, 32, 20]).int(), dict(max_seq_len=33, dtype=torch.float32 if scale else None)
    arguments |= scales_of(scale, g)
    if ragged:
        arguments |= dict(cu_seq_lens=torch.tensor([0, *lens.cumsum(0)]).int(), num_tokens=int(lens.sum()) + 5)
    content = [torch.randn(PAGES, 8, HEADS, dim, generator=g).to(cache) for dim in (32, 16)]
    seen = []
    for table in tables_of(g):
        caches = Pools(cache, 8, (32, 16), order, True).caches
        for part, values in zip(caches, content, strict=True):
            for virtual, page in enumerate(translated(list(range(PAGES)), table)):
                if page > 0:
                    part[page] = values[virtual]
        found = module.gather_kv(*caches, torch.tensor(rows).int(), lens, page_table=table, **arguments)
        pages = torch.tensor([translated(row, table) for row in rows]).int()
        direct = module.gather_kv(*caches, pages, lens, **arguments)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, direct, strict=True))
        seen.append(found)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(*seen, strict=True))
    assert all(part.isfinite().all() and part.any() for part in seen[0])


# -- one value after the other ---------------------------------------------------------------------------------------

ROUNDED = [(torch.float32, None), *itertools.product(FP8.values(), (None, "tensor", "head"))]


def scale_at(scales: dict[str, torch.Tensor], name: str, head: int) -> torch.Tensor:
    scale = scales.get(f"{name}_scale", torch.tensor(1.0))
    return scale[head] if scale.dim() else scale


@pytest.mark.parametrize(("cache", "scale"), ROUNDED, ids=str)
@BOTH
def test_each_value_is_written_where_and_as_the_rule_says(several_programs, program_order, module, cache, scale):
    pools = Pools(cache, 4, (16, 24), "NHD", True)
    slots, table = pools.slots(PAGES * 4, 1), pools.page_table
    new, scales = pools.new(len(slots), torch.float32), scales_of(scale, pools.g)
    module.write_kv(*new, *pools.caches, slots, page_table=table, **scales)
    largest = torch.finfo(cache).max
    for token, slot in enumerate(slots.tolist()):
        page = translated([slot // 4], table)[0]
        for name, values, part in zip(("key", "value"), new, pools.expected, strict=True):
            for head in range(HEADS if page > 0 else 0):
                quotient = values[token, head] / scale_at(scales, name, head)
                rounded = quotient if cache == torch.float32 else quotient.clamp(-largest, largest).to(cache)
                part[page, slot % 4, head] = rounded
    assert torch.equal(storage(pools.caches[0]), storage(pools.expected[0]))


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize(("cache", "scale"), ROUNDED, ids=str)
@BOTH
def test_each_value_is_gathered_from_where_and_as_the_rule_says(
    several_programs, program_order, module, cache, scale, ragged
):
    pools = Pools(cache, 4, (16, 24), "HND", True)
    for part in pools.caches:
        part.copy_(torch.randn(part.shape, generator=pools.g).to(cache))
    table, scales = pools.page_table, scales_of(scale, pools.g)
    rows, lens, starts = [[1, 4, 2], [8, -1, 3], [0, PAGES, 7], [6, 6, 6]], [9, 5, 8, 0], [2, 0, 3, 1]
    sums, dtype = [0, *itertools.accumulate(lens)], torch.float32 if cache == torch.float32 else torch.float16
    shape = (sums[-1] + 2,) if ragged else (len(rows), max(lens) + 1)
    arguments = dict(cu_seq_lens=torch.tensor(sums).int(), num_tokens=shape[0]) if ragged else {}
    found = module.gather_kv(
        *pools.caches, torch.tensor(rows).int(), torch.tensor(lens).int(), max_seq_len=max(lens) + 1, page_table=table,
        starts=torch.tensor(starts).int(), dtype=dtype, **scales, **arguments,
    )  # fmt: skip
    for name, part, out in zip(("key", "value"), pools.caches, found, strict=True):
        expected = torch.zeros(*shape, HEADS, part.shape[3], dtype=dtype)
        for row, ids in enumerate(rows):
            for token in range(lens[row]):
                column, inside = divmod(starts[row] + token, 4)
                page = translated([ids[column]], table)[0]
                for head in range(HEADS if page > 0 else 0):
                    values = part[page, inside, head].float() * scale_at(scales, name, head)
                    expected[sums[row] + token if ragged else (row, token)][head] = values.to(dtype)
        assert torch.equal(bits(out), bits(expected)) and out.any()


# -- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [kv, kv_reference])
def test_page_zero_is_data_where_ids_begin_at_zero(module):
    key, value = torch.ones(4, 1, 16), torch.ones(4, 1, 16)
    caches = [torch.zeros(2, 4, 1, 16) for _ in range(2)]
    module.write_kv(key, value, *caches, torch.tensor([0, -1, -2, 5]), first_valid_id=0)
    assert caches[0][..., 0].flatten().tolist() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert torch.equal(caches[0], caches[1])
    module.write_kv(key * 2, value, *caches, torch.tensor([3, 4]), first_valid_id=1)
    assert caches[0][..., 0].flatten().tolist() == [1, 0, 0, 0, 2, 1, 0, 0]


def test_a_write_of_keys_alone_and_of_nothing():
    key, cache = torch.randn(3, 2, 16), torch.zeros(3, 4, 2, 16)
    kv.write_kv(key, None, cache, None, torch.tensor([5, 9, 4], dtype=torch.int32))
    assert torch.equal(cache.flatten(0, 1)[[5, 9, 4]], key)
    kv.write_kv(key, None, cache, None, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize(
    ("cache", "dtype", "scale", "page", "order", "virtual", "offset"),
    [
        (torch.bfloat16, None, None, 16, "NHD", True, False),
        (torch.float32, None, None, 24, "HND", False, True),
        (torch.float8_e4m3fn, torch.bfloat16, "head", 8, "NHD", True, True),
        (torch.float8_e5m2, None, None, 1, "NHD", False, False),
        (torch.float16, torch.float32, None, 48, "NHD", True, False),
    ],
)
def test_gathering_is_bit_equal_in_any_order(
    program_order, monkeypatch, ragged, cache, dtype, scale, page, order, virtual, offset
):
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 2048)
    pools = Pools(cache, page, (40, 32), order, virtual)
    for tensor in pools.caches:
        tensor.copy_(torch.randn(tensor.shape, generator=pools.g).to(cache))
    lens = torch.tensor([min(2 * page + 1, 3 * page), 0, 1, page], dtype=torch.int32)
    table = torch.tensor([[3, 4, 5, -7_777_777], [2**30, 2**30, -9, 0], [8, 9, 9, 9], [2, -1, 0, 0]], dtype=torch.int32)
    arguments: dict[str, Any] = dict(max_seq_len=int(lens.max()) + 1, dtype=dtype)
    arguments["page_table"] = pools.page_table if virtual else None
    if offset:
        arguments["starts"] = torch.tensor([1, 0, page - 1, 0], dtype=torch.int32)
    arguments |= scales_of(scale, pools.g)
    if ragged:
        arguments["cu_seq_lens"] = torch.tensor([0, *lens.cumsum(0)], dtype=torch.int32)
        arguments["num_tokens"] = int(lens.sum()) + 70
    with poisoned_allocations(monkeypatch):
        found = kv.gather_kv(*pools.caches, table, lens, **arguments)
    expected = kv_reference.gather_kv(*pools.caches, table, lens, **arguments)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(bits(mine), bits(theirs))
    assert (expected[0].float() != 0).any()


class poisoned_allocations:
    """torch.empty gives NaN patterns: an element that is not written shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.empty = monkeypatch, torch.empty

    def __enter__(self) -> None:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = self.empty(*args, **kwargs)
            made.view(torch.uint8).fill_(0xFF)
            return made

        self.monkeypatch.setattr(torch, "empty", empty)

    def __exit__(self, *_: object) -> None:
        self.monkeypatch.setattr(torch, "empty", self.empty)


@triton.jit
def encode_kernel(source, target, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(target + places, fp8.encode(tl.load(source + places), FORMAT))


@triton.jit
def decode_kernel(source, target, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(target + places, fp8.decode(tl.load(source + places), FORMAT).to(tl.float32))


@pytest.mark.parametrize(
    ("dtype", "form"),
    [*fp8_formats.FORMATS.items(), (torch.float8_e4m3fn, fp8_formats.NATIVE_E4M3)],
    ids=["e4m3", "e5m2", "e4m3 by hardware"],
)
def test_fp8_is_decoded_exactly(dtype, form):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = torch.empty(256)
    decode_kernel[(1,)](codes, decoded, 256, form)
    right = codes.view(dtype).float()
    assert torch.equal(decoded.isnan(), right.isnan())
    assert torch.equal(decoded[~right.isnan()], right[~right.isnan()])
    assert torch.equal(decoded.signbit()[~right.isnan()], right.signbit()[~right.isnan()])


@pytest.mark.parametrize("dtype", list(fp8_formats.FORMATS), ids=str)
def test_fp8_is_encoded_as_torch_does(dtype):
    right = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = right[right.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    some = torch.randn(2**14, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 2**14)
    edges = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-30, -1e-30, 3e38])
    values = torch.cat([finite, middles, middles.nextafter(torch.tensor(9e9)), middles.nextafter(-torch.tensor(9e9))])
    values = torch.cat([values, some, edges])
    values = torch.nn.functional.pad(values, (0, 2**15 - len(values)))
    encoded = torch.empty(len(values), dtype=torch.uint8)
    encode_kernel[(1,)](values, encoded, len(values), fp8_formats.FORMATS[dtype])
    limit = fp8_formats.LARGEST[dtype]
    expected = values.clamp(-limit, limit).to(dtype)
    same = encoded == expected.view(torch.uint8)
    assert (same | (values.isnan() & encoded.view(dtype).float().isnan())).all()


def test_what_does_not_fit_is_refused():
    key, cache, slots = torch.zeros(2, 1, 16), torch.zeros(2, 4, 1, 16), torch.zeros(2, dtype=torch.int64)
    for arguments, error in (
        ((key, key, cache, None, slots), InvalidArgument),
        ((key[:1], None, cache, None, slots), InvalidArgument),
        ((key, None, cache.half(), None, slots), Unsupported),
        ((key, None, cache, None, slots.float()), InvalidArgument),
        ((key[..., ::2], None, cache[..., ::2], None, slots), InvalidArgument),
    ):
        for module in (kv, kv_reference):
            with pytest.raises(error):
                module.write_kv(*arguments)
    with pytest.raises(InvalidArgument, match="only fp8 is scaled"):
        kv.write_kv(key, None, cache, None, slots, key_scale=torch.tensor(2.0))


@triton.jit
def place_kernel(pages, inside, heads, out, page_stride, token_stride, head_stride, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    offsets = kv.token_offsets(
        tl.load(pages + i), tl.load(inside + i), tl.load(heads + i), page_stride, token_stride, head_stride, 1
    )
    tl.store(out + i, offsets)


def test_addresses_cross_two_and_four_gigabytes_and_elements():
    """Nothing but the address is computed: an id times a stride must not wrap in 32 bits, in bytes or elements."""
    strides = (716_800, 1024, 128)
    pages = torch.tensor([2**31 // strides[0] + 1, 2**32 // strides[0] + 1, 2**31 - 1, 3000], dtype=torch.int32)
    inside = torch.tensor([15, 0, 7, 699], dtype=torch.int32)
    heads = torch.tensor([7, 1, 0, 3], dtype=torch.int32)
    out = torch.empty(4, dtype=torch.int64)
    place_kernel[(1,)](pages, inside, heads, out, *strides, 4)
    assert torch.equal(out, pages.long() * strides[0] + inside.long() * strides[1] + heads.long() * strides[2])


FAR = """
import torch
from tests import triton_interpreter
from avmp.kernels import kv
triton_interpreter.install()
stride = 2**30 + 2**20  # elements: page 2 begins beyond 2^31 elements and 2^32 bytes
memory = torch.empty(2 * stride + 2**16, dtype=torch.bfloat16)
cache = memory.as_strided((3, 4, 2, 16), (stride, 32, 16, 1))
key = torch.randn(2, 2, 16).bfloat16()
kv.write_kv(key, None, cache, None, torch.tensor([4, 11]))
assert torch.equal(memory[2 * stride + 96 : 2 * stride + 128].view(2, 16), key[1])
table, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
found, _ = kv.gather_kv(cache, None, table, lens, max_seq_len=4)
assert torch.equal(found[0, 3], key[1])
"""


def test_a_pool_beyond_four_gigabytes(repository):
    """In a process of its own: a wrapped address would end it. The memory is virtual but for what is touched."""
    environment = os.environ | {"PYTHONPATH": str(repository), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", FAR], check=True, env=environment, cwd=repository, timeout=120)


GRID = itertools.product(
    ("bf16", "fp16", "fp32"),
    (1, 2, 16, 24, 48, 64),
    ((16, 16), (80, 112), (128, 64), (256, 192)),
    ("NHD", "HND"),
    (False, True),
    (None, "e4m3", "e5m2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "page", "dims", "order", "virtual", "cache", "turn"), [(*case, turn) for turn, case in enumerate(GRID)]
)
def test_every_shape_is_written_and_read_back(monkeypatch, dtype, page, dims, order, virtual, cache, turn):
    """The bytes, and of fp8 the values, with every kind of scale in turn and in every order of programs in turn."""
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 128 * triton.next_power_of_2(max(dims)))
    pools = Pools(FP8[cache] if cache else DTYPES[dtype], page, dims, order, virtual)
    slots = pools.slots(min(60, PAGES * page), 1)
    key, value = pools.new(len(slots), DTYPES[dtype])
    scales = scales_of((None, "tensor", "head")[turn // 3 % 3], pools.g) if cache else {}
    table = pools.page_table if virtual else None
    rows, lens = torch.arange(PAGES, dtype=torch.int32)[None], torch.tensor([PAGES * page], dtype=torch.int32)
    with triton_interpreter.program_order(triton_interpreter.ORDERS[turn // 9 % 3], seed=turn):
        kv.write_kv(key, value, *pools.caches, slots, page_table=table, **scales)
        kv_reference.write_kv(key, value, *pools.expected, slots, page_table=table, **scales)
        assert torch.equal(storage(pools.caches[0]), storage(pools.expected[0]))
        for given in ({}, {"dtype": DTYPES[dtype], **scales})[: 2 if cache else 1]:
            arguments = dict(max_seq_len=PAGES * page, page_table=table, **given)
            found = kv.gather_kv(*pools.caches, rows, lens, **arguments)
            expected = kv_reference.gather_kv(*pools.expected, rows, lens, **arguments)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.dtype == theirs.dtype
                if given:  # which NaN stands for one of fp8 is nobody's promise
                    assert torch.equal(mine.isnan(), theirs.isnan())
                    mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
                assert torch.equal(bits(mine), bits(theirs))
