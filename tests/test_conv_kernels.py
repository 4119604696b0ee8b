"""The causal convolution before state-space layers: kernel and reference against float64, features in pairs, and
against a line of tokens that keeps everything."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import causal_conv1d_update as kernels
from avmp.kernels import conv_reference, state_tuning
from tests import triton_interpreter
from tests.count_compilations import compilations
from tests.state_problems import (
    DTYPES,
    GUARD,
    Factors,
    Launched,
    NoWaiting,
    SomePrograms,
    amid_nan,
    only_changed,
    pairwise,
    poisoned_allocations,
    same_bytes,
    state_pool,
    twin,
    within,
)

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

MODULES = {"kernels": kernels.causal_conv1d_update, "reference": conv_reference.causal_conv1d_update}
SLOTS, COLUMNS = 40, 6
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """What a problem looks like; ``longer`` is how many columns a state has beyond the window's."""

    dim: int = 24
    width: int = 4
    longer: int = 0
    order: str = "channels first"
    types: tuple[str, str, str] = ("fp32", "fp32", "fp32")  # of the state, of x, of the weights
    weights: str = "taps last"
    bias: bool = False
    activation: str | None = None
    rows: str = "one"  # "one" token each, "uniform", "ragged", or "ragged one"
    counts: tuple[int, ...] = (1, 1, 1, 1)
    padding: int = 0
    null_row: int | None = 1
    fresh_row: int | None = None
    ids: str = "virtual"  # "virtual", "physical", "foreign" (from 0 on) or "none"
    targets: str = "same"  # "same", "other", "shifted", "shifted other", "columns" or "to columns"
    in_place: bool = False

    @property
    def state_len(self) -> int:
        return self.width - 1 + self.longer


@dataclass
class Problem:
    """The arguments of a call; of each row the slot that it starts from (None: null), where its window begins there,
    and where its state goes after each token (None: nowhere)."""

    shape: Shape
    call: dict[str, Any]
    begins: list[int]
    sources: list[int | None]
    windows: list[int]
    fresh: list[bool]
    targets: list[list[int | None]]


