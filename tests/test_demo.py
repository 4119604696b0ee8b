"""The demo's engine: every token against an unpaged run, whatever is admitted, forked, swapped or moved."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st

from avmp.cache_pool import CachePool
from avmp.cli import main
from avmp.demo.engine import Answer, Engine
from avmp.demo.memories import PagedMemory, PlainMemory
from avmp.demo.model import HybridModel, ModelShape
from avmp.demo.report import result_of
from avmp.demo.requests import Request, requests_like
from avmp.demo.sampling import draw
from avmp.demo.unpaged import Comparison, compare, compare_all
from avmp.errors import ArenaTooSmall, InvalidArgument
from avmp.handles import ID_MASK
from avmp.layout import Layout
from avmp.options import Options
from avmp.workloads import Trace, builtin_trace
from tests.chaos import ChaosMigration

SMALL = ModelShape(
    pattern="MAM", vocabulary=64, hidden=32, query_heads=2, kv_heads=1, state_heads=2, state_head_dim=16, state_dim=8
)
PAGE_TOKENS = 4


@pytest.fixture(autouse=True)
def one_thread_without_gradients():
    """One thread: the model is so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def make_pool(memory: int | str, chaos: int | None = None, **keywords) -> CachePool:
    disturbance = None if chaos is None else ChaosMigration(chaos)
    keywords = {"max_rows": 16, "max_tokens_per_sequence": 96, "options": Options(debug=2, poison=True)} | keywords
    return CachePool(SMALL.geometry(PAGE_TOKENS), memory, device="cpu", disturbance=disturbance, **keywords)


def requests_of(lengths: list[tuple[int, int, int, int]]) -> list[Request]:
    """From (arrival, prompt tokens, output tokens, samples)."""
    random = np.random.default_rng(7)
    return [
        Request(number, arrival, random.integers(SMALL.vocabulary, size=prompt), output, samples)
        for number, (arrival, prompt, output, samples) in enumerate(lengths)
    ]


def serve(pool: CachePool, requests: list[Request], chunk_tokens: int = 8) -> Engine:
    engine = Engine(HybridModel(SMALL, seed=3), pool, requests, chunk_tokens, seed=5)
    engine.run()
    pool.check()
    return engine


def require_equal(engine: Engine, requests: list[Request]) -> None:
    """Every answer of every request is there, as long as asked for, and equal to the unpaged run's."""
    refused = {request.number for request in engine.refused}
    wanted = {
        (r.number, sample): r.output_tokens for r in requests if r.number not in refused for sample in range(r.samples)
    }
    assert {answer.order: len(answer.tokens) for answer in engine.finished} == wanted
    compared = compare_all(HybridModel(SMALL, seed=3), engine.finished, seed=5)
    assert compared.different == 0
    assert compared.tokens == sum(wanted.values())


REQUESTS = requests_of([(0, 30, 12, 1), (0, 3, 20, 3), (1, 17, 9, 1), (2, 1, 25, 1), (2, 40, 5, 2), (9, 8, 8, 4)])


def test_roomy_memory_serves_everybody_at_once():
    engine = serve(make_pool("4MiB"), REQUESTS)
    require_equal(engine, REQUESTS)
    assert engine.preemptions == 0
    assert not engine.refused


@pytest.mark.parametrize("chaos", [None, 0, 1])
def test_short_memory_swaps_and_moves_and_changes_no_token(chaos):
    pool = make_pool(40 * 1024, chaos)
    engine = serve(pool, REQUESTS)
    require_equal(engine, REQUESTS)
    assert engine.preemptions > 0
    stats = pool.stats()
    assert stats.units_moved > 0 if chaos is None else stats.migrations + stats.retractions > 0
    assert stats.sequences == stats.swapped == stats.pages_live == stats.slots_live == 0


def test_triton_kernels_serve_the_same_tokens(interpreter):
    few = requests_of([(0, 9, 3, 2), (0, 3, 4, 1), (1, 6, 3, 1)])
    plain = serve(make_pool(24 * 1024), few)
    engine = serve(make_pool(24 * 1024, backend="triton"), few)
    require_equal(engine, few)
    assert [a.tokens for a in engine.finished] == [a.tokens for a in plain.finished]


def test_a_request_that_never_fits_is_refused_and_the_others_are_served():
    requests = requests_of([(0, 30, 4, 1), (0, 90, 20, 1), (1, 5, 5, 1)])
    engine = serve(make_pool("1MiB"), requests)
    assert [request.number for request in engine.refused] == [1]
    require_equal(engine, requests)


