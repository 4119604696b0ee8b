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


@pytest.mark.parametrize("dtype", list(attention.BOUNDS), ids=str)
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_measurement_of_attention(small, monkeypatch, dtype, step):
    def seconds(calls, rounds):
        assert attention_seconds(calls, rounds).keys() == calls.keys()
        return {"paged": 0.003, "contiguous": 0.002, "read": 0.001}

    attention_seconds = attention.least_seconds
    monkeypatch.setattr(attention, "least_seconds", seconds)
    row = attention.measure(1, dtype, 32, step)
    assert (row["paged_ms"], row["contiguous_ms"], row["ratio"]) == (3.0, 2.0, 1.5)
    assert ("bound" in row) is (step == "decode")


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


def test_the_committed_figures_keep_their_bounds(repository):
    lines = (repository / "bench" / "results" / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    moved = [row for row in rows if row["benchmark"] == "kernels" and "bound" in row]
    attended = [row for row in rows if row["benchmark"] == "attention" and "bound" in row]
    assert {row["bound"] for row in moved} == {kernels.BOUND}
    assert all(row["ratio"] >= row["bound"] for row in moved)
    expected = {
        (str(dtype).removeprefix("torch."), tokens) for dtype in attention.BOUNDS for tokens in attention.CONTEXTS
    }
    assert {(row["dtype"], row["context"]) for row in attended} == expected
    assert all(row["ratio"] <= row["bound"] for row in attended)
