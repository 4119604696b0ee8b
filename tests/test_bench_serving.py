"""The serving study: small ones from nothing to the page, and the recorded one against the present code."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from avmp.serving.devices import DEVICES
from avmp.serving.engine_rules import EngineRules
from avmp.serving.search import MOST_RUNS
from bench.serving import __main__ as command
from bench.serving import causes
from bench.serving import grid as study_grid
from bench.serving.figure import FIGURE, draw
from bench.serving.grid import (
    CLOSER,
    EAGER,
    LOADS,
    MODELS,
    OTHERS,
    PAPER_TRACES,
    POLICIES,
    SPLITS_TRIED,
    TRACES,
    Cell,
    compute,
    grid,
    settings_of,
)
from bench.serving.record import RESULTS, append, beside, drop_torn_line, load
from bench.serving.report import BEGIN, END, FULL, LITTLE, README, readme_table, report
from bench.serving.study import NOTHING, Study

MOST_CELLS = 400


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A study of one model and two traces; runs it, and yields its files."""
    monkeypatch.setattr(study_grid, "MODELS", {CLOSER: MODELS[CLOSER]})
    monkeypatch.setattr(study_grid, "TRACES", ("sharegpt", "day"))
    monkeypatch.setattr(study_grid, "PAPER_TRACES", {})
    record, page, figure = (tmp_path / name for name in ("record.jsonl", "page.md", "figure.png"))
    page.write_text("# A page\n\nwith text\n")

    def run(*arguments):
        files = ("--record", str(record), "--readme", str(page), "--figure", str(figure))
        assert command.main([*files, "--requests", "60", *arguments]) == 0

    return run, record, page, figure


def test_the_grid_is_what_it_says():
    cells = grid()
    assert len({cell.key for cell in cells}) == len(cells) <= MOST_CELLS
    counts = Counter(cell.policy for cell in cells)
    for policy in POLICIES:
        assert counts[policy] == len(MODELS) * len(TRACES) * len(LOADS) + len(PAPER_TRACES)
    assert {cell.model for cell in cells if cell.policy in OTHERS} == {CLOSER}
    for place in {(cell.model, cell.trace, cell.load) for cell in cells}:
        assert next(cell for cell in cells if (cell.model, cell.trace, cell.load) == place).policy == "oracle"