@pytest.mark.parametrize(("memory", "longest"), [("1MiB", 16), (None, 96)])
def test_a_request_that_fits_to_the_last_token_is_served(memory, longest):
    """Its last token is never fed back: there need be no room for it."""
    if memory is None:  # an arena for exactly four pages and a slot
        geometry = SMALL.geometry(PAGE_TOKENS)
        memory = next(
            size
            for size in range(4096, 2**20, 256)
            if possible(lambda size=size: Layout.plan(geometry, size).max_sequences(16))
        )
        longest = 16
    requests = requests_of([(0, 16, 1, 1), (0, 3, 2, 1)])
    engine = serve(make_pool(memory, max_tokens_per_sequence=longest), requests)
    assert not engine.refused
    require_equal(engine, requests)


def possible(count: Callable[[], int]) -> bool:
    try:
        return count() > 0
    except ArenaTooSmall:
        return False


def test_idle_time_is_skipped():
    requests = requests_of([(0, 3, 2, 1), (10**8, 3, 2, 1)])
    engine = serve(make_pool("1MiB"), requests)
    require_equal(engine, requests)
    assert len(engine.history) < 10 < 10**8 < engine.steps


def test_samples_of_one_prompt_differ_and_share_its_pages():
    requests = requests_of([(0, 40, 12, 4)])
    pool = make_pool("4MiB")
    engine = Engine(HybridModel(SMALL, seed=3), pool, requests, chunk_tokens=64, seed=5)
    engine.step()
    assert len(engine.running) == 4
    assert pool.stats().pages_live == 40 // PAGE_TOKENS
    engine.run()
    assert len({tuple(answer.tokens) for answer in engine.finished}) == 4
    require_equal(engine, requests)


def test_samples_that_find_no_room_read_the_prompt_again():
    requests = requests_of([(0, 20, 6, 5), (0, 20, 6, 5)])
    engine = serve(make_pool("1MiB", max_rows=3), requests)
    require_equal(engine, requests)


def bytes_of(pool: CachePool, sequence: int) -> list[torch.Tensor]:
    """All bytes of a sequence's pages and of its slot, layer by layer."""
    pool.flush()
    pages = torch.from_numpy(pool.tables.page_table.numpy()[pool.pages(sequence) & ID_MASK]).long()
    slot = int(pool.tables.slot_table[pool.slot(sequence) & ID_MASK])
    kv = [part[pages] for part in pool.kv(SMALL.pattern.index("A")) if part is not None]
    states = [part[slot] for layer, kind in enumerate(SMALL.pattern) if kind == "M" for part in pool.state(layer)]
    return [part.clone().view(torch.uint8) for part in kv + states]


@pytest.mark.parametrize("chaos", [None, 1])
def test_who_was_swapped_out_comes_back_bit_by_bit(chaos, monkeypatch):
    pool = make_pool(40 * 1024, chaos)
    swap_out, swap_in = pool.swap_out, pool.swap_in
    left: dict[int, list[torch.Tensor]] = {}
    same: list[bool] = []

    def leave(handles):
        before = bytes_of(pool, handles[0])
        swapped = swap_out(handles)
        left[int(swapped[0])] = before
        return swapped

    def come_back(handles):
        before = left.pop(handles[0])
        back = swap_in(handles)
        same.extend(map(torch.equal, before, bytes_of(pool, int(back[0]))))
        return back

    monkeypatch.setattr(pool, "swap_out", leave)
    monkeypatch.setattr(pool, "swap_in", come_back)
    engine = serve(pool, REQUESTS)
    require_equal(engine, REQUESTS)
    assert not left and len(same) == 6 * engine.preemptions > 0 and all(same)


def test_the_same_calls_give_the_same_run():
    first, second = (serve(make_pool(40 * 1024), REQUESTS) for _ in range(2))
    assert first.history == second.history
    assert first.pool.digest() == second.pool.digest()


def test_a_wrong_token_is_found():
    engine = serve(make_pool("4MiB"), REQUESTS[:2])
    answer = engine.finished[0]
    answer.tokens[4] = (answer.tokens[4] + 1) % SMALL.vocabulary
    assert compare(HybridModel(SMALL, seed=3), answer, seed=5).different >= 1


def test_a_wrong_byte_in_the_arena_is_found():
    """The check is worth something: it sees one layer's states disturbed once."""
    pool = make_pool("4MiB")
    engine = Engine(HybridModel(SMALL, seed=3), pool, REQUESTS[:2], chunk_tokens=8, seed=5)
    for _ in range(6):
        engine.step()
    pool.state(0)[1].add_(1.0)
    engine.run()
    assert compare_all(HybridModel(SMALL, seed=3), engine.finished, seed=5).different > 0


