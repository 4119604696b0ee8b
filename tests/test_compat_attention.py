"""Attention under its peers' names: results against float64, conventions, and what is refused."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from avmp.address_space import Counters
from avmp.backends import use_backend
from avmp.compat import flash_attn, flash_attn_3, flashinfer, vllm
from avmp.device_batch import PhysicalCsr, PhysicalTable
from avmp.errors import Inconsistent, InvalidArgument, Unsupported
from avmp.kernels import attention_tuning
from tests.chaos import ChaosMigration
from tests.compat_problems import GARBAGE_ID, Paged, assert_near, attention64
from tests.test_cache_pool import pool_of
from tests.triton_interpreter import ORDERS, program_order

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = 4
WORKSPACE = torch.empty(16, dtype=torch.uint8)
SLOPES = torch.tensor([0.3, 0.1, 0.05, 0.01])
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, interpreter: None) -> Iterator[str]:
    with use_backend(request.param):
        yield request.param


WAYS = {"torch": ("torch", "forward"), **{f"triton {order}": ("triton", order) for order in ORDERS}}


@pytest.fixture(params=WAYS)
def appending_backend(
    request: pytest.FixtureRequest, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """For calls that write: by Triton in several programs, in every order."""
    name, order = WAYS[request.param]
    monkeypatch.setattr(attention_tuning, "KV_TILE_INTERPRETED", 64)
    with use_backend(name), program_order(order, seed=1):
        yield name


def starts_of(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


# -- FlashAttention 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, softcap=3.0, num_splits=3),
        dict(window_size=(3, 1), softmax_scale=0.7),
        dict(causal=True, window_size=(2, 5), alibi_slopes=SLOPES),
        dict(window_size=(-1, 2), alibi_slopes=torch.stack([SLOPES, SLOPES * 2, SLOPES.flip(0)])),
    ],
    ids=["plain", "causal-softcap", "window-scale", "causal-alibi", "right-alibi-rows"],
)
@pytest.mark.parametrize("dense", [False, True], ids=["paged", "dense"])
def test_flash_attention_2_appends_and_attends(appending_backend: str, dense: bool, options: dict[str, Any]) -> None:
    p = Paged((0, 5, 11), room=3)
    q, k, v = p.new(3, 2, HEADS, 16), p.new(3, 3, 2, 16), p.new(3, 3, 2, 16)
    if dense:
        caches, pick = [torch.full((5, 15, 2, 16), math.nan) for _ in range(2)], torch.tensor([4, 0, 2]).int()
        for row in range(3):
            for cache, old in zip(caches, (p.keys, p.values), strict=True):
                cache[pick[row], : p.lens[row]] = old[row]
        where: dict[str, Any] = dict(cache_batch_idx=pick)
    else:
        caches, where = p.caches, dict(block_table=p.table)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=p.lens, **where, **options, return_softmax_lse=True
    )
    assert out.shape == (3, 2, HEADS, 16) and lse.shape == (3, HEADS, 2) and lse.dtype == torch.float32
    names = dict(causal="causal", window_size="window", softmax_scale="scale", softcap="softcap")
    known = {names[name]: value for name, value in options.items() if name in names}
    slopes = options.get("alibi_slopes", torch.zeros(HEADS))
    for row in range(3):
        keys, values = torch.cat([p.keys[row], k[row]]), torch.cat([p.values[row], v[row]])
        own = slopes if slopes.dim() == 1 else slopes[row]
        expected, expected_lse = attention64(q[row], keys, values, slopes=own, **known)
        assert_near(out[row], expected)
        assert_near(lse[row].T, expected_lse)
        for which, whole in enumerate((keys, values)):
            held = caches[which][where["cache_batch_idx"][row], : len(whole)] if dense else None
            assert torch.equal(p.stored(row, which, len(whole)) if held is None else held, whole)


@pytest.mark.parametrize("slopes", [SLOPES, torch.stack([SLOPES, SLOPES.flip(0), SLOPES * 2])], ids=["heads", "rows"])
@pytest.mark.parametrize(
    ("causal", "window", "by_position"),
    [
        (True, (-1, -1), True),
        (False, (-1, 0), True),
        (True, (99, 5), True),  # no shorter than the cache: none
        (True, (3, -1), False),
        (False, (-1, -1), False),
    ],
)
def test_flash_attention_2_counts_alibi_in_its_lse_as_the_peer_does(
    backend: str, causal: bool, window: tuple[int, int], by_position: bool, slopes: torch.Tensor
) -> None:
    p = Paged((1, 6, 13), room=2)
    q, k, v = p.new(3, 3, HEADS, 16), p.new(3, 2, 2, 16), p.new(3, 2, 2, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *p.caches, k, v, cache_seqlens=p.lens, block_table=p.table, causal=causal, window_size=window,
        alibi_slopes=slopes, return_softmax_lse=True,
    )  # fmt: skip
    for row in range(3):
        keys, values = torch.cat([p.keys[row], k[row]]), torch.cat([p.values[row], v[row]])
        own = slopes if slopes.dim() == 1 else slopes[row]
        alibi = "position" if by_position else "distance"
        expected, natural = attention64(q[row], keys, values, causal, window, slopes=own, alibi=alibi)
        assert_near(out[row], expected)
        assert_near(lse[row].T, natural)


@pytest.mark.parametrize(("module", "table"), [(flash_attn, "block_table"), (flash_attn_3, "page_table")])
@pytest.mark.parametrize("dense", [False, True], ids=["paged", "dense"])
def test_flash_attention_attends_to_what_a_row_has_room_for(
    appending_backend: str, dense: bool, module: Any, table: str
) -> None:
    """Behind a row's own pages lie those of others: neither lengths nor new tokens lead there."""
    g = torch.Generator().manual_seed(0)
    pool = [torch.randn(8, 4, 2, 16, generator=g) for _ in range(2)]
    before = [cache.clone() for cache in pool]
    caches = [cache[:3] for cache in pool] if dense else pool
    ids = torch.tensor([[0], [1], [2]]) if dense else torch.tensor([[1, 0], [2, 7], [5, 3]])
    where: dict[str, Any] = {} if dense else {table: ids.int()}
    room = 4 if dense else 8
    new, q = torch.randn(2, 3, 3, 2, 16, generator=g), torch.randn(3, 2, HEADS, 16, generator=g)
    lens = torch.tensor([1, room - 1, 10**6]).int()
    counted = lens.clone()
    for given in ((), tuple(new)):
        out = module.flash_attn_with_kvcache(q, *caches, *given, cache_seqlens=lens, causal=True, **where)
        for row, length in enumerate(lens.tolist()):
            end = min(length + (3 if given else 0), room)
            lines = [cache[ids[row]].flatten(0, 1)[:end].clone() for cache in before]
            if given:
                for line, own in zip(lines, new, strict=True):
                    begin = min(length, room)
                    line[begin:] = own[row, : end - begin]
            assert_near(out[row], attention64(q[row], *lines, causal=True)[0])
            for cache, line in zip(caches, lines, strict=True):
                assert torch.equal(cache[ids[row]].flatten(0, 1)[:end], line)
    assert torch.equal(lens, counted)
    others = sorted(set(range(8)) - set(ids.flatten().tolist()))
    for cache, old in zip(pool, before, strict=True):
        assert torch.equal(cache[others], old[others])


