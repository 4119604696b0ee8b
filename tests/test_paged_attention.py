"""Paged attention: kernels and reference against float64, features in pairs, and what must not change a bit."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import (
    attention_launch,
    attention_pages,
    attention_reference,
    attention_tiles,
    attention_tuning,
    paged_attention,
)
from tests import triton_interpreter
from tests.attention_problems import Expected, Problem, Shape, low_precision, make_problem, oracle
from tests.test_attention_limits import Recorder

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

MODULES = {"kernels": paged_attention.paged_attention, "reference": attention_reference.paged_attention}
GUARD = 7.0

FACTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "type": (
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "fp8": "e4m3", "scales": "head"},
        {"dtype": torch.float16, "fp8": "e5m2", "scales": "tensor"},
        {"dtype": torch.float32, "fp8": "e4m3", "scales": "row"},
    ),
    "rows": (
        {"lens": (37, 5, 64), "queries": (1, 1, 1)},
        {"lens": (21, 0, 33), "queries": (2, 3, 4), "leading_tokens": 1},
        {"lens": (40, 12, 70), "queries": (11, 12, 9)},
        {"lens": (65, 30, 20), "queries": (1, 13, 3), "padded_rows": 1, "padded_tokens": 2, "leading_tokens": 2},
    ),
    "heads": tuple({"heads": h, "kv_heads": k} for h, k in ((4, 4), (4, 2), (5, 1), (6, 2), (16, 1))),
    "dims": tuple({"head_dim": d, "head_dim_v": v} for d, v in ((16, 16), (80, 80), (64, 128), (112, 96), (256, 32))),
    "page": tuple({"page_tokens": n} for n in (16, 1, 24, 64, 48, 256)),
    "order": ({"order": "NHD"}, {"order": "HND"}, {"order": "NHD", "sliced": True}, {"order": "HND", "sliced": True}),
    "ids": ({"virtual": True}, {"virtual": False}, {"virtual": False, "first_valid_id": 0}),
    "mask": ({}, {"window": 9}, {"window": (6, 3), "causal": False}, {"causal": False}),
    "scores": (
        {},
        {"softcap": 3.0},
        {"alibi": "head"},
        {"alibi": "row", "softcap": 20.0},
        {"alibi": "head", "alibi_form": "position"},
        {"alibi": "row", "alibi_form": "root"},
    ),
    "sinks": ({}, {"sinks": True}),
    "null": ({}, {"null_columns": ((0, 0), (2, 0))}),
    "splits": ({"num_splits": 0}, {"num_splits": 1}, {"num_splits": 4}),
}


def pairwise(seed: int) -> Iterator[dict[str, Any]]:
    """Few cases in which any two values of any two factors meet once at least."""
    rng = random.Random(seed)
    names = list(FACTORS)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(FACTORS[a]))
        for y in range(len(FACTORS[b]))
    }
    while open_pairs:
        seed_pair = min(open_pairs)
        chosen = {seed_pair[0]: seed_pair[1], seed_pair[2]: seed_pair[3]}
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                gains = [(closes(name, x, chosen, open_pairs), rng.random(), x) for x in range(len(FACTORS[name]))]
                chosen[name] = max(gains)[2]
        open_pairs -= {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}
        yield {key: value for name in names for key, value in FACTORS[name][chosen[name]].items()}


def closes(name: str, value: int, chosen: dict[str, int], open_pairs: set[tuple[str, int, str, int]]) -> int:
    return sum(((name, value, b, y) in open_pairs) + ((b, y, name, value) in open_pairs) for b, y in chosen.items())


CASES = list(pairwise(0))


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0xFF)


def attend(module: str, problem: Problem, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The call with an ``out`` that lies in the middle of guarded memory, and NaN in all that is allocated."""
    call = problem.with_(**changed)
    q, width = call["q"], call["value_cache"].shape[3]
    memory = torch.full((len(q) + 2, q.shape[1] + 2, width + 8), GUARD, dtype=q.dtype)
    out = memory[1:-1, 1:-1, 8:]
    out.fill_(float("nan"))
    stock = torch.empty
    try:
        torch.empty = lambda *args, **kwargs: poisoned(stock(*args, **kwargs))  # type: ignore[assignment]
        attention_pages.MEMORY.kept.clear()
        found, lse = MODULES[module](**call, out=out)
    finally:
        torch.empty = stock  # type: ignore[assignment]
    assert found is out
    result = out.clone()
    out.fill_(GUARD)
    assert (memory == GUARD).all()
    return result, lse


