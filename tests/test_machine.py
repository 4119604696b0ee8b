"""Random operations against a model and a device of real bytes: the main proof of the allocator."""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from avmp.layout import Layout
from avmp.options import Options
from tests.driver import Driver

KIB = 1024
LAYOUTS = {
    "slot of five pages": Layout.from_unit_sizes(256, 5 * 256, 24 * KIB, page_tokens=4),
    "slot smaller than a page": Layout.from_unit_sizes(1024, 256, 24 * KIB, page_tokens=4),
    "sizes that do not divide": Layout.from_unit_sizes(768, 1280, 40 * KIB, lane_count=2, page_tokens=3),
    "pages only": Layout.from_unit_sizes(256, 0, 8 * KIB, page_tokens=4),
    "slots only": Layout.from_unit_sizes(0, 256, 4 * KIB, page_tokens=4),
    "one token per page": Layout.from_unit_sizes(256, 512, 20 * KIB, page_tokens=1),
}


# Without zeroing, poison, events and chaos, an allocator takes the quick paths for single units and decoding steps.
VARIANTS = {
    "exact": (None, None),
    "chaos": (1, None),
    "quick": (None, Options(zero_slots=False)),
    "floors": (2, Options(poison=True, floor_pages=3, floor_slots=2, hysteresis=0)),
}


def machine(layout: Layout, chaos_seed: int | None, options: Options | None) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            tokens = min(40, 12 * layout.page_tokens)
            self.driver = Driver(layout, max_tokens=tokens, chaos_seed=chaos_seed, options=options)

        def teardown(self) -> None:
            self.driver.empty()

    for name in Driver.OPERATIONS:

        def step(self: Machine, data: st.DataObject, name: str = name) -> None:
            self.driver.run(name, lambda n: data.draw(st.integers(0, n - 1)))

        setattr(Machine, name, rule(data=st.data())(step))
    return Machine


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_operations_keep_every_byte_and_every_table(name: str, variant: str) -> None:
    layout, (chaos_seed, options) = LAYOUTS[name], VARIANTS[variant]
    if not (layout.has_pages and layout.has_slots) and options is not None:
        options = replace(options, floor_pages=0, floor_slots=0)
    run_state_machine_as_test(
        machine(layout, chaos_seed, options),
        settings=settings(max_examples=12, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_long_seeded_runs_fill_the_arena_and_empty_it_again(name: str, variant: str) -> None:
    layout, (chaos_seed, options) = LAYOUTS[name], VARIANTS[variant]
    if not (layout.has_pages and layout.has_slots) and options is not None:
        options = replace(options, floor_pages=0, floor_slots=0)
    rng = random.Random(f"long {name} {variant}")
    driver = Driver(layout, max_tokens=min(40, 12 * layout.page_tokens), chaos_seed=chaos_seed, options=options)
    for _ in range(1000):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange)
    assert driver.refused > 10
    driver.empty()


@pytest.mark.slow
def test_a_million_operations_with_a_full_check_every_thousand() -> None:
    rng = random.Random("a million")
    options = Options(poison=True, zero_pages=True)
    driver = Driver(LAYOUTS["slot of five pages"], chaos_seed=5, options=options)
    for count in range(1_000_000):
        driver.run(rng.choice(Driver.OPERATIONS), rng.randrange, check=count % 1000 == 0)
    driver.empty()
