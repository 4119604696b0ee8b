"""Every option of the allocator in one place. The environment, ``--help`` and the README's table are made from it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from avmp.errors import InvalidArgument

_OTHER_VARIABLES = {"AVMP_TRACES"}
"""Variables with the same prefix that are no options: the folder of request traces."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """How an allocator behaves. Immutable; a wrong value raises InvalidArgument at once.

    Each option can be set in the environment (``from_env``): ``debug`` is ``AVMP_DEBUG``, and so on.
    """

    debug: int = _option(
        0,
        "1: check the calling thread; 2: also verify every table after each operation, and every id given to a kernel",
    )
    hysteresis: float = _option(
        1 / 16, "share of a retracting pool's extent that it may give up beyond the demand, free units only"
    )
    floor_pages: int = _option(0, "pages that state slots may never take")
    floor_slots: int = _option(0, "state slots that pages may never take")
    zero_slots: bool = _option(True, "zero a state slot when it is handed out")
    zero_pages: bool = _option(False, "zero a page when it is handed out")
    poison: bool = _option(False, "fill freed pages and slots with NaN patterns")
    record_effects: bool = _option(True, "keep the list of effects and table changes for a device")
    events: bool = _option(False, "keep the stream of allocated, freed and moved units")

    def __post_init__(self) -> None:
        for option in fields(self):
            value, kind = getattr(self, option.name), type(option.default)
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
                raise InvalidArgument(f"option {option.name}={value!r}: expected {kind.__name__}")
        if self.debug not in (0, 1, 2):
            raise InvalidArgument(f"option debug={self.debug}: expected 0, 1 or 2")
        if not 0 <= self.hysteresis <= 1:
            raise InvalidArgument(f"option hysteresis={self.hysteresis}: expected a share between 0 and 1")
        if self.floor_pages < 0 or self.floor_slots < 0:
            raise InvalidArgument(f"floors {self.floor_pages} and {self.floor_slots}: expected 0 or more")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Options:
        """Options from ``AVMP_*`` variables. Raises InvalidArgument for a name or value that means nothing."""
        environment = os.environ if environment is None else environment
        known = {variable(option.name): option for option in fields(cls)}
        given = {name: text for name, text in environment.items() if name.startswith("AVMP_")}
        for name in sorted(given.keys() - known.keys() - _OTHER_VARIABLES):
            raise InvalidArgument(f"{name}: no such option; known are {', '.join(known)}")
        values: dict[str, Any] = {known[n].name: parse(known[n], given[n]) for n in sorted(given.keys() & known.keys())}
        return cls(**values)


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"AVMP_{name.upper()}"


def parse(option: Field[Any], text: str) -> Any:
    """The value of one option from text. Raises InvalidArgument."""
    kind: Any = type(option.default)
    try:
        return {"0": False, "1": True, "false": False, "true": True}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise InvalidArgument(f"option {option.name}={text!r}: expected {kind.__name__}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One ``--name`` argument per option, as text: ``from_arguments`` reads them."""
    group = parser.add_argument_group("allocator options")
    for option in fields(Options):
        flag = "--" + option.name.replace("_", "-")
        text = f"{option.metadata['help']} (default {_shown(option)})"
        group.add_argument(flag, dest=option.name, metavar=type(option.default).__name__.upper(), help=text)


def from_arguments(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Options:
    """Options from the environment, overridden by the command line."""
    base = Options.from_env(environment)
    values: dict[str, Any] = {option.name: getattr(base, option.name) for option in fields(Options)}
    for option in fields(Options):
        text = getattr(arguments, option.name)
        if text is not None:
            values[option.name] = parse(option, text)
    return Options(**values)


def markdown_table() -> str:
    """The options as the README shows them."""
    lines = ["| option | variable | default | meaning |", "|---|---|---|---|"]
    for option in fields(Options):
        lines.append(f"| `{option.name}` | `{variable(option.name)}` | {_shown(option)} | {option.metadata['help']} |")
    return "\n".join(lines)


def _shown(option: Field[Any]) -> str:
    default: Any = option.default
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
