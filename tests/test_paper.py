"""The published experiment: its streams and all 240 cells to the digit, and each allocator by hand on small pools."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avmp.errors import InvalidArgument, Unsupported
from avmp.geometry import Geometry, StateLayer, StatePart
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.paper import (
    KV,
    OTHER_VARIANTS,
    STATE,
    VARIANTS,
    IdPool,
    LayerUnits,
    MigratingPools,
    PaddedPool,
    ScannedSplitPools,
    SplitPools,
    WholeRequestPools,
    run_experiment,
    variant,
)
from avmp.units import parse_bytes
from avmp.workloads import TABLES
from avmp.workloads.paper import (
    ARRIVAL,
    DEPARTURE,
    GROWTH,
    PAPER_WORKLOADS,
    SHAREGPT_FILE,
    PaperStream,
    paper_stream,
    sharegpt_prompts,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "paper_golden.json").read_text())
MODELS = {"jamba_1_5_mini": "paper_jamba", "mamba2_1b3": "paper_mamba2"}
FIELDS = {
    "n": "requests",
    "oom": "oom",
    "completed": "completed",
    "completion_ratio": "completion",
    "never_evicted_completed": "served_intact",
    "evictions": "evictions",
    "rebalance_attempts": "shrink_attempts",
    "rebalance_count": "shrinks",
    "bytes_migrated": "bytes_migrated",
    "kv_pool_bytes": "kv_pool_bytes",
    "ssm_pool_bytes": "state_pool_bytes",
}
UNITS = LayerUnits(page_bytes=128, state_bytes=256)


def stream_of(arrivals, prompts, outputs):
    return PaperStream("t", 0, *(np.array(values, dtype=np.int64) for values in (arrivals, prompts, outputs)))


@pytest.fixture
def golden_stream(request):
    """Streams of the paper; a test that asks for ShareGPT's is skipped where its list is not at hand."""

    def stream(name: str, seed: str) -> PaperStream:
        if name == "sharegpt_replay":
            request.getfixturevalue("recorded_traces")
        return paper_stream(name, int(seed.removeprefix("seed")))

    return stream