def make_problem(s: Shape, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    state_type, x_type, weight_type = (DTYPES[name] for name in s.types)
    rows, tokens = len(s.counts), sum(s.counts) + s.padding
    begins = torch.tensor([0, *s.counts]).cumsum(0).tolist()
    inner = (s.dim, s.state_len)
    state = state_pool(SLOTS, inner, state_type, (s.state_len, 1) if s.order == "channels first" else (1, s.dim + 8))
    weight = torch.randn(s.dim, s.width, generator=g).to(weight_type)
    if s.weights == "taps first":
        weight = weight.t().contiguous().t()
    elif s.weights == "sliced":
        weight = amid_nan(weight, weight_type)
    call: dict[str, Any] = dict(
        x=amid_nan(torch.randn(tokens, s.dim, generator=g), x_type),
        conv_state=state,
        weight=weight,
        bias=amid_nan(torch.randn(s.dim, generator=g), weight_type) if s.bias else None,
        activation=s.activation,
    )
    window = s.state_len - s.width + 1
    problem = Problem(s, call, begins[:-1], [], [window] * rows, [row == s.fresh_row for row in range(rows)], [])
    _add_rows(problem, g)
    for row, source in enumerate(problem.sources):
        if source is None:
            call["x"][begins[row] : begins[row + 1]] = NAN
        elif not problem.fresh[row]:
            state[source] = torch.randn(inner, generator=g).to(state_type)
    call["x"][sum(s.counts) :] = NAN
    if s.fresh_row is not None:
        call["has_initial_state"] = torch.tensor([row != s.fresh_row for row in range(rows)])
    return problem


def _add_rows(problem: Problem, g: torch.Generator) -> None:
    s, call = problem.shape, problem.call
    rows = len(s.counts)
    if s.rows.startswith("ragged"):
        call["query_start_loc"] = torch.tensor([0, *s.counts]).cumsum(0).int()
        call["max_query_len"] = 1 if s.rows == "ragged one" else max(s.counts)
    elif s.rows == "uniform":
        call["max_query_len"] = s.counts[0]
    if s.ids == "none":
        problem.sources = list(range(rows))
        problem.targets = [[None] * (count - 1) + [row] for row, count in enumerate(s.counts)]
        return
    first = 0 if s.ids == "foreign" else 1
    free = (torch.randperm(SLOTS - 1 - first, generator=g) + first).tolist()  # the last slot is nobody's
    if first == 0:
        free.insert(0, free.pop(free.index(0)))  # slot 0 is data
    call["first_valid_id"] = first
    table = torch.zeros(SLOTS + 3, dtype=torch.int32)
    table[1:SLOTS] = torch.randperm(SLOTS - 1, generator=g).int() + 1
    virtual = {int(physical): number for number, physical in enumerate(table)}
    if s.ids == "virtual":
        call["slot_table"] = table
    nulls = [-1, -(2**31), first - 1, SLOTS + 5 if s.ids == "virtual" else SLOTS, SLOTS + 1, 2**30]

    def ids(slots: list[list[int | None]]) -> torch.Tensor:
        known = virtual if s.ids == "virtual" else {slot: slot for slot in range(SLOTS)}
        found = [[nulls[(r + c) % len(nulls)] if x is None else known[x] for c, x in enumerate(row)]
                 for r, row in enumerate(slots)]  # fmt: skip
        return torch.tensor(found, dtype=torch.int32 if s.ids == "virtual" else torch.int64)

    def take(columns: int) -> list[list[int | None]]:
        return [[free.pop(0) for _ in range(columns)] for _ in range(rows)]

    held = take(COLUMNS if s.targets == "columns" else 1)
    before = [0] * rows
    if s.targets == "columns" or s.targets.startswith("shifted"):
        limit = COLUMNS if s.targets == "columns" else s.longer + 1
        accepted = torch.randint(1, limit + 1, (rows,), generator=g).int()
        accepted[-1], accepted[0] = 0, limit + 9  # limited to what there is
        call["num_accepted_tokens"] = accepted
        before = [min(max(int(one), 1), limit) - 1 for one in accepted]
    if s.targets.startswith("shifted"):
        problem.windows, before = before, [0] * rows
    if s.null_row is not None:
        held[s.null_row][before[s.null_row]] = None
    problem.sources = [slots[column] for slots, column in zip(held, before, strict=True)]
    indices = ids(held)
    call["state_indices"] = indices if s.targets == "columns" else indices[:, 0]
    after = held
    if s.targets.endswith("other") or s.targets == "to columns":
        after = take(COLUMNS if s.targets == "to columns" else 1)
        after[-1][0] = None
        indices = ids(after)
        call["destination_indices"] = indices if s.targets == "to columns" else indices[:, 0]
    problem.targets = after
    if "columns" not in s.targets:
        problem.targets = [[None] * (count - 1) + slots[:1] for count, slots in zip(s.counts, after, strict=True)]


def by_hand(problem: Problem, dtype: torch.dtype, rounded: bool) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Output, in float64, or in fp32 and rounded to its dtype; and what the slots hold, exactly."""
    s, call = problem.shape, problem.call
    weight, x = call["weight"].to(dtype), call["x"]
    out = torch.zeros(x.shape, dtype=torch.float64)
    states = {}
    for row, source in enumerate(problem.sources):
        if source is None:
            continue
        old = torch.zeros(s.dim, s.state_len).to(call["conv_state"].dtype)
        if not problem.fresh[row]:
            old = call["conv_state"][source].clone()
        window = old[:, problem.windows[row] :][:, : s.width - 1]
        line = window.to(dtype)
        kept = old
        for step in range(s.counts[row]):
            token = problem.begins[row] + step
            line = torch.cat([line, x[token].to(dtype).unsqueeze(1)], 1)
            y = (line[:, -s.width :] * weight).sum(1)
            y = y if call["bias"] is None else y + call["bias"].to(dtype)
            y = y if s.activation is None else y * torch.sigmoid(y)
            out[token] = (y.to(x.dtype) if rounded else y).double()
            kept = torch.cat([kept, x[token].to(old.dtype).unsqueeze(1)], 1)
            target = problem.targets[row][step]
            if target is not None:
                states[target] = kept[:, -s.state_len :]
            if target is not None and s.targets.startswith("shifted"):
                states[target] = call["conv_state"][target].clone()
                new = torch.cat([window, kept[:, s.state_len :]], 1)[:, 1:]
                states[target][:, : new.shape[1]] = new
    return out, states


def update(module: str, problem: Problem, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and pool afterwards; the problem stays as it is. Outputs lie in the middle of guarded memory, and all that
    is allocated holds NaN."""
    call = problem.call | changed
    call["conv_state"] = twin(call["conv_state"])
    memory = torch.full((len(call["x"]) + 2, call["x"].shape[1] + 2), GUARD, dtype=call["x"].dtype)
    out = memory[1:-1, 1:-1]
    out.fill_(NAN)
    if problem.shape.in_place:
        call["x"] = out.copy_(call["x"])
    with poisoned_allocations():
        assert MODULES[module](**call, out=out) is out
    result = out.clone()
    out.fill_(GUARD)
    assert (memory == GUARD).all()
    return result, call["conv_state"]


def check(module: str, problem: Problem) -> None:
    out, state = update(module, problem)
    (right, states), (low, _) = by_hand(problem, torch.float64, False), by_hand(problem, torch.float32, True)
    within(out, right, low)
    assert (out[right == 0] == 0).all()
    assert only_changed(problem.call["conv_state"], state, sorted(states))
    for slot, expected in states.items():
        assert same_bytes(state[slot], expected), slot


def check_both(problem: Problem, turn: int) -> None:
    """Kernel and reference; the kernel's programs in another order from turn to turn."""
    with triton_interpreter.program_order(triton_interpreter.ORDERS[turn % 3], seed=turn):
        check("kernels", problem)
    check("reference", problem)


FACTORS: Factors = {
    "dim": ({"dim": 24}, {"dim": 37}),
    "width": tuple({"width": width} for width in (4, 2, 3, 5)),
    "longer": tuple({"longer": columns} for columns in (0, 1, 7)),
    "order": ({"order": "channels first"}, {"order": "columns first"}),
    "types": tuple(
        {"types": tuple(types.split())}
        for types in ("fp32 fp32 fp32", "bf16 bf16 bf16", "fp16 fp16 fp32", "fp32 bf16 bf16", "bf16 fp32 fp32")
    ),
    "weights": tuple({"weights": name} for name in ("taps last", "taps first", "sliced")),
    "bias": ({}, {"bias": True}),
    "activation": tuple({"activation": name} for name in (None, "silu", "swish")),
    "rows": (
        {"rows": "one", "counts": (1, 1, 1, 1)},
        {"rows": "one", "counts": (1, 1, 1, 1), "padding": 3},
        {"rows": "uniform", "counts": (3, 3, 3), "padding": 2},
        {"rows": "ragged", "counts": (1, 2, 0, 5), "padding": 2},
        {"rows": "ragged one", "counts": (1, 1, 0, 1)},
    ),
    "ids": ({"ids": "virtual"}, {"ids": "physical"}, {"ids": "foreign"}),
    "targets": tuple(
        {"targets": name} for name in ("same", "other", "shifted", "shifted other", "columns", "to columns")
    ),
    "null": ({"null_row": 1}, {"null_row": None}),
    "fresh": ({}, {"fresh_row": 0}),
    "in_place": ({}, {"in_place": True}),
}  # fmt: skip


def shape_of(case: dict[str, Any]) -> Shape:
    """The case, but for what is refused: the columns that acceptance, or a state per token, wants."""
    if "columns" in case["targets"]:
        case["longer"] = min(case["longer"], 6 - case["width"])
    if case["targets"].startswith("shifted"):
        case["longer"] = max(case["longer"], max(case["counts"]) - 1)
    return Shape(**case)


CASES = list(pairwise(FACTORS, 0))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_features_in_pairs(number):
    problem = make_problem(shape_of(dict(CASES[number])), seed=number)
    for order in triton_interpreter.ORDERS:
        with triton_interpreter.program_order(order, seed=number):
            check("kernels", problem)
    check("reference", problem)


WRITERS = {
    "in place": Shape(rows="ragged", counts=(2, 1, 9), longer=7, padding=2, fresh_row=0, dim=40),
    "elsewhere": Shape(rows="ragged", counts=(20, 1, 9), targets="other", types=("bf16", "bf16", "fp32"), dim=40),
    "out is x": Shape(rows="ragged", counts=(20, 1, 9), longer=1, in_place=True),
    "shifted": Shape(rows="ragged", counts=(3, 1, 2), longer=3, targets="shifted", order="columns first", dim=40),
    "columns": Shape(rows="ragged", counts=(3, 1, 2), longer=1, targets="columns", dim=40),
}


@pytest.mark.parametrize("name", WRITERS)
def test_programs_run_in_any_order(program_order, monkeypatch, name):
    """Several programs to a row: blocks of channels, and of tokens."""
    monkeypatch.setattr(state_tuning, "CHANNELS_INTERPRETED", 32)
    monkeypatch.setattr(state_tuning, "CONV_TOKENS", 8)
    check("kernels", make_problem(WRITERS[name]))


@pytest.mark.parametrize(
    ("first", "expected"), [(34, 5), (40, 5), (33, 1), (17, 1), (0, 1)], ids=["next", "apart", "a row", "half", "same"]
)
def test_parts_of_one_buffer_share_no_memory_unless_they_overlap(monkeypatch, first, expected):
    """In tiles of tokens wherever no program can read what another has written, whichever comes first in memory."""
    monkeypatch.setattr(state_tuning, "CONV_TOKENS", 8)
    state, weight, starts = torch.zeros(2, 8, 3), torch.zeros(8, 4), torch.tensor([0, 34]).int()
    buffer = torch.zeros(80, 8)
    parts = buffer[:34], buffer[first : first + 34]
    for x, out in (parts, parts[::-1]):
        monkeypatch.setattr(kernels, "causal_conv1d_update_kernel", launched := Launched())
        kernels.causal_conv1d_update(x, state, weight, query_start_loc=starts, max_query_len=34, out=out)
        assert [grid for grid, _ in launched.calls] == [(expected,)]


def test_tiles_beside_each_other_in_one_buffer_find_what_is_right(program_order, monkeypatch):
    monkeypatch.setattr(state_tuning, "CONV_TOKENS", 8)
    g = torch.Generator().manual_seed(0)
    buffer, state, weight = (torch.randn(size, generator=g) for size in ((68, 8), (2, 8, 3), (8, 4)))
    known, call = state.clone(), dict(query_start_loc=torch.tensor([0, 34]).int(), max_query_len=34)
    right = conv_reference.causal_conv1d_update(buffer[34:].clone(), known, weight, first_valid_id=0, **call)
    out = kernels.causal_conv1d_update(buffer[34:], state, weight, first_valid_id=0, out=buffer[:34], **call)
    torch.testing.assert_close(out, right)
    assert torch.equal(state, known)


@pytest.mark.parametrize("module", MODULES)
def test_states_without_indices_and_outputs_of_their_own(module):
    check(module, make_problem(Shape(ids="none", null_row=None, rows="uniform", counts=(2, 2, 2))))
    problem = make_problem(Shape(ids="none", null_row=None))
    out = MODULES[module](**problem.call | {"conv_state": twin(problem.call["conv_state"])})
    assert torch.equal(out, update(module, problem)[0])


@pytest.mark.parametrize("module", MODULES)
def test_where_slots_lie_changes_no_bit(module):
    """Any permutation of the physical slots, so any migration between two steps; and virtual ids or physical ones."""
    problem = make_problem(Shape(rows="ragged", counts=(1, 2, 4), targets="other", types=("bf16", "bf16", "bf16")))
    call = problem.call
    out, state = update(module, problem)
    table = call["slot_table"].long()
    physical = {}
    for name in ("state_indices", "destination_indices"):
        known = (call[name] > 0) & (call[name] < len(table))
        physical[name] = torch.where(known, table[call[name].where(known, 0).long()], -1).int()
    found = update(module, problem, slot_table=None, **physical)
    assert same_bytes(found[0], out) and same_bytes(found[1], state)
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(SLOTS - 1) + 1])
    pool, wanted = twin(call["conv_state"]), twin(call["conv_state"])
    pool[moved], wanted[moved] = call["conv_state"], state
    bound = torch.where(table > 0, moved[table], 0).int()
    found = update(module, problem, conv_state=pool, slot_table=bound)
    assert same_bytes(found[0], out) and same_bytes(found[1], wanted)


