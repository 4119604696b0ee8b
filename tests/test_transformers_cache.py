"""The cache as an object: what transformers asks of it, rows that come and go, caches that share an arena, errors."""

import copy
import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import DynamicCache

from avmp.errors import ArenaTooSmall, Inconsistent, InvalidArgument, Unsupported
from avmp.integrations.transformers import AvmpCache
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.transformers_models import IN_PLACE, forward, generate, keyword, prompts, tiny_model

ATTENTIONS = ["sdpa", "avmp"] if IN_PLACE else ["sdpa"]
in_place = pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")


def cache_of(model: Any, memory: str = "1MiB", chaos: int | None = 5, **keywords: Any) -> AvmpCache:
    options, disturbance = Options(poison=True, debug=2), None if chaos is None else ChaosMigration(chaos)
    return AvmpCache(model, memory, page_tokens=4, options=options, disturbance=disturbance, **keywords)


def filled(
    family: str, attention: str = "sdpa", rows: int = 3, tokens: int = 9, chaos: int | None = 5
) -> tuple[Any, AvmpCache, Any]:
    """A model, a cache that holds a batch without padding, and transformers' own with the same."""
    model = tiny_model(family)
    own, ids = DynamicCache(config=model.config), batch(rows, tokens)
    forward(model, own, input_ids=ids)
    model = tiny_model(family, attention)
    cache = cache_of(model, chaos=chaos)
    forward(model, cache, input_ids=ids)
    return model, cache, own


