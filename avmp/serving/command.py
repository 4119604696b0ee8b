"""``python -m avmp serve-sim``: a trace served in simulated time under several memory policies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from avmp.baselines import MORE_POLICIES, POLICIES, MemoryPolicy
from avmp.errors import InvalidArgument
from avmp.geometry import Geometry
from avmp.options import Options
from avmp.progress import Progress, progress_on
from avmp.serving.arrivals import at_rate, paper_arrivals, require_rate, shifting_day, take
from avmp.serving.devices import (
    DEVICES,
    Device,
    ModelCosts,
    custom_device,
    find_device,
    given_costs,
    model_costs,
    query_heads_of,
)
from avmp.serving.engine_rules import PREEMPTIONS, EngineRules
from avmp.serving.figures import draw_plan, draw_runs, require_plots
from avmp.serving.metrics import Latency, summarize
from avmp.serving.planning import RULES, ServingPlan, plan_serving
from avmp.serving.report import Run, as_lines, as_text
from avmp.serving.roofline import Assumptions, StepModel
from avmp.serving.search import MOST_RUNS
from avmp.serving.served import Served
from avmp.serving.server import Server, TimedPolicy
from avmp.units import parse_bytes
from avmp.workloads import WORKLOADS, Trace
from avmp.workloads.paper import PAPER_WORKLOADS

DEFAULT_DEVICE = "h200"
DEVICE_DEFAULTS = {"tp": 1, "active_parameters": None, "query_heads": None, "weight_bytes": 2, "overhead_ms": 3.0}
"""What the arguments about a device are unless they are given, those aside that name or describe one."""
BEST_STATIC = "best-static"
DEFAULT_POLICIES = ("avmp", BEST_STATIC, "vllm", "oracle")
_EXTRA_WORKLOADS = ("day", *PAPER_WORKLOADS)
WORKLOAD_NAMES = (*WORKLOADS, *_EXTRA_WORKLOADS)
"""Shapes of lengths, a day whose mix shifts, and the streams of the published experiment, a tick being a second."""


def add_device_arguments(command: argparse.ArgumentParser, memory_flag: str = "--memory") -> None:
    """Device, model size and what the step model assumes."""
    device = command.add_argument_group("device and model")
    device.add_argument("--device", metavar="NAME", help=f"of {', '.join(DEVICES)} (default {DEFAULT_DEVICE})")
    device.add_argument("--bandwidth", type=float, metavar="GB/S", help="of a device that has no name here")
    device.add_argument("--flops", type=float, metavar="TFLOPS", help="dense bf16, of such a device")
    device.add_argument(memory_flag, dest="device_memory", metavar="SIZE", help="of such a device")
    device.add_argument("--tp", type=int, metavar="N", help="devices, by tensor parallelism (default 1)")
    device.add_argument("--parameters", type=float, metavar="BILLIONS", help="of a model whose size is not known here")
    device.add_argument("--active-parameters", type=float, metavar="BILLIONS", help="per token (default: all)")
    device.add_argument("--query-heads", type=int, metavar="N", help="of an attention layer (default: of config.json)")
    device.add_argument("--weight-bytes", type=int, metavar="N", help="per parameter (default 2)")
    device.add_argument("--overhead-ms", type=float, metavar="MS", help="of each step (default 3)")
    device.set_defaults(**DEVICE_DEFAULTS)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What only this command has."""
    defaults, target = EngineRules(), Latency()
    command.add_argument(
        "--rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests per second, one run for each (default: a trace as recorded, day and the AVMP paper's "
        "workloads at their own times, others all at once)",
    )
    known = ", ".join((BEST_STATIC, *POLICIES, *MORE_POLICIES))
    command.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME",
        help=f"of {known}, static-SHARE (default {' '.join(DEFAULT_POLICIES)})",
    )
    command.add_argument("--cache-memory", metavar="SIZE", help="for caches, on each device (default: the rest)")
    engine = command.add_argument_group("engine")
    engine.add_argument(
        "--token-budget",
        type=int,
        default=defaults.token_budget,
        metavar="N",
        help=f"tokens of a step, at most (default {defaults.token_budget})",
    )
    engine.add_argument(
        "--max-batch",
        type=int,
        default=defaults.max_batch,
        metavar="N",
        help=f"requests at once, at most (default {defaults.max_batch})",
    )
    engine.add_argument(
        "--preemption", choices=PREEMPTIONS, default=defaults.preemption, help=f"(default {defaults.preemption})"
    )
    engine.add_argument(
        "--reserve-tokens",
        type=int,
        default=defaults.reserve_tokens,
        metavar="N",
        help=f"room an admission leaves for each running request (default {defaults.reserve_tokens})",
    )
    engine.add_argument(
        "--first-token-target",
        type=float,
        default=target.first_token_seconds,
        metavar="S",
        help=f"a good request has its first token within this (default {target.first_token_seconds:g})",
    )
    engine.add_argument(
        "--per-token-target",
        type=float,
        default=target.per_token_seconds,
        metavar="S",
        help=f"and each further one within this on average (default {target.per_token_seconds:g})",
    )
    command.add_argument("--plot", metavar="FILE", help="draw memory, latencies and throughput to a PNG")
    command.add_argument("--timeline", metavar="FILE", help="write memory over time as JSON lines")
    command.add_argument(
        "--time-allocator", action="store_true", help="tell on stderr what processor time policies took here"
    )