@pytest.mark.parametrize("number", range(len(CASES)))
def test_features_in_pairs(number):
    case = dict(CASES[number])
    splits = case.pop("num_splits")
    problem = make_problem(Shape(**case), seed=number)
    expected = Expected(problem.call)
    with triton_interpreter.program_order(triton_interpreter.ORDERS[number % 3], seed=number):
        expected.check(*attend("kernels", problem, num_splits=splits))
    expected.check(*attend("reference", problem))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_batch_of_decode_and_prefill(program_order, splits):
    """With tokens of no row before and behind, a row of padding, an empty one, one that is all new: two launches and a
    merge write to one ``out``, and each element is written."""
    shape = Shape(
        lens=(65, 150, 0, 3, 20, 70), queries=(1, 40, 0, 3, 20, 8), leading_tokens=2, padded_rows=1, padded_tokens=3,
        heads=6, kv_heads=2, sinks=True, window=(50, 0), dtype=torch.bfloat16,
    )  # fmt: skip
    problem = make_problem(shape)
    Expected(problem.call).check(*attend("kernels", problem, num_splits=splits))


@pytest.mark.parametrize("fault", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fault_of_four_times_the_error_is_found(dtype, fault):
    """The measure itself: a further order of summation passes, and fails with its errors four times as large."""
    call = make_problem(Shape(lens=(150, 90), queries=(9, 1), dtype=dtype, heads=8, sinks=True)).call
    expected = Expected(call)
    errors = [low - right for low, right in zip(low_precision(call, 99), expected.right, strict=True)]
    for which in range(2):
        found = [right.clone() for right in expected.right]
        found[which] += fault * errors[which]
        if fault == 1:
            expected.check(*found)
        else:
            with pytest.raises(AssertionError, match="root of mean square"):
                expected.check(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_over_several_chunks(monkeypatch, dtype):
    """At its own sizes: contexts of several chunks; and where bf16 is read in place, gathered all the same."""
    shape = Shape(lens=(1100, 600, 130), heads=16, kv_heads=8, head_dim=128, head_dim_v=128, dtype=dtype)
    problem = make_problem(shape)
    expected = Expected(problem.call)
    expected.check(*attend("reference", problem))
    monkeypatch.setattr(attention_reference, "MOST_ROWS_TO_SUM_IN_PLACE", 0)
    expected.check(*attend("reference", problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score_bytes", [1, 6000, 1 << 20], ids=["a chunk at a time", "some chunks", "all chunks"])
def test_the_reference_merges_spans_and_groups(monkeypatch, dtype, score_bytes):
    """Chunks of a page, whose scores fit the buffer in part, and rows that share it."""
    monkeypatch.setattr(attention_reference, "CHUNK_BYTES", 1)
    monkeypatch.setattr(attention_reference, "SCORE_BYTES", score_bytes)
    for shape in (
        Shape(lens=(150, 37, 37, 0, 64, 5), queries=(1, 1, 1, 1, 1, 1), dtype=dtype),
        Shape(lens=(150, 37, 90), queries=(20, 1, 1), sinks=True, dtype=dtype),
        Shape(
            lens=(150, 37, 90), queries=(20, 1, 1), window=30, null_columns=((0, 8), (2, 0)), softcap=4.0, dtype=dtype
        ),
        Shape(lens=(90, 37), queries=(2, 2), window=(20, 0), alibi="row", scales="row", fp8="e4m3", dtype=dtype),
    ):
        problem = make_problem(shape)
        Expected(problem.call).check(*attend("reference", problem))


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returns, views left out."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                known = any(isinstance(arg, torch.Tensor) and arg.data_ptr() == tensor.data_ptr() for arg in args)
                self.nbytes = max(self.nbytes, 0 if known else tensor.nbytes)
        return result


@pytest.mark.parametrize("queries", [1, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_the_reference_is_bounded(dtype, queries):
    """Whatever the context, whose keys alone take more here than all that is allocated."""
    shape = Shape(
        lens=(queries, 1), queries=(queries, 1), heads=16, kv_heads=16, head_dim=64, head_dim_v=64, dtype=dtype
    )
    call = make_problem(shape).call
    columns, length = 10_000 // 16, 10_000
    table = call["block_table"][:1, :1].repeat(2, columns)
    lens = torch.tensor([length, 1], dtype=torch.int32)
    with Largest() as largest:
        attention_reference.paged_attention(**call | {"block_table": table, "seq_lens": lens, "max_seq_len": length})
    bound = 2 * attention_reference.SCORE_BYTES
    assert 0 < largest.nbytes <= bound < length * 16 * 64 * dtype.itemsize


def test_threads_share_no_memory_of_the_reference():
    problems = [make_problem(Shape(lens=(150, 37 + n), queries=(1, 1), dtype=torch.bfloat16), seed=n) for n in range(4)]
    alone = [attention_reference.paged_attention(**problem.call) for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda problem: attention_reference.paged_attention(**problem.call), problems * 8))
    for number, (out, lse) in enumerate(together):
        assert torch.equal(out, alone[number % 4][0]) and torch.equal(lse, alone[number % 4][1])


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_splits_at_their_edges(program_order, extra):
    """Contexts around a multiple of splits times tile, shorter than a split, and none at all."""
    problem = make_problem(Shape(lens=(4 * 64 + extra, 5, 0), head_dim=64, head_dim_v=64, sinks=extra == 0))
    Expected(problem.call).check(*attend("kernels", problem, num_splits=4))


def test_equal_calls_give_equal_bits(program_order):
    """When contexts are split by the shapes, too, in whatever order the programs run."""
    problem = make_problem(Shape(lens=(300, 700), queries=(1, 2), heads=2, kv_heads=1))
    first = attend("kernels", problem)
    with triton_interpreter.program_order("shuffle", seed=7):
        again = attend("kernels", problem)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_launches_depend_on_shapes_and_bounds_alone(monkeypatch):
    """Never on what the tables hold: a captured graph is replayed with other rows."""
    recorder = Recorder(monkeypatch, paged_attention, "decode_kernel", "merge_kernel", "prefill_kernel")
    call = make_problem(Shape(lens=(2048, 700, 3), queries=(1, 2, 9))).call
    grids = []
    for lens, starts in (((2048, 700, 3), (0, 1, 3, 12)), ((9, 9, 9), (0, 9, 10, 12)), ((0, 1, 2048), (0, 0, 0, 0))):
        tables = {"seq_lens": torch.tensor(lens).int(), "query_start_loc": torch.tensor(starts).int()}
        paged_attention.paged_attention(**call | tables)
        grids.append(dict(recorder.grids))
    assert set(grids[0]) == {"decode_kernel", "merge_kernel", "prefill_kernel"} and grids[0]["decode_kernel"][2] > 1
    assert grids[0] == grids[1] == grids[2]


def test_equal_calls_split_equally():
    """By shapes alone: never by what the rows hold."""
    counts = [attention_tuning.split_count(8, 1 << power, 4 * 132) for power in range(6, 18)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == attention_tuning.MOST_SPLITS
    assert attention_tuning.split_count(8 * 256, 1 << 17, 4 * 132) == 1


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("virtual", [True, False])
def test_where_pages_lie_changes_no_bit(module, virtual):
    """Any permutation of the physical pages, so any migration between two steps; and virtual ids or physical ones."""
    shape = Shape(lens=(70, 33, 9), queries=(1, 12, 2), virtual=virtual, dtype=torch.bfloat16)
    problem = make_problem(shape)
    first = attend(module, problem)
    call, pages = problem.call, len(problem.call["key_cache"])
    for seed in range(2):
        moved = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages - 1) + 1])
        changed: dict[str, Any] = {}
        for name in ("key_cache", "value_cache"):
            changed[name] = torch.empty_like(call[name])
            changed[name][moved] = call[name]
        if virtual:
            changed["page_table"] = moved.int()[call["page_table"].long()]
        else:
            table = call["block_table"].long()
            known = (table > 0) & (table < pages)
            changed["block_table"] = torch.where(known, moved[table.where(known, 0)], table).int()
        again = attend(module, problem, **changed)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), seed
    if virtual:
        table = call["block_table"].long()
        known = (table > 0) & (table < len(call["page_table"]))
        physical = torch.where(known, call["page_table"].long()[table.where(known, 0)], table).int()
        again = attend(module, problem, block_table=physical, page_table=None)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("softcap", [0.0, 30.0, 50.0])
def test_huge_scores_stay_finite(module, softcap):
    problem = make_problem(Shape(magnitude=100.0, softcap=softcap, queries=(1, 2, 12)))
    found = attend(module, problem)
    assert all(tensor.isfinite().all() for tensor in found)
    right, _ = oracle(problem.call)
    assert (found[0].double() - right).abs().max() < 1e-2 * right.abs().max()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_to_attend(module):
    """No rows, no tokens, only padding: zero and -inf, and no launch without a grid."""
    problem = make_problem(Shape(lens=(0, 0), queries=(1, 9), padded_tokens=2))
    out, lse = attend(module, problem)
    assert (out == 0).all() and (lse == float("-inf")).all()
    none = {"seq_lens": problem.call["seq_lens"][:0], "query_start_loc": problem.call["query_start_loc"][:1]}
    out, lse = attend(module, problem, block_table=problem.call["block_table"][:0], **none)
    assert (out == 0).all() and (lse == float("-inf")).all()
    starts = torch.zeros(3, dtype=torch.int32)
    out, lse = attend(module, problem, q=problem.call["q"][:0], query_start_loc=starts)
    assert out.shape[0] == 0 and lse.shape[0] == 0
    idle = make_problem(Shape(lens=(5, 0), queries=(0, 0), padded_tokens=3))
    assert idle.call["max_query_len"] == 0
    out, lse = attend(module, idle)
    assert len(out) == 3 and (out == 0).all() and (lse == float("-inf")).all()


NOT_FINITE = {
    "key": lambda call, bad: call["key_cache"][_page(call)].select(0, 3)[:1].fill_(bad),
    "value": lambda call, bad: call["value_cache"][_page(call)].select(0, 3)[:1, :5].fill_(bad),
    "query": lambda call, bad: call["q"][-1, :1].fill_(bad),
    "sink": lambda call, bad: call["sinks"][:1].fill_(bad),
}


def _page(call: dict[str, Any]) -> int:
    """Physical id of the first page of the last row."""
    return int(call["page_table"][call["block_table"][-1, 0]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", NOT_FINITE)
@pytest.mark.parametrize(
    ("queries", "shape"),
    [(1, {}), (1, {"dtype": torch.bfloat16, "softcap": 5.0}), (12, {})],
    ids=["decode", "capped bf16", "prefill"],
)
def test_what_is_not_finite_shows(where, queries, bad, shape):
    """In out and in the log-sum-exp, alike in plain softmax, the reference, decode however split, and prefill."""
    problem = make_problem(Shape(lens=(9, 200), queries=(1, queries), sinks=True, **shape))
    NOT_FINITE[where](problem.call, bad)
    expected = [tensor.isfinite() for tensor in oracle(problem.call)]
    assert not expected[0].all()
    assert expected[0][:1].all() or where == "sink"
    for module, splits in (("reference", 0), ("kernels", 1), ("kernels", 4)):
        for mine, right in zip(attend(module, problem, num_splits=splits), expected, strict=True):
            assert torch.equal(mine.isfinite(), right), (module, splits)


@pytest.mark.parametrize("module", MODULES)
def test_a_row_without_keys_beside_a_sink_that_is_no_number(module):
    problem = make_problem(Shape(lens=(0, 20), queries=(1, 1), sinks=True))
    problem.call["sinks"][0], problem.call["sinks"][1] = float("nan"), float("-inf")
    out, lse = attend(module, problem)
    assert out[:, 0].isnan().all() and lse[:, 0].isnan().all() and not out[:, 1:].isnan().any()
    assert lse[0, 1] == float("-inf") and (out[0, 1:] == 0).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**63 - 1])
def test_a_window_that_reaches_beyond_every_context_is_none(module, far):
    problem = make_problem(Shape(lens=(5, 40), queries=(2, 12), causal=False, heads=2))
    for window, same in (((-1, far), None), ((far, 2), (-1, 2)), (far, (-1, 0))):
        found, right = attend(module, problem, window=window), attend(module, problem, window=same)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), window


@pytest.mark.parametrize("module", MODULES)
def test_numbers_of_other_kinds_mean_the_same(module):
    """Integers of numpy; scales, slopes and sinks in float64."""
    problem = make_problem(Shape(queries=(1, 2, 12), window=3, scales="row", alibi="row", sinks=True))
    right = attend(module, problem)
    names = ("key_scale", "value_scale", "alibi_slopes", "sinks")
    changed = {name: problem.call[name].double() for name in names} | {"window": np.int64(3)}
    assert all(torch.equal(a, b) for a, b in zip(attend(module, problem, **changed), right, strict=True))
    pair = attend(module, problem, window=[np.int32(2), np.int64(0)])
    assert all(torch.equal(a, b) for a, b in zip(pair, right, strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_the_default_device_changes_nothing(module):
    """Neither while it is another one nor afterwards."""
    call = make_problem(Shape(dtype=torch.bfloat16, queries=(1, 2, 12))).call
    right = MODULES[module](**call)
    attention_pages.MEMORY.kept.clear()
    with torch.device("meta"):
        found = MODULES[module](**call)
    for mine in (found, MODULES[module](**call)):
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


@pytest.mark.parametrize("width", [0, 1, 2])
def test_the_reference_refuses_rows_longer_than_their_table(width):
    problem = make_problem(Shape(lens=(5, 37), queries=(1, 1)))
    with pytest.raises(InvalidArgument, match=f"row 1 has 3 pages of 16 tokens by seq_lens, its block table {width}"):
        attend("reference", problem, block_table=problem.call["block_table"][:, :width])
    idle = make_problem(Shape(lens=(5, 37), queries=(1, 0)))
    attend("reference", idle, block_table=idle.call["block_table"][:, :1])


def test_sinks_alone_are_the_denominator_of_what_sees_nothing():
    problem = make_problem(Shape(lens=(0, 20), queries=(1, 1), sinks=True))
    for module in MODULES:
        out, lse = attend(module, problem)
        assert (out[0] == 0).all()
        torch.testing.assert_close(lse[0], problem.call["sinks"])


class NoWaiting(TorchFunctionMode):
    """Fails on what would make the host wait for the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(function, "__name__", "") not in {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "to"}
        return function(*args, **(kwargs or {}))


def test_the_launcher_waits_for_nothing(monkeypatch):
    """Kernels are left out: in the interpreter, they read host memory themselves."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launched.append(grid)

    for name in ("decode_kernel", "merge_kernel", "prefill_kernel"):
        monkeypatch.setattr(paged_attention, name, Kernel())
    problem = make_problem(Shape(queries=(1, 3, 60), alibi="row", sinks=True, scales="row"))
    with NoWaiting():
        paged_attention.paged_attention(**problem.with_(num_splits=2))
    assert len(launched) == 3


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"q": torch.zeros(3, 5, 32)}, InvalidArgument),
        ({"q": torch.zeros(3, 4, 32).half()}, Unsupported),
        ({"q": torch.zeros(3, 4, 32, dtype=torch.float64)}, Unsupported),
        ({"q": torch.zeros(3, 4, 48)}, InvalidArgument),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, InvalidArgument),
        ({"seq_lens": torch.zeros(3, dtype=torch.int64)}, InvalidArgument),
        ({"q": torch.zeros(3, 0, 32)}, InvalidArgument),
        ({"page_table": torch.zeros(1, 9, dtype=torch.int32)}, InvalidArgument),
        ({"page_table": torch.zeros(9, 1, dtype=torch.int32)}, InvalidArgument),
        ({"value_cache": torch.zeros(2, 16, 2, 32)}, InvalidArgument),
        ({"key_cache": torch.zeros(9, 0, 2, 32), "value_cache": torch.zeros(9, 0, 2, 32)}, InvalidArgument),
        ({"key_cache": torch.zeros(9, 16, 0, 32), "value_cache": torch.zeros(9, 16, 0, 32)}, InvalidArgument),
        ({"first_valid_id": -1}, InvalidArgument),
        ({"num_splits": -1}, InvalidArgument),
        ({"window": 0}, InvalidArgument),
        ({"window": (3,)}, InvalidArgument),
        ({"window": (3, 1, 0)}, InvalidArgument),
        ({"window": True}, InvalidArgument),
        ({"window": (True, 0)}, InvalidArgument),
        ({"window": 2.5}, InvalidArgument),
        ({"window": (2.5, 0)}, InvalidArgument),
        ({"softcap": -1.0}, InvalidArgument),
        ({"softcap": float("nan")}, InvalidArgument),
        ({"softcap": float("inf")}, InvalidArgument),
        ({"alibi": "sideways"}, InvalidArgument),
        ({"sinks": torch.zeros(3)}, InvalidArgument),
        ({"key_scale": torch.zeros(4)}, InvalidArgument),
        ({"out": torch.zeros(3, 4, 16)}, InvalidArgument),
        ({"out": torch.zeros(3, 4, 32, dtype=torch.float64)}, InvalidArgument),
        ({"out": torch.zeros(3, 4, 32, dtype=torch.float8_e5m2)}, InvalidArgument),
        ({"out": torch.zeros(1, 4, 32).expand(3, 4, 32)}, InvalidArgument),
        ({"out": torch.zeros(5 * 32).as_strided((3, 4, 32), (16, 32, 1))}, InvalidArgument),
    ],
)
@pytest.mark.parametrize("module", MODULES)
def test_what_does_not_fit_is_refused(module, changed, error):
    with pytest.raises(error):
        MODULES[module](**make_problem(Shape()).with_(**changed))


