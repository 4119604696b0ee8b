"""Memory policies: each by hand on small arenas, all of them against a dictionary, avmp against its rivals."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from avmp.baselines import (
    POLICIES,
    SGLANG_DEFAULT_SHARE,
    STATIC_SHARES,
    AllocatorPolicy,
    ByteBudget,
    InflatedBlock,
    InflatedBlockRule,
    PolicyFull,
    PolicySetup,
    StaticSplit,
    make_policy,
)
from avmp.errors import InvalidArgument, StaleHandle, Unsupported
from avmp.geometry import AttentionLayer, Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.options import Options
from avmp.replay import replay, setup_for
from avmp.workloads import Trace, builtin_trace


def geometry_of(attention: int, state: int, token_bytes: int = 128, state_bytes: int = 1024, page_tokens: int = 4):
    """Layers of equal size: KV bytes per token and state bytes of one layer."""
    dim = token_bytes // 4
    return Geometry(
        attention_layers=tuple(AttentionLayer(i, 1, dim, dim, "bfloat16") for i in range(attention)),
        state_layers=tuple(StateLayer(100 + i, (StatePart("ssm", (state_bytes,), "int8"),)) for i in range(state)),
        page_tokens=page_tokens,
        max_position_embeddings=4096,
    )


def setup_of(layout, longest_tokens=1000, max_sequences=100, **options):
    return PolicySetup(layout, longest_tokens, max_sequences, Options(**options))


def counts(*values):
    return np.array(values, dtype=np.int64)


# Pages of 512 B and 4 tokens, slots of 1,024 B, null area of one slot: 16 KiB is 15 slots or 30 pages beside it.
SMALL = Layout.from_unit_sizes(page_bytes=512, slot_bytes=1024, lane_bytes=16384, page_tokens=4)
KV_ONLY = Layout.plan(geometry_of(2, 0), 16384)
STATE_ONLY = Layout.plan(geometry_of(0, 4), 65536)
HYBRID = Layout.plan(geometry_of(2, 6), 131072)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_the_oracle_has_the_arena_less_the_null_area_as_one_budget():
    oracle = ByteBudget(setup_of(SMALL))
    assert oracle.budget_bytes == 16384 - 1024
    first = oracle.admit(counts(4, 5))  # 1 + 2 pages, 2 slots
    assert oracle.used_bytes() == {"kv": 3 * 512, "state": 2 * 1024}
    rest = 16384 - 1024 - 3 * 512 - 2 * 1024  # 11,776 B: one slot and 21 pages of 4 tokens
    assert oracle.fits(counts(4 * ((rest - 1024) // 512)))
    assert not oracle.fits(counts(4 * ((rest - 1024) // 512) + 1))
    oracle.extend(first, counts(0, 3))
    assert oracle.used_bytes()["kv"] == 3 * 512
    oracle.extend(first)
    assert oracle.used_bytes()["kv"] == (2 + 3) * 512
    assert oracle.max_sequences(4) == (16384 - 1024) // (512 + 1024)
    assert oracle.impossible(counts(1, 112, 113)).tolist() == [False, False, True]  # 28 pages and a slot are 15,360 B


@pytest.mark.parametrize(
    ("share", "pages", "slots"),
    [("static-0.1", 28, 1), ("static-0.5", 16, 8), ("static-0.9", 3, 14)],
    ids=["0.1", "0.5", "0.9"],
)
def test_a_static_split_cuts_whole_pages_and_slots_out_of_the_whole_arena(share, pages, slots):
    split = make_policy(share, setup_of(SMALL))
    assert split.name == share
    assert (split.page_count, split.slot_count) == (pages, slots)
    assert split.fits(counts(*[1] * min(pages, slots)))
    assert not split.fits(counts(*[1] * (min(pages, slots) + 1)))
    assert split.impossible(counts(4 * pages, 4 * pages + 1)).tolist() == [False, True]


def test_static_shares_are_exact():
    """0.3 of 10 slots is 3 slots, which 0.3 in binary falls short of."""
    layout = Layout.from_unit_sizes(page_bytes=256, slot_bytes=256, lane_bytes=2560)
    assert [make_policy(name, setup_of(layout)).slot_count for name in STATIC_SHARES] == list(range(1, 10))


def test_sglang_sets_aside_nine_parts_of_nineteen():
    layout = Layout.from_unit_sizes(page_bytes=256, slot_bytes=256, lane_bytes=19 * 256)
    split = StaticSplit(setup_of(layout), SGLANG_DEFAULT_SHARE, "sglang")
    assert (split.name, split.slot_count, split.page_count) == ("sglang", 9, 10)


@pytest.mark.parametrize("share", [Fraction(0), Fraction(1), Fraction(-1, 2)])
def test_a_share_that_leaves_a_pool_without_memory_is_refused(share):
    with pytest.raises(InvalidArgument, match="state share"):
        StaticSplit(setup_of(SMALL), share)


@pytest.mark.parametrize(
    ("model", "block_tokens", "state_padding", "padding_layers", "least_kv_mib"),
    [
        ("jamba-v0.1", 80, 0.0526, 0, 1.2),
        ("zamba2-2.7b", 48, 0.4312, 0, 8.4),
        ("zamba2-7b", 48, 0.4305, 10, 17.1),
        ("bamba-9b", 528, 0.0069, 1, 6.2),
        ("falcon-h1-1.5b", 1568, 0.0071, 0, 36.8),
        ("falcon-h1-7b", 1568, 0.0071, 0, None),
        ("falcon-h1-34b", 1040, 0.001, 0, 146.2),
        ("granite-4.0-h-tiny", 400, 0.0159, 0, 3.1),
        ("granite-4.0-h-small", 528, 0.0069, 0, 8.2),
        ("nemotron-h-8b", 1040, 0.001, 0, 16.2),
        ("nemotron-nano-9b-v2", 1312, 0.0108, 1, 20.5),
        ("nemotron-3-nano-30b-a3b", 2096, 0.0058, 1, 12.3),
        ("qwen3-next-80b-a3b", 544, 0.0149, 0, 12.8),
        ("qwen3.5-4b", 528, 0.0076, 0, 16.5),
        ("qwen3.5-27b", 784, 0.0013, 0, 49.0),
        ("qwen3.5-35b-a3b", 1056, 0.0076, 0, 20.6),
        ("lfm2-1.2b", 16, 3.0, 2, 0.2),
    ],
)
def test_blocks_are_those_that_vllm_reports(model, block_tokens, state_padding, padding_layers, least_kv_mib):
    geometry = named_model(model, convention="vllm")
    rule = InflatedBlockRule.of(geometry)
    assert rule.block_tokens == block_tokens
    assert rule.state_padding == pytest.approx(state_padding, abs=5e-5)
    layers = len(geometry.attention_layers) + len(geometry.state_layers)
    assert (rule.attention_groups + rule.state_groups) * rule.group_layers - layers == padding_layers
    if least_kv_mib is not None:
        assert rule.attention_groups * rule.block_bytes / 2**20 == pytest.approx(least_kv_mib, abs=0.051)


def test_a_pool_of_inflated_blocks_by_hand():
    """t1 = 64 B, S = 1,500 B: blocks of 32 tokens and 2,048 B a layer, of two layers; six state layers are 3 groups."""
    layout = Layout.plan(geometry_of(2, 6, token_bytes=64, state_bytes=1500), 65536)
    vllm = InflatedBlock(setup_of(layout))
    assert (vllm.rule.block_tokens, vllm.rule.block_bytes, vllm.block_count) == (32, 4096, 15)
    handles = vllm.admit(counts(32, 1))  # 1 + 1 blocks of KV, 3 + 3 of states
    assert vllm.used_bytes() == {"kv": 2 * 4096, "state": 6 * 4096}
    vllm.extend(handles)
    assert vllm.used_bytes()["kv"] == 3 * 4096
    assert vllm.fits(counts(96)) and not vllm.fits(counts(97))
    assert vllm.max_sequences(1) == 15 // 4
    assert vllm.impossible(counts(12 * 32, 12 * 32 + 1)).tolist() == [False, True]


def test_an_arena_without_room_for_a_block_makes_every_length_impossible():
    layout = Layout.plan(geometry_of(2, 2, token_bytes=64, state_bytes=1 << 10), 1 << 16)
    tiny = replace(layout, geometry=geometry_of(2, 2, token_bytes=64, state_bytes=1 << 20))
    assert InflatedBlock(setup_of(tiny)).impossible(counts(1)).tolist() == [True]


def test_vllm_needs_layers_of_equal_size_and_knows_them():
    layers = tuple(AttentionLayer(layer, 1 + layer, 64, 64, "bfloat16") for layer in range(2))
    unequal = replace(geometry_of(2, 2), attention_layers=layers)
    with pytest.raises(Unsupported, match="differ in bytes"):
        make_policy("vllm", setup_of(Layout.plan(unequal, 131072)))
    with pytest.raises(InvalidArgument, match="needs the model's layers"):
        make_policy("vllm", setup_of(SMALL))


def test_avmp_is_the_real_allocator():
    policy = AllocatorPolicy(setup_of(SMALL, longest_tokens=8))
    handles = policy.admit(counts(*[4] * 9))  # 9 slots and 9 pages beside the null slot: 14,848 of 16,384 B
    assert policy.used_bytes() == {"kv": 9 * 512, "state": 9 * 1024}
    policy.release(handles[1:])
    policy.extend(handles[:1], 4)
    assert policy.admit(counts(*[8] * 5)).shape == (5,)
    policy.allocator.check()
    assert policy.counters().keys() == {"retractions", "migrations", "bytes_moved"}
    assert policy.impossible(counts(8, 9)).tolist() == [False, True]
    assert not policy.fits(counts(9))
    with pytest.raises(PolicyFull, match="avmp: admit: 9 tokens in one sequence"):
        policy.admit(counts(9))


def test_capacity_moves_in_avmp_and_is_counted():
    policy = AllocatorPolicy(setup_of(SMALL, longest_tokens=112))
    handles = policy.admit(counts(*[4] * 10))
    policy.release(handles[1:-1])  # whichever of the two left has the outermost slot, it has to move
    policy.extend(handles[[0, -1]], counts(0, 4 * 24))
    assert policy.used_bytes() == {"kv": 26 * 512, "state": 2 * 1024}
    assert policy.counters() == {"retractions": 0, "migrations": 1, "bytes_moved": 1024}


def test_floors_bound_what_avmp_can_ever_hold():
    policy = AllocatorPolicy(setup_of(SMALL, longest_tokens=112, floor_slots=5))
    pages = (16384 - 6 * 1024) // 512
    assert policy.impossible(counts(4 * pages, 4 * pages + 1)).tolist() == [False, True]
    assert policy.max_sequences(4 * pages) == 1
    assert policy.fits(counts(4 * pages))


def test_effects_and_events_are_never_recorded():
    policy = AllocatorPolicy(setup_of(SMALL, record_effects=True, events=True))
    policy.admit(counts(4))
    assert policy.allocator.drain()[0] == []
    assert not policy.allocator.options.events


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match=r"unknown policy 'best'; known: avmp, static-0\.1, .*, vllm, oracle"):
        make_policy("best", setup_of(SMALL))


# -- every policy ----------------------------------------------------------------------------------------------------


of_each_policy = pytest.mark.parametrize("policy_name", POLICIES)


@of_each_policy
@pytest.mark.parametrize("layout", [KV_ONLY, STATE_ONLY], ids=["kv only", "states only"])
def test_a_model_with_one_kind_of_cache_gets_the_whole_arena(policy_name, layout):
    policy = make_policy(policy_name, setup_of(layout))
    most = policy.max_sequences(4)
    inflation = 4 if policy_name == "vllm" and layout is KV_ONLY else 1  # vLLM's blocks have 16 tokens at least
    units = layout.arena_bytes // (inflation * (layout.page_total_bytes + layout.slot_total_bytes))
    assert most == (units if policy_name in STATIC_SHARES else units - 1)  # the others have one null unit
    handles = policy.admit(np.full(most, 4))
    assert not policy.fits(counts(4))
    assert policy.used_bytes()["state" if layout is KV_ONLY else "kv"] == 0
    policy.release(handles)
    assert policy.used_bytes() == {"kv": 0, "state": 0}


@of_each_policy
def test_handles_are_checked(policy_name):
    policy = make_policy(policy_name, setup_of(HYBRID))
    handles = policy.admit(counts(3, 3))
    policy.release(handles[:1])
    for operation in (policy.extend, policy.release, policy.swap_out, policy.swap_in):
        with pytest.raises(StaleHandle):
            operation(handles[:1])
        with pytest.raises(StaleHandle):
            operation(counts(-7))
    for operation in (policy.extend, policy.release, policy.swap_out):
        with pytest.raises(InvalidArgument, match="twice"):
            operation(np.repeat(handles[1:], 2))
    with pytest.raises(InvalidArgument):
        policy.admit(counts(-1))
    swapped = policy.swap_out(handles[1:])
    with pytest.raises(StaleHandle):
        policy.release(swapped)
    back = policy.swap_in(swapped)
    with pytest.raises(StaleHandle):
        policy.swap_in(swapped)
    policy.release(back)


@of_each_policy
def test_the_number_of_sequences_is_bounded(policy_name):
    policy = make_policy(policy_name, setup_of(HYBRID, max_sequences=2))
    policy.admit(counts(1))
    assert policy.fits(counts(1)) and not policy.fits(counts(1, 1))
    with pytest.raises(PolicyFull):
        policy.admit(counts(1, 1))
    policy.admit(counts(1))


class Expected:
    """What a policy must hold, from nothing but the lengths of its sequences and its rule's sizes."""

    def __init__(self, policy, layout):
        self.resident, self.swapped = {}, {}
        if policy.name == "avmp":
            self.block, self.kv, self.state = layout.page_tokens, layout.page_total_bytes, layout.slot_total_bytes
        else:
            units = policy.units
            self.block = units.block_tokens
            self.kv, self.state = units.kv_per_block * units.kv_bytes, units.state_per_sequence * units.state_bytes

    def used_bytes(self):
        blocks = sum(-(-length // self.block) for length in self.resident.values())
        return {"kv": blocks * self.kv, "state": len(self.resident) * self.state}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "extend", "release", "swap_out", "swap_in"]),
        st.integers(0, 2**16),
        st.lists(st.integers(0, 40), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=40,
)