def test_a_study_goes_on_where_it_stopped(small):
    run, record, page, figure = small
    run()
    lines = record.read_text().splitlines()
    assert len(lines) == len(study_grid.grid(60)) == 2 * len(LOADS) * len(POLICIES + OTHERS)
    assert page.read_text().startswith("# A page\n\nwith text\n")
    assert figure.read_bytes().startswith(b"\x89PNG")
    half = "\n".join(lines[: len(lines) // 2])
    record.write_text(half + "\n" + lines[-1][:50])  # as if it had been killed in the middle of a line
    first_page = page.read_text()
    run("--processes", "2")
    again = record.read_text().splitlines()
    assert again[: len(lines) // 2] == lines[: len(lines) // 2]
    assert sorted(again) == sorted(lines)
    run()
    assert sorted(record.read_text().splitlines()) == sorted(lines)
    assert page.read_text() == first_page
    assert page.read_text().count(BEGIN) == page.read_text().count(END) == 1


def test_every_cell_of_a_study_accounts_for_its_requests(small):
    run, record, page, _ = small
    run()
    for key, cell in load(record).items():
        result = cell["result"]
        assert result["completed"] + result["refused"] == result["requests"] == cell["requests"] <= 60
        assert cell["rate"] > 0 and len(result["slices"]) == 10
        assert ("share" in cell) == (cell["policy"] == "best-static")
        assert key == cell["key"]
    text = page.read_text()
    order = ["## Where avmp loses", "## Where it gains little", "## What was required", "## Every cell at and beyond"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_what_is_missing_is_said(small):
    run, record, page, _ = small
    run()
    lines = record.read_text().splitlines()
    record.write_text("\n".join(lines[:9]) + "\n")
    run("--report-only")
    assert f"**9 of {len(lines)} cells are done so far.**" in page.read_text()
    assert len(record.read_text().splitlines()) == 9


def test_a_list_of_cells_marks_those_that_are_done(small, capsys):
    run, record, _, _ = small
    run()
    record.write_text(record.read_text().splitlines()[0] + "\n")
    capsys.readouterr()
    run("--list")
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if line.startswith("done")] == [listed[0]]
    assert len(listed) == len(study_grid.grid(60))


def test_the_record_is_checked(tmp_path, capsys):
    file = tmp_path / "record.jsonl"
    append(file, {"key": "a", "b": 1})
    append(file, {"key": "c"})
    assert load(file) == {"a": {"key": "a", "b": 1}, "c": {"key": "c"}}
    drop_torn_line(file)
    assert len(load(file)) == 2
    file.write_text(file.read_text() + "nonsense\n")
    assert command.main(["--record", str(file), "--list"]) == 2
    assert "record.jsonl:3: no record of the serving study" in capsys.readouterr().err
    assert load(tmp_path / "nothing") == {}


def test_traces_that_are_not_there_are_asked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("AVMP_TRACES", raising=False)
    monkeypatch.setattr(study_grid, "TRACES", ("azure",))
    study_grid._recorded.cache_clear()
    files = [part for name in ("record", "readme", "figure") for part in (f"--{name}", str(tmp_path / name))]
    assert command.main([*files, "--requests", "5"]) == 2
    assert "set AVMP_TRACES to the folder that holds azure_llm_2023_conv.csv" in capsys.readouterr().err
    assert command.main([*files, "--requests", "0"]) == 2
    assert command.main([*files, "--report-only"]) == 2


def test_a_study_of_another_size_keeps_off_the_recorded_files(tmp_path, capsys):
    before = RESULTS.read_bytes(), README.read_bytes(), FIGURE.read_bytes()
    others = ("--record", str(tmp_path / "r"), "--readme", str(tmp_path / "p"))
    for given, missing in (((), "--record, --readme, --figure"), (others, "--figure")):
        assert command.main(["--requests", "60", *given]) == 2
        assert f"--requests 60: the files of the study are of 5000 requests; give others by {missing}\n" in (
            capsys.readouterr().err
        )
    assert before == (RESULTS.read_bytes(), README.read_bytes(), FIGURE.read_bytes())


def test_a_record_of_other_settings_is_not_gone_on_with(small, monkeypatch, capsys):
    run, record, page, figure = small
    run()
    before = record.read_text()
    monkeypatch.setattr(study_grid, "settings_of", lambda model, policy: "other")
    files = ("--record", str(record), "--readme", str(page), "--figure", str(figure))
    assert command.main([*files, "--requests", "60"]) == 2
    told = capsys.readouterr().err
    assert "record.jsonl: granite-4.0-h-small/sharegpt/60/0.5/oracle has the settings" in told
    assert "the simulated server now has other" in told and record.read_text() == before


def test_settings_are_those_of_the_policy_and_of_every_constant(monkeypatch):
    names = [*POLICIES, *OTHERS]
    found = {(model, name): settings_of(model, name) for model in list(MODELS)[:2] for name in names}
    assert len(set(found.values())) == len(found)
    model = next(iter(MODELS))
    device = DEVICES[MODELS[model]]

    def now(policy):
        settings_of.cache_clear()
        return settings_of(model, policy)

    with monkeypatch.context() as patched:
        patched.setattr(EngineRules.__init__, "__defaults__", (8192, 1023, "recompute", 16))
        assert now("avmp") != found[model, "avmp"]
    with monkeypatch.context() as patched:
        patched.setitem(DEVICES, device.name, replace(device, bytes_per_second=device.bytes_per_second - 1))
        assert now("avmp") != found[model, "avmp"]
    with monkeypatch.context() as patched:
        patched.setattr("avmp.serving.search._EACH_SIDE", 9)
        assert now("best-static") != found[model, "best-static"]
        assert now("avmp") == found[model, "avmp"]
    with monkeypatch.context() as patched:
        patched.setitem(DEVICES, device.name, replace(device, source="another book"))
        assert now("avmp") == found[model, "avmp"]
    settings_of.cache_clear()


def test_other_requests_under_the_name_of_a_trace_are_refused(small, monkeypatch, capsys):
    run, record, page, figure = small
    run()
    lines = record.read_text().splitlines()
    record.write_text("\n".join(lines[:5]) + "\n")
    monkeypatch.setattr(study_grid, "_drawn", lambda name, requests: study_grid.builtin_trace(name, requests, 1))
    files = ("--record", str(record), "--readme", str(page), "--figure", str(figure))
    assert command.main([*files, "--requests", "60"]) == 2
    assert "trace sharegpt: its requests have the digest" in capsys.readouterr().err


def test_what_comes_of_a_study_is_beside_its_record(small):
    run, record, _, _ = small
    run()
    gains = [json.loads(line) for line in beside(record, "gains").read_text().splitlines()]
    assert len(gains) == 2 * len(LOADS) * (len(POLICIES + OTHERS) - 1)
    took = [json.loads(line) for line in beside(record, "runs").read_text().splitlines()]
    assert [(one["processes"], one["seconds"] > 0) for one in took] == [(1, True)]
    behind = Study(load(record), 60).losses()
    assert took[0]["computed"] == len(study_grid.grid(60)) + len(behind)
    why = load(beside(record, "causes"))
    assert why.keys() == {Cell(*gain.cell, gain.other, 60).key for gain in behind}
    run()
    assert len(beside(record, "runs").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "due_to"),
    [
        ({"other": 99}, causes.ORDER),
        ({"null_given_back": 111, "other_less_null": 100}, causes.NULL_AREA),
        ({"null_given_back": 111, "other_less_null": 105, "batch_bounded": 110}, causes.BATCH),
        ({"null_given_back": 111, "other_less_null": 100, "batch_bounded": 110}, causes.EITHER),
        ({"null_given_back": 105, "other_less_null": 99, "both": 110}, causes.BOTH),
        ({}, causes.NEITHER),
    ],
)
def test_a_loss_is_due_to_what_undoes_it(changes, due_to):
    same = {
        "avmp": 100,
        "other": 110,
        "other_less_null": 110,
        "null_given_back": 100,
        "batch_bounded": 100,
        "both": 100,
    }
    assert causes.cause(same | changes, NOTHING) == due_to


def test_without_matplotlib_there_is_no_figure(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not draw(Study({}, 60), tmp_path / "figure.png")


# -- the recorded study ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return Study(load(RESULTS), grid()[0].requests, load(beside(RESULTS, "causes")))


def test_the_recorded_study_is_whole_and_the_page_is_its_report(recorded):
    assert {cell.key for cell in grid()} <= recorded.found.keys()
    section = README.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert section == report(recorded, len(grid())).strip()


def test_every_gain_is_written_down_as_the_record_has_it(recorded):
    lines = [json.loads(line) for line in beside(RESULTS, "gains").read_text().splitlines()]
    compared = {(line["model"], line["trace"], line["load"], line["other"]) for line in lines}
    wanted = {(cell.model, cell.trace, cell.load, cell.policy) for cell in grid() if cell.policy != "avmp"}
    assert compared == wanted and len(lines) == len(wanted)
    for line in lines:
        place = line["model"], line["trace"], line["load"]
        mine, its = (recorded.get(*place, policy)["result"] for policy in ("avmp", line["other"]))
        assert line["whole"] == pytest.approx(mine["tokens_per_second"] / its["tokens_per_second"] - 1)
        assert line["gain"] == pytest.approx(sum(mine["slices"]) / sum(its["slices"]) - 1)
        assert line["low"] <= line["gain"] <= line["high"]


def test_the_recorded_settings_are_the_present_ones(recorded):
    study_grid.require_same_settings(recorded.found, grid(), RESULTS)
    for key in recorded.found:
        model, trace = key.split("/")[:2]
        same = {
            record["trace_digest"] for other, record in recorded.found.items() if other.startswith(f"{model}/{trace}/")
        }
        assert len(same) == 1


def test_the_figure_has_a_bar_for_every_gain(recorded, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **rest: figures.append(figure))
    assert draw(recorded)
    (axes,) = figures[0].axes
    cells = [(model, trace) for model in MODELS for trace in TRACES]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["\n".join(cell) for cell in cells]
    assert axes.get_ylabel() == "output tokens per second, %"
    assert axes.get_title() == "avmp at 2x the oracle's capacity (simulated)"
    others = [text.get_text().removeprefix("over ") for text in axes.get_legend().get_texts()]
    assert others == ["vllm", "best-static", "oracle"]
    heights = [bar.get_height() for bar in axes.patches]
    gains = [recorded.gain(*cell, 2.0, other).gain for other in others for cell in cells]
    assert heights == pytest.approx([100 * gain for gain in gains])


def test_every_loss_has_its_cause(recorded):
    behind = recorded.losses()
    assert behind
    for gain in behind:
        cell = recorded.cell(*gain.cell, gain.other)
        ours, theirs = (recorded.get(*gain.cell, policy) for policy in ("avmp", gain.other))
        assert causes.is_of(recorded.causes.get(cell.key), cell, ours, theirs)
    assert "not known yet" not in README.read_text()


def test_the_recorded_splits_are_within_the_bound_that_is_stated(recorded):
    for cell in grid():
        if cell.policy == "best-static":
            record = recorded.found[cell.key]
            assert 1 < len(record["tried"]) <= SPLITS_TRIED[cell.load]
            assert record["result"]["tokens_per_second"] == record["tried"][str(record["slots"])]
    text = " ".join(README.read_text().split())
    assert f"at most {SPLITS_TRIED[2.0]} splits a cell ({SPLITS_TRIED[0.5]} at half the capacity" in text


def test_what_is_said_of_arenas_that_are_not_filled_is_what_was_recorded(recorded):
    text = " ".join(README.read_text().split())
    places = [(model, trace) for model in MODELS for trace in TRACES]
    peaks = {place: recorded.get(*place, 2.0, "avmp")["result"]["used_share"]["most"] for place in places}
    roomy = [f"{', '.join(place)} ({peak:.0%})" for place, peak in peaks.items() if peak < FULL]
    assert f"in use at its peak in {len(peaks) - len(roomy)} of {len(peaks)} cells; not in {', '.join(roomy)}" in text


def test_requests_that_are_left_out_are_told(recorded):
    text = README.read_text()
    for model in MODELS:
        row = next(line for line in text.splitlines() if line.startswith(f"| {model} ") and MODELS[model] in line)
        for trace in TRACES:
            record = recorded.get(model, trace, 1.0, "avmp")
            left_out = record["left_out"]
            assert f" {record['requests']:,}{f' (without {left_out:,})' if left_out else ''} |" in row


def test_the_summary_in_the_readme_is_what_was_recorded(repository, recorded):
    static, oracle = recorded.gains("best-static"), recorded.gains("oracle")
    lost = [gain for gain in static if gain.whole < -NOTHING]
    behind = [gain.whole for gain in lost]
    moving = max(recorded.get(*place, "avmp")["result"]["move_share"] for place in recorded.places())
    page = (repository / "README.md").read_text()
    text = " ".join(page.split())
    assert f"ahead of avmp in {len(behind)} of {len(static)} cells, by {-min(behind):.2%}".replace("%", " %") in text
    counted = Counter(
        causes.cause(recorded.causes[recorded.cell(*gain.cell, gain.other).key], NOTHING) for gain in lost
    )
    undone = {causes.NULL_AREA: "its null area back", causes.BATCH: "with `max_batch`", causes.EITHER: "by either"}
    undone |= {causes.BOTH: "by only both", causes.NEITHER: "by neither"}
    assert all(f"{words} in {counted[name]}" in text for name, words in undone.items() if counted[name])
    assert f"at least {1 + min(gain.whole for gain in oracle):.4f} of what the byte budget serves" in text
    assert f"migrations take {moving:.2%} of step time at most".replace("%", " %") in text
    assert f"{len(grid())} cells)" in text and f"up to {MOST_RUNS} times" in text
    assert readme_table(recorded) in page
    ratios = {
        (trace, name): "/".join(f"{1 + recorded.gain(CLOSER, trace, load, name).whole:.4f}" for load in LOADS[1:])
        for trace in ("azure", "sharegpt")
        for name in ("vllm", "vllm-eager")
    }
    for trace in ("azure", "sharegpt"):
        assert f"{ratios[trace, 'vllm-eager']} instead of {ratios[trace, 'vllm']} on {trace}" in text


def test_what_is_said_of_half_the_load_is_what_was_recorded(recorded):
    """The policies of every cell are equal there; the page names each other policy that falls behind."""
    study, page = recorded, README.read_text()
    for model in MODELS:
        for trace in TRACES:
            for other in ("oracle", "vllm", "best-static"):
                assert abs(study.gain(model, trace, LOADS[0], other).gain) < 0.0005
    sentence = page.split("already beyond the capacity of")[1].split("\n\n")[0]
    for name in OTHERS:
        behind = any(study.gain(CLOSER, trace, LOADS[0], name).gain >= LITTLE for trace in TRACES)
        assert (f"{name} (avmp gains" in sentence) == behind


@pytest.mark.parametrize(("model", "load_", "policy"), [("jamba-v0.1", 2.0, "avmp"), (CLOSER, 2.0, "sglang")])
def test_a_recorded_cell_comes_out_again(model, load_, policy):
    """ShareGPT's shape is drawn here, so that no trace is needed."""
    cell = Cell(model, "sharegpt", load_, policy)
    found = load(RESULTS)
    again = next(compute([cell], found))
    assert json.loads(json.dumps(again)) == found[cell.key]


@pytest.mark.parametrize("trace", list(PAPER_TRACES)[:1])
def test_a_recorded_split_and_a_recorded_cause_come_out_again(recorded, trace):
    cell = Cell(CLOSER, trace, 1.0, "best-static")
    theirs, ours = recorded.found[cell.key], recorded.get(CLOSER, trace, 1.0, "avmp")
    assert json.loads(json.dumps(next(compute([cell], recorded.found)))) == theirs
    again = causes.find_out(study_grid.Ground(CLOSER, trace, cell.requests), cell, ours, theirs)
    assert again == recorded.causes[cell.key]


def test_eager_policies_are_the_others_without_a_reserve():
    assert set(EAGER) <= set(OTHERS) and set(EAGER.values()) <= set(POLICIES)
