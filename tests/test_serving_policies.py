"""The policies that a server is tried with beside those of the replay: each by hand, and all against a dictionary."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from avmp.baselines import (
    MORE_POLICIES,
    POLICIES,
    AllocatorPolicy,
    ByteBudget,
    InflatedBlock,
    PaddedUnit,
    PaperPools,
    PolicyFull,
    StaticSplit,
    TwoEnds,
    make_policy,
    parse_split,
)
from avmp.errors import InvalidArgument, Unsupported
from avmp.layout import Layout
from avmp.named_models import named_model
from tests.test_baselines import (
    HYBRID,
    KV_ONLY,
    OPERATIONS,
    SMALL,
    STATE_ONLY,
    Expected,
    apply,
    counts,
    geometry_of,
    setup_of,
)

# -- by hand ---------------------------------------------------------------------------------------------------------


def test_align_keeps_two_states_in_the_same_blocks():
    """HYBRID: 2 attention and 6 state layers, blocks of 16 tokens (of 128 B, 2,048 B a layer, 1 KiB more than a state),
    groups of 2 layers: a block of 4,096 B, one attention group, three state groups."""
    none, align = (make_policy(name, setup_of(HYBRID)) for name in ("vllm", "vllm-align"))
    assert isinstance(align, InflatedBlock) and align.rule == none.rule
    assert (none.units.state_per_sequence, align.units.state_per_sequence) == (3, 6)
    for policy, state in ((none, 3), (align, 6)):
        policy.admit(counts(1, 17))
        assert policy.used_bytes() == {"kv": 3 * 4096, "state": 2 * state * 4096}
    assert (none.max_sequences(16), align.max_sequences(16)) == (31 // 4, 31 // 7)


def test_the_waste_of_the_two_modes_is_that_of_the_published_table():
    """vLLM's bytes over useful bytes, none and align: Jamba 1.09 / 1.94 at 128 tokens, Zamba2 1.31 / 2.19."""
    for model, ratios in (("jamba-v0.1", (1.09, 1.94)), ("zamba2-2.7b", (1.31, 2.19))):
        geometry = named_model(model, convention="vllm")
        setup = setup_of(Layout.plan(geometry, "8GiB"))
        useful = 128 * geometry.kv_bytes_per_token + geometry.state_bytes_per_sequence
        for name, ratio in zip(("vllm", "vllm-align"), ratios, strict=True):
            policy = make_policy(name, setup)
            policy.admit(counts(128))
            assert sum(policy.used_bytes().values()) / useful == pytest.approx(ratio, abs=0.006)


