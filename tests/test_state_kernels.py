"""The recurrence of state-space layers: kernel and reference against float64, features in pairs, and what must not
change a bit."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from avmp.errors import InvalidArgument, Unsupported
from avmp.kernels import selective_state_update as kernels
from avmp.kernels import state_tuning, state_update_reference
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
    contiguous_strides,
    only_changed,
    pairwise,
    poisoned_allocations,
    same_bytes,
    state_pool,
    storage,
    twin,
    within,
)

pytestmark = pytest.mark.usefixtures("interpreter", "one_thread")

MODULES = {"kernels": kernels.selective_state_update, "reference": state_update_reference.selective_state_update}
SLOTS, COLUMNS, ENTRIES, STEPS = 40, 6, 5, 7
NAN = float("nan")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations are small here: threads that wait for each other on a busy machine cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Shape:
    """What a problem looks like; ``heads`` None is Mamba-1, ``counts`` are the tokens of each row."""

    heads: int | None = 2
    dim: int = 8
    dstate: int = 16
    groups: int | None = 1
    tied: bool = True
    types: tuple[str, str, str] = ("fp32", "fp32", "fp32")  # of the state, of x and its like, of A and its like
    extras: tuple[str, ...] = ()  # of D, z, dt_bias
    softplus: bool = True
    rows: str = "one"  # "one" token each, "uniform", "ragged", or "ragged one"
    counts: tuple[int, ...] = (1, 1, 1, 1)
    padding: int = 0
    null_row: int | None = 1
    fresh_row: int | None = None
    ids: str = "virtual"  # "virtual", "physical", "foreign" (from 0 on) or "none"
    targets: str = "same"  # "same", "other", "columns" or "to columns"
    intermediate: str | None = None
    update: bool = True


@dataclass
class Problem:
    """The arguments of a call; of each row where it starts (None: null), what it starts from, and where its state goes
    after each token (None: nowhere)."""

    shape: Shape
    call: dict[str, Any]
    begins: list[int]
    sources: list[int | None]
    fresh: list[bool]
    targets: list[list[int | None]]
    entries: list[int | None] = field(default_factory=list)

    def written(self) -> list[int]:
        live = zip(self.sources, self.shape.counts, self.targets, strict=True)
        kept = [slot for source, count, slots in live if source is not None for slot in slots[:count]]
        return sorted({slot for slot in kept if slot is not None}) if self.shape.update else []


def make_problem(s: Shape, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    state_type, x_type, a_type = (DTYPES[name] for name in s.types)
    heads = () if s.heads is None else (s.heads,)
    inner = (*heads, s.dim, s.dstate)
    rows, used = len(s.counts), sum(s.counts)
    tokens, begins = used + s.padding, torch.tensor([0, *s.counts]).cumsum(0).tolist()

    def numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return amid_nan(torch.randn(size, generator=g), dtype)

    def per_dim(*size: int, dtype: torch.dtype, positive: bool = False) -> torch.Tensor:
        """``[*size, dim]``, expanded where one number stands for all."""
        found = numbers(*size, 1 if s.tied else s.dim, dtype=dtype)
        if positive:  # or states would grow beyond any float16
            found.copy_(found.abs() * 0.3)
        return found.expand(*size, s.dim)

    state = state_pool(SLOTS, inner, state_type, contiguous_strides(inner))
    rates = numbers(*heads, 1, 1, dtype=a_type) if s.tied else numbers(*inner, dtype=a_type)
    rates.copy_(-rates.float().exp())
    groups = () if s.groups is None else (s.groups,)
    call: dict[str, Any] = dict(
        state=state,
        x=numbers(tokens, *heads, s.dim, dtype=x_type),
        dt=per_dim(tokens, *heads, dtype=x_type, positive=not s.softplus),
        A=rates.expand(inner),
        B=numbers(tokens, *groups, s.dstate, dtype=x_type),
        C=numbers(tokens, *groups, s.dstate, dtype=x_type),
        D=per_dim(*heads, dtype=a_type) if "D" in s.extras else None,
        z=numbers(tokens, *heads, s.dim, dtype=x_type) if "z" in s.extras else None,
        dt_bias=per_dim(*heads, dtype=a_type, positive=not s.softplus) if "dt_bias" in s.extras else None,
        dt_softplus=s.softplus,
        update_state=s.update,
    )
    problem = Problem(s, call, begins[:-1], [], [row == s.fresh_row for row in range(rows)], [])
    _add_rows(problem, g)
    for row, source in enumerate(problem.sources):
        if source is not None and not problem.fresh[row]:
            state[source] = torch.randn(inner, generator=g).to(state_type)
        if source is None:
            _spoil(call, slice(begins[row], begins[row + 1]))
    _spoil(call, slice(used, tokens))
    if s.fresh_row is not None:
        call["has_initial_state"] = torch.tensor([row != s.fresh_row for row in range(rows)])
    if s.intermediate:
        kept = (STEPS, *inner)
        pool = state_pool(ENTRIES + 1, kept, DTYPES[s.intermediate], contiguous_strides(kept))
        call["intermediate_states"] = pool[:ENTRIES]  # behind them lies what must not be written
        entries = torch.randperm(rows, generator=g).int()
        entries[-1], entries[-2] = -1, ENTRIES
        call["intermediate_indices"] = entries
        problem.entries = [int(entry) if 0 <= entry < ENTRIES else None for entry in entries]
    return problem


def _spoil(call: dict[str, Any], tokens: slice) -> None:
    """What belongs to nobody is NaN."""
    for name in ("x", "dt", "B", "C", "z"):
        if call[name] is not None:
            part = call[name][tokens]
            (part if part.stride(-1) else part[..., :1]).fill_(NAN)


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
    if s.targets == "columns":
        accepted = torch.randint(1, COLUMNS + 1, (rows,), generator=g).int()
        accepted[-1], accepted[0] = 0, COLUMNS + 9  # limited to the columns that there are
        call["num_accepted_tokens"] = accepted
        before = [min(max(int(one), 1), COLUMNS) - 1 for one in accepted]
    if s.null_row is not None:
        held[s.null_row][before[s.null_row]] = None
    problem.sources = [slots[column] for slots, column in zip(held, before, strict=True)]
    indices = ids(held)
    call["state_indices"] = indices if s.targets == "columns" else indices[:, 0]
    after = held
    if s.targets in ("other", "to columns"):
        after = take(1 if s.targets == "other" else COLUMNS)
        after[-1][0] = None
        indices = ids(after)
        call["destination_indices"] = indices[:, 0] if s.targets == "other" else indices
    if s.targets in ("same", "other"):
        problem.targets = [[None] * (count - 1) + slots[:1] for count, slots in zip(s.counts, after, strict=True)]
    else:
        problem.targets = after


Found = tuple[torch.Tensor, dict[int, torch.Tensor], dict[tuple[int, int], torch.Tensor]]


def by_hand(problem: Problem, dtype: torch.dtype, rounded: bool) -> Found:
    """Output, states by slot, and intermediate states, token by token; in float64, or in fp32 and rounded to the dtypes
    of the results."""
    call, inner = problem.call, problem.call["state"].shape[1:]
    x, A, D, z, bias = (None if call[n] is None else call[n].to(dtype) for n in ("x", "A", "D", "z", "dt_bias"))
    per_head = inner[0] // (problem.shape.groups or 1) if len(inner) == 3 else 1
    out = torch.zeros(x.shape, dtype=torch.float64)
    states, kept = {}, {}
    kinds = (call["x"].dtype, call["state"].dtype, getattr(call.get("intermediate_states"), "dtype", None))
    result, stored, saved = kinds if rounded else (torch.float64,) * 3
    for row, source in enumerate(problem.sources):
        if source is None:
            continue
        h = torch.zeros(inner, dtype=dtype) if problem.fresh[row] else call["state"][source].to(dtype)
        for step in range(problem.shape.counts[row]):
            token = problem.begins[row] + step
            delta = call["dt"][token].to(dtype)
            delta = delta if bias is None else delta + bias
            delta = F.softplus(delta) if problem.shape.softplus else delta
            b, c = (call[name][token].to(dtype) for name in ("B", "C"))
            if len(inner) == 3:
                b, c = (v.view(-1, inner[-1]).repeat_interleave(per_head, 0).unsqueeze(1) for v in (b, c))
            h = h * torch.exp(delta.unsqueeze(-1) * A) + (delta * x[token]).unsqueeze(-1) * b
            y = (h * c).sum(-1)
            y = y if D is None else y + D * x[token]
            y = y if z is None else y * z[token] * torch.sigmoid(z[token])
            out[token] = y.to(result).double()
            target = problem.targets[row][step]
            if target is not None and problem.shape.update:
                states[target] = h.to(stored).double()
            if problem.entries and problem.entries[row] is not None:
                kept[problem.entries[row], step] = h.to(saved).double()
    return out, states, kept


def advance(module: str, problem: Problem, **changed: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Output, the pool and the intermediate states afterwards; the problem stays as it is. Outputs lie in the middle of
    guarded memory, and all that is allocated holds NaN."""
    call = problem.call | changed
    call["state"] = twin(call["state"])
    if call.get("intermediate_states") is not None:
        call["intermediate_states"] = twin(call["intermediate_states"])
    memory = torch.full([size + 2 for size in call["x"].shape], GUARD, dtype=call["x"].dtype)
    out = memory[tuple(slice(1, -1) for _ in call["x"].shape)]
    out.fill_(NAN)
    with poisoned_allocations():
        assert MODULES[module](**call, out=out) is out
    result = out.clone()
    out.fill_(GUARD)
    assert (memory == GUARD).all()
    return result, call["state"], call.get("intermediate_states")


