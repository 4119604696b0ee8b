"""Where memory is short: refused before anything is computed, or made by evicting what may be evicted."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from avmp.errors import InvalidArgument, OutOfMemory, RowTooLong
from avmp.integrations.transformers import AvmpCache
from avmp.integrations.transformers_generate import announced
from avmp.options import Options
from tests.transformers_models import IN_PLACE, forward, generate, memory_for, prompts, tiny_model

ATTENTIONS = ["sdpa", "avmp"] if IN_PLACE else ["sdpa"]
PAGE = 4


def cache_of(model: Any, rows: int, tokens: int, **keywords: Any) -> AvmpCache:
    """An arena that holds so many rows of so many tokens, and no more."""
    memory = memory_for(model, rows, tokens, PAGE)
    return AvmpCache(model, memory, page_tokens=PAGE, options=Options(debug=2, poison=True), **keywords)


def batch(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """Grows by one with each forward that begins."""
    forwards: list[int] = []
    hook = model.base_model.register_forward_pre_hook(lambda *arguments: forwards.append(1))
    yield forwards
    hook.remove()


# -- ahead of generate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1"])
def test_a_request_that_will_not_fit_is_refused_before_its_first_token(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    inputs, fitting = {"input_ids": batch(3, 9)}, 24
    expected = generate(tiny_model(family), inputs, max_new_tokens=fitting - 9 + 1)
    model = tiny_model(family, attention)
    cache = cache_of(model, 3, fitting)
    other = cache.share()
    digest = cache.pool.digest()
    with counted_forwards(model) as forwards:
        with pytest.raises(OutOfMemory) as refused:
            generate(model, inputs, cache, max_new_tokens=fitting - 9 + 2)
        assert forwards == [] and cache.pool.digest() == digest
        assert (refused.value.operation, refused.value.wanted_pages) == ("admit", 3 * (fitting // PAGE + 1))
        assert refused.value.wanted_slots == (0 if family == "llama" else 3) and refused.value.missing_units > 0
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=fitting - 9 + 1).sequences, expected.sequences)
        with pytest.raises(OutOfMemory):
            generate(model, {"input_ids": batch(1, 4)}, other, max_new_tokens=2)
    assert other.batch_size == -1


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)])
def test_every_beam_and_every_sample_counts(options: dict[str, Any]) -> None:
    model = tiny_model("bamba")
    inputs = {"input_ids": batch(2, 9)}
    cache = cache_of(model, 5, 16)
    with counted_forwards(model) as forwards, pytest.raises(OutOfMemory, match="wants 24 pages and 6 slots"):
        generate(model, inputs, cache, max_new_tokens=8, **options)
    assert forwards == []
    generate(model, inputs, cache_of(model, 6, 16), max_new_tokens=8, **options)


def test_embeddings_count_like_ids() -> None:
    model = tiny_model("llama")
    ids = batch(2, 9)
    expected = generate(model, {"input_ids": ids}, max_new_tokens=8)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    cache = cache_of(model, 2, 16)
    with counted_forwards(model) as forwards, pytest.raises(OutOfMemory, match="wants 10 pages and 0 slots"):
        generate(model, inputs, cache, max_new_tokens=9)
    assert forwards == []
    result = generate(model, inputs, cache, max_new_tokens=8)
    assert torch.equal(result.sequences, expected.sequences[:, 9:])


def test_states_alone_can_be_too_many() -> None:
    model = tiny_model("mamba2")
    cache = cache_of(model, 3, 16)
    with counted_forwards(model) as forwards, pytest.raises(OutOfMemory, match="wants 0 pages and 4 slots"):
        generate(model, prompts(), cache)
    assert forwards == []


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_another_turn_is_counted_on_top_of_what_is_there(attention: str, only_new: bool) -> None:
    model = tiny_model("bamba", attention)
    cache = cache_of(model, 2, 24)
    first = generate(model, {"input_ids": batch(2, 9)}, cache, max_new_tokens=4)
    ids = torch.cat([first.sequences, batch(2, 3)], dim=1)  # 16 tokens, of which 12 are in the cache
    inputs = {"input_ids": ids[:, -4:] if only_new else ids, "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    before = cache.pool.digest()
    with counted_forwards(model) as forwards, pytest.raises(OutOfMemory, match="extend: out of pages"):
        generate(model, inputs, cache, max_new_tokens=10)
    assert forwards == [] and cache.pool.digest() == before
    assert generate(model, inputs, cache, max_new_tokens=9).sequences.shape[1] == inputs["input_ids"].shape[1] + 9
    assert cache.get_seq_length() == 24


@pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")
def test_padding_that_takes_no_memory_is_not_counted() -> None:
    model = tiny_model("bamba", "avmp")
    inputs = prompts((5, 17, 1, 9))
    tokens = sum(-(-(length + 7) // PAGE) for length in (5, 17, 1, 9)) * PAGE
    cache = cache_of(model, 4, tokens // 4)
    expected = generate(tiny_model("bamba"), inputs, max_new_tokens=8)
    assert torch.equal(
        generate(tiny_model("bamba", "avmp"), inputs, cache, max_new_tokens=8).sequences, expected.sequences
    )
    cache.reset()
    with pytest.raises(OutOfMemory):
        generate(tiny_model("bamba", "sdpa"), inputs, cache, max_new_tokens=8)


@pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_padding_that_takes_no_memory_is_not_counted_in_later_chunks(family: str, turns: int) -> None:
    """Nor in the tokens of another turn, behind one that had none."""
    inputs = prompts((1, 33))
    if turns == 2:
        ids, mask = batch(2, 5), torch.ones(2, 5, dtype=torch.long)
        inputs = {
            "input_ids": torch.cat([ids, inputs["input_ids"]], dim=1),
            "attention_mask": torch.cat([mask, inputs["attention_mask"]], dim=1),
        }
    before = 5 * (turns - 1)
    expected = generate(tiny_model(family), inputs, max_new_tokens=3)
    model = tiny_model(family, "avmp")
    tokens = sum(-(-(before + length + 2) // PAGE) for length in (1, 33)) * PAGE
    cache = cache_of(model, 2, tokens // 2)
    if turns == 2:
        forward(model, cache, input_ids=ids)
    result = generate(model, inputs, cache, max_new_tokens=3, prefill_chunk_size=16)
    assert torch.equal(result.sequences, expected.sequences)


def test_a_row_that_would_grow_too_long_is_refused_as_such() -> None:
    model = tiny_model("jamba")
    cache = AvmpCache(model, "1MiB", page_tokens=PAGE, max_length=32)
    with counted_forwards(model) as forwards, pytest.raises(RowTooLong, match="40"):
        generate(model, {"input_ids": batch(1, 9)}, cache, max_new_tokens=32)
    assert forwards == []


def test_a_length_that_nobody_announces_is_not_guessed() -> None:
    assert announced() is None
    cache = AvmpCache(tiny_model("llama"), "256KiB", page_tokens=PAGE)
    cache._is_user_defined = True
    assert cache._is_user_defined is True and cache.batch_size == -1

    def setter() -> Any:
        return announced()

    def _prepare_cache_for_generation() -> Any:  # of a version of transformers with other names inside
        return setter()

    assert _prepare_cache_for_generation() is None


# -- in forward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1", "qwen3_next"])
def test_a_refused_forward_leaves_keys_values_and_states_as_they_were(family: str, attention: str) -> None:
    model = tiny_model(family)
    own = DynamicCache(config=model.config)
    forward(model, own, input_ids=batch(2, 8))
    own_after_more = copy.deepcopy(own)
    model = tiny_model(family, attention)
    cache = cache_of(model, 3, 8)
    other = cache.share()
    forward(model, cache, input_ids=batch(2, 8))
    forward(model, other, input_ids=batch(1, 8))
    for tokens in (1, 3):
        with pytest.raises(OutOfMemory, match="extend: out of pages"):
            forward(model, cache, input_ids=batch(2, tokens, seed=5))
    assert cache.get_seq_length() == 8
    other.reset()
    result = [forward(model, cache, input_ids=batch(2, 1, seed=step)) for step in (5, 6)]
    model = tiny_model(family)
    expected = [forward(model, own_after_more, input_ids=batch(2, 1, seed=step)) for step in (5, 6)]
    for one, two in zip(result, expected, strict=True):
        assert torch.equal(one, two) if attention == "sdpa" else torch.allclose(one, two, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
def test_a_first_forward_that_does_not_fit_leaves_nothing_behind(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    cache = cache_of(model, 2, 8)
    held = cache.share()
    forward(model, held, input_ids=batch(1, 8))
    used = cache.pool.stats().used_bytes
    with pytest.raises(OutOfMemory):
        forward(model, cache, input_ids=batch(3, 12))
    assert cache.batch_size == -1 and cache.pool.stats().used_bytes == used
    result = forward(model, cache, input_ids=batch(1, 8, seed=5))
    model = tiny_model(family)
    assert torch.allclose(
        result, forward(model, DynamicCache(config=model.config), input_ids=batch(1, 8, seed=5)), atol=1e-4
    )


def test_without_checking_ahead_memory_may_run_out_on_the_way_and_nothing_is_lost() -> None:
    model = tiny_model("bamba")
    expected = generate(model, {"input_ids": batch(2, 9)}, max_new_tokens=24)
    cache = cache_of(model, 3, 20, check_ahead=False)
    other = cache.share()
    forward(model, other, input_ids=batch(1, 20))
    with counted_forwards(model) as forwards, pytest.raises(OutOfMemory):
        generate(model, {"input_ids": batch(2, 9)}, cache, max_new_tokens=24)
    assert len(forwards) == 13 and cache.get_seq_length() == 20
    other.reset()
    rest = generate(model, {"input_ids": expected.sequences[:, :21]}, cache, max_new_tokens=9)
    assert torch.equal(rest.sequences, expected.sequences[:, :30])


# -- eviction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "jamba", "mamba2"])
def test_what_may_be_evicted_is_the_longest_unused_first_and_comes_back_by_itself(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    cache = cache_of(model, 3, 12, evictable=True)
    caches = [cache, cache.share(evictable=True), cache.share(evictable=True)]
    own = [DynamicCache(config=model.config) for _ in range(4)]

    def step(number: int, some: AvmpCache, tokens: int) -> None:
        ids = batch(1, tokens, seed=number)
        result = forward(tiny_model(family, attention), some, input_ids=ids)
        expected = forward(tiny_model(family), own[number], input_ids=ids)
        assert torch.equal(result, expected) if attention == "sdpa" else torch.allclose(result, expected, atol=1e-4)

    for number, some in enumerate(caches):
        step(number, some, 8)
    step(0, caches[0], 1)  # the second is now the one used longest ago
    fourth = cache.share()
    step(3, fourth, 12)
    assert [len(some.sequences) for some in (*caches, fourth)] == [1, 0, 1, 1]
    for number in (1, 0, 2, 1, 0):
        step(number, caches[number], 1)
    assert len(fourth.sequences) == 1 and sum(len(some.sequences) for some in caches) == 2
    assert not fourth.evictable
    fourth.evictable = True
    for number in (0, 1, 2):
        step(number, caches[number], 1)
    assert len(fourth.sequences) == 0


def test_an_eviction_in_inference_mode_that_was_not_enough_does_no_harm() -> None:
    model = tiny_model("bamba")
    cache, own = cache_of(model, 2, 12, evictable=True), DynamicCache(config=model.config)
    for some in (cache, own):
        forward(model, some, input_ids=batch(1, 8))
    with torch.inference_mode(), pytest.raises(OutOfMemory):
        forward(model, cache.share(), input_ids=batch(2, 40))
    assert len(cache.sequences) == 0
    assert torch.equal(*(forward(model, some, input_ids=batch(1, 1, seed=8)) for some in (cache, own)))


def test_nobody_leaves_for_more_tokens_than_one_forward_takes() -> None:
    model = tiny_model("llama")
    cache = cache_of(model, 2, 12, evictable=True, max_batch_tokens=16)
    forward(model, cache, input_ids=batch(1, 12))
    other = cache.share()
    with pytest.raises(InvalidArgument, match=r"20 tokens in one forward, the cache takes max_batch_tokens=16"):
        forward(model, other, input_ids=batch(1, 20))
    with pytest.raises(OutOfMemory):
        forward(model, other, input_ids=batch(2, 14))  # more than all pages hold
    assert len(cache.sequences) == 1 and other.batch_size == -1


def test_what_may_not_be_evicted_stays_and_the_rest_is_refused() -> None:
    model = tiny_model("bamba")
    cache = cache_of(model, 2, 12)
    own = DynamicCache(config=model.config)
    for some in (cache, own):
        forward(model, some, input_ids=batch(2, 12))
    greedy = cache.share(evictable=True)
    digest = cache.pool.digest()
    with pytest.raises(OutOfMemory):
        generate(model, {"input_ids": batch(1, 4)}, greedy, max_new_tokens=4)
    assert cache.pool.digest() == digest
    cache.batch_select_indices(torch.tensor([1]))
    own.reorder_cache(torch.tensor([1]))
    generate(model, {"input_ids": batch(1, 4)}, greedy, max_new_tokens=4)
    assert torch.equal(*(forward(model, some, input_ids=batch(1, 1, seed=8)) for some in (cache, own)))
