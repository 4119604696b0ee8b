"""Who may import whom. The table below is the map of the project; a module that is not on it fails the test."""

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

import pytest

# Stages of the policy, lowest first: a module may import every earlier stage. Within a stage each string is one room;
# modules of one room may import each other, those of two rooms of one stage may not.
POLICY = (
    ("errors",),
    ("units text_table progress",),
    ("options",),
    ("config_fields model_configs geometry named_models",),
    ("lanes layout",),
    ("handles dirty_entries free_ranks",),
    ("effects", "page_pool"),
    ("migration", "sequences"),
    ("address_space",),
    ("ledger",),
    ("growth",),
    ("branching",),
    ("loose_units", "swapping", "batch_tables", "statistics", "verifier"),
    ("operations", "startup"),
    ("allocator",),
    ("workloads", "baselines"),
    ("replay", "serving", "plan", "paper"),
    ("cli __main__",),
)
FOUNDATION = {"errors", "units", "options"}
UP_TO_ALLOCATOR = {
    name for stage in POLICY[: POLICY.index(("allocator",)) + 1] for room in stage for name in room.split()
}

# What a cache pool is made of.
DEVICE_SIDE = {"views", "device_batch", "device_memory", "device_tables", "uploads", "host_swap", "backends", "ops"} | {
    "pool_checks",
}

# Everything outside the stages, each with all that it may import. Kernels get tensors and integers, never the policy.
OTHERS = {
    "environment": FOUNDATION,
    "kernels": FOUNDATION | {"kernels"},
    "backends": FOUNDATION | {"kernels"},
    "bounds": FOUNDATION | {"kernels", "backends"},
    "places": FOUNDATION,
    "schemas": FOUNDATION,
    "id_checks": FOUNDATION | {"bounds", "kernels"},
    "step_tables": FOUNDATION | {"bounds"},
    "registration": FOUNDATION | {"backends", "bounds", "id_checks", "places", "schemas", "step_tables"},
    "state_ops": FOUNDATION | {"registration", "step_tables"},
    "unit_ops": FOUNDATION | {"registration", "step_tables"},
    "ops": FOUNDATION | {"kernels", "backends", "registration", "step_tables", "state_ops", "unit_ops"},
    "compat": FOUNDATION | {"compat", "ops", "backends"},
    "views": UP_TO_ALLOCATOR | {"places"},
    "device_batch": UP_TO_ALLOCATOR | {"uploads", "device_tables", "bounds"},
    "device_memory": UP_TO_ALLOCATOR | {"places"},
    "device_tables": UP_TO_ALLOCATOR | {"bounds"},
    "uploads": UP_TO_ALLOCATOR | {"backends"},
    "host_swap": UP_TO_ALLOCATOR | {"backends"},
    "pool_checks": UP_TO_ALLOCATOR | {"bounds", "device_batch"},
    "cache_pool": UP_TO_ALLOCATOR | DEVICE_SIDE,
    "integrations": UP_TO_ALLOCATOR | {"integrations", "ops", "backends", "cache_pool", "device_batch", "views"},
    "demo": UP_TO_ALLOCATOR | {"demo", "ops", "backends", "cache_pool", "workloads"},
}

# The one exception: the command line starts these two, by an import inside the function, so that the other commands
# do not pay for them.
INSIDE_A_FUNCTION = {"cli": {"demo", "environment"}}

DEVICE_LIBRARIES = {"torch", "triton", "transformers"}


def allowed_imports() -> dict[str, set[str]]:
    allowed, below = {name: set(names) for name, names in OTHERS.items()}, set()
    for stage in POLICY:
        for room in stage:
            allowed |= {name: below | set(room.split()) for name in room.split()}
        below = below | {name for room in stage for name in room.split()}
    return allowed


