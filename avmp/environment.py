"""What one needs to know about a machine to understand a report from it: ``python -m avmp env``.

Nothing heavy is imported: versions come from the installed distributions, devices from the driver through NVML.
Whatever is missing is reported as missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from avmp import __version__

_DISTRIBUTIONS = ("numpy", "torch", "triton", "nvidia-ml-py", "transformers")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")


def collect() -> dict[str, Any]:
    """Versions, devices, the variables that matter, and the backend that tensors would get by default.

    Every value is a string, number, list, dict or None, so that it can be printed as JSON. ``devices`` lists what the
    driver has, whether or not CUDA_VISIBLE_DEVICES hides it; ``devices_note`` says why the list is empty.
    """
    packages = {name: _version(name) for name in _DISTRIBUTIONS}
    driver, devices, note = _nvidia_devices()
    backend, reason = _backend(packages, devices)
    return {
        "avmp": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "driver": driver,
        "devices": devices,
        "devices_note": note,
        "variables": _variables(),
        "backend": backend,
        "backend_reason": reason,
    }


def format_report(report: dict[str, Any]) -> str:
    """The report as lines of text, one fact a line."""
    facts = [(name, report[name]) for name in ("avmp", "python", "platform")]
    facts += [(name, version or "not installed") for name, version in report["packages"].items()]
    if report["driver"]:
        facts.append(("NVIDIA driver", report["driver"]))
    facts += [(f"device {device['index']}", _described(device)) for device in report["devices"]]
    if report["devices_note"]:
        facts.append(("devices", report["devices_note"]))
    facts += list(report["variables"].items())
    facts.append(("backend", f"{report['backend']} ({report['backend_reason']})"))
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def _described(device: dict[str, Any]) -> str:
    memory = "memory unknown" if device["memory_bytes"] is None else f"{device['memory_bytes'] / 2**30:.1f} GiB"
    capability = device["compute_capability"]
    return f"{device['name'] or 'unknown'}, {memory}" + (f", compute capability {capability}" if capability else "")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _variables() -> dict[str, str]:
    names = sorted(name for name in os.environ if name in _VARIABLES or name.startswith("AVMP_"))
    return {name: os.environ[name] for name in names}


def _nvidia_devices() -> tuple[str | None, list[dict[str, Any]], str | None]:
    """Driver version, devices, and where there are none, why."""
    try:
        import pynvml
    except ImportError:
        return None, [], "unknown: the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, [], f"none: no NVIDIA driver answers ({error})"
    try:
        devices = [_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return _text(_asked(pynvml, pynvml.nvmlSystemGetDriverVersion)), devices, None if devices else "none"
    except pynvml.NVMLError as error:
        return None, [], f"unknown: the NVIDIA driver refused to list its devices ({error})"
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _asked(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _asked(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return {
        "index": index,
        "name": _text(_asked(pynvml, pynvml.nvmlDeviceGetName, handle)),
        "memory_bytes": None if memory is None else int(memory.total),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
    }


def _asked(pynvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer, or None: which questions a device supports depends on its kind."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _backend(packages: dict[str, str | None], devices: list[dict[str, Any]]) -> tuple[str, str]:
    """The backend that tensors get by default, and why; it follows the device that torch can put them on."""
    torch = packages["torch"]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if torch is None:
        return "none", "torch is not installed; planning and replay do not need it"
    if not devices:
        return "torch", "no NVIDIA device is visible; tensors are on the CPU"
    if hidden == "" or hidden.startswith("-"):
        return "torch", "CUDA_VISIBLE_DEVICES hides every device; tensors are on the CPU"
    if torch.endswith("+cpu"):
        return "torch", f"torch {torch} is built without CUDA; tensors are on the CPU"
    if packages["triton"] is None:
        return "torch", "triton is not installed"
    return "triton", "an NVIDIA device is visible"