def test_dense_caches_of_fewer_rows_than_there_are_queries_for_are_refused(backend: str) -> None:
    cache, q = torch.zeros(2, 8, 2, 16), torch.zeros(3, 1, HEADS, 16)
    for module in (flash_attn, flash_attn_3):
        with pytest.raises(InvalidArgument, match="3 rows without cache_batch_idx, but dense caches of 2"):
            module.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5)
        pick = torch.tensor([1, 0, 1]).int()
        assert module.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5, cache_batch_idx=pick).shape == q.shape


def test_flash_attention_2_without_lengths_reads_a_dense_cache_whole() -> None:
    keys, values, q = torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 1, HEADS, 16)
    out = flash_attn.flash_attn_with_kvcache(q, keys, values)
    short = flash_attn.flash_attn_with_kvcache(q, keys, values, cache_seqlens=4)
    for row in range(2):
        assert_near(out[row], attention64(q[row], keys[row], values[row])[0])
        assert_near(short[row], attention64(q[row], keys[row, :4], values[row, :4])[0])


def test_a_query_that_sees_nothing_is_plus_infinity_for_2_and_minus_infinity_for_3(backend: str) -> None:
    p = Paged((0, 2), room=4)
    q = p.new(2, 4, HEADS, 16)
    arguments: dict[str, Any] = dict(cache_seqlens=p.lens, causal=True, return_softmax_lse=True)
    for module, name, nothing in ((flash_attn, "block_table", math.inf), (flash_attn_3, "page_table", -math.inf)):
        out, lse = module.flash_attn_with_kvcache(q, *p.caches, **{name: p.table}, **arguments)
        blind = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
        assert torch.equal(lse == nothing, blind[:, None].expand_as(lse))
        assert (out[blind] == 0).all() and torch.isfinite(lse[~blind[:, None].expand_as(lse)]).all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(rotary_cos=torch.zeros(9, 8)), Unsupported, "rotary_cos is not offered; rotate"),
        (dict(rotary_sin=torch.zeros(9, 8)), Unsupported, "rotary_sin"),
        (dict(cache_leftpad=torch.zeros(2).int()), Unsupported, "cache_leftpad"),
        (dict(cache_batch_idx=torch.zeros(2).int()), InvalidArgument, "cache_batch_idx is for dense"),
        (dict(k=torch.zeros(2, 1, 2, 16)), InvalidArgument, "k, v and cache_seqlens"),
        (dict(k=torch.zeros(2, 1, 2, 16), v=torch.zeros(2, 1, 2, 16), cache_seqlens=None), InvalidArgument, "k, v and"),
        (dict(k=torch.zeros(2, 1, 2, 8), v=torch.zeros(2, 1, 2, 16)), InvalidArgument, "k torch.float32"),
        (dict(block_table=torch.zeros(2, 3)), InvalidArgument, "int32 block table"),
        (dict(block_table=torch.zeros(3, 3).int()), InvalidArgument, "int32 block table"),
        (dict(cache_seqlens=torch.zeros(2)), InvalidArgument, "cache_seqlens must be int32"),
        (dict(cache_seqlens=13), InvalidArgument, "cache_seqlens 13: expected 0 to 12"),
        (dict(cache_seqlens=-1), InvalidArgument, "cache_seqlens -1"),
        (dict(q=torch.zeros(2, 1, 3, 16)), InvalidArgument, "do not fit q"),
        (dict(q=torch.zeros(2, 1, HEADS, 16).half()), InvalidArgument, "of one dtype"),
        (dict(alibi_slopes=torch.zeros(3)), InvalidArgument, "alibi_slopes"),
        (dict(num_splits=129), InvalidArgument, "num_splits"),
    ],
)
def test_flash_attention_2_refuses_before_anything_changes(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    p = Paged((3, 5), room=2)
    before = [cache.clone() for cache in p.caches]
    call = dict(q=p.new(2, 1, HEADS, 16), cache_seqlens=p.lens, block_table=p.table) | changed
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_with_kvcache(k_cache=p.caches[0], v_cache=p.caches[1], **call)
    for cache, old in zip(p.caches, before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


# -- FlashAttention 3 ------------------------------------------------------------------------------------------------


def test_flash_attention_3_takes_ragged_queries(backend: str) -> None:
    p = Paged((7, 0, 13))
    counts = (2, 0, 5)
    q = p.new(sum(counts), HEADS, 16)
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, *p.caches, cache_seqlens=p.lens, page_table=p.table, cu_seqlens_q=starts_of(*counts), max_seqlen_q=5,
        causal=True, softcap=2.0, window_size=(4, 0), scheduler_metadata=torch.zeros(3), pack_gqa=True, sm_margin=8,
        rotary_interleaved=False, rotary_seqlens=torch.zeros(2).int(), q_descale=3 * torch.ones(3, 2),
        k_descale=5 * torch.ones(3, 2), v_descale=7 * torch.ones(3, 2),
        return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (HEADS, 7)
    for row, tokens in enumerate(torch.arange(7).split(counts)):
        expected, expected_lse = attention64(q[tokens], p.keys[row], p.values[row], True, (4, 0), softcap=2.0)
        assert_near(out[tokens], expected)
        assert_near(lse[:, tokens].T, expected_lse)


def test_flash_attention_3_scales_fp8_by_row_and_head(appending_backend: str) -> None:
    p = Paged((6, 9), room=1, dtype=FP8)
    q, k, v = p.new(2, 1, HEADS, 16), p.new(2, 1, 2, 16), p.new(2, 1, 2, 16)
    scales = [torch.rand(2, 2, generator=p.g) + 0.5 for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    out = flash_attn_3.flash_attn_with_kvcache(
        q, *p.caches, k, v, cache_seqlens=p.lens, page_table=p.table, **dict(zip(names, scales, strict=True))
    )
    assert out.dtype == torch.bfloat16
    for row in range(2):
        of_q, of_k, of_v = (scale[row] for scale in scales)
        keys, values = (torch.cat([old[row], new[row]]) for old, new in ((p.keys, k), (p.values, v)))
        expected, _ = attention64(q[row], keys.double() * (of_k * of_q)[:, None], values.double() * of_v[:, None])
        assert_near(out[row], expected, 2**-7)
        assert torch.equal(p.stored(row, 0, len(keys)).view(torch.uint8), keys.view(torch.uint8))


@pytest.mark.parametrize(
    "changed",
    [
        dict(qv=torch.zeros(2, 1, HEADS, 16)),
        dict(rotary_cos=torch.zeros(9, 8)),
        dict(attention_chunk=4),
        dict(cache_leftpad=torch.zeros(2).int()),
        dict(cu_seqlens_k_new=torch.zeros(3).int()),
        dict(cache_batch_idx=torch.zeros(2).int()),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_flash_attention_3_names_what_it_refuses(changed: dict[str, Any]) -> None:
    p = Paged((3, 5))
    with pytest.raises(Unsupported, match=f"{next(iter(changed))} is not offered"):
        flash_attn_3.flash_attn_with_kvcache(
            p.new(2, 1, HEADS, 16), *p.caches, cache_seqlens=p.lens, page_table=p.table, **changed
        )


# -- vLLM ------------------------------------------------------------------------------------------------------------


def unified(p: Paged, q: torch.Tensor, counts: tuple[int, ...], out: torch.Tensor, **changed: Any) -> None:
    call: dict[str, Any] = dict(
        q=q, k=p.caches[0], v=p.caches[1], out=out, cu_seqlens_q=starts_of(*counts), max_seqlen_q=max(counts),
        seqused_k=p.lens, max_seqlen_k=int(p.lens.max()), softmax_scale=0.25, causal=True, window_size=(-1, -1),
        block_table=p.table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip
    assert vllm.unified_attention(**call | changed) is None


HINTS: dict[str, Any] = dict(
    seq_threshold_3D=8, num_par_softmax_segments=2, softmax_segm_output=torch.empty(14, HEADS, 2, 16),
    softmax_segm_max=torch.empty(14, HEADS, 2), softmax_segm_expsum=torch.empty(14, HEADS, 2), use_td=True,
    mm_prefix_clamp_sliding_window=True,
)  # fmt: skip
SINKS = torch.tensor([1.0, -1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        HINTS,
        dict(softcap=2.0, window_size=(3, 0)),
        dict(sinks=SINKS),
        dict(alibi_slopes=SLOPES),
        dict(alibi_slopes=SLOPES, sinks=SINKS),
        dict(alibi_slopes=SLOPES, causal=False, softcap=2.0),
        dict(alibi_slopes=SLOPES, use_alibi_sqrt=True, sinks=SINKS, window_size=(3, 0)),
        dict(alibi_slopes=SLOPES, use_alibi_sqrt=True, causal=False),
        dict(causal=False, window_size=(2, 2)),
        dict(causal=torch.tensor([True, False, True]), window_size=(2, -1), sinks=torch.zeros(HEADS)),
        dict(causal=torch.tensor([False, True, True]), alibi_slopes=SLOPES, sinks=SINKS),
    ],
    ids=[
        *("plain", "hints", "window-softcap", "sinks", "alibi", "alibi-sinks", "alibi-bidirectional", "root-sinks"),
        *("root-bidirectional", "bidirectional", "causal-rows", "alibi-causal-rows"),
    ],
)
def test_unified_attention_writes_its_output_in_place(backend: str, options: dict[str, Any]) -> None:
    p = Paged((7, 9, 0))
    counts = (3, 9, 0)
    q = p.new(14, HEADS, 16)  # two tokens more than the rows have
    out = torch.full_like(q, math.nan)
    unified(p, q, counts, out, **options)
    causal = torch.as_tensor(options.get("causal", True)).expand(3).tolist()
    left = options.get("window_size", (-1, -1))[0]
    alibi = "root" if options.get("use_alibi_sqrt") else "query"
    for row, tokens in enumerate(torch.arange(12).split(counts)):
        expected, _ = attention64(
            q[tokens], p.keys[row], p.values[row], causal[row], (left, left), 0.25, options.get("softcap", 0.0),
            options.get("alibi_slopes"), options.get("sinks"), alibi,
        )  # fmt: skip
        assert_near(out[tokens], expected)
    assert (out[12:] == 0).all()


def test_unified_attention_scales_fp8_by_tensor_and_only_then(backend: str) -> None:
    p = Paged((6, 9), dtype=FP8)
    q, counts = p.new(4, HEADS, 16, dtype=torch.float32), (1, 3)
    of_q, of_k, of_v = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([1.5])
    for q_dtype, mode, factors in ((torch.float32, 1, (0.5, 1.5)), (FP8, 1, (1.0, 1.5)), (torch.float32, 0, (1, 1))):
        out = torch.empty(4, HEADS, 16)
        scales = dict(q_descale=of_q, k_descale=of_k, v_descale=of_v)
        unified(p, q.to(q_dtype), counts, out, kv_quant_mode=mode, **scales)
        for row, tokens in enumerate(torch.arange(4).split(counts)):
            keys, values = p.keys[row].double() * factors[0], p.values[row].double() * factors[1]
            expected, _ = attention64(q.to(q_dtype)[tokens], keys, values, True, scale=0.25)
            assert_near(out[tokens], expected)


def test_unified_attention_divides_an_output_in_fp8_and_saturates() -> None:
    p = Paged((6, 9))
    q, counts, scale = p.new(4, HEADS, 16), (1, 3), torch.tensor([0.002])
    out = torch.zeros(4, HEADS, 16, dtype=FP8)
    unified(p, q, counts, out, output_scale=scale)
    for row, tokens in enumerate(torch.arange(4).split(counts)):
        expected = attention64(q[tokens], p.keys[row], p.values[row], True, scale=0.25)[0] / scale.double()
        assert_near(out[tokens].float(), expected.clamp(-448, 448), 2**-4)
    assert (out.float().abs() == 448).any()


@pytest.mark.parametrize(
    "changed",
    [
        dict(qq_bias=torch.zeros(3, 3)),
        dict(mm_prefix_range=torch.zeros(2, 1, 2)),
        dict(rswa_prefix_lens=torch.zeros(2)),
        dict(rswa_window=3),
        dict(chunk_lookback=0),
        dict(kv_quant_mode=3),
        dict(k_scale_cache=torch.zeros(1)),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_unified_attention_names_what_it_refuses(changed: dict[str, Any]) -> None:
    p = Paged((3, 5))
    with pytest.raises(Unsupported, match=f"unified_attention: {next(iter(changed))}"):
        unified(p, p.new(4, HEADS, 16), (1, 3), torch.empty(4, HEADS, 16), **changed)


# -- FlashInfer ------------------------------------------------------------------------------------------------------


def cache_in(p: Paged, layout: str, together: bool) -> Any:
    """The caches of the problem as FlashInfer gets them."""
    order = [cache if layout == "NHD" else cache.transpose(1, 2).contiguous() for cache in p.caches]
    return torch.stack(order, 1) if together else tuple(order)


@pytest.mark.parametrize(("layout", "together"), [("NHD", True), ("HND", True), ("HND", False)])
def test_flashinfer_prefill(backend: str, layout: str, together: bool) -> None:
    p = Paged((7, 0, 13))
    counts = (2, 1, 5)
    q, sinks = p.new(8, HEADS, 16), torch.tensor([1.0, -1.0, 0.5, 2.0])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(
        starts_of(*counts), p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, causal=True, sm_scale=0.3,
        window_left=5, logits_soft_cap=2.0, q_data_type=torch.float32,
    )  # fmt: skip
    out, lse = torch.empty_like(q), torch.empty(8, HEADS)
    scales = dict(q_scale=2.0, k_scale=0.5, v_scale=1.5)
    found = wrapper.run(q, cache_in(p, layout, together), out=out, lse=lse, return_lse=True, sinks=sinks, **scales)
    assert found[0] is out and found[1] is lse
    for row, tokens in enumerate(torch.arange(8).split(counts)):
        expected, natural = attention64(
            q[tokens], p.keys[row], p.values[row] * 1.5, True, (5, 0), 0.3, softcap=2.0, sinks=sinks
        )
        assert_near(out[tokens], expected)
        assert_near(lse[tokens], natural / math.log(2))


def test_flashinfer_decode_in_base_2_with_an_empty_row_and_several_queries(backend: str) -> None:
    p = Paged((7, 0, 12))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    for queries, options in ((1, dict(disable_split_kv=True)), (3, dict(q_len_per_req=3, fixed_split_size=2))):
        wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, "NONE", -1, q_data_type="float32", **options)
        q = p.new(3 * queries, HEADS, 16)
        out, lse = wrapper.run_return_lse(q, tuple(p.caches))
        assert (out[queries : 2 * queries] == 0).all() and (lse[queries : 2 * queries] == -math.inf).all()
        for row in (0, 2):
            tokens = slice(row * queries, (row + 1) * queries)
            expected, natural = attention64(q[tokens], p.keys[row], p.values[row], causal=True)
            assert_near(out[tokens], expected)
            assert_near(lse[tokens], natural / math.log(2))
    wrapper.end_forward()


def test_flashinfer_s_forward_brings_options_of_its_own(backend: str) -> None:
    p = Paged((7, 5))
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    tables, shape, counts = (p.indptr, p.indices, p.last), (HEADS, 2, 16, p.page), (3, 2)
    q = p.new(5, HEADS, 16)
    for wrapper in (decode, prefill):
        with pytest.raises(InvalidArgument, match="plan comes before forward"):
            wrapper.forward(q, tuple(p.caches))
    decode.begin_forward(*tables, *shape, q_data_type="float32", sm_scale=0.1)
    prefill.begin_forward(starts_of(*counts), *tables, *shape, q_data_type="float32", window_left=1, sm_scale=0.1)
    options: dict[str, Any] = dict(window_left=3, logits_soft_cap=2.0, sm_scale=0.3, k_scale=0.5)
    one, one_lse = decode.forward_return_lse(q[:2], tuple(p.caches), q_scale=2.0, **options)
    many, lse = prefill.forward_return_lse(q, tuple(p.caches), True, **options)
    assert torch.equal(prefill.forward(q, tuple(p.caches), True, **options), many)
    assert torch.equal(decode.forward(q[:2], tuple(p.caches), "NONE", 2.0, **options), one)
    for row, tokens in enumerate(torch.arange(5).split(counts)):
        expected, natural = attention64(q[row : row + 1], p.keys[row], p.values[row], True, (3, 0), 0.3, 2.0)
        assert_near(one[row], expected[0])
        assert_near(one_lse[row], natural[0] / math.log(2))
        expected, natural = attention64(q[tokens], p.keys[row], p.values[row], True, (3, 0), 0.15, 2.0)
        assert_near(many[tokens], expected)
        assert_near(lse[tokens], natural / math.log(2))
    plain = prefill.forward(q, tuple(p.caches))
    for row, tokens in enumerate(torch.arange(5).split(counts)):
        assert_near(plain[tokens], attention64(q[tokens], p.keys[row], p.values[row])[0])
    with pytest.raises(Unsupported, match="pos_encoding_mode is not offered"):
        decode.forward(q[:2], tuple(p.caches), "ALIBI")


def test_flashinfer_fp8_with_scales_on_the_device() -> None:
    p = Paged((6, 9), dtype=FP8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, q_data_type=torch.float32, data_type=FP8)
    q = p.new(2, HEADS, 16, dtype=torch.float32)
    out = wrapper.run(q, tuple(p.caches), q_scale=torch.tensor(2.0), k_scale=torch.tensor(0.3), v_scale=torch.tensor(3))
    for row in range(2):
        keys, values = p.keys[row].double() * 0.6, p.values[row].double() * 3
        assert_near(out[row], attention64(q[row : row + 1], keys, values)[0][0])


def test_flashinfer_keeps_a_captured_graph_s_addresses() -> None:
    small, large = Paged((3, 2)), Paged((13, 5), seed=1)
    buffers = [torch.zeros(3).int(), torch.full((9,), GARBAGE_ID).int(), torch.zeros(2).int(), torch.zeros(3).int()]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, *buffers[:3])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, buffers[3], *buffers[:3])
    seen = []
    for p, counts in ((small, (1, 2)), (large, (2, 1))):
        tables, shape = (p.indptr, p.indices, p.last), (HEADS, 2, 16, p.page)
        q = p.new(2, HEADS, 16)
        decode.plan(*tables, *shape, q_data_type=torch.float32)
        addresses = [decode._table.data_ptr(), decode._lens.data_ptr(), decode._starts.data_ptr()]
        out = decode.run(q, tuple(p.caches))
        for row in range(2):
            assert_near(out[row], attention64(q[row : row + 1], p.keys[row], p.values[row])[0][0])
        q = p.new(3, HEADS, 16)
        prefill.plan(starts_of(*counts), *tables, *shape, causal=True, q_data_type=torch.float32)
        addresses += [prefill._table.data_ptr(), prefill._lens.data_ptr(), prefill._starts.data_ptr()]
        out = prefill.run(q, tuple(p.caches))
        for row, tokens in enumerate(torch.arange(3).split(counts)):
            assert_near(out[tokens], attention64(q[tokens], p.keys[row], p.values[row], True)[0])
        seen.append(addresses)
    assert seen[0] == seen[1]
    with pytest.raises(InvalidArgument, match="3 rows, captured with 2"):
        decode.plan(torch.zeros(4).int(), large.indices, torch.zeros(3).int(), *shape)
    with pytest.raises(InvalidArgument, match="needs all buffers"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)


def test_flashinfer_refuses_what_does_not_fit_its_buffers_before_it_writes_there() -> None:
    p = Paged((3, 2))
    indptr, indices, last, queries = (
        torch.zeros(3).int(),
        torch.zeros(9).int(),
        torch.zeros(2).int(),
        torch.zeros(3).int(),
    )
    decode_of, prefill_of = (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    )
    longer = torch.zeros(4).int()
    for buffers in ((longer, indices, last), (indptr[:2], indices, last)):
        with pytest.raises(InvalidArgument, match=r"a buffer of \d offsets, the rows need 3"):
            decode_of(WORKSPACE, "NHD", True, False, *buffers)
    with pytest.raises(InvalidArgument, match="a buffer of 4 offsets, the rows need 3"):
        prefill_of(WORKSPACE, "NHD", True, longer, indptr, indices, last)
    tables, shape = (p.indptr, p.indices, p.last), (HEADS, 2, 16, p.page)
    prefill = prefill_of(WORKSPACE, "NHD", True, queries, indptr, indices, last)
    with pytest.raises(InvalidArgument, match="qo_indptr has 2 entries for 2 rows"):
        prefill.plan(starts_of(1), *tables, *shape)
    assert not any(buffer.any() for buffer in (queries, indptr, indices, last))
    prefill.plan(starts_of(1, 1), *tables, *shape, max_sequence_kv=12)
    kept = [buffer.clone() for buffer in (queries, indptr, indices, last)]
    with pytest.raises(InvalidArgument, match="a table of 1 columns, captured with 3"):
        prefill.plan(starts_of(2, 2), p.indptr, p.indices.flip(0), p.last - 1, *shape, max_sequence_kv=4)
    assert all(torch.equal(*pair) for pair in zip((queries, indptr, indices, last), kept, strict=True))


def test_flashinfer_ends_contexts_with_their_table(backend: str) -> None:
    """A table that has fewer pages than the rows say ends their contexts: nothing is read behind it."""
    p = Paged((7, 12))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    table = p.table[:, :2].contiguous()
    wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, q_data_type="float32", block_tables=table)
    q = p.new(2, HEADS, 16)
    out = wrapper.run(q, tuple(p.caches))
    for row in range(2):
        assert_near(out[row], attention64(q[row : row + 1], p.keys[row][:8], p.values[row][:8])[0][0])


def test_flashinfer_takes_a_dense_table_too() -> None:
    p = Paged((7, 9))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, q_data_type="float32", block_tables=p.table)
    q = p.new(2, HEADS, 16)
    out = wrapper.run(q, tuple(p.caches))
    for row in range(2):
        assert_near(out[row], attention64(q[row : row + 1], p.keys[row], p.values[row])[0][0])


@pytest.mark.parametrize(
    ("where", "changed", "error", "message"),
    [
        ("plan", dict(pos_encoding_mode="ALIBI"), Unsupported, "pos_encoding_mode is not offered"),
        ("plan", dict(custom_mask=torch.ones(4)), Unsupported, "custom_mask is not offered"),
        ("plan", dict(prefix_len_ptr=torch.ones(2)), Unsupported, "prefix_len_ptr is not offered"),
        ("run", dict(kv_cache_sf=torch.ones(2)), Unsupported, "kv_cache_sf is not offered"),
        ("run", dict(skip_softmax_threshold_scale_factor=0.1), Unsupported, "skip_softmax"),
        ("run", dict(window_left=3), InvalidArgument, "window_left 3 at run, -1 in plan"),
        ("run", dict(q=torch.zeros(2, HEADS, 16).half()), InvalidArgument, "planned"),
        ("run", dict(paged_kv_cache=(torch.zeros(9, 8, 2, 16),) * 2), InvalidArgument, "pages of 8, planned 4"),
    ],
)
def test_flashinfer_names_what_it_refuses(
    where: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    p = Paged((7, 9))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(InvalidArgument, match="plan comes before run"):
        wrapper.run(p.new(2, HEADS, 16), tuple(p.caches))
    tables = (starts_of(1, 1), p.indptr, p.indices, p.last, HEADS, 2, 16, p.page)
    with pytest.raises(error, match=message):
        wrapper.plan(*tables, q_data_type="float32", **(changed if where == "plan" else {}))
        wrapper.run(**dict(q=p.new(2, HEADS, 16), paged_kv_cache=tuple(p.caches)) | changed)


def test_flashinfer_refuses_custom_kernels_and_unknown_layouts() -> None:
    for wrapper in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        with pytest.raises(Unsupported, match="jit_args"):
            wrapper(WORKSPACE, jit_args=["name"])
        with pytest.raises(InvalidArgument, match="kv_layout 'DNH'"):
            wrapper(WORKSPACE, "DNH")


# -- all of them -----------------------------------------------------------------------------------------------------


def test_physical_tables_are_refused_once_a_unit_has_moved() -> None:
    """With real pools, through every adapter that takes a table."""
    pool = pool_of(disturbance=ChaosMigration(1))
    sequences = pool.admit([5, 9])
    batch = pool.batch(sequences)
    keys, values = pool.kv(1)
    for cache in (keys, values):
        cache.copy_(torch.randn(cache.shape))
    table, csr, q = batch.physical(), batch.physical_csr(), torch.randn(2, HEADS, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(csr, csr, csr, HEADS, 2, 16, 4, q_data_type="float32")

    def flash(module: Any, name: str) -> torch.Tensor:
        result = module.flash_attn_with_kvcache(q[:, None], keys, values, cache_seqlens=batch.seq_lens, **{name: table})
        return result[:, 0]

    def unified_call() -> torch.Tensor:
        out = torch.empty_like(q)
        starts = starts_of(1, 1)
        lens = batch.seq_lens
        vllm.unified_attention(
            q, keys, values, out, starts, 1, lens, 9, 0.25, True, (-1, -1), table, 0, None, None, None
        )
        return out

    def append() -> None:
        new, rows = torch.randn(1, 2, 16), torch.tensor([0]).int()
        flashinfer.append_paged_kv_cache(new, new, rows, rows, (keys, values), csr, csr, csr)

    calls = (
        lambda: flash(flash_attn, "block_table"),
        lambda: flash(flash_attn_3, "page_table"),
        unified_call,
        lambda: decode.run(q, (keys, values)),
    )
    results = [call() for call in calls]
    for other in results[1:]:
        assert_near(other, results[0])
    append()
    pool.extend(sequences)
    assert pool.stats().units_moved
    for call in (*calls, append, lambda: decode.plan(csr, csr, csr, HEADS, 2, 16, 4)):
        with pytest.raises(Inconsistent, match="stale"):
            call()


def test_null_pages_of_an_arena_are_neither_read_nor_written_through_a_physical_table() -> None:
    """Padding rows and released pages have id 0 there, which is an ordinary page in a plain tensor."""
    caches = [torch.full((4, 4, 2, 16), math.nan) for _ in range(2)]
    stamped = PhysicalTable(Counters(), 0, torch.tensor([[3, 1], [0, 0]]).int())
    new = torch.randn(2, 1, 2, 16)
    q, lens = torch.randn(2, 1, HEADS, 16), torch.tensor([0, 2]).int()
    out = flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lens, block_table=stamped)
    assert torch.equal(caches[0][3, 0], new[0, 0]) and caches[0][0].isnan().all()
    assert (out[1] == 0).all() and not out[0].isnan().any()


def test_a_batch_of_virtual_ids_is_no_physical_table() -> None:
    pool = pool_of()
    batch = pool.batch(pool.admit([5]))
    with pytest.raises(InvalidArgument, match=r"Batch\.physical"):
        flash_attn.flash_attn_with_kvcache(torch.zeros(1, 1, HEADS, 16), *pool.kv(1), block_table=batch)


def test_block_0_is_read_as_any_other(backend: str) -> None:
    p = Paged((4,))
    assert p.table[0, 0] == 0
    q = p.new(1, HEADS, 16)
    expected = attention64(q, p.keys[0], p.values[0], scale=0.25)[0]
    out = torch.empty_like(q)
    unified(p, q, (1,), out)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, q_data_type="float32")
    arguments: dict[str, Any] = dict(q=q[None], k_cache=p.caches[0], v_cache=p.caches[1], cache_seqlens=p.lens)
    for found in (
        out,
        wrapper.run(q, tuple(p.caches)),
        flash_attn.flash_attn_with_kvcache(**arguments, block_table=p.table)[0],
        flash_attn_3.flash_attn_with_kvcache(**arguments, page_table=p.table)[0],
    ):
        assert_near(found, expected)


def test_nothing_waits_for_the_device() -> None:
    """On meta tensors there is no value to wait for: whoever asks for one fails."""
    meta = torch.device("meta")

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=meta)

    caches = [torch.empty(6, 4, 2, 16, device=meta) for _ in range(2)]
    q, new, lens = torch.empty(3, 2, HEADS, 16, device=meta), torch.empty(3, 2, 2, 16, device=meta), ints(3)
    arguments: dict[str, Any] = dict(k=new, v=new, cache_seqlens=lens, causal=True, return_softmax_lse=True)
    flash_attn.flash_attn_with_kvcache(q, *caches, block_table=ints(3, 5), **arguments)
    flash_attn_3.flash_attn_with_kvcache(q, *caches, page_table=ints(3, 5), **arguments)
    flat, causal = q.flatten(0, 1), torch.zeros(3, dtype=torch.bool, device=meta)
    out, scale = torch.empty(6, HEADS, 16, dtype=FP8, device=meta), torch.ones(1, device=meta)
    vllm.unified_attention(
        flat, *caches, out, ints(4), 2, lens, 9, 0.25, causal, (3, 0), ints(3, 5), 0, scale, scale, scale,
        output_scale=scale, kv_quant_mode=1,
    )  # fmt: skip
    workspace = torch.empty(16, device=meta)
    shape = (HEADS, 2, 16, 4)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    decode.plan(ints(4), ints(7), ints(3), *shape, q_data_type="float32", seq_lens=torch.tensor([9, 0, 4]))
    assert decode._table.shape == (3, 3)
    decode.run(q[:, 0], tuple(caches), return_lse=True, k_scale=scale)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(ints(4), ints(4), ints(7), ints(3), *shape, q_data_type="float32", max_sequence_kv=9)
    prefill.run(flat, tuple(caches), return_lse=True)
    assert prefill._table.shape == (3, 3)
    flashinfer.append_paged_kv_cache(new[:, 0], new[:, 0], ints(3), ints(3), tuple(caches), ints(7), ints(4), ints(3))
    buffers = ints(4), ints(7), ints(3)
    captured = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", True, False, *buffers)
    captured.plan(ints(4), ints(6), ints(3), *shape, q_data_type="float32", seq_lens=torch.tensor([9, 0, 4]))
    assert captured._table.shape == (3, 7)
    many = ints(30001), ints(30001), ints(30000), ints(30000)
    with pytest.raises(InvalidArgument, match="dense table of 30000 rows"):
        prefill.plan(*many, *shape, max_sequence_kv=10**6)


def test_flashinfer_asks_the_device_for_the_longest_row_only_without_a_bound() -> None:
    """On meta tensors, asking fails. A table of all pages for every row would be rows times too large."""
    meta = [torch.zeros(count, dtype=torch.int32, device="meta") for count in (4, 7, 3)]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        decode.plan(*meta, HEADS, 2, 16, 4)
    on_host = [torch.tensor([0, 1, 5, 7]).int(), *meta[1:]]
    decode.plan(*on_host, HEADS, 2, 16, 4, seq_lens=torch.tensor([1, 2, 3]))
    assert decode._table.shape == (3, 4)


def test_csr_objects_and_plain_tensors_give_the_same() -> None:
    p = Paged((7, 9))
    csr = PhysicalCsr(Counters(), 0, p.indptr, p.indices + 1, p.last)
    shifted = [torch.cat([torch.full_like(cache[:1], math.nan), cache]) for cache in p.caches]
    q, wrapper = p.new(2, HEADS, 16), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(csr, csr, csr, HEADS, 2, 16, p.page, q_data_type="float32")
    found = wrapper.run(q, tuple(shifted))
    wrapper.plan(p.indptr, p.indices, p.last, HEADS, 2, 16, p.page, q_data_type="float32")
    assert torch.equal(found, wrapper.run(q, tuple(p.caches)))
