"""The command line: what each command prints, and how it refuses."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

import avmp
from avmp.baselines import POLICIES
from avmp.cli import main
from avmp.named_models import named_model
from avmp.workloads import builtin_trace

SMALL_REPLAY = ("replay", "--requests", "40", "--memory", "256MiB")

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,{tokens}
"""

STATES_ONLY = {
    "model_type": "mamba",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "conv_kernel": 4,
}

BLOCK = """
import sys

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked)
from avmp.cli import main
sys.exit(main(sys.argv[1:]))
"""


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
        assert printed.err.startswith("avmp: error: ")
        assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
        return printed.err

    return refused


@pytest.fixture
def azure(tmp_path):
    def write(tokens):
        file = tmp_path / "azure.csv"
        file.write_text(AZURE.format(tokens=tokens))
        return str(file)

    return write


# -- replay ----------------------------------------------------------------------------------------------------------


def test_replay_prints_one_row_for_each_policy(told):
    lines = told(*SMALL_REPLAY).splitlines()
    rows = [line.split("|")[1].replace("(best static)", "").strip() for line in lines if line.startswith("| ")]
    assert rows == ["policy", "-" * len(rows[1]), *POLICIES]
    assert sum("(best static)" in line for line in lines) == 1
    assert "40 requests, seed 0" in lines[0]


def test_replay_as_json(told):
    report = json.loads(told(*SMALL_REPLAY, "--json", "--seed", "3", "--page-tokens", "32", "--convention", "vllm"))
    geometry = named_model("jamba-v0.1", page_tokens=32, convention="vllm")
    trace = builtin_trace("sharegpt", 40, 3)
    assert [policy["policy"] for policy in report["policies"]] == list(POLICIES)
    assert report["best_static"] in POLICIES
    assert report["page_bytes"] == geometry.kv_bytes_per_page
    assert report["slot_bytes"] == geometry.state_bytes_per_sequence
    assert (report["arena_bytes"], report["page_tokens"], report["seed"]) == (256 << 20, 32, 3)
    for policy in report["policies"]:
        assert policy["completed"] + policy["refused_impossible"] == 40
        if not policy["refused_impossible"]:
            tokens = int(trace.prompt_tokens.sum() + trace.output_tokens.sum())
            assert policy["tokens_computed"] == tokens + policy["tokens_computed_again"]


def test_replay_of_a_trace_its_beginning_and_chosen_policies(told, azure):
    arguments = ("replay", "--trace", azure("109"), "--policy", "oracle", "avmp", "oracle", "--json")
    report = json.loads(told(*arguments))
    assert (report["trace"], report["requests"], report["seed"], report["best_static"]) == ("azure.csv", 2, None, None)
    assert [policy["policy"] for policy in report["policies"]] == ["oracle", "avmp"]
    assert report["policies"][0]["tokens_computed"] == 374 + 44 + 396 + 109
    assert json.loads(told(*arguments, "--requests", "1"))["policies"][0]["tokens_computed"] == 374 + 44


def test_replay_of_a_configuration_file(told, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(STATES_ONLY))
    report = json.loads(told(*SMALL_REPLAY, "--config", str(config), "--json"))
    assert (report["model"], report["page_bytes"]) == ("mamba", 0)
    assert {policy["completed"] for policy in report["policies"]} == {40}


def test_allocator_options_reach_avmp(told):
    arguments = (*SMALL_REPLAY, "--policy", "avmp", "--json")
    free, floored = (json.loads(told(*arguments, *more))["policies"][0] for more in ((), ("--floor-pages", "700")))
    assert floored["peak_state_bytes"] < free["peak_state_bytes"]


def test_the_number_of_sequences_can_be_bounded(told):
    report = json.loads(told(*SMALL_REPLAY, "--max-sequences", "2", "--json"))
    assert max(policy["peak_batch"] for policy in report["policies"]) == 2


def test_wall_time_goes_to_stderr_and_progress_nowhere_without_a_terminal(capsys):
    assert main(SMALL_REPLAY) == 0
    assert capsys.readouterr().err.splitlines()[0].startswith("avmp: 40 requests under 12 policies in ")


def test_progress_is_shown_on_a_terminal(repository):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "avmp", *SMALL_REPLAY, "--policy", "avmp", "oracle"]
    done = subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, stderr=follower, check=True)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "oracle" in shown and "100%" in shown
    assert done.stdout.count(b"\n| ") == 4


# -- plan and env ----------------------------------------------------------------------------------------------------


def test_plan_for_people(told):
    text = told("plan", "--model", "jamba-v0.1", "--memory", "4GiB", "--convention", "vllm")
    layout = avmp.Layout.plan(named_model("jamba-v0.1", convention="vllm"), "4GiB")
    assert layout.describe() in text
    assert "1 per 80 tokens and 7 for its states, padded by 5.26%" in text
    row = next(line for line in text.splitlines() if line.startswith("| 1,024 "))
    assert row.split("|")[2].strip() == f"{layout.max_sequences(1024):,}"