class TestStreams:
    @pytest.mark.parametrize("key", GOLDEN["streams"])
    def test_published_stream(self, key, golden_stream):
        stream = golden_stream(*key.split("/"))
        columns = stream.prompt_tokens[:3], stream.output_tokens[:3], stream.arrival_ticks[:3]
        assert stream.published
        assert GOLDEN["streams"][key] == {
            "first": [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)],
            "growth_events": len(stream.growth()[0]),
            "last_departure": stream.departure_ticks.max(),
            "n": len(stream),
            "sum_gen": stream.output_tokens.sum(),
            "sum_prompt": stream.prompt_tokens.sum(),
        }

    def test_all_workloads_and_seeds_are_published(self):
        seeds = {f"{name}/seed{seed}" for name, workload in PAPER_WORKLOADS.items() for seed in workload.seeds}
        assert seeds == set(GOLDEN["streams"])

    def test_events_by_hand(self):
        """16 tokens fill a page: the next grows it, and so does the one at the departure, which comes too late."""
        stream = stream_of([0, 17], [16, 15], [17, 1])
        assert stream.events() == [
            (0, ARRIVAL, 0),
            (17, GROWTH, 0),
            (17, ARRIVAL, 1),
            (33, DEPARTURE, 0),
            (33, DEPARTURE, 1),
            (33, GROWTH, 0),
        ]

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100), st.integers(1, 100)), min_size=1, max_size=5))
    def test_growth_is_where_the_number_of_pages_rises(self, rows):
        stream = stream_of(*zip(*rows, strict=True))
        expected = [
            (arrival + prompt + step + 1, request)
            for request, (arrival, prompt, output) in enumerate(rows)
            for step in range(output)
            if -(-(prompt + step + 1) // 16) > -(-(prompt + step) // 16)
        ]
        ticks, requests = stream.growth()
        assert list(zip(ticks.tolist(), requests.tolist(), strict=True)) == expected

    def test_without_the_list_sharegpt_follows_its_percentiles_and_is_not_the_published_stream(self, monkeypatch):
        monkeypatch.delenv("AVMP_TRACES", raising=False)
        prompts = sharegpt_prompts()
        table = TABLES["sharegpt_prompt"]
        assert len(prompts) == table.requests
        assert np.abs(np.percentile(prompts, range(100)) - table.values[:100]).max() <= 15
        assert not paper_stream("sharegpt_replay", 4).published

    def test_only_the_papers_requests_are_published(self):
        assert not paper_stream("uniform_short", 7).published
        assert not paper_stream("uniform_short", 1, requests=10).published
        assert len(paper_stream("uniform_short", 1, requests=10)) == 10

    @pytest.mark.parametrize("content", ["{", "{}", "[]", "[1, 0]", "[1.5]", None])
    def test_a_folder_without_a_usable_list_is_refused(self, tmp_path, monkeypatch, content):
        if content is not None:
            (tmp_path / SHAREGPT_FILE).write_text(content)
        monkeypatch.setenv("AVMP_TRACES", str(tmp_path))
        with pytest.raises(InvalidArgument, match=SHAREGPT_FILE):
            paper_stream("sharegpt_replay", 4)

    @pytest.mark.parametrize("wrong", [("uniform", 1, None), ("uniform_short", -1, None), ("uniform_short", 1, 0)])
    def test_wrong_arguments_are_refused(self, wrong):
        with pytest.raises(InvalidArgument):
            paper_stream(*wrong)


class TestGolden:
    @pytest.mark.parametrize("key", GOLDEN["cells"])
    def test_cell(self, key, golden_stream):
        name, workload, model, pool, seed = key.split("/")
        units = LayerUnits.of(named_model(MODELS[model]))
        outcome = run_experiment(golden_stream(workload, seed), variant(name)(units, parse_bytes(pool)), units)
        published = GOLDEN["cells"][key]
        assert {field: getattr(outcome, FIELDS[field]) for field in published} == published

    def test_the_cells_are_the_whole_grid(self):
        assert len(GOLDEN["cells"]) == len(VARIANTS) * len(MODELS) * 2 * 3 * len(PAPER_WORKLOADS) == 240
        assert sum(len(fields) for fields in GOLDEN["cells"].values()) == 1536


class TestGeometries:
    @pytest.mark.parametrize(("name", "state_bytes"), [("paper_jamba", 262_144), ("paper_mamba2", 2_097_152)])
    def test_units(self, name, state_bytes):
        geometry = named_model(name)
        assert LayerUnits.of(geometry) == LayerUnits(65_536, state_bytes, 4, 28)
        layout = Layout.plan(geometry, "1GiB")
        assert (layout.page_total_bytes, layout.slot_total_bytes) == (4 * 65_536, 28 * state_bytes)
        assert layout.null_bytes == layout.slot_total_bytes

    def test_options(self):
        assert named_model("paper_jamba", convention="vllm") == named_model("Paper_Jamba")
        assert named_model("paper_jamba", page_tokens=32).kv_bytes_per_page == 2 * 4 * 65_536
        assert named_model("paper_jamba", ssm_dtype="float32").state_bytes_per_sequence == 2 * 28 * 262_144
        with pytest.raises(InvalidArgument, match="convention"):
            named_model("paper_jamba", convention="hf")
        with pytest.raises(InvalidArgument, match="conv"):
            named_model("paper_jamba", conv_columns=4)

    def test_units_of_layers_that_differ_or_are_missing(self):
        jamba = named_model("jamba-v0.1")
        with pytest.raises(Unsupported):
            LayerUnits.of(Geometry(attention_layers=(), state_layers=jamba.state_layers))
        with pytest.raises(Unsupported):
            LayerUnits.of(
                replace(jamba, state_layers=(*jamba.state_layers, StateLayer(99, (StatePart("s", (1,), "int8"),))))
            )


class TestSplitPools:
    """Of 1,024 bytes in halves: 4 pages and 2 states."""

    def test_sizes_are_floored_to_whole_units(self):
        assert SplitPools(UNITS, 1024, 0.5).pool_bytes() == (512, 512)
        assert SplitPools(UNITS, 1024, 0.9).pool_bytes() == (0, 768)
        with pytest.raises(InvalidArgument):
            SplitPools(UNITS, 1024, 1.1)

    def test_a_failing_call_keeps_its_one_eviction(self):
        pools = SplitPools(UNITS, 1024, 0.5)
        assert pools.allocate(0, KV, 2) and pools.allocate(1, KV, 2)
        assert not pools.allocate(2, KV, 3)
        assert pools.pools[KV].entries == {1: [2, 3]}
        assert (pools.counters.failed, pools.counters.evictions, pools.counters.stripped) == (1, 1, {0})
        assert pools.allocate(2, KV, 2)

    def test_the_victim_is_whoever_allocated_longest_ago(self):
        pools = SplitPools(UNITS, 1024, 0.5)
        for request in (0, 1, 0, 2):
            assert pools.allocate(request, KV, 1)
        assert pools.allocate(3, KV, 1)
        assert pools.pools[KV].entries == {0: [0, 2], 2: [3], 3: [1]}

    def test_the_requester_may_be_its_own_victim(self):
        pools = SplitPools(UNITS, 1024, 0.5)
        assert pools.allocate(0, KV, 4) and pools.allocate(0, KV, 1)
        assert pools.pools[KV].entries == {0: [3]}
        assert pools.counters.stripped == {0}

    def test_only_the_short_kind_is_stripped(self):
        pools = SplitPools(UNITS, 1024, 0.5)
        assert all(pools.allocate(request, STATE, 1) for request in (0, 1)) and pools.allocate(0, KV, 1)
        assert pools.allocate(2, STATE, 1)
        assert pools.pools[KV].entries == {0: [0]} and pools.pools[STATE].entries == {1: [1], 2: [0]}
        pools.release(2)
        assert pools.pools[STATE].free == [0]

    def test_freed_ids_come_out_last_freed_first(self):
        pool = IdPool(4)
        assert pool.take(0, 2) and pool.take(1, 1)
        pool.drop(0)
        assert pool.take(2, 3) and pool.entries[2] == [1, 0, 3]

    @given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([KV, STATE]), st.integers(0, 4)), max_size=60))
    def test_the_scan_for_victims_decides_alike(self, calls):
        indexed, scanned = (cls(UNITS, 2048, 0.5) for cls in (SplitPools, ScannedSplitPools))
        for request, kind, count in calls:
            if count:
                assert indexed.allocate(request, kind, count) == scanned.allocate(request, kind, count)
            else:
                indexed.release(request), scanned.release(request)
            assert [pool.entries for pool in indexed.pools] == [pool.entries for pool in scanned.pools]

    def test_whole_requests_are_stripped_until_the_new_units_fit(self):
        pools = WholeRequestPools(UNITS, 1024, 0.5)
        for request in (0, 1):
            assert pools.allocate(request, KV, 2) and pools.allocate(request, STATE, 1)
        assert pools.allocate(2, KV, 3)
        assert pools.counters.stripped == {0, 1} and not pools.pools[STATE].entries
        assert not pools.allocate(2, KV, 5)


