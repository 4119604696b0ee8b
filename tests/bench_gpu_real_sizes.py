"""``python -m bench.gpu`` at the sizes of a GPU, without one: ``python -m tests.bench_gpu_real_sizes`` goes through all
sections on CPU tensors and prints, as JSON, what went wrong, and how many variants of kernels a GPU would compile.

Triton decides about a compilation from the arguments alone (``count_compilations.py``): nothing is compiled, launched
or timed. What takes long or much memory and has no part in that decision is left out: random contents, references, the
caches of decode beyond half a million tokens.
"""

from __future__ import annotations

import importlib
import json
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver

from avmp.backends import use_backend
from bench.gpu import bandwidth, correctness, counts, decode, problems, timing
from bench.gpu.run import NotPossible
from tests.count_compilations import Driver

MULTIPROCESSORS = 132
MOST_DECODE_TOKENS = 2**19


class Variants:
    """Stands for ``counts.Compilations``: counts what is asked for once each, and declines to compile it."""

    def __init__(self) -> None:
        self.kernels: Any = counts.Counter()
        self._seen: set[str] = set()
        triton.knobs.runtime.jit_cache_hook = self._decline

    def _decline(self, *, key: Any, fn: Any, **_: Any) -> bool:
        if f"{fn.name} {key}" not in self._seen:
            self._seen.add(f"{fn.name} {key}")
            self.kernels[fn.name] += 1
        return True


class Anything(float):
    """At least whatever it is compared with: results are what happened to be in memory."""

    def __ge__(self, other: object) -> bool:
        return True


def prepare() -> problems.Bench:
    """A device that is none, of the size of an H200."""
    driver.set_active(Driver())
    for file in (Path(__file__).resolve().parent.parent / "kernels").glob("*.py"):
        module: Any = importlib.import_module(f"avmp.kernels.{file.stem}")
        for name, function in (("require_runnable", lambda tensor: None), ("multiprocessors", multiprocessors)):
            if hasattr(module, name):
                setattr(module, name, function)
    patched: dict[Any, dict[str, Any]] = {
        problems.Bench: {"random": zeros},
        torch.Tensor: {"random_": lambda self, **_: self},
        correctness: {"arena": arena, "captured": captured, "attention_by_hand": nothing},
        decode: {"MOST_OF_MEMORY": 1.0, "TOLERANCE": Anything(), "free_bytes": free_bytes},
        decode.Case: {"contiguous": contiguous, "sdpa": attend, "sdpa_grouped": attend},
    }
    for target, changes in patched.items():
        for name, value in changes.items():
            setattr(target, name, value)
    device = torch.device("cpu")
    return problems.Bench(device, False, timing.Timer(device, timing.Sensors(None), dry=True))


def multiprocessors(tensor: torch.Tensor) -> int:
    return MULTIPROCESSORS


def zeros(bench: Any, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype or bench.dtype)


def arena(bench: Any, lanes: int, lane_bytes: int) -> torch.Tensor:
    return torch.zeros(lanes, lane_bytes, dtype=torch.uint8)


def captured(bench: Any, call: Any) -> Any:
    return lambda: [torch.ones_like(one) for one in call()]


def free_bytes(device: torch.device) -> int:
    return MOST_DECODE_TOKENS * 4096


def nothing(call: dict[str, Any], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(*call["q"].shape[:2], call["value_cache"].shape[3]), torch.zeros(call["q"].shape[:2])


def contiguous(case: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0), torch.empty(0)


def attend(case: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
    return lambda: torch.ones_like(case.q)


def main() -> None:
    bench, variants = prepare(), Variants()
    ceiling = bandwidth.Ceiling(bench)
    sections: dict[str, Any] = {
        "correctness": correctness.rows(bench),
        "bandwidth": bandwidth.rows(bench, ceiling),
        "launches": counts.launch_rows(bench),
        "compilations": counts.compilation_rows(bench, variants),  # type: ignore[arg-type]
        "host": counts.host_rows(bench),
        "lanes": decode.lane_rows(bench),
        "decode": decode.rows(bench, ceiling),
        "profile": counts.profile_rows(bench),
    }
    found: dict[str, Any] = {"rows": {}, "dropped": [], "errors": {}, "compiled": {}, "variants": {}}
    with torch.no_grad(), use_backend("triton"):
        for section, rows in sections.items():
            before = variants.kernels.total()
            found["rows"][section] = 0
            for row in rows:
                found["rows"][section] += 1
                try:
                    figures = row.make()
                except NotPossible:
                    found["dropped"].append(row.name)
                except Exception:
                    found["errors"][f"{section}: {row.name}"] = traceback.format_exc()
                else:
                    if figures.get("compiled"):
                        found["compiled"][row.name] = figures["compiled"]
            found["variants"][section] = variants.kernels.total() - before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
