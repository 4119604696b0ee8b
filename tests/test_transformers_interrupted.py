"""A forward that was interrupted or refused: the next one is right, or is refused too, and nothing is lost for good."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AttentionInterface, DynamicCache

from avmp import ops
from avmp.errors import Inconsistent, InvalidArgument, RowTooLong, Unsupported
from avmp.integrations import transformers_layers
from avmp.integrations.transformers import AvmpCache
from avmp.integrations.transformers_attention import register
from avmp.integrations.transformers_layers import MODELS_ASK_THE_CACHE
from avmp.integrations.transformers_progress import Progress
from avmp.integrations.transformers_rows import Rows
from avmp.options import Options
from tests.transformers_models import IN_PLACE, forward, generate, prompts, tiny_model

ATTENTIONS = ["sdpa", "avmp"] if IN_PLACE else ["sdpa"]
in_place = pytest.mark.skipif(not IN_PLACE, reason="models tell a cache of their attention from transformers 5.24 on")


def cache_of(model: Any, memory: str = "1MiB", **keywords: Any) -> AvmpCache:
    return AvmpCache(model, memory, page_tokens=4, options=Options(poison=True, debug=2), **keywords)


def batch(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def close(attention: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit where nothing reads in place."""
    return torch.equal(one, other) if attention == "sdpa" else torch.allclose(one, other, atol=1e-4)


class Interruption:
    """Raises KeyboardInterrupt at one moment of a forward, at which one of these modules begins or ends. ``place`` is
    the last one that did; ``over`` is whether the forward came to its end before that moment."""

    def __init__(self, modules: list[Any]) -> None:
        self.left: int | None = None
        self.place: Any = None
        self.over = False
        self.hooks = [module.register_forward_pre_hook(self._pass) for module in modules]
        self.hooks += [module.register_forward_hook(self._pass) for module in modules]

    def _pass(self, module: Any, *arguments: Any) -> None:
        if self.left is None:
            return
        self.place = module
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1

    @contextmanager
    def at(self, moment: int) -> Iterator[None]:
        self.left, self.over = moment, False
        try:
            yield
            self.over = True
        except KeyboardInterrupt:
            pass
        finally:
            self.left = None


@contextmanager
def interruptions(modules: list[Any]) -> Iterator[Interruption]:
    """One to be used any number of times."""
    interruption = Interruption(modules)
    try:
        yield interruption
    finally:
        for hook in interruption.hooks:
            hook.remove()


def inside_of_the_last_state(model: Any, cache: AvmpCache, place: Any) -> bool:
    """Whether the module belongs to the last layer, which has a state: models change it and tell nobody."""
    last = len(model.base_model.layers) - 1
    inside = any(place is module for module in model.base_model.layers[last].modules())
    return last in cache._rows.progress.advanced and inside


def parts_of(model: Any, whole: bool) -> list[Any]:
    """The layers of a model and what they consist of: all modules, or those right below the layers."""
    layers = model.base_model.layers
    return [part for layer in layers for part in (layer.modules() if whole else (layer, *layer.children()))]


def logits_of_own(family: str, *steps: torch.Tensor) -> list[torch.Tensor]:
    """What transformers computes with its own cache, step by step."""
    model = tiny_model(family)
    own = DynamicCache(config=model.config)
    return [forward(model, own, input_ids=ids) for ids in steps]


