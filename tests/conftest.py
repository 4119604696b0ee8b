"""What tests of every kind share: how hypothesis runs, and where the repository and the recorded traces are."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Kernels run in Triton's interpreter, with or without a GPU. Triton reads this when kernels are defined, so it has to
# be set before any test module is imported; what needs the compiler starts a process without it.
os.environ["TRITON_INTERPRET"] = "1"
# Read when torch is loaded: the tensors of tests are so small that threads would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A failure prints a blob that reproduces it anywhere. Under CI the examples are the same on every run, so that a
# change is judged by what it changes; elsewhere they are new each time, which is how new faults are found.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's interpreter, corrected; for tests that run kernels."""
    from tests import triton_interpreter

    triton_interpreter.install()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations are small here: threads that wait for each other on a busy machine cost more than they bring."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["forward", "reverse", "shuffle"])
def program_order(request: pytest.FixtureRequest, interpreter: None) -> Iterator[str]:
    """The test runs three times, with the programs of its kernels in three orders; for kernels that write."""
    from tests import triton_interpreter

    with triton_interpreter.program_order(request.param, seed=1):
        yield request.param


@pytest.fixture(scope="session")
def recorded_traces() -> Path:
    """The folder of recorded traces that AVMP_TRACES names; tests that need it are skipped without."""
    folder = os.environ.get("AVMP_TRACES")
    if not folder:
        pytest.skip("needs recorded traces: set AVMP_TRACES to a folder that holds them")
    return Path(folder)