class TestMigratingPools:
    def test_evict_then_shrink_then_retry(self):
        pools = MigratingPools(UNITS, 1024, 0.5, batch=2)
        assert pools.allocate(0, KV, 1) and pools.allocate(1, KV, 5)
        assert pools.pools[KV].entries == {1: [7, 6, 5, 4, 0]}, "new ids come out first, the highest before"
        assert pools.pool_bytes() == (1024, 0)
        counters = pools.counters
        assert (counters.evictions, counters.shrink_attempts, counters.shrinks) == (1, 1, 1)
        assert (counters.bytes_migrated, counters.served_by_shrink, counters.evictions_beside_room) == (512, 1, 1)

    def test_a_live_id_in_the_tail_refuses_the_shrink(self):
        pools = MigratingPools(UNITS, 1024, 0.5, batch=1)
        assert pools.allocate(0, STATE, 1) and pools.allocate(1, STATE, 1)
        pools.release(0)
        assert not pools.allocate(2, KV, 5)
        assert (pools.counters.shrink_attempts, pools.counters.shrinks) == (1, 0)
        pools.release(1)
        assert pools.allocate(2, KV, 5) and pools.pool_bytes() == (768, 256)

    def test_what_an_eviction_served_never_migrates(self):
        pools = MigratingPools(UNITS, 1024, 0.5, batch=1)
        assert pools.allocate(0, KV, 4) and pools.allocate(1, KV, 1)
        assert pools.counters.shrink_attempts == 0 and pools.counters.evictions_beside_empty == 1

    def test_pages_that_do_not_fill_a_state_are_lost(self):
        pools = MigratingPools(UNITS, 1024, 0, batch=1)
        assert not pools.allocate(0, STATE, 1)
        assert pools.pool_bytes() == (896, 0) and pools.counters.bytes_migrated == 128

    def test_more_than_there_is_cannot_be_given_up(self):
        assert not MigratingPools(UNITS, 1024, 0.5, batch=5).allocate(0, STATE, 3)
        with pytest.raises(InvalidArgument):
            MigratingPools(UNITS, 1024, 0.5, batch=0)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
    def test_a_shrink_succeeds_exactly_where_the_tail_is_free(self, calls):
        pool = IdPool(12)
        for request, count in calls:
            if request == 3:
                expected = count <= pool.capacity and set(range(pool.capacity - count, pool.capacity)) <= set(pool.free)
                assert pool.shrink(count) == expected
            elif count == 4:
                pool.drop(request)
            elif count == 3:
                pool.grow(1)
            else:
                pool.take(request, count + 1)
            live = [unit for entry in pool.entries.values() for unit in entry]
            assert sorted(pool.free + live) == list(range(pool.capacity))