def batch(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def require_same_next(family: str, attention: str, cache: Any, own: Any, rows: int, tokens: int = 1) -> None:
    """Both caches hold the same: the next tokens give the same logits, bit by bit where nothing reads in place."""
    ids = batch(rows, tokens, seed=11)
    expected = forward(tiny_model(family), own, input_ids=ids)
    result = forward(tiny_model(family, attention), cache, input_ids=ids)
    assert torch.equal(result, expected) if attention == "sdpa" else torch.allclose(result, expected, atol=1e-4)


# -- what transformers asks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1", "nemotron_h", "mamba2"])
def test_it_answers_what_transformers_own_cache_answers(family: str) -> None:
    _, cache, own = filled(family)
    for name in ("is_sliding", "is_linear", "is_dummy"):
        assert getattr(cache, name, None) == getattr(own, name, None)
    assert len(cache) == len(own) and cache.is_compileable is False
    assert cache.batch_size == 3 and cache.is_initialized
    assert cache.is_croppable == (family == "llama")
    if family == "mamba2":
        assert cache.get_max_length() == -1
        return
    layer = cache.pool.layout.geometry.attention_layers[-1].layer
    assert cache.get_seq_length() == cache.get_seq_length(layer) == own.get_seq_length() == 9
    assert cache.get_mask_sizes(4, layer) == own.get_mask_sizes(4, layer) == (13, 0)
    assert cache.get_max_length() == cache.get_max_cache_shape() == cache.pool.max_tokens_per_sequence == 512
    assert "3 rows of 9 tokens" in repr(cache)


@torch.no_grad()
def test_states_can_be_looked_at() -> None:
    model, cache, own = filled("bamba")
    for part in range(2):
        states = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
        theirs = own.layers[0].conv_states[0], own.layers[0].recurrent_states[0]
        assert torch.equal(states[part], theirs[part])
    assert list(cache.layers[0].conv_states) == [0] and len(cache.layers[0].recurrent_states) == 1
    with pytest.raises(KeyError):
        cache.layers[0].conv_states[1]
    assert cache.has_previous_state() and cache.has_previous_state(0)
    short = filled("lfm2")[1].layers[0]
    assert short.conv_states[0] is not None and short.recurrent_states[0] is None
    assert cache_of(model).layers[0].conv_states[0] is None and not cache_of(model).has_previous_state()


@pytest.mark.parametrize("call", ["reset", "crop", "reorder_cache", "batch_repeat_interleave", "offload", "prefetch"])
def test_what_concerns_all_layers_is_refused_by_one(call: str) -> None:
    _, cache, _ = filled("falcon_h1")
    with pytest.raises(Unsupported, match=f"{call} of one layer: all layers share"):
        getattr(cache.layers[0], call)()


def test_what_an_arena_cannot_do_is_refused_with_what_it_can() -> None:
    _, cache, _ = filled("bamba")
    with pytest.raises(Unsupported, match="swap_out"):
        cache.offload(0)
    with pytest.raises(Unsupported, match="swap_in"):
        cache.prefetch(0)
    with pytest.raises(Unsupported, match="checkpoint"):
        cache.activate_past_recording()
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1", "mamba2", "lfm2"])
@pytest.mark.parametrize("chosen", [[2, 0, 1], [1, 1, 1], [0, 2, 2]])
def test_rows_are_reordered(family: str, attention: str, chosen: list[int]) -> None:
    _, cache, own = filled(family, attention)
    for some in (cache, own):
        some.reorder_cache(torch.tensor(chosen))
    require_same_next(family, attention, cache, own, 3)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
@pytest.mark.parametrize("chosen", [[1], [2, 0], [2, 2, 0, 1, 2]])
def test_rows_are_selected(family: str, attention: str, chosen: list[int]) -> None:
    _, cache, own = filled(family, attention)
    cache.batch_select_indices(torch.tensor(chosen))
    own.reorder_cache(torch.tensor(chosen))  # transformers' state layers have no selection of their own
    require_same_next(family, attention, cache, own, len(chosen))
    assert cache.pool.stats().sequences == cache.batch_size == len(chosen)


def test_rows_are_selected_by_a_mask_and_all_may_go() -> None:
    _, cache, own = filled("llama")
    keep = torch.tensor([True, False, True])
    cache.batch_select_indices(keep)
    own.batch_select_indices(keep)
    require_same_next("llama", "sdpa", cache, own, 2)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.batch_size == -1 and cache.pool.stats().used_bytes == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_are_repeated(family: str) -> None:
    _, cache, own = filled(family)
    cache.batch_repeat_interleave(2)
    own.reorder_cache(torch.tensor([0, 0, 1, 1, 2, 2]))
    require_same_next(family, "sdpa", cache, own, 6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_of_attention_layers_are_taken_back(attention: str) -> None:
    _, cache, own = filled("llama", attention)
    pages = cache.pool.stats().pages_live
    for some in (cache, own):
        some.crop(-5)
        some.crop(0)
    assert cache.get_seq_length() == 4 and cache.pool.stats().pages_live == pages - 6
    require_same_next("llama", attention, cache, own, 3, tokens=6)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_states_go_back_to_a_checkpoint(family: str, attention: str) -> None:
    model, cache, own = filled(family, attention)
    mark = cache.checkpoint()
    own = copy.deepcopy(own)
    for tokens in (3, 1, 1):
        forward(model, cache, input_ids=batch(3, tokens, seed=tokens))
    with pytest.raises(Unsupported, match=r"crop to 13 tokens.*checkpoint\(\) only, and those are at \[0, 9\]"):
        cache.crop(-1)
    cache.crop(-5)
    assert cache.get_seq_length() == mark.length == 9
    require_same_next(family, attention, cache, own, 3)
    cache.crop(-1)  # the checkpoint is still there
    cache.forget(mark)
    with pytest.raises(Unsupported, match=r"those are at \[0\]"):
        cache.crop(-1)
    with pytest.raises(InvalidArgument, match="no checkpoint of this cache"):
        cache.forget(mark)
    cache.crop(-9)
    require_same_next(family, attention, cache, DynamicCache(config=model.config), 3, tokens=7)
    cache.reset()
    assert cache.pool.stats().used_bytes == 0


def test_crop_refuses_what_makes_no_sense() -> None:
    _, cache, _ = filled("llama")
    for wrong in (1, -10):
        with pytest.raises(InvalidArgument, match="expected 0 to -9"):
            cache.crop(wrong)
    with pytest.raises(InvalidArgument, match="empty cache"):
        cache_of(tiny_model("llama")).checkpoint()
    cache.crop(-9)
    with pytest.raises(InvalidArgument, match="empty cache"):
        cache.checkpoint()
    for call in (filled("mamba2")[1].checkpoint, lambda: filled("mamba2")[1].crop(-1)):
        with pytest.raises(Unsupported, match=r"states only.*fork\(\)"):
            call()


# -- several caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chaos", [None, 5])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
def test_a_prefix_is_computed_once_and_copied_as_transformers_documents_it(
    family: str, attention: str, chaos: int | None
) -> None:
    _, cache, own = filled(family, attention, chaos=chaos)
    before = cache.pool.stats()
    copies = [copy.deepcopy(cache) for _ in range(2)]
    after = cache.pool.stats()
    assert after.pages_live - before.pages_live == (6 if cache.pool.layout.has_pages else 0)  # the tails of three rows
    for number, one in enumerate((*copies, cache)):
        theirs = copy.deepcopy(own)
        for step in range(3):
            require_same_next(family, attention, one, theirs, 3, tokens=1 + step * number)
    del copies, one
    gc.collect()
    cache.reset()
    assert cache.pool.stats().used_bytes == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "jamba", "mamba2"])
