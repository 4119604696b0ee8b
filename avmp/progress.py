"""Progress for people who wait: on a terminal only, a bar if tqdm is installed, else plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """A job made of parts, each with a number of items."""

    def part(self, name: str, items: int) -> Callable[[int], None]:
        """The next part begins; what is returned is told how many of its items are done."""


class _Silent:
    def part(self, name: str, items: int) -> Callable[[int], None]:
        return lambda done: None


class _Lines:
    """One line when a part is done."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total, self._before = stream, total, 0

    def part(self, name: str, items: int) -> Callable[[int], None]:
        self._before += items
        share = self._before / self._total

        def report(done: int) -> None:
            if done == items:
                print(f"{name}: done, {share:.0%} of all", file=self._stream, flush=True)

        return report


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar, self._before = bar, 0

    def part(self, name: str, items: int) -> Callable[[int], None]:
        before = self._before
        self._before += items
        self._bar.set_description(name)
        return lambda done: self._bar.update(before + done - self._bar.n)


@contextmanager
def progress_on(stream: TextIO, total: int) -> Iterator[Progress]:
    """Progress of ``total`` items on a stream; silent where that is no terminal."""
    if not stream.isatty():
        yield _Silent()
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield _Lines(stream, total)
        return
    with tqdm(total=total, file=stream) as bar:
        yield _Bar(bar)
