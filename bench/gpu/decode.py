"""Decode attention, beside torch's own on contiguous data, a plain paged cache, and whatever peers are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from copy import copy
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from avmp import ops
from bench.gpu.bandwidth import Ceiling, rate, ratio
from bench.gpu.problems import Bench, differing
from bench.gpu.run import NotPossible, Row

BATCHES, CONTEXTS, PAGES = (1, 8, 64, 256), (1024, 4096, 8192, 32_768, 131_072), (16, 64)
FIRST = (
    *((8, 8192, 16), (64, 8192, 16), (1, 8192, 16), (256, 1024, 16), (64, 8192, 64), (1, 131_072, 16)),
    *((8, 32_768, 16), (256, 8192, 16), (8, 1024, 16), (1, 1024, 16), (8, 8192, 64), (64, 32_768, 16)),
)
"""What matters most comes first: the budget drops from the end."""
TINY = ((1, 64, 16), (2, 64, 64))
LANES = ((64, 8192), (8, 8192), (256, 1024))
LAYERS = 4
TOLERANCE = 2.0**-6
"""Of the largest output: two roundings of weights to bf16, in different places."""
MOST_OF_MEMORY = 0.4
"""For the pages; as much again for the same keys and values side by side."""

MOST_TOKENS = 64 * 131_072 + 4096

Call = Callable[[], Any]


def free_bytes(device: torch.device) -> int:
    """Of the device, what nobody uses: memory that torch holds back from sections before is given up first."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class Cache:
    """Pages of random keys and values, all of them in use by nobody: a case takes as many as it needs.

    ``heads`` query heads on ``kv_heads`` of ``dim``; the pages are cut out of one storage, whatever their size.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.heads, self.kv_heads, self.dim = bench.size((32, 8, 128), (4, 2, 32))
        self.token = 2 * self.kv_heads * self.dim
        tokens = 4096
        if not bench.dry:
            tokens = min(int(MOST_OF_MEMORY * free_bytes(bench.device)) // (2 * self.token), MOST_TOKENS)
        self.storage = bench.random(tokens // 4096 * 4096 * self.token)

    def case(self, batch: int, context: int, page: int, layers: int = 1) -> Case:
        """Raises NotPossible where there are not so many tokens. With ``layers``, a page holds those of all of them,
        one after the other, and the case is about the second."""
        tokens = len(self.storage) // self.token // layers
        if batch * context + page > tokens:
            raise NotPossible(f"memory: {batch * context} tokens, there is room for {tokens}")
        pages = self.storage.view(-1, layers, 2, page, self.kv_heads, self.dim)[:, layers // 2]
        return Case(self, pages, batch, context)


class Case:
    """One step of decoding: every method yields a call that can be timed."""

    def __init__(self, cache: Cache, pages: torch.Tensor, batch: int, context: int) -> None:
        bench, self.pages, self.first_valid_id = cache.bench, pages, 1
        self.keys, self.values = pages[:, 0], pages[:, 1]
        self.cache, self.batch, self.context, self.page = cache, batch, context, pages.shape[2]
        count = batch * context // self.page
        physical = bench.permutation(len(pages) - 1)[:count] + 1
        self.virtual = (bench.permutation(count, 1) + 1).view(batch, -1)
        self.page_table = torch.zeros(count + 1, dtype=torch.int32, device=bench.device)
        self.page_table[self.virtual.view(-1).long()] = physical
        self.physical = physical.view(batch, -1)
        self.q = bench.random(batch, cache.heads, cache.dim, seed=5)
        self.lens, self.starts = bench.ints([context] * batch), bench.ints(range(batch + 1))
        self.scale = cache.dim**-0.5
        self.computed_by: dict[str, str] = {}
        self.bytes = batch * context * cache.token * pages.element_size()

    def attend(self, table: torch.Tensor, **keywords: Any) -> Call:
        lengths = dict(scale=self.scale, max_query_len=1, max_seq_len=self.context)
        keys, values = self.keys, self.values
        return lambda: ops.paged_attention(self.q, keys, values, table, self.lens, self.starts, **lengths, **keywords)

    def avmp(self) -> Call:
        return self.attend(self.virtual, page_table=self.page_table)

    def physical_ids(self) -> Call:
        return self.attend(self.physical, first_valid_id=self.first_valid_id)

    def plain(self) -> Case:
        """The same step on other tokens: keys and values in a cache of their own each, with physical ids from 0, as
        engines without lanes keep them."""
        other = copy(self)
        other.keys, other.values = self.pages.flatten(0, 1).chunk(2)
        order = self.cache.bench.permutation(len(other.keys), 2)
        other.physical, other.first_valid_id = order[: self.physical.numel()].view_as(self.physical), 0
        return other

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values behind the physical ids, ``[batch, context, kv_heads, dim]``."""
        lengths = dict(max_seq_len=self.context, first_valid_id=self.first_valid_id)
        keys, values = ops.gather_kv(self.keys, self.values, self.physical, self.lens, **lengths)
        assert values is not None
        return keys, values

    def sdpa(self, keys: torch.Tensor, values: torch.Tensor) -> Call:
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        call = self._sdpa("sdpa", self.q[:, :, None], k, v, scale=self.scale, enable_gqa=True)
        return lambda: call().squeeze(2)

    def sdpa_grouped(self, keys: torch.Tensor, values: torch.Tensor) -> Call:
        """The heads of a group as the rows of one query."""
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        q = self.q.view(self.batch, self.cache.kv_heads, -1, self.cache.dim)
        call = self._sdpa("sdpa, grouped", q, k, v, scale=self.scale)
        return lambda: call().flatten(1, 2)

    def _sdpa(self, name: str, *tensors: torch.Tensor, **keywords: Any) -> Call:
        """Torch's attention; ``computed_by`` says by which of its backends, which depends on device, shape and
        version."""
        self.computed_by[name] = SDPBackend(torch._fused_sdp_choice(*tensors, **keywords)).name
        return lambda: F.scaled_dot_product_attention(*tensors, **keywords)


