"""The public operations as torch.compile and everything else that traces sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import avmp
from avmp import registration
from avmp.cache_pool import CachePool
from avmp.errors import Unsupported
from avmp.schemas import OPERATIONS
from tests.attention_problems import Shape, make_problem
from tests.chaos import ChaosMigration
from tests.op_calls import (
    BATCHED,
    BIAS,
    DIM,
    FLAT,
    HEADS,
    KV_HEADS,
    TAPS,
    A,
    Recorder,
    first_step,
    hybrid_pool,
    recorded,
    same,
    watch_backends,
)

pytestmark = pytest.mark.usefixtures("one_thread")

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- as torch knows them ---------------------------------------------------------------------------------------------


VARIANTS = {"paged_attention_lse", "write_k", "gather_k_ragged", "migrate_on_device", "poison_units", "swap_in"}


@pytest.mark.parametrize(
    ("name", "in_arena"),
    [(name, True) for name in FLAT] + [(name, False) for name in FLAT if name not in VARIANTS],
    ids=lambda value: value if isinstance(value, str) else ["own", "arena"][value],
)
def test_torch_finds_nothing_wrong_with_a_registration(name: str, in_arena: bool) -> None:
    overload, positional, keywords = recorded(FLAT[name], first_step(in_arena))
    with torch.no_grad():
        torch.library.opcheck(overload, positional, keywords, test_utils=UTILITIES)


def test_every_form_of_every_operation_was_among_them() -> None:
    seen = {recorded(call, first_step(in_arena))[0].name() for call in FLAT.values() for in_arena in (True, False)}
    forms = {
        f"avmp::{name}" + ("." + "_".join(words) if words else "")
        for name, operation in OPERATIONS.items()
        for arena in ([], ["arena"] if operation.caches else [])
        for words in (arena, [*arena, "out"] if operation.out else arena)
    }
    assert seen == forms


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_written_is_declared_and_in_an_arena_it_is_one_tensor(name: str) -> None:
    writes = {
        "paged_attention": set(),
        "gather_kv": set(),
        "write_kv": {"key_cache", "value_cache"},
        "selective_state_update": {"state", "intermediate_states"},
        "causal_conv1d_update": {"conv_state"},
        "swap_out": {"host"},
        "apply_table_changes": {"tables"},
    }
    written = writes.get(name, {"lanes"})
    packet, caches = getattr(torch.ops.avmp, name), set(OPERATIONS[name].caches)

    def declared(overload: str) -> set[str]:
        return {a.name for a in getattr(packet, overload)._schema.arguments if a.alias_info and a.alias_info.is_write}

    assert declared("default") == written
    if caches:
        assert declared("arena") == written - caches | ({"arena"} if written & caches else set())
    if OPERATIONS[name].out:
        assert declared("out") == written | {"out"}
        assert declared("arena_out") == declared("arena") | {"out"}


@pytest.mark.parametrize("in_arena", [True, False], ids=["arena", "own"])
@pytest.mark.parametrize("name", FLAT)
def test_a_dispatched_call_does_what_a_direct_one_does(name: str, in_arena: bool) -> None:
    direct, dispatched = first_step(in_arena), first_step(in_arena)
    with torch.no_grad():
        expected = FLAT[name](direct)
        with Recorder() as recorder:
            found = FLAT[name](dispatched)
    assert len(recorder.calls) == 1
    assert same(expected, found) and torch.equal(direct.pool.lanes, dispatched.pool.lanes)


def test_eager_calls_go_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_enter", None)
    step = first_step()
    for call in (*FLAT.values(), *BATCHED.values()):
        call(step)


def metadata(results: Any) -> list[Any]:
    return [(one.shape, one.dtype, one.stride()) for one in tree_leaves(results) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", FLAT)
def test_fake_and_meta_tensors_give_what_real_ones_give(name: str) -> None:
    step = first_step()
    overload, positional, keywords = recorded(FLAT[name], step)
    expected = metadata(overload(*positional, **keywords))
    mode = FakeTensorMode()
    for convert in (mode.from_tensor, lambda tensor: tensor.to("meta")):
        args, kwargs = tree_map_only(torch.Tensor, convert, (positional, keywords))
        with torch.no_grad():
            assert metadata(overload(*args, **kwargs)) == expected


GRID = [
    Shape(dtype=dtype, head_dim_v=head_dim_v, heads=heads, fp8=fp8, padded_rows=padded, padded_tokens=padded)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for head_dim_v, heads in ((32, 4), (24, 2))
    for fp8 in (None, "e4m3")
    for padded in (0, 3)
]


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_fake_attention_and_gathering_are_the_real_ones_over_a_grid(return_lse: bool) -> None:
    mode = FakeTensorMode()
    for shape in GRID:
        call = make_problem(shape).call | {"return_lse": return_lse}
        if shape.padded_rows:
            wide = torch.zeros(*call["q"].shape[:2], 2 * shape.head_dim, dtype=shape.dtype)
            call["q"] = wide[..., : shape.head_dim].copy_(call["q"])
        gather = {name: call[name] for name in ("key_cache", "value_cache", "block_table", "seq_lens", "max_seq_len")}
        gather |= {"page_table": call["page_table"], "dtype": shape.dtype if shape.padded_rows else None}
        for function, arguments in ((avmp.paged_attention, call), (avmp.gather_kv, gather)):
            fake = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            assert metadata(function(**fake)) == metadata(function(**arguments)), shape


# -- compiled --------------------------------------------------------------------------------------------------------


def decode_step(x: torch.Tensor, caches: list[Any], batch: Any) -> torch.Tensor:
    """A hybrid model in small: two layers of states and two of attention, one feeding the next, x ``[tokens, 64]``."""
    tokens = x.shape[0]
    for (window, state), (keys, values) in caches:
        channels = avmp.causal_conv1d_update(x[:, :8], window, TAPS, BIAS, batch, activation="silu")
        inputs, b = channels.view(tokens, 2, 4), x[:, 8:16].view(tokens, 1, 8)
        y = avmp.selective_state_update(state, inputs, x[:, 16:24].view(tokens, 2, 4), A, b, b, batch, dt_softplus=True)
        x = torch.cat([y.view(tokens, 8), x[:, 8:]], 1)
        k, v = x[:, :32].view(tokens, KV_HEADS, DIM), x[:, 32:].view(tokens, KV_HEADS, DIM)
        avmp.write_kv(k, v, keys, values, batch)
        x = avmp.paged_attention(x.view(tokens, HEADS, DIM), keys, values, batch, scale=0.25).view(tokens, 64)
    return x


def caches_of(pool: CachePool) -> list[Any]:
    return [(pool.state(layer), pool.kv(layer + 1)) for layer in (0, 2)]


class Captured:
    """A backend of torch.compile that keeps the graphs and runs them as they are, or hands them on."""

    def __init__(self, backend: str = "eager") -> None:
        self.backend = backend
        self.graphs: list[torch.fx.GraphModule] = []
        self.inputs: list[list[Any]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        self.inputs.append(inputs)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_decoding_gives_the_bytes_of_eager_decoding(fresh_compiler: None, backend: str) -> None:
    """Prefill and nine steps, in which units move, lengths cross pages and rows leave: three compilations, for
    the first step, for any length, and for any number of rows."""
    captured = Captured(backend)
    compiled = torch.compile(decode_step, backend=captured, fullgraph=True)
    pools = [hybrid_pool(disturbance=ChaosMigration(5)) for _ in range(2)]
    sequences = [pool.admit([9, 1, 5]) for pool in pools]
    addresses = [pool.lanes.data_ptr() for pool in pools]
    for number in range(10):
        batches = [pool.batch(rows) for pool, rows in zip(pools, sequences, strict=True)]
        x = torch.randn(batches[0].num_tokens, 64, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            expected = decode_step(x, caches_of(pools[0]), batches[0])
            found = compiled(x, caches_of(pools[1]), batches[1])
        assert torch.equal(expected, found)
        assert torch.equal(pools[0].lanes, pools[1].lanes)
        if number == 6:
            for pool, rows in zip(pools, sequences, strict=True):
                pool.release(rows[:1])
            sequences = [rows[1:] for rows in sequences]
        for pool, rows in zip(pools, sequences, strict=True):
            pool.extend(rows)
    assert pools[0].relocation_epoch > 5
    assert addresses == [pool.lanes.data_ptr() for pool in pools]
    assert len(captured.graphs) <= 3


def test_a_graph_has_the_arena_as_one_input_and_each_operation_as_one_node(fresh_compiler: None) -> None:
    captured, step = Captured(), first_step()
    x = torch.randn(step.batch.num_tokens, 64)
    with torch.no_grad():
        torch.compile(decode_step, backend=captured, fullgraph=True)(x, caches_of(step.pool), step.batch)
    (graph,), (inputs,) = captured.graphs, captured.inputs
    storage = step.pool.lanes.untyped_storage()
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    in_arena = [one for one in tensors if one.untyped_storage().data_ptr() == storage.data_ptr()]
    assert [(one.dtype, one.shape) for one in in_arena] == [(torch.uint8, (storage.nbytes(),))]
    called = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("avmp.")]
    names = ["causal_conv1d_update", "selective_state_update", "write_kv", "paged_attention"]
    assert called == [f"avmp.{name}.arena" for name in names + names]


def test_one_compiled_layer_serves_all_layers(fresh_compiler: None) -> None:
    """What tells the views of two layers apart is where they begin, which no shape shows."""

    def layer(q: torch.Tensor, k: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Any) -> Any:
        avmp.write_kv(k, k, keys, values, batch)
        return avmp.paged_attention(q, keys, values, batch, scale=0.25)

    captured = Captured()
    compiled = torch.compile(layer, backend=captured, fullgraph=True)
    eager, step = first_step(), first_step()
    for number in (1, 3, 1, 3):
        q, k = step.q + number, step.k * number
        with torch.no_grad():
            expected = layer(q, k, *eager.pool.kv(number), eager.batch)
            assert torch.equal(compiled(q, k, *step.pool.kv(number), step.batch), expected)
    assert torch.equal(eager.pool.lanes, step.pool.lanes)
    assert not torch.equal(step.pool.kv(1)[0], step.pool.kv(3)[0])
    assert len(captured.graphs) == 2  # the first layer, and any


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_caches_that_share_a_storage_of_their_own_are_written_as_in_eager_mode(
    fresh_compiler: None, backend: str, where: str
) -> None:
    """As other engines keep them: keys and values of a layer in one tensor, split outside of the graph or in it."""

    def attend(q: torch.Tensor, k: torch.Tensor, cache: Any, tables: dict[str, Any]) -> torch.Tensor:
        keys, values = cache.unbind(0) if isinstance(cache, torch.Tensor) else cache
        slots = tables["block_table"][:, 0].long() * 4
        avmp.write_kv(k[: len(slots)], -k[: len(slots)], keys, values, slots, first_valid_id=0)
        return avmp.paged_attention(q, keys, values, scale=0.25, **tables)

    step = first_step()
    tables = step.attention() | {"page_table": None, "first_valid_id": 0}
    caches = [torch.randn(2, 40, 4, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    expected_cache, cache = caches[0], caches[1].copy_(caches[0])
    with torch.no_grad():
        expected = attend(step.q, step.k, expected_cache, tables)
        given = cache if where == "inside" else cache.unbind(0)
        found = torch.compile(attend, backend=backend, fullgraph=True)(step.q, step.k, given, tables)
    assert torch.equal(found, expected) and torch.equal(cache, expected_cache)


def test_a_graph_that_takes_up_a_view_beside_the_arena_is_refused(fresh_compiler: None) -> None:
    """Otherwise it might read what was there before the write."""

    def mixed(k: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Any) -> torch.Tensor:
        avmp.write_kv(k, k, keys, values, batch)
        return keys[-8:].sum()

    for layer in (1, 3):
        step = first_step()
        before = step.pool.lanes.clone()
        with torch.no_grad(), pytest.raises(Exception, match=r"aot_autograd\(\) does not yet handle"):
            torch.compile(mixed, backend="aot_eager", fullgraph=True)(step.k, *step.pool.kv(layer), step.batch)
        assert torch.equal(step.pool.lanes, before)


def views_only(x: torch.Tensor, caches: list[Any], batch: Any) -> torch.Tensor:
    """Without arithmetic of its own, so that inductor has nothing to generate code for."""
    tokens = x.shape[0]
    for (window, _), (keys, values) in caches:
        y = avmp.causal_conv1d_update(x[:, :8], window, TAPS, BIAS, batch)
        k, v = x[:, :32].view(tokens, KV_HEADS, DIM), x[:, 32:].view(tokens, KV_HEADS, DIM)
        avmp.write_kv(k, v, keys, values, batch)
        x = avmp.paged_attention(x.view(tokens, HEADS, DIM), keys, values, batch, scale=0.25).view(tokens, 64)
    return x, y


def test_inductor_keeps_the_arena_where_it_is(
    fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of the arena, neither before a write nor after it, in what inductor generates; and the same bytes."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    eager, step = first_step(), first_step()
    x = torch.randn(step.batch.num_tokens, 64)
    compiled = torch.compile(views_only, fullgraph=True)
    with torch.no_grad():
        expected = views_only(x, caches_of(eager.pool), eager.batch)
        found, (code,) = run_and_get_code(compiled, x, caches_of(step.pool), step.batch)
    assert same(expected, found) and torch.equal(eager.pool.lanes, step.pool.lanes)
    body = code[code.index("def call(") :]
    assert body.count("torch.ops.avmp.write_kv.arena") == 2
    assert "empty_strided" not in body and "copy" not in body


def test_compiled_code_runs_on_the_backend_of_its_pool_or_of_the_moment(
    fresh_compiler: None, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_backends(monkeypatch)
    step = first_step(backend="triton")
    eager = first_step()
    compiled = torch.compile(BATCHED["write_kv"], backend="eager", fullgraph=True)
    with torch.no_grad():
        BATCHED["write_kv"](eager)
        compiled(step)
        with avmp.use_backend("torch"):
            compiled(step)
    assert [backend for _, backend in seen] == ["torch", "triton", "torch"]
    assert torch.equal(step.pool.lanes, eager.pool.lanes)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_tensor_that_requires_a_gradient_is_refused(fresh_compiler: None, compiled: bool) -> None:
    step = first_step()
    taps = torch.nn.Parameter(TAPS)

    def call(x: torch.Tensor, window: torch.Tensor, batch: Any) -> torch.Tensor:
        return avmp.causal_conv1d_update(x, window, taps, None, batch)

    function = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    arguments = step.channels, step.state(0, 0), step.batch
    with pytest.raises(Exception, match=r"weight requires a gradient.*no_grad\(\)") as raised:
        function(*arguments)
    assert compiled or isinstance(raised.value, Unsupported)
    with torch.no_grad():
        assert not function(*arguments).requires_grad
    with torch.inference_mode():
        function(*arguments)