class TestPaddedPool:
    """Of 1,024 bytes: 4 units for either kind."""

    def stripped(self, **options) -> PaddedPool:
        """Request 0 was stripped of ids 0 and 1, which are 3's and 2's now."""
        pool = PaddedPool(UNITS, 1024, **options)
        assert pool.allocate(0, KV, 2) and pool.allocate(1, STATE, 2) and pool.allocate(2, KV, 1)
        assert pool.allocate(3, STATE, 1)
        assert {request: list(entry) for request, entry in pool.entries.items()} == {1: [2, 3], 2: [1], 3: [0]}
        return pool

    def test_a_departure_frees_what_belongs_to_others_by_now(self):
        pool = self.stripped()
        pool.release(0)
        assert list(pool.entries) == [1] and pool.free == [0, 1]
        pool.release(2)
        assert pool.free == [0, 1], "ids that are free are skipped"

    def test_correct_frees_leave_them_alone(self):
        pool = self.stripped(correct_frees=True)
        pool.release(0)
        assert list(pool.entries) == [1, 2, 3] and pool.free == []
        pool.release(2)
        assert pool.free == [1]

    def test_a_failing_call_keeps_its_one_eviction_and_the_order_of_free_ids(self):
        pool = PaddedPool(UNITS, 1024)
        assert pool.allocate(0, KV, 2) and pool.allocate(1, KV, 1)
        assert not pool.allocate(2, KV, 4)
        assert pool.free == [3, 0, 1] and list(pool.entries) == [1]
        assert pool.pool_bytes() == (1024, 0) and pool.counters.failed == pool.counters.evictions == 1


class TestExperiment:
    def test_calls_by_hand(self):
        """Two pages and two states at the arrival, one growth of two pages, and one that comes too late."""
        units = LayerUnits(128, 256, attention_layers=2, state_layers=2)
        outcome = run_experiment(stream_of([0], [16], [17]), SplitPools(units, 2048, 0.5), units)
        assert (outcome.calls, outcome.served, outcome.completed, outcome.served_intact) == (6, 6, 1, 1)

    def test_a_flagged_request_carries_on_and_a_stripped_one_completes(self):
        """4 pages: the second request takes those of the first, the third strips the second and still fails."""
        outcome = run_experiment(stream_of([0, 1, 2], [64, 64, 80], [1, 1, 1]), SplitPools(UNITS, 1536, 2 / 3), UNITS)
        assert (outcome.oom, outcome.completed, outcome.served_intact) == (1, 2, 0)

    @pytest.mark.parametrize("name", [*VARIANTS, *OTHER_VARIANTS, "fixed_dual:9/19", "avmp_dynamic:1:0.1"])
    def test_every_variant_has_a_name_and_adds_up(self, name):
        units = LayerUnits.of(named_model("paper_mamba2"))
        outcome = run_experiment(paper_stream("mixed_long", 2, 40), variant(name)(units, 2**30), units)
        assert outcome.calls >= 40 * 32 and outcome.requests == 40
        assert outcome.served_intact <= outcome.completed <= 40
        assert outcome.as_dict()["oom"] == outcome.oom

    @pytest.mark.parametrize("name", ["", "fixed", "fixed_dual:", "fixed_dual:1/0", "avmp_dynamic:x", "avmp_dynamic:"])
    def test_unknown_variants_are_refused(self, name):
        with pytest.raises(InvalidArgument, match="unknown variant"):
            variant(name)