# -- any schedule ----------------------------------------------------------------------------------------------------


class Schedule:
    """A pool with a model, driven by hand; every sequence's logits are compared with its own unpaged run. It holds four
    states and five pages, or one and twenty-six: whoever grows takes memory from the other side."""

    def __init__(self, chaos: int | None) -> None:
        self.pool = make_pool(20 * 1024, chaos, max_rows=6, max_tokens_per_sequence=64)
        self.model = HybridModel(SMALL, seed=3)
        self.resident: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.random = np.random.default_rng(chaos)
        self.compared = self.resumed = 0
        self.longest = self.pool.max_tokens_per_sequence - 1  # the last token is for the last comparison

    def admit(self) -> None:
        if self.pool.fits("admit", [0]):
            self.resident[int(self.pool.admit([0])[0])] = []

    def step(self, tokens_each: list[int]) -> None:
        """Some more tokens of everybody, or of as many as there is room for, who came last first."""
        rows = {
            handle: self.random.integers(SMALL.vocabulary, size=count).tolist()
            for (handle, tokens), count in zip(self.resident.items(), tokens_each, strict=False)
            if count and len(tokens) + count <= self.longest
        }
        while rows and not self.pool.fits("extend", list(rows), [len(new) for new in rows.values()]):
            del rows[next(iter(rows))]
        if not rows:
            return
        self.pool.extend(list(rows), [len(new) for new in rows.values()])
        memory = PagedMemory(self.pool, list(rows))
        logits = self.model.forward(torch.tensor([token for new in rows.values() for token in new]), memory)
        for (handle, new), got in zip(rows.items(), logits, strict=True):
            self.resident[handle] = tokens = self.resident[handle] + new
            wanted = self.model.forward(torch.tensor(tokens), PlainMemory(len(tokens)))[0]
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            self.compared += 1

    def fork(self, which: int) -> None:
        handle = self._pick(self.resident, which)
        if handle is not None and self.pool.fits("fork", handle, 1):
            self.resident[int(self.pool.fork(handle, 1)[0])] = list(self.resident[handle])

    def preempt(self, which: int) -> None:
        handle = self._pick(self.resident, which)
        if handle is not None:
            self.swapped[int(self.pool.swap_out([handle])[0])] = self.resident.pop(handle)

    def resume(self, which: int) -> None:
        handle = self._pick(self.swapped, which)
        if handle is not None and self.pool.fits("swap_in", [handle]):
            self.resident[int(self.pool.swap_in([handle])[0])] = self.swapped.pop(handle)
            self.resumed += 1

    def release(self, which: int) -> None:
        handle = self._pick(self.resident, which)
        if handle is not None:
            self.pool.release([handle])
            del self.resident[handle]

    def finish(self) -> None:
        """Everybody goes on once more: who has room now, and then, one by one, who was swapped out. The arena is empty
        and whole in the end."""
        self.longest += 1
        self.step([1] * 6)
        while self.resident or self.swapped:
            while self.resident:
                self.release(0)
            before = self.compared, len(self.swapped)
            self.resume(0)
            self.step([1])
            assert (self.compared, len(self.swapped)) == (before[0] + bool(before[1]), max(before[1] - 1, 0))
        self.pool.flush()
        self.pool.check()
        assert self.pool.stats().used_bytes == 0

    @staticmethod
    def _pick(handles: dict[int, list[int]], which: int) -> int | None:
        return list(handles)[which % len(handles)] if handles else None


WHICH = st.integers(0, 5)
MOVES: st.SearchStrategy[tuple[str, tuple]] = st.one_of(
    st.tuples(st.just("admit"), st.just(())),
    st.tuples(st.just("step"), st.tuples(st.lists(st.integers(0, 9), min_size=6, max_size=6))),
    *(st.tuples(st.just(name), st.tuples(WHICH)) for name in ("fork", "preempt", "resume", "release")),
)


def run_schedule(moves: list[tuple[str, tuple]], chaos: int | None) -> Schedule:
    schedule = Schedule(chaos)
    with torch.inference_mode():
        for name, arguments in [("admit", ()), ("step", ([5] * 6,)), *moves]:
            action: Callable[..., None] = getattr(schedule, name)
            action(*arguments)
        schedule.finish()
    return schedule


