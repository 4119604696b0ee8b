"""The serving simulator against one that is slow and obvious, and small runs worked out by hand."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avmp.baselines import MORE_POLICIES, POLICIES, ByteBudget, PolicySetup, make_policy
from avmp.errors import Inconsistent, InvalidArgument
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.serving.devices import Device, ModelCosts
from avmp.serving.engine_rules import EngineRules
from avmp.serving.metrics import summarize
from avmp.serving.roofline import Assumptions, StepModel
from avmp.serving.simulator import TICK, _Run, simulate
from avmp.workloads import Trace

# Two attention layers of 128 B a token and four state layers of 512 B; pages of 4 tokens.
GEOMETRY = Geometry(
    attention_layers=tuple(AttentionLayer(i, 1, 32, 32, "bfloat16") for i in range(2)),
    state_layers=tuple(StateLayer(10 + i, (StatePart("ssm", (512,), "int8"),)) for i in range(4)),
    page_tokens=4,
    max_position_embeddings=60,
    name="small",
)
DEVICE = Device("small", 10**9, 1e6, 1e9, 1e5, "by hand")
COSTS = ModelCosts(parameters=1000, active_parameters=1000, query_width=32, weight_bytes=2, source="by hand")
ASSUMPTIONS = Assumptions(bandwidth_share=0.5, flops_share=0.5, overhead_seconds=0.001)
MODEL = StepModel(GEOMETRY, COSTS, DEVICE, 1, ASSUMPTIONS)
PAGE, SLOT = 4 * 2 * 128, 4 * 512


def layout_of(units):
    """Room for ``units`` slots of this geometry, and a null area."""
    return Layout.plan(GEOMETRY, (units + 1) * SLOT)


def setup_of(layout, max_batch=8):
    return PolicySetup(layout, longest_tokens=60, max_sequences=max_batch)


def trace_of(*requests):
    """(arrival, prompt, output) of each."""
    seconds, prompts, outputs = zip(*requests, strict=True)
    return Trace("by hand", np.array(seconds, float), np.array(prompts), np.array(outputs))


# -- the slow one ----------------------------------------------------------------------------------------------------


@dataclass
class Request:
    number: int
    arrival: float
    prompt: int
    output: int
    tokens: list = field(default_factory=list)
    """When each output token came out."""
    cached: int = 0
    room: int = 0
    to_read: int = 0
    admitted: float = math.nan
    finished: float = math.nan
    on_host: bool = False

    @property
    def reading(self):
        return self.to_read > 0


class Slow:
    """One token at a time, in plain lists; ``holds(lengths)`` says which sequences fit together."""

    def __init__(self, trace, holds, rules, name, longest=60):
        self.holds, self.rules, self.name = holds, rules, name
        columns = trace.arrival_seconds, trace.prompt_tokens, trace.output_tokens
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self.requests = [Request(i, *row) for i, row in enumerate(rows)]
        self.refused = [r for r in self.requests if r.prompt + r.output > longest or not holds([r.prompt + r.output])]
        self.coming = [r for r in self.requests if r not in self.refused]
        self.waiting, self.running = [], []
        self.now, self.preemptions, self.recomputed, self.read, self.ends = 0.0, 0, 0, 0, []

    def run(self):
        while self.coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now = max(self.now, math.ceil(self.coming[0].arrival / TICK) * TICK)
            while self.coming and self.coming[0].arrival <= self.now:
                self.waiting.append(self.coming.pop(0))
            self.step()
        return self

    def fits(self, tokens):
        spare = self.rules.reserve_tokens * (len(self.running) + 1) if self.running else 0
        room = self.holds([r.room for r in self.running] + [tokens], spare)
        return room and len(self.running) < self.rules.max_batch

    def step(self):
        swapped_units = 0
        preempted = False
        while True:
            decoding = [r for r in self.running if not r.reading]
            if self.holds([r.room + (r in decoding) for r in self.running]):
                break
            last = self.running.pop()
            preempted = True
            self.preemptions += 1
            if self.rules.preemption == "swap":
                swapped_units += bytes_of(self.name, last.room)
                last.on_host = True
            else:
                self.recomputed += last.cached
                last.cached = last.room = last.to_read = 0
            self.waiting.insert(0, last)
        for r in decoding:
            r.room += 1
        tokens_left = self.rules.token_budget - sum(1 if not r.reading else r.to_read for r in self.running)
        while not preempted and self.waiting and tokens_left > 0:
            head = self.waiting[0]
            if head.on_host:
                want = head.room + (not head.reading)
            else:
                want = head.prompt + len(head.tokens)
            if not self.fits(want):
                break
            self.running.append(self.waiting.pop(0))
            if head.on_host:
                head.on_host = False
                swapped_units += bytes_of(self.name, head.room)
                head.room = want
                tokens_left -= head.to_read if head.reading else 1
                decoding += [] if head.reading else [head]
            else:
                head.room, head.cached, head.to_read = want, 0, want
                tokens_left -= want
            if math.isnan(head.admitted):
                head.admitted = self.now
        self.end_step(decoding, swapped_units)

    def end_step(self, decoding, swapped_bytes):
        budget = self.rules.token_budget - len(decoding)
        tokens = pairs = context = 0
        active, yields = [], []
        for r in decoding:
            r.cached += 1
            assert r.cached == r.room
            tokens, pairs, context = tokens + 1, pairs + r.cached, context + r.cached
            active.append(r)
            yields.append(r)
        for r in [r for r in self.running if r.reading]:
            if budget:
                active.append(r)
            while budget and r.to_read:
                budget, r.to_read, r.cached = budget - 1, r.to_read - 1, r.cached + 1
                self.read += 1
                tokens, pairs = tokens + 1, pairs + r.cached
            if r in active:
                context += r.cached
                yields += [r] if not r.to_read else []
        byte_count = 2000 + 256 * (context + tokens) + 2 * SLOT * len(active)
        operations = 2 * 1000 * tokens + 4 * 32 * 2 * pairs + 6 * 4 * 512 * tokens
        self.now += math.ceil((0.001 + max(byte_count / 5e5, operations / 5e8)) / TICK) * TICK
        if swapped_bytes:
            self.now += math.ceil(swapped_bytes / 1e5 / TICK) * TICK
        self.ends.append(self.now)
        for r in yields:
            if len(r.tokens) < r.output:
                r.tokens.append(self.now)
            if len(r.tokens) == r.output:
                r.finished = self.now
                self.running.remove(r)


def bytes_of(name, tokens):
    """What a sequence of so many tokens holds. vLLM's rule makes blocks of 16 tokens in two layers of this geometry,
    4 KiB, of which the states take two; the padded pool makes blocks of 512 B, to which nothing here is padded."""
    return (-(-tokens // 16) + 2) * 4096 if name == "vllm" else -(-tokens // 4) * PAGE + SLOT


def holds_of(name, layout):
    """Which lengths fit together beside some spare tokens, for policies whose rule takes one line."""
    arena, half = layout.arena_bytes, layout.arena_bytes // 2
    rules = {
        "avmp": lambda pages, slots: layout.holds(pages, slots),
        "oracle": lambda pages, slots: pages * PAGE + slots * SLOT <= arena - layout.null_bytes,
        "static-0.5": lambda pages, slots: pages <= half // PAGE and slots <= half // SLOT,
        "padded": lambda pages, slots: 2 * pages + 4 * slots <= arena // 512,
        "vllm": lambda blocks, slots: blocks + 2 * slots <= arena // 4096 - 1,
    }
    step = 16 if name == "vllm" else 4
    return lambda lengths, spare=0: rules[name](sum(-(-n // step) for n in [*lengths, spare]), len(lengths))


def random_traces():
    request = st.tuples(st.sampled_from([0.0, 0.001, 0.02, 0.5]), st.integers(1, 40), st.integers(0, 24))
    return st.lists(request, min_size=1, max_size=14).map(
        lambda rows: trace_of(*[(sum(r[0] for r in rows[: i + 1]), *row[1:]) for i, row in enumerate(rows)])
    )


@settings(max_examples=150, deadline=None)
@given(
    trace=random_traces(),
    units=st.integers(2, 20),
    name=st.sampled_from(["avmp", "oracle", "static-0.5", "padded", "vllm"]),
    preemption=st.sampled_from(["recompute", "swap"]),
    token_budget=st.sampled_from([8, 17, 200]),
    reserve=st.sampled_from([0, 3, 16]),
)
def test_every_run_is_that_of_the_slow_simulator(trace, units, name, preemption, token_budget, reserve):
    layout, rules = layout_of(units), EngineRules(token_budget, 8, preemption, reserve)
    served = simulate(trace, Still(make_policy(name, setup_of(layout))), MODEL, rules)
    slow = Slow(trace, holds_of(name, layout), rules, name).run()
    assert served.refused.tolist() == [r.number for r in slow.refused]
    assert served.step_end.tolist() == slow.ends
    first = [r.tokens[0] if r.tokens else math.nan for r in slow.requests]
    np.testing.assert_array_equal(served.first_token, first)
    np.testing.assert_array_equal(served.finished, [r.finished for r in slow.requests])
    np.testing.assert_array_equal(served.admitted, [r.admitted for r in slow.requests])
    assert served.preemptions == slow.preemptions
    assert served.prefill_tokens == slow.read
    assert served.recomputed_tokens == slow.recomputed
    assert int(served.step_tokens.sum()) == sum(len(r.tokens) for r in slow.requests)
    gaps = sorted(gap for r in slow.requests for gap in np.diff(r.tokens).tolist())
    seen = sorted(np.repeat(served.gap_seconds, served.gap_count).tolist() + served.late_gaps.tolist())
    assert seen == gaps


class Still:
    """A policy whose moves cost no time: the slow simulator knows of none."""

    moved_bytes = 0

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)


# -- by hand ---------------------------------------------------------------------------------------------------------

SIXTEENTHS = StepModel(GEOMETRY, COSTS, Device("fast", 1, 1e40, 1e40, 1024.0, "by hand"), 1, Assumptions(1, 1, 1 / 16))
"""Every step takes a sixteenth of a second, and a KiB a second goes to the host or back."""

EAGER = EngineRules(token_budget=64, max_batch=8, reserve_tokens=0)


def of_oracle(trace, units, rules=EAGER, model=SIXTEENTHS):
    return simulate(trace, make_policy("oracle", setup_of(layout_of(units))), model, rules)


def sixteenths(times):
    return [None if math.isnan(time) else time * 16 for time in times]


def test_the_latest_is_preempted_and_reads_again_what_it_had():
    """Room for three slots. Step 1: both are read, a page and a slot each, and yield a token. Step 2: both would grow
    to a second page, a slot too much: B goes, with 4 tokens in the cache. Step 3: A leaves. Step 4: B reads its prompt
    and its first token again, and yields its second. Step 5: its third."""
    served = of_oracle(trace_of((0, 4, 3), (0, 4, 3)), 3)
    assert sixteenths(served.first_token) == [1, 1]
    assert sixteenths(served.finished) == [3, 5]
    assert sixteenths(served.admitted) == [0, 0]
    assert (served.preemptions, served.recomputed_tokens, served.prefill_tokens) == (1, 4, 4 + 4 + 5)
    assert served.step_tokens.tolist() == [2, 1, 1, 1, 1]
    assert served.step_batch.tolist() == [2, 1, 1, 1, 1]
    assert served.gap_count.tolist() == [0, 1, 1, 0, 1]
    assert sixteenths(served.late_gaps) == [3]


def test_the_latest_is_swapped_out_and_comes_back_as_it_was():
    """As above, but B's page and slot, 3 KiB, go to the host in step 2 and come back in step 4, 3 s each time."""
    served = of_oracle(trace_of((0, 4, 3), (0, 4, 3)), 3, replace(EAGER, preemption="swap"))
    assert sixteenths(served.finished) == [1 + 1 + 48 + 1, 1 + 1 + 48 + 1 + 1 + 48 + 1]
    assert (served.preemptions, served.recomputed_tokens, served.prefill_tokens) == (1, 0, 8)
    assert (served.swapped_bytes, served.swap_seconds) == (2 * 3072, 6.0)
    assert sixteenths(served.late_gaps) == [49 + 1 + 49]


