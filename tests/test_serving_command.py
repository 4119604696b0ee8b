"""``python -m avmp serve-sim``: what it prints, what it draws, and how it refuses what makes no sense."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from avmp.cli import main
from avmp.named_models import named_model
from avmp.options import Options
from avmp.serving.arrivals import at_rate
from avmp.serving.command import WORKLOAD_NAMES
from avmp.serving.devices import Device, ModelCosts
from avmp.serving.engine_rules import EngineRules
from avmp.serving.metrics import Latency, summarize
from avmp.serving.roofline import FORMULA, TIME_SHARES, Assumptions, StepModel
from avmp.serving.search import MOST_RUNS
from avmp.serving.server import Server
from avmp.workloads import builtin_trace

SMALL = ("serve-sim", "--model", "zamba2-2.7b", "--device", "l4", "--requests", "40", "--cache-memory", "3GiB")
ONE = ("--policy", "avmp")

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:{}.0,{},{}\n"


@pytest.fixture
def told(capsys):
    """Runs a command that has to succeed; returns what it prints to stdout."""

    def told(*arguments):
        assert main(arguments) == 0
        return capsys.readouterr().out

    return told


@pytest.fixture
def refused(capsys):
    """Runs a command that has to be refused; returns the one line it says."""

    def refused(*arguments):
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("avmp: error: ") and printed.err.count("\n") == 1
        return printed.err

    return refused


@pytest.fixture
def written(tmp_path):
    def written(content, name="trace.csv"):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return written


def rows(text):
    """First cells of the tables of results; that of the time of steps is narrower."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return [line[1].strip() for line in lines if len(line) > 12][2:]


def test_a_table_for_each_rate(told):
    text = told(*SMALL, "--workload", "azure_conv", "--rate", "2", "9")
    names = [name.split()[0] for name in rows(text) if not name.startswith(("policy", "-"))]
    assert names == ["avmp", "best-static", "vllm", "oracle"] * 2
    assert "2 requests per second offered:" in text and "9 requests per second offered:" in text
    assert "Simulated time" in text and "300 GB/s x 0.8" in text
    assert text == told(*SMALL, "--workload", "azure_conv", "--rate", "2", "9")


def test_a_rate_that_is_given_twice_is_served_once(told):
    text = told(*SMALL, *ONE, "--rate", "2", "2.0")
    assert len([name for name in rows(text) if name == "avmp"]) == 1


def test_json_lines(told):
    lines = told(*SMALL, "--json", "--rate", "5", "--seed", "4").splitlines()
    runs = [json.loads(line) for line in lines]
    assert [run["policy"] for run in runs] == ["avmp", "best-static", "vllm", "oracle"]
    for run in runs:
        assert run["completed"] + run["refused"] == run["requests"] == 40
        assert (run["rate"], run["model"], run["device"], run["refused_lines"]) == (5.0, "zamba2-2.7b", "l4", None)
        assert run["arena_bytes"] == 3 << 30
    assert 0 < runs[1]["share"] < 1 and runs[0]["share"] is None
    assert len({run["digest"] for run in runs}) == 4


def test_json_says_by_which_rules_and_target(told):
    strict = ("--first-token-target", "0.001", "--max-batch", "9", "--preemption", "swap", "--reserve-tokens", "0")
    run = json.loads(told(*SMALL, *ONE, "--json", *strict))
    assert run["engine"] == {"token_budget": 8192, "max_batch": 9, "preemption": "swap", "reserve_tokens": 0}
    assert run["target"] == {"first_token_seconds": 0.001, "per_token_seconds": 0.1}
    assert run["good_requests_per_second"] == 0 < run["requests_per_second"]