# -- against a line of tokens that keeps everything ------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Steps of a few rows, of which each accepts some of its tokens."""
    width = draw(st.integers(2, 5))
    most = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["plain", "shifted", "columns"]))
    longer = most - 1 + draw(st.integers(0, 3)) if mode == "shifted" else draw(st.integers(0, 6 - width))
    if mode == "plain":
        longer = draw(st.integers(0, 9))
    rows = draw(st.integers(1, 3))
    step = st.lists(st.tuples(st.integers(0, most), st.integers(1, most)), min_size=rows, max_size=rows)
    return {
        "width": width,
        "state_len": width - 1 + longer,
        "mode": mode,
        "most": most,
        "rows": rows,
        "steps": draw(st.lists(step, min_size=1, max_size=4)),
        "channels_first": draw(st.booleans()),
        "tile_tokens": draw(st.integers(5, 6)),
        "bounded": draw(st.booleans()),
    }


def replay(module: str, h: dict[str, Any]) -> None:
    """Small integers, which every dtype adds exactly: the sum over each row's latest tokens, whatever was rejected."""
    rows, most, width, dim = h["rows"], h["most"], h["width"], 3
    weight = torch.tensor([[float(2**tap) for tap in range(width)]] * dim)
    columns = most if h["mode"] == "columns" else 1
    shape = (rows * columns + 1, dim, h["state_len"])
    pool = torch.full(shape, NAN) if h["channels_first"] else torch.full((shape[0], shape[2], dim), NAN).transpose(1, 2)
    indices = torch.arange(1, rows * columns + 1, dtype=torch.int32).view(rows, columns)
    lines = [torch.zeros(width - 1, dim) for _ in range(rows)]
    accepted, known = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
    for number, step in enumerate(h["steps"]):
        counts = [count for count, _ in step]
        x = torch.randint(-3, 4, (sum(counts) + 1, dim), generator=torch.Generator().manual_seed(number)).float()
        out = MODULES[module](
            x,
            pool,
            weight,
            state_indices=indices if h["mode"] == "columns" else indices[:, 0],
            num_accepted_tokens=None if h["mode"] == "plain" else accepted,
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            max_query_len=most if h["bounded"] or h["mode"] != "plain" else None,
            has_initial_state=known,
        )
        assert (out[sum(counts) :] == 0).all()
        begin = 0
        for row, (count, wanted) in enumerate(step):
            line = torch.cat([lines[row], x[begin : begin + count]])
            right = [weight.T.mul(line[t : t + width]).sum(0) for t in range(len(line) - width + 1)][-count:]
            assert count == 0 or torch.equal(out[begin : begin + count], torch.stack(right))
            if count:
                taken = count if h["mode"] == "plain" else min(wanted, count)
                lines[row] = line[: len(line) - count + taken][-(width - 1) :]
                accepted[row], known[row] = taken, True
            begin += count


