"""Adapters that write keys and values: the right bytes whatever the order of programs, block and slot 0 included."""

import math
from typing import Any

import pytest
import torch

from avmp.backends import use_backend
from avmp.compat import flash_attn, flash_attn_3, flashinfer, vllm
from avmp.compat.arguments import slots_of
from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import kv
from tests.compat_problems import Paged

FP8 = torch.float8_e4m3fn


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one call takes several programs."""
    monkeypatch.setattr(kv.tuning, "KV_TILE_INTERPRETED", 64)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["FA2", "FA3"])
def test_flash_attention_appends_behind_each_row(program_order: str, small_programs: None, module: Any) -> None:
    p = Paged((4, 0, 9), room=3)
    before = [cache.clone() for cache in p.caches]
    k, v = p.new(3, 3, 2, 16), p.new(3, 3, 2, 16)
    where = {"block_table" if module is flash_attn else "page_table": p.table}
    with use_backend("triton"):
        module.flash_attn_with_kvcache(p.new(3, 1, 4, 16), *p.caches, k, v, cache_seqlens=p.lens, **where)
    for cache, old, new in zip(p.caches, before, (k, v), strict=True):
        for row, length in enumerate(p.lens.tolist()):
            for i, position in enumerate(range(length, length + 3)):
                old[p.table[row, position // p.page], position % p.page] = new[row, i]
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


def test_positions_outside_a_table_have_no_slot() -> None:
    table = torch.tensor([[3, -1], [0, 2]]).int()
    positions = torch.tensor([[-1, 0, 3, 4, 7, 8], [0, 1, 2, 4, 7, 100]]).int()
    slots = slots_of(table, positions, 4)
    assert slots[0].clamp(min=-1).tolist() == [-1, 12, 15, -1, -1, -1]
    assert slots[1].tolist() == [0, 1, 2, 8, 11, -1]
    assert slots_of(table[:, :0], positions, 4).eq(-1).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [False, True], ids=["pair", "one tensor"])
def test_flashinfer_appends_by_row_and_position_and_skips_minus_one(
    program_order: str, small_programs: None, layout: str, together: bool
) -> None:
    shape = (7, 2, 4, 2, 16) if layout == "NHD" else (7, 2, 2, 4, 16)
    whole = torch.full(shape, math.nan)
    cache = whole if together else (whole[:, 0], whole[:, 1])
    expected = whole.clone()
    indices, indptr = torch.tensor([0, 5, 2, 6]).int(), torch.tensor([0, 2, 2, 4]).int()
    rows, positions = torch.tensor([0, 0, -1, 2, 2, 1, 0]).int(), torch.tensor([0, 7, 0, 2, 4, 0, 8]).int()
    key, value = torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    with use_backend("triton"):
        flashinfer.append_paged_kv_cache(
            key, value, rows, positions, cache, indices, indptr, torch.tensor([4, 0, 1]).int(), layout
        )
    # Row 1 has no page and row 0 no third one: nothing is written for these.
    for i, (page, place) in {0: (0, 0), 1: (5, 3), 3: (2, 2), 4: (6, 0)}.items():
        for which, new in enumerate((key, value)):
            target = expected[page, which]
            target[(place,) if layout == "NHD" else (slice(None), place)] = new[i]
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_vllm_writes_by_slot_and_skips_negative_ones(
    program_order: str, small_programs: None, kind: str, order: str
) -> None:
    """The first tokens of a longer key, to slot 0 as to any other; K and V with strides of their own."""
    fp8 = {"fp8": FP8, "fp8_e5m2": torch.float8_e5m2}.get(kind)
    stored = torch.bfloat16 if fp8 is None else torch.uint8
    caches = [torch.full((3, 2, 4, 24 + 8 * which), 7, dtype=stored)[..., :24] for which in range(2)]
    if order == "NHD":
        caches = [torch.full((3, 4, 2, 24), 7, dtype=stored) for _ in range(2)]
    else:
        caches = [cache.transpose(1, 2) for cache in caches]
    expected = [cache.clone() for cache in caches]
    slots = torch.tensor([0, -1, 11, 5, -9, 4])
    key, value = torch.randn(9, 2, 24).bfloat16() * 9, torch.randn(9, 2, 24).bfloat16() * 9
    scales = torch.tensor([0.5, 2.0]), torch.tensor(1.5)
    with use_backend("triton"):
        vllm.reshape_and_cache_flash(key, value, *caches, slots, kind, *scales)
    for cache, old, new, scale in zip(caches, expected, (key, value), scales, strict=True):
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                values = new[i] if fp8 is None else (new[i].float() / scale.view(-1, 1)).to(fp8).view(torch.uint8)
                old[slot // 4, slot % 4] = values
        assert torch.equal(cache, old)


def test_vllm_names_what_it_does_not_store() -> None:
    key, cache, slots, one = torch.zeros(2, 2, 16), torch.zeros(3, 4, 2, 16), torch.tensor([0, 1]), torch.ones(1)
    with pytest.raises(Unsupported, match="kv_cache_dtype 'nvfp4'"):
        vllm.reshape_and_cache_flash(key, key, cache, cache, slots, "nvfp4", one, one)
    with pytest.raises(Unsupported, match="key_cache of 5 dimensions"):
        vllm.reshape_and_cache_flash(key, key, cache[..., None], cache[..., None], slots, "auto", one, one)
    with pytest.raises(InvalidArgument, match="kv_layout"):
        flashinfer.append_paged_kv_cache(key, key, slots, slots, (cache, cache), slots, slots, slots, "DNH")
