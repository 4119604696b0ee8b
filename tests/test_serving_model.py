"""Devices, step times against the formula, figures against numpy, arrivals, and the search for a split."""

import json
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avmp.baselines import make_policy
from avmp.errors import ArenaTooSmall, InvalidArgument, Unsupported
from avmp.geometry import Geometry
from avmp.named_models import named_model
from avmp.serving.arrivals import LATEST_SECONDS, at_once, at_rate, paper_arrivals, shifting_day, take
from avmp.serving.devices import (
    ASSUMED,
    DEVICES,
    MODEL_COSTS,
    UNVERIFIED,
    Device,
    ModelCosts,
    custom_device,
    find_device,
    given_costs,
    model_costs,
    query_heads_of,
)
from avmp.serving.engine_rules import EngineRules
from avmp.serving.metrics import SLICES, Latency, _quantiles, between_tokens, summarize, time_shares
from avmp.serving.roofline import FORMULA, TIME_SHARES, Assumptions, StepModel
from avmp.serving.search import MOST_RUNS, best_split
from avmp.serving.server import Server, TimedPolicy
from avmp.serving.simulator import simulate
from avmp.workloads import Trace, builtin_trace, read_trace

JAMBA = named_model("jamba-v0.1", convention="vllm")
ZAMBA = named_model("zamba2-2.7b", convention="vllm")


def server(model="zamba2-2.7b", device="l4", **rules):
    geometry = named_model(model, convention="vllm")
    return Server(StepModel(geometry, model_costs(geometry), find_device(device)), EngineRules(**rules))


# -- the step --------------------------------------------------------------------------------------------------------


def test_a_decoding_step_of_jamba_by_the_formula():
    """64 sequences of 1,000 tokens each on an H200: bytes, then operations, each term on its own."""
    model = StepModel(JAMBA, model_costs(JAMBA), find_device("h200"))
    touched = 1 - (1 - 12 / 52) ** 64
    read = 52e9 * 2 * touched
    read += 16384 * (64 * 1000 + 64)
    read += 2 * 28 * (8192 * 16 * 2 + 8192 * 3 * 2) * 64
    operations = 2 * 12e9 * 64 + 4 * 4096 * 4 * 64 * 1000 + 6 * 28 * 8192 * 16 * 64
    assert model.weights_read(64) == pytest.approx(52e9 * 2 * touched)
    expected = 0.003 + max(read / (4.8e12 * 0.8), operations / (989e12 * 0.6))
    assert model.seconds(64, 64, 64000, 64000) == pytest.approx(expected, rel=1e-12)


def test_a_long_prompt_is_bound_by_operations():
    model = StepModel(ZAMBA, model_costs(ZAMBA), find_device("l4"))
    pairs = 8192 * 8193 // 2
    operations = 2 * 2.7e9 * 8192 + 4 * 5120 * 9 * pairs + 6 * 54 * 80 * 64 * 64 * 8192
    assert model.seconds(8192, 1, 8192, pairs) == pytest.approx(0.003 + operations / (121e12 * 0.6), rel=1e-12)
    assert model.weights_read(1) == model.weights_read(8192) == 2 * 2.7e9  # a dense model reads all, always


def test_ranks_share_the_work_and_replicate_what_cannot_be_divided():
    """Falcon-H1 has 2 KV heads: on 4 ranks each keeps one, so that the KV of a rank is a half, not a quarter."""
    falcon = named_model("falcon-h1-1.5b", convention="vllm")
    one, four = (StepModel(falcon, model_costs(falcon), find_device("h100"), tp) for tp in (1, 4))
    assert four.weights_read(1) == one.weights_read(1) / 4
    assert four.rank_geometry.kv_bytes_per_token == falcon.kv_bytes_per_token // 2
    kv_heavy = four.seconds(1, 0, 10**8, 0) - four.seconds(1, 0, 0, 0)
    assert kv_heavy == pytest.approx(10**8 * falcon.kv_bytes_per_token / 2 / (3.35e12 * 0.8))
    assert four.arena_bytes() - one.arena_bytes() == pytest.approx(0.75 * 2 * 1.55e9, abs=2)
    with pytest.raises(Unsupported):
        StepModel(falcon, model_costs(falcon), find_device("h100"), 5).seconds(1, 1, 1, 1)


