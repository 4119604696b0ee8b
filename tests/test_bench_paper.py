"""``python -m bench.paper``: tables, comparisons, exit codes, and every command of ``bench/README.md``."""

import json
import re
import shlex
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from bench.paper import published
from bench.paper.__main__ import main
from bench.paper.bootstrap import paired_bootstrap
from bench.paper.jobs import Cell, Search, Selection, run_jobs
from bench.paper.queues import COMPARED, rounded, rounded_twice
from bench.paper.views import DEFAULT_VIEWS, VIEWS

ONE_CELL = ["--workload", "uniform_short", "--model", "paper_jamba", "--pool", "1GiB", "--seed", "1", "--processes=1"]
SMALL = ["--requests", "8", "--processes", "1"]


def commands(repository) -> list[list[str]]:
    """The arguments of every command on the page, in order."""
    page = (repository / "bench" / "README.md").read_text()
    blocks = re.findall(r"<!-- commands -->\n *```bash\n(.*?)```", page, re.DOTALL)
    lines = [line.split() for block in blocks for line in block.strip().splitlines()]
    assert all(line[:3] == ["python", "-m", "bench.paper"] for line in lines)
    return [line[3:] for line in lines]


def test_every_command_of_the_page_runs(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = commands(repository)
    assert len(found) >= 12
    for arguments in found:
        if "--out" in arguments and find_spec("matplotlib") is None:
            arguments = [word for word in arguments if word not in ("--out", "figures")]
        assert main([*arguments, *SMALL]) == 0, shlex.join(arguments)
    shown = {name for arguments in found for name in arguments if name in VIEWS} | set(DEFAULT_VIEWS)
    assert shown == set(VIEWS), "each view has a command"
    records = [json.loads(line) for line in (tmp_path / "paper.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == {"cell", "queue", "search"}
    assert "DIFFERENT" not in capsys.readouterr().out


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["--show", "totals", "batches", "headroom", "--out", str(tmp_path / "new"), *SMALL]) == 0
    drawn = {file.name: file.read_bytes()[:8] for file in (tmp_path / "new").iterdir()}
    assert drawn == dict.fromkeys(("oom.png", "served.png", "batches.png", "headroom.png"), b"\x89PNG\r\n\x1a\n")


def test_figures_without_matplotlib_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--out", str(tmp_path)]) == 2
    assert "bench extra" in capsys.readouterr().err


def test_the_page_has_a_command_for_each_of_its_eight_points(repository):
    page = (repository / "bench" / "README.md").read_text()
    points = re.split(r"^\d\. ", page.split("## What the metric hides")[1].split("## The honest table")[0], flags=re.M)
    assert len(points) == 9 and all("python -m bench.paper --show" in point for point in points[1:])


def test_the_three_workloads_reproduce(capsys):
    names = ["totals", "served-intact", "refusals", "bootstrap", "phases"]
    arguments = ["--show", *names, "--workload", "uniform_short", "mixed_long", "agentic_burst", "--processes", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "1,152 fields of 180 cells, 37 sums\ndifferences: 0\n" in text
    assert "552.0 / 552.0" in text and "1567.7 / 1567.7" in text


@pytest.mark.slow
def test_everything_that_was_published_reproduces(recorded_traces, capsys):
    names = [name for name in VIEWS if name not in ("throughput", "queue")]
    assert main(["--show", *names]) == 0
    assert "1,536 fields of 240 cells" in capsys.readouterr().out


def test_a_figure_that_differs_ends_with_1(monkeypatch, capsys):
    assert main(["--show", "totals", *ONE_CELL]) == 0
    key = "avmp_dynamic_b128/uniform_short/jamba_1_5_mini/1gib/seed1"
    cells = {**published.golden()["cells"]}
    cells[key] = cells[key] | {"oom": -1}
    monkeypatch.setattr(published, "golden", lambda: {"cells": cells})
    capsys.readouterr()
    assert main(["--show", "totals", *ONE_CELL]) == 1
    assert "DIFFERENT: avmp_dynamic_b128 uniform_short paper_jamba 1GiB seed 1 oom: published -1, here" in (
        capsys.readouterr().out
    )


def test_a_sum_a_share_and_an_interval_that_differ_end_with_1(monkeypatch, capsys):
    monkeypatch.setitem(published.OOM_TOTAL, "avmp_dynamic_b128", "510.1")
    monkeypatch.setitem(published.COMPLETION, "mixed_long", "86")
    monkeypatch.setitem(published.SERVED_INTACT["fixed_dual_mr05"], "mixed_long", "6.3")
    mean, low, high = published.BOOTSTRAP["agentic_burst"]
    monkeypatch.setitem(published.BOOTSTRAP, "agentic_burst", (mean, low - 0.2, high))
    three = ["--workload", "uniform_short", "mixed_long", "agentic_burst"]
    assert main(["--show", "totals", "served-intact", "bootstrap", *three, "--processes", "1"]) == 1
    text = capsys.readouterr().out
    assert "differences: 4" in text and "published 510.1, here 510.0" in text
    assert "published 86, here 85" in text and "published 6.3, here 6.2" in text
    assert "DIFFERENT: interval, agentic_burst" in text


def test_sharegpt_without_its_list_is_not_compared_and_says_so(monkeypatch, capsys):
    monkeypatch.delenv("AVMP_TRACES", raising=False)
    assert main(["--show", "totals", "--workload", "sharegpt_replay", "--pool", "1GiB", "--processes", "1"]) == 0
    assert "not compared: 30 cells" in (text := capsys.readouterr().out) and "needs AVMP_TRACES" in text


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--processes", "0"], ["--seed", "-1"]])
def test_bad_values_end_with_2(wrong, capsys):
    assert main(["--show", "totals", *wrong]) == 2
    assert capsys.readouterr().err.startswith("bench.paper: error: ")


@pytest.mark.parametrize("wrong", [["--show", "nothing"], ["--pool", "2GiB"], ["--nothing"]])
def test_bad_usage_ends_with_2(wrong):
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2


def test_processes_change_nothing():
    selection = Selection(workloads=("uniform_short",), requests=8)
    jobs = [*selection.cells(("padded_unified", "avmp_dynamic_b128")), *selection.queues(Search)[:1]]

    def counted(processes: int) -> list[object]:
        found = run_jobs(jobs, processes, open("/dev/null", "w"))  # noqa: SIM115
        timed = {"cpu_seconds", "retry_seconds", "shrink_seconds"}
        return [
            {key: value for key, value in result.as_dict().items() if key not in timed}
            if isinstance(job, Cell)
            else result
            for job, result in found.items()
        ]

    assert counted(1) == counted(2)


def test_the_bootstrap_is_the_spread_of_resampled_means():
    deltas = [0, 1, -2, 5, 3, -4, 0, 0, 7, 1]
    mean, low, high = paired_bootstrap(deltas)
    assert mean == np.mean(deltas)
    spread = 1.96 * np.std(deltas) / np.sqrt(len(deltas))
    assert low == pytest.approx(mean - spread, abs=0.3) and high == pytest.approx(mean + spread, abs=0.3)
    assert paired_bootstrap([2, 2]) == (2, 2, 2)


def test_rounding():
    assert rounded(106.2461, "106.3") == "106.2" and rounded_twice(106.2461, "106.3") == "106.3"
    assert rounded_twice(1.496, "1.50") == rounded(1.496, "1.50") == "1.50"


@pytest.mark.slow
def test_the_honest_table_is_what_the_queue_gives(repository, recorded_traces):
    page = (repository / "bench" / "README.md").read_text().split("## The honest table")[1].split("\n# ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    queues, searches = Selection().queues(), Selection().queues(Search)
    found = run_jobs([*queues, *searches], 2, open("/dev/null", "w"))  # noqa: SIM115
    expected = []
    for queue, search in zip(queues, searches, strict=True):
        share, best = next(iter(found[search].items()))
        rates = [f"{found[queue][name].rate:.2f}" for name in COMPARED[1:]]
        if not any(found[queue][name].dropped for name in COMPARED[1:]):
            name = f"{queue.workload} {queue.model.removeprefix('paper_')} {queue.pool}"
            expected.append([name, f"{best.rate:.2f} ({share})", *rates])
    assert rows[1:] == expected
