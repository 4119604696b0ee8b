"""The gate on machine code: what it lets through and what it finds; the committed table is that of these kernels."""

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench.offline import MULTIPROCESSORS, TARGETS, measured_amd, resident_programs
from bench.static import entries
from bench.static_entries import Limits, complaints

GOOD: dict[str, Any] = {
    "spills": 0,
    "scalar_spills": 0,
    "registers": 40,
    "shared": 0,
    "programs": 6,
    "loads": {"32": 2, "128": 4},
    "async": {},
    "stores": {"128": 4},
    "matrix": {},
}
COPY = Limits(wide_loads=4, wide_stores=4, narrowest_load=32, narrowest_store=128, registers=40, shared=0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"loads": {"32": 2}, "async": {"128": 4}}, None),
        ({"spills": 3}, "3 spills"),
        ({"loads": {"32": 18}}, "0 loads of 128 bits, expected 4"),
        ({"loads": {"16": 1, "128": 4}}, "1 loads of 16 bits"),
        ({"stores": {"64": 1, "128": 4}}, "1 stores of 64 bits"),
        ({"stores": {"128": 3}}, "3 stores of 128 bits, expected 4"),
        ({"registers": 41}, "41 registers, expected at most 40"),
        ({"shared": 512}, "512 shared, expected at most 0"),
        ({"scalar_spills": 2}, "2 scalar spills, expected at most 0"),
        ({"programs": 0}, "40 registers and 0 bytes of shared memory: no program fits"),
    ],
)
def test_what_the_gate_finds(change: dict[str, Any], complaint: str | None) -> None:
    assert complaints(GOOD | change, COPY) == ([complaint] if complaint else [])


def test_matrix_instructions_are_asked_for() -> None:
    assert complaints(GOOD, Limits(matrix=8)) == ["matrix instructions {}, expected 8 of any unit"]
    assert complaints(GOOD | {"matrix": {"HMMA.16816": 8}}, Limits(matrix=8)) == []
    wanted = Limits(matrix=8, unit="HGMMA")
    assert complaints(GOOD | {"matrix": {"HGMMA.64": 8}}, wanted) == []
    both = {"HGMMA.64": 8, "HMMA.16816": 2}
    assert complaints(GOOD | {"matrix": both}, wanted) == [f"matrix instructions {both}, expected 8 of HGMMA"]


def test_copies_are_counted_and_all_of_them_wide() -> None:
    copied = GOOD | {"async": {"64": 2, "128": 12}}
    assert complaints(copied, Limits(copies=12)) == ["2 copies of 64 bits"]
    assert complaints(GOOD, Limits(copies=12)) == ["0 copies of 128 bits, expected 12"]


def test_what_counts_as_wide_can_be_narrower() -> None:
    copied = GOOD | {"loads": {}, "async": {"32": 1, "64": 8}}
    wanted = Limits(wide_loads=9, copies=8, vector=64)
    assert complaints(copied, wanted) == ["8 loads of 64 bits, expected 9", "1 copies of 32 bits"]
    assert complaints(copied | {"async": {"64": 9}}, wanted) == []


def test_another_version_of_triton_is_allowed_more_registers_and_nothing_else() -> None:
    assert complaints(GOOD | {"registers": 58}, COPY, slack=1.45) == []
    assert complaints(GOOD | {"registers": 59, "spills": 1, "shared": 1}, COPY, slack=1.45) == [
        "1 spills",
        "59 registers, expected at most 40",
        "1 shared, expected at most 0",
    ]


def test_resident_programs() -> None:
    assert resident_programs("sm_90", registers=32, warps=8, shared=0) == 8
    assert resident_programs("sm_90", registers=33, warps=8, shared=0) == 6
    assert resident_programs("sm_86", registers=16, warps=8, shared=0) == 6
    assert resident_programs("sm_86", registers=80, warps=4, shared=37_888) == 2
    assert resident_programs("gfx942", registers=128, warps=4, shared=0) == 4
    assert set(MULTIPROCESSORS) == set(TARGETS)


def test_amd_assembly_is_read() -> None:
    assembly = """
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_dword v1, s[0:3], 0 offen
\tbuffer_load_dwordx4 v1, s[0:3], 0 offen lds
\tglobal_load_lds_dwordx4 v[0:1], off
\tglobal_store_short v[0:1], v2, off
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\tv_writelane_b32 v40, s0, 1
\tscratch_store_dword off, v1, off offset:4
\tscratch_load_dword v1, off, off offset:4
\tscratch_load_dwordx4 v[0:3], off, off offset:8
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 1
    .vgpr_count:     26
    .vgpr_spill_count: 2
"""
    row = measured_amd(assembly)
    assert (row["registers"], row["spills"], row["scalar_spills"], row["stores"]) == (26, 3, 1, {"16": 1})
    assert measured_amd(assembly.replace("scratch_", "ds_"))["spills"] == 2  # the compiler's own count
    assert (row["loads"], row["async"]) == ({"32": 1, "128": 1}, {"128": 2})
    assert row["matrix"] == {"v_mfma_f32_32x32x8_bf16_1k": 1}


