"""The same calls place the same units, in every process and on every rank."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from avmp.allocator import Allocator
from avmp.errors import OutOfMemory
from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.options import Options
from tests.driver import Driver
from tests.helpers import KIB

PROGRAM = """
import random
from tests.test_determinism import run
print(run(3000, {chaos}))
"""


def run(operations: int, chaos: int | None) -> str:
    """Digests on the way through a seeded run: any difference shows, also one that later calls undo."""
    layout = Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4)
    driver = Driver(layout, chaos_seed=chaos, options=Options(events=True), verify_bytes=False)
    rng = random.Random("determinism")
    digests = []
    for count in range(operations):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange, check=False)
        if count % 100 == 99:
            digests.append(driver.allocator.digest())
    driver.empty()
    assert len(set(digests)) > operations // 200
    return " ".join([*digests, driver.allocator.digest()])


@pytest.mark.parametrize("chaos", [None, 5])
def test_two_processes_with_different_hash_seeds_agree_after_every_hundred_calls(repository: Path, chaos: int | None):
    outputs = []
    for seed in ("1", "271828"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM.format(chaos=chaos)]
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, check=True, text=True)
        outputs.append(done.stdout.split())
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 31 and all(len(digest) == 32 for digest in outputs[0])


def serve(allocator: Allocator) -> tuple[list[str], int]:
    """A seeded day of serving: the digest after each step, and how many calls were refused."""
    rng = random.Random("ranks")
    running: list[int] = []
    digests, refused = [], 0
    for _ in range(150):
        try:
            running += allocator.admit([rng.randint(1, 1500)]).tolist()
            allocator.extend(running, [rng.randint(1, 60) for _ in running])
        except OutOfMemory:
            refused += 1
            allocator.release(running.pop(rng.randrange(len(running))))
        digests.append(allocator.digest())
    return digests, refused


def test_ranks_with_the_same_page_slot_and_arena_bytes_place_alike():
    model = named_model("jamba-v0.1")
    shards = [model.shard(4, rank) for rank in range(4)]
    outcomes = []
    for shard in shards:
        allocator = Allocator(shard, "96MiB", max_rows=200, max_tokens_per_sequence=20_000)
        outcomes.append(serve(allocator))
        allocator.check()
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][1] > 5
    other = serve(Allocator(shards[0], "92MiB", max_rows=200, max_tokens_per_sequence=20_000))
    assert other[0][-1] != outcomes[0][0][-1]


def test_the_digest_sees_every_table_that_decides_what_comes_next():
    layout = Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4)
    allocator = Allocator(layout, max_tokens_per_sequence=64)
    first, second = allocator.admit([7, 12]).tolist()
    seen = {allocator.digest()}
    page = allocator.take("page")
    for call in (
        lambda: allocator.extend(first),
        lambda: allocator.batch(first),
        lambda: allocator.snapshot(second),
        lambda: allocator.fork(second),
        lambda: allocator.release_front(second, 4),
        lambda: allocator.retain(page),
        lambda: allocator.pin(page),
        lambda: allocator.release(first, after=3),
        lambda: allocator.swap_out(second),
        lambda: allocator.give(page),
        lambda: allocator.retire(3),
    ):
        call()
        assert allocator.digest() not in seen
        assert allocator.digest() == allocator.digest()
        seen.add(allocator.digest())


def test_the_digest_tells_one_ticket_one_pin_and_one_snapshot_from_another():
    layout = Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4)
    digests = set()
    for ticket, pinned, kept in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)):
        allocator = Allocator(layout, max_tokens_per_sequence=64)
        sequences = allocator.admit([7, 12, 5])
        allocator.pin(allocator.pages(sequences[1])[pinned])
        snapshots = allocator.snapshot(sequences[:2])
        allocator.drop(int(snapshots[kept]))
        allocator.release(sequences[2], after=ticket)
        digests.add(allocator.digest())
    assert len(digests) == 4