def test_a_run_can_be_had_again_from_its_line_alone(told):
    """Everything that the server was built from is in it."""
    rules = ("--max-batch", "9", "--preemption", "swap", "--hysteresis", "0.5", "--overhead-ms", "2", "--tp", "2")
    figures = ("--bandwidth", "300", "--flops", "121", "--memory", "24GB", "--page-tokens", "32")
    base = [part for part in SMALL if part not in ("--device", "l4")]
    run = json.loads(told(*base, *figures, *rules, *ONE, "--json", "--seed", "4", "--rate", "5"))
    device, assumptions, costs = (run[name] for name in ("device_figures", "assumptions", "costs"))
    assert (run["convention"], run["page_tokens"], run["config"], run["seed"]) == ("vllm", 32, None, 4)
    assert run["options"]["hysteresis"] == 0.5 and assumptions["overhead_seconds"] == 0.002
    geometry = named_model(run["model"], page_tokens=run["page_tokens"], convention=run["convention"])
    model = StepModel(geometry, ModelCosts(**costs), Device(**device), run["tp"], Assumptions(**assumptions))
    server = Server(model, EngineRules(**run["engine"]), Options(**run["options"]), run["arena_bytes"])
    trace = at_rate(builtin_trace(run["trace"], run["requests"], run["seed"]), run["rate"], run["seed"])
    result = summarize(server.serve(run["policy"], trace), Latency(**run["target"]))
    assert result.digest == run["digest"]


def test_the_best_split_is_served_once_and_says_how_far_it_is(told, monkeypatch):
    """A split that was found is not served again, and progress goes on during the search."""
    shares, items = [], {}

    class Noted:
        def part(self, name, count):
            items[name] = [count]
            return items[name].append

    @contextmanager
    def noted(stream, total):
        items["all"] = total
        yield Noted()

    serve = Server.serve

    def counted(self, policy, *rest):
        shares.append(policy)
        return serve(self, policy, *rest)

    monkeypatch.setattr(Server, "serve", counted)
    monkeypatch.setattr("avmp.serving.command.progress_on", noted)
    run = json.loads(told(*SMALL, "--policy", "best-static", "--json"))
    splits = [share for share in shares if share != "oracle"]
    assert len(splits) == len(set(splits)) <= MOST_RUNS and shares.count("oracle") == 1
    assert run["share"] in [float(share) for share in splits]
    budget, *told_of = items["best-static"]
    assert budget == items["all"] == 40 * MOST_RUNS == told_of[-1]
    assert told_of == sorted(told_of) and len(set(told_of)) > len(splits) / 2


def test_the_formula_and_what_the_time_went_to_are_printed(told):
    text = told(*SMALL, "--rate", "5", *ONE)
    assert FORMULA in text
    row = text.split("What the time of steps went to:")[1].splitlines()
    assert [cell.strip() for cell in row[1].split("|")[1:-1]] == ["policy", *TIME_SHARES, "moves", "swaps"]
    assert sum(float(cell.strip(" %")) for cell in row[3].split("|")[2:-1]) == pytest.approx(100, abs=0.4)
    run = json.loads(told(*SMALL, "--rate", "5", *ONE, "--json"))
    assert tuple(run["time_shares"]) == (*TIME_SHARES, "moves", "swaps")
    assert sum(run["time_shares"].values()) == pytest.approx(1)