# -- peers: whatever of them is installed; the arguments are theirs ----------------------------------------------------


def flash_attn(case: Case, keys: torch.Tensor, values: torch.Tensor) -> Call:
    """On contiguous data: its paged form takes pages of 256 tokens only."""
    from flash_attn import flash_attn_with_kvcache

    q = case.q[:, None]
    lengths = dict(cache_seqlens=case.lens, softmax_scale=case.scale)
    return lambda: flash_attn_with_kvcache(q, keys, values, **lengths).squeeze(1)


def flashinfer(case: Case, keys: torch.Tensor, values: torch.Tensor) -> Call:
    import flashinfer

    ints, per_row = case.cache.bench.ints, case.context // case.page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=case.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        ints([row * per_row for row in range(case.batch + 1)]),
        case.physical.flatten(),
        ints([case.page] * case.batch),
        case.cache.heads,
        case.cache.kv_heads,
        case.cache.dim,
        case.page,
        q_data_type=case.q.dtype,
        kv_data_type=case.q.dtype,
        sm_scale=case.scale,
    )
    return lambda: wrapper.run(case.q, case.pages)


def vllm(case: Case, keys: torch.Tensor, values: torch.Tensor) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = torch.empty_like(case.q)
    arguments = dict(
        q=case.q,
        k=case.pages[:, 0],
        v=case.pages[:, 1],
        out=out,
        cu_seqlens_q=case.starts,
        max_seqlen_q=1,
        seqused_k=case.lens,
        max_seqlen_k=case.context,
        softmax_scale=case.scale,
        causal=True,
        window_size=(-1, -1),
        block_table=case.physical,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return lambda: (unified_attention(**arguments), out)[1]


PEERS = {"flash_attn": flash_attn, "flashinfer": flashinfer, "vllm": vllm}


# -- rows ------------------------------------------------------------------------------------------------------------


def difference(mine: torch.Tensor, right: torch.Tensor) -> float:
    """The largest, as a share of the largest output; NaN where either is."""
    return float((mine.float() - right.float()).abs().max() / right.float().abs().max())


def imported(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """``found``, with its version or, under ``missing``, why there is none."""
    try:
        found["version"] = str(getattr(importlib.import_module(name), "__version__", None))
    except Exception as error:  # a package built for another torch fails in ways of its own
        found["missing"] = f"{type(error).__name__}: {error}"
    return found


def rows(bench: Bench, ceiling: Ceiling) -> Iterator[Row]:
    """All batches, contexts and page sizes, what matters most first."""
    caches: list[Cache] = []
    grid = dict.fromkeys((*FIRST, *product(BATCHES, CONTEXTS, PAGES)))
    for batch, context, page in bench.size(grid, TINY):

        def make(batch: int = batch, context: int = context, page: int = page) -> dict[str, Any]:
            if not caches:
                caches.append(Cache(bench))
            return _timed(bench, ceiling, caches[0].case(batch, context, page))

        yield Row(f"batch {batch}, context {context}, page {page}", make)


def _timed(bench: Bench, ceiling: Ceiling, case: Case) -> dict[str, Any]:
    plain = case.plain()
    calls = {"avmp": case.avmp(), "physical ids": case.physical_ids(), "plain pages": plain.physical_ids()}
    differences = {"plain pages": difference(calls["plain pages"](), plain.sdpa(*plain.contiguous())())}
    keys, values = case.contiguous()
    calls |= {"sdpa": case.sdpa(keys, values), "sdpa, grouped": case.sdpa_grouped(keys, values)}
    mine, right = calls["avmp"](), calls["sdpa"]()
    differences |= {"avmp": difference(mine, right), "sdpa, grouped": difference(calls["sdpa, grouped"](), right)}
    bytes_by_table = differing(mine, calls["physical ids"]())[0]
    figures: dict[str, Any] = {"batch": case.batch, "context": case.context, "page": case.page, "kv_bytes": case.bytes}
    figures |= {"differences": differences, "bytes_differing_by_page_table": bytes_by_table}
    figures["ok"] = bytes_by_table == 0 and all(one <= TOLERANCE for one in differences.values())
    if not figures["ok"]:  # nothing is timed that is not right
        return figures
    figures["computed_by"] = case.computed_by
    timings = {name: bench.timer.measure(call) for name, call in calls.items()}
    reached = rate(case.bytes, timings["avmp"])
    figures |= {"gb_per_second": reached, "share_of_copy": ratio(reached, ceiling.gb_per_second), "timings": timings}
    mine_us = timings["avmp"]["median_us"]
    figures["times_as_long_as"] = {name: ratio(mine_us, one["median_us"]) for name, one in timings.items()}
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return figures


def lane_rows(bench: Bench) -> Iterator[Row]:
    """One of four attention layers: its pages in a lane of their own, and in one envelope with the other three."""
    caches: list[Cache] = []
    for batch, context in bench.size(LANES, ((2, 64),)):

        def make(batch: int = batch, context: int = context) -> dict[str, Any]:
            if not caches:
                caches.append(Cache(bench))
            cases = {
                "lanes": caches[0].case(batch, context, 16),
                "envelope": caches[0].case(batch, context, 16, LAYERS),
            }
            differences = {
                name: difference(case.avmp()(), case.sdpa(*case.contiguous())()) for name, case in cases.items()
            }
            judged = {"differences": differences, "ok": all(one <= TOLERANCE for one in differences.values())}
            if not judged["ok"]:
                return judged
            taken = {name: bench.timer.measure(case.avmp()) for name, case in cases.items()}
            return (
                judged
                | taken
                | {"lanes_over_envelope": ratio(taken["lanes"]["median_us"], taken["envelope"]["median_us"])}
            )

        yield Row(f"batch {batch}, context {context}, {LAYERS} layers", make)


def peer_rows(bench: Bench) -> Iterator[Row]:
    """Peers that are installed, each beside ours; they come late, as their imports and compilations may take minutes.
    What they refuse or lack, or compute otherwise, is no failure of ours."""
    caches: list[Cache] = []
    for name, make_call in PEERS.items():
        found: dict[str, Any] = {}
        yield Row(name, lambda name=name, found=found: imported(name, found))
        if "missing" in found:
            continue
        for batch, context, page in bench.size(FIRST, TINY)[:6]:

            def make(size: tuple[int, ...] = (batch, context, page), make_call: Any = make_call) -> dict[str, Any]:
                if not caches:
                    caches.append(Cache(bench))
                case = caches[0].case(*size)
                try:
                    call = make_call(case, *case.contiguous())
                    apart = difference(call(), case.avmp()())
                    if not apart <= TOLERANCE:
                        return {
                            "refused": f"its result is another one, by {apart:.2g} of the largest",
                            "difference": apart,
                        }
                    theirs = bench.timer.measure(call)
                except Exception as error:
                    return {"refused": f"{type(error).__name__}: {error}"}
                mine = bench.timer.measure(case.avmp())
                times = ratio(mine["median_us"], theirs["median_us"])
                return {"difference": apart, "avmp": mine, "peer": theirs, "times_as_long": times}

            yield Row(f"{name}: batch {batch}, context {context}, page {page}", make)
