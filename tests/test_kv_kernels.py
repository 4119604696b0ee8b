"""Keys and values into pages and out of them: bit for bit what the reference does, whatever the order of programs."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import fp8, fp8_formats, kv, kv_reference
from tests.attention_problems import FP8, arena_pages

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS, PAGES = 3, 9


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations are small here: threads that wait for each other on a busy machine cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    size = () if scale == "tensor" else (HEADS,)
    scales = {f"{name}_scale": torch.rand(size, generator=pools.g) + 0.5 for name in ("key", "value")} if scale else {}
    table = pools.page_table if virtual else None
    before = storage(pools.caches[0]).clone()
    kv.write_kv(key, value, *pools.caches, slots, page_table=table, **scales)
    kv_reference.write_kv(key, value, *pools.expected, slots, page_table=table, **scales)
    assert torch.equal(storage(pools.caches[0]), storage(pools.expected[0]))
    assert not torch.equal(storage(pools.caches[0]), before)


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
    if scale:
        arguments |= {f"{name}_scale": torch.rand(HEADS, generator=pools.g) for name in ("key", "value")}
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
    offsets = kv.place_offsets(
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cache", "page", "dims", "order", "virtual"),
    list(
        itertools.product(
            ("bf16", "fp16", "fp32"),
            (None, "e4m3", "e5m2"),
            (1, 2, 16, 24, 48, 64),
            ((16, 16), (80, 112), (128, 64), (256, 192)),
            ("NHD", "HND"),
            (False, True),
        )
    ),
)
def test_every_shape_is_written_and_read_back(dtype, cache, page, dims, order, virtual):
    pools = Pools(FP8[cache] if cache else DTYPES[dtype], page, dims, order, virtual)
    slots = pools.slots(min(30, PAGES * page), 1)
    key, value = pools.new(len(slots), DTYPES[dtype])
    table = pools.page_table if virtual else None
    kv.write_kv(key, value, *pools.caches, slots, page_table=table)
    kv_reference.write_kv(key, value, *pools.expected, slots, page_table=table)
    assert torch.equal(storage(pools.caches[0]), storage(pools.expected[0]))
    rows = torch.arange(PAGES, dtype=torch.int32)[None]
    arguments = dict(max_seq_len=PAGES * page, page_table=table)
    lens = torch.tensor([PAGES * page], dtype=torch.int32)
    found = kv.gather_kv(*pools.caches, rows, lens, **arguments)
    for mine, theirs in zip(found, kv_reference.gather_kv(*pools.expected, rows, lens, **arguments), strict=True):
        assert torch.equal(bits(mine), bits(theirs))
