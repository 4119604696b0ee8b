"""Sections of rows within a time limit, and a record of them that is whole on disk at every moment."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESERVE_SECONDS = 6.0
"""Of the budget, for the last write, the figure and the end of the process; no row begins in it but a late one."""
USUAL_SECONDS = 2.0
"""What a row is taken to cost before its section has shown what its rows cost: one compilation and one measurement."""


class Row(NamedTuple):
    """One line of a section. ``make`` yields its figures; what is false under ``ok`` there is a failure. Nothing may
    be done for a row before ``make`` is called: rows that the budget drops must cost nothing. A ``late`` row, which
    takes a second at most and says something about all others, may begin in the first half of the reserve."""

    name: str
    make: Callable[[], dict[str, Any]]
    late: bool = False


Section = tuple[str, Callable[[], Iterator[Row]]]


class NotPossible(Exception):
    """Raised by ``make``: this row cannot be had here, and why; no fault of what is measured."""


class Clock:
    """Seconds since ``started`` (``time.monotonic``) against the budget."""

    def __init__(self, budget: float, started: float) -> None:
        self.budget, self.started = budget, started

    def used(self) -> float:
        return time.monotonic() - self.started

    def left(self) -> float:
        """Until the reserve begins."""
        return self.budget - RESERVE_SECONDS - self.used()


class Record:
    """What is known so far, in one JSON file that is replaced as a whole. ``watched`` is asked at each write."""

    def __init__(self, path: Path, **head: Any) -> None:
        self.path, self.content = path, head
        self.watched: dict[str, Callable[[], Any]] = {}
        self._lock = threading.Lock()

    def write(self, **changed: Any) -> None:
        """Whoever reads the file finds this state or an earlier one."""
        with self._lock:
            self.content |= changed | {name: ask() for name, ask in self.watched.items()}
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(_plain(self.content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(beside, self.path)


def run(sections: list[Section], record: Record, clock: Clock, gate: str | None = None) -> bool:
    """Carries out the sections in order; whether all went well. A failing row is recorded and the next one begins.
    Rows without time left are recorded as dropped. After a failure in the section called ``gate``, or a row that it
    dropped, nothing else is carried out."""
    entries = {name: {"name": name, "status": "not started", "rows": [], "dropped": []} for name, _ in sections}
    record.write(sections=list(entries.values()))
    open_gate = True
    for name, rows in sections:
        entry = entries[name]
        if not open_gate:
            entry["status"] = f"not taken: {gate} has not passed"
            continue
        entry["status"] = "running"
        began = clock.used()
        print(f"{began:6.1f} s  {name}", file=sys.stderr, flush=True)
        _carry_out(entry, rows, record, clock)
        entry["seconds"] = round(clock.used() - began, 3)
        record.write(seconds=round(clock.used(), 3))
        open_gate = name != gate or entry["status"] == "done"
    record.write(complete=all(entry["status"] == "done" for entry in entries.values()))
    return open_gate and all(entry["status"] in ("done", "cut") for entry in entries.values())


def _carry_out(entry: dict[str, Any], rows: Callable[[], Iterator[Row]], record: Record, clock: Clock) -> None:
    failures, expected = 0, USUAL_SECONDS
    try:
        for row in rows():
            if clock.left() < (-RESERVE_SECONDS / 2 if row.late else expected):
                entry["dropped"].append({"name": row.name, "reason": "budget"})
                continue
            began = clock.used()
            figures = _figures(row, entry)
            if figures is not None:
                seconds = clock.used() - began
                expected = max(seconds, 0.7 * expected)  # one slow row does not stand for all
                entry["rows"].append({"name": row.name, "seconds": round(seconds, 3)} | figures)
                failures += "error_text" in figures or not figures.get("ok", True)
            record.write(seconds=round(clock.used(), 3))
    except Exception:
        failures += 1
        entry["error_text"] = traceback.format_exc()
    entry["status"] = "failed" if failures else "cut" if entry["dropped"] else "done"


def _figures(row: Row, entry: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return row.make()
    except (NotPossible, torch.OutOfMemoryError) as error:
        entry["dropped"].append({"name": row.name, "reason": str(error).partition("\n")[0]})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None
    except Exception:
        return {"error_text": traceback.format_exc()}


class Watchdog:
    """Ends the process when the budget is used up, whatever hangs; what is recorded is on disk by then."""

    def __init__(self, record: Record, clock: Clock, leave: Callable[[int], Any] = os._exit) -> None:
        self._record, self._clock, self._leave = record, clock, leave
        self._timer = threading.Timer(max(clock.budget - clock.used() - RESERVE_SECONDS / 3, 0), self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        try:
            self._record.write(interrupted=True, complete=False, exit_code=1, seconds=round(self._clock.used(), 3))
            print(
                f"the budget of {self._clock.budget:g} s is used up: {self._record.path}", file=sys.stderr, flush=True
            )
        except Exception:
            traceback.print_exc()
        finally:  # whatever happens: nobody else ends what hangs
            self._leave(1)


def _plain(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they become their names. Dictionaries and lists are copied before they are
    walked over: the watchdog writes while another thread extends them."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in dict(value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in tuple(value)]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