def check(module: str, problem: Problem) -> None:
    out, state, intermediate = advance(module, problem)
    (right, states, kept), (low, low_states, low_kept) = (by_hand(problem, torch.float64, False),
                                                          by_hand(problem, torch.float32, True))  # fmt: skip
    within(out, right, low)
    assert (out[right == 0] == 0).all() and problem.written() == sorted(states)
    assert only_changed(problem.call["state"], state, problem.written())
    if states:
        within(
            state[sorted(states)], *(torch.stack([by[slot] for slot in sorted(states)]) for by in (states, low_states))
        )
    if intermediate is not None:
        where = sorted(kept)
        found = torch.stack([intermediate[place] for place in where])
        within(found, *(torch.stack([by[place] for place in where]) for by in (kept, low_kept)))
        for place in where:
            intermediate[place] = NAN
        assert storage(intermediate).view(intermediate.dtype).isnan().all()


def check_both(problem: Problem, turn: int) -> None:
    """Kernel and reference; the kernel's programs in another order from turn to turn."""
    with triton_interpreter.program_order(triton_interpreter.ORDERS[turn % 3], seed=turn):
        check("kernels", problem)
    check("reference", problem)


FACTORS: Factors = {
    "shape": (
        {"heads": 2, "dim": 8, "dstate": 16},
        {"heads": None, "dim": 12, "dstate": 16, "groups": None, "tied": False},
        {"heads": 4, "dim": 6, "dstate": 20, "groups": 2},
        {"heads": 3, "dim": 5, "dstate": 8, "groups": 1, "tied": False},
        {"heads": None, "dim": 9, "dstate": 32, "groups": 1},
        {"heads": 2, "dim": 16, "dstate": 64, "groups": None},
    ),
    "types": tuple(
        {"types": tuple(types.split())}
        for types in ("fp32 fp32 fp32", "fp32 bf16 fp32", "bf16 bf16 bf16", "fp16 fp16 fp32", "bf16 fp32 fp32")
    ),
    "D": ({}, {"D": True}),
    "z": ({}, {"z": True}),
    "dt_bias": ({}, {"dt_bias": True}),
    "softplus": ({"softplus": True}, {"softplus": False}),
    "rows": (
        {"rows": "one", "counts": (1, 1, 1, 1)},
        {"rows": "one", "counts": (1, 1, 1, 1), "padding": 3},
        {"rows": "uniform", "counts": (3, 3, 3), "padding": 2},
        {"rows": "ragged", "counts": (1, 2, 0, 5), "padding": 2},
        {"rows": "ragged one", "counts": (1, 1, 0, 1)},
    ),
    "ids": ({"ids": "virtual"}, {"ids": "physical"}, {"ids": "foreign"}),
    "targets": tuple({"targets": name} for name in ("same", "other", "columns", "to columns")),
    "null": ({"null_row": 1}, {"null_row": None}),
    "fresh": ({}, {"fresh_row": 0}),
    "intermediate": ({}, {"intermediate": "fp32"}, {"intermediate": "bf16"}),
    "update": ({}, {"update": False}),
}