def test_caches_in_one_arena_take_turns(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    first = cache_of(model)
    caches, counts = [first, first.share(), first.share()], (2, 1, 3)
    own = [DynamicCache(config=model.config) for _ in caches]
    for tokens in (7, 1, 1, 2, 1, 1):
        for some, theirs, rows in zip(caches, own, counts, strict=True):
            require_same_next(family, attention, some, theirs, rows, tokens)
    assert first.pool.stats().sequences == sum(counts)


def test_a_cache_that_is_gone_leaves_the_arena() -> None:
    model, cache, _ = filled("bamba")
    other = cache.share()
    forward(model, other, input_ids=batch(2, 5))
    other.checkpoint()
    assert cache.pool.stats().sequences == 5
    del other
    assert cache.pool.stats().sequences == 3 and cache.pool.stats().snapshots == 0
    swapped = cache.share()
    forward(model, swapped, input_ids=batch(2, 5))
    swapped.swap_out()
    del swapped
    assert cache.pool.stats().swapped == 0


def test_a_cache_that_is_gone_is_gone_at_once_and_not_when_the_collector_comes() -> None:
    _, cache, _ = filled("falcon_h1")
    parts = [weakref.ref(part) for part in (cache._rows, cache._arena, *cache.layers)]
    gc.disable()
    try:
        del cache
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["llama", "bamba", "mamba2"])
def test_a_cache_is_swapped_out_and_comes_back_when_it_is_used(family: str) -> None:
    _, cache, own = filled(family)
    cache.swap_out()
    cache.swap_out()
    assert cache.pool.stats().used_bytes == 0 and cache.batch_size == 3 and len(cache.sequences) == 0
    require_same_next(family, "sdpa", cache, own, 3)
    cache.swap_out()
    cache.swap_in()
    assert cache.pool.stats().sequences == 3
    cache.swap_out()
    cache.reset()
    assert cache.pool.stats().swapped == 0


@pytest.mark.parametrize("family", ["bamba", "mamba2"])
def test_a_cache_lives_in_and_out_of_inference_mode(family: str) -> None:
    model, cache, own = filled(family)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            require_same_next(family, "sdpa", cache, own, 3)
            cache.swap_out()
    with torch.inference_mode():
        inside = cache_of(model)
        forward(model, inside, input_ids=batch(3, 2))
    forward(model, inside, input_ids=batch(3, 1))
    require_same_next(family, "sdpa", cache, own, 3)


def test_states_that_were_staged_in_inference_mode_go_on_without_it() -> None:
    config = copy.deepcopy(tiny_model("mamba2").config)
    config.num_hidden_layers = 1  # its states stay staged from one step to the next
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    own, cache = DynamicCache(config=config), cache_of(model, chaos=None)
    for some in (own, cache):
        forward(model, some, input_ids=batch(3, 5))
        some.reorder_cache(torch.tensor([2, 0, 1]))
        with torch.inference_mode():
            forward(model, some, input_ids=batch(3, 1))
    expected, result = (forward(model, some, input_ids=batch(3, 1, seed=8)) for some in (own, cache))
    assert torch.equal(result, expected)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_the_arena_cannot_keep_is_refused_before_anything_changes() -> None:
    model, cache, own = filled("bamba")
    digest = cache.pool.digest()
    name = keyword(model)
    for tokens in (1, 2):
        with pytest.raises(InvalidArgument, match=r"keeps no gradients.*no_grad"):
            model(input_ids=batch(3, tokens), **{name: cache})
    with pytest.raises(InvalidArgument, match=r"batch of 2 rows for a cache that holds 3; reset\(\)"):
        forward(model, cache, input_ids=batch(2, 2))
    half = tiny_model("bamba", dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match=r"bfloat16, the arena was made for float32"):
        forward(half, cache, input_ids=batch(3, 2))
    assert cache.pool.digest() == digest
    require_same_next("bamba", "sdpa", cache, own, 3)
    other = cache_of(tiny_model("llama"))
    with (
        torch.no_grad(),
        pytest.raises(InvalidArgument, match=r"keys of layer 1: expected \[rows, 2, tokens, 8\], got \(3, 2, 1, 4\)"),
    ):
        other.update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 8), 1)
    with (
        torch.no_grad(),
        pytest.raises(InvalidArgument, match=r"convolution windows of layer 0: expected \(\d+, 4\) each, got"),
    ):
        cache.update_conv_state(torch.zeros(3, 5, 2), 0)
    with pytest.raises(InvalidArgument, match="reorder_cache: 2 indices for 3 rows"):
        cache.reorder_cache(torch.tensor([0, 1]))