def interrupt_everywhere(family: str, attention: str, kept: int, tokens: int, whole: bool) -> None:
    """A forward of ``tokens`` behind ``kept`` is interrupted at each moment, and then tried again: that is refused, or
    right, which it is behind the tokens of the first one where these have come to all layers."""
    first, ids = batch(3, kept), batch(3, tokens, seed=4)
    expected = logits_of_own(family, *[first] * bool(kept), ids, ids)[-2:]
    model = tiny_model(family, attention)
    root = cache_of(model)
    if kept:
        forward(model, root, input_ids=first)
    refused = moment = 0
    with interruptions(parts_of(model, whole)) as interruption:
        while not interruption.over:
            cache = root.fork()
            with interruption.at(moment):
                forward(model, cache, input_ids=ids)
            complete = interruption.over or cache._rows.progress.reach > kept
            try:
                result = forward(model, cache, input_ids=ids)
            except Inconsistent as error:
                assert ("crop" in str(error)) == (family != "mamba2") and "reset()" in str(error)
                refused += 1
            else:
                unknown = tokens == 1 and kept and inside_of_the_last_state(model, cache, interruption.place)
                assert unknown or close(attention, result, expected[complete]), (moment, interruption.place)
            moment += 1
    layers = len(model.base_model.layers)
    assert moment >= 6 * layers and refused >= 4 * (layers - 1)


BAMBAS = ["bamba", "bamba_attention_first", "bamba_attention_last"]
FAMILIES_HERE = ["llama", *BAMBAS, "jamba", "zamba2", "falcon_h1", "qwen3_next", "lfm2"]
BOTH = [(family, attention) for family in FAMILIES_HERE for attention in ATTENTIONS] + [("mamba2", "sdpa")]


@pytest.mark.parametrize(("family", "attention"), BOTH)
def test_wherever_a_forward_is_interrupted_the_next_one_is_right_or_refused(family: str, attention: str) -> None:
    """Before and behind every layer and every part of one: in the first forward, in decoding, and, where the model
    reads chunks, in one of those."""
    for kept, tokens in ((0, 5), (9, 1), (9, 3)):
        if family != "mamba2" or 1 in (tokens, not kept):
            interrupt_everywhere(family, attention, kept, tokens, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "tokens"), [(0, 1), (0, 5), (9, 1), (9, 3)])
@pytest.mark.parametrize(("family", "attention"), BOTH)
def test_the_same_at_every_module(family: str, attention: str, kept: int, tokens: int) -> None:
    if family != "mamba2" or tokens == 1 or not kept:
        interrupt_everywhere(family, attention, kept, tokens, whole=True)


@pytest.mark.parametrize(("family", "attention"), [pair for pair in BOTH if pair[0] not in ("llama", "mamba2")])
def test_an_interrupted_cache_goes_back_to_its_checkpoint(family: str, attention: str) -> None:
    """At every layer, by ``crop``, also to where it is; rows that have changed places since go back to what theirs
    was, and ``swap_out`` and ``reset`` leave nothing of the interruption."""
    first, ids = batch(3, 9), batch(3, 2, seed=4)
    expected = logits_of_own(family, first[[1, 1, 2]], ids)[-1]
    model = tiny_model(family, attention)
    cache = cache_of(model)
    forward(model, cache, input_ids=first)
    mark = cache.checkpoint()
    cache.reorder_cache(torch.tensor([1, 1, 2]))
    layers = list(model.base_model.layers)
    with interruptions(layers) as interruption:
        for moment in range(2 * len(layers)):
            with interruption.at(moment):
                forward(model, cache, input_ids=ids)
            if moment % 2:
                cache.swap_out()
            cache.crop(mark.length - cache.get_seq_length())
            result = forward(model, cache, input_ids=ids)
            assert close(attention, result, expected)
            cache.crop(-2)
    with interruptions(layers[:1]) as interruption, interruption.at(1):
        forward(model, cache, input_ids=ids)
    for attempt in (cache, cache.fork()):
        with pytest.raises(Inconsistent, match=r"layers \[.*\], or not to the end of them; crop.*reset\(\)"):
            forward(model, attempt, input_ids=ids)
    cache.reset()
    assert close(attention, forward(model, cache, input_ids=ids), logits_of_own(family, ids)[0])


