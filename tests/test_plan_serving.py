"""``plan`` with a device: what each policy makes of a server under full load."""

import json

import numpy as np
import pytest

from avmp.cli import main
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.named_models import named_model
from avmp.serving.arrivals import at_once
from avmp.serving.devices import find_device, given_costs, model_costs
from avmp.serving.figures import draw_plan
from avmp.serving.metrics import summarize
from avmp.serving.planning import RULES, format_serving_plan, plan_serving
from avmp.serving.roofline import StepModel
from avmp.serving.server import Server, sustained_rate
from avmp.workloads import Trace, builtin_trace

ARGUMENTS = ("plan", "--model", "zamba2-2.7b", "--convention", "vllm", "--requests", "80", "--workload", "azure_conv")
DEVICE = ("--device", "l4", "--memory", "4GiB")


@pytest.fixture
def told(capsys):
    def told(*arguments):
        assert main(arguments) == 0
        return capsys.readouterr().out

    return told


@pytest.fixture
def refused(capsys):
    def refused(*arguments):
        assert main(arguments) == 2
        return capsys.readouterr().err

    return refused


@pytest.fixture(scope="module")
def made():
    geometry = named_model("zamba2-2.7b", convention="vllm")
    server = Server(StepModel(geometry, model_costs(geometry), find_device("l4")), cache_bytes=4 << 30)
    trace = builtin_trace("azure_conv", 80, 0)
    return server, trace, plan_serving(server, trace)


def test_every_rule_is_expected_and_compared_with_avmp(made):
    _, _, plan = made
    rules = {expectation.rule: expectation for expectation in plan.expectations}
    assert tuple(rules) == RULES
    own = rules["avmp"].requests_per_second
    for name, expectation in rules.items():
        assert 0 < expectation.state_share + expectation.kv_share <= 1
        assert expectation.sequences > 1
        assert (expectation.split is None) == (name != "best-static")
        if name != "avmp":
            assert expectation.gain_of_avmp == pytest.approx(own / expectation.requests_per_second - 1)
    assert rules["avmp"].gain_of_avmp is None
    assert rules["sglang"].state_share <= 9 / 19
    assert rules["vllm-align"].requests_per_second < rules["vllm"].requests_per_second < own


def test_the_expected_rate_is_that_of_a_run_with_everybody_waiting(made):
    server, trace, plan = made
    served = server.serve("avmp", at_once(trace))
    expected = plan.expectations[0]
    assert expected.requests_per_second == sustained_rate(served) == server.capacity(trace, "avmp")
    assert expected.tokens_per_second == summarize(served).tokens_per_second
    times = np.sort(served.finished[~np.isnan(served.finished)])
    low, high = len(times) // 10, len(times) - 1 - len(times) // 10
    assert sustained_rate(served) == (high - low) / (times[high] - times[low])


@pytest.mark.parametrize("outputs", [[3], [0, 0]])
def test_requests_that_end_together_have_a_rate(made, outputs):
    """There is no time between the first and the last completion."""
    server, _, _ = made
    served = server.serve("avmp", Trace("t", np.zeros(len(outputs)), np.full(len(outputs), 9), np.array(outputs)))
    assert len(set(served.finished)) == 1
    assert sustained_rate(served) == pytest.approx(summarize(served).requests_per_second)
    assert sustained_rate(server.serve("avmp", Trace("t", np.zeros(1), np.array([5000]), np.ones(1, dtype=int)))) == 0


def test_a_rule_that_the_model_does_not_suit_is_left_out_with_the_reason():
    """Two attention layers of different width: pools of equal blocks need equal ones."""
    geometry = Geometry(
        attention_layers=(AttentionLayer(0, 1, 64, 64, "bfloat16"), AttentionLayer(1, 1, 128, 128, "bfloat16")),
        state_layers=(StateLayer(2, (StatePart("ssm", (64, 64), "float32"),)),),
        max_position_embeddings=8192,
    )
    server = Server(StepModel(geometry, given_costs(geometry, 1.0, None, 4), find_device("l4")), cache_bytes=1 << 26)
    plan = plan_serving(server, builtin_trace("sharegpt", 30, 0))
    assert set(plan.left_out) == {"vllm", "vllm-align", "padded", "paper"}
    assert "without vllm: policy vllm: layers of custom differ in bytes" in format_serving_plan(plan)