def test_more_tokens_than_the_tables_hold_are_refused_at_once() -> None:
    model = tiny_model("jamba")
    cache = cache_of(model, max_batch_tokens=16)
    with pytest.raises(InvalidArgument, match=r"18 tokens in one forward.*max_batch_tokens=16.*prefill_chunk_size"):
        forward(model, cache, input_ids=batch(2, 9))
    assert cache.batch_size == -1
    result = generate(model, {"input_ids": batch(2, 9)}, cache, prefill_chunk_size=8, max_new_tokens=4)
    assert result.sequences.shape == (2, 13)


def test_an_interrupted_forward_is_found_out_and_can_be_taken_back() -> None:
    model, cache, own = filled("llama")

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = model.base_model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, input_ids=batch(3, 2))
    hook.remove()
    message = r"did not come to layers \[1, 2\].*crop.*reset"
    with pytest.raises(Inconsistent, match=message):
        forward(model, cache, input_ids=batch(3, 2))
    with pytest.raises(Inconsistent, match=message):
        forward(model, cache.fork(), input_ids=batch(3, 2))
    with pytest.raises(Inconsistent, match=message):
        cache.checkpoint()
    cache.crop(0)
    require_same_next("llama", "sdpa", cache, own, 3)


@in_place
def test_attention_that_reads_pages_needs_the_cache_and_the_cache_needs_it() -> None:
    model, ids = tiny_model("llama", "avmp"), batch(2, 5)
    with pytest.raises(InvalidArgument, match="reads the pages of an AvmpCache, and this forward has none"):
        forward(model, DynamicCache(config=model.config), input_ids=ids)
    twin = copy.deepcopy(model)  # its configuration is another object, with another attention
    twin.set_attn_implementation("sdpa")
    cache = cache_of(model)
    with pytest.raises(Inconsistent, match="attention of layer 0 has not read its pages"):
        forward(twin, cache, input_ids=ids)
    cache.reset()
    forward(model, cache, input_ids=ids)