def test_a_reserve_keeps_the_second_out_instead():
    """A reserve of a token each is two tokens, a page, beside two requests: B waits until A has left."""
    served = of_oracle(trace_of((0, 4, 3), (0, 4, 3)), 3, replace(EAGER, reserve_tokens=1))
    assert sixteenths(served.finished) == [3, 6]
    assert sixteenths(served.admitted) == [0, 3]
    assert served.preemptions == 0


def test_prompts_are_read_in_chunks_and_decoding_comes_first():
    """Four tokens a step. Step 1: A reads 4. Step 2: its last 2, and yields; B, admitted as there is budget left, reads
    2. Step 3: A decodes, B reads 3 of its other 4. Step 4: A yields its last token; B reads its last and yields."""
    served = of_oracle(trace_of((0, 6, 3), (0, 6, 1)), 8, EngineRules(token_budget=4, max_batch=4, reserve_tokens=0))
    assert sixteenths(served.first_token) == [2, 4]
    assert sixteenths(served.finished) == [4, 4]
    assert served.step_tokens.tolist() == [0, 1, 1, 2]
    assert sixteenths(served.admitted) == [0, 1]


def test_time_goes_on_to_the_next_arrival_and_nobody_overtakes():
    """B needs more than A leaves; C, who would fit, waits behind it."""
    served = of_oracle(trace_of((5, 4, 2), (5, 12, 1), (5, 1, 1), (9, 1, 0)), 3)
    assert sixteenths(served.admitted) == [80, 82, 83, 144]
    assert sixteenths(served.finished) == [82, 83, 84, 145]
    assert sixteenths(served.first_token) == [81, 83, 84, None]