def extra_workload(arguments: argparse.Namespace, requests: int) -> Trace | None:
    """The trace of a workload that only a server knows; None where another source is asked for."""
    name, seed = arguments.workload, arguments.seed or 0
    if name not in _EXTRA_WORKLOADS:
        return None
    if name == "day":
        return shifting_day(requests if arguments.requests is None else arguments.requests, seed)
    trace = paper_arrivals(name, seed)
    return trace if arguments.requests is None else take(trace, np.arange(min(arguments.requests, len(trace))))


def step_model(arguments: argparse.Namespace, geometry: Geometry) -> StepModel:
    """The step model that the arguments describe."""
    if not 0 <= arguments.overhead_ms < 1e6:
        raise InvalidArgument(f"--overhead-ms {arguments.overhead_ms!r}: expected 0 or more")
    assumptions = Assumptions(overhead_seconds=arguments.overhead_ms / 1e3)
    return StepModel(geometry, _costs(arguments, geometry), _device(arguments), arguments.tp, assumptions)


def _device(arguments: argparse.Namespace) -> Device:
    figures = {
        "--bandwidth": arguments.bandwidth,
        "--flops": arguments.flops,
        "its memory": arguments.device_memory,
    }
    given = [flag for flag, value in figures.items() if value is not None]
    if not given:
        return find_device(arguments.device or DEFAULT_DEVICE)
    if arguments.device is not None:
        raise InvalidArgument(f"--device names a device, {given[0]} describes another one; give one or the other")
    missing = [flag for flag in figures if flag not in given]
    if missing:
        raise InvalidArgument(f"a device by its figures needs {', '.join(figures)}; missing: {', '.join(missing)}")
    return custom_device(arguments.device_memory, arguments.bandwidth, arguments.flops)


def _costs(arguments: argparse.Namespace, geometry: Geometry) -> ModelCosts:
    if arguments.parameters is None:
        if arguments.active_parameters is not None or arguments.query_heads is not None:
            raise InvalidArgument("--active-parameters and --query-heads go with --parameters")
        return replace(model_costs(geometry), weight_bytes=arguments.weight_bytes)
    heads = arguments.query_heads
    if heads is None and arguments.config is not None:
        heads = query_heads_of(arguments.config)
    return given_costs(geometry, arguments.parameters, arguments.active_parameters, heads, arguments.weight_bytes)