@given(histories())
@settings(max_examples=60)
def test_the_reference_remembers_exactly_what_was_accepted(history):
    replay("reference", history)


@given(histories())
@settings(max_examples=12)
def test_the_kernel_remembers_exactly_what_was_accepted(history):
    tokens, state_tuning.CONV_TOKENS = state_tuning.CONV_TOKENS, history["tile_tokens"]
    try:
        replay("kernels", history)
    finally:
        state_tuning.CONV_TOKENS = tokens


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("longer", [0, 7])
def test_a_prompt_goes_through_in_chunks(module, monkeypatch, longer):
    """In two chunks, with the state between them, as in one; chunks are cut into tiles of tokens."""
    monkeypatch.setattr(state_tuning, "CONV_TOKENS", 8)
    shape = Shape(rows="ragged", counts=(45, 3), null_row=None, fresh_row=0, longer=longer, activation="silu")
    problem = make_problem(shape)
    check(module, problem)
    call = problem.call
    whole, state = update(module, problem)
    pool, parts = twin(call["conv_state"]), []
    for first, last, known in ((0, 20, False), (20, 45, True)):
        starts = torch.tensor([0, last - first, last - first], dtype=torch.int32)
        changed = {"x": call["x"][first:last], "query_start_loc": starts, "max_query_len": None}
        parts.append(
            MODULES[module](**call | changed | {"conv_state": pool, "has_initial_state": torch.tensor([known, True])})
        )
    torch.testing.assert_close(torch.cat(parts), whole[:45], rtol=1e-6, atol=1e-6)
    assert torch.equal(pool[problem.sources[0]], state[problem.sources[0]])


