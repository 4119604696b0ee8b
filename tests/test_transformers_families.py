"""Every family generates the same tokens out of the arena as with transformers' own cache, whatever moves meanwhile."""

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from avmp.errors import Unsupported
from avmp.geometry import Geometry
from avmp.integrations.transformers import AvmpCache
from avmp.model_configs import READERS
from avmp.options import Options
from tests.chaos import ChaosMigration
from tests.transformers_models import (
    FAMILIES,
    IN_PLACE,
    NEW_TOKENS,
    OTHERS,
    WITH_ATTENTION,
    generate,
    largest_difference,
    prompts,
    reference,
    tiny_model,
)


def cache_of(model: Any, chaos: int | None = None, **keywords: Any) -> AvmpCache:
    """A small arena with small pages. With ``chaos``, a page and a slot move before every change to the pool: the
    floors see to it that there is always a free one to move to."""
    if chaos is None:
        return AvmpCache(model, "1MiB", page_tokens=4, options=Options(poison=True), **keywords)
    geometry = Geometry.from_config(model.config)
    options = Options(poison=True, debug=2, floor_pages=96 * geometry.has_attention, floor_slots=8 * geometry.has_state)
    return AvmpCache(model, "1MiB", page_tokens=4, options=options, disturbance=ChaosMigration(chaos), **keywords)


def kinds(cache: AvmpCache) -> list[str]:
    """What units this arena has."""
    layout = cache.pool.layout
    return [kind for kind, there in (("page", layout.has_pages), ("slot", layout.has_slots)) if there]


def steps(cache: AvmpCache) -> int:
    """Decoding steps of ``generate`` that change the pool: those of a model with states only change nothing there."""
    return (NEW_TOKENS - 1) * cache.pool.layout.has_pages


def require_whole(cache: AvmpCache) -> None:
    """Nothing of the arena is lost once its only cache is reset."""
    cache.reset()
    cache.pool.check()
    assert cache.pool.stats().used_bytes == 0


def disturb_between_layers(stack: ExitStack, model: Any, cache: AvmpCache) -> None:
    """Before every layer somebody else takes a unit of each kind and gives it back, and what stood beside it moves."""
    pool, units = cache.pool, kinds(cache)

    def move(*arguments: Any) -> None:
        for kind in units:
            pool.give(pool.take(kind))

    for layer in model.base_model.layers:
        stack.callback(layer.register_forward_pre_hook(move).remove)


@pytest.mark.parametrize("chaos", [None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_path_gives_equal_logits_bit_by_bit(family: str, chaos: int | None) -> None:
    model = tiny_model(family)
    cache = cache_of(model, chaos)
    expected, result = reference(family), generate(model, prompts(), cache)
    assert len(set(expected.sequences[:, -NEW_TOKENS:].flatten().tolist())) > 30  # not one token over and over
    assert torch.equal(result.sequences, expected.sequences)
    assert largest_difference(result, expected) == 0
    assert cache.pool.stats().units_moved >= (0 if chaos is None else len(kinds(cache)) * steps(cache))
    require_whole(cache)


@pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")
@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_pages_read_in_place_give_the_same_tokens_and_logits_as_near_as_transformers_own(family: str) -> None:
    """The sums of attention are taken in another order: logits differ by rounding. The measure is how far transformers'
    own two implementations, sdpa and eager, lie apart on the same tokens."""
    expected, eager = reference(family), reference(family, attention="eager")
    model = tiny_model(family, "avmp")
    cache = cache_of(model, chaos=2)
    result = generate(model, prompts(), cache)
    assert torch.equal(result.sequences, expected.sequences)
    assert largest_difference(result, expected) <= 2 * largest_difference(eager, expected)
    assert cache.pool.stats().units_moved >= len(kinds(cache)) * steps(cache)
    assert cache.pool.lengths(cache.sequences).tolist() == [length + NEW_TOKENS - 1 for length in (5, 17, 11, 9)]
    require_whole(cache)


BETWEEN_LAYERS = [("mamba2", "sdpa"), ("falcon_h1", "sdpa"), ("qwen3_next", "sdpa"), ("bamba", "avmp")]


@pytest.mark.parametrize(("family", "attention"), [pair for pair in BETWEEN_LAYERS if IN_PLACE or pair[1] == "sdpa"])
def test_units_that_move_between_any_two_layers_change_no_token(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    cache, tokens = cache_of(model, chaos=3), 24
    with ExitStack() as stack:
        disturb_between_layers(stack, model, cache)
        result = generate(model, prompts(), cache, max_new_tokens=tokens)
    assert torch.equal(result.sequences, reference(family).sequences[:, : result.sequences.shape[1]])
    assert cache.pool.stats().units_moved >= 2 * (tokens - 1) * len(model.base_model.layers) * len(kinds(cache))
    require_whole(cache)


@pytest.mark.slow
@pytest.mark.parametrize("chaos", [None, 1])
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "avmp"] if IN_PLACE else ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_wide_grid(family: str, attention: str, page_tokens: int, chaos: int | None) -> None:
    """Eager attention multiplies the strided keys that were gathered, where heads are not shared; that may round
    differently from the same product of contiguous ones."""
    sdpa, eager = (reference(family, attention=own, seed=1) for own in ("sdpa", "eager"))
    expected = eager if attention == "eager" else sdpa
    model = tiny_model(family, attention)
    disturbance = None if chaos is None else ChaosMigration(chaos)
    cache = AvmpCache(model, "2MiB", page_tokens=page_tokens, options=Options(poison=True), disturbance=disturbance)
    result = generate(model, prompts(seed=1), cache)
    assert torch.equal(result.sequences, expected.sequences)
    bound = 0 if attention == "sdpa" else 2 * largest_difference(sdpa, eager)
    assert largest_difference(result, expected) <= bound
    require_whole(cache)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "avmp"] if IN_PLACE else ["eager"])
@pytest.mark.parametrize("family", OTHERS)
def test_every_other_model_type_whose_layers_are_all_of_a_kind_that_works(family: str, attention: str) -> None:
    expected = reference(family, "eager", max_new_tokens=24)
    model = tiny_model(family, attention)
    cache = AvmpCache(model, "1MiB", page_tokens=4, options=Options(poison=True), disturbance=ChaosMigration(1))
    if (family, attention) == ("gpt_neox", "avmp"):
        with pytest.raises(Unsupported, match="a model that hands the arguments of its attention to the cache"):
            generate(model, prompts(), cache)
        return
    result = generate(model, prompts(), cache, max_new_tokens=24)
    assert torch.equal(result.sequences, expected.sequences)
    assert largest_difference(result, expected) <= (1e-4 if attention == "avmp" else 0)
    require_whole(cache)


@pytest.mark.slow
def test_every_model_type_that_a_geometry_can_be_read_of_is_tested() -> None:
    composite = {"qwen3_5", "qwen3_5_moe"}  # known by the type of the text model inside
    assert set(READERS) == {*FAMILIES, *OTHERS, *composite}