def test_states_go_back_where_only_padding_is_taken_back() -> None:
    model, mask = tiny_model("bamba", ATTENTIONS[-1]), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    cache, expected = cache_of(model), []
    forward(model, cache, input_ids=batch(2, 9))
    cache.checkpoint()
    for _ in range(2):
        expected.append(forward(model, cache, input_ids=batch(2, 3, seed=4), attention_mask=mask))
        states = cache.pool.state(0)[1].clone()
        cache.crop(-3)
    assert torch.equal(*expected) and not torch.equal(states, cache.pool.state(0)[1])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kept", [0, 9])
def test_crop_counts_from_the_tokens_that_all_layers_have(kept: int, attention: str) -> None:
    """Whichever layers have got those of an interrupted forward: they are not to be reached by any ``crop``."""
    first, ids, last = batch(2, kept), batch(2, 5, seed=4), batch(2, 1, seed=5)
    expected = [logits_of_own("llama", *[first[:, : kept - cut]] * bool(kept), last)[-1] for cut in (0, 2)]
    model = tiny_model("llama", attention)
    layers = list(model.base_model.layers)
    root = cache_of(model)
    if kept:
        forward(model, root, input_ids=first)
    with interruptions(layers) as interruption:
        for moment in range(2 * len(layers) - 1):
            for cut in (0, 2) if kept else (0,):
                cache = root.fork()
                with interruption.at(moment):
                    forward(model, cache, input_ids=ids)
                assert cache.get_seq_length() == kept and not interruption.over
                with pytest.raises(InvalidArgument, match=rf"expected 0 to {-kept}$"):
                    cache.crop(-kept - 1)
                cache.crop(-cut)
                assert cache.get_seq_length() == kept - cut
                assert torch.allclose(forward(model, cache, input_ids=last), expected[cut > 0], atol=1e-4)


OPENERS = ["llama", "bamba", "bamba_attention_first", "falcon_h1"]


@contextmanager
def interrupted_pool(cache: AvmpCache, operation: str, done: bool, nth: int = 0) -> Iterator[None]:
    """The pool's operation of that name is interrupted, when it is called for the nth time, before it does anything,
    or when it is done."""
    run, calls = cache._arena.run, 0

    def interrupted(rows: Any, name: str, *arguments: Any) -> Any:
        nonlocal calls
        calls += name == operation
        hit = name == operation and calls == nth + 1
        if hit and not done:
            raise KeyboardInterrupt
        result = run(rows, name, *arguments)
        if hit:
            raise KeyboardInterrupt
        return result

    cache._arena.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        yield
    cache._arena.run = run  # type: ignore[method-assign]


def filled(family: str, attention: str = "sdpa") -> tuple[Any, AvmpCache]:
    """A model, and a cache of two rows of nine tokens, with a checkpoint there if it has states."""
    model = tiny_model(family, attention)
    cache = cache_of(model)
    forward(model, cache, input_ids=batch(2, 9))
    if cache._has_states:
        cache.checkpoint()
    return model, cache


def require_recovery(model: Any, cache: AvmpCache, family: str, tokens: int = 5) -> None:
    """The next forward is refused, and right behind ``crop(9 - get_seq_length())``."""
    ids = batch(2, tokens, seed=4)
    with pytest.raises(Inconsistent):
        forward(model, cache, input_ids=ids)
    cache.crop(9 - cache.get_seq_length())
    assert cache.get_seq_length() == 9
    attention = model.config._attn_implementation
    expected = logits_of_own(family, batch(2, 9), ids)[-1]
    assert torch.allclose(forward(tiny_model(family, attention), cache, input_ids=ids), expected, atol=1e-4)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", OPENERS)
def test_an_interrupt_while_room_is_made_is_found_out(family: str, attention: str, tokens: int, done: bool) -> None:
    model, cache = filled(family, attention)
    with interrupted_pool(cache, "extend", done):
        forward(model, cache, input_ids=batch(2, tokens, seed=4))
    require_recovery(model, cache, family, tokens)