def test_the_command_prints_both_plans(told):
    text = told(*ARGUMENTS, *DEVICE)
    assert "Sequences that fit at once" in text
    assert "Under full load with 80 requests of azure_conv, in an arena of 4.00 GiB" in text
    names = [
        line.split("|")[1].split()[0] for line in text.split("Under full load")[1].splitlines() if line.startswith("| ")
    ]
    assert [name for name in names if not name.startswith("-")] == ["policy", *RULES]


def test_a_trace_is_planned_for_as_a_workload_is(told, tmp_path):
    file = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{n:02}.0,{200 + 9 * n},{20 + n}\n" for n in range(30)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    plan = json.loads(told(*ARGUMENTS[:5], "--trace", str(file), *DEVICE, "--json"))["serving"]
    assert (plan["trace"], plan["requests"]) == ("azure.csv", 30)
    rules = {rule["rule"]: rule for rule in plan["rules"]}
    assert tuple(rules) == RULES
    assert all(rule["requests_per_second"] > 0 for rule in rules.values())
    assert 0 < rules["best-static"]["split"] < 1 and rules["padded"]["gain_of_avmp"] > 0


def test_the_command_as_json_and_as_figure(told, tmp_path):
    figure = tmp_path / "plan.png"
    report = json.loads(told(*ARGUMENTS, *DEVICE, "--json", "--plot", str(figure)))
    assert [rule["rule"] for rule in report["serving"]["rules"]] == list(RULES)
    assert report["serving"]["arena_bytes"] == report["arena_bytes"] == 4 << 30
    assert report["serving"]["requests"] == 80
    assert figure.read_bytes().startswith(b"\x89PNG")
    free = json.loads(told(*ARGUMENTS[:7], "--device", "l4", "--requests", "5", "--json"))
    assert free["arena_bytes"] > 10 << 30


def test_what_is_drawn_of_a_plan(made, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **rest: figures.append(figure))
    plan = made[2]
    draw_plan("plan.png", plan)
    rates, memory = figures[0].axes
    assert (rates.get_title(), rates.get_xlabel()) == ("under full load", "requests per second")
    assert (memory.get_title(), memory.get_xlabel()) == ("memory in use", "share of the arena")
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["states", "KV"]
    for axes in (rates, memory):
        assert [label.get_text() for label in axes.get_yticklabels()] == list(RULES)
    assert [bar.get_width() for bar in rates.patches] == [each.requests_per_second for each in plan.expectations]


def test_without_a_device_nothing_but_the_arena_is_planned(told, refused):
    plain = told("plan", "--model", "zamba2-2.7b", "--memory", "4GiB")
    assert "Under full load" not in plain
    assert "plan needs --memory" in refused("plan", "--model", "zamba2-2.7b")
    assert "--workload is about a server" in refused(*ARGUMENTS[:3], "--memory", "4GiB", "--workload", "azure_conv")
    assert "--plot is about a server" in refused(*ARGUMENTS[:3], "--memory", "4GiB", "--plot", "x.png")
    for given, flag in (
        (("--tp", "2"), "--tp"),
        (("--weight-bytes", "1"), "--weight-bytes"),
        (("--overhead-ms", "1"), "--overhead-ms"),
        (("--query-heads", "32"), "--query-heads"),
        (("--active-parameters", "1"), "--active-parameters"),
    ):
        assert f"{flag} is about a server" in refused(*ARGUMENTS[:3], "--memory", "4GiB", *given)
