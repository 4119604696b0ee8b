"""How long the device takes for a call, and in what state it was meanwhile.

A call is captured into a CUDA graph, so that no time of the host is in the figure, and replayed between two events.
Before each replay a buffer several times the size of the L2 cache is read: nothing of the last replay is left there,
and nothing waits to be written back. What cannot be captured is called as it is, and its figure says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
SECONDS = 0.12
"""Of one measurement, about."""
LEAST_REPETITIONS, MOST_REPETITIONS = 7, 50
HOST_LOOPS, HOST_CALLS = 5, 100
"""Fewer calls than a stream takes before it makes the host wait."""

THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
NO_MEASUREMENT = {"median_us": None, "least_us": None, "repetitions": 0, "captured": None, "sensors": None}


class Sensors:
    """Clocks, temperature, power and reasons to throttle, from the driver through NVML; ``note`` says why there are
    none."""

    def __init__(self, uuid: str | None) -> None:
        self.note: str | None = None
        if uuid is None:
            self.note = "no NVIDIA device"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, _handle(pynvml, uuid)
        except Exception as error:  # its absence, or any refusal of the driver: figures are taken all the same
            self.note = f"{type(error).__name__}: {error}"

    def read(self) -> dict[str, Any] | None:
        """MHz, degrees Celsius, watts; each None where the driver does not say."""
        if self.note is not None:
            return None
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "celsius": self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "watts": None if power is None else power / 1000,
            "throttle": None if reasons is None else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit],
        }

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, question)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None


def _handle(nvml: Any, uuid: str) -> Any:
    """The device of that UUID: NVML counts devices differently where CUDA_VISIBLE_DEVICES hides some."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except nvml.NVMLError:
        if nvml.nvmlDeviceGetCount() != 1:
            raise
        return nvml.nvmlDeviceGetHandleByIndex(0)


class Timer:
    """Times calls on a CUDA device. With ``dry``, carries them out once and measures nothing."""

    def __init__(self, device: torch.device, sensors: Sensors, dry: bool) -> None:
        self.dry, self._sensors = dry, sensors
        if not dry:
            self._lines = torch.zeros(FLUSH_BYTES // 4, device=device)
            self._sink = torch.zeros(1, device=device)

    def measure(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Median and least µs, how often, whether captured (or why not), and the sensors under way."""
        if self.dry:
            call()
            return dict(NO_MEASUREMENT)
        call()  # compiles
        replay, captured = _captured(call)
        self._times(replay, 1)
        one = self._times(replay, 2)[0][-1] + FLUSH_BYTES / 2e12
        count = min(max(int(SECONDS / one), LEAST_REPETITIONS), MOST_REPETITIONS)
        seconds, sensors = self._times(replay, count)
        return {
            "median_us": round(statistics.median(seconds) * 1e6, 3),
            "least_us": round(min(seconds) * 1e6, 3),
            "repetitions": count,
            "captured": captured,
            "sensors": sensors,
        }

    def _times(self, replay: Callable[[], Any], count: int) -> tuple[list[float], dict[str, Any] | None]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in marks:
            torch.sum(self._lines, 0, keepdim=True, out=self._sink)
            begin.record()
            replay()
            end.record()
        sensors = self._sensors.read()  # while the device is at work
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks], sensors

    def host(self, call: Callable[[], Any]) -> dict[str, Any]:
        """µs of the host per call, none of which waits for the device: median and least over loops of many."""
        call()
        if self.dry:
            return {"median_us": None, "least_us": None, "calls": 0}
        loops = []
        for _ in range(HOST_LOOPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            loops.append((time.perf_counter() - started) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
        return {
            "median_us": round(statistics.median(loops), 3),
            "least_us": round(min(loops), 3),
            "calls": HOST_LOOPS * HOST_CALLS,
        }


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """The call as a graph, or itself, with True or why it could not be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        return call, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return graph.replay, True
