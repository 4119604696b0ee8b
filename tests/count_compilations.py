"""How often launches compile, counted without a GPU and without compiling: ``python -m tests.count_compilations
module:function`` calls the function, which launches kernels on CPU tensors, and prints the variants of each as JSON.

Triton decides about a compilation from the arguments alone; the driver is one that only names a target, and a hook
that Triton asks before it compiles counts and declines, so that nothing is ever launched.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VARIABLE = "TRITON_INTERPRET"


class Driver:
    """Names a target; there is nothing behind it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compilations(function: str) -> dict[str, int]:
    """Variants by kernel, from a process of its own, in which the interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "tests.count_compilations", function]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(function: str) -> None:
    import triton
    from triton.runtime import driver

    driver.set_active(Driver())
    launch = importlib.import_module("avmp.kernels.launch")
    launch.__dict__["require_runnable"] = lambda tensor: None  # before anything imports it: nothing will run
    seen: dict[str, set[Any]] = {}

    def count(*, key: Any, fn: Any, **details: Any) -> bool:
        seen.setdefault(fn.name, set()).add(str(key))
        return True

    triton.knobs.runtime.jit_cache_hook = count
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)()
    print(json.dumps({kernel: len(keys) for kernel, keys in sorted(seen.items())}))


if __name__ == "__main__":
    main(sys.argv[1])