@pytest.mark.parametrize("family", OPENERS)
def test_an_interrupt_before_the_first_layer_stores_is_taken_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = filled(family)

    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ops, "write_kv", interrupt)
        forward(model, cache, input_ids=batch(2, 5, seed=4))
    require_recovery(model, cache, family)


@in_place
@pytest.mark.parametrize("family", ["llama", "bamba_attention_first"])
def test_attention_that_was_interrupted_before_it_read_is_taken_back(family: str) -> None:
    model, cache = filled(family, "avmp")

    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    AttentionInterface.register("avmp", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            forward(model, cache, input_ids=batch(2, 5, seed=4))
    finally:
        register()
    require_recovery(model, cache, family)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("operation", ["truncate", "restore"])
def test_a_crop_that_is_interrupted_is_found_out(operation: str, done: bool) -> None:
    """Also by a forward of as many tokens as were to be taken back, between the rows, and behind another crop."""
    family = "llama" if operation == "truncate" else "bamba"
    for nth in (0, 1) if operation == "restore" else (0,):
        for again in (False, True):
            model, cache = filled(family)
            forward(model, cache, input_ids=batch(2, 3, seed=5))
            if again:
                cache.checkpoint() if cache._has_states else None
                forward(model, cache, input_ids=batch(2, 2, seed=5))
                cache.crop(-2)
            with interrupted_pool(cache, operation, done, nth):
                cache.crop(-3)
            require_recovery(model, cache, family, 3)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_reset_that_is_interrupted_is_found_out(family: str) -> None:
    ids = batch(2, 9, seed=4)
    model, cache = filled(family)
    with interrupted_pool(cache, "release", done=False):
        cache.reset()
    with pytest.raises(Inconsistent, match=r"crop\(\) or reset\(\) was interrupted"):
        forward(model, cache, input_ids=ids)
    cache.reset()
    assert torch.equal(forward(model, cache, input_ids=ids), logits_of_own(family, ids)[0])


@contextmanager
def interrupted_line(functions: list[Any], nth: int) -> Iterator[list[int]]:
    """The nth line that any of these functions comes to is interrupted before it does anything. Yields what is empty
    afterwards if they had fewer."""
    codes, left, hit = {function.__code__ for function in functions}, nth, []

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_code in codes:
            left -= 1
            if left == -1:
                hit.append(frame.f_lineno)
                raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line if frame.f_code in codes else None)
    try:
        yield hit
    except KeyboardInterrupt:
        assert hit
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_wherever_a_crop_is_interrupted_the_next_forward_is_right_or_refused(family: str) -> None:
    """Behind a crop, and with as many tokens as were to be taken back, so that they might seem to be those."""
    functions = [
        AvmpCache.crop, AvmpCache._restore, Rows.set_length, Rows.set_padding, Progress.tear, Progress.set_length
    ]  # fmt: skip
    first, ids = batch(2, 9), batch(2, 3, seed=4)
    expected = dict(zip((9, 12), logits_of_own(family, first, ids, ids)[1:], strict=True))
    moment, refused, hit = 0, 0, [0]
    while hit:
        model, cache = filled(family)
        forward(model, cache, input_ids=ids)
        if cache._has_states:
            cache.checkpoint()
        forward(model, cache, input_ids=batch(2, 2, seed=5))
        cache.crop(-2)
        with interrupted_line(functions, moment) as hit:
            cache.crop(-3)
        length = cache.get_seq_length()
        try:
            result = forward(model, cache, input_ids=ids)
        except Inconsistent:
            refused += 1
            cache.crop(9 - cache.get_seq_length())
            length, result = 9, forward(model, cache, input_ids=ids)
        assert torch.equal(result, expected[length]), (moment, hit)
        moment += 1
    assert moment >= 30 and refused >= 12