@of_each_policy
@settings(max_examples=25)
@given(operations=OPERATIONS, layout=st.sampled_from([HYBRID, KV_ONLY, STATE_ONLY]))
def test_every_call_happens_whole_or_not_at_all(policy_name, operations, layout):
    policy = make_policy(policy_name, setup_of(layout, max_sequences=12))
    expected = Expected(policy, layout)
    for operation, choice, lengths in operations:
        apply(policy, expected, operation, choice, lengths)
        assert policy.used_bytes() == expected.used_bytes()
        assert sum(policy.used_bytes().values()) <= policy.arena_bytes
    policy.release(np.array(sorted(expected.resident), dtype=np.int64))
    assert policy.used_bytes() == {"kv": 0, "state": 0}


def apply(policy, expected, operation, choice, lengths):
    """One operation on the policy and, if it is not refused, on the dictionaries."""
    source = expected.swapped if operation == "swap_in" else expected.resident
    chosen = [handle for index, handle in enumerate(source) if choice >> index & 1]
    handles = np.array(chosen, dtype=np.int64)
    fits = policy.fits(np.array(lengths)) if operation == "admit" else None
    if operation == "swap_in":
        fits = policy.fits(np.array([source[handle] for handle in chosen], dtype=np.int64))
    try:
        if operation == "admit":
            new = policy.admit(np.array(lengths))
            expected.resident |= dict(zip(new.tolist(), lengths, strict=True))
        elif operation == "extend":
            policy.extend(handles)
            for handle in chosen:
                expected.resident[handle] += 1
        elif operation == "release":
            policy.release(handles)
            for handle in chosen:
                del expected.resident[handle]
        elif operation == "swap_out":
            new = policy.swap_out(handles)
            expected.swapped |= {to: expected.resident.pop(at) for at, to in zip(chosen, new.tolist(), strict=True)}
        else:
            new = policy.swap_in(handles)
            expected.resident |= {to: expected.swapped.pop(at) for at, to in zip(chosen, new.tolist(), strict=True)}
        assert fits is not False
    except PolicyFull:
        assert operation in ("admit", "extend", "swap_in")
        assert fits is not True


