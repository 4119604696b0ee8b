"""The gate on machine code: what it lets through and what it finds; the committed table is that of these kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.offline import MULTIPROCESSORS, TARGETS, measured_amd, resident_programs
from bench.static_entries import Limits, complaints, entries

GOOD: dict[str, Any] = {
    "spills": 0,
    "registers": 40,
    "shared": 0,
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
    ],
)
def test_what_the_gate_finds(change: dict[str, Any], complaint: str | None) -> None:
    assert complaints(GOOD | change, COPY) == ([complaint] if complaint else [])


def test_matrix_instructions_are_asked_for() -> None:
    assert complaints(GOOD, Limits(matrix=8)) == ["0 matrix instructions, expected 8"]
    assert complaints(GOOD | {"matrix": {"HMMA.16816": 8}}, Limits(matrix=8)) == []


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
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 1
    .vgpr_count:     26
    .vgpr_spill_count: 2
"""
    row = measured_amd(assembly)
    assert (row["registers"], row["spills"], row["stores"]) == (26, 3, {"16": 1})
    assert (row["loads"], row["async"]) == ({"32": 1, "128": 1}, {"128": 2})
    assert row["matrix"] == {"v_mfma_f32_32x32x8_bf16_1k": 1}


def test_the_committed_table_is_of_these_kernels_and_keeps_every_limit(repository: Path) -> None:
    record = json.loads((repository / "bench" / "results" / "static.json").read_text(encoding="utf-8"))
    rows = {(row["name"], row["target"]): row for row in record["rows"]}
    wanted = {(entry.name, target): entry for entry in entries() for target in entry.targets}
    assert rows.keys() == wanted.keys(), "run python -m bench.static --json bench/results/static.json"
    assert {key: complaints(row, wanted[key].limits) for key, row in rows.items()} == {key: [] for key in rows}


def run_gate(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # the gate has to turn it off by itself
    command = [sys.executable, "-m", "bench.static", *arguments]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)


def test_a_kernel_is_compiled_and_measured(repository: Path, tmp_path: Path) -> None:
    done = run_gate(repository, "--only", "copy and move, 65,536", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["target"] for row in rows] == list(TARGETS)
    assert all(row["loads"]["128"] == row["stores"]["128"] >= 2 for row in rows)
    assert len(done.stdout.splitlines()) == len(rows) + 2


@pytest.mark.slow
def test_every_kernel_keeps_its_limits(repository: Path) -> None:
    done = run_gate(repository)
    assert done.returncode == 0, done.stdout + done.stderr
