"""A simulation is what its scheduler does: skipped or not, here or in an engine."""

import contextlib
from typing import Any

import msgspec
import pytest
from tests.sim.kit import COST, POLICIES, Case, case, config, limits, shown, simulated, state

from octavo.core.plan import StepPlan
from octavo.core.policy import FIFOScheduler
from octavo.core.policy_registry import create_policy
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.errors import QueueFullError
from octavo.params import SamplingParams
from octavo.sim.cost import StepShape
from octavo.sim.requests import DRAWN, Job, SimulatedRequest
from octavo.sim.simulation import Simulation, shape_of


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draws", [1, 2, 3, 5, 6, 7, 8])  # the small ones
def test_skipping_changes_nothing(policy: str, draws: int) -> None:
    """Every time stamp, preemption, block id and cached content."""
    stepwise = simulated(policy, draws, skips=False)
    skipping = simulated(policy, draws, skips=True)
    stepwise.run()
    skipping.run()
    assert state(skipping) == state(stepwise)
    skipping.scheduler.check()


def test_a_prompt_of_one_token_may_be_all_there_is() -> None:
    """Beside a request that runs: it ends with the step that computes its prompt."""
    jobs = [Job(0.0, 2, 100), *(Job(0.3 * i, 1, 1) for i in range(1, 4))]
    found = []
    for skips in (False, True):
        simulation = Simulation(
            config(), limits(40), FIFOScheduler(), COST, jobs, plans_ahead=True, skips=skips
        )
        simulation.run()
        found.append(state(simulation))
    assert found[0] == found[1]


def test_a_prompt_that_is_computed_token_by_token_reads_what_it_has() -> None:
    """Not yet all of the prefix that it shares: a policy may give steps of one token."""
    policy = create_policy("slo,p99_itl_ms=0.1,window=2")
    jobs = [Job(0.0, 17, 1, 0, 1, 33), Job(0.0, 56, 4, 0, 1, 56)]
    assert Simulation(config(), limits(40), policy, COST, jobs).run().output_tokens == 5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_skipping_changes_nothing_in_many_workloads(policy: str) -> None:
    for draws in range(100, 400):
        test_skipping_changes_nothing(policy, draws)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_most_steps_of_a_calm_workload_are_skipped(plans_ahead: bool) -> None:
    plans: list[StepPlan] = []
    jobs = [Job(5.0 * i, 20, 100) for i in range(5)]
    simulation = Simulation(config(), limits(40), FIFOScheduler(), COST, jobs,
                            plans_ahead=plans_ahead, on_plan=plans.append)  # fmt: skip
    assert simulation.run().steps == 500
    assert len(plans) <= 5 * 8


def test_a_common_prefix_is_read_once_for_all_that_decode() -> None:
    shapes: list[StepShape] = []

    class Spy:
        def seconds(self, shape: StepShape) -> float:
            shapes.append(shape)
            return 0.01

    jobs = [Job(0.0, 40, 30, 0, 1, 35), Job(0.1, 41, 30, 0, 1, 35), Job(0.1, 41, 30)]
    Simulation(config(), limits(40), FIFOScheduler(), Spy(), jobs).run()
    assert {shape.kv_shared for shape in shapes if shape.captured} == {0, 32}
    alone = [shape for shape in shapes if shape.sequences == 1]
    assert {shape.kv_shared for shape in alone} == {0}


class _Custom(FIFOScheduler):
    """A policy that looks at how far requests have come in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def budget(self, load: Any) -> tuple[int, int]:
        self.seen += [request.output_len for request in load.due]
        return super().budget(load)


def test_a_policy_of_the_users_own_sees_every_step() -> None:
    policy = _Custom()
    Simulation(config(), limits(40), policy, COST, [Job(0.0, 20, 100)]).run()
    assert policy.seen == list(range(1, 100))


def engine_plans(made: Case) -> list[Any]:
    """The plans of the real engine over the strict runner, fed when a client would be."""
    now = [made.jobs[0].arrival]
    plans: list[Any] = []

    def before(plan: StepPlan) -> None:
        now[0] += COST.seconds(shape_of(plan, made.limits.block_size)[0])

    runner = FakeRunner(made.limits, lambda history, spec: DRAWN, before, set(), made.plans_ahead)
    engine = Engine(made.config, runner, create_policy(made.config.scheduler), lambda: now[0])
    schedule = engine.scheduler.schedule

    def spied(at: float) -> StepPlan:
        plan = schedule(at)
        plans.append(shown(plan))
        return plan

    engine.scheduler.schedule = spied  # type: ignore[method-assign]
    jobs = list(enumerate(made.jobs))
    while jobs or engine.has_work():
        while jobs and jobs[0][1].arrival <= now[0]:
            _add(engine, *jobs.pop(0))
        if engine.has_work():
            engine.step()
        else:
            now[0] = max(now[0], jobs[0][1].arrival)
    return plans


def _add(engine: Engine, number: int, job: Job) -> None:
    submission = SimulatedRequest(number, job, job.arrival).submission
    if job.prompt_len + job.output_len > engine.limits.max_model_len:
        return
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output_len)
    with contextlib.suppress(QueueFullError):
        engine.add_request(msgspec.structs.replace(submission, params=params))


# Of the draws, 1 has windows and swaps, 2 recomputes, 6 refuses, 7 swaps.
@pytest.mark.parametrize(
    ("policy", "draws"), [*zip(POLICIES, (1, 2, 7, 6, 1, 2), strict=True), ("fifo", 6)]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_plans_are_those_of_an_engine(policy: str, draws: int, ahead: bool) -> None:
    made = case(policy, draws)._replace(max_concurrency=None, plans_ahead=ahead)
    plans: list[Any] = []
    simulation = Simulation(
        made.config, made.limits, create_policy(policy), COST, made.jobs,
        plans_ahead=ahead, skips=False, on_plan=lambda plan: plans.append(shown(plan)),
    )  # fmt: skip
    simulation.run()
    assert plans == engine_plans(made)
