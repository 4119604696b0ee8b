"""``python -m bench.gpu`` without a GPU: the whole course of it in the interpreter, and what it does when things go
wrong. No figure of a dry run is a measurement, and none may look like one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from avmp import ops
from avmp.backends import use_backend
from avmp.kernels import units
from bench.gpu import bandwidth, correctness, counts, decode, problems, report, run, timing
from bench.gpu.__main__ import SECTIONS, main
from bench.gpu.run import Clock, NotPossible, Record, Row, Watchdog
from tests.attention_problems import Shape as OtherShape
from tests.attention_problems import make_problem, oracle

DRY = ["--device", "cpu", "--dry-run"]
TIMINGS = ("median_us", "least_us", "gb_per_second", "share_of_copy", "share_of_same_copy", "share_of_first")
TIMINGS += ("lanes_over_envelope",)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    return found


def sections(record: dict[str, Any]) -> dict[str, Any]:
    return {section["name"]: section for section in record["sections"]}


# -- the dry run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry_run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The command in a process of its own, as a user starts it, where nothing says that triton should interpret."""
    folder = tmp_path_factory.mktemp("gpu")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", "bench.gpu", "--out", str(folder), "--budget", "300", *DRY]
    return folder, subprocess.run(line, cwd=repository, env=environment, capture_output=True, text=True)


def test_every_section_is_carried_out(dry_run: tuple[Path, Any]) -> None:
    folder, done = dry_run
    assert done.returncode == 0, done.stdout + done.stderr
    record = read(folder)
    assert record["complete"] and record["exit_code"] == 0 and not record["interrupted"]
    assert tuple(sections(record)) == SECTIONS
    for name, section in sections(record).items():
        assert section["status"] == "done" and section["rows"] and section["dropped"] == [], name
    assert "a dry run: nothing was measured" in done.stdout
    assert sorted(file.name for file in folder.iterdir()) == sorted({"gpu.json", record["figure"] or "gpu.json"})
    assert (record["figure"] == "gpu.png") == (find_spec("matplotlib") is not None) == (record["figure_note"] is None)


def test_the_record_says_where_it_comes_from(dry_run: tuple[Path, Any]) -> None:
    record = read(dry_run[0])
    assert (record["schema"], record["benchmark"], record["measured"], record["budget"]) == (1, "gpu", False, 300)
    assert record["machine"]["device"] == "cpu" and record["machine"]["commit"]
    assert record["environment"]["packages"]["torch"] == torch.__version__ and record["device"] is None
    assert record["sensors_note"] == "no NVIDIA device" and record["compilations"] is None
    assert record["seconds"] >= sum(section["seconds"] for section in record["sections"])


