"""Request traces: what arrives when, how long its prompt is, and how many tokens it asks for.

``read_trace(path)`` reads a recorded trace, ``builtin_trace(name, requests, seed)`` samples one from a built-in shape.
Both give a :class:`Trace`. A new shape is one function registered by name in ``shapes.py``, a new file format one
function in ``readers.py``. ``paper.py`` holds the four workloads of the published AVMP experiment, in ticks.
"""

from avmp.workloads.percentiles import TABLES, PercentileTable, percentile_table
from avmp.workloads.readers import read_trace
from avmp.workloads.shapes import WORKLOADS, Workload, builtin_trace, workload
from avmp.workloads.trace import MAX_TOKENS, Trace

__all__ = [
    "MAX_TOKENS",
    "TABLES",
    "WORKLOADS",
    "PercentileTable",
    "Trace",
    "Workload",
    "builtin_trace",
    "percentile_table",
    "read_trace",
    "workload",
]