@triton.jit
def token_kernel(
    ids, out, begin, head, page_stride, token_stride, head_stride, PAGE: tl.constexpr, CHUNK: tl.constexpr
):
    places = tl.arange(0, 64)
    tokens = begin + places
    pages = tl.load(ids + places // CHUNK)
    if PAGE == CHUNK:
        inside = places % PAGE
    else:
        inside = tokens % PAGE
    offsets = attention_tiles.token_offsets(
        pages, inside, head + tl.zeros_like(pages), page_stride, token_stride, head_stride, 1
    )
    tl.store(out + places, offsets)


@triton.jit
def query_kernel(tokens, heads, out, token_stride, head_stride, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, attention_tiles.query_offsets(tl.load(tokens + i), tl.load(heads + i), token_stride, head_stride))


@pytest.mark.parametrize("page", [16, 24, 1, 528, 256])
def test_addresses_of_keys_cross_two_and_four_gigabytes(page):
    """Nothing but the address is computed: it must not wrap in 32 bits, in bytes or in elements."""
    chunk, strides = attention_launch.chunk_tokens(page, 64), (716_800, 1024, 128)
    ids = torch.randint(2**31 // strides[0], 2**31 - 1, (64 // chunk,), dtype=torch.int32)
    out = torch.empty(64, dtype=torch.int64)
    begin = 11 * chunk
    token_kernel[(1,)](ids, out, begin, 7, *strides, page, chunk)
    tokens = begin + torch.arange(64)
    expected = ids.long().repeat_interleave(chunk) * strides[0] + tokens % page * strides[1] + 7 * strides[2]
    assert torch.equal(out, expected)


def test_addresses_of_queries_cross_two_and_four_gigabytes():
    tokens, heads = torch.tensor([262_145, 2**20, 2**31 - 1, 0]).int(), torch.tensor([63, 0, 7, 1]).int()
    out = torch.empty(4, dtype=torch.int64)
    query_kernel[(1,)](tokens, heads, out, 8192, 128, 4)
    assert torch.equal(out, tokens.long() * 8192 + heads.long() * 128)


FAR = """
import torch
from tests import triton_interpreter
from tests.attention_problems import Shape, make_problem
from avmp.kernels.paged_attention import paged_attention
triton_interpreter.install()
problem = make_problem(Shape(lens=(9, 300), queries=(9, 1), virtual=False, dtype=torch.bfloat16))
call, stride = problem.call, 2**28 + 2**24
far = {}
for name in ("key_cache", "value_cache"):  # the last pages begin beyond 2^31 elements and 2^32 bytes
    cache = call[name]
    far[name] = torch.empty(len(cache) * stride, dtype=torch.bfloat16).as_strided(cache.shape, (stride, 64, 32, 1))
    for page in set(call["block_table"].flatten().tolist()) & set(range(len(cache))):
        far[name][page] = cache[page]
assert len(cache) * stride > 2**31
table = torch.empty(2**31 + 2**20, dtype=torch.int32).as_strided(call["block_table"].shape, (2**31 + 64, 1))
table.copy_(call["block_table"])
q, out = (torch.empty(10 * 2**28, dtype=torch.bfloat16).as_strided(call["q"].shape, (2**28, 32, 1)) for _ in range(2))
q.copy_(call["q"])
for splits in (1, 4):
    far |= {"block_table": table, "q": q, "out": out}
    near = paged_attention(**call, num_splits=splits)
    for one, other in zip(near, paged_attention(**call | far, num_splits=splits)):
        assert torch.equal(one, other)
"""


def test_pools_tables_and_queries_beyond_four_gigabytes(repository):
    """In a process of its own: a wrapped address would end it. The memory is virtual but for what is touched."""
    environment = os.environ | {"PYTHONPATH": str(repository), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", FAR], check=True, env=environment, cwd=repository, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_other_pairs(seed):
    for number, case in enumerate(pairwise(seed)):
        splits = case.pop("num_splits")
        problem = make_problem(Shape(**case), seed=1000 * seed + number)
        expected = Expected(problem.call)
        with triton_interpreter.program_order(triton_interpreter.ORDERS[number % 3], seed=number):
            for module in MODULES:
                expected.check(*attend(module, problem, num_splits=splits))


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256, 24, 48, 17, 528])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_every_page_size_and_head_dim(page, dim):
    orders = itertools.cycle(triton_interpreter.ORDERS)
    for dtype, queries in ((torch.bfloat16, (1, 2)), (torch.float32, (40, 3))):
        shape = Shape(
            lens=(page + 150, 77), queries=queries, page_tokens=page, head_dim=dim, head_dim_v=dim, dtype=dtype
        )
        problem = make_problem(shape)
        expected = Expected(problem.call)
        with triton_interpreter.program_order(next(orders), seed=page + dim):
            for module in MODULES:
                expected.check(*attend(module, problem))
