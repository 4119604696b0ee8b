"""How much memory the cache takes, measured: by walking what it holds, and by torch's own record of allocations."""

import gc
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from avmp.integrations.transformers import AvmpCache
from avmp.integrations.transformers_layers import AttentionLayer
from avmp.layout import ARENA_ALIGNMENT
from avmp.options import Options
from avmp.units import parse_bytes
from tests.chaos import ChaosMigration
from tests.transformers_models import IN_PLACE, forward, generate, prompts, tiny_model

ATTENTIONS = ["sdpa", "avmp"] if IN_PLACE else ["sdpa"]
BYTES_OF_IDS = 64
"""For each page that is read in place: its id, of 8 bytes, as often as the plain-torch backend needs it."""
SMALL = 4096
"""Bytes of ids, counts and the keys and values of new tokens, in these tests."""


class Allocations(NamedTuple):
    """Bytes: the most there was at once, and what is left."""

    peak: int
    left: int


def allocations(call: Callable[[], Any]) -> Allocations:
    """What torch allocates on the CPU while ``call`` runs; its result is left. What was there before is not seen to be
    freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    there = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    del kept
    return Allocations(max(there, default=0), there[-1] if there else 0)


def held_bytes(*roots: object) -> int:
    """Bytes of all distinct storages of tensors that can be reached from these objects."""
    seen, waiting, storages = set(), list(roots), {}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, types.ModuleType | types.FunctionType | type):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        waiting += gc.get_referents(found)
    return sum(storages.values())


def one_layer_of_kv(cache: AvmpCache, rows: int, tokens: int) -> int:
    """Bytes of keys and values of one attention layer, rounded up to whole pages."""
    layout = cache.pool.layout
    layer = layout.geometry.attention_layers[0]
    per_token = layer.key_bytes_per_token + layer.value_bytes_per_token
    return rows * layout.pages_per_sequence(tokens) * layout.page_tokens * per_token


def one_layer_of_states(cache: AvmpCache, rows: int) -> int:
    return rows * max((layer.nbytes for layer in cache.pool.layout.geometry.state_layers), default=0)


def batch(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
def test_what_a_cache_holds_is_what_it_says_at_every_step_of_a_run(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    cache = AvmpCache(model, "1MiB", page_tokens=4, disturbance=ChaosMigration(1))
    assert cache.pool.lanes.untyped_storage().nbytes() <= 2**20 + ARENA_ALIGNMENT
    stated, held = cache.nbytes, []
    assert held_bytes(cache) == stated
    hook = model.base_model.layers[-1].register_forward_hook(lambda *arguments: held.append(held_bytes(cache)))
    generate(model, prompts(), cache, max_new_tokens=24)
    generate(model, {"input_ids": batch(4, 3)}, cache.share(), num_beams=2, max_new_tokens=8)
    hook.remove()
    assert len(held) == 32 and max(held) <= stated + one_layer_of_states(cache, 8) + SMALL
    assert cache.nbytes == stated
    cache.reset()
    assert held_bytes(cache) <= stated + SMALL


@pytest.mark.parametrize("memory", ["1MiB", "64MiB"])
@pytest.mark.parametrize(
    "bounds", [{}, dict(max_rows=8, max_length=128), dict(max_rows=64, max_length=2048, max_batch_tokens=4096)]
)
@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
def test_what_there_is_beside_the_arena_is_what_the_docstring_says(
    family: str, bounds: dict[str, int], memory: str
) -> None:
    cache = AvmpCache(tiny_model(family), memory, **bounds)
    stats, columns = cache.pool.stats(), cache.pool.layout.pages_per_sequence(cache.pool.max_tokens_per_sequence)
    rows, tokens = bounds.get("max_rows", 256), cache.pool.tables.max_tokens
    tables = 4 * (stats.pages_capacity + stats.slots_capacity) + 4 * rows * (columns + 4) + 8 * tokens + 256
    beside = cache.nbytes - parse_bytes(memory)
    assert beside <= ARENA_ALIGNMENT + tables + min(8 * tables, 8 << 20)
    assert cache.nbytes - cache.pool.lanes.untyped_storage().nbytes() >= tables - 256
    assert tokens <= bounds.get("max_batch_tokens", 1 << 16)
    if memory == "1MiB" and not bounds:
        assert beside <= ARENA_ALIGNMENT + (1 << 20)


def test_making_a_cache_allocates_what_it_says_and_no_more() -> None:
    model = tiny_model("bamba")
    caches = []
    made = allocations(lambda: caches.append(AvmpCache(model, "1MiB", page_tokens=4)))
    assert made.left == made.peak == caches[0].nbytes
    assert allocations(lambda: caches.append(caches[0].share())).left == 0


def test_the_gathering_path_copies_keys_and_values_of_one_layer_and_keeps_none() -> None:
    model = tiny_model("llama")
    cache = AvmpCache(model, "4MiB", page_tokens=4)
    for tokens in (300, 1):
        forward(model, cache, input_ids=batch(3, tokens))
    new, answers = torch.zeros(3, 2, 1, 8), []
    for layer in range(3):
        with torch.no_grad():
            made = allocations(lambda layer=layer: answers.append(cache.update(new, new, layer)))  # type: ignore[misc]
        copied = one_layer_of_kv(cache, 3, 302)
        assert copied <= made.left <= made.peak <= copied + SMALL
        assert answers.pop()[0].shape == (3, 2, 302, 8)


def test_no_layer_s_keys_and_values_are_there_any_more_when_the_next_layer_asks_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    cache = AvmpCache(model, "1MiB", page_tokens=4)
    update, alive, given = AttentionLayer.update, [], []

    def watched(layer: Any, *arguments: Any, **keywords: Any) -> Any:
        alive.append(sum(not storage.expired() for storage in given))
        answer = update(layer, *arguments, **keywords)
        given.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in answer)
        return answer

    monkeypatch.setattr(AttentionLayer, "update", watched)
    generate(model, prompts(), cache, max_new_tokens=6)
    assert len(given) == 2 * 3 * 6 and alive == [0] * 18


@pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")
@pytest.mark.parametrize("family", ["llama", "bamba", "zamba2"])
def test_reading_pages_in_place_copies_no_keys_or_values(family: str) -> None:
    """The plain-torch backend has buffers of constant size. What a decoding step allocates beyond them does not grow
    with the context, but for the ids of its pages; where keys and values are copied, this measure shows it."""
    grown = {}
    for attention in ATTENTIONS:
        model = tiny_model(family, attention)
        cache = AvmpCache(model, "8MiB", max_length=4096)
        peaks = []
        for _ in range(2):
            forward(model, cache, input_ids=batch(2, 1500))
            peaks.append(allocations(lambda: forward(model, cache, input_ids=batch(2, 1))).peak)  # noqa: B023
        grown[attention] = peaks[1] - peaks[0]
    copied = one_layer_of_kv(cache, 2, 1500)
    assert grown["sdpa"] >= copied
    pages = 2 * cache.pool.layout.pages_per_sequence(1500)
    assert grown["avmp"] <= BYTES_OF_IDS * pages < copied // 16


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "mamba2"])
def test_states_are_changed_in_place_and_those_of_one_layer_staged_where_rows_are_not_equally_spaced(
    family: str,
) -> None:
    model = tiny_model(family)
    cache = AvmpCache(model, "1MiB", page_tokens=4, options=Options(poison=True))
    forward(model, cache, input_ids=batch(4, 9))
    layers = [layer.layer for layer in cache.pool.layout.geometry.state_layers]
    arena = cache.pool.lanes.untyped_storage().data_ptr()

    @torch.no_grad()
    def read(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.layers[layer].conv_states[0], cache.layers[layer].recurrent_states[0]

    read(layers[0])
    assert allocations(lambda: read(layers[1])).peak <= SMALL
    assert all(part.untyped_storage().data_ptr() == arena for part in read(layers[0]))
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    read(layers[0])
    staged = one_layer_of_states(cache, 4)
    assert allocations(lambda: read(layers[1])).peak <= staged + SMALL
    assert all(part.untyped_storage().data_ptr() != arena for part in read(layers[1]))
    assert held_bytes(cache) <= cache.nbytes + staged + SMALL  # those of the layer before are gone
    for part in read(layers[0]):
        part.fill_(3.0)
    for row, slot in enumerate(cache.sequences.tolist()):
        physical = int(cache.pool.tables.slot_table[cache.pool.slot(slot) & 0xFFFFFFFF])
        assert all((part[physical] == 3.0).all() for part in cache.pool.state(layers[0])), row