def run(arguments: argparse.Namespace, geometry: Geometry, trace: Trace, options: Options) -> str:
    """The command: what is to be printed."""
    if arguments.plot:
        require_plots()
    rules = EngineRules(arguments.token_budget, arguments.max_batch, arguments.preemption, arguments.reserve_tokens)
    target = Latency(arguments.first_token_target, arguments.per_token_target)
    memory = None if arguments.cache_memory is None else parse_bytes(arguments.cache_memory)
    server = Server(step_model(arguments, geometry), rules, options, memory)
    rates: list[float | None] = (
        [None] if arguments.rate is None else list(dict.fromkeys(map(require_rate, arguments.rate)))
    )
    policies = list(dict.fromkeys(arguments.policy or DEFAULT_POLICIES))
    for name in policies:
        if name != BEST_STATIC:
            server.policy(name, trace)  # raises now, not after the first runs
    runs: list[Run] = []
    served = len(policies) + (BEST_STATIC in policies) * (MOST_RUNS - 1)  # a trace is served so many times at most
    with progress_on(sys.stderr, len(trace) * len(rates) * served) as progress:
        for rate in rates:
            arriving = trace if rate is None else at_rate(trace, rate, arguments.seed or 0)
            runs += [_serve(server, name, arriving, rate, target, arguments, progress) for name in policies]
    if arguments.plot:
        _draw(arguments.plot, runs)
    if arguments.timeline:
        _write_timeline(arguments.timeline, runs)
    if not arguments.json:
        return as_text(server, trace, target, runs)
    asked = {"convention": arguments.convention, "config": arguments.config, "seed": arguments.seed or 0}
    return as_lines(server, trace, target, runs, asked)


def _serve(
    server: Server,
    name: str,
    trace: Trace,
    rate: float | None,
    target: Latency,
    arguments: argparse.Namespace,
    progress: Progress,
) -> Run:
    if name == BEST_STATIC:
        return _serve_best(server, trace, rate, target, arguments, progress)
    report = progress.part(name, len(trace))
    policy: str | MemoryPolicy = TimedPolicy(server.policy(name, trace)) if arguments.time_allocator else name
    served = server.serve(policy, trace, report)
    report(len(trace))
    _tell_time(name, policy, served)
    return Run(rate, name, None, summarize(served, target), served)


def _serve_best(
    server: Server,
    trace: Trace,
    rate: float | None,
    target: Latency,
    arguments: argparse.Namespace,
    progress: Progress,
) -> Run:
    """The best of all runs of the search; it is served once more only where its processor time is asked for."""
    items = len(trace) * MOST_RUNS
    report = progress.part(BEST_STATIC, items)
    best = server.best_static_of(trace, target, report)
    report(items)
    if arguments.time_allocator:
        policy = TimedPolicy(server.policy(best.share, trace))
        _tell_time(BEST_STATIC, policy, server.serve(policy, trace))
    return Run(rate, BEST_STATIC, float(best.share), best.result, best.served, best.slots)


def _tell_time(name: str, policy: str | MemoryPolicy, served: Served) -> None:
    if isinstance(policy, TimedPolicy):
        micros = policy.nanoseconds / 1e3 / max(len(served.step_end), 1)
        print(f"avmp: {name}: {micros:.1f} µs of processor time a step in the policy", file=sys.stderr)


def _draw(path: str, runs: list[Run]) -> None:
    last = [run for run in runs if run.rate == runs[-1].rate]
    results = [(run.rate, replace(run.result, policy=run.policy)) for run in runs]
    with _writing("--plot", path):
        draw_runs(Path(path), {run.policy: run.served for run in last}, results)


def _write_timeline(path: str, runs: list[Run]) -> None:
    """One line for each sample: seconds, batch, queue, and bytes used and set aside by kind."""
    lines = [
        json.dumps({"policy": run.policy, "rate": run.rate, **asdict(sample)})
        for run in runs
        for sample in run.served.samples
    ]
    with _writing("--timeline", path):
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@contextmanager
def _writing(flag: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{flag} {path}: cannot be written: {error.strerror or error}") from error


def plan(arguments: argparse.Namespace, geometry: Geometry, trace: Trace) -> ServingPlan:
    """What ``plan`` says of a server, with its figure drawn where one is asked for."""
    if arguments.plot:
        require_plots()
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    server = Server(step_model(arguments, geometry), cache_bytes=memory)
    with progress_on(sys.stderr, len(RULES)) as progress:
        made = plan_serving(server, trace, progress.part("rules", len(RULES)))
    if arguments.plot:
        with _writing("--plot", arguments.plot):
            draw_plan(Path(arguments.plot), made)
    return made
