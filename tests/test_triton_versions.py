"""The oldest triton that works, with numpy on either side of 2.4, which its interpreter does not know: kernels compile
within their limits, and compute what they should."""

import os
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

OLDEST = "3.6.0"
COMPILED = ("decode, virtual ids", "prefill, every feature", "state update, fp32, 64 x 128, speculative")
KERNEL_TESTS = tuple(f"test_{name}_kernels.py" for name in ("unit", "kv", "state", "conv"))
SELECTED = (
    "triton_interpreter",
    "every_effect",
    "random_layouts",
    "fp8_is",
    "bit_equal and forward",
    "features_in_pairs[1",  # and those from ten on
)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a module in an environment of its own, which finds everything but triton and numpy in this one."""
    folder = tmp_path_factory.mktemp("triton") / "environment"
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    venv.create(folder, with_pip=True, symlinks=True)

    def run(*arguments: str) -> str:
        command = [folder / "bin" / "python", "-m", *arguments]
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run("pip", "install", "--quiet", f"triton=={OLDEST}", "numpy<2.4")
    packages = next((folder / "lib").glob("python3*/site-packages"))
    (packages / "this_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    assert f"Version: {OLDEST}\n" in run("pip", "show", "triton")
    return run


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_within_their_limits(run: Run, name: str) -> None:
    table = run("bench.static", "--jobs", "1", "--target", "sm_90", "--only", name)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [name]


@pytest.mark.parametrize(
    "numpy",
    [
        "numpy<2.4",
        pytest.param("numpy>=2.4", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11")),
    ],
)
def test_the_interpreter_computes_what_it_should(run: Run, repository: Path, numpy: str) -> None:
    run("pip", "install", "--quiet", numpy)
    names = ("test_triton_interpreter.py", "test_paged_attention.py", *KERNEL_TESTS)
    files = [str(repository / "tests" / name) for name in names]
    assert " passed" in run("pytest", "-q", "-p", "no:cacheprovider", "-k", " or ".join(SELECTED), *files)
