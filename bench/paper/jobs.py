"""What is computed: cells of the grid, and cells of the headroom table; many at a time on several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.paper import HEADROOM_POLICIES, LayerUnits, Outcome, Served, headroom, run_experiment, search_split, variant
from avmp.progress import progress_on
from avmp.units import parse_bytes
from avmp.workloads.paper import PAPER_WORKLOADS, PaperStream, paper_stream

WORKLOADS = tuple(PAPER_WORKLOADS)
MODELS = ("paper_jamba", "paper_mamba2")
POOLS = ("1GiB", "4GiB")


@dataclass(frozen=True)
class Cell:
    """One variant on one stream; ``requests`` is None for the paper's number."""

    variant: str
    workload: str
    model: str
    pool: str
    seed: int
    requests: int | None = None

    @property
    def published(self) -> bool:
        """Whether the requests are those of the paper."""
        return paper_stream(self.workload, self.seed, self.requests).published

    def run(self) -> Outcome:
        """The outcome, computed here and now."""
        units = LayerUnits.of(named_model(self.model))
        allocator = variant(self.variant)(units, parse_bytes(self.pool))
        return run_experiment(paper_stream(self.workload, self.seed, self.requests), allocator, units)


@dataclass(frozen=True)
class Queue:
    """Every policy of the headroom table on all seeds of one workload."""

    workload: str
    model: str
    pool: str
    requests: int | None = None

    @property
    def streams(self) -> list[PaperStream]:
        """One for each of the paper's seeds."""
        return [paper_stream(self.workload, seed, self.requests) for seed in PAPER_WORKLOADS[self.workload].seeds]

    @property
    def layout(self) -> Layout:
        """The memory as avmp cuts it."""
        return Layout.plan(named_model(self.model), self.pool)

    def run(self) -> dict[str, Served]:
        """By policy, computed here and now."""
        streams, layout = self.streams, self.layout
        return {name: headroom(streams, layout, build) for name, build in HEADROOM_POLICIES.items()}


@dataclass(frozen=True)
class Search(Queue):
    """The best static split for the same requests."""

    def run(self) -> dict[str, Served]:
        """Its share as the name, and what it made of them."""
        share, served = search_split(self.streams, self.layout)
        return {f"{float(share):.2f}": served}


Job: TypeAlias = "Cell | Queue"


@dataclass
class Selection:
    """What was asked for on the command line; the views compute on nothing else."""

    workloads: tuple[str, ...] = WORKLOADS
    models: tuple[str, ...] = MODELS
    pools: tuple[str, ...] = POOLS
    seeds: tuple[int, ...] | None = None
    requests: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether sums over models, pools and seeds are the published ones; workloads are summed one by one."""
        return (set(self.models), set(self.pools), self.seeds, self.requests) == (set(MODELS), set(POOLS), None, None)

    def seeds_of(self, workload: str) -> tuple[int, ...]:
        """Those of the paper, or those asked for."""
        return PAPER_WORKLOADS[workload].seeds if self.seeds is None else self.seeds

    def cells(self, variants: Sequence[str], workloads: Sequence[str] | None = None) -> list[Cell]:
        """All cells of these variants."""
        return [
            Cell(name, workload, model, pool, seed, self.requests)
            for name in variants
            for workload in (self.workloads if workloads is None else workloads)
            for model in self.models
            for pool in self.pools
            for seed in self.seeds_of(workload)
        ]

    def queues(self, kind: type[Queue] = Queue) -> list[Queue]:
        """All cells of the headroom table, or of its searches."""
        return [
            kind(workload, model, pool, self.requests)
            for workload in self.workloads
            for model in self.models
            for pool in self.pools
        ]


def _run(job: Job) -> Outcome | dict[str, Served]:
    return job.run()


def run_jobs(jobs: Sequence[Job], processes: int, talk: TextIO) -> dict[Job, Any]:
    """The result of each job, in the order of the jobs; progress goes to ``talk`` where that is a terminal."""
    wanted = list(dict.fromkeys(jobs))
    with progress_on(talk, len(wanted)) as progress:
        report = progress.part("cells", len(wanted))
        if processes == 1:
            results = {}
            for done, job in enumerate(wanted, start=1):
                results[job] = job.run()
                report(done)
            return results
        # The long ones first, so that no process is left alone with one at the end.
        queue = sorted(wanted, key=lambda job: isinstance(job, Cell))
        with ProcessPoolExecutor(max_workers=processes) as pool:
            futures = {pool.submit(_run, job): job for job in queue}
            found = {}
            for done, future in enumerate(as_completed(futures), start=1):
                found[futures[future]] = future.result()
                report(done)
    return {job: found[job] for job in wanted}


def processors() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0))