def test_no_figure_of_it_can_be_quoted(dry_run: tuple[Path, Any]) -> None:
    found = []

    def walk(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, one in value.items():
                walk(one, name if key != "times_as_long_as" else "share_of_copy")
        elif isinstance(value, list):
            for one in value:
                walk(one, key)
        elif key in TIMINGS:
            found.append(value)

    walk(read(dry_run[0])["sections"])
    assert len(found) > 100 and set(found) == {None}


def test_the_rows_of_it(dry_run: tuple[Path, Any]) -> None:
    found = sections(read(dry_run[0]))
    cases = found["correctness"]["rows"]
    assert len(cases) >= 30 and all(case["ok"] and case["error"] <= case["allowed"] for case in cases)
    moved = [row["name"].partition(":")[0] for row in found["bandwidth"]["rows"]]
    operations = {"migrate", "zero_units", "copy_units", "write_kv", "gather_kv"}
    assert operations | {"selective_state_update", "causal_conv1d_update"} <= set(moved)
    launched = {row["name"]: row for row in found["launches"]["rows"]}
    assert launched["extend and batch"]["kernels"] == {"apply_table_changes_kernel": 1}
    assert launched["migration: all slots taken"]["units_moved"] > 0
    assert launched["paged_attention, split"]["kernels"] == {"decode_kernel": 1, "merge_kernel": 1}
    assert {row["compiled"] for row in found["compilations"]["rows"]} == {None}
    timed = {"avmp", "sdpa", "sdpa, grouped", "physical ids", "plain pages"}
    peers = {row["name"].partition(":")[0]: row for row in found["peers"]["rows"]}
    assert set(peers) == {"flash_attn", "flashinfer", "vllm"}
    for row in found["decode"]["rows"]:
        assert set(row["timings"]) == timed
        assert set(row["differences"]) == {"avmp", "plain pages", "sdpa, grouped"}
        assert max(row["differences"].values()) <= decode.TOLERANCE and row["bytes_differing_by_page_table"] == 0
        assert set(row["computed_by"]) == {"sdpa", "sdpa, grouped"}
        assert set(row["computed_by"].values()) <= set(torch.nn.attention.SDPBackend.__members__)
    for row in found["lanes"]["rows"]:
        assert set(row["differences"]) == {"lanes", "envelope"} and row["ok"]
    assert [row["name"] for row in found["drift"]["rows"]] == ["copy_ of 0.0625 MiB, again"]


# -- what goes wrong -------------------------------------------------------------------------------------------------


class Launches:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: None


def test_after_a_wrong_kernel_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interpreter: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = correctness.cases
    few = ("zero_units", "apply_table_changes", "poison_units")
    monkeypatch.setattr(correctness, "cases", lambda bench: (case for case in cases(bench) if case[0] in few))
    monkeypatch.setattr(units, "fill_units_kernel", Launches())
    assert main(["--out", str(tmp_path), *DRY]) == 1
    record = read(tmp_path)
    assert record["exit_code"] == 1 and not record["complete"]
    gate = sections(record)["correctness"]
    assert gate["status"] == "failed"
    assert {row["name"]: row["ok"] for row in gate["rows"]} == {name: name == few[1] for name in few}
    for name in SECTIONS[1:]:
        assert sections(record)[name]["status"] == "not taken: correctness has not passed"
        assert sections(record)[name]["rows"] == []
    assert "failed: zero_units" in capsys.readouterr().out


def test_without_a_gpu_there_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--out", str(tmp_path / "new")]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "line", ["", "--out x --device cpu", "--out x --dry-run", "--out x --budget 0", "--out x --only correctness"]
)
def test_bad_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2 and "error" in capsys.readouterr().err