def test_the_batch_is_bounded():
    served = of_oracle(trace_of(*[(0, 1, 2)] * 5), 14, replace(EAGER, max_batch=2))
    assert served.step_batch.tolist() == [2, 2, 2, 2, 1, 1]


def test_what_can_never_fit_or_is_too_long_for_the_model_is_refused():
    """Two slots hold a slot and two pages, 8 tokens; the model is made for 60."""
    served = of_oracle(trace_of((0, 4, 4), (0, 5, 4), (0, 60, 1), (0, 8, 0)), 2)
    assert served.refused.tolist() == [1, 2]
    assert sixteenths(served.finished) == [4, None, None, 5]
    everything = of_oracle(trace_of((0, 50, 11)), 40)
    assert (everything.refused.tolist(), len(everything.step_end)) == ([0], 0)


def test_moves_take_time_on_the_device():
    class Moving(ByteBudget):
        moved_bytes = 0

        def extend(self, handles, counts=1):
            super().extend(handles, counts)
            self.moved_bytes += 512

    slow = replace(SIXTEENTHS, device=Device("slow", 1, 1e40, 1e40, 1.0, ""))
    model = type("Model", (StepModel,), {"move_seconds": lambda self, moved: moved / 256})(*_fields(slow))
    served = simulate(trace_of((0, 2, 3)), Moving(setup_of(layout_of(3))), model, EAGER)
    assert sixteenths(served.step_end) == [1, 1 + 33, 1 + 66]
    assert served.move_seconds == 4.0
    assert served.busy_seconds == 4.0 + 3 / 16


