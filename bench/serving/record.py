"""The record of the study: one JSON object a line, each with its key. Runs that were cut off are gone on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from avmp.errors import InvalidArgument

RESULTS = Path(__file__).resolve().parent.parent / "results" / "serving.jsonl"


def beside(record: Path, name: str) -> Path:
    """The file for something that comes of a record: beside it, and named after it."""
    return record.with_name(f"{record.stem}_{name}{record.suffix}")


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key, of a file that may not exist yet. Raises InvalidArgument for a line that is no record."""
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            found[record["key"]] = record
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(f"{path}:{number}: no record of the serving study; repair or remove it") from None
    return found


def drop_torn_line(path: Path) -> None:
    """What a run that was killed has left of its last line goes."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def append(path: Path, record: dict[str, Any]) -> None:
    """One more line, written at once, so that processes do not cut into each other."""
    line = json.dumps(record, sort_keys=True) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)