@in_place
def test_attention_that_reads_pages_refuses_masks_that_it_would_not_honour() -> None:
    model = tiny_model("llama", "avmp")
    inputs = prompts()
    cache = cache_of(model)
    forward(model, cache, **inputs)
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, 1, dtype=torch.long)], dim=1)
    digest = cache.pool.digest()
    with pytest.raises(Unsupported, match="earlier steps had padding, this one has no mask at all"):
        forward(model, cache, input_ids=batch(4, 1))
    with pytest.raises(Unsupported, match="hides other earlier tokens"):
        forward(model, cache, input_ids=batch(4, 1), attention_mask=mask.flip(0))
    with pytest.raises(InvalidArgument, match=r"attention mask \(4, 1\).*expects \(4, 18\)"):
        forward(model, cache, input_ids=batch(4, 1), attention_mask=mask[:, -1:])
    assert cache.pool.digest() == digest
    forward(model, cache, input_ids=batch(4, 1), attention_mask=mask)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match="has left the padding out"):
        forward(model, cache, input_ids=batch(4, 1), attention_mask=torch.ones(4, 19))
    model.set_attn_implementation("avmp")
    cache.reset()
    with pytest.raises(InvalidArgument, match=r"attention mask \(1, 1, 3, 3\)"):
        forward(model, cache, input_ids=batch(1, 3), attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


@in_place
def test_attention_that_reads_pages_refuses_what_it_does_not_do() -> None:
    from avmp.integrations.transformers_attention import attention, padding_mask
    from avmp.integrations.transformers_layers import Pages

    cache = cache_of(tiny_model("llama", "avmp"))
    states, mask = torch.zeros(1, 2, 1, 8), torch.ones(1, 1)
    refused = dict(dropout=0.1, sliding_window=8, is_causal=False, position_bias=states, output_attentions=True)
    for name, value in refused.items():
        with pytest.raises(Unsupported, match=f"does not do {name}"):
            attention(None, states, states, states, None, avmp=Pages(cache._rows, 0), **{name: value})
    assert padding_mask(attention_mask=mask) is mask and padding_mask() is None
    other = padding_mask(attention_mask=mask, mask_function=lambda *indices: True)
    with pytest.raises(Unsupported, match="does not do masks that are not causal"):
        attention(None, states, states, states, other, avmp=Pages(cache._rows, 0))
    assert cache.batch_size == -1


@in_place
@pytest.mark.parametrize("chosen", [[2, 3, 0, 1], [1, 1, 2, 0]])
def test_padding_that_is_left_out_goes_with_its_row(chosen: list[int]) -> None:
    model, inputs = tiny_model("bamba"), prompts()
    mask = torch.nn.functional.pad(inputs["attention_mask"][chosen], (0, 1), value=1)
    own = DynamicCache(config=model.config)
    forward(model, own, **inputs)
    own.reorder_cache(torch.tensor(chosen))
    expected = forward(model, own, input_ids=batch(4, 1), attention_mask=mask)
    model = tiny_model("bamba", "avmp")
    for rearrange in ("reorder_cache", "batch_select_indices"):
        cache = cache_of(model)
        forward(model, cache, **inputs)
        getattr(cache, rearrange)(torch.tensor(chosen))
        result = forward(model, cache, input_ids=batch(4, 1), attention_mask=mask)
        assert torch.allclose(result, expected, atol=1e-4)


@in_place
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_that_is_gone_asks_for_no_mask(attention: str) -> None:
    """Taken back with its tokens, or gone with its row: the rest is as if there never had been any."""
    model, ids, inputs = tiny_model("llama", "avmp"), batch(2, 8), prompts()
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 8:] = 0
    cropped, chosen = cache_of(model), cache_of(model)
    forward(model, cropped, input_ids=ids)
    forward(model, cropped, input_ids=batch(2, 2), attention_mask=mask)
    cropped.crop(-2)
    forward(model, chosen, **inputs)
    longest = inputs["attention_mask"].sum(1).argmax().view(1)
    chosen.batch_select_indices(longest)
    model = tiny_model("llama")
    for cache, kept in ((cropped, ids), (chosen, inputs["input_ids"][longest])):
        own, last = DynamicCache(config=model.config), batch(len(kept), 1)
        expected = [forward(tiny_model("llama"), own, input_ids=step) for step in (kept, last)][-1]
        result = forward(tiny_model("llama", attention), cache, input_ids=last)
        assert torch.allclose(result, expected, atol=1e-4)


@in_place
def test_a_chunk_may_be_all_padding_for_some_rows() -> None:
    model = tiny_model("bamba", "avmp")
    inputs = prompts((3, 17, 12, 1))
    result = generate(model, inputs, cache_of(model), prefill_chunk_size=4, max_new_tokens=12)
    expected = generate(tiny_model("bamba"), inputs, prefill_chunk_size=4, max_new_tokens=12)
    assert torch.equal(result.sequences, expected.sequences)


# -- what works, and what does not -------------------------------------------------------------------------------------


def test_a_cache_is_made_from_a_configuration_alone() -> None:
    model = tiny_model("jamba", dtype=torch.bfloat16)
    config = copy.deepcopy(model.config)
    config.dtype = None
    assert cache_of(config).pool.kv(1)[0].dtype == torch.get_default_dtype() == torch.float32
    cache = cache_of(config, dtype=torch.bfloat16, device="cpu", max_length=64)
    assert cache.pool.kv(1)[0].dtype == torch.bfloat16 and cache.get_max_length() == 64
    forward(model, cache, input_ids=batch(2, 5))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.GPT2Config(), "model type 'gpt2' does not work.*5.20 to 5.24.*bamba, cohere"),
        (lambda: transformers.T5Config(), "t5: encoder-decoder models are not offered.*jamba"),
        (
            lambda: transformers.MistralConfig(sliding_window=8, num_hidden_layers=2),
            "mistral: layer 0 needs a DynamicSlidingWindowLayer.*no sliding or chunked windows.*falcon_h1",
        ),
    ],
)
def test_a_model_that_does_not_work_is_refused_with_a_list_of_those_that_do(config: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        AvmpCache(config(), "64MiB")


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict: expected a transformers model or its configuration"):
        AvmpCache({}, "64MiB")
    with pytest.raises(ArenaTooSmall):
        cache_of(tiny_model("bamba"), "8KiB")
    model = copy.deepcopy(tiny_model("llama"))
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    with pytest.raises(Unsupported, match=r"a model on devices \['0', 'disk'\]"):
        AvmpCache(model, "1MiB")