@pytest.mark.parametrize("module", MODULES)
def test_nothing_to_convolve(module):
    problem = make_problem(Shape(null_row=None))
    call = problem.call | {"conv_state": twin(problem.call["conv_state"])}
    indices = call["state_indices"][:0]
    assert MODULES[module](**call | {"x": call["x"][:0], "state_indices": indices}).shape[0] == 0
    for rows in ({"state_indices": indices}, {"max_query_len": 0}):
        with poisoned_allocations():
            assert (MODULES[module](**call | rows) == 0).all()
    assert only_changed(problem.call["conv_state"], call["conv_state"], [])


@pytest.mark.parametrize("targets", ["same", "shifted", "columns"])
def test_the_launcher_waits_for_nothing(monkeypatch, targets):
    monkeypatch.setattr(kernels, "causal_conv1d_update_kernel", launched := Launched())
    problem = make_problem(Shape(rows="ragged", counts=(1, 2, 2), longer=1, targets=targets, fresh_row=0, bias=True))
    with NoWaiting():
        kernels.causal_conv1d_update(**problem.call)
    assert len(launched.calls) == 1


@pytest.mark.parametrize(("most", "tiles"), [(None, 5), (9, 2), (3, 1)])
def test_a_bound_of_the_queries_saves_programs(monkeypatch, most, tiles):
    """Without it, every row has tiles for all tokens."""
    monkeypatch.setattr(state_tuning, "CONV_TOKENS", 8)
    monkeypatch.setattr(kernels, "causal_conv1d_update_kernel", launched := Launched())
    counts = [3] * 12
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    state, x, weight = torch.zeros(12, 8, 3), torch.zeros(36, 8), torch.zeros(8, 4)
    kernels.causal_conv1d_update(x, state, weight, query_start_loc=starts, max_query_len=most)
    assert [grid for grid, _ in launched.calls] == [(12 * tiles,)]