def _fields(model):
    return model.geometry, model.costs, model.device, model.tp_size, model.assumptions


# -- every policy ----------------------------------------------------------------------------------------------------


def produced_by_step(run):
    """How many tokens each request got in each step, a row a step; and what became of everything."""

    def left():
        now = np.array(run.left)
        now[run.requests] = run.last_step - run.steps
        return now

    before, rows = left(), []
    while run.step():
        now = left()
        rows.append(before - now)
        before = now
    return np.array(rows, dtype=np.int64).reshape(-1, len(run.trace)), run.result()


@settings(max_examples=120, deadline=None)
@given(
    trace=random_traces(),
    units=st.integers(2, 30),
    name=st.sampled_from([*POLICIES, *MORE_POLICIES]),
    preemption=st.sampled_from(["recompute", "swap"]),
    reserve=st.sampled_from([0, 16]),
)
def test_every_token_of_every_request_is_produced_once_or_the_request_is_reported(
    trace, units, name, preemption, reserve
):
    policy, rules = make_policy(name, setup_of(layout_of(units))), EngineRules(200, 8, preemption, reserve)
    produced, served = produced_by_step(_Run(trace, policy, MODEL, rules))
    assert set(np.unique(produced)) <= {0, 1} and produced.sum(axis=1).tolist() == served.step_tokens.tolist()
    kept = np.setdiff1d(np.arange(len(trace)), served.refused)
    assert np.isnan(served.finished[served.refused]).all() and not np.isnan(served.finished[kept]).any()
    assert produced.sum(axis=0)[kept].tolist() == trace.output_tokens[kept].tolist()
    assert not produced[:, served.refused].any()
    gaps = int(served.gap_count.sum()) + len(served.late_gaps)
    assert gaps == int(np.maximum(trace.output_tokens[kept] - 1, 0).sum())
    read_again = served.prefill_tokens - int(trace.prompt_tokens[kept].sum())
    assert served.recomputed_tokens <= read_again <= served.recomputed_tokens + served.preemptions
    wanted = kept[trace.output_tokens[kept] > 0]
    silent = np.setdiff1d(np.arange(len(trace)), wanted)
    assert (served.first_token[wanted] > trace.arrival_seconds[wanted]).all()
    assert np.isnan(served.first_token[silent]).all()
    assert (served.finished[wanted] >= served.first_token[wanted]).all()
    assert policy.used_bytes() == {"kv": 0, "state": 0}
    assert all(s.kv_used + s.state_used <= policy.arena_bytes for s in served.samples)
    assert all(s.kv_used <= s.kv_extent and s.state_used <= s.state_extent for s in served.samples)
    again = simulate(trace, make_policy(name, setup_of(layout_of(units))), MODEL, rules)
    assert summarize(again) == summarize(served)


