"""The command line: ``python -m avmp demo``, ``replay``, ``serve-sim``, ``plan`` and ``env``.

What is asked for goes to stdout, as a whole and only if all went well; everything else goes to stderr. Exit codes:
0, 1 (a gate failed), 2 (bad usage or input, said in one line).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from avmp import __version__, options
from avmp.baselines import POLICIES, make_policy
from avmp.errors import AvmpError, InvalidArgument
from avmp.geometry import CONVENTIONS, Geometry, require_count
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.plan import format_plan, plan_memory
from avmp.progress import progress_on
from avmp.replay import ReplayResult, best_static, format_results, replay, setup_for
from avmp.serving import command as serving
from avmp.serving.arrivals import take
from avmp.serving.planning import format_serving_plan
from avmp.units import format_bytes
from avmp.workloads import WORKLOADS, Trace, builtin_trace, read_trace

DEFAULT_REQUESTS = 4000
DEMO_REQUESTS = 400
PLAN_REQUESTS = 1000
_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Complains in one line, the same way as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        answer: str | tuple[str, int] = arguments.run(arguments)
    except AvmpError as error:
        return _complain(str(error))
    except MemoryError:
        return _complain("this machine has too little memory for the tables of so large an arena")
    text, code = (answer, 0) if isinstance(answer, str) else answer
    return _print(text) or code


def _complain(problem: str) -> int:
    print(f"avmp: error: {' '.join(problem.split())}", file=sys.stderr)
    return _BAD_INPUT


def _print(text: str) -> int:
    """Writes the answer. Whoever closes the pipe early has read enough of it."""
    code = 0
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A file name may hold what the terminal cannot show.
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            code = _complain(f"stdout cannot be written: {error.strerror}")
        # The interpreter flushes stdout once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


# -- arguments -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="avmp",
        description="One arena for the KV pages and the state slots of hybrid models.",
    )
    parser.add_argument("--version", action="version", version=f"avmp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_replay(commands)
    _add_serve(commands)
    _add_plan(commands)
    _add_env(commands)
    return parser


def _add_command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return command


def _add_demo(commands: Any) -> None:
    command = _add_command(commands, "demo", _demo, "serve requests with a small hybrid model out of one small arena")
    _add_trace(command, DEMO_REQUESTS)
    command.add_argument(
        "--shrink", type=int, default=8, metavar="N", help="divide all lengths by N (default 8: the model is small)"
    )
    command.add_argument(
        "--requests-per-step", type=float, default=1.0, metavar="X", help="how fast requests arrive (default 1)"
    )
    command.add_argument(
        "--samples", type=int, default=3, metavar="N", help="answers to every fourth request, by fork (default 3)"
    )
    command.add_argument("--memory", default="1MiB", metavar="SIZE", help="size of the arena (default 1MiB)")
    command.add_argument(
        "--longest", type=int, default=1024, metavar="N", help="longest sequence (default 1024 tokens)"
    )
    command.add_argument("--max-sequences", type=int, default=64, metavar="N", help="at once (default 64)")
    command.add_argument(
        "--chunk-tokens", type=int, default=64, metavar="N", help="prompt tokens in one step, at most (default 64)"
    )
    command.add_argument("--backend", choices=("torch", "triton"), help="who computes (default: the device decides)")
    command.add_argument("--device", metavar="NAME", help="such as cuda or cpu (default: a GPU where there is one)")
    command.add_argument("--plot", metavar="FILE", help="draw memory over time to a PNG")


def _add_replay(commands: Any) -> None:
    command = _add_command(commands, "replay", _replay, "replay requests against memory policies, side by side")
    _add_trace(command, DEFAULT_REQUESTS)
    _add_model(command, required=False)
    command.add_argument("--memory", default="4GiB", metavar="SIZE", help="size of the arena (default 4GiB)")
    command.add_argument(
        "--policy", nargs="+", metavar="NAME", help=f"policies to replay, of {', '.join(POLICIES)} (default all)"
    )
    command.add_argument(
        "--max-sequences",
        type=int,
        metavar="N",
        help="at once under any policy (default: as many as there are requests, at most 4096)",
    )
    options.add_arguments(command)


def _add_serve(commands: Any) -> None:
    command = _add_command(
        commands, "serve-sim", _serve, "serve requests in simulated time under memory policies, side by side"
    )
    _add_trace(command, DEFAULT_REQUESTS, serving.WORKLOAD_NAMES)
    _add_model(command, required=False, convention="vllm")
    serving.add_device_arguments(command)
    serving.add_arguments(command)
    options.add_arguments(command)


def _add_plan(commands: Any) -> None:
    command = _add_command(
        commands, "plan", _plan, "what fits into an arena, and what a server makes of it, under avmp's rule and others'"
    )
    _add_model(command, required=True)
    command.add_argument(
        "--memory", metavar="SIZE", help="size of the arena, such as 8GiB (default with a device: what weights leave)"
    )
    command.add_argument("--plot", metavar="FILE", help="draw what to expect of a server to a PNG; needs a device")
    _add_trace(command, PLAN_REQUESTS, serving.WORKLOAD_NAMES)
    serving.add_device_arguments(command, "--device-memory")


def _add_env(commands: Any) -> None:
    _add_command(commands, "env", _env, "versions, devices and backend, for a bug report")


def _add_trace(command: argparse.ArgumentParser, requests: int, workloads: Sequence[str] = tuple(WORKLOADS)) -> None:
    source = command.add_mutually_exclusive_group()
    source.add_argument("--workload", metavar="NAME", help=f"built-in: {', '.join(workloads)} (default sharegpt)")
    source.add_argument("--trace", metavar="FILE", help="Azure LLM or BurstGPT CSV, Mooncake JSONL, ShareGPT JSON")
    command.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"how many of a workload (default {requests}), or the first N of a trace (default all)",
    )
    command.add_argument("--seed", type=int, metavar="N", help="for drawing a workload (default 0)")


def _add_model(command: argparse.ArgumentParser, required: bool, convention: str = "transformers") -> None:
    default = "" if required else " (default jamba-v0.1)"
    model = command.add_mutually_exclusive_group(required=required)
    model.add_argument("--model", metavar="NAME", help=f"a named model{default}")
    model.add_argument("--config", metavar="FILE", help="a model's config.json")
    command.add_argument("--page-tokens", type=int, default=16, metavar="N", help="tokens per KV page (default 16)")
    command.add_argument(
        "--convention",
        default=convention,
        metavar="NAME",
        help=f"whose state shapes and dtypes: {' or '.join(CONVENTIONS)} (default {convention})",
    )


# -- commands: each returns what is to be printed --------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> tuple[str, int]:
    try:
        from avmp.demo.command import run
    except ImportError as error:
        raise InvalidArgument(f"the demo needs torch: {error}") from error
    return run(arguments, _trace(arguments, DEMO_REQUESTS, rate=1.0))


def _replay(arguments: argparse.Namespace) -> str:
    policies = list(dict.fromkeys(arguments.policy or POLICIES))
    allocator_options = _allocator_options(arguments)
    geometry, trace = _geometry(arguments), _trace(arguments, DEFAULT_REQUESTS)
    layout = Layout.plan(geometry, arguments.memory)
    setup = setup_for(trace, layout, allocator_options, arguments.max_sequences)
    made = [make_policy(name, setup) for name in policies]
    started = time.perf_counter()
    with progress_on(sys.stderr, len(trace) * len(made)) as progress:
        results = [replay(trace, policy, progress.part(policy.name, len(trace))) for policy in made]
    seconds = time.perf_counter() - started
    print(f"avmp: {len(trace):,} requests under {len(made)} policies in {seconds:.1f} s", file=sys.stderr)
    return (_as_json if arguments.json else _as_text)(arguments, trace, layout, results)


def _as_text(arguments: argparse.Namespace, trace: Trace, layout: Layout, results: list[ReplayResult]) -> str:
    assert layout.geometry is not None
    drawn = "" if arguments.trace else f", seed {arguments.seed or 0}"
    skipped = f" ({trace.skipped:,} entries without one)" if trace.skipped else ""
    return "\n".join(
        [
            f"{trace.name}: {len(trace):,} requests{skipped}{drawn}; {int(trace.prompt_tokens.sum()):,} prompt and "
            f"{int(trace.output_tokens.sum()):,} output tokens",
            f"{layout.geometry.describe()} ({arguments.convention} convention)",
            f"arena of {format_bytes(layout.arena_bytes)}, {format_bytes(layout.null_bytes)} of it null area",
            "",
            format_results(results),
        ]
    )


def _as_json(arguments: argparse.Namespace, trace: Trace, layout: Layout, results: list[ReplayResult]) -> str:
    assert layout.geometry is not None
    return _json(
        {
            "trace": trace.name,
            "requests": len(trace),
            "seed": None if arguments.trace else arguments.seed or 0,
            "model": layout.geometry.name,
            "convention": arguments.convention,
            "page_tokens": layout.page_tokens,
            "page_bytes": layout.page_total_bytes,
            "slot_bytes": layout.slot_total_bytes,
            "null_bytes": layout.null_bytes,
            "arena_bytes": layout.arena_bytes,
            "best_static": best_static(results),
            "policies": [result.as_dict() for result in results],
        }
    )


def _serve(arguments: argparse.Namespace) -> str:
    trace = _workload(arguments, DEFAULT_REQUESTS)
    return serving.run(arguments, _geometry(arguments), trace, _allocator_options(arguments))


def _workload(arguments: argparse.Namespace, requests: int) -> Trace:
    """A trace for a server, which knows more workloads. With a rate, a seed serves to draw arrivals that a recorded
    trace does not have."""
    rates = getattr(arguments, "rate", None) if arguments.trace else None
    return serving.extra_workload(arguments, requests) or _trace(arguments, requests, rates and rates[0])


def _plan(arguments: argparse.Namespace) -> str:
    """What fits; with a device, also what its server would get done."""
    geometry = _geometry(arguments)
    if not _names_a_device(arguments):
        if arguments.memory is None:
            raise InvalidArgument("plan needs --memory, the size of the arena, or --device, whose rest it is")
        plan = plan_memory(geometry, arguments.memory)
        return _json(plan.as_dict()) if arguments.json else format_plan(plan)
    expected = serving.plan(arguments, geometry, _workload(arguments, PLAN_REQUESTS))
    plan = plan_memory(expected.server.model.rank_geometry, expected.server.layout.arena_bytes)
    if arguments.json:
        return _json(plan.as_dict() | {"serving": expected.as_dict()})
    return f"{format_plan(plan)}\n\n{format_serving_plan(expected)}"


def _names_a_device(arguments: argparse.Namespace) -> bool:
    """Whether a server is asked about. What only a server needs is refused without one."""
    if arguments.device is not None or arguments.device_memory is not None:
        return True
    unset = dict.fromkeys(("bandwidth", "flops", "workload", "trace", "requests", "seed", "parameters", "plot"))
    unset |= serving.DEVICE_DEFAULTS
    given = [name for name, value in unset.items() if getattr(arguments, name) != value]
    if given:
        flag = given[0].replace("_", "-")
        raise InvalidArgument(f"--{flag} is about a server; name its --device, or give all figures of one")
    return False


def _env(arguments: argparse.Namespace) -> str:
    from avmp.environment import collect, format_report

    report = collect()
    return _json(report) if arguments.json else format_report(report)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2)


def _geometry(arguments: argparse.Namespace) -> Geometry:
    page_tokens, convention = arguments.page_tokens, arguments.convention
    if arguments.config is not None:
        return Geometry.from_config(arguments.config, page_tokens, convention)
    return named_model(arguments.model or "jamba-v0.1", page_tokens=page_tokens, convention=convention)


def _trace(arguments: argparse.Namespace, default_requests: int, rate: float | None = None) -> Trace:
    if arguments.trace is None:
        requests = default_requests if arguments.requests is None else arguments.requests
        return builtin_trace(arguments.workload or "sharegpt", requests, arguments.seed or 0, rate)
    if arguments.seed is not None and rate is None:
        raise InvalidArgument("--seed is for drawing a workload; a trace is replayed as it was recorded")
    trace = read_trace(arguments.trace)
    if arguments.requests is None:
        return trace
    return take(trace, np.arange(min(require_count("--requests", arguments.requests), len(trace))))


def _allocator_options(arguments: argparse.Namespace) -> options.Options:
    for name in ("record_effects", "events"):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag}: nobody would read them in a replay, which never records any")
    return options.from_arguments(arguments)
