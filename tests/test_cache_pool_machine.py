"""The arena under random operations: every byte of every lane, checked after each of them."""

import random

import pytest

from avmp.cache_pool import CachePool
from avmp.layout import Layout
from tests.driver import Choose, Driver
from tests.pool_device import PoolDevice
from tests.test_machine import LAYOUTS


class PoolDriver(Driver):
    """The driver of the allocator, on a pool with real memory."""

    @staticmethod
    def make_allocator(*arguments: object, **keywords: object) -> CachePool:
        return CachePool(*arguments, device="cpu", max_batch_tokens=512, **keywords)  # type: ignore[arg-type]

    make_device = PoolDevice


class LazyDriver(PoolDriver):
    """The same without a flush after each operation: effects pile up until a batch carries them out."""

    lazy = True

    def flush(self) -> None:
        if not self.lazy:
            super().flush()

    def run(self, operation: str, choose: Choose, check: bool = True) -> None:
        getattr(self, operation)(choose)
        if check and choose(6) == 0:
            super().flush()
            self.verify()

    def empty(self) -> None:
        self.lazy = False
        super().empty()


# Units of 16 KiB and more are moved row by row on a CPU, smaller ones through a temporary.
LARGE = {
    "large units": Layout.from_unit_sizes(16384, 40960, 16384 * 60 + 512, lane_count=2, page_tokens=4),
    "small pages, large slots": Layout.from_unit_sizes(768, 20480, 768 * 260, lane_count=3, page_tokens=3),
}


@pytest.mark.parametrize("driver_class", [PoolDriver, LazyDriver])
@pytest.mark.parametrize("chaos_seed", [None, 7], ids=["exact", "chaos"])
@pytest.mark.parametrize("name", [*LAYOUTS, *LARGE])
def test_every_byte_of_every_lane_survives_random_operations(
    name: str, chaos_seed: int | None, driver_class: type[PoolDriver]
) -> None:
    layout = (LAYOUTS | LARGE)[name]
    rng = random.Random(f"pool {name} {chaos_seed} {driver_class.__name__}")
    driver = driver_class(layout, max_tokens=min(40, 12 * layout.page_tokens), chaos_seed=chaos_seed)
    for _ in range(400):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    PoolDriver.flush(driver)
    driver.verify()
    driver.empty()
    driver.allocator.flush()
    assert driver.allocator._host.nbytes == 0
