"""The environment report: what it says with and without a driver, and that nothing missing makes it fail."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import avmp
from avmp.environment import collect, format_report


class NVMLError(Exception):
    pass


class Driver(SimpleNamespace):
    """Stands in for the module pynvml: one device; ``broken`` names the functions that the driver refuses."""

    NVMLError = NVMLError

    def __init__(self, devices: int = 1, broken: tuple[str, ...] = ()) -> None:
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": devices,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=141 * 2**30),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlSystemGetDriverVersion": "580.1",
        }
        super().__init__(**{name: self.answer(value, name in broken) for name, value in answers.items()})

    def answer(self, value, broken):
        def ask(*arguments):
            if broken:
                raise NVMLError("refused")
            return value

        return ask


@pytest.fixture
def machine(monkeypatch):
    """A machine with the given driver and packages, as the report sees it."""

    def machine(driver, **versions):
        installed = {"torch": "2.13.0", "triton": "3.9.0"} | versions
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr("avmp.environment._version", lambda name: installed.get(name))

    for variable in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    return machine


def test_this_machine():
    report = collect()
    assert report["avmp"] == avmp.__version__
    assert report["packages"]["numpy"]
    assert report["backend"] in ("triton", "torch", "none")
    assert json.loads(json.dumps(report)) == report
    assert dict(line.split(maxsplit=1) for line in format_report(report).splitlines())["python"] == report["python"]


def test_a_device(machine):
    machine(Driver())
    report = collect()
    assert report["devices"] == [
        {"index": 0, "name": "NVIDIA H200", "memory_bytes": 141 * 2**30, "compute_capability": "9.0"}
    ]
    assert (report["driver"], report["devices_note"], report["backend"]) == ("580.1", None, "triton")
    text = format_report(report)
    assert "NVIDIA H200, 141.0 GiB, compute capability 9.0" in text
    assert "580.1" in text


@pytest.mark.parametrize(
    ("driver", "note"),
    [
        (None, "nvidia-ml-py is not installed"),
        (Driver(broken=("nvmlInit",)), "no NVIDIA driver answers (refused)"),
        (Driver(broken=("nvmlDeviceGetCount",)), "refused to list its devices"),
        (Driver(devices=0), "none"),
    ],
)
def test_no_device_is_reported_and_no_error(machine, driver, note):
    machine(driver)
    report = collect()
    assert report["devices"] == []
    assert note in report["devices_note"] and note in format_report(report)
    assert report["backend"] == "torch"


def test_a_device_that_does_not_answer_every_question(machine):
    machine(Driver(broken=("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetName")))
    report = collect()
    assert report["backend"] == "triton"
    assert "unknown, memory unknown" in format_report(report)


@pytest.mark.parametrize(
    ("versions", "visible", "backend", "reason"),
    [
        ({}, None, "triton", "device is visible"),
        ({}, "0", "triton", "device is visible"),
        ({}, "", "torch", "hides every device"),
        ({}, "-1", "torch", "hides every device"),
        ({"torch": "2.13.0+cpu"}, None, "torch", "without CUDA"),
        ({"triton": None}, None, "torch", "triton is not installed"),
        ({"torch": None}, None, "none", "torch is not installed"),
    ],
)
def test_the_backend_and_why(machine, monkeypatch, versions, visible, backend, reason):
    machine(Driver(), **versions)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    report = collect()
    assert report["backend"] == backend
    assert reason in report["backend_reason"]
    assert f"{backend} (" in format_report(report)


def test_the_variables_that_matter_are_part_of_the_report(machine, monkeypatch):
    machine(Driver())
    monkeypatch.setenv("AVMP_DEBUG", "2")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = collect()
    assert report["variables"]["AVMP_DEBUG"] == "2"
    assert report["variables"]["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" in format_report(report)


def test_the_command(repository):
    done = subprocess.run(
        [sys.executable, "-m", "avmp", "env"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert avmp.__version__ in done.stdout and "backend" in done.stdout
