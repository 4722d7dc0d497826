"""All scenarios, by name."""

from __future__ import annotations

from scenarios import control, data, experts, memory, sharded, statistics, tensor
from scenarios.scenario import Scenario

ALL: tuple[Scenario, ...] = (
    *tensor.SCENARIOS,
    *sharded.SCENARIOS,
    *experts.SCENARIOS,
    *data.SCENARIOS,
    *memory.SCENARIOS,
    *control.SCENARIOS,
    *statistics.SCENARIOS,
)
BY_NAME = {scenario.name: scenario for scenario in ALL}
assert len(BY_NAME) == len(ALL)