def test_moves_are_read_and_written_and_swaps_cross_to_the_host():
    model = StepModel(ZAMBA, model_costs(ZAMBA), find_device("l4"))
    assert model.move_seconds(300_000_000) == pytest.approx(0.6 / (300 * 0.8))
    assert model.swap_seconds(25_000_000_000) == pytest.approx(1.0)
    assert "300 GB/s x 0.8" in model.describe() and "2.7 B parameters" in model.describe()


def test_weights_that_leave_no_room_are_refused_with_the_numbers():
    model = StepModel(JAMBA, model_costs(JAMBA), find_device("h100"))
    with pytest.raises(ArenaTooSmall, match=r"jamba-v0\.1 on 1 x h100: weights of 96\.86 GiB .* use more or larger"):
        model.arena_bytes()
    assert Server(replace(model, tp_size=2)).layout.arena_bytes > 10**10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("x", 0, 1, 1, 1, ""), "device 'x': memory_bytes=0"),
        (lambda: Device("x", 1, float("nan"), 1, 1, ""), "bytes_per_second=nan"),
        (lambda: Device("x", 1, 1, float("inf"), 1, ""), "flops_per_second=inf"),
        (lambda: find_device("h900"), "unknown device 'h900'; known: rtx-3060-12gb, l4, a100-80gb, h100, h200, mi300x"),
        (lambda: Assumptions(bandwidth_share=0), "bandwidth_share=0"),
        (lambda: Assumptions(flops_share=1.5), r"flops_share=1\.5"),
        (lambda: Assumptions(overhead_seconds=-1), "expected 0 or more"),
        (lambda: StepModel(ZAMBA, model_costs(ZAMBA), find_device("l4"), 0), "tp_size=0"),
        (lambda: given_costs(ZAMBA, 1.0, 2.0, 32), "expected 0 < active <= all"),
        (lambda: given_costs(ZAMBA, float("nan"), None, 32), "parameters of nan billion"),
        (lambda: given_costs(ZAMBA, 1.0, None, None), "give --query-heads"),
        (lambda: given_costs(ZAMBA, 1.0, None, 0), "query_heads=0"),
        (lambda: given_costs(ZAMBA, 1.0, None, 32, 0), "weight_bytes=0"),
        (lambda: Latency(first_token_seconds=0), "first_token_seconds=0"),
        (lambda: Device("x", 1, 1e-300, 1, 1, ""), "bytes_per_second=1e-300, expected at least 1"),
        (lambda: given_costs(ZAMBA, 1e300, None, 32), "< 1e\\+09"),
        (lambda: replace(model_costs(ZAMBA), weight_bytes=0), "weight_bytes=0"),
        (lambda: replace(model_costs(ZAMBA), weight_bytes=-1), "weight_bytes=-1"),
        (lambda: replace(model_costs(ZAMBA), weight_bytes=9), "weight_bytes=9: expected 1 to 8"),
        (lambda: replace(model_costs(ZAMBA), active_parameters=2.8e9), "expected 0 < active <= all"),
        (lambda: shifting_day(5, seed=-1), "seed=-1"),
        (lambda: at_rate(at_once(builtin_trace("sharegpt", 5, 0)), 1.0, seed=-1), "seed=-1"),
    ],
)
def test_figures_that_make_no_sense_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_models_and_devices_by_name_and_by_figures(tmp_path):
    assert {"rtx-3060-12gb", "l4", "a100-80gb", "h100", "h200", "mi300x"} <= set(DEVICES)
    for name, costs in MODEL_COSTS.items():
        heads = costs.query_width / named_model(name).attention_layers[0].key_dim
        assert heads == int(heads) and heads % named_model(name).attention_layers[0].kv_heads == 0
    with pytest.raises(Unsupported, match=r"'lfm2-1\.2b': its parameters are not known here; give --parameters"):
        model_costs(named_model("lfm2-1.2b"))
    assert given_costs(ZAMBA, 2.0, 1.0, 32) == ModelCosts(2e9, 1e9, 32 * 160, 2, "given by the user")
    assert custom_device("24GB", 300, 121).memory_bytes == 24 * 10**9
    file = tmp_path / "config.json"
    for config, heads in (
        ({"num_attention_heads": 8}, 8),
        ({"text_config": {"num_attention_heads": 4}}, 4),
        ({}, None),
    ):
        file.write_text(json.dumps(config))
        assert query_heads_of(str(file)) == heads