def run_schedules(examples: int, least: int, most: int) -> None:
    """Any schedules; over all of them, live units were moved and answers came back."""
    played = []

    @given(st.lists(MOVES, min_size=least, max_size=most), st.sampled_from([None, 0, 1, 2]))
    @settings(max_examples=examples)
    def any_schedule(moves: list[tuple[str, tuple]], chaos: int | None) -> None:
        schedule = run_schedule(moves, chaos)
        played.append((schedule.pool.stats().migrations, schedule.pool.stats().units_moved, schedule.resumed))
        target(float(played[-1][0]))

    any_schedule()
    assert len(played) >= examples and (np.array(played).sum(0) > 0).all()


def test_any_schedule_gives_every_sequence_its_own_logits():
    run_schedules(examples=25, least=15, most=50)


def test_one_long_schedule_moves_live_units_many_times():
    random, names = np.random.default_rng(1), ["admit", "step", "step", "fork", "preempt", "resume", "release"]
    moves: list[tuple[str, tuple]] = []
    for name in random.choice(names, size=1000).tolist():
        which = (random.integers(0, 10, size=6).tolist(),) if name == "step" else (int(random.integers(6)),)
        moves.append((name, () if name == "admit" else which))
    schedule = run_schedule(moves, chaos=None)
    assert schedule.pool.stats().migrations >= 10 and schedule.resumed >= 20 and schedule.compared >= 100


@pytest.mark.slow
def test_any_long_schedule_gives_every_sequence_its_own_logits():
    run_schedules(examples=150, least=30, most=120)


# -- the parts -------------------------------------------------------------------------------------------------------


def test_requests_follow_the_trace():
    trace = Trace("t", np.array([0.0, 1.0, 3.0, 4.0]), np.array([80, 8, 1, 17]), np.array([16, 7, 0, 9]))
    made = requests_like(trace, vocabulary=10, shrink=8, requests_per_step=0.5, samples=3, seed=0)
    assert [len(request.prompt) for request in made] == [10, 1, 1, 2]
    assert [request.output_tokens for request in made] == [2, 1, 1, 1]
    assert [request.arrival for request in made] == [0, 2, 6, 8]
    assert [request.samples for request in made] == [1, 1, 1, 3]
    again = requests_like(trace, vocabulary=10, shrink=8, requests_per_step=0.5, samples=3, seed=0)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(made, again, strict=True))


@pytest.mark.parametrize("wrong", [{"shrink": 0}, {"samples": 0}, {"requests_per_step": 0.0}])
def test_bad_numbers_are_refused(wrong):
    trace = builtin_trace("sharegpt", 4, 0)
    good = {"vocabulary": 10, "shrink": 1, "requests_per_step": 1.0, "samples": 1, "seed": 0}
    with pytest.raises(InvalidArgument, match="expected"):
        requests_like(trace, **good | wrong)


def test_draws_follow_the_softmax():
    logits = np.log(np.array([0.7, 0.2, 0.1], dtype=np.float32))
    drawn = np.bincount([draw(logits, 0, 0, 0, position) for position in range(4000)], minlength=3) / 4000
    assert np.abs(drawn - [0.7, 0.2, 0.1]).max() < 0.03
    assert draw(logits, 0, 1, 2, 3) == draw(logits, 0, 1, 2, 3)


def test_a_result_without_all_its_tokens_is_not_equal():
    engine = serve(make_pool("4MiB"), REQUESTS[:2])
    compared = compare_all(HybridModel(SMALL, seed=3), engine.finished, seed=5)
    assert result_of(engine, 1.0, compared).equal
    assert not result_of(engine, 1.0, compared._replace(tokens=compared.tokens - 1)).equal
    assert not result_of(engine, 1.0, Comparison(0, 0, 0)).equal


def test_a_nan_differs(monkeypatch):
    engine = serve(make_pool("4MiB"), REQUESTS[:1])
    model = HybridModel(SMALL, seed=3)
    model.head[0, 5] = float("nan")
    assert compare(model, engine.finished[0], seed=5).different == 12


def test_a_pattern_has_two_letters():
    with pytest.raises(InvalidArgument, match="'MXA'"):
        ModelShape(pattern="MXA")


def test_an_answer_knows_what_comes_next():
    answer = Answer(Request(0, 0, np.arange(10), 4, 1))
    assert answer.upcoming(4) == [0, 1, 2, 3]
    answer.kept = 10
    answer.tokens = [7, 8]
    assert not answer.prefilling
    assert answer.upcoming(0) == [8]


# -- the command -----------------------------------------------------------------------------------------------------

