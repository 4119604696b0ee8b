"""The arena under random operations: every byte of every lane, checked after each of them."""

import random

import pytest

from avmp.cache_pool import CachePool
from tests.driver import Driver
from tests.pool_device import PoolDevice
from tests.test_machine import LAYOUTS


class PoolDriver(Driver):
    """The driver of the allocator, on a pool with real memory."""

    @staticmethod
    def make_allocator(*arguments: object, **keywords: object) -> CachePool:
        return CachePool(*arguments, device="cpu", max_batch_tokens=512, **keywords)  # type: ignore[arg-type]

    make_device = PoolDevice


@pytest.mark.parametrize("chaos_seed", [None, 7], ids=["exact", "chaos"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_every_lane_survives_random_operations(name: str, chaos_seed: int | None) -> None:
    layout = LAYOUTS[name]
    rng = random.Random(f"pool {name} {chaos_seed}")
    driver = PoolDriver(layout, max_tokens=min(40, 12 * layout.page_tokens), chaos_seed=chaos_seed)
    for _ in range(600):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    driver.empty()