# -- figures ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5)), max_size=30))
def test_quantiles_are_those_of_every_value_written_out(pairs):
    values = np.array(sorted(value for value, _ in pairs))
    counts = np.array([count for _, count in pairs], dtype=np.int64)
    seen = counts > 0
    written_out = np.repeat(values[seen], counts[seen])
    for found in (_quantiles(values[seen], counts[seen]), _quantiles(written_out[::-1])):
        wanted = np.percentile(written_out, [50, 90, 99]) if len(written_out) else [0, 0, 0]
        assert list(found.values()) == pytest.approx(list(wanted), rel=1e-12, abs=1e-12)


def test_figures_of_a_small_run():
    """Four requests that arrive a second apart, on a server where every step takes a quarter of a second."""
    model = StepModel(
        ZAMBA, model_costs(ZAMBA), Device("fast", 10**11, 1e40, 1e40, 1.0, ""), 1, Assumptions(1, 1, 0.25)
    )
    trace = Trace("four", np.array([10.0, 11, 12, 13]), np.array([5, 5, 5, 5000]), np.array([3, 1, 0, 8]))
    served = simulate(trace, make_policy("oracle", Server(model, cache_bytes=10**9).setup(trace)), model)
    result = summarize(served, Latency(first_token_seconds=0.3, per_token_seconds=0.2))
    assert (result.requests, result.completed, result.refused, result.refused_requests) == (4, 3, 1, (3,))
    assert (result.seconds, result.steps, result.output_tokens) == (2.25, 5, 4)
    assert result.requests_per_second == 3 / 2.25
    assert result.tokens_per_second == pytest.approx(4 / 2.25)
    assert result.good_requests_per_second == 2 / 2.25  # the first takes 0.25 s a token
    assert result.first_token == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert result.between_tokens == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert result.queueing == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert (result.mean_batch, result.most_batch) == (1.0, 1)
    assert result.slices == (0, 1, 1, 1, 0, 1, 0, 0, 0, 0)
    assert summarize(served, horizon=22.5).slices == (4, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert sum(summarize(served, horizon=0.75).slices) == 3
    assert between_tokens(served)[1].sum() == 2
    assert json.loads(json.dumps(result.as_dict()))["digest"] == result.digest


def test_a_run_that_refuses_everything_has_figures_too():
    trace = Trace("long", np.zeros(2), np.array([10**6, 10**6]), np.array([1, 1]))
    result = summarize(server().serve("avmp", trace))
    assert (result.refused, result.completed, result.steps, result.tokens_per_second) == (2, 0, 0, 0.0)
    assert result.slices == (0,) * SLICES


GOLDEN = [
    ("zamba2-2.7b", "l4", "avmp", {}, 8.0, "fa4dec745ae80c1a"),
    ("zamba2-2.7b", "l4", "sglang-unified", {"preemption": "swap", "reserve_tokens": 0}, 8.0, "0a20acc5157fe4fc"),
    ("falcon-h1-1.5b", "rtx-3060-12gb", "avmp", {"reserve_tokens": 0, "token_budget": 2048}, 9.0, "f19291b74aa4f1bd"),
]


@pytest.mark.parametrize(("model", "device", "policy", "rules", "rate", "digest"), GOLDEN)
def test_golden_digests(model, device, policy, rules, rate, digest):
    """Equal input, equal output, on every machine: times are sums of whole ticks."""
    trace = builtin_trace("azure_conv", 300, 7, rate)
    result = summarize(server(model, device, **rules).serve(policy, trace))
    assert result.completed + result.refused == 300
    assert result.preemptions or not rules
    assert result.bytes_moved
    assert result.digest == digest


def test_timing_a_policy_changes_nothing():
    trace = builtin_trace("azure_conv", 60, 7, 3.0)
    small = server()
    timed = TimedPolicy(small.policy("avmp", trace))
    assert summarize(small.serve(timed, trace)) == summarize(small.serve("avmp", trace))
    assert timed.nanoseconds > 0


def test_caches_that_a_device_cannot_hold_beside_the_weights_are_refused():
    model = StepModel(JAMBA, model_costs(JAMBA), find_device("h100"), 2)
    room = find_device("h100").memory_bytes - int(model_costs(JAMBA).weights_bytes / 2)
    assert Server(model, cache_bytes=room).layout.arena_bytes <= room
    with pytest.raises(
        InvalidArgument, match=r"2 x h100: weights of 48\.43 GiB and 26\.08 GiB for caches a device are"
    ):
        _ = Server(model, cache_bytes=room + 1).layout


def test_a_batch_that_no_trace_fills_costs_nothing():
    """Tables of policies are as long as the batch can get: never longer than the trace."""
    trace = builtin_trace("sharegpt", 20, 0)
    wide = server(token_budget=10**12, max_batch=10**12)
    assert wide.setup(trace).max_sequences == 20
    assert summarize(wide.serve("avmp", trace)).completed == 20
    assert server(max_batch=7).setup(trace).max_sequences == 7


# -- arrivals --------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=30), st.floats(1e-3, 1e3))
def test_a_trace_is_stretched_to_a_rate(gaps, rate):
    times = np.cumsum(gaps)
    trace = Trace("t", times, np.ones(len(gaps), dtype=int), np.ones(len(gaps), dtype=int))
    scaled = at_rate(trace, rate).arrival_seconds
    assert scaled[0] == 0
    span = times[-1] - times[0]
    if span:
        assert scaled[-1] == pytest.approx((len(gaps) - 1) / rate)
        np.testing.assert_allclose(scaled, (times - times[0]) / span * scaled[-1], rtol=1e-9, atol=1e-9)


def test_requests_that_are_there_at_once_get_random_arrivals_with_a_rate():
    trace = at_once(builtin_trace("sharegpt", 4000, 0))
    scaled = at_rate(trace, 5.0, seed=3)
    assert scaled.arrival_seconds[-1] == pytest.approx(800, rel=0.05)
    assert np.array_equal(scaled.arrival_seconds, at_rate(trace, 5.0, seed=3).arrival_seconds)
    for rate in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="expected requests per second, above 0"):
            at_rate(trace, rate)


