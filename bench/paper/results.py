"""Results by cell, the sums that tables are made of, and how numbers are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from avmp.paper import Outcome
from avmp.units import format_bytes
from bench.paper.jobs import Job, Selection
from bench.paper.published import Comparison


@dataclass(frozen=True)
class Beside:
    """A published figure, None without one to compare with, and ours written with as many decimals."""

    published: str | None
    here: str

    def __str__(self) -> str:
        return f"{self.published or '-'} / {self.here}"


def beside(published: str | None, here: float, comparable: bool) -> Beside:
    """``here`` with the decimals of the published figure, one where there is none."""
    decimals = len(published.partition(".")[2]) if published else 1
    return Beside(published if comparable else None, f"{here:.{decimals}f}")


def percent(part: float, whole: float) -> str:
    """``15.1``; ``-`` of nothing."""
    return f"{100 * part / whole:.1f}" if whole else "-"


def scaled(size: float) -> str:
    """Bytes for a table."""
    return format_bytes(round(size))


@dataclass(frozen=True)
class Results:
    """What was selected, and the result of each job."""

    selection: Selection
    found: dict[Job, Any]

    def of(self, variant: str, workload: str) -> list[Outcome]:
        """By model, pool and seed, in this order."""
        return [self.found[cell] for cell in self.selection.cells([variant], [workload])]

    @property
    def rows(self) -> int:
        """Models times pools: what sums run over."""
        return len(self.selection.models) * len(self.selection.pools)

    def mean_oom(self, variant: str, workload: str) -> float:
        """The sum over models and pools of the mean over seeds."""
        return sum(found.oom for found in self.of(variant, workload)) / len(self.selection.seeds_of(workload))

    def shares(self, variant: str, workload: str) -> tuple[float, float]:
        """Of all requests, those completed and those served intact."""
        outcomes = self.of(variant, workload)
        requests = sum(found.requests for found in outcomes)
        completed, intact = (sum(getattr(found, key) for found in outcomes) for key in ("completed", "served_intact"))
        return completed / requests, intact / requests

    def comparable(self, workload: str) -> bool:
        """Whether sums for this workload are those of the paper."""
        if workload not in self.selection.workloads or not self.selection.is_whole:
            return False
        return all(cell.published for cell in self.selection.cells([""], [workload]))

    def compare(self, comparison: Comparison, what: str, figure: Beside) -> str:
        """Counts the figure, if there is something to compare it with; its text for a table."""
        if figure.published is not None:
            comparison.check(what, figure.published, figure.here)
        return str(figure)