def test_sglang_splits_nine_to_ten_and_counts_its_slots():
    setup = setup_of(SMALL)
    plain, cached = (make_policy(name, setup) for name in ("sglang", "sglang-cached"))
    state_bytes = 16384 * 9 // 19
    for policy, slots in ((plain, 1), (cached, 3)):
        assert isinstance(policy, StaticSplit)
        assert (policy.slot_count, policy.page_count) == (state_bytes // 1024, (16384 - state_bytes) // 512)
        assert policy.max_sequences(4) == 7 // slots
        assert policy.extents() == {"kv": 16 * 512, "state": 7 * 1024}
    assert (plain.name, cached.name) == ("sglang", "sglang-cached")


def test_a_split_of_any_share_goes_by_its_name():
    policy = make_policy("static-0.37", setup_of(SMALL))
    assert (policy.name, policy.slot_count) == ("static-0.37", 16384 * 37 // 100 // 1024)
    assert parse_split("static-0.5") == Fraction(1, 2)
    for name in ("static-0.0", "static-1.0", "static-0", "static-.5", "static-0.1234567", "static-nan", "static"):
        assert parse_split(name) is None
        with pytest.raises(InvalidArgument, match=r"unknown policy .* known: avmp, .*, paper, and static-SHARE"):
            make_policy(name, setup_of(SMALL))


def test_padding_makes_every_block_as_large_as_the_larger_unit():
    """HYBRID in blocks of a state, 1,024 B: a page of a layer, 512 B, wastes half of one. 17 tokens are 5 pages in each
    of 2 layers; 6 layers have a state."""
    policy = PaddedUnit(setup_of(HYBRID))
    assert (policy.block_bytes, policy.block_count) == (1024, 128)
    policy.admit(counts(17))
    assert policy.used_bytes() == {"kv": 10 * 1024, "state": 6 * 1024}
    assert policy.max_sequences(17) == 128 // 16
    long_pages = PaddedUnit(setup_of(Layout.plan(geometry_of(2, 6, page_tokens=16), 131072)))
    assert long_pages.block_bytes == 2048


# 1 MiB for each kind: 2,048 pages of 512 B of one layer, 1,024 states of 1,024 B of one layer.
PAPER = Layout.plan(geometry_of(2, 6), 2 << 20)


def paper_pools():
    return PaperPools(setup_of(PAPER, longest_tokens=20000, max_sequences=1000))


def test_the_papers_pools_evict_first_and_migrate_second():
    pools = paper_pools()
    assert (pools.page_count, pools.state_count) == (2048, 1024)
    handles = pools.admit(counts(2048, 2048))  # 512 pages in each of two layers, twice: all of them
    with pytest.raises(PolicyFull):
        pools.extend(handles)
    assert pools.counters()["retractions"] == 0
    pools.extend(handles)  # nobody was evicted: the second try may shrink
    assert pools.counters() == {"retractions": 1, "migrations": 0, "bytes_moved": 0}
    assert (pools.page_count, pools.state_count) == (2048 + 128 * 1024 // 512, 1024 - 128)
    assert pools.extents() == {"kv": 2304 * 512, "state": 896 * 1024}
    assert pools.used_bytes()["kv"] == 4 * 513 * 512
    pools.extend(handles, counts(4 * 120, 0))
    with pytest.raises(PolicyFull):  # each shortage begins with an eviction again
        pools.extend(handles, counts(4 * 10, 0))


def test_an_eviction_that_is_enough_leaves_the_papers_pools_where_they_are():
    pools = paper_pools()
    handles = pools.admit(counts(2048, 2048))
    with pytest.raises(PolicyFull):
        pools.extend(handles)
    pools.release(handles[1:])
    pools.extend(handles[:1])
    assert pools.counters()["retractions"] == 0


def test_a_live_state_in_the_tail_refuses_the_papers_shrink():
    """States 0 to 1,019 are taken in ascending order; the sequence that keeps 1,014 to 1,019 stands in the tail."""
    pools = paper_pools()
    short = pools.admit(np.zeros(170, dtype=np.int64))
    pools.release(short[-2::-1])  # last freed, first taken: 0 to 5
    long = pools.admit(counts(4096))
    for _ in range(3):
        with pytest.raises(PolicyFull):
            pools.extend(long)
    pools.release(short[-1:])
    pools.extend(long)
    assert pools.counters()["retractions"] == 1


def test_the_papers_state_pool_keeps_what_one_request_needs():
    pools = PaperPools(setup_of(Layout.plan(geometry_of(2, 6), 1 << 18), longest_tokens=4000))
    assert pools.state_count == 128  # a batch is all of it
    handles = pools.admit(counts(512))
    for _ in range(3):
        with pytest.raises(PolicyFull):
            pools.extend(handles)


def test_the_papers_pools_need_both_kinds():
    for layout in (KV_ONLY, STATE_ONLY):
        with pytest.raises(Unsupported, match="layers of both kinds"):
            PaperPools(setup_of(layout))


def test_two_ends_pack_all_holes_when_the_middle_is_used_up():
    """A page and a slot of 16 KiB are padding: 14,848 B hold nine sequences of a page and a slot, and 2 pages. One that
    leaves makes a hole at each end. The page hole and the middle serve three pages; the fourth packs: one slot moves
    into the hole, and nothing else has to."""
    ends = TwoEnds(setup_of(SMALL))
    assert ends.middle_bytes == 16384 - 512 - 1024
    handles = ends.admit(np.full(9, 4))
    ends.release(handles[:1])
    for _ in range(3):
        ends.extend(handles[1:2], counts(4))
    assert ends.moved_bytes == 0
    assert ends.extents() == {"kv": 11 * 512, "state": 9 * 1024}
    ends.extend(handles[1:2], counts(4))
    assert ends.moved_bytes == 1024
    assert ends.counters() == {"retractions": 0, "migrations": 1, "bytes_moved": 1024}
    assert ends.extents() == {"kv": 12 * 512, "state": 8 * 1024}


def test_two_ends_move_what_is_furthest_out_and_no_more():
    ends = TwoEnds(setup_of(SMALL))
    handles = ends.admit(np.full(9, 4))
    ends.release(handles[[0, 2, 7, 8]])  # holes 0, 2, and the two at the edge: units 5 and 6 stay, 5 and 6 fill 0 and 2
    ends.admit(np.full(4, 4))  # into the holes
    assert ends.moved_bytes == 0
    ends.release(handles[[1]])
    ends.extend(handles[[3]], counts(4 * 3))
    ends.extend(handles[[3]], counts(4))
    assert ends.moved_bytes == 1024


# -- every policy ----------------------------------------------------------------------------------------------------

of_each_other_policy = pytest.mark.parametrize("policy_name", MORE_POLICIES)


@of_each_other_policy
@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS, layout=st.sampled_from([HYBRID, PAPER, KV_ONLY, STATE_ONLY]))
def test_every_call_happens_whole_or_not_at_all(policy_name, operations, layout):
    if policy_name == "paper" and layout in (KV_ONLY, STATE_ONLY):
        layout = HYBRID
    policy = make_policy(policy_name, setup_of(layout, max_sequences=12))
    expected = Expected(policy, layout)
    for operation, choice, lengths in operations:
        apply(policy, expected, operation, choice, lengths)
        assert policy.used_bytes() == expected.used_bytes()
        assert sum(policy.used_bytes().values()) <= sum(policy.extents().values()) <= policy.arena_bytes
        assert policy.moved_bytes == policy.counters()["bytes_moved"]
    policy.release(np.array(sorted(expected.resident), dtype=np.int64))
    assert policy.used_bytes() == {"kv": 0, "state": 0}


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, layout=st.sampled_from([SMALL, HYBRID, KV_ONLY, STATE_ONLY]))
def test_in_two_ends_every_unit_has_its_place(operations, layout):
    ends = TwoEnds(setup_of(layout, max_sequences=12))
    expected = Expected(ends, layout)
    for operation, choice, lengths in operations:
        apply(ends, expected, operation, choice, lengths)
        for end, per_sequence in (
            (ends.pages, {h: -(-n // layout.page_tokens) * layout.has_pages for h, n in expected.resident.items()}),
            (ends.slots, {h: int(layout.has_slots) for h in expected.resident}),
        ):
            owners, held = np.unique(end.owner[end.owner > 0], return_counts=True)
            assert dict(zip(owners.tolist(), held.tolist(), strict=True)) == {
                h: n for h, n in per_sequence.items() if n
            }
            assert not end.owner[end.extent :].any()
            assert end.live == sum(per_sequence.values())
        assert sum(ends.extents().values()) <= ends.middle_bytes


@pytest.mark.parametrize("name", [*POLICIES, *MORE_POLICIES])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=6), new=st.integers(0, 60), spare=st.integers(0, 400))
def test_what_is_spared_could_be_taken_by_growth(name, lengths, new, spare):
    """Room for so many more tokens is room for one sequence to grow by them, from a border of a block."""
    policy = make_policy(name, setup_of(HYBRID))
    assert policy.fits(counts(new)) == policy.fits(counts(new), 0)
    lengths = np.array(lengths, dtype=np.int64)
    assume(policy.fits(lengths))
    policy.admit(lengths)
    fits = policy.fits(counts(new), spare)
    block = 4 if isinstance(policy, AllocatorPolicy) else policy.units.block_tokens
    try:
        policy.extend(policy.admit(counts(new)), counts(-new % block + spare))
    except PolicyFull:
        assert not fits
    else:
        assert fits


def test_the_oracle_holds_what_two_ends_do_and_more():
    setup = setup_of(HYBRID)
    assert ByteBudget(setup).budget_bytes >= TwoEnds(setup).middle_bytes


def test_policies_by_layers_need_them():
    for name in ("vllm-align", "padded", "paper"):
        with pytest.raises(InvalidArgument, match=f"policy {name}: needs the model's layers"):
            make_policy(name, setup_of(SMALL))
    uneven = geometry_of(2, 6)
    with pytest.raises(Unsupported, match="policy padded: layers of custom differ in bytes"):
        PaddedUnit(setup_of(Layout.plan(_with_one_larger_layer(uneven), 1 << 20)))


def _with_one_larger_layer(geometry):
    from dataclasses import replace

    first = replace(geometry.attention_layers[0], key_dim=64, value_dim=64)
    return replace(geometry, attention_layers=(first, *geometry.attention_layers[1:]))


def test_a_batch_that_nobody_can_change_is_checked_once():
    policy = make_policy("oracle", setup_of(HYBRID))
    handles = policy.admit(counts(1, 1))
    handles.flags.writeable = False
    policy.extend(handles)
    policy.extend(handles)
    assert policy.used_bytes()["kv"] == 2 * HYBRID.page_total_bytes
    policy.release(handles[1:])
    with pytest.raises(Exception, match="names no resident sequence"):
        policy.extend(handles)
    mine = handles[:1].copy()
    policy.extend(mine)
    mine[0] = 99
    with pytest.raises(Exception, match="99 names no resident sequence"):
        policy.extend(mine)
