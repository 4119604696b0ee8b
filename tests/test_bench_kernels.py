"""The benchmarks of the torch backend: they measure what they say, and the committed figures keep their bounds."""

import json

import pytest
import torch

from bench import attention, kernels

SMALL = {"BATCH": 2, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "PAGE_TOKENS": 4}


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(attention, name, value)


def test_a_measurement_of_attention(small, monkeypatch):
    """Of several passes the least counts, for each of what takes turns."""
    passes = iter([0.004] * 6 + [0.003] * 6 + [0.005] * 6)

    def seconds(calls, rounds):
        assert least_seconds(calls, rounds).keys() == calls.keys()
        return dict.fromkeys(calls, 0.002) | {"paged": next(passes)}

    least_seconds = attention.least_seconds
    monkeypatch.setattr(attention, "least_seconds", seconds)
    monkeypatch.setattr(attention, "CONTEXTS", (16, 32))
    monkeypatch.setattr(attention, "PREFILL_TOKENS", 32)
    rows = attention.measure_all(1)
    assert [row["step"] for row in rows] == ["decode"] * 4 + ["prefill"] * 2
    for row in rows:
        assert (row["paged_ms"], row["contiguous_ms"], row["ratio"]) == (3.0, 2.0, 1.5)
        assert ("bound" in row) is (row["step"] == "decode")


def test_results_that_differ_are_not_timed(small, monkeypatch):
    monkeypatch.setattr(attention.Case, "paged", lambda case: torch.zeros_like(case.q))
    with pytest.raises(AssertionError):
        attention.measure(1, torch.float32, 32)


def test_a_bound_that_is_exceeded_is_said(capsys):
    row = {"step": "decode", "dtype": "float32", "context": 8, "ratio": 1.25, "bound": 1.3}
    assert attention.show([row])
    assert "above" not in capsys.readouterr().out
    assert not attention.show([row, row | {"ratio": 1.31}])
    assert capsys.readouterr().out.splitlines()[-1].endswith(" above")


def test_units_that_move_in_the_benchmark(monkeypatch):
    monkeypatch.setattr(kernels, "ARENA_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "MOVED_BYTES", 1 << 18)
    monkeypatch.setattr(kernels, "UNIT_BYTES", (4096, 65536))
    rows = kernels.measure(1)
    assert [row["name"] for row in rows] == [
        "torch copy_, contiguous",
        "move units of 4 KiB",
        "move units of 64 KiB",
    ]
    assert ["bound" in row for row in rows] == [False, False, True]


def recorded(repository):
    lines = (repository / "bench" / "results" / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def figure(row):
    """The ratio, in bold where it does not keep the bound."""
    kept = row["ratio"] <= row["bound"] if row["benchmark"] == "attention" else row["ratio"] >= row.get("bound", 0)
    return f"{row['ratio']:.2f}" if kept else f"**{row['ratio']:.2f}**"


def test_the_table_of_the_page_is_what_was_recorded(repository):
    rows = recorded(repository)
    expected = ["| context, tokens | fp32, of contiguous | bf16, of contiguous |", "|--:|--:|--:|"]
    ratios = {(row["dtype"], row["context"]): figure(row) for row in rows if row.get("step") == "decode"}
    expected += [
        f"| {context:,} | {ratios['float32', context]} | {ratios['bfloat16', context]} |"
        for context in attention.CONTEXTS
    ]
    moves = [row for row in rows if row["benchmark"] == "kernels" and "move" in row["name"]]
    expected += ["", "| units of KiB | of `copy_` |", "|--:|--:|"]
    expected += [f"| {int(row['name'].split()[-2]):,} | {figure(row)} |" for row in moves]
    page = (repository / "bench" / "README.md").read_text(encoding="utf-8")
    assert page.split("<!-- torch backend -->\n")[1].split("\n\n#")[0].splitlines() == expected