def test_the_same_bytes_in_other_processes(repository):
    """Names are hashed differently in each process."""
    policies = ("avmp", "best-static", "vllm", "sglang-unified", "padded", "paper", "oracle")
    command = [sys.executable, "-m", "avmp", *SMALL, "--rate", "5", "--json", "--policy", *policies]
    told = [
        subprocess.run(
            command, cwd=repository, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and told[0].count(b"\n") == len(policies)


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_every_workload_is_served(told, name):
    run = json.loads(told(*SMALL[:5], "--requests", "12", "--workload", name, *ONE, "--json"))
    assert run["completed"] + run["refused"] == 12


def test_a_device_by_its_figures_and_a_model_by_its_config(told, refused, tmp_path):
    file = tmp_path / "config.json"
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    file.write_text(json.dumps(config | {"num_key_value_heads": 2, "max_position_embeddings": 8192}))
    device = ("--bandwidth", "100", "--flops", "10", "--memory", "4GB")
    arguments = ("serve-sim", "--config", str(file), "--requests", "5", *ONE)
    run = json.loads(told(*arguments, *device, "--parameters", "0.1", "--json"))
    assert (run["device"], run["completed"]) == ("custom", 5)
    assert "give --parameters" in refused(*arguments, *device)
    assert "missing: --flops" in refused(*arguments, "--bandwidth", "100", "--memory", "4GB", "--parameters", "0.1")
    assert "describes another one" in refused(*arguments, *device, "--device", "l4", "--parameters", "0.1")
    assert "go with --parameters" in refused(*SMALL, "--query-heads", "4")
    assert "leave nothing for caches" in refused(*arguments, *device, "--parameters", "3")


def test_ranks_share_a_model(told):
    runs = [
        json.loads(
            told(
                "serve-sim", "--model", "jamba-v0.1", "--device", device, "--tp", tp, "--requests", "9", *ONE, "--json"
            )
        )
        for device, tp in (("h200", "1"), ("h100", "2"))
    ]
    assert [run["tp"] for run in runs] == [1, 2]
    assert runs[1]["tokens_per_second"] > runs[0]["tokens_per_second"]


def test_preemption_by_swap_and_the_reserve_reach_the_engine(told):
    tight = (*SMALL, "--workload", "azure_conv", *ONE, "--json", "--cache-memory", "2GiB")
    calm = json.loads(told(*tight))
    eager = json.loads(told(*tight, "--reserve-tokens", "0"))
    swapping = json.loads(told(*tight, "--reserve-tokens", "0", "--preemption", "swap"))
    assert calm["preemptions"] < eager["preemptions"]
    assert eager["recomputed_tokens"] > 0 == eager["bytes_swapped"]
    assert swapping["bytes_swapped"] > 0 == swapping["recomputed_tokens"]


def test_figures_are_drawn(told, refused, tmp_path, monkeypatch):
    file = tmp_path / "runs.png"
    told(*SMALL, "--rate", "3", "6", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in refused(*SMALL, *ONE, "--plot", str(tmp_path / "no" / "where.png"))
    monkeypatch.setattr("avmp.serving.figures.find_spec", lambda name: None)
    assert "--plot needs matplotlib" in refused(*SMALL, "--plot", str(file))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, instead of their files."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **rest: figures.append(figure))
    return figures


def labels(axes):
    return axes.get_title(), axes.get_xlabel(), axes.get_ylabel()


def test_what_is_drawn_of_runs(told, drawn):
    policies = ("avmp", "vllm")
    arguments = (*SMALL, "--rate", "3", "6", "--policy", *policies)
    told(*arguments, "--plot", "runs.png")
    runs = [json.loads(line) for line in told(*arguments, "--json").splitlines()]
    memory, latencies, throughput = drawn[0].axes
    assert labels(memory) == ("memory under avmp", "seconds", "share of the arena")
    shown = [text.get_text() for text in memory.get_legend().get_texts()]
    assert shown == ["states in use", "KV in use", "the states' side ends", "the KV side begins"]
    assert labels(latencies) == ("time to first token", "seconds", "share of requests")
    assert labels(throughput) == ("throughput", "requests per second offered", "output tokens per second")
    for axes in (latencies, throughput):
        assert [line.get_label() for line in axes.lines] == list(policies)
    for line in throughput.lines:
        wanted = [run["tokens_per_second"] for run in runs if run["policy"] == line.get_label()]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([3.0, 6.0], wanted)


@pytest.mark.filterwarnings("error")
def test_figures_of_runs_without_a_token_are_drawn(told, tmp_path, written):
    file = tmp_path / "runs.png"
    told(*SMALL, "--policy", "static-0.000001", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    prompts = written(HEADER + ROW.format(10, 5, 0) + ROW.format(11, 5, 0), "prompts.csv")
    told(*SMALL[:5], "--trace", prompts, *ONE, "--rate", "1", "2", "--plot", str(file))


def test_memory_over_time_is_written(told, refused, tmp_path):
    file = tmp_path / "timeline.jsonl"
    run = json.loads(told(*SMALL, *ONE, "--timeline", str(file), "--json"))
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == run["steps"]
    assert {sample["policy"] for sample in samples} == {"avmp"}
    assert samples[-1]["seconds"] == run["seconds"]
    for sample in samples:
        assert 0 < sample["state_used"] <= sample["state_extent"] < run["arena_bytes"]
        assert 0 < sample["kv_used"] <= sample["kv_extent"] < run["arena_bytes"]
    assert "--timeline" in refused(*SMALL, *ONE, "--timeline", str(tmp_path))


def test_conversations_without_times_get_them_by_rate_and_seed(told, written):
    turns = [{"from": "human", "value": "a b c d"}, {"from": "gpt", "value": "e f g"}]
    file = written(json.dumps([{"conversations": turns}] * 30), "chats.json")
    runs = [
        json.loads(told(*SMALL[:5], "--trace", file, *ONE, "--json", "--rate", "2", "--seed", seed))
        for seed in ("1", "1", "2")
    ]
    assert runs[0]["digest"] == runs[1]["digest"] != runs[2]["digest"]
    assert runs[0]["seconds"] == pytest.approx(15, rel=0.5)


def test_mooncake_and_burstgpt_are_served(told, written):
    line = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [1]}\n'
    mooncake = written("".join(line % (1000 * n, 100 + n, 5 + n) for n in range(20)), "mooncake.jsonl")
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = [f"{n},ChatGPT,{100 + n},{5 + n},{105 + 2 * n},Conversation log\n" for n in range(20)]
    burst = written(header + "".join(rows), "burst.csv")
    runs = [json.loads(told(*SMALL[:5], "--trace", file, *ONE, "--json")) for file in (mooncake, burst)]
    for run in runs:
        assert (run["requests"], run["completed"], run["output_tokens"]) == (20, 20, sum(range(5, 25)))
    assert runs[0]["digest"] == runs[1]["digest"]


def test_the_time_of_policies_is_told_apart(capsys):
    assert main((*SMALL, *ONE)) == 0
    plain = capsys.readouterr()
    assert main((*SMALL, *ONE, "--time-allocator")) == 0
    timed = capsys.readouterr()
    assert timed.out == plain.out
    assert plain.err == "" and "µs of processor time a step" in timed.err


# -- bad traces ------------------------------------------------------------------------------------------------------


def test_what_can_never_be_served_is_refused_by_its_line(told, written):
    """Zamba2 is made for 4,096 tokens; a blank line and a comment-free header are lines, too."""
    file = written(
        HEADER + ROW.format(10, 5, 5) + "\n" + ROW.format(11, 4000, 97) + ROW.format(12, 2**31 - 1, 2**31 - 1)
    )
    run = json.loads(told(*SMALL[:5], "--trace", file, *ONE, "--json"))
    assert (run["refused"], run["refused_lines"], run["completed"]) == (2, [4, 5], 1)
    text = told(*SMALL[:5], "--trace", file, *ONE)
    assert "avmp refuses 2" in text and "lines 4, 5" in text


def test_many_refusals_are_counted_and_some_are_shown(told, written):
    file = written(HEADER + "".join(ROW.format(10, 5000, 5) for _ in range(20)))
    assert "lines 2, 3, 4, 5, 6, 7, 8, 9 and 12 more" in told(*SMALL[:5], "--trace", file, *ONE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + ROW.format(12, 5, 5) + ROW.format(11, 5, 5), ":3: the request arrives 1 s before the one above it"),
        (HEADER + ROW.format(12, -5, 5), ":2: ContextTokens is"),
        (HEADER + ROW.format(12, 5, -1), ":2: GeneratedTokens is"),
        (HEADER + ROW.format(12, 0, 5), ":2: ContextTokens is"),
        (HEADER + ROW.format(12, 10**30, 5), ":2: ContextTokens is"),
        (HEADER + ROW.format(12, "5.5", 5), ":2: ContextTokens is"),
        (HEADER + ROW.format(12, "", 5), ":2: ContextTokens is"),
        (HEADER + ROW.format(12, "nan", 5), ":2: ContextTokens is"),
        (HEADER + "2023-11-16 18:15:10,5\n", ":2: the row has 2 fields, expected 3"),
        (HEADER + "yesterday,5,5\n", ":2: TIMESTAMP is"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:10,5\n", ":1: the header has the columns"),
        (HEADER, "no request found in the file"),
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        (HEADER.encode() + "2023-11-16 18:15:10,5,5\n".encode("utf-16"), "is not UTF-8"),
        ((HEADER + ROW.format(10, 5, 5)).encode() + b"2023-11-16 18:15:11,\xff5,5\n", ":3: byte 0xff is not UTF-8"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(refused, written, content, message):
    assert message in refused(*SMALL[:5], "--trace", written(content))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ('{"timestamp": 0, "input_length": 5}\n', "t.jsonl", ":1: the key output_length is missing"),
        ('{"timestamp": 1e99, "input_length": 5, "output_length": 5}\n', "t.jsonl", ":1: timestamp is"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n[]\n', "t.jsonl", ":2: the line is a list"),
        ("Timestamp,Request tokens,Response tokens\n5,1,1\n4,1,1\n", "b.csv", ":3: the request arrives 1 s before"),
        ("[1, 2", "s.json", ":1: the entry has no list"),
    ],
)
def test_other_formats_are_refused_alike(refused, written, content, name, message):
    assert message in refused(*SMALL[:5], "--trace", written(content, name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "rate 0.0: expected requests per second, above 0"),
        (("--rate", "nan"), "rate nan"),
        (("--rate", "-3"), "rate -3.0"),
        (("--policy", "vllm-aligned"), "unknown policy 'vllm-aligned'"),
        (("--policy", "static-1.5"), "unknown policy 'static-1.5'"),
        (("--device", "abacus"), "unknown device 'abacus'"),
        (("--tp", "0"), "tp_size=0"),
        (("--tp", "7"), "cannot be divided evenly among tp_size=7"),
        (("--token-budget", "10"), "token_budget=10 is less than max_batch=1024"),
        (("--overhead-ms", "-1"), "--overhead-ms -1.0"),
        (("--first-token-target", "0"), "first_token_seconds=0"),
        (("--cache-memory", "1MiB"), "arena"),
        (("--workload", "nothing"), "unknown workload 'nothing'"),
        (("--model", "lfm2-1.2b"), "its parameters are not known here"),
        (("--model", "jamba-v0.1", "--device", "l4", "--cache-memory", "0"), "memory size 0"),
        (("--rate", "1e-300"), "40 requests would take longer than"),
        (("--workload", "day", "--seed", "-1"), "seed=-1"),
        (("--weight-bytes", "0"), "weight_bytes=0"),
        (("--model", "jamba-v0.1", "--cache-memory", "1GiB"), "1.00 GiB for caches a device are more than its 22.35"),
        (("--events", "1"), "--events: nobody would read them"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(refused, arguments, message):
    base = [part for part in SMALL if part not in ("--cache-memory", "3GiB")]
    assert message in refused(*base, *arguments)


def test_it_works_without_torch(repository):
    from tests.test_cli import BLOCK

    command = [sys.executable, "-c", BLOCK, *SMALL, "--json", *ONE]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 40
