"""What the figures of a record depend on, as a hash: records of another model of the server are not gone on with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from avmp.serving import search
from avmp.serving.metrics import SLICES, Latency, summarize
from avmp.serving.server import Server
from avmp.workloads import Trace, builtin_trace

_PROBE_REQUESTS, _PROBE_RATE = 60, 4.0


def settings(server: Server, policy: str, *more: Any) -> str:
    """16 hexadecimal digits over every constant of a server, and over a short run under a policy: its rules and those
    of the engine count as much as constants. ``more`` is what else the figures depend on."""
    probe = summarize(server.serve(policy, builtin_trace("azure_conv", _PROBE_REQUESTS, 0, _PROBE_RATE)))
    return _digest([_constants(server), asdict(Latency()), SLICES, probe.digest, *more])


def search_constants() -> dict[str, str]:
    """Those of the search for a split."""
    return {name: str(value) for name, value in vars(search).items() if name.lstrip("_").isupper()}


def trace_digest(trace: Trace) -> str:
    """16 hexadecimal digits over the requests of a trace."""
    columns = trace.arrival_seconds, trace.prompt_tokens, trace.output_tokens
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()[:16]


def _constants(server: Server) -> dict[str, Any]:
    model = server.model
    sources = ("costs", "device")
    found = {name: asdict(getattr(model, name)) for name in (*sources, "assumptions")}
    for name in sources:
        del found[name]["source"]  # words, not a figure
    return found | {
        "geometry": repr(model.geometry),
        "tp": model.tp_size,
        "rules": asdict(server.rules),
        "options": asdict(server.options),
        "arena_bytes": server.layout.arena_bytes,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
