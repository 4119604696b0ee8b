"""How long the device takes for a call, and in what state it was meanwhile.

A call is captured into a CUDA graph, so that no time of the host is in the figure, and replayed between two events.
Before each replay a buffer several times the size of the L2 cache is read: nothing of the last replay is left there,
and nothing waits to be written back. The device is kept at work from long before the first replay that counts until
its state has been read. What cannot be captured is called as it is, and its figure says so.
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
WARM_SECONDS = 0.05
"""Of replays before those that count: a device that has idled raises its clocks within some milliseconds."""
CHUNK_SECONDS = 0.02
"""Of replays that are queued at a time: more than the driver takes to answer what ``Sensors`` asks."""
LEAST_REPETITIONS, MOST_REPETITIONS = 7, 1000
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
        seconds, sensors = self._times(replay)
        return {
            "median_us": round(statistics.median(seconds) * 1e6, 3),
            "least_us": round(min(seconds) * 1e6, 3),
            "repetitions": len(seconds),
            "captured": captured,
            "sensors": sensors,
        }

    def _times(self, replay: Callable[[], Any]) -> tuple[list[float], dict[str, Any] | None]:
        """Seconds of each replay after the first WARM_SECONDS, and the sensors, read before the device has idled."""
        self._queue(replay, 1)
        ((begin, _), (_, end)) = self._queue(replay, 2)
        end.synchronize()
        chunk = min(max(int(CHUNK_SECONDS / (_seconds(begin, end) / 2)), 1), MOST_REPETITIONS)
        under_way, times, counted = self._queue(replay, chunk), list[float](), 0.0
        first = under_way[0][0]
        while len(times) < LEAST_REPETITIONS or (counted < SECONDS and len(times) < MOST_REPETITIONS):
            done, under_way = under_way, self._queue(replay, chunk)
            done[-1][1].synchronize()
            counted = _seconds(first, done[-1][1]) - WARM_SECONDS
            times += [_seconds(begin, end) for begin, end in done if _seconds(first, begin) >= WARM_SECONDS]
        sensors = self._sensors.read()  # a chunk is still under way
        torch.cuda.synchronize()
        return times[:MOST_REPETITIONS], sensors

    def _queue(self, replay: Callable[[], Any], count: int) -> list[tuple[Any, Any]]:
        """So many replays, each after a flush and between two events; nothing is waited for."""
        marks = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.sum(self._lines, 0, keepdim=True, out=self._sink)
            begin.record()
            replay()
            end.record()
            marks.append((begin, end))
        return marks

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


def _seconds(begin: Any, end: Any) -> float:
    """Between two events that have passed."""
    return float(begin.elapsed_time(end)) / 1e3


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """The call as a graph, or itself, with True or why it could not be captured."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        try:
            with torch.cuda.graph(graph):
                call()
        finally:  # a capture that fails to end leaves its own stream the current one
            torch.cuda.set_stream(stream)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        return call, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return graph.replay, True