RECORD = "python -m bench.static --json bench/results/static.json"


def committed(repository: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((repository / "bench/results/static.json").read_text(encoding="utf-8"))
    return record


def test_the_committed_table_is_of_these_kernels_and_keeps_every_limit(repository: Path) -> None:
    rows = {(row["name"], row["target"]): row for row in committed(repository)["rows"]}
    wanted = {(entry.name, target): entry for entry in entries() for target in entry.targets}
    assert rows.keys() == wanted.keys(), f"run {RECORD}"
    assert {key: complaints(row, wanted[key].limits) for key, row in rows.items()} == {key: [] for key in rows}


def launched(sources: dict[str, str]) -> set[str]:
    """``module:name`` of every kernel that is launched, ``name[grid](...)``, in these modules of the kernels."""
    found = set()
    for module, source in sources.items():
        tree = ast.parse(source)
        homes = {node.name: module for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("avmp.kernels."):
                homes |= {alias.asname or alias.name: node.module for alias in node.names}
        names = [
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        ]
        found |= {f"{homes[name]}:{name}" for name in names if name in homes}
    return found


def test_every_kernel_that_is_launched_has_an_entry(repository: Path) -> None:
    sources = {f"avmp.kernels.{file.stem}": file.read_text() for file in (repository / "kernels").glob("*.py")}
    found = launched(sources)
    assert len(found) > 8 and {name for name in found if name.endswith("kernel")} == found
    assert found - {entry.kernel for entry in entries()} == set()


def test_launches_are_found() -> None:
    module = "avmp.kernels.some"
    source = "from avmp.kernels.other import a\ndef b(): pass\na[grid](1)\nif 1:\n    b[2, 3](x)\ntable[0](y)"
    assert launched({module: source}) == {"avmp.kernels.other:a", f"{module}:b"}


def run_gate(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # the gate has to turn it off by itself
    command = [sys.executable, "-m", "bench.static", *arguments]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)


def test_a_kernel_is_compiled_and_measured(repository: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "rows.json")
    done = run_gate(repository, "--only", "copy and move, 65,536", "--jobs", "1", "--json", table)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["target"] for row in rows] == list(TARGETS)
    assert all(row["loads"]["128"] == row["stores"]["128"] >= 2 for row in rows)
    assert len(done.stdout.splitlines()) == len(rows) + 2


def test_attention_is_compiled_and_keeps_its_limits(repository: Path, tmp_path: Path) -> None:
    """One entry of some two hundred."""
    table = tmp_path / "rows.json"
    done = run_gate(repository, "--only", "decode, virtual", "--target", "sm_90", "--jobs", "1", "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(table.read_text(encoding="utf-8"))["rows"]
    assert row["async"] == {"128": 32} and row["spills"] == 0


MEASURED = ("registers", "spills", "scalar_spills", "loads", "stores", "async", "matrix")


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Where two tables are not of the same machine code: nothing to compare if another version of triton made one."""
    if found["triton"] != recorded["triton"]:
        return []
    rows = {(row["name"], row["target"]): row for row in recorded["rows"]}
    return [
        f"{row['name']}, {row['target']}: {what} {row[what]}, recorded {old[what]}"
        for row in found["rows"]
        for old in [rows[row["name"], row["target"]]]
        for what in MEASURED
        if row[what] != old[what]
    ]


def test_a_table_that_is_out_of_date_is_found() -> None:
    row = GOOD | {"name": "copy", "target": "sm_90"}
    recorded = {"triton": "3.9.0", "rows": [row | {"loads": {"128": 2}, "instructions": 9}]}
    found = {"triton": "3.9.0", "rows": [row]}
    assert differences(found, found) == []
    assert differences(found, recorded) == ["copy, sm_90: loads {'32': 2, '128': 4}, recorded {'128': 2}"]
    assert differences(found | {"triton": "3.6.0"}, recorded) == []


@pytest.mark.slow
def test_every_kernel_keeps_its_limits_and_has_the_code_that_the_table_says(repository: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    done = run_gate(repository, "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(table.read_text(encoding="utf-8"))
    assert found["triton"] == version("triton")
    different = differences(found, committed(repository))
    assert not different, "\n".join([f"out of date: run {RECORD}", *different])