def test_plan_as_json(told):
    report = json.loads(told("plan", "--model", "falcon-h1-1.5b", "--memory", "8GiB", "--convention", "vllm", "--json"))
    geometry = named_model("falcon-h1-1.5b", convention="vllm")
    layout = avmp.Layout.plan(geometry, "8GiB")
    capacities = {capacity["rule"]: capacity for capacity in report["capacities"]}
    assert list(capacities) == ["avmp", "vllm", "static-0.5", "sglang", "oracle"]
    assert (report["vllm"]["block_tokens"], report["page"]["bytes"]) == (1568, geometry.kv_bytes_per_page)
    assert report["page"]["bytes"] == layout.page_total_bytes and report["slot"]["bytes"] == layout.slot_total_bytes
    lengths = [row["tokens_each"] for row in capacities["avmp"]["by_length"]]
    assert lengths == [256, 1024, 4096, 16384, 65536]
    for capacity in capacities.values():
        assert all(row["tokens_in_all"] == row["tokens_each"] * row["sequences"] for row in capacity["by_length"])
        assert all(
            row["sequences"] <= best["sequences"]
            for row, best in zip(capacity["by_length"], capacities["oracle"]["by_length"], strict=True)
        )
    assert capacities["avmp"]["longest_tokens"] == layout.max_tokens(1)
    # 256 tokens take two whole blocks of 36.75 MiB under vLLM's rule: one for the tokens, one for the state.
    assert capacities["vllm"]["by_length"][0]["sequences"] == ((8 << 30) // (1568 * 1024 * 24) - 1) // 2


def test_plan_for_a_model_with_one_kind_of_cache(told, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(STATES_ONLY))
    assert "| longest single | " in told("plan", "--config", str(config), "--memory", "1MiB")
    capacities = json.loads(told("plan", "--config", str(config), "--memory", "1MiB", "--json"))["capacities"]
    assert {capacity["longest_tokens"] for capacity in capacities} == {None}


def test_env(told):
    assert avmp.__version__ in told("env")
    assert json.loads(told("env", "--json"))["avmp"] == avmp.__version__


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stopped:
            main([flag])
        assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"avmp {avmp.__version__}\n")
    assert all(command in printed for command in ("replay", "plan", "env"))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("serve",), "invalid choice: 'serve'"),
        (("replay", "--wrong"), "unrecognized arguments: --wrong"),
        (("replay", "--requests", "many"), "invalid int value: 'many'"),
        (("replay", "--requests", "0"), "requests=0"),
        (("replay", "--seed", "-1"), "seed=-1"),
        (("replay", "--workload", "nobody"), "unknown workload 'nobody'"),
        (("replay", "--trace", "no/such/file.csv"), "no/such/file.csv: cannot be read"),
        (("replay", "--workload", "sharegpt", "--trace", "x"), "not allowed with argument"),
        (("replay", "--model", "jambo-v0.1"), "unknown model 'jambo-v0.1' (did you mean 'jamba-v0.1'?)"),
        (("replay", "--config", "no/such/config.json"), "no/such/config.json"),
        (("replay", "--model", "jamba-v0.1", "--config", "x"), "not allowed with argument"),
        (("replay", "--memory", "0"), "expected more than zero bytes"),
        (("replay", "--memory=-4GiB"), "memory size '-4GiB'"),
        (("replay", "--memory", "much"), "memory size 'much'"),
        (("replay", "--memory", "16MiB"), "too little for the null area of"),
        (("replay", "--floor-slots", "1000"), "floors of 0 pages and 1000 slots"),
        (("replay", "--page-tokens", "0"), "page_tokens=0"),
        (("replay", "--convention", "mine"), "convention 'mine'"),
        (("replay", "--policy", "best"), "unknown policy 'best'"),
        (("replay", "--max-sequences", "0"), "max_sequences=0"),
        (("replay", "--debug", "9"), "option debug=9"),
        (("replay", "--events", "true"), "--events"),
        (("plan", "--memory", "1GiB"), "one of the arguments --model --config is required"),
        (("plan", "--model", "jamba-v0.1"), "--memory"),
        (("plan", "--model", "jamba-v0.1", "--memory", "1MiB"), "too little for the null area of"),
        (("env", "--verbose"), "unrecognized arguments: --verbose"),
    ],
)
def test_bad_usage_is_refused_in_one_line(refused, arguments, said):
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("-5", "GeneratedTokens is -5, expected a whole number from 0 to"),
        ("many", 'GeneratedTokens is "many", expected a whole number'),
        ("1,2", "the row has 4 fields, expected 3"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(refused, azure, tokens, said):
    line = refused("replay", "--trace", azure(tokens))
    assert "azure.csv:3: " in line and said in line


def test_a_trace_is_not_drawn_and_has_a_beginning(refused, azure):
    assert "--seed" in refused("replay", "--trace", azure("1"), "--seed", "1")
    assert "--requests=0" in refused("replay", "--trace", azure("1"), "--requests", "0")


def test_a_bad_configuration_is_refused(refused, tmp_path):
    for text, said in (("{", "config file"), ('{"model_type": "perceptron"}', "model type 'perceptron' is not known")):
        config = tmp_path / "config.json"
        config.write_text(text)
        assert said in refused("plan", "--config", str(config), "--memory", "1GiB")


def test_a_misspelt_variable_is_refused(refused, monkeypatch):
    monkeypatch.setenv("AVMP_HYSTERESES", "1")
    assert "AVMP_HYSTERESES: no such option" in refused(*SMALL_REPLAY)


# -- as a process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [SMALL_REPLAY, ("plan", "--model", "jamba-v0.1", "--memory", "1GiB"), ("env",)])
def test_commands_work_with_torch_and_triton_blocked(repository, arguments):
    done = subprocess.run([sys.executable, "-c", BLOCK, *arguments], cwd=repository, capture_output=True, check=True)
    assert done.stdout


def test_the_module_ends_with_the_exit_code_and_writes_nothing(repository, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "avmp", "replay", "--memory", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(repository):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "avmp", "plan", "--model", "jamba-v0.1", "--memory", "1GiB"]
    done = subprocess.run(command, cwd=repository, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error(repository):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "avmp", "env"]
        done = subprocess.run(command, cwd=repository, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"avmp: error: stdout cannot be written") and done.stderr.count(b"\n") == 1