def shape_of(case: dict[str, Any]) -> Shape:
    extras = tuple(name for name in ("D", "z", "dt_bias") if case.pop(name, False))
    return Shape(**case, extras=extras)


CASES = list(pairwise(FACTORS, 0))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_features_in_pairs(number):
    problem = make_problem(shape_of(dict(CASES[number])), seed=number)
    for order in triton_interpreter.ORDERS:
        with triton_interpreter.program_order(order, seed=number):
            check("kernels", problem)
    check("reference", problem)


WRITERS = {
    "in place": Shape(rows="ragged", counts=(2, 1, 3), padding=2, fresh_row=0),
    "elsewhere": Shape(targets="other", types=("bf16", "bf16", "fp32"), intermediate="fp32"),
    "columns": Shape(rows="ragged", counts=(3, 1, 2), targets="columns", tied=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_programs_run_in_any_order(program_order, monkeypatch, name):
    """Several tiles to a state; bit for bit the same in every order."""
    monkeypatch.setattr(state_tuning, "STATE_ELEMENTS_INTERPRETED", 64)
    problem = make_problem(WRITERS[name])
    check("kernels", problem)
    monkeypatch.undo()
    with triton_interpreter.program_order("forward"):
        whole = advance("kernels", problem)
    monkeypatch.setattr(state_tuning, "STATE_ELEMENTS_INTERPRETED", 64)
    for one, other in zip(advance("kernels", problem), whole, strict=True):
        assert one is None or same_bytes(one, other)


@pytest.mark.parametrize("module", MODULES)
def test_states_without_indices_and_outputs_of_their_own(module):
    check(module, make_problem(Shape(ids="none", null_row=None, rows="uniform", counts=(2, 2, 2))))
    problem = make_problem(Shape(ids="none", null_row=None, extras=("z",)))
    call = problem.call | {"state": twin(problem.call["state"])}
    out = MODULES[module](**call)
    assert out.dtype == call["x"].dtype and out.shape == call["x"].shape
    again = call["x"].clone()
    MODULES[module](**problem.call | {"state": twin(problem.call["state"]), "x": again, "out": again})
    assert torch.equal(again, out)  # in place of x


@pytest.mark.parametrize("module", MODULES)
def test_where_slots_lie_changes_no_bit(module):
    """Any permutation of the physical slots, so any migration between two steps; and virtual ids or physical ones."""
    problem = make_problem(Shape(rows="ragged", counts=(1, 2, 4), targets="to columns", extras=("D",)))
    call = problem.call
    out, state, _ = advance(module, problem)
    table = call["slot_table"].long()

    def physical(ids: torch.Tensor) -> torch.Tensor:
        known = (ids > 0) & (ids < len(table))
        return torch.where(known, table[ids.where(known, 0).long()], -1).int()

    names = ("state_indices", "destination_indices")
    found = advance(module, problem, slot_table=None, **{name: physical(call[name]) for name in names})
    assert same_bytes(found[0], out) and same_bytes(found[1], state)
    for seed in range(2):
        moved = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(seed)) + 1
        moved = torch.cat([torch.zeros(1, dtype=torch.int64), moved])
        pool, wanted = twin(call["state"]), twin(call["state"])
        pool[moved], wanted[moved] = call["state"], state
        bound = torch.where(table > 0, moved[table], 0).int()
        found = advance(module, problem, state=pool, slot_table=bound)
        assert same_bytes(found[0], out) and same_bytes(found[1], wanted)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_speculation_is_taken_back_to_the_step_that_was_accepted(module, tied):
    """A draft of four tokens leaves four states; going on from the accepted one is as if there had been no draft."""
    problem = make_problem(Shape(rows="uniform", counts=(4, 4, 4), targets="to columns", null_row=None, tied=tied))
    call, update = dict(problem.call), MODULES[module]
    draft = {name: call.pop(name) for name in ("x", "dt", "B", "C")}
    call |= {"state": twin(call["state"]), "slot_table": None, "max_query_len": None}
    drafted = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    stepwise = torch.tensor([20, 21, 22], dtype=torch.int32)
    for slots in (drafted[:, :1], stepwise[:, None]):
        call["state"][slots[:, 0].long()] = torch.randn(
            3, *call["state"].shape[1:], generator=torch.Generator().manual_seed(3)
        )
    del call["destination_indices"]
    whole = update(**call | draft | {"state_indices": drafted, "max_query_len": 4})
    for step in range(4):
        one = {name: tensor[step::4] for name, tensor in draft.items()}
        out = update(**call | one | {"state_indices": stepwise})
        torch.testing.assert_close(out, whole[step::4], rtol=1e-6, atol=1e-6)
        assert torch.equal(call["state"][drafted[:, step].long()], call["state"][stepwise.long()])
    accepted = torch.tensor([3, 1, 4], dtype=torch.int32)
    one = {name: tensor[:3] for name, tensor in draft.items()}
    chosen = drafted.gather(1, accepted[:, None].long() - 1)[:, 0]
    expected = call["state"][chosen.long()].clone()
    pool = twin(call["state"])
    out = update(**call | one | {"state_indices": drafted, "num_accepted_tokens": accepted, "state": pool})
    call["state"][30:33] = expected
    plain = update(**call | one | {"state_indices": torch.tensor([30, 31, 32], dtype=torch.int32)})
    assert torch.equal(out, plain) and torch.equal(pool[drafted[:, 0].long()], call["state"][30:33])


@pytest.mark.parametrize("module", MODULES)
def test_a_prompt_goes_through_in_chunks(module):
    """In two chunks, with the state between them, as in one."""
    count, middle = (300, 170) if module == "reference" else (60, 35)
    shape = Shape(rows="ragged", counts=(count, 3), null_row=None, fresh_row=0, heads=1, dim=4, extras=("D", "z"))
    problem = make_problem(shape)
    check(module, problem)
    call = problem.call | {"state": twin(problem.call["state"])}
    whole = MODULES[module](**call)
    parts = []
    again = problem.call | {"state": twin(problem.call["state"]), "max_query_len": middle}
    for first, last, fresh in ((0, middle, False), (middle, count, True)):
        tokens = {name: None if call[name] is None else call[name][first:last] for name in ("x", "dt", "B", "C", "z")}
        again |= tokens | {"query_start_loc": torch.tensor([0, last - first, last - first], dtype=torch.int32)}
        parts.append(MODULES[module](**again | {"has_initial_state": torch.tensor([fresh, True])}))
    torch.testing.assert_close(torch.cat(parts), whole[:count], rtol=1e-6, atol=1e-6)
    source = problem.sources[0]
    assert torch.equal(again["state"][source], call["state"][source])


@pytest.mark.parametrize("module", MODULES)
def test_nothing_to_advance(module):
    problem = make_problem(Shape(null_row=None))
    call = problem.call | {"state": twin(problem.call["state"])}
    none = {name: call[name][:0] for name in ("x", "dt", "B", "C")}
    assert MODULES[module](**call | none | {"state_indices": call["state_indices"][:0]}).shape[0] == 0
    for rows in ({"state_indices": call["state_indices"][:0]}, {"max_query_len": 0}):
        with poisoned_allocations():
            assert (MODULES[module](**call | rows) == 0).all()
    assert only_changed(problem.call["state"], call["state"], [])


@triton.jit
def softplus_kernel(source, target, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(target + i, kernels.softplus(tl.load(source + i)))


def test_softplus_keeps_its_digits():
    values = torch.cat([torch.linspace(-80, 80, 4000), torch.linspace(-5, -3, 96)])
    found = torch.empty_like(values)
    softplus_kernel[(1,)](values, found, len(values))
    right = torch.where(values > 20, values.double(), torch.log1p(torch.exp(values.double())))
    assert ((found - right) / right).abs().max() < 4e-7


@pytest.mark.parametrize("speculative", [False, True])
def test_the_launcher_waits_for_nothing(monkeypatch, speculative):
    monkeypatch.setattr(kernels, "selective_state_update_kernel", launched := Launched())
    shape = Shape(rows="ragged", counts=(1, 2, 3), targets="columns", fresh_row=0, intermediate="fp32")
    problem = make_problem(shape if speculative else Shape())
    with NoWaiting():
        kernels.selective_state_update(**problem.call)
    assert len(launched.calls) == 1


def test_every_count_of_rows_fits_the_grid(monkeypatch):
    """More rows than a grid's second axis has programs: all lie on the first. Only some programs run here."""
    rows = 65_536 + 9
    chosen = [0, 65_535, 65_536, rows - 1]
    some = SomePrograms(kernels.selective_state_update_kernel, chosen)
    monkeypatch.setattr(kernels, "selective_state_update_kernel", some)
    g = torch.Generator().manual_seed(0)
    state = torch.randn(rows + 1, 4, 8, generator=g)
    call = dict(
        x=torch.randn(rows, 4, generator=g),
        dt=torch.rand(rows, 4, generator=g),
        A=-torch.rand(4, 8, generator=g),
        B=torch.randn(rows, 8, generator=g),
        C=torch.randn(rows, 8, generator=g),
        state_indices=torch.randperm(rows, generator=g).int() + 1,
    )
    expected = state.clone()
    right = state_update_reference.selective_state_update(expected, **call)
    out = kernels.selective_state_update(state, **call, out=torch.full((rows, 4), NAN))
    assert some.grids == [(rows,)]
    assert (out.isnan().all(1).nonzero().flatten().tolist()) == sorted(set(range(rows)) - set(chosen))
    torch.testing.assert_close(out[chosen], right[chosen])
    torch.testing.assert_close(
        state[call["state_indices"][chosen].long()], expected[call["state_indices"][chosen].long()]
    )


@triton.jit
def offset_kernel(slots, heads, dims, out, slot_stride, head_stride, dim_stride, COUNT: tl.constexpr, M: tl.constexpr):
    for i in range(0, COUNT):
        place = kernels.tile_offsets(
            tl.load(slots + i), tl.load(heads + i), tl.load(dims) + tl.arange(0, M), slot_stride, head_stride,
            dim_stride, 4, 1,
        )  # fmt: skip
        tl.store(out + i * M * 4 + tl.arange(0, M)[:, None] * 4 + tl.arange(0, 4)[None, :], place)


def test_addresses_cross_two_and_four_gigabytes_and_elements():
    """Nothing but the address is computed: an id times a stride must not wrap in 32 bits, in bytes or elements."""
    strides = (2**21 + 4096, 8192, 128)
    slots = torch.tensor([2**31 // strides[0] + 1, 2**32 // strides[0] + 1, 2**31 - 1, 3], dtype=torch.int32)
    heads = torch.tensor([127, 0, 2**20, 2**18 + 1], dtype=torch.int32)
    out = torch.empty(4, 8, 4, dtype=torch.int64)
    first = torch.tensor([2**24], dtype=torch.int32)
    offset_kernel[(1,)](slots, heads, first, out, *strides, 4, 8)
    rows = slots.long()[:, None] * strides[0] + heads.long()[:, None] * strides[1]
    rows = rows + (2**24 + torch.arange(8)) * strides[2]
    assert torch.equal(out, rows[:, :, None] + torch.arange(4))


FAR = """
import torch
from tests import triton_interpreter
from avmp.kernels.selective_state_update import selective_state_update
triton_interpreter.install()
g = torch.Generator().manual_seed(0)
def far(tensor, stride):  # its rows lie so far apart that the last one begins beyond 2^31 elements and 2^32 bytes
    memory = torch.empty((len(tensor) - 1) * stride + tensor[0].numel(), dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)
assert 2 * (2**30 + 2**20) > 2**31
state = torch.randn(4, 2, 4, 8, generator=g).bfloat16()
x, dt = torch.randn(3, 2, 4, generator=g).bfloat16(), torch.rand(3, 2, 4, generator=g).bfloat16()
B, C = torch.randn(3, 1, 8, generator=g).bfloat16(), torch.randn(3, 1, 8, generator=g).bfloat16()
A = -torch.rand(2, 4, 8, generator=g)
ids = torch.tensor([[3], [1], [2]], dtype=torch.int32)
kept = torch.zeros(3, 2, 2, 4, 8, dtype=torch.bfloat16)
stride = 2**30 + 2**20
near = dict(state=state, x=x, dt=dt, B=B, C=C, z=x, state_indices=ids[:, 0], intermediate_states=kept)
distant = {name: far(tensor, stride) for name, tensor in near.items() if name not in ("z", "state_indices")}
out = far(torch.zeros(3, 2, 4, dtype=torch.bfloat16), stride)
distant |= {"z": distant["x"], "state_indices": far(ids, 2**31 + 8)[:, 0], "out": out}
for other in (near, distant):
    other["result"] = selective_state_update(A=A, **other)
for name in ("result", "state", "intermediate_states"):
    assert torch.equal(near[name], distant[name]), name
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
        state = torch.zeros(rows + 9, 4, 64, 128)
        x, B = torch.zeros(2 * rows, 4, 64), torch.zeros(2 * rows, 1, 128)
        dt, A = torch.zeros(2 * rows, 4, 1).expand(2 * rows, 4, 64), torch.zeros(4, 1, 1).expand(4, 64, 128)
        update, starts = kernels.selective_state_update, torch.arange(0, rows + 1, dtype=torch.int32)
        shared = dict(slot_table=table, first_valid_id=rows % 2, query_start_loc=starts)
        for first in (0, rows):
            tokens = [one[first : first + rows] for one in (x, dt)]
            update(state, *tokens, A, B[:rows], B[:rows], state_indices=ids[:, 0], max_query_len=1, **shared)
        for longest in (2, 3, 4):
            update(state, x, dt, A, B, B, state_indices=ids, max_query_len=longest, **shared)


def test_no_count_is_a_reason_for_a_compilation():
    assert compilations("tests.test_state_kernels:sweep_counts") == {
        "selective_state_update_kernel": 2
    }  # one token, several


def refused() -> list[tuple[dict[str, Any], type[Exception]]]:
    int32, two = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    ragged = {"query_start_loc": torch.zeros(5, dtype=torch.int32), "state_indices": two}
    return [
        ({"x": torch.zeros(4, 8)}, InvalidArgument),
        ({"x": torch.zeros(4, 2, 16)[..., ::2]}, InvalidArgument),
        ({"dt": torch.zeros(4, 2, 4)}, InvalidArgument),
        ({"A": torch.zeros(2, 8, 8)}, InvalidArgument),
        ({"B": torch.zeros(4, 3, 16), "C": torch.zeros(4, 3, 16)}, InvalidArgument),
        ({"C": torch.zeros(4, 1, 8)}, InvalidArgument),
        ({"D": torch.zeros(2)}, InvalidArgument),
        ({"x": torch.zeros(4, 2, 8, dtype=torch.float64)}, Unsupported),
        ({"state": torch.zeros(40, 2, 8, 16, dtype=torch.int8)}, Unsupported),
        ({"state": torch.zeros(40, 2, 8, 32)[..., ::2]}, InvalidArgument),
        ({"state_indices": int32.float()}, InvalidArgument),
        ({"state_indices": int32[:3].expand(3).repeat(2)}, InvalidArgument),
        ({"state_indices": two.t().contiguous().t()}, InvalidArgument),
        ({"state_indices": None}, InvalidArgument),
        ({"first_valid_id": -1}, InvalidArgument),
        ({"destination_indices": int32[:3]}, InvalidArgument),
        ({"num_accepted_tokens": int32}, InvalidArgument),
        ({"query_start_loc": torch.zeros(5, dtype=torch.int64)}, InvalidArgument),
        ({"query_start_loc": torch.zeros(4, dtype=torch.int32)}, InvalidArgument),
        (ragged, InvalidArgument),
        (ragged | {"max_query_len": 3}, InvalidArgument),
        ({"max_query_len": 2}, InvalidArgument),
        ({"max_query_len": -1}, InvalidArgument),
        ({"has_initial_state": int32}, InvalidArgument),
        ({"intermediate_states": torch.zeros(4, 2, 8, 16)}, InvalidArgument),
        ({"intermediate_states": torch.zeros(4, 0, 2, 8, 16)}, InvalidArgument),
        ({"out": torch.zeros(4, 2, 4)}, InvalidArgument),
        ({"x": torch.zeros(4, 2, 8, device="meta")}, InvalidArgument),
    ]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_what_does_not_fit_is_refused_before_anything_changes(module):
    problem = make_problem(Shape())
    before = twin(problem.call["state"])
    for changed, error in refused():
        with pytest.raises(error, match="selective_state_update: "):
            MODULES[module](**problem.call | changed)
    assert only_changed(before, problem.call["state"], [])


def test_every_size_has_a_tile_that_its_threads_share_without_overlap():
    """Otherwise two threads would read an element, and one of them after the other has written it."""
    for dim in (1, 2, 7, 64, 100, 8192):
        for dstate in (1, 4, 16, 20, 128, 256, 4096):
            for tied in (True, False):
                for lanes in (32, 64):
                    tile = state_tuning.state_tile(dim, dstate, tied, False, lanes)
                    assert tile.block >= dstate and tile.dims * tile.block >= tile.warps * lanes
                    assert tile.dims * tile.block <= max(state_tuning.STATE_ELEMENTS, tile.block)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_other_pairs(seed):
    for number, case in enumerate(pairwise(FACTORS, seed)):
        problem = make_problem(shape_of(case), seed=1000 * seed + number)
        check_both(problem, seed + number)


@pytest.mark.slow
@pytest.mark.parametrize("dstate", [1, 3, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("dim", [1, 8, 40, 64])
def test_every_size(dim, dstate):
    kinds = itertools.product((("fp32", "bf16", "fp32"), ("bf16", "bf16", "fp32")), (True, False))
    for turn, (types, tied) in enumerate(kinds):
        problem = make_problem(Shape(dim=dim, dstate=dstate, types=types, tied=tied, extras=("D", "dt_bias")))
        check_both(problem, dim + dstate + turn)
