"""One table of options: the environment, the command line and the README are made from it."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import fields

import pytest

from avmp.errors import InvalidArgument
from avmp.options import Options, add_arguments, from_arguments, markdown_table, variable

OTHERS = {
    "debug": 2,
    "hysteresis": 0.5,
    "floor_pages": 7,
    "floor_slots": 3,
    "zero_slots": False,
    "zero_pages": True,
    "poison": True,
    "record_effects": False,
    "events": True,
}
"""A value for each option that is not its default."""


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_every_option_has_another_value_to_test_with():
    assert {option.name for option in fields(Options)} == OTHERS.keys()
    assert all(getattr(Options(), name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", OTHERS)
def test_each_option_can_be_set_in_the_environment_and_on_the_command_line(name: str):
    value = OTHERS[name]
    expected = Options(**{name: value})
    assert Options.from_env({variable(name): str(value)}) == expected
    assert from_arguments(parsed("--" + name.replace("_", "-"), str(value)), {}) == expected
    assert variable(name) == "AVMP_" + name.upper()


def test_all_of_them_go_to_the_command_line_and_come_back():
    options = Options(**OTHERS)
    words = [word for name, value in OTHERS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert from_arguments(parsed(*words), {}) == options


def test_the_command_line_wins_over_the_environment_and_what_neither_names_keeps_its_default():
    environment = {"AVMP_DEBUG": "1", "AVMP_EVENTS": "true"}
    options = from_arguments(parsed("--debug", "2"), environment)
    assert options == Options(debug=2, events=True)
    assert from_arguments(parsed(), {}) == Options() == Options.from_env({"PATH": "/bin", "HOME": "/"})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AVMP_FLOOR_SLOTS", "5")
    assert Options.from_env().floor_slots == 5
    assert from_arguments(parsed()).floor_slots == 5


@pytest.mark.parametrize("name", ["AVMP_DEBGU", "AVMP_", "AVMP_HYSTERESIS_", "AVMP_debug"])
def test_a_misspelt_variable_is_refused_by_name(name: str):
    with pytest.raises(InvalidArgument, match=f"{name}: no such option; known are AVMP_DEBUG"):
        Options.from_env({name: "1"})


def test_the_folder_of_traces_is_no_option_and_no_mistake():
    assert Options.from_env({"AVMP_TRACES": "/somewhere"}) == Options()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("debug", "3"), ("debug", "-1"), ("debug", "yes"), ("debug", ""), ("debug", "1.0"), ("hysteresis", "much"),
        ("hysteresis", "1.01"), ("hysteresis", "-0.1"), ("hysteresis", "nan"), ("floor_pages", "-1"),
        ("floor_slots", "1e3"), ("zero_slots", "2"), ("zero_slots", "on"), ("events", ""),
    ],
)  # fmt: skip
def test_a_text_that_makes_no_sense_is_refused_wherever_it_comes_from(name: str, text: str):
    with pytest.raises(InvalidArgument):
        Options.from_env({variable(name): text})
    with pytest.raises(InvalidArgument):
        from_arguments(parsed(f"--{name.replace('_', '-')}={text}"), {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("debug", True), ("debug", "1"), ("debug", None), ("debug", 5), ("hysteresis", "0.1"), ("hysteresis", True),
        ("hysteresis", float("nan")), ("hysteresis", 2), ("floor_pages", 1.5), ("floor_slots", -3), ("events", 1),
        ("zero_pages", None),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: object):
    with pytest.raises(InvalidArgument, match=name.split("_")[0]):
        Options(**{name: value})


def test_a_whole_number_will_do_for_a_share():
    assert Options(hysteresis=1).hysteresis == 1 and Options(hysteresis=0).hysteresis == 0


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().debug = 2  # type: ignore[misc]


def test_the_table_has_one_row_for_each_option_with_its_variable_default_and_meaning():
    lines = markdown_table().splitlines()
    assert lines[:2] == ["| option | variable | default | meaning |", "|---|---|---|---|"]
    assert len(lines) == 2 + len(fields(Options))
    for line, option in zip(lines[2:], fields(Options), strict=True):
        name, named, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert (name, named) == (f"`{option.name}`", f"`{variable(option.name)}`")
        assert meaning == option.metadata["help"] and len(meaning) > 20
        assert Options.from_env({variable(option.name): default}) == Options()


def test_help_shows_every_option_with_its_default():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for option in fields(Options):
        assert "--" + option.name.replace("_", "-") in text
    assert "(default 0.0625)" in text and "(default true)" in text
