"""What moves bytes, as a share of what torch's own copy reaches in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from avmp import ops
from avmp.layout import Layout
from avmp.named_models import named_model
from bench.gpu.problems import Bench, conv_call, update_call
from bench.gpu.run import NotPossible, Row

MIB = 1 << 20


class Ceiling:
    """Bytes read and written per second by ``torch.Tensor.copy_`` at its best, and µs for any number of bytes."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._copies = bench, dict[int, dict[str, Any]]()
        self.gb_per_second: float | None = None

    def copy(self, payload: int) -> dict[str, Any]:
        """The timing of one contiguous copy of so many bytes; the ceiling rises to the best of them."""
        if payload not in self._copies:
            self._copies[payload] = self._copied(payload)
        found = self._copies[payload]
        self.gb_per_second = max(filter(None, (self.gb_per_second, found["gb_per_second"])), default=None)
        return found

    def drift(self, payload: int) -> dict[str, Any]:
        """A copy that was timed before, timed once more: its speed, and that as a share of the first time's."""
        if payload not in self._copies:
            raise NotPossible(f"no copy of {payload / MIB:g} MiB was timed at the beginning")
        before, again = self._copies[payload]["gb_per_second"], self._copied(payload)
        return again | {"share_of_first": ratio(again["gb_per_second"], before)}

    def _copied(self, payload: int) -> dict[str, Any]:
        source, target = random_bytes(self._bench, 2, payload).unbind()
        taken = self._bench.timer.measure(lambda: target.copy_(source))
        return taken | {"gb_per_second": rate(2 * payload, taken)}

    def share(self, moved: int, call: Callable[[], Any]) -> dict[str, Any]:
        """The timing of a call that reads and writes so many bytes together, beside copies: at its best, and of as
        many bytes."""
        taken = self._bench.timer.measure(call)
        same = self.copy(moved // 2 // 16 * 16)
        reached = rate(moved, taken)
        return taken | {
            "bytes": moved,
            "gb_per_second": reached,
            "share_of_copy": ratio(reached, self.gb_per_second),
            "share_of_same_copy": ratio(reached, same["gb_per_second"]),
        }


def random_bytes(bench: Bench, *shape: int) -> torch.Tensor:
    """From a generator of its own: a capture that has failed leaves the default one unusable."""
    generator = torch.Generator(bench.device).manual_seed(0)
    return torch.empty(shape, dtype=torch.uint8, device=bench.device).random_(generator=generator)


def rate(moved: int, taken: dict[str, Any]) -> float | None:
    """GB/s at the median."""
    return None if taken["median_us"] is None else round(moved / taken["median_us"] / 1e3, 2)


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else round(one / other, 4)


def ceiling_rows(bench: Bench, ceiling: Ceiling) -> Iterator[Row]:
    """What a launch takes that does next to nothing, and copies of several sizes."""
    word = torch.zeros(1, device=bench.device)
    yield Row("one word", lambda: bench.timer.measure(lambda: word.add_(1)))
    for payload in copies(bench):
        yield Row(f"copy_ of {payload / MIB:g} MiB", lambda payload=payload: ceiling.copy(payload))


def copies(bench: Bench) -> tuple[int, ...]:
    """Bytes of the copies that make the ceiling, the longest first."""
    return tuple(bench.size((1024 * MIB, 256 * MIB, 64 * MIB, 16 * MIB), (MIB // 16,)))


def drift_rows(bench: Bench, ceiling: Ceiling) -> Iterator[Row]:
    """What is left of the ceiling at the end of a run that has warmed the device up."""
    payload = copies(bench)[0]
    yield Row(f"copy_ of {payload / MIB:g} MiB, again", lambda: ceiling.drift(payload), late=True)


def rows(bench: Bench, ceiling: Ceiling) -> Iterator[Row]:
    """Units of Jamba's sizes in lanes and in one envelope; then keys and values, then states."""
    layouts = {lanes: Layout.plan(named_model("jamba-v0.1"), "8GiB", lanes) for lanes in (4, 1)}
    page, slot = bench.size((layouts[4].page_bytes, layouts[4].slot_bytes), (4096, 17_408))
    many, few = bench.size((1024, 16), (6, 2))
    yield from (
        unit_row(bench, ceiling, "migrate", "pages", page, 4, many),
        unit_row(bench, ceiling, "zero_units", "slots", slot, 4, few),
        unit_row(bench, ceiling, "copy_units", "slots", slot, 4, few),
        kv_row(bench, ceiling, "write_kv", 8192, 16),
        kv_row(bench, ceiling, "gather_kv", 65_536, 16),
        state_row(bench, ceiling, "Mamba-1, fp32", 256, (8192,), 16, torch.float32),
        state_row(bench, ceiling, "Mamba-2, bf16", 256, (128, 64), 128, bench.dtype),
        conv_row(bench, ceiling, 256, False),
        unit_row(bench, ceiling, "migrate", "slots", slot, 4, few),
        unit_row(bench, ceiling, "migrate", "pages in one envelope", 4 * page, 1, many),
        unit_row(bench, ceiling, "migrate", "pages", page, 4, bench.size(64, 2)),
        unit_row(bench, ceiling, "copy_units", "pages", page, 4, many),
        unit_row(bench, ceiling, "zero_units", "pages", page, 4, many),
        unit_row(bench, ceiling, "swap_out", "pages to one piece", page, 4, many),
        kv_row(bench, ceiling, "write_kv", 256, 16),
        kv_row(bench, ceiling, "gather_kv", 65_536, 64),
        state_row(bench, ceiling, "Mamba-2, fp32", 256, (128, 64), 128, torch.float32),
        state_row(bench, ceiling, "Mamba-1, fp32", 8, (8192,), 16, torch.float32),
        conv_row(bench, ceiling, 256, True),
        unit_row(bench, ceiling, "migrate", "units", 4096, 1, bench.size(65_536, 20)),
    )


def unit_row(bench: Bench, ceiling: Ceiling, name: str, what: str, size: int, lanes: int, count: int) -> Row:
    """Random units of an arena to random others; ids are on the device."""

    def make() -> dict[str, Any]:
        arena = random_bytes(bench, lanes, 4 * count * size)
        ids = bench.permutation(4 * count)[: 2 * count].view(2, count)
        arguments: tuple[torch.Tensor, ...] = {"migrate": (ids,), "zero_units": (ids[0],)}.get(name, tuple(ids))
        if name == "swap_out":
            arguments = ids[0], torch.empty(count, lanes, size, dtype=torch.uint8, device=bench.device)
        payload = count * lanes * size
        moved = payload if name == "zero_units" else 2 * payload
        return ceiling.share(moved, lambda: getattr(ops, name)(arena, size, *arguments))

    return Row(f"{name}: {count} {what} of {lanes} x {size / 1024:g} KiB", make)


def kv_row(bench: Bench, ceiling: Ceiling, name: str, tokens: int, page: int) -> Row:
    """8 KV heads of 128, pages scattered at random; rows of 8,192 tokens where they are gathered."""
    tokens, heads, dim = bench.size((tokens, 8, 128), (64, 2, 32))

    def make() -> dict[str, Any]:
        pages = 2 * tokens // page
        cache = bench.random(pages, 2, page, heads, dim)
        ids = bench.permutation(pages)[: tokens // page]
        table = bench.permutation(pages, 1)
        moved = 4 * tokens * heads * dim * cache.element_size()
        if name == "write_kv":
            places = (ids.long()[:, None] * page + torch.arange(page, device=bench.device)).flatten()
            key, value = (bench.random(tokens, heads, dim, seed=seed) for seed in (2, 3))
            keywords: dict[str, Any] = dict(page_table=table, first_valid_id=0)
            return ceiling.share(moved, lambda: ops.write_kv(key, value, cache[:, 0], cache[:, 1], places, **keywords))
        rows = max(tokens // 8192, 1)
        lens = bench.ints([tokens // rows] * rows)
        keywords = dict(max_seq_len=tokens // rows, page_table=table, first_valid_id=0)
        return ceiling.share(
            moved, lambda: ops.gather_kv(cache[:, 0], cache[:, 1], ids.view(rows, -1), lens, **keywords)
        )

    return Row(f"{name}: {tokens} tokens, page {page}", make)


def state_row(
    bench: Bench, ceiling: Ceiling, what: str, rows: int, dims: tuple[int, ...], dstate: int, dtype: torch.dtype
) -> Row:
    """One token for each row. Bytes: the state twice, and each input and output once."""
    rows, dims, dstate = bench.size((rows, dims, dstate), (2, (16, 4)[: len(dims)], 16))

    def make() -> dict[str, Any]:
        call = update_call(bench, rows, dims, dstate, dtype)
        state = call["state"]
        moved = 2 * rows * state[0].nbytes + 2 * call["x"].nbytes + sum(call[one].nbytes for one in "zBC")
        return ceiling.share(moved + _held(call["dt"]), lambda: ops.selective_state_update(**call))

    return Row(f"selective_state_update: {what}, batch {rows}", make)


def conv_row(bench: Bench, ceiling: Ceiling, rows: int, channels_last: bool) -> Row:
    """Width 4, 8,448 channels."""
    rows, channels = bench.size((rows, 8448), (2, 32))

    def make() -> dict[str, Any]:
        call = conv_call(bench, rows, channels, 4, channels_last=channels_last)
        moved = 2 * rows * call["conv_state"][0].nbytes + 2 * call["x"].nbytes + call["weight"].nbytes
        return ceiling.share(moved, lambda: ops.causal_conv1d_update(**call))

    return Row(f"causal_conv1d_update: batch {rows}, channels {'last' if channels_last else 'first'}", make)


def _held(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor, each once however often it is expanded."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(torch.Size(sizes).numel()) * tensor.element_size()