@pytest.mark.parametrize("rate", [1e-9, 1e-300, 1e-308, 1e-320])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_rate_at_which_time_would_lose_its_grain_is_refused(rate, recorded):
    trace = builtin_trace("sharegpt", 4, 0, 1.0 if recorded else None)
    with pytest.raises(InvalidArgument, match=r"4 requests would take longer than .* expected at least 3\.7e-09"):
        at_rate(trace, rate)


def test_a_request_that_arrives_in_ages_is_refused():
    lengths = np.array([5, 5])
    soon, late = (Trace("t", np.array([0, last]), lengths, lengths) for last in (LATEST_SECONDS, 2 * LATEST_SECONDS))
    assert summarize(server().serve("oracle", soon)).first_token["p50"] > 0
    with pytest.raises(InvalidArgument, match=r"the last request arrives at .* s, expected at most 1,073,741,824 s"):
        server().serve("oracle", late)


def test_a_part_of_a_trace_keeps_its_lines_and_hashes():
    trace = Trace(
        "t",
        np.array([1.0, 2, 4]),
        np.array([1, 2, 3]),
        np.array([4, 5, 6]),
        tuple(np.array([n]) for n in (7, 8, 9)),
        lines=np.array([2, 3, 5]),
    )
    part = take(trace, np.array([1, 2]))
    assert part.arrival_seconds.tolist() == [0, 2]
    assert (part.prompt_tokens.tolist(), part.output_tokens.tolist()) == ([2, 3], [5, 6])
    assert (part.lines.tolist(), [h.tolist() for h in part.block_hashes]) == ([3, 5], [[8], [9]])
    with pytest.raises(InvalidArgument, match="no request is left"):
        take(trace, np.array([], dtype=np.int64))