@pytest.mark.parametrize("family", ["llama", "bamba_attention_first"])
def test_wherever_making_room_is_interrupted_the_next_forward_is_right_or_refused(family: str) -> None:
    first, ids = batch(2, 9), batch(2, 3, seed=4)
    expected = logits_of_own(family, first, ids)[1]
    moment, refused, hit = 0, 0, [0]
    while hit:
        model, cache = filled(family)
        with interrupted_line([Rows.begin, Rows._make_room, Rows._giving_up.__wrapped__], moment) as hit:
            forward(model, cache, input_ids=ids)
        if not hit:
            break
        try:
            result = forward(model, cache, input_ids=ids)
        except Inconsistent:
            refused += 1
            cache.crop(9 - cache.get_seq_length())
            result = forward(model, cache, input_ids=ids)
        assert torch.equal(result, expected), (moment, hit)
        moment += 1
    assert moment >= 20 and refused >= 10


@pytest.mark.parametrize("operation", ["swap_out", "swap_in"])
def test_wherever_rows_are_interrupted_on_their_way_they_are_in_one_place(operation: str) -> None:
    first, ids = batch(2, 9), batch(2, 1, seed=4)
    expected = logits_of_own("llama", first, ids)[1]
    moment, hit = 0, [0]
    while hit:
        model, cache = filled("llama")
        if operation == "swap_in":
            cache.swap_out()
        with interrupted_line([Rows.swap_out, Rows.wake, Rows.become, Rows.forget_step], moment) as hit:
            getattr(cache, operation)()
        assert cache.batch_size == 2
        assert torch.equal(forward(model, cache, input_ids=ids), expected)
        moment += 1
    assert moment >= 5


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_what_is_behind_the_last_store_counts_as_done(family: str) -> None:
    first, ids = batch(2, 9), batch(2, 1, seed=4)
    expected = logits_of_own(family, first, ids, ids)[-1]
    model = tiny_model(family)
    cache = cache_of(model)
    forward(model, cache, input_ids=first)
    with interruptions([model.base_model.layers[-1]]) as interruption, interruption.at(1):
        forward(model, cache, input_ids=ids)
    assert torch.equal(forward(model, cache, input_ids=ids), expected)


def test_states_alone_have_nothing_to_go_back_to() -> None:
    model = tiny_model("mamba2")
    cache = cache_of(model)
    forward(model, cache, input_ids=batch(2, 9))
    with interruptions(list(model.base_model.layers)) as interruption, interruption.at(1):
        forward(model, cache, input_ids=batch(2, 1))
    with pytest.raises(Inconsistent, match=r"or not to the end of them; reset\(\) the cache") as refused:
        forward(model, cache, input_ids=batch(2, 1))
    with pytest.raises(Unsupported, match=r"does not count its tokens; reset\(\) the cache") as unsupported:
        cache.crop(0)
    assert not any(word in str(error.value) for error in (refused, unsupported) for word in ("crop the", "fork"))


def test_a_later_question_answers_the_one_before() -> None:
    progress = Progress([], [0, 1])
    progress.ask(0, 1)
    with pytest.raises(Inconsistent):
        progress.ask(1, 3)
    progress.take_back(0)
    assert progress.advanced == {0: 1, 1: 0} and progress.reach == 1


# -- refused -----------------------------------------------------------------------------------------------------------


