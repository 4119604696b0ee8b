"""How much memory an arena gets, and where it comes from."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch

from avmp.errors import InvalidArgument
from avmp.layout import ARENA_ALIGNMENT, Layout
from avmp.places import Place, placed
from avmp.units import parse_bytes


def resolve_memory(memory: int | str | float, device: torch.device) -> int:
    """Bytes for an arena: a size ("8GiB" or an integer), or a share (a float above 0, at most 1) of what is free on
    the device at this moment; tables and staging come on top, so leave them room. Raises InvalidArgument."""
    if isinstance(memory, float):
        if not 0 < memory <= 1:
            raise InvalidArgument(f"memory={memory}: expected a share of the free memory above 0 and at most 1")
        return int(memory * free_bytes(device))
    return parse_bytes(memory)


def free_bytes(device: torch.device) -> int:
    """Bytes that are free: of a GPU through NVML where it answers, else through torch; of a CPU, the memory that the
    system would give without swapping. Raises InvalidArgument for devices that do not tell."""
    if device.type == "cpu":
        return _free_host_bytes()
    if device.type == "cuda":
        answer = _free_bytes_by_nvml(device)
        return answer if answer is not None else int(torch.cuda.mem_get_info(device)[0])
    raise InvalidArgument(f"memory as a share: {device.type} devices do not tell what is free; give a size")


def _free_bytes_by_nvml(device: torch.device) -> int | None:
    """None where NVML is missing or does not know the device."""
    try:
        import pynvml
    except ImportError:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return None


def _free_host_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return min(int(available.split()[1]) * 1024, _free_bytes_of_container())


def _free_bytes_of_container() -> int:
    """What the limit of this control group leaves; a very large number where there is none."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return 2**63


def allocate_arena(layout: Layout, device: torch.device) -> torch.Tensor:
    """The arena, uint8 ``[lane_count, lane_bytes]``: contiguous, its base 2 MiB-aligned, its null area zero.

    One tensor, allocated once; up to 2 MiB more than the arena for the alignment. On a CPU in huge pages, where the
    system has them to give.
    """
    size = layout.lane_count * layout.lane_bytes
    memory = torch.empty(size + ARENA_ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % ARENA_ALIGNMENT if device.type != "meta" else 0
    lanes = memory[skip : skip + size].view(layout.lane_count, layout.lane_bytes)
    advise_huge_pages(lanes)
    lanes[:, : layout.null_bytes // layout.lane_count].zero_()
    return placed(lanes, Place(memory, skip))


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Asks for huge pages under a contiguous tensor on a CPU that nobody has touched yet: units lie scattered, and most
    of what small pages cost is to find them. Advice only, taken where Linux has transparent huge pages; bytes are the
    same in any case."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or memory.device.type != "cpu":
        return
    skip = -memory.data_ptr() % ARENA_ALIGNMENT  # a huge page
    size = (memory.nbytes - skip) // ARENA_ALIGNMENT * ARENA_ALIGNMENT
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr() + skip), ctypes.c_size_t(size), advice)