def test_a_day_goes_from_short_to_long_and_back():
    day = shifting_day(5000, seed=1, rate=10)
    assert day.arrival_seconds[-1] == pytest.approx(500, rel=0.1)
    means = [float(part.mean()) for part in np.array_split(day.prompt_tokens, 5)]
    assert means[0] < means[1] < means[2] > means[3] > means[4]
    assert means[2] > 5 * means[0]
    assert np.array_equal(day.prompt_tokens, shifting_day(5000, seed=1).prompt_tokens)


def test_the_papers_streams_as_arrivals():
    trace = paper_arrivals("uniform_short", 1)
    assert len(trace) == 512
    assert trace.arrival_seconds[:3].tolist() == [0, 1, 2]


# -- the search ------------------------------------------------------------------------------------------------------


class Made:
    """What a run would give, if the best share were known: less, the farther from it by odds."""

    def __init__(self, share, best):
        odds = [float(s / (1 - s)) for s in (share, best)]
        self.tokens_per_second = 100 / (1 + abs(np.log(odds[0] / odds[1])))
        self.first_token, self.refused = {"p90": 1.0}, 0


def searched(run, slots, start, **rest):
    """A search among so many slots, each of the same share."""
    shares = [Fraction(n, slots + 1) for n in range(1, slots + 1)]
    return best_split(shares, run, lambda made: made, start, **rest)


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(1, 2000), data=st.data(), start=st.floats(0, 1))
def test_the_search_ends_at_the_very_top_of_a_peak(slots, data, start):
    best = data.draw(st.integers(1, slots))
    found = searched(lambda share: Made(share, Fraction(best, slots + 1)), slots, start)
    assert found.slots == best and found.share == Fraction(best, slots + 1)
    assert found.served is found.result and found.result.tokens_per_second == 100
    assert len(found.tried) <= MOST_RUNS


def test_a_search_is_bounded_and_takes_the_best_that_it_tried():
    tried = []

    def run(share):
        tried.append(share)
        return Made(share, Fraction(1, 2))

    found = searched(run, 1000, 0.9, most_runs=7)
    assert len(tried) == len(set(tried)) == len(found.tried) == 7
    assert found.result.tokens_per_second == max(found.tried.values()) == found.tried[found.slots]


def test_a_second_peak_beside_the_first_is_found():
    """Where it is no farther than the splits around the top that are all tried."""

    def run(share):
        made = Made(share, Fraction(40, 101))
        if share == Fraction(44, 101):
            made.tokens_per_second = 101
        return made

    assert searched(run, 100, 0.4).slots == 44


def test_a_split_that_refuses_more_is_never_better():
    """Beyond a half, requests are refused, and the others are served faster."""

    def run(share):
        made = Made(share, Fraction(9, 10))
        made.refused = int(share > Fraction(1, 2))
        return made

    for start in (0.3, 0.8):
        assert searched(run, 99, start).share == Fraction(1, 2)


def test_splits_are_of_whole_slots_and_leave_a_page():
    trace = builtin_trace("sharegpt", 300, 0)
    small, layout = server(), server().layout
    for slots, share in enumerate(small.splits(trace), start=1):
        policy = small.policy(share, trace)
        assert policy.slot_count == slots and policy.page_count > 0
        left = layout.arena_bytes - slots * layout.slot_total_bytes
        assert policy.page_count == left // layout.page_total_bytes
    assert len(small.splits(trace)) == 300
    assert len(server(max_batch=7).splits(trace)) == 7
    narrow = replace(small, cache_bytes=1 << 30)
    beyond = (len(narrow.splits(trace)) + 1) * narrow.layout.slot_total_bytes + narrow.layout.page_total_bytes
    assert beyond > narrow.layout.arena_bytes
    least = replace(small, cache_bytes=2 * layout.slot_total_bytes + 4 * layout.page_total_bytes)
    assert len(least.splits(trace)) in (1, 2)
    only_kv = Geometry(attention_layers=ZAMBA.attention_layers, state_layers=(), name="zamba2-2.7b")
    assert replace(small, model=replace(small.model, geometry=only_kv)).splits(trace) == [Fraction(1, 2)]