def test_every_count_of_rows_fits_the_grid(monkeypatch):
    """More rows than a grid's second axis has programs: all lie on the first. Only some programs run here."""
    rows = 65_536 + 9
    chosen = [0, 65_535, 65_536, rows - 1]
    some = SomePrograms(kernels.causal_conv1d_update_kernel, chosen)
    monkeypatch.setattr(kernels, "causal_conv1d_update_kernel", some)
    g = torch.Generator().manual_seed(0)
    state, x, weight = (torch.randn(size, generator=g) for size in ((rows + 1, 8, 3), (rows, 8), (8, 4)))
    indices = torch.randperm(rows, generator=g).int() + 1
    expected = state.clone()
    right = conv_reference.causal_conv1d_update(x, expected, weight, state_indices=indices)
    out = kernels.causal_conv1d_update(x, state, weight, state_indices=indices, out=torch.full((rows, 8), NAN))
    assert some.grids == [(rows,)]
    assert out.isnan().all(1).nonzero().flatten().tolist() == sorted(set(range(rows)) - set(chosen))
    torch.testing.assert_close(out[chosen], right[chosen])
    assert torch.equal(state[indices[chosen].long()], expected[indices[chosen].long()])


@triton.jit
def offset_kernel(starts, entries, out, stride, COUNT: tl.constexpr):
    for i in range(0, COUNT):
        tl.store(out + i, kernels.entry_offset(tl.load(starts + i), tl.load(entries + i), stride, 1))


