"""What every benchmark prints beside its figures: machine, versions, commit."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import numpy as np


def machine() -> dict[str, Any]:
    """Where the figures of this run come from."""
    return {
        "processor": _processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    """The commit of the checkout, with ``+`` behind it where files differ from it."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write_lines(records: Iterable[dict[str, Any]], target: TextIO = sys.stdout) -> None:
    """One JSON object a line."""
    for record in records:
        target.write(json.dumps(record, sort_keys=True) + "\n")