@pytest.mark.parametrize("load", [0.8, 2.0])
def test_no_number_of_slots_beats_the_split_that_was_found(load):
    """The paper's short requests on Granite: every split there is."""
    granite = server("granite-4.0-h-small", "a100-80gb")
    trace = at_rate(paper_arrivals("uniform_short", 1), load * granite.capacity(paper_arrivals("uniform_short", 1)))
    best = granite.best_static_of(trace)
    every = [summarize(granite.serve(share, trace)) for share in granite.splits(trace)]
    served = {slots: run.tokens_per_second for slots, run in enumerate(every, start=1) if not run.refused}
    assert best.result.refused == 0
    assert best.result.tokens_per_second == max(served.values()) == served[best.slots]
    assert len(best.tried) < len(every) / 2
    assert summarize(best.served) == best.result == every[best.slots - 1]


def test_a_search_tells_how_far_it_is():
    trace, told = builtin_trace("azure_conv", 50, 3, 6.0), []
    best = server().best_static_of(trace, on_progress=told.append)
    assert told == sorted(told) and told[-1] == len(trace) * len(best.tried)


# -- assumptions -----------------------------------------------------------------------------------------------------


def test_every_constant_says_what_it_rests_on():
    named = {field.name: field.default for field in fields(Assumptions)}
    for name, value in named.items():
        assert ASSUMED[name].value == value
    sources = [each.source for each in (*ASSUMED.values(), *DEVICES.values(), *MODEL_COSTS.values())]
    assert all(len(source.removeprefix(UNVERIFIED)) > 10 for source in sources)
    assert all(device.host_bytes_per_second in {each.value for each in ASSUMED.values()} for device in DEVICES.values())
    assert f"+ {ASSUMED['update_operations'].value} * state elements * tokens" in FORMULA


def test_the_time_of_steps_is_split_into_all_that_it_goes_to():
    trace = builtin_trace("azure_conv", 200, 7, 8.0)
    small = server(preemption="swap", reserve_tokens=0)
    served = small.serve("avmp", trace)
    parts = small.model.split_seconds(served.step_work)
    assert tuple(parts) == TIME_SHARES and min(parts.values()) > 0
    steps = sum(small.model.seconds(*work) for work in served.step_work.tolist())
    assert sum(parts.values()) == pytest.approx(steps, rel=1e-12)
    assert steps + served.move_seconds + served.swap_seconds == pytest.approx(served.busy_seconds, abs=1e-4)
    shares = time_shares(small.model, served)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["moves"] == pytest.approx(served.move_seconds / served.busy_seconds, rel=1e-4) and shares["swaps"] > 0


def test_a_step_is_split_by_the_formula():
    """One bound by what it reads, one by its operations; each part on its own."""
    model = StepModel(JAMBA, model_costs(JAMBA), find_device("h200"))
    pairs = 8192 * 8193 // 2
    parts = model.split_seconds(np.array([[64, 64, 64000, 64000], [8192, 1, 8192, pairs]]))
    rate = 4.8e12 * 0.8
    assert parts["weights"] == pytest.approx(52e9 * 2 * (1 - (1 - 12 / 52) ** 64) / rate)
    assert parts["KV"] == pytest.approx(16384 * (64 * 1000 + 64) / rate)
    assert parts["states"] == pytest.approx(2 * 28 * (8192 * 16 * 2 + 8192 * 3 * 2) * 64 / rate)
    operations = 2 * 12e9 * 8192 + 4 * 4096 * 4 * pairs + 6 * 28 * 8192 * 16 * 8192
    assert parts["operations"] == pytest.approx(operations / (989e12 * 0.6))
    assert parts["overhead"] == 0.006


@pytest.mark.slow
def test_the_whole_azure_conversation_is_served(recorded_traces):
    trace = read_trace(recorded_traces / "azure_llm_2023_conv.csv")
    granite = server("granite-4.0-h-small", "a100-80gb")
    first, again = (summarize(granite.serve("avmp", trace)) for _ in range(2))
    assert (first.requests, first.completed, first.refused) == (19366, 19366, 0)
    assert first.output_tokens == int(trace.output_tokens.sum())
    assert first.digest == again.digest
