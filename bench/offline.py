"""Kernels compiled without a GPU, and what can be read off the machine code.

Triton compiles for any target that it is given. Registers and shared memory are those of the finished binary
(cuobjdump, or the metadata of AMD's assembly); spills, accesses and matrix instructions are counted in the
disassembly, once each, however often a loop runs them. A spill is an access to a thread's own memory: what AMD's
compiler keeps of scalar registers in the lanes of vector registers (``scalar_spills``) costs an instruction each way
and no memory, and is counted apart.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

TARGETS = ("sm_86", "sm_90", "sm_100", "gfx942")
Widths = dict[str, int]


@dataclass(frozen=True)
class Constant:
    """A compile-time value, for those that are strings; anything else but a string is one anyway."""

    value: Any


@dataclass(frozen=True)
class Multiprocessor:
    """What limits how many programs are resident: registers in all and the step they are given out in per warp, warps,
    programs, bytes of shared memory, and those that each program takes on top."""

    registers: int
    step: int
    warps: int
    programs: int
    shared: int
    overhead: int
    lanes: int = 32


MULTIPROCESSORS = {
    "sm_86": Multiprocessor(65_536, 256, 48, 16, 100 * 1024, 1024),
    "sm_90": Multiprocessor(65_536, 256, 64, 32, 228 * 1024, 1024),
    "sm_100": Multiprocessor(65_536, 256, 64, 32, 228 * 1024, 1024),
    "gfx942": Multiprocessor(4 * 512 * 64, 8 * 64, 32, 32, 64 * 1024, 0, lanes=64),
}


MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA", "DMMA")


def prepare() -> None:
    """Must come before anything imports triton: no interpreter, no cache of earlier compilations."""
    if "triton" in sys.modules:
        raise RuntimeError("triton is loaded already: whether it interprets or compiles is settled")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="triton-static-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default differs between versions


def compiled(kernel: str, arguments: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    """The kernel ``module:name`` for a target. An argument that is a string names a type (``*bf16``, ``i32``), with
    ``:16`` behind it where its value is a multiple of 16; others are constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = kernel.split(":")
    function = getattr(import_module(module), name)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(function.params):
        value = arguments.get(parameter.name, parameter.default)
        if isinstance(value, str):
            kind, _, multiple = value.partition(":")
            signature[parameter.name] = kind
            if multiple:
                attributes[(index,)] = [["tt.divisibility", int(multiple)]]
        else:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value.value if isinstance(value, Constant) else value
    if unknown := arguments.keys() - signature.keys():
        raise ValueError(f"{kernel} has no argument {', '.join(sorted(unknown))}")
    backend, architecture, warp = ("hip", target, 64) if target.startswith("gfx") else ("cuda", int(target[3:]), 32)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(backend, architecture, warp), options=options)


def measured(binary: Any, target: str) -> dict[str, Any]:
    """What a compiled kernel is made of."""
    row = measured_amd(binary.asm["amdgcn"]) if target.startswith("gfx") else measured_nvidia(binary.asm["cubin"])
    warps, shared = binary.metadata.num_warps, binary.metadata.shared
    row |= {"warps": warps, "stages": binary.metadata.num_stages, "shared": shared}
    row["programs"] = resident_programs(target, row["registers"], warps, shared)
    row["occupancy"] = round(row["programs"] * warps / MULTIPROCESSORS[target].warps, 2)
    return row


def resident_programs(target: str, registers: int, warps: int, shared: int) -> int:
    """Programs that a multiprocessor holds at once."""
    limits = MULTIPROCESSORS[target]
    per_warp = -(-max(registers, 1) * limits.lanes // limits.step) * limits.step
    by_registers = limits.registers // per_warp // warps
    by_shared = limits.shared // (shared + limits.overhead) if shared + limits.overhead else limits.programs
    return min(by_registers, limits.warps // warps, limits.programs, by_shared)


def measured_nvidia(cubin: bytes) -> dict[str, Any]:
    """Counts from a cubin, with the tools that come with triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {usage!r}")
    pattern = r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
    counts = Counter(re.findall(pattern, code, re.MULTILINE))
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": sum(number for name, number in counts.items() if name.split(".")[0] in ("STL", "LDL")),
        "scalar_spills": 0,
        "loads": _widths(counts, "LDG"),
        "async": _widths(counts, "LDGSTS"),
        "stores": _widths(counts, "STG"),
        "bulk": _named(counts, ("UTMALDG", "UTMASTG", "UBLKCP")),
        "matrix": _named(counts, MATRIX),
        "instructions": sum(counts.values()),
    }


def measured_amd(assembly: str) -> dict[str, Any]:
    """Counts from the assembly of an AMD target; its metadata stands at the end."""
    lines = re.findall(r"^\s+([a-z]\w*_\w+)(.*)", assembly, re.MULTILINE)
    counts = Counter(name + "_lds" * operands.rstrip().endswith(" lds") for name, operands in lines)

    def metadata(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[-1])

    return {
        "registers": metadata("vgpr_count"),
        "stack": metadata("private_segment_fixed_size"),
        "spills": max(metadata("vgpr_spill_count"), sum(counts[name] for name in counts if name[:8] == "scratch_")),
        "scalar_spills": metadata("sgpr_spill_count"),
        "loads": _amd_widths(counts, "load", to_shared=False),
        "async": _amd_widths(counts, "load", to_shared=True),
        "stores": _amd_widths(counts, "store", to_shared=False),
        "bulk": {},
        "matrix": _named(counts, ("v_mfma", "v_smfmac"), whole=False),
        "instructions": sum(number for name, number in counts.items() if name[:2] in ("v_", "s_") or "_load" in name),
    }


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _widths(counts: Counter[str], instruction: str) -> Widths:
    """Bits of each access, as ``LDG.E.128.CONSTANT`` says them; 32 where it says nothing."""
    spoken = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    found: Counter[int] = Counter()
    for name, number in counts.items():
        first, *rest = name.split(".")
        if first == instruction:
            found[next((spoken[part] for part in rest if part in spoken), 32)] += number
    return _sorted(found)


def _amd_widths(counts: Counter[str], direction: str, to_shared: bool) -> Widths:
    spoken = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8}
    found: Counter[int] = Counter()
    for name, number in counts.items():
        of_kind = name.startswith((f"global_{direction}", f"buffer_{direction}", f"flat_{direction}"))
        if of_kind and ("_lds" in name) == to_shared:
            found[next(bits for part, bits in spoken.items() if part in name)] += number
    return _sorted(found)


def _named(counts: Counter[str], names: Iterable[str], whole: bool = True) -> Widths:
    """Instructions of these names with their shape, as ``HMMA.16816``."""
    found: Counter[str] = Counter()
    for name, number in counts.items():
        first, *rest = name.split(".")
        if (first in names) if whole else first.startswith(tuple(names)):
            found[".".join([first, *rest[:1]])] += number
    return dict(sorted(found.items()))


def _sorted(found: Counter[int]) -> Widths:
    return {str(bits): number for bits, number in sorted(found.items())}
