"""What holds for every launcher: the device guard, what no kernel uses, what each says of itself, no compilation for a
count, and who is chosen to run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from avmp import backends
from avmp.errors import InvalidArgument
from tests.count_compilations import compilations

COUNTS = (1, 3, 16, 17, 1024)
MOST_COUNTS = 1024


class Launches(ast.NodeVisitor):
    """Launches, ``kernel[grid](...)``, and calls of a module, with the function that each stands in, and whether it
    stands inside ``with device_guard(...):``."""

    def __init__(self, source: str) -> None:
        self.launches: list[tuple[int, str, bool]] = []
        self.calls: dict[str, list[tuple[str, bool]]] = {}
        self.function, self.guarded = "", False
        self.visit(ast.parse(source))

    def visit_With(self, node: ast.With) -> None:
        before = self.guarded
        self.guarded |= any(ast.unparse(item.context_expr).startswith("device_guard(") for item in node.items)
        self.generic_visit(node)
        self.guarded = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.function, self.guarded
        self.function, self.guarded = node.name, False
        self.generic_visit(node)
        self.function, self.guarded = before

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Subscript):
            self.launches.append((node.lineno, self.function, self.guarded))
        else:
            name = ast.unparse(node.func).rpartition(".")[2]
            self.calls.setdefault(name, []).append((self.function, self.guarded))
        self.generic_visit(node)

    def covered(self, function: str, callers: tuple[str, ...] = ()) -> bool:
        """Whether the module calls the function, and only ever under the guard."""
        return function not in callers and all(
            guarded or self.covered(caller, (*callers, function))
            for caller, guarded in self.calls.get(function, [("", False)])
        )


def unguarded(source: str) -> list[int]:
    """Lines of launches without a guard around them, or around all calls of the function that they stand in."""
    module = Launches(source)
    return [line for line, function, guarded in module.launches if not guarded and not module.covered(function)]


def test_no_launch_stands_outside_the_device_guard(repository: Path) -> None:
    sources = {file.name: file.read_text() for file in (repository / "kernels").glob("*.py")}
    assert sum("device_guard" in source for source in sources.values()) > 2
    assert {name: unguarded(source) for name, source in sources.items() if unguarded(source)} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("kernel[(1,)](x)", [1]),
        ("with device_guard(x):\n    kernel[(1,)](x)", []),
        ("with device_guard(x):\n    for i in y:\n        kernel[grid](x)\nkernel[grid](x)", [4]),
        ("with open(x):\n    kernel[(1,)](x)", [2]),
        ("with device_guard(x):\n    def later():\n        kernel[(1,)](x)", [3]),
        ("def f():\n    kernel[(1,)](x)\nwith device_guard(x):\n    f()", []),
        ("def f():\n    kernel[(1,)](x)\nwith device_guard(x):\n    f()\nf()", [2]),
        ("def f():\n    kernel[(1,)](x)\ndef g():\n    f()\ndef h():\n    with device_guard(x):\n        g()", []),
        ("def f():\n    kernel[(1,)](x)\n    f()", [2]),
        ("table[1].copy_(x)", []),
    ],
)
def test_a_launch_outside_the_guard_is_found(source: str, lines: list[int]) -> None:
    assert unguarded(source) == lines


# -- what no kernel uses ---------------------------------------------------------------------------------------------


REFUSED = {
    "make_block_ptr",  # not to be had from triton 3.9 on
    "make_tensor_descriptor",  # wants an allocator of scratch memory, one for the whole process
    "TensorDescriptor",
    "autotune",  # a search while serving
    "Autotuner",
    "heuristics",  # parameters are chosen in one place
    "Heuristics",
}


def refused(source: str) -> list[tuple[int, str]]:
    """Lines that name what no kernel uses, and the name, however it is imported or called."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(node.lineno, part) for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute):
            found.add((node.lineno, node.attr))
        elif isinstance(node, ast.Name):
            found.add((node.lineno, node.id))
    return sorted((line, name) for line, name in found if name in REFUSED)


def test_no_kernel_uses_block_pointers_descriptors_or_a_search(repository: Path) -> None:
    sources = {file.name: file.read_text() for file in (repository / "kernels").glob("*.py")}
    assert sum("triton.jit" in source for source in sources.values()) > 2
    assert {name: refused(source) for name, source in sources.items() if refused(source)} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@triton.autotune([], [])\n@triton.jit\ndef f(): pass", [(1, "autotune")]),
        ("@triton.jit\n@triton.heuristics({})\ndef f(): pass", [(2, "heuristics")]),
        ("from triton import autotune as search", [(1, "autotune")]),
        ("def f(x):\n    p = tl.make_block_ptr(x)", [(2, "make_block_ptr")]),
        ("def f(x):\n    p = tl.make_tensor_descriptor(x)", [(2, "make_tensor_descriptor")]),
        ("from triton.tools.tensor_descriptor import TensorDescriptor", [(1, "TensorDescriptor")]),
        ("d = tensor_descriptor.TensorDescriptor.from_tensor(x, [1])", [(1, "TensorDescriptor")]),
        ("def f(x):\n    'No autotune.'\n    tl.load(x)", []),
    ],
)
def test_a_block_pointer_a_descriptor_or_a_search_is_found(source: str, found: list[tuple[int, str]]) -> None:
    assert refused(source) == found