def test_addresses_cross_two_and_four_gigabytes_and_elements():
    """Nothing but the address is computed: an entry times a stride must not wrap in 32 bits, in bytes or elements."""
    starts = torch.tensor([2**31, 2**40 + 5, 0, 7])
    entries = torch.tensor([2**31 - 1, 2**16, 300_000, 0], dtype=torch.int32)
    out = torch.empty(4, dtype=torch.int64)
    offset_kernel[(1,)](starts, entries, out, 2**20 + 8, 4)
    assert torch.equal(out, starts + entries.long() * (2**20 + 8))


FAR = """
import torch
from tests import triton_interpreter
from avmp.kernels import causal_conv1d_update as kernels
triton_interpreter.install()
kernels.tuning.CONV_TOKENS = 5
g = torch.Generator().manual_seed(0)
def far(tensor, stride):  # its rows lie so far apart that the last one begins beyond 2^31 elements and 2^32 bytes
    memory = torch.empty((len(tensor) - 1) * stride + 4096, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)
state = torch.randn(4, 8, 4, generator=g).bfloat16()
x, weight = torch.randn(10, 8, generator=g).bfloat16(), torch.randn(8, 4, generator=g)
ids = torch.tensor([[3], [1], [2]], dtype=torch.int32)
starts = torch.tensor([0, 1, 3, 10], dtype=torch.int32)
for order in (lambda states: states, lambda states: states.transpose(1, 2).contiguous().transpose(1, 2)):
    near, distant = order(state.clone()), far(order(state), 2**30 + 2**20)
    out = far(torch.zeros_like(x), 2**28)
    result = kernels.causal_conv1d_update(x, near, weight, state_indices=ids[:, 0], query_start_loc=starts)
    kernels.causal_conv1d_update(far(x, 2**28), distant, weight, state_indices=far(ids, 2**31)[:, 0],
                                 query_start_loc=starts, out=out)
    assert torch.equal(near, distant) and torch.equal(result, out)
    assert 3 * (2**30 + 2**20) > 2**31 and 9 * 2**28 > 2**31
"""