ALLOWED = allowed_imports()
WITHOUT_TORCH = {name for stage in POLICY for room in stage for name in room.split()} | {"environment"}


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Dotted name of each import, and whether it stands inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}" if module == "avmp" else module, inside) for alias in node.names)
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module of the package, named by its first part below ``avmp``."""
    if module not in ALLOWED:
        return [f"{module} has no place in the table at the top of this file"]
    complaints = (complaint(module, name, inside) for name, inside in imports(ast.parse(source)))
    return [f"{module} imports {text}" for text in complaints if text]


def complaint(module: str, name: str, inside: bool) -> str | None:
    top, _, rest = name.partition(".")
    if top == "":
        return f"{name}: write it from avmp on"
    if top in {"kernels", "tests", "bench"}:
        return f"{name}: kernels are avmp.kernels; tests and bench are never imported"
    if top in DEVICE_LIBRARIES and module in WITHOUT_TORCH:
        return f"{name}, and has to work without it"
    target = rest.partition(".")[0]
    excepted = inside and target in INSIDE_A_FUNCTION.get(module, ())
    return name if top == "avmp" and target not in ALLOWED[module] | {"__version__"} and not excepted else None


def package_files(repository: Path) -> list[tuple[str, Path]]:
    """Every source file of the package but its entrance, with the first part of its module's name below ``avmp``."""
    avmp, kernels = repository / "avmp", repository / "kernels"
    policy = {file for file in avmp.rglob("*.py") if file.resolve().is_relative_to(avmp)} - {avmp / "__init__.py"}
    named = [(file.relative_to(avmp).with_suffix("").parts[0], file) for file in sorted(policy)]
    return named + [("kernels", file) for file in sorted(kernels.rglob("*.py"))]


def test_every_import_follows_the_map(repository):
    files = package_files(repository)
    assert len(files) > 5
    wrong = {str(file): violations(module, file.read_text()) for module, file in files}
    assert {file: found for file, found in wrong.items() if found} == {}


def test_the_entrance_imports_no_module_of_the_package_when_it_is_loaded(repository):
    body = ast.parse((repository / "avmp" / "__init__.py").read_text()).body
    loaded = [node for node in body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    assert {name for name, _ in imports(ast.Module(loaded, []))} == {"__future__", "importlib", "typing"}


def test_nothing_imports_the_kernels_folder_by_its_bare_name(repository):
    files = [file for folder in ("avmp", "bench", "kernels", "tests") for file in (repository / folder).rglob("*.py")]
    found = [(file.name, name) for file in files for name, _ in imports(ast.parse(file.read_text()))]
    assert [(file, name) for file, name in found if name.split(".")[0] == "kernels"] == []


def test_the_kernels_folder_is_no_package_and_the_link_to_it_is_relative(repository):
    assert not (repository / "kernels" / "__init__.py").exists()
    assert (repository / "avmp" / "kernels").readlink() == Path("../kernels")


def test_setup_cfg_lists_every_package(repository):
    """A folder that is not listed would be missing from what gets installed, and from nothing else."""
    setup = configparser.ConfigParser()
    setup.read(repository / "setup.cfg")
    listed = setup["options"]["packages"].split()
    folders = {module.parent for module in (repository / "avmp").glob("**/*.py")} | {repository / "avmp" / "kernels"}
    assert sorted(listed) == sorted(".".join(folder.relative_to(repository).parts) for folder in folders)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("allocator", "import torch"),
        ("geometry", "def f():\n    from torch import nn"),
        ("geometry", "from avmp.layout import Layout"),
        ("geometry", "import avmp.allocator"),
        ("geometry", "from avmp import Geometry"),
        ("geometry", "from . import layout"),
        ("migration", "if True:\n    from avmp.sequences import Sequences"),
        ("workloads", "from avmp.baselines.static import Static"),
        ("kernels", "from avmp.allocator import Allocator"),
        ("kernels", "from avmp.ops import paged_attention"),
        ("ops", "from avmp.cache_pool import CachePool"),
        ("cli", "from avmp.environment import collect"),
        ("cli", "def f():\n    from avmp.ops import write_kv"),
        ("replay", "import bench.policy"),
        ("somewhere", ""),
    ],
)
def test_an_arrow_that_goes_the_wrong_way_is_found(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("allocator", "import numpy\nfrom avmp.layout import Layout\nfrom avmp.address_space import AddressSpace"),
        ("cli", "from avmp import __version__\ndef f():\n    from avmp.environment import collect"),
        ("kernels", "import torch\nimport triton\nfrom avmp.kernels.reference import attention"),
        ("cache_pool", "import torch\nfrom avmp.allocator import Allocator\nfrom avmp import ops"),
    ],
)
def test_an_arrow_that_goes_the_right_way_is_let_through(module, source):
    assert violations(module, source) == []