ROWS = (
    "requests served",
    "answers (samples) served",
    "requests refused",
    "steps",
    "tokens per second, prompts included",
    "most answers at once",
    "preemptions (swapped out)",
    "boundary moved towards KV / towards states",
    "retractions that moved nothing",
    "migrations (retractions that moved live units)",
    "bytes moved by migrations",
    "tail pages copied",
    "peak use",
)
COMMAND = ["demo", "--requests", "12", "--shrink", "16", "--memory", "512KiB", "--longest", "160"]


def test_the_command_prints_a_table_and_the_verdict(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    assert main([*COMMAND, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    table = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in printed.splitlines()[5:-2])}
    assert tuple(table) == ROWS and table["requests served"] == "12" and table["requests refused"] == "0"
    assert all(re.match(r"[\d,.]+", value) for value in table.values())
    assert re.fullmatch(r"tokens equal to an unpaged run: yes \([\d,]+ tokens compared\)", printed.splitlines()[-1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_runs_the_kernels_in_triton_s_own_interpreter(repository):
    """As users start it: nothing of the tests' interpreter is there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    few = ["--requests", "2", "--shrink", "64", "--requests-per-step", "2", "--backend", "triton", "--device", "cpu"]
    command = [sys.executable, "-m", "avmp", "demo", *few]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "triton backend on cpu" in done.stdout
    assert "tokens equal to an unpaged run: yes" in done.stdout


def test_the_command_shows_on_a_terminal_how_it_goes(repository):
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "avmp", *COMMAND, "--requests", "30"]
    done = subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, stderr=follower, check=True)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    told = re.findall(
        r"\rstep (\d+): (\d+) running, (\d+) waiting, (\d+) swapped; (\d+) pages, (\d+) slots; "
        r"boundary at (\d+)%; (\d+) migrations\x1b\[K",
        shown,
    )
    steps, running, waiting, _, pages, slots, boundary, migrations = np.array(told, dtype=np.int64).T
    assert len(steps) > 5 and (steps % 8 == 0).all() and (np.diff(steps) > 0).all()
    assert running.max() > 1 and waiting.max() > 0 and pages.max() > slots.max() >= running.max()
    assert 0 < boundary.max() <= 100 and len(set(boundary)) > 1
    assert migrations[0] == 0 < migrations[-1] and (np.diff(migrations) >= 0).all()
    assert b"\x1b" not in done.stdout and b"| requests served" in done.stdout


TRACE = ((374, 44), (120, 60), (8, 3), (200, 30), (64, 16))
"""Prompt and output tokens."""


def test_the_command_serves_a_recorded_trace(capsys, tmp_path):
    path = tmp_path / "recorded.csv"
    lines = [f"2023-11-16 18:15:4{n}.6805900,{prompt},{output}" for n, (prompt, output) in enumerate(TRACE)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n", encoding="utf-8")
    assert main(["demo", "--trace", str(path), "--memory", "512KiB", "--longest", "160", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["refused"], result["equal"]) == (5, 0, True)
    assert result["tokens_wanted"] == 5 + 7 + 1 + 3 * 3 + 2
    assert main(["demo", "--trace", str(path), "--requests", "2", "--memory", "512KiB", "--longest", "160"]) == 0
    assert f"{path.name}: 2 requests, lengths divided by 8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_as_it_is_moves_the_boundary_many_times_in_both_directions(capsys):
    assert main(["demo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert min(result["boundary_up"], result["boundary_down"]) >= 20
    assert result["preemptions"] > 0 and result["migrations"] > 0 and result["bytes_moved"] > 0
    assert result["equal"] and (result["requests"], result["refused"]) == (400, 0)


def test_the_command_prints_json(capsys):
    assert main([*COMMAND, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] + result["refused"] == 12
    assert result["equal"] is True
    assert result["tokens_wanted"] == result["compared"][0] > 0


def test_the_command_fails_where_a_token_differs(capsys, monkeypatch):
    monkeypatch.setattr("avmp.demo.unpaged.noise", lambda *where: np.zeros(where[-1]))
    assert main(COMMAND) == 1
    assert "tokens equal to an unpaged run: NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shrink", "0"], "shrink is 0"),
        (["--memory", "1KiB"], "arena"),
        (["--device", "nowhere"], "device"),
        (["--device", "meta"], "device"),
        (["--plot", "nowhere/memory.png"], "folder"),
        (["--plot", "memory.xyz"], ".png"),
        (["--seed", "1" * 23], "seed"),
        (["--requests-per-step", "1e-30"], "requests per step"),
        (["--chunk-tokens", "0"], "chunk"),
    ],
)
def test_the_command_complains_in_one_line(arguments, message, capsys):
    assert main([*COMMAND, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