def test_pools_tables_and_tokens_beyond_four_gigabytes(repository):
    """In a process of its own: a wrapped address would end it. The memory is virtual but for what is touched."""
    environment = os.environ | {"PYTHONPATH": str(repository), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", FAR], check=True, env=environment, cwd=repository, timeout=120)


def sweep_counts() -> None:
    """Launches over batch sizes, places in tables, pool sizes and lengths."""
    for rows in (1, 3, 16, 17, 1024):
        table = torch.zeros(3000 + rows, dtype=torch.int32)[rows % 2 :]
        ids = torch.zeros(rows + 1, 4, dtype=torch.int32)[rows % 2 :][:rows]
        state, x = torch.zeros(rows + 9, 512, 4), torch.zeros(rows * 2, 512)
        starts, weight = torch.arange(0, rows + 1, dtype=torch.int32), torch.zeros(512, 4)
        shared = dict(slot_table=table, first_valid_id=rows % 2, query_start_loc=starts)
        for first in (0, rows):
            tokens = x[first : first + rows]
            kernels.causal_conv1d_update(tokens, state, weight, state_indices=ids[:, 0], max_query_len=1, **shared)
        for longest in (2, 17, 100, None):
            kernels.causal_conv1d_update(x, state, weight, state_indices=ids[:, 0], max_query_len=longest, **shared)


def test_no_count_is_a_reason_for_a_compilation():
    found = compilations("tests.test_conv_kernels:sweep_counts")
    assert found == {"causal_conv1d_update_kernel": 2}  # one token, several


def refused() -> list[tuple[dict[str, Any], type[Exception]]]:
    int32, two = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    starts = torch.zeros(5, dtype=torch.int32)
    return [
        ({"x": torch.zeros(4, 24, 1)}, InvalidArgument),
        ({"x": torch.zeros(4, 25)}, InvalidArgument),
        ({"x": torch.zeros(4, 48)[:, ::2]}, InvalidArgument),
        ({"x": torch.zeros(4, 24, dtype=torch.float64)}, Unsupported),
        ({"weight": torch.zeros(24, 1)}, Unsupported),
        ({"weight": torch.zeros(24, 6)}, Unsupported),
        ({"weight": torch.zeros(24, 5)}, InvalidArgument),
        ({"weight": torch.zeros(23, 4)}, InvalidArgument),
        ({"bias": torch.zeros(1)}, InvalidArgument),
        ({"activation": "relu"}, Unsupported),
        ({"conv_state": torch.zeros(40, 24, 3, dtype=torch.int16)}, Unsupported),
        ({"state_indices": int32.float()}, InvalidArgument),
        ({"state_indices": None}, InvalidArgument),
        ({"destination_indices": int32[:3]}, InvalidArgument),
        ({"query_start_loc": starts.long()}, InvalidArgument),
        ({"query_start_loc": starts, "num_accepted_tokens": int32}, InvalidArgument),
        ({"query_start_loc": starts, "num_accepted_tokens": int32, "max_query_len": 2}, InvalidArgument),
        ({"num_accepted_tokens": int32, "destination_indices": two}, InvalidArgument),
        ({"num_accepted_tokens": int32[:3]}, InvalidArgument),
        ({"state_indices": two, "query_start_loc": starts, "max_query_len": 3}, InvalidArgument),
        ({"state_indices": two, "conv_state": torch.zeros(40, 24, 6)}, Unsupported),
        ({"max_query_len": 2}, InvalidArgument),
        ({"has_initial_state": int32}, InvalidArgument),
        ({"out": torch.zeros(4, 23)}, InvalidArgument),
        ({"weight": torch.zeros(24, 4, device="meta")}, InvalidArgument),
    ]


@pytest.mark.parametrize("module", MODULES)
def test_what_does_not_fit_is_refused_before_anything_changes(module):
    problem = make_problem(Shape())
    before = twin(problem.call["conv_state"])
    for changed, error in refused():
        with pytest.raises(error, match="causal_conv1d_update: "):
            MODULES[module](**problem.call | changed)
    assert only_changed(before, problem.call["conv_state"], [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_other_pairs(seed):
    for number, case in enumerate(pairwise(FACTORS, seed)):
        problem = make_problem(shape_of(case), seed=1000 * seed + number)
        check_both(problem, seed + number)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["channels first", "columns first"])
def test_every_size(width, order):
    kinds = ({"types": types} for types in (("fp32", "bf16", "fp32"), ("bf16", "bf16", "bf16")))
    rows = ({}, {"rows": "ragged", "counts": (70, 1, 12, 0), "padding": 1})
    for turn, (longer, types, counts) in enumerate(itertools.product(range(9), kinds, rows)):
        shape = Shape(dim=300, width=width, longer=longer, order=order, activation="silu", **types, **counts)
        check_both(make_problem(shape), width + turn)