class Time:
    """A clock that advances when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def row(self, name: str, seconds: float, **figures: Any) -> Row:
        def make() -> dict[str, Any]:
            self.now += seconds
            return figures

        return Row(name, make)


def dry_bench() -> problems.Bench:
    return problems.Bench(torch.device("cpu"), True, timing.Timer(torch.device("cpu"), timing.Sensors(None), True))


def raising(error: BaseException) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        raise error

    return make


def test_a_budget_that_ends_midway_leaves_a_record_of_what_was_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, path = Time(monkeypatch), tmp_path / "gpu.json"
    record = Record(path, schema=1)
    seen = []

    def rows() -> Iterator[Row]:
        for number in range(6):
            yield clock.row(str(number), 5.0, figure=number)
            seen.append(len(json.loads(path.read_text())["sections"][0]["rows"]))

    later = ("later", lambda: iter([clock.row("never", 1.0)]))
    well = run.run([("first", rows), later], record, Clock(run.RESERVE_SECONDS + 16.5, 0.0))
    assert well and seen == [1, 2, 3, 3, 3, 3], "every row is on disk as soon as it is there"
    first, second = json.loads(path.read_text())["sections"]
    assert (first["status"], second["status"]) == ("cut", "cut")
    assert [row["figure"] for row in first["rows"]] == [0, 1, 2]
    assert [one["name"] for one in first["dropped"] + second["dropped"]] == ["3", "4", "5", "never"]
    assert {one["reason"] for one in first["dropped"]} == {"budget"}
    assert not json.loads(path.read_text())["complete"] and clock.now <= 17


def test_a_gate_that_is_cut_has_not_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, record = Time(monkeypatch), Record(tmp_path / "gpu.json")
    gate = ("gate", lambda: iter([clock.row("one", 9.0), clock.row("two", 9.0)]))
    after = ("after", lambda: iter([clock.row("never", 0.0)]))
    assert not run.run([gate, after], record, Clock(run.RESERVE_SECONDS + 10, 0.0), "gate")
    assert [one["status"] for one in record.content["sections"]] == ["cut", "not taken: gate has not passed"]


def test_what_fails_is_recorded_and_the_rest_is_carried_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, record = Time(monkeypatch), Record(tmp_path / "gpu.json")

    def broken() -> Iterator[Row]:
        yield clock.row("good", 1.0)
        raise LookupError("between two rows")

    listed = {
        "rows": [Row("bad", raising(ValueError("within a row"))), clock.row("wrong", 1.0, ok=False)],
        "room": [Row("large", raising(torch.OutOfMemoryError("CUDA out of memory.\nmore"))), clock.row("fits", 1.0)],
        "odd": [Row("none", raising(NotPossible("memory: too many"))), clock.row("nan", 1.0, error=float("nan"))],
    }
    made: list[Any] = [(name, lambda rows=rows: iter(rows)) for name, rows in listed.items()]
    assert not run.run([("broken", broken), *made], record, Clock(100, 0.0))
    found = sections(read(tmp_path))
    assert {name: one["status"] for name, one in found.items()} == {
        "broken": "failed",
        "rows": "failed",
        "room": "cut",
        "odd": "cut",
    }
    assert "LookupError: between two rows" in found["broken"]["error_text"] and found["broken"]["rows"]
    assert "ValueError: within a row" in found["rows"]["rows"][0]["error_text"]
    assert found["room"]["dropped"] == [{"name": "large", "reason": "CUDA out of memory."}]
    assert found["odd"]["dropped"] == [{"name": "none", "reason": "memory: too many"}]
    assert found["odd"]["rows"][0]["error"] == "nan"


def test_the_watchdog_ends_what_hangs(tmp_path: Path) -> None:
    record, left = Record(tmp_path / "gpu.json", exit_code=None), []
    with Watchdog(record, Clock(run.RESERVE_SECONDS / 3 + 0.05, time.monotonic()), left.append):
        for _ in range(500):
            if left:
                break
            time.sleep(0.01)
    assert left == [1]
    assert read(tmp_path)["interrupted"] and read(tmp_path)["exit_code"] == 1
    with Watchdog(record, Clock(60, time.monotonic()), left.append):
        pass
    assert left == [1]


def test_the_watchdog_ends_the_process_even_if_nothing_can_be_written(tmp_path: Path) -> None:
    record, left = Record(tmp_path / "absent" / "gpu.json"), list[int]()
    with Watchdog(record, Clock(0.01, time.monotonic()), left.append):
        for _ in range(500):
            if left:
                break
            time.sleep(0.01)
    assert left == [1]


def test_what_grows_while_it_is_written_is_written(tmp_path: Path) -> None:
    growing: dict[str, Any] = {}

    class Growing(list[int]):
        def __iter__(self) -> Iterator[int]:
            growing[f"more {len(growing)}"] = 1
            return super().__iter__()

    growing["first"] = Growing([1])
    Record(tmp_path / "gpu.json", entry=growing).write()
    assert read(tmp_path)["entry"] == {"first": [1]} and len(growing) == 2


def test_a_late_row_begins_in_the_reserve_but_not_at_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, record = Time(monkeypatch), Record(tmp_path / "gpu.json")

    def rows() -> Iterator[Row]:
        for name, late in (("begun", False), ("usual", False), ("late", True), ("too late", True)):
            yield clock.row(name, 9.0 if name == "begun" else 4.0)._replace(late=late)

    assert run.run([("all", rows)], record, Clock(run.RESERVE_SECONDS + 9, 0.0))
    (found,) = read(tmp_path)["sections"]
    assert [row["name"] for row in found["rows"]] == ["begun", "late"]
    assert [row["name"] for row in found["dropped"]] == ["usual", "too late"]


# -- timing, on a device that is none --------------------------------------------------------------------------------


class FakeCuda:
    """As much of ``torch.cuda`` as timing uses. A call takes as long as ``took`` says, in turn."""

    def __init__(self, took: list[float], capturable: bool = True) -> None:
        self.took, self.now, self.log, self.stream = took, 0.0, list[str](), "its own"
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.log.append("event")
                self.at = cuda.now

            def synchronize(self) -> None:
                cuda.log.append("wait")

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            def replay(self) -> None:
                cuda.work()

        @contextmanager
        def graph(graph: CUDAGraph) -> Iterator[None]:
            """As torch's: a capture that cannot be ended leaves its stream the current one."""
            before, cuda.stream = cuda.stream, "capturing"
            try:
                yield
            finally:
                if not capturable:
                    raise RuntimeError("operation not permitted when stream is capturing\nmore")
                cuda.stream = before

        self.Event, self.CUDAGraph, self.graph = Event, CUDAGraph, graph

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def work(self) -> None:
        self.log.append("work")
        self.now += self.took[0]
        self.took.append(self.took.pop(0))


