"""What the record comes to: avmp's gain over each other policy, cell by cell, and where it is behind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.paper.bootstrap import paired_bootstrap
from bench.serving.grid import CLOSER, LOADS, MODELS, OTHERS, PAPER_TRACES, POLICIES, TRACES, Cell

SOME, NOTHING = 0.001, 0.00005
"""A loss above the first while requests arrive, or above the second over the whole run, is called a loss."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Gain:
    """avmp over another policy in one cell, in tokens per second: ``gain`` while requests arrive, with its paired
    interval over the slices of that time, and ``whole`` over the whole run."""

    model: str
    trace: str
    load: float
    other: str
    gain: float
    low: float
    high: float
    whole: float

    @property
    def cell(self) -> tuple[str, str, float]:
        """Model, trace and load."""
        return self.model, self.trace, self.load

    @property
    def place(self) -> str:
        """The cell's name in a table."""
        return f"{self.model}, {self.trace}, {self.load:g}x"

    def __str__(self) -> str:
        return f"{percent(self.gain)} [{percent(self.low)}, {percent(self.high)}]"


def percent(share: float) -> str:
    """``+1.2%``, and never ``-0.0%``."""
    return f"{round(share, 3) + 0.0:+.1%}"


class Study:
    """The records of one size of the study, and those of why avmp is behind where it is."""

    def __init__(self, found: dict[str, Record], requests: int, causes: Mapping[str, Record] | None = None) -> None:
        self.found, self.requests, self.causes = found, requests, causes or {}

    def cell(self, model: str, trace: str, load: float, policy: str) -> Cell:
        """A cell of this size."""
        return Cell(model, trace, load, policy, self.requests)

    def get(self, model: str, trace: str, load: float, policy: str) -> Record | None:
        """One cell's record; None if it is not there yet."""
        return self.found.get(self.cell(model, trace, load, policy).key)

    def places(self) -> Iterator[tuple[str, str, float]]:
        """Model, trace and load of every cell of the grid that has avmp."""
        grid = [(model, trace, load) for model in MODELS for trace in TRACES for load in LOADS]
        grid += [(CLOSER, trace, 1.0) for trace in PAPER_TRACES]
        return (place for place in grid if self.get(*place, "avmp"))

    def gain(self, model: str, trace: str, load: float, other: str) -> Gain | None:
        """None where one of the two is missing."""
        ours, theirs = (self.get(model, trace, load, policy) for policy in ("avmp", other))
        if not ours or not theirs:
            return None
        mine, its = ours["result"], theirs["result"]
        level = sum(its["slices"]) / len(its["slices"]) or 1.0
        deltas = [(a - b) / level for a, b in zip(mine["slices"], its["slices"], strict=True)]
        whole = mine["tokens_per_second"] / (its["tokens_per_second"] or 1.0) - 1
        return Gain(model, trace, load, other, *paired_bootstrap(deltas), whole)

    def gains(self, other: str) -> list[Gain]:
        """All of them."""
        return [gain for place in self.places() if (gain := self.gain(*place, other))]

    def losses(self) -> list[Gain]:
        """Where best-static or vllm is ahead of avmp, over the whole run or while requests arrive; the worst first."""
        behind = [gain for other in ("best-static", "vllm") for gain in self.gains(other) if _is_loss(gain)]
        return sorted(behind, key=lambda gain: min(gain.gain, gain.whole))

    def every_gain(self) -> list[Gain]:
        """Over each other policy, in every cell that has both."""
        others = [name for name in (*POLICIES, *OTHERS) if name != "avmp"]
        return [gain for place in self.places() for other in others if (gain := self.gain(*place, other))]


def _is_loss(gain: Gain) -> bool:
    return gain.whole < -NOTHING or gain.gain < -SOME


def write_gains(study: Study, path: Path) -> None:
    """One line for each cell and other policy."""
    path.write_text("".join(json.dumps(asdict(gain)) + "\n" for gain in study.every_gain()), encoding="utf-8")
