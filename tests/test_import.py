"""What importing avmp costs, what it works without, and that it lives beside somebody else's package ``kernels``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import avmp


def blocking(*names: str) -> str:
    """The beginning of a program for which these packages are not to be had."""
    return f"""
import sys

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked)
"""


BLOCK = blocking("torch", "triton")

DEVICE_SIDE = {"backends", "ops", "cache_pool", "compat", "integrations", "demo", "kernels"} | {
    "bounds",
    "device_batch",
    "device_memory",
    "device_tables",
    "host_swap",
    "id_checks",
    "places",
    "pool_checks",
    "registration",
    "schemas",
    "state_ops",
    "step_tables",
    "unit_ops",
    "uploads",
    "views",
}


@pytest.fixture
def run(repository):
    """Runs a program in a fresh interpreter that stands in the root of the repository; returns what it prints."""

    def run(program: str, path: Path | None = None) -> str:
        environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_importing_avmp_loads_nothing_else(run):
    loaded = json.loads(run("import avmp, sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in loaded if name.startswith("avmp.")] == []
    assert {"numpy", "torch", "triton"}.isdisjoint(loaded)


def test_the_policy_is_importable_with_torch_and_triton_blocked(run, repository):
    names = {path.stem for path in (repository / "avmp").iterdir() if path.suffix == ".py" or path.is_dir()}
    policy = sorted(name for name in names - DEVICE_SIDE if not name.startswith("_"))
    assert {"errors", "geometry", "layout", "allocator", "workloads", "environment"} <= set(policy)
    run(BLOCK + "".join(f"import avmp.{name}\n" for name in policy))


def test_the_policy_works_with_torch_and_triton_blocked(run):
    program = """
import avmp
from avmp.environment import collect, format_report
from avmp.workloads import builtin_trace

layout = avmp.Layout.plan(avmp.named_model("jamba-v0.1"), "1GiB")
assert layout.max_sequences(1000) > 1
assert len(builtin_trace("azure_conv", 100, 0)) == 100
assert avmp.__version__ in format_report(collect())
print(layout.describe())
"""
    assert "lane" in run(BLOCK + program)


def test_every_operation_works_on_the_torch_backend_with_triton_blocked(run, repository):
    adapters = sorted(path.stem for path in (repository / "avmp" / "compat").glob("[!_]*.py"))
    program = "import avmp, avmp.demo.command\nfrom avmp.backends import MODULES, load\n"
    program += "".join(f"import avmp.compat.{name}\n" for name in adapters)
    program += "for operation in MODULES:\n    load(operation, 'torch')\n"
    program += """
import torch

pool = avmp.CachePool(avmp.named_model("jamba-v0.1"), "256MiB", device="cpu", max_rows=4, max_tokens_per_sequence=512)
batch = pool.batch(pool.admit([40, 7]))
q, k, v = (torch.randn(47, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
avmp.write_kv(k, v, *pool.kv(layer=4), batch)
print(avmp.paged_attention(q, *pool.kv(layer=4), batch, scale=128**-0.5).isfinite().all().item())
"""
    assert run(blocking("triton") + program).strip() == "True"


@pytest.mark.parametrize("name", avmp.__all__)
def test_every_public_name_is_there(name):
    assert getattr(avmp, name) is not None
    assert name in dir(avmp)


def test_public_names_are_fetched_once():
    first = avmp.Geometry
    assert vars(avmp)["Geometry"] is first


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'avmp' has no attribute 'Geometri'"):
        _ = avmp.Geometri


def test_kernels_are_importable_below_avmp(run, repository):
    printed = run("import avmp.kernels; print(*avmp.kernels.__path__)").strip()
    assert Path(printed).resolve() == repository / "kernels"


def test_another_package_called_kernels_wins_in_the_root_of_the_repository(run, tmp_path):
    other = tmp_path / "kernels" / "__init__.py"
    other.parent.mkdir()
    other.write_text("WHOSE = 'theirs'\n")
    assert run("import avmp.kernels, kernels; print(kernels.WHOSE)", path=tmp_path).strip() == "theirs"
