"""Recorded traces in four public formats, told apart by the name of the file and by what it starts with.

| format   | file                     | columns or keys read                                                |
|----------|--------------------------|---------------------------------------------------------------------|
| Azure    | CSV                      | ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``               |
| BurstGPT | CSV                      | ``Timestamp`` (s), ``Request tokens``, ``Response tokens``          |
| Mooncake | JSON, one object a line  | ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` |
| ShareGPT | JSON, one list           | ``conversations: [{from, value}, ...]``                             |

Arrivals become seconds after the first request. A file is read whole or refused: anything malformed raises
``InvalidArgument`` with the file and the line, rather than being guessed at or left out.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NoReturn

import numpy as np

from avmp.errors import InvalidArgument
from avmp.workloads.trace import MAX_TOKENS, IntArray, Trace

TOKENS_PER_WORD = 1.3
"""Usual ratio for English prose, and the rule by which the published ShareGPT counts were made."""

LATEST_TIME = 1e13
"""Seconds or milliseconds; milliseconds since 1970 stay below it for centuries. More is taken for a corrupt value."""

# At most 20 digits: more is out of range in any case, and Python refuses to convert thousands of them.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DATE_AND_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_USABLE = "not usable JSON: a number of too many digits, or nested too deeply"
_QUESTION, _ANSWER = ("human", "user"), ("gpt", "chatgpt", "assistant")


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The requests recorded in a file, in any of the formats above. The trace is named after the file."""
    source = _Source(Path(path))
    return _reader_for(source)(source)


class _Source:
    """A file's text, the requests found in it so far, and complaints that name the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = self._decoded()
        self.arrivals: list[float] = []
        self.prompts: list[int] = []
        self.outputs: list[int] = []
        self.lines: list[int] = []
        self.skipped = 0

    def _decoded(self) -> str:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"{self.path}: cannot be read: {error.strerror or error}") from None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self.fail(line, f"byte 0x{data[error.start]:02x} is not UTF-8; expected a text file in UTF-8")
        if not text.strip():
            raise InvalidArgument(f"{self.path}: the file is empty; expected a request trace")
        return text

    def fail(self, line: int, problem: str) -> NoReturn:
        raise InvalidArgument(f"{self.path}:{line}: {problem}") from None

    def length(self, line: int, field: str, value: object, least: int) -> int:
        """A length in tokens, given as JSON's integer or CSV's text."""
        if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
            self.fail(line, f"{field} is {_shown(value)}, expected a whole number from {least} to {MAX_TOKENS}")
        return value

    def time(self, line: int, field: str, value: object) -> float:
        """A point in time, given as JSON's number or CSV's text."""
        if isinstance(value, str) and _DECIMAL_NUMBER.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST_TIME:
            self.fail(line, f"{field} is {_shown(value)}, expected a number from 0 to {LATEST_TIME:g}")
        return float(value)

    def add(self, line: int, arrival: float, prompt: int, output: int) -> None:
        if self.arrivals and arrival < self.arrivals[-1]:
            early = self.arrivals[-1] - arrival
            self.fail(line, f"the request arrives {early:g} s before the one above it; expected ascending times")
        self.arrivals.append(arrival)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.lines.append(line)

    def trace(self, block_hashes: tuple[IntArray, ...] | None = None) -> Trace:
        if not self.prompts:
            raise InvalidArgument(f"{self.path}: no request found in the file ({self.skipped} entries without one)")
        arrivals = np.array(self.arrivals, dtype=np.float64)
        prompts, outputs = np.array(self.prompts, dtype=np.int64), np.array(self.outputs, dtype=np.int64)
        lines = np.array(self.lines, dtype=np.int64)
        return Trace(self.path.name, arrivals - arrivals[0], prompts, outputs, block_hashes, self.skipped, lines)


def _shown(value: object) -> str:
    """A value for a message, kept short: a corrupt file may hold one of any size."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _reader_for(source: _Source) -> Callable[[_Source], Trace]:
    by_suffix = {".csv": _read_csv, ".jsonl": _read_mooncake}
    by_content = {"[": _read_sharegpt, "{": _read_mooncake}
    return by_suffix.get(source.path.suffix.lower()) or by_content.get(source.text.lstrip()[0], _read_csv)


# --- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(source: _Source) -> Trace:
    rows = _csv_rows(source)
    line, header = next(rows, (1, []))
    columns = [name.strip() for name in header]
    known = [names for names in _CSV_FORMATS if set(names) <= set(columns)]
    if not known:
        expected = " or ".join(", ".join(names) for names in _CSV_FORMATS)
        source.fail(line, f"the header has the columns {_shown(', '.join(columns))}, expected at least {expected}")
    time, prompt, output = known[0]
    to_seconds = _CSV_FORMATS[known[0]]
    for line, fields in rows:
        if len(fields) != len(columns):
            source.fail(line, f"the row has {len(fields)} fields, expected {len(columns)} as in the header")
        row = {name: field.strip() for name, field in zip(columns, fields, strict=True)}
        prompt_tokens = source.length(line, prompt, row[prompt], least=1)
        output_tokens = source.length(line, output, row[output], least=0)
        source.add(line, to_seconds(source, line, time, row[time]), prompt_tokens, output_tokens)
    return source.trace()