def fake_timer(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> timing.Timer:
    def flushed(*arguments: Any, **keywords: Any) -> None:
        cuda.log.append("flush")
        cuda.now += 1e-4

    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    sensors: Any = SimpleNamespace(read=lambda: cuda.log.append("sensors"))
    timer = timing.Timer(torch.device("cpu"), sensors, dry=False)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda, sum=flushed))
    return timer


def test_a_call_is_captured_and_replayed_between_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([0.001, 0.002, 0.006])
    calls: list[int] = []
    taken = fake_timer(monkeypatch, cuda).measure(lambda: calls.append(1))
    assert (taken["median_us"], taken["least_us"], taken["captured"]) == (2000.0, 1000.0, True)
    assert len(calls) == 2, "once to compile, once captured"
    log = [entry for entry in cuda.log if entry not in ("wait", "sensors")]
    assert log[:3] == ["synchronize", "work", "synchronize"] and log[-1] == "synchronize"
    assert log[3:-1] == ["flush", "event", "work", "event"] * (len(log[3:-1]) // 4)
    assert taken["repetitions"] < len(log) // 4


def test_the_device_never_idles_before_its_sensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([0.001])
    fake_timer(monkeypatch, cuda).measure(lambda: None)
    assert cuda.log.count("sensors") == 1 and cuda.log[-2:] == ["sensors", "synchronize"]
    waits = [place for place, entry in enumerate(cuda.log) if entry == "wait"][1:]
    chunk = int(timing.CHUNK_SECONDS / 0.00105)
    assert len(waits) > 2 and {waits[place + 1] - waits[place] for place in range(len(waits) - 1)} == {4 * chunk + 1}
    assert cuda.log[: waits[0]].count("work") == 1 + 3 + 2 * chunk, "a chunk is under way whenever one is waited for"


@pytest.mark.parametrize(("took", "least", "most"), [(1e-6, 1000, 1000), (0.001, 100, 140), (0.5, 7, 8)])
def test_repetitions(monkeypatch: pytest.MonkeyPatch, took: float, least: int, most: int) -> None:
    taken = fake_timer(monkeypatch, FakeCuda([took])).measure(lambda: None)
    assert least <= taken["repetitions"] <= most


def test_a_cold_device_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([])

    def work() -> None:
        cuda.now += 0.003 if cuda.now < timing.WARM_SECONDS else 0.001

    monkeypatch.setattr(cuda, "work", work)
    times, _ = fake_timer(monkeypatch, cuda)._times(work)
    assert max(times) == pytest.approx(0.001) and len(times) * 0.0011 >= timing.SECONDS


def test_after_a_capture_that_failed_the_stream_is_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([0.001], capturable=False)

    def call() -> None:
        if cuda.stream == "capturing":
            raise ValueError("in the middle of it")
        cuda.work()

    taken = fake_timer(monkeypatch, cuda).measure(call)
    assert taken["captured"] == "RuntimeError: operation not permitted when stream is capturing"
    assert cuda.stream == "its own" and taken["median_us"] == 1000.0


def test_bandwidth_takes_nothing_from_the_default_generator() -> None:
    before = torch.get_rng_state()
    assert bandwidth.random_bytes(dry_bench(), 2, 4096).unique().numel() > 200
    assert torch.equal(before, torch.get_rng_state())


def test_the_drift_is_the_share_of_the_first_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = dry_bench()
    speeds = iter([100.0, 125.0])
    monkeypatch.setattr(bench.timer, "measure", lambda call: {"median_us": next(speeds)})
    ceiling = bandwidth.Ceiling(bench)
    (row,) = bandwidth.drift_rows(bench, ceiling)
    with pytest.raises(NotPossible, match="no copy of"):
        row.make()
    ceiling.copy(bandwidth.copies(bench)[0])
    assert row.late and row.make()["share_of_first"] == pytest.approx(0.8, rel=0.01)


def test_what_cannot_be_captured_is_called_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([0.001], capturable=False)
    taken = fake_timer(monkeypatch, cuda).measure(cuda.work)
    assert taken["captured"] == "RuntimeError: operation not permitted when stream is capturing"
    assert taken["median_us"] == 1000.0


def test_the_host_is_timed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([0.0])
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-3)
    taken = fake_timer(monkeypatch, cuda).host(cuda.work)
    assert taken == {"median_us": 10.0, "least_us": 10.0, "calls": timing.HOST_LOOPS * timing.HOST_CALLS}
    assert "synchronize" not in cuda.log[2 : 2 + timing.HOST_CALLS]


