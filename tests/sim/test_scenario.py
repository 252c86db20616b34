"""What a configuration and a plan make of a simulation, and work that cannot run."""

from typing import Any

import pytest
from tests.sim.kit import config, limits

from octavo.core.plan import FULL, CacheSpec
from octavo.errors import ConfigError
from octavo.planner.plan import Plan, make_plan
from octavo.planner.target import target
from octavo.sim.cost import LinearCost
from octavo.sim.requests import Job
from octavo.sim.scenario import Scenario, limits_of


def scenario(jobs: list[Job], **options: Any) -> Scenario:
    return Scenario(config(**options), limits(60), LinearCost(), jobs)


def plan(model: str) -> Plan:
    made = config(model=model, max_model_len=4096)
    return make_plan(made, target(made, "h200", None))


def test_the_memory_is_the_plan_s() -> None:
    made = plan("gemma-3-27b")
    found = limits_of(made)
    assert found.num_blocks == made.num_blocks + 1
    assert found.kv_tokens == made.kv_tokens
    assert set(found.kv_groups) == {FULL, CacheSpec("window", 1024)}


def test_every_request_ends_or_is_refused() -> None:
    jobs = [Job(0.01 * i, 10 + i, 20) for i in range(150)]
    for record in (scenario(jobs, max_waiting=4).run(), scenario(jobs).run_static()):
        assert sum(record.refused.values()) > 0
        assert len(record.latencies) + sum(record.refused.values()) == len(jobs)
        assert record.output_tokens == 20 * len(record.latencies)


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        ([Job(0.0, 150, 11), Job(0.0, 200, 1)], {}, r"no request fits: the shortest has 150 \+ 11"),
        ([Job(0.0, 5, 1, 3)], {}, "has priorities, such as 3, but the scheduler 'fifo' does not"),
        ([Job(0.0, 5, 1)], {"data_parallel_size": 2}, "data_parallel_size is 2; one engine is"),
        ([Job(0.0, 5, 1)], {"scheduler": "lifo"}, "unknown scheduler 'lifo'"),
    ],
)
def test_work_that_cannot_run_is_named(
    jobs: list[Job], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario(jobs, **options).run()


def test_priorities_are_heeded_by_a_policy_that_does() -> None:
    assert scenario([Job(0.0, 5, 1, 3)], scheduler="priority").run().output_tokens == 1