@of_each_policy
@settings(max_examples=25)
@given(tokens=st.integers(1, 200), layout=st.sampled_from([HYBRID, KV_ONLY, STATE_ONLY]))
def test_the_questions_asked_before_agree_with_what_happens(policy_name, tokens, layout):
    policy = make_policy(policy_name, setup_of(layout, max_sequences=2000))
    most = policy.max_sequences(tokens)
    assert (most == 0) == policy.impossible(counts(tokens))[0]
    assume(most)
    assert policy.fits(np.full(most, tokens)) and not policy.fits(np.full(most + 1, tokens))


# -- avmp against its rivals -----------------------------------------------------------------------------------------


@st.composite
def arenas(draw, whole_pages):
    """Layouts of odd unit sizes, with room for a few dozen units; lanes of a whole number of pages, or any."""
    page, slot = draw(st.integers(1, 40)) * 256, draw(st.integers(1, 60)) * 256
    lane = -(-max(page, slot) // slot) * slot + draw(st.integers(2 * (page + slot), 30 * (page + slot)))
    if whole_pages:
        lane = -(-lane // page) * page
    return Layout.from_unit_sizes(page, slot, lane, draw(st.integers(1, 3)), draw(st.integers(1, 8)))


@st.composite
def traces(draw, longest_prompt=40, longest_output=40):
    requests = draw(st.integers(1, 40))
    prompts = draw(st.lists(st.integers(1, longest_prompt), min_size=requests, max_size=requests))
    outputs = draw(st.lists(st.integers(0, longest_output), min_size=requests, max_size=requests))
    return Trace("drawn", np.zeros(requests), np.array(prompts), np.array(outputs))


def without_what_moving_costs(result):
    return replace(result, policy="", retractions=0, migrations=0, bytes_moved=0)


@settings(max_examples=40)
@given(layout=arenas(whole_pages=True), trace=traces())
def test_in_lanes_of_whole_pages_avmp_does_exactly_what_the_oracle_does(layout, trace):
    setup = setup_for(trace, layout)
    own, oracle = (replay(trace, make_policy(name, setup)) for name in ("avmp", "oracle"))
    assert without_what_moving_costs(own) == without_what_moving_costs(oracle)


@settings(max_examples=40)
@given(layout=arenas(whole_pages=False), trace=traces())
def test_in_any_lanes_avmp_loses_the_last_part_of_a_page_to_the_oracle_and_nothing_else(layout, trace):
    setup = setup_for(trace, layout)
    oracle = ByteBudget(setup)
    oracle.budget_bytes = layout.lane_count * layout.page_count * layout.page_bytes - layout.null_bytes
    own = replay(trace, make_policy("avmp", setup))
    assert without_what_moving_costs(own) == without_what_moving_costs(replay(trace, oracle))


@settings(max_examples=20)
@given(layout=arenas(whole_pages=True), trace=traces(longest_output=0))
def test_without_preemptions_no_split_of_the_same_bytes_is_ahead_of_avmp(layout, trace):
    """The split gets what avmp has beside its null area. Requests stay for one step: nothing is ever preempted."""
    null_lane_bytes = layout.first_slot * layout.slot_bytes
    assume(layout.lane_bytes >= 2 * (null_lane_bytes + layout.page_bytes) + layout.slot_bytes)
    split_layout = replace(
        layout,
        lane_bytes=layout.lane_bytes - null_lane_bytes,
        arena_bytes=layout.arena_bytes - layout.lane_count * null_lane_bytes,
    )
    own = replay(trace, make_policy("avmp", setup_for(trace, layout)))
    for name in STATIC_SHARES:
        split = replay(trace, make_policy(name, setup_for(trace, split_layout)))
        assert own.refused_impossible <= split.refused_impossible
        assert own.refused_impossible < split.refused_impossible or own.steps <= split.steps


@pytest.mark.parametrize(
    ("model", "memory"), [("jamba-v0.1", "1GiB"), ("zamba2-2.7b", "4GiB"), ("falcon-h1-1.5b", "3GiB")]
)
@pytest.mark.parametrize("workload_seed", [0, 1])
def test_on_real_shapes_avmp_is_with_the_oracle_and_ahead_of_every_split(model, memory, workload_seed):
    trace = builtin_trace("azure_conv", 150, workload_seed)
    setup = setup_for(trace, Layout.plan(named_model(model), memory))
    rates = {name: replay(trace, make_policy(name, setup)).completed_per_1000_steps for name in POLICIES}
    assert rates["avmp"] >= 0.99 * rates["oracle"]
    assert rates["avmp"] >= max(rates[name] for name in STATIC_SHARES)
