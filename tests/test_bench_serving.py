"""The serving study: small ones from nothing to the page, and the recorded one against the present code."""

import json
from collections import Counter

import pytest

from bench.serving import __main__ as command
from bench.serving import grid as study_grid
from bench.serving.figure import draw
from bench.serving.grid import CLOSER, EAGER, LOADS, MODELS, OTHERS, PAPER_TRACES, POLICIES, TRACES, Cell, compute, grid
from bench.serving.record import RESULTS, append, drop_torn_line, load
from bench.serving.report import BEGIN, END, LITTLE, NOTHING, Study, report

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
    assert command.main(["--record", str(tmp_path / "r"), "--requests", "5"]) == 2
    assert "set AVMP_TRACES to the folder that holds azure_llm_2023_conv.csv" in capsys.readouterr().err
    assert command.main(["--record", str(tmp_path / "r"), "--requests", "0"]) == 2
    assert command.main(["--record", str(tmp_path / "r"), "--report-only"]) == 2


def test_without_matplotlib_there_is_no_figure(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not draw(Study({}, 60), tmp_path / "figure.png")


# -- the recorded study ----------------------------------------------------------------------------------------------


def test_the_recorded_study_is_whole_and_the_page_is_its_report(repository):
    found = load(RESULTS)
    assert {cell.key for cell in grid()} <= found.keys()
    page = (repository / "bench" / "README.md").read_text()
    section = page.split(BEGIN)[1].split(END)[0].strip()
    assert section == report(Study(found, grid()[0].requests), len(grid())).strip()


def test_the_summary_in_the_readme_is_what_was_recorded(repository):
    study = Study(load(RESULTS), grid()[0].requests)
    static, oracle = study.gains("best-static"), study.gains("oracle")
    behind = [gain.whole for gain in static if gain.whole < -NOTHING]
    moving = max(study.get(*place, "avmp")["result"]["move_share"] for place in study.places())
    text = " ".join((repository / "README.md").read_text().split())
    assert f"ahead of avmp in {len(behind)} of {len(static)} cells, by {-min(behind):.2%}".replace("%", " %") in text
    assert f"at least {1 + min(gain.whole for gain in oracle):.4f} of what the byte budget serves" in text
    assert f"migrations take {moving:.2%} of step time at most".replace("%", " %") in text
    assert f"{len(grid())} cells)" in text


def test_what_is_said_of_half_the_load_is_what_was_recorded(repository):
    """The policies of every cell are equal there; the page names each other policy that falls behind."""
    study = Study(load(RESULTS), grid()[0].requests)
    page = (repository / "bench" / "README.md").read_text()
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


def test_eager_policies_are_the_others_without_a_reserve():
    assert set(EAGER) <= set(OTHERS) and set(EAGER.values()) <= set(POLICIES)