class FakeNvml(SimpleNamespace):
    """A driver with one device, that does not know every question."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-known":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        return 1000 + which

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 350_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x4 | 0x40


def test_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert timing.Sensors("known").read() == {
        "sm_mhz": 1001,
        "memory_mhz": 1002,
        "celsius": None,
        "watts": 350.5,
        "throttle": ["software power cap", "hardware thermal slowdown"],
    }
    other = timing.Sensors("other")
    assert other.read() is None and other.note == "NVMLError: not found"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent = timing.Sensors("known")
    assert absent.read() is None and absent.note is not None and absent.note.startswith("ModuleNotFoundError")


def test_peers_are_imported_when_their_row_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.importlib, "import_module", raising(AssertionError("too early")))
    names = [row.name for row in decode.peer_rows(dry_bench())]
    assert len(names) == (1 + len(decode.TINY)) * len(decode.PEERS) and set(decode.PEERS) <= set(names)


def test_memory_that_torch_holds_back_is_given_up_before_it_is_asked_how_much_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append("free"), 7)[1:])
    assert decode.free_bytes(torch.device("cpu")) == 7 and asked == ["empty", "free"]


def wrong(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: call() * 1.1


@pytest.mark.parametrize("method", ["avmp", "physical_ids", "sdpa_grouped", "plain"])
def test_no_decode_row_is_timed_unless_all_of_it_is_right(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    bench, original = dry_bench(), getattr(decode.Case, method)

    def replaced(case: decode.Case, *arguments: Any) -> Any:
        found = original(case, *arguments)
        if method != "plain":
            return wrong(found)
        found.physical_ids = lambda: wrong(decode.Case.physical_ids(found))
        return found

    with use_backend("torch"):
        (row, *_) = decode.rows(bench, bandwidth.Ceiling(bench))
        assert row.make()["ok"]
        monkeypatch.setattr(decode.Case, method, replaced)
        found = row.make()
    assert found["ok"] is False and "timings" not in found


def test_no_lanes_are_timed_unless_both_layouts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    original = decode.Case.avmp

    def replaced(case: decode.Case) -> Any:
        return wrong(original(case)) if case.pages.stride(0) > case.page * case.cache.token else original(case)

    with use_backend("torch"):
        (row,) = decode.lane_rows(dry_bench())
        assert row.make()["ok"]
        monkeypatch.setattr(decode.Case, "avmp", replaced)
        found = row.make()
    assert found["ok"] is False and "envelope" not in found
    assert found["differences"]["lanes"] <= decode.TOLERANCE < found["differences"]["envelope"]


def test_a_peer_that_is_installed_is_timed_and_one_that_refuses_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = dry_bench()

    def refuse(case: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        raise ValueError("pages of 256 only")

    monkeypatch.setattr(
        decode,
        "PEERS",
        {
            "json": lambda case, *kv: case.sdpa(*kv),
            "math": refuse,
            "absent_peer": refuse,
            "cmath": lambda case, *kv: lambda: case.sdpa(*kv)() * 1.1,
        },
    )
    with use_backend("torch"):
        found = {row.name: row.make() for row in decode.peer_rows(bench)}
    assert found["absent_peer"] == {"missing": "ModuleNotFoundError: No module named 'absent_peer'"}
    assert found["math: batch 1, context 64, page 16"] == {"refused": "ValueError: pages of 256 only"}
    assert found["cmath: batch 1, context 64, page 16"]["refused"].startswith("its result is another one, by 0.1")
    timed = found["json: batch 1, context 64, page 16"]
    assert timed["peer"] == timed["avmp"] == timing.NO_MEASUREMENT and timed["times_as_long"] is None


# -- what it judges by -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        OtherShape(queries=(1, 2, 9), window=20, softcap=5.0, alibi="head", sinks=True, fp8="e4m3", scales="head"),
        OtherShape(virtual=False, first_valid_id=0, page_tokens=8, head_dim_v=16, order="HND"),
        OtherShape(null_columns=((0, 0), (1, 0)), dtype=torch.float16),
    ],
)
def test_its_reference_agrees_with_that_of_the_tests(shape: OtherShape) -> None:
    call = make_problem(shape).call
    if call["page_table"] is not None:  # garbage ids in unused cells are none of its business
        call["block_table"] = call["block_table"].clamp(max=len(call["page_table"]) - 1)
    mine = problems.attention_by_hand(call, torch.float64)
    for one, right in zip(mine, oracle(call), strict=True):
        torch.testing.assert_close(one, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["state update, Mamba-1", "state update, speculative", "conv update, several tokens"])
def test_a_mistake_that_kernel_and_reference_share_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with use_backend("torch"):
        case = dict(correctness.cases(dry_bench()))[name]
        error, allowed = case()
        assert error <= allowed
        for operation in ("selective_state_update", "causal_conv1d_update"):
            original = getattr(ops, operation)

            def mistaken(original: Any = original, **call: Any) -> Any:
                return original(**call | {"x": call["x"] * 1.02})

            monkeypatch.setattr(ops, operation, mistaken)
        error, allowed = case()
    assert error > allowed


def test_judgements() -> None:
    right = torch.tensor([1.0, -2.0, float("-inf")], dtype=torch.float64)
    low = torch.tensor([1.001, -2.0, float("-inf")])
    for wrong in ([1.003, -2.0, float("-inf")], [1.0, float("nan"), float("-inf")], [1.0, -2.0, 0.0]):
        error, allowed = problems.judged(torch.tensor(wrong), right, low)
        assert not error <= allowed
    error, allowed = problems.judged(torch.tensor([1.0019, -2.0, float("-inf")]), right, low)
    assert error <= allowed
    assert problems.differing(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 256])) == (2.0, 0.0)
    assert not problems.differing(torch.zeros(3), torch.zeros(4))[0] <= 0
    assert problems.worst((0.1, 1.0), (float("nan"), 1.0), (5.0, 1.0))[0] != problems.worst((0.1, 1.0), (5.0, 1.0))[0]


def test_launches_are_counted_and_the_counting_ends(interpreter: None) -> None:
    lanes, ids = torch.ones(1, 1024, dtype=torch.uint8), torch.tensor([1], dtype=torch.int32)
    with counts.launches() as found:
        units.zero_units(lanes, 256, ids)
    units.zero_units(lanes, 256, ids)
    assert dict(found) == {"fill_units_kernel": 1}


def test_compilations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    counted = counts.Compilations()
    for name in ("one", "two", "one"):
        assert not runtime.jit_cache_hook(key="", repr="", fn=SimpleNamespace(name=name), compile={})
        runtime.jit_post_compile_hook(key="", repr="", fn=SimpleNamespace(name=name), compile={})
    assert counted.report()["variants"] == 3 and counted.report()["by_kernel"] == {"one": 2, "two": 1}


def test_the_grid_begins_with_what_matters_and_has_everything() -> None:
    bench = problems.Bench(torch.device("cpu"), False, timing.Timer(torch.device("cpu"), timing.Sensors(None), True))
    ceiling: Any = None
    names = [row.name for row in decode.rows(bench, ceiling)]
    assert names[0] == "batch 8, context 8192, page 16" and len(names) == len(set(names)) == 40
    assert {"batch 256, context 131072, page 64", "batch 1, context 1024, page 16"} <= set(names)


def measured_record(captured: Any) -> dict[str, Any]:
    timed = {"median_us": 100.0, "least_us": 90.0, "captured": True}
    moved = {"name": "migrate", "gb_per_second": 4000.0, "share_of_copy": 0.93, **timed, "captured": captured}
    decoded = {"name": "batch 8", "batch": 8, "context": 1024, "page": 16, "kv_bytes": 10**8, "share_of_copy": 0.9}
    decoded |= {"timings": {"avmp": timed, "sdpa": timed | {"captured": captured}}}
    decoded |= {"times_as_long_as": {"avmp": 1.0, "sdpa": 0.5}}
    again = {"name": "copy_ of 1024 MiB, again", **timed, "share_of_first": 0.97}
    entry = {"status": "done", "dropped": []}
    made = [{"name": "bandwidth", "rows": [moved], **entry}, {"name": "decode", "rows": [decoded], **entry}]
    made.append({"name": "drift", "rows": [again], **entry})
    return {"measured": True, "machine": {"device": "a GPU"}, "sections": made}


def test_the_summary_and_the_figure_of_a_run_that_measured(tmp_path: Path) -> None:
    record = measured_record(True)
    text = report.summary(record)
    assert "0.93" in text and "0.5" in text and "dry run" not in text and report.EAGER not in text
    assert "copy_ of 1024 MiB, again: 0.97 of its speed" in text
    note = report.draw(record, tmp_path / "gpu.png")
    assert (note is None) == (tmp_path / "gpu.png").exists() == (find_spec("matplotlib") is not None)


def test_what_was_not_captured_is_marked(tmp_path: Path) -> None:
    record = measured_record("RuntimeError: not permitted")
    text = report.summary(record)
    assert "0.93*" in text and "0.5*" in text and "0.9*" not in text and text.endswith(report.EAGER_NOTE)
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", lambda figure, *_, **__: texts.extend(drawn(figure)))
        assert report.draw(record, tmp_path / "gpu.png") is None
    assert {"migrate*", "*", report.EAGER_NOTE} <= set(texts)


def drawn(figure: Any) -> list[str]:
    """All texts of a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_a_figure_that_fails_leaves_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "gpu.png").write_bytes(b"half of it")
    monkeypatch.setattr(report, "_draw", lambda record, path: raising(KeyError("median_us"))())
    assert report.draw(measured_record(True), tmp_path / "gpu.png") == "KeyError: 'median_us'"
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_record_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    note = report.draw({"measured": False, "sections": []}, tmp_path / "gpu.png")
    assert note is not None and note.startswith("matplotlib cannot be imported") and not list(tmp_path.iterdir())


def test_sections_can_be_chosen_and_the_figure_is_drawn_when_all_else_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def draw(record: dict[str, Any], path: Path) -> str:
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert all(timer.finished.is_set() for timer in timers), "the watchdog would end the process"
        assert read(tmp_path)["exit_code"] == 0 and read(tmp_path)["complete"] and not read(tmp_path)["figure"]
        return "none today"

    monkeypatch.setattr(report, "draw", draw)
    monkeypatch.setattr(correctness, "cases", lambda bench: iter([("nothing", lambda: (0.0, 0.0))]))
    assert main(["--out", str(tmp_path), "--only", "host", *DRY]) == 0
    assert list(sections(read(tmp_path))) == ["correctness", "ceiling", "host", "drift"]
    assert read(tmp_path)["figure"] is None and read(tmp_path)["figure_note"] == "none today"


@pytest.mark.slow
def test_every_row_can_be_had_at_real_sizes_and_few_variants_are_compiled(repository: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", "tests.bench_gpu_real_sizes"]
    done = subprocess.run(line, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {} and found["compiled"] == {}
    assert found["rows"]["decode"] == 40 and len(found["dropped"]) < 25
    assert sum(found["variants"].values()) <= 110, found["variants"]