def _csv_rows(source: _Source) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each line that is not blank."""
    rows = csv.reader(io.StringIO(source.text, newline=""), strict=True)
    try:
        for fields in rows:
            if len(fields) > 1 or (fields and fields[0].strip()):
                yield rows.line_num, fields
    except csv.Error as error:
        source.fail(rows.line_num, f"not a CSV row: {error}")


def _wall_clock(source: _Source, line: int, field: str, value: str) -> float:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900``; without an offset, the time counts as UTC.

    The fraction is split off because datetime refuses its seventh digit.
    """
    match = _DATE_AND_TIME.fullmatch(value)
    try:
        if match is None:
            raise ValueError
        offset = "+00:00" if match[4] in (None, "Z") else match[4]
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{offset}")
    except ValueError:
        source.fail(line, f"{field} is {_shown(value)}, expected a time such as 2023-11-16 18:15:46.6805900")
    whole_seconds = (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(seconds=1)
    return whole_seconds + float(match[3] or 0)


# The columns of time, prompt and output, and how the first is read.
_CSV_FORMATS: dict[tuple[str, str, str], Callable[[_Source, int, str, str], float]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _wall_clock,
    ("Timestamp", "Request tokens", "Response tokens"): _Source.time,
}


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_mooncake(source: _Source) -> Trace:
    hashes: list[IntArray] = []
    for line, text in enumerate(source.text.split("\n"), start=1):
        if not text.strip():
            continue
        row = _parsed(source, line, text)
        if not isinstance(row, Mapping):
            source.fail(line, f"the line is {_shown(row)}, expected an object with timestamp, input_length, ...")
        for key in ("timestamp", "input_length", "output_length"):
            if key not in row:
                source.fail(line, f"the key {key} is missing")
        prompt = source.length(line, "input_length", row["input_length"], least=1)
        output = source.length(line, "output_length", row["output_length"], least=0)
        source.add(line, source.time(line, "timestamp", row["timestamp"]) / 1000, prompt, output)
        if "hash_ids" in row:
            hashes.append(_hash_ids(source, line, row["hash_ids"]))
        if len(hashes) not in (0, len(source.prompts)):
            source.fail(line, "hash_ids are given for some requests and missing for others; expected all or none")
    return source.trace(tuple(hashes) or None)


def _parsed(source: _Source, line: int, text: str) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        source.fail(line, f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError):
        source.fail(line, _NOT_USABLE)
    return value


def _hash_ids(source: _Source, line: int, values: object) -> IntArray:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        source.fail(line, f"hash_ids is {_shown(values)}, expected a list of whole numbers of at least 0")
    return np.array(values, dtype=np.int64)


def _read_sharegpt(source: _Source) -> Trace:
    """One request per conversation: its first question and the answer that follows. All arrive at 0.

    Conversations without such a pair, of which the published sets have many, are counted as skipped.
    """
    for line, entry in _list_entries(source):
        turns = entry.get("conversations") if isinstance(entry, Mapping) else None
        if not isinstance(turns, list):
            source.fail(line, 'the entry has no list "conversations"')
        for turn in turns:
            if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
                source.fail(line, 'a turn of the conversation lacks the text "from" or "value"')
        prompt, output = _first_exchange(turns)
        if prompt and output is not None:
            source.add(line, 0.0, prompt, output)
        else:
            source.skipped += 1
    return source.trace()


def _first_exchange(turns: list[Mapping[str, str]]) -> tuple[int, int | None]:
    """Tokens of the first question, and of the first answer after it; None without one."""
    questions = (at for at, turn in enumerate(turns) if turn["from"] in _QUESTION)
    first = next(questions, len(turns))
    answers = (turn for turn in turns[first + 1 :] if turn["from"] in _ANSWER)
    answer = next(answers, None)
    prompt = _estimated_tokens(turns[first]["value"]) if first < len(turns) else 0
    return prompt, None if answer is None else _estimated_tokens(answer["value"])


def _estimated_tokens(text: str) -> int:
    return round(TOKENS_PER_WORD * len(text.split()))


def _list_entries(source: _Source) -> Iterator[tuple[int, object]]:
    """Line and value of each entry of the list that the text holds, decoded one by one so that the line is known."""
    text, decoder = source.text, json.JSONDecoder()
    line, offset = 1, 0

    def move_to(target: int) -> None:
        """Goes to the first character at or after the target that is not white space."""
        nonlocal line, offset
        space = _JSON_SPACE.match(text, target)
        target = space.end() if space else target
        line, offset = line + text.count("\n", offset, target), target

    def take(expected: str) -> str:
        found = text[offset : offset + 1]
        if not found or found not in expected:
            seen = f"found {_shown(found)}" if found else "the file ends"
            source.fail(line, f"not valid JSON: {seen} where {' or '.join(expected)} is expected")
        move_to(offset + 1)
        return found

    move_to(0)
    take("[")
    more = not text.startswith("]", offset) or take("]") != "]"
    while more:
        try:
            value, end = decoder.raw_decode(text, offset)
        except json.JSONDecodeError as error:
            source.fail(error.lineno, f"not valid JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError):
            source.fail(line, _NOT_USABLE)
        yield line, value
        move_to(end)
        more = take(",]") == ","
    if offset < len(text):
        source.fail(line, "not valid JSON: more text after the end of the list")