# -- what each says of itself ----------------------------------------------------------------------------------------


def lacks_floor(source: str) -> bool:
    """Whether a module launches kernels and does not say what they have to move at least."""
    return bool(Launches(source).launches) and "Floor" not in (ast.get_docstring(ast.parse(source)) or "")


def test_every_module_that_launches_states_its_floor(repository: Path) -> None:
    sources = {file.name: file.read_text() for file in (repository / "kernels").glob("*.py")}
    assert {name for name, source in sources.items() if lacks_floor(source)} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("'Floor: 4 bytes.'\nkernel[(1,)](x)", False),
        ("'Words.'\nkernel[(1,)](x)", True),
        ("'Words.'\ndef f():\n    'Floor: 4 bytes.'\n    kernel[(1,)](x)", True),
        ("kernel[(1,)](x)", True),
        ("'Words.'\ntable[1].copy_(x)", False),
    ],
)
def test_a_launch_without_a_floor_is_found(source: str, found: bool) -> None:
    assert lacks_floor(source) == found


# -- compilations ----------------------------------------------------------------------------------------------------


def sweep_counts() -> None:
    """All launches that move bytes, over counts, places in tables of ids, and unit sizes of one shape of tile."""
    from avmp.kernels.tables import apply_table_changes
    from avmp.kernels.units import copy_units, gather_units, poison_units, scatter_units, zero_units

    for unit_bytes in (65_536, 65_536 + 16_384):
        for count in COUNTS:
            for lane_count in (1, 3, 16):
                lanes = torch.empty(lane_count, unit_bytes * 32, dtype=torch.uint8)
                ids = torch.zeros(MOST_COUNTS + 1, dtype=torch.int32)[count % 2 :][:count]
                packed = torch.empty(count, lane_count, unit_bytes, dtype=torch.uint8)
                copy_units(lanes, unit_bytes, ids, ids, first_valid_id=count % 2)
                gather_units(lanes, unit_bytes, ids, packed)
                scatter_units(lanes, unit_bytes, packed, ids)
                zero_units(lanes, unit_bytes, ids)
                poison_units(lanes, unit_bytes, ids)
            tables = torch.zeros(5000 + count, dtype=torch.int32)[count % 2 :]
            apply_table_changes(tables, torch.zeros(2, count, dtype=torch.int32))


def test_no_count_leads_to_a_compilation() -> None:
    assert compilations("tests.test_launchers:sweep_counts") == {
        "apply_table_changes_kernel": 1,
        "copy_units_kernel": 3,  # copying, gathering, scattering
        "fill_units_kernel": 1,
    }


# -- who runs --------------------------------------------------------------------------------------------------------


class OnGpu:
    """As much of an arena on a GPU as the choice of a backend looks at."""

    device = torch.device("cuda", 0)


def test_the_device_chooses_and_a_name_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, sizes = torch.zeros(1, 1024, dtype=torch.uint8), {"page": 256, "slot": 0}
    assert backends.make_backend(None, lanes, sizes).name == "torch"
    assert backends.make_backend("torch", lanes, sizes).name == "torch"
    assert backends.make_backend("triton", lanes, sizes).name == "triton"
    assert backends.make_backend(None, lanes.to("meta"), sizes).name == "torch"
    monkeypatch.setitem(backends.BACKENDS, "triton", lambda lanes, sizes: "triton")  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(backends.BACKENDS, "torch", lambda lanes, sizes: "torch")  # type: ignore[arg-type, return-value]
    assert backends.make_backend(None, OnGpu(), sizes) == "triton"  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.make_backend(None, OnGpu(), sizes) == "torch"  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="expected one of torch, triton"):
        backends.make_backend("cuda", lanes, sizes)


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, sizes = torch.zeros(1, 1024, dtype=torch.uint8), {"page": 256}
    with pytest.raises(InvalidArgument, match="on a meta tensor"):
        backends.make_backend("triton", lanes.to("meta"), sizes)
    monkeypatch.setattr("avmp.kernels.launch.INTERPRETED", False)
    with pytest.raises(InvalidArgument, match=r"on a cpu tensor.*TRITON_INTERPRET=1.*use backend 'torch'"):
        backends.make_backend("triton", lanes, sizes)


def test_without_triton_everything_but_its_backend_works(repository: Path) -> None:
    """Also: whoever does not use it does not load it."""
    program = """
import sys, torch
from avmp import backends
lanes = torch.zeros(1, 1024, dtype=torch.uint8)
assert backends.make_backend(None, lanes, {"page": 256}).name == "torch" and "triton" not in sys.modules
sys.modules["triton"] = None
assert backends.default_backend(torch.device("cuda")) == "torch"
try:
    backends.make_backend("triton", lanes, {"page": 256})
except backends.InvalidArgument as error:
    assert "triton cannot be imported here" in str(error), error
else:
    raise AssertionError("not refused")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