def test_a_policy_that_breaks_its_word_is_found_out():
    class Liar(ByteBudget):
        def fits(self, token_counts, spare_tokens=0):
            return False

    with pytest.raises(Inconsistent, match="request 0 was found possible, but does not fit into empty memory"):
        simulate(trace_of((0, 1, 1)), Liar(setup_of(layout_of(4))), MODEL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(token_budget=0), "token_budget=0"),
        (dict(max_batch=0), "max_batch=0"),
        (dict(token_budget=8, max_batch=9), "token_budget=8 is less than max_batch=9"),
        (dict(preemption="kill"), "preemption 'kill': expected one of recompute, swap"),
        (dict(reserve_tokens=-1), "reserve_tokens=-1"),
    ],
)
def test_rules_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        EngineRules(**arguments)


def test_progress_counts_the_requests_that_are_dealt_with():
    told = []
    simulate(
        trace_of((0, 4, 4), (0, 60, 1), (0, 1, 0)),
        make_policy("avmp", setup_of(layout_of(4))),
        MODEL,
        EAGER,
        told.append,
    )
    assert told == [2, 3]


def test_samples_are_evenly_spaced_and_bounded():
    trace = trace_of(*[(at, 4, 20) for at in range(120)])
    served = of_oracle(trace, 40)
    assert len(served.step_end) > 1000 > len(served.samples) > 400
    positions = np.searchsorted(served.step_end, [sample.seconds for sample in served.samples])
    assert set(np.diff(positions).tolist()) == {int(positions[1])}
