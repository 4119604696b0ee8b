"""The replay: a small run by hand, what holds in every run, and what it prints."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avmp.baselines import POLICIES, STATIC_SHARES, ByteBudget, PolicySetup, make_policy
from avmp.errors import Inconsistent
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.replay import MOST_SEQUENCES, ReplayResult, best_static, format_results, replay, setup_for
from avmp.text_table import format_table
from avmp.workloads import Trace, builtin_trace

# In pages of 256 B and 2 tokens and slots of 256 B, beside a null area of one slot.
UNIT_BYTES = 256


def trace_of(*requests):
    prompts, outputs = np.array(requests, dtype=np.int64).T
    return Trace("by hand", np.zeros(len(requests)), prompts, outputs)


def arena_of(units):
    """Room for this many pages and slots together."""
    return Layout.from_unit_sizes(UNIT_BYTES, UNIT_BYTES, (units + 1) * UNIT_BYTES, page_tokens=2)


def run(trace, units, policy="oracle"):
    return replay(trace, make_policy(policy, setup_for(trace, arena_of(units))))


class Recording(ByteBudget):
    """The oracle, and a list of what it was asked to do: lengths and handles."""

    def __init__(self, setup):
        super().__init__(setup)
        self.calls = []

    def admit(self, token_counts):
        handles = super().admit(token_counts)
        self.calls.append(("admit", token_counts.tolist()))
        return handles

    def extend(self, handles, counts=1):
        super().extend(handles, counts)
        self.calls.append(("extend", self._length[handles].tolist()))

    def release(self, handles):
        self.calls.append(("release", self._length[handles].tolist()))
        super().release(handles)


# -- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["avmp", "oracle"])
def test_three_requests_by_hand(name):
    """Six units. Step 1 admits A and B (a page and a slot each; C needs three units more). Step 2: both grow to 3
    tokens, 2 pages each: 6 units. Step 3: 4 tokens each; A is complete. Step 4: B grows to 5 tokens, 3 pages and a
    slot, and C still does not fit. Step 5: B is complete. Step 6: C comes in. Step 7: it is complete."""
    trace = trace_of((2, 2), (2, 4), (3, 1))
    result = run(trace, 6, name)
    assert (result.steps, result.completed, result.preemptions) == (7, 3, 0)
    assert (result.batch_sum, result.peak_batch) == (2 + 2 + 2 + 1 + 1 + 1 + 1, 2)
    assert (result.tokens_computed, result.tokens_computed_again) == (4 + 6 + 4, 0)
    assert (result.peak_kv_bytes, result.peak_state_bytes) == (4 * UNIT_BYTES, 2 * UNIT_BYTES)
    assert result.completed_per_1000_steps == pytest.approx(3000 / 7)
    assert result.mean_batch == pytest.approx(10 / 7)


def test_the_head_of_the_queue_is_not_overtaken():
    trace = trace_of((6, 0), (6, 0), (1, 0), (1, 0))
    policy = Recording(setup_for(trace, arena_of(6)))
    replay(trace, policy)
    assert [lengths for call, lengths in policy.calls if call == "admit"] == [[6], [6, 1], [1]]


def test_the_latest_arrival_is_preempted_and_starts_again():
    """Seven units. A and B come in with 2 pages and a slot each. In step 2 both would need a third page: B goes, and
    is admitted again in step 3, when nobody is preempted and A with 6 tokens leaves 3 units. In step 4, A takes a
    fourth page and is complete at 7 tokens only after B had to go once more."""
    trace = trace_of((4, 3), (4, 1))
    policy = Recording(setup_for(trace, arena_of(7)))
    result = replay(trace, policy)
    assert policy.calls == [
        ("admit", [4, 4]),
        ("release", [4]),
        ("extend", [5]),
        ("extend", [6]),
        ("admit", [4]),
        ("release", [4]),
        ("extend", [7]),
        ("release", [7]),
        ("admit", [4]),
        ("extend", [5]),
        ("release", [5]),
    ]
    assert (result.preemptions, result.tokens_computed_again) == (2, 8)
    assert result.tokens_computed == 7 + 5 + 8
    assert result.steps == 6


def test_a_request_without_output_leaves_in_the_step_of_its_admission():
    result = run(trace_of((3, 0), (3, 0), (3, 0)), 6)
    assert (result.steps, result.completed, result.tokens_computed) == (2, 3, 9)


def test_requests_that_never_fit_are_refused_before_anything_runs():
    result = run(trace_of((100, 0), (1, 1), (1, 100)), 6)
    assert (result.refused_impossible, result.completed, result.steps) == (2, 1, 2)
    nothing = run(trace_of((100, 0)), 6)
    assert (nothing.refused_impossible, nothing.steps) == (1, 0)
    assert (nothing.completed_per_1000_steps, nothing.mean_batch) == (0, 0)


def test_two_requests_and_memory_for_one_and_a_half_make_progress():
    """The first arrival grows by a token in every step from its admission to its end, and so does the second then."""
    trace = trace_of((2, 30), (2, 30))
    policy = Recording(setup_for(trace, arena_of(17 * 3 // 2)))
    result = replay(trace, policy)
    assert result.completed == 2
    assert 1 <= result.preemptions <= 30
    first = [lengths[0] for call, lengths in policy.calls if call == "extend"]
    assert first[:30] == list(range(3, 33))
    assert result.steps <= 2 * 31


def test_a_policy_that_breaks_its_word_is_reported_and_does_not_hang():
    class Forgetful(ByteBudget):
        def impossible(self, token_counts):
            return np.zeros(len(token_counts), dtype=np.bool_)

    for request in ((100, 0), (2, 100)):
        trace = trace_of(request)
        with pytest.raises(Inconsistent, match=r"request 0 .* possible"):
            replay(trace, Forgetful(setup_for(trace, arena_of(6))))


def test_the_limit_on_sequences_holds():
    trace = trace_of(*[(1, 1)] * 10)
    setup = setup_for(trace, arena_of(100), max_sequences=3)
    peaks = {name: replay(trace, make_policy(name, setup)).peak_batch for name in ("avmp", "static-0.5", "oracle")}
    assert set(peaks.values()) == {3}
    assert setup_for(trace, arena_of(100)).max_sequences == 10
    assert setup_for(builtin_trace("sharegpt", 5000, 0), arena_of(100)).max_sequences == MOST_SEQUENCES


def test_progress_is_reported_up_to_the_last_request():
    trace = trace_of((100, 0), (1, 1), (1, 3))
    told = []
    replay(trace, make_policy("oracle", setup_for(trace, arena_of(6))), told.append)
    assert told == sorted(told)
    assert told[-1] == 3


# -- every run -------------------------------------------------------------------------------------------------------


HYBRID = Geometry(
    attention_layers=tuple(AttentionLayer(layer, 1, 32, 32, "bfloat16") for layer in range(2)),
    state_layers=tuple(StateLayer(10 + layer, (StatePart("ssm", (900,), "int8"),)) for layer in range(6)),
    page_tokens=4,
)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kinds", ["hybrid", "kv only", "states only"])
@settings(max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=25),
    memory=st.integers(24, 120),
)
def test_every_request_is_completed_once_or_refused(name, kinds, requests, memory):
    geometry = replace(
        HYBRID,
        attention_layers=() if kinds == "states only" else HYBRID.attention_layers,
        state_layers=() if kinds == "kv only" else HYBRID.state_layers,
    )
    trace = trace_of(*requests)
    policy = make_policy(name, setup_for(trace, Layout.plan(geometry, memory * 1024)))
    totals = trace.prompt_tokens + trace.output_tokens
    possible = ~policy.impossible(totals)
    result = replay(trace, policy)
    assert result.completed == np.count_nonzero(possible)
    assert result.completed + result.refused_impossible == result.requests == len(requests)
    assert result.tokens_computed == totals[possible].sum() + result.tokens_computed_again
    assert result.peak_batch <= result.completed
    assert result.peak_used_bytes <= result.arena_bytes
    assert policy.used_bytes() == {"kv": 0, "state": 0}
    assert result.steps <= (trace.output_tokens[possible] + 1).sum() + 1


# -- what is shown ---------------------------------------------------------------------------------------------------


def result_of(policy, completed, steps=1000):
    return ReplayResult(policy, 50, completed, 0, steps, 10, 1, 2, 3, 4, 5, 6, 2048, 512, 256, 1024)


def test_the_best_split_is_the_one_that_completes_the_most_and_the_smallest_of_equals():
    results = [result_of("avmp", 40), *(result_of(name, 7) for name in STATIC_SHARES), result_of("vllm", 30)]
    assert best_static(results) == "static-0.1"
    results[7] = result_of("static-0.7", 8)
    assert best_static(results) == "static-0.7"
    assert best_static(results[-1:]) is None
    lines = format_results(results).splitlines()
    assert [line for line in lines if "best static" in line] == [lines[9]]
    assert lines[9].startswith("| static-0.7 (best static) |")


def test_a_row_shows_what_the_result_holds():
    cells = [cell.strip() for cell in format_results([result_of("avmp", 40)]).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["avmp", "40.0", "0.0", "1", "2", "4", "0", "5", "6", "2.00 KiB", "75.0%"]
    shown = result_of("avmp", 40).as_dict()
    assert (shown["peak_used_share"], shown["completed_per_1000_steps"], shown["peak_used_bytes"]) == (0.75, 40.0, 768)


def test_tables_are_aligned_and_markdown():
    assert format_table(["a", "bcd"], [["xyz", "1"], ["u", "1,000"]]).splitlines() == [
        "| a   |   bcd |",
        "| --- | ----: |",
        "| xyz |     1 |",
        "| u   | 1,000 |",
    ]


def test_the_same_input_prints_the_same_bytes_in_every_process(repository):
    command = [sys.executable, "-m", "avmp", "replay", "--requests", "100", "--memory", "512MiB", "--json"]
    outputs = []
    for seed in ("0", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def test_policies_share_one_setup():
    setup = PolicySetup(arena_of(6), longest_tokens=4, max_sequences=2)
    assert {make_policy(name, setup).arena_bytes for name in POLICIES if name != "vllm"} == {7 * UNIT_BYTES}
