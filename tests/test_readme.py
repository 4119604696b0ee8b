"""What the README shows is what happens."""

import json
import re
from pathlib import Path

import pytest

from avmp.cli import main
from avmp.options import markdown_table
from bench.policy import readme_table


def block(repository: Path, marker: str) -> str:
    """The fenced block, or the lines up to the next empty one, behind ``<!-- marker -->``."""
    text = (repository / "README.md").read_text(encoding="utf-8").split(f"<!-- {marker} -->\n", 1)[1]
    fenced = re.match(r"```\w+\n(.*?)```\n", text, re.DOTALL)
    return fenced[1] if fenced else text.split("\n\n", 1)[0] + "\n"


def test_the_ten_lines_of_use_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = block(repository, "use")
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert 8 <= len([line for line in source.splitlines() if line.strip()]) <= 13
    assert names["batch"].num_tokens == 6037 and names["keys"].shape[1:] == (16, 8, 128)  # type: ignore[attr-defined]
    names["physical"].require_current()  # type: ignore[attr-defined]
    pool = names["pool"]
    pool.release(names["draft"])  # type: ignore[attr-defined]
    pool.check()  # type: ignore[attr-defined]
    assert pool.stats().pages_live == pool.stats().slots_live == 0  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d+ (True|False) \d+\n", capsys.readouterr().out)


def test_the_replay_table_is_what_the_command_prints(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 0
    assert capsys.readouterr().out == block(repository, "replay")


def test_the_table_of_options_is_complete(repository: Path) -> None:
    assert block(repository, "options") == markdown_table() + "\n"


def test_the_table_of_costs_is_the_recorded_one(repository: Path) -> None:
    lines = (repository / "bench" / "results" / "policy.jsonl").read_text(encoding="utf-8").splitlines()
    assert block(repository, "costs") == readme_table([json.loads(line) for line in lines]) + "\n"


def test_the_readme_names_files_that_exist(repository: Path) -> None:
    named = re.findall(r"`((?:avmp|tests|bench|kernels)/[\w./]*)`", (repository / "README.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (repository / name).exists()] == []