@in_place
@pytest.mark.parametrize("family", ["bamba", "bamba_attention_first", "jamba", "falcon_h1"])
def test_a_mask_that_is_refused_leaves_the_cache_refused_until_it_goes_back(family: str) -> None:
    inputs, ids = prompts(), batch(4, 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    model = tiny_model(family)
    own = DynamicCache(config=model.config)
    forward(model, own, **inputs)
    expected = forward(model, own, input_ids=ids, attention_mask=mask)
    model = tiny_model(family, "avmp")
    cache = cache_of(model)
    forward(model, cache, **inputs)
    cache.checkpoint()
    with pytest.raises(Unsupported, match="this one has no mask at all"):
        forward(model, cache, input_ids=ids)
    if family != "bamba_attention_first":  # where nothing has been changed
        with pytest.raises(Inconsistent, match="last forward was interrupted"):
            forward(model, cache, input_ids=ids, attention_mask=mask)
        cache.crop(0)
    assert torch.allclose(forward(model, cache, input_ids=ids, attention_mask=mask), expected, atol=1e-4)


@in_place
@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1"])
def test_weights_of_attention_are_refused_before_anything_is_computed(family: str) -> None:
    expected = generate(tiny_model(family), prompts(), max_new_tokens=8)
    model = tiny_model(family, "avmp")
    cache = cache_of(model)
    for use in (
        lambda: generate(model, prompts(), cache, max_new_tokens=8, output_attentions=True),
        lambda: forward(model, cache, **prompts(), output_attentions=True),
    ):
        with pytest.raises(Unsupported, match="does not do output_attentions"):
            use()
        assert cache.batch_size == -1
        result = generate(model, prompts(), cache, max_new_tokens=8)
        assert torch.equal(result.sequences, expected.sequences)
        cache.reset()


@pytest.mark.parametrize("family", ["llama", "bamba", "falcon_h1"])
def test_reading_in_place_is_refused_where_models_do_not_tell_of_their_attention(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(tiny_model(family), prompts(), max_new_tokens=8)
    cache = cache_of(tiny_model(family))
    monkeypatch.setattr(transformers_layers, "reads_in_place", lambda: False)
    model = tiny_model(family, "avmp")
    for use in (
        lambda: cache_of(model),
        lambda: generate(model, prompts(), cache, max_new_tokens=4),
        lambda: forward(model, cache, **prompts()),
    ):
        with pytest.raises(Unsupported, match=r"'avmp' needs transformers 5\.24, this is 5\."):
            use()
        assert cache.batch_size == -1
    result = generate(tiny_model(family), prompts(), cache, max_new_tokens=8)
    assert torch.equal(result.sequences, expected.sequences)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("family", ["llama", "bamba", "bamba_attention_first", "falcon_h1", "mamba2"])
def test_another_number_of_rows_is_refused_and_changes_nothing(family: str, tokens: int) -> None:
    if tokens == 3 and family == "mamba2":
        pytest.skip("Mamba-2 of transformers reads no chunks")
    first, ids = batch(3, 9), batch(3, tokens, seed=4)
    model = tiny_model(family)
    cache = cache_of(model)
    forward(model, cache, input_ids=first)
    for rows in (1, 2, 4):
        with pytest.raises(InvalidArgument, match=rf"batch of {rows} rows for a cache that holds 3; reset\(\)"):
            forward(model, cache, input_ids=batch(rows, tokens))
    assert torch.equal(forward(model, cache, input_ids=ids), logits_of_own(family, first, ids)[1])


def test_a_chunk_that_finds_no_room_changes_nothing() -> None:
    first, ids = batch(2, 9), batch(2, 3, seed=4)
    model = tiny_model("bamba")
    cache = cache_of(model, max_length=12)
    forward(model, cache, input_ids=first)
    with pytest.raises(RowTooLong):
        forward(model, cache, input_ids=batch(2, 4))
    assert torch.equal(forward(model, cache, input_ids=ids), logits_of_own("bamba", first, ids)[1])


@torch.no_grad()
def test_looking_at_states_is_no_step() -> None:
    first, ids = batch(3, 9), batch(3, 1, seed=4)
    model = tiny_model("bamba")
    cache = cache_of(model)
    forward(model, cache, input_ids=first)
    for layer in (0, 2):
        assert cache.layers[layer].conv_states[0].shape[0] == cache.layers[layer].recurrent_states[0].shape[0] == 3
        if MODELS_ASK_THE_CACHE:
            assert torch.equal(cache.get_conv_state(layer), cache.layers[layer].conv_states[0])
    assert torch.equal(forward(model, cache, input_ids=ids), logits_of_own("bamba", first, ids)[1])
