"""One simulation from a configuration: what fits, what a step costs, whether the work can run."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.core.plan import CacheSpec, RunnerLimits
from octavo.core.policy import Policy
from octavo.core.policy_registry import create_policy
from octavo.errors import ConfigError
from octavo.planner.plan import Plan
from octavo.sim.cost import StepCost
from octavo.sim.record import Record
from octavo.sim.requests import Job
from octavo.sim.simulation import Simulation
from octavo.sim.static import StaticBatching

_MOST_BLOCKS = 2**26  # a list entry each, several times


@dataclass(frozen=True, slots=True)
class Scenario:
    """An engine of `config` with the memory of `limits`, on a device where steps cost `cost`, for
    `jobs`. plans_ahead: the device's choice, unless the configuration says."""

    config: EngineConfig
    limits: RunnerLimits
    cost: StepCost
    jobs: Sequence[Job]
    plans_ahead: bool = False
    max_concurrency: int | None = None

    def run(self) -> Record:
        """The engine. Raises ConfigError for work that cannot run."""
        policy = create_policy(self.config.scheduler)
        self._check(policy)
        ahead = self.config.async_scheduling
        return Simulation(
            self.config, self.limits, policy, self.cost, self.jobs,
            plans_ahead=self.plans_ahead if ahead is None else ahead,
            max_concurrency=self.max_concurrency,
        ).run()  # fmt: skip

    def run_static(self) -> Record:
        """Static batching in its place. Raises ConfigError as `run`."""
        self._check(None)
        return StaticBatching(
            self.limits, self.config.max_num_seqs, self.cost, self.jobs, self.max_concurrency
        ).run()

    def _check(self, policy: Policy | None) -> None:
        if self.limits.num_blocks > _MOST_BLOCKS:
            raise ConfigError(
                f"the memory holds {self.limits.num_blocks} blocks of KV, and at most "
                f"{_MOST_BLOCKS} can be simulated; give less (--memory)"
            )
        window = self.limits.max_model_len
        shortest = min(self.jobs, key=lambda job: job.prompt_len + job.output_len)
        if shortest.prompt_len + shortest.output_len > window:
            raise ConfigError(
                f"no request fits: the shortest has {shortest.prompt_len} + {shortest.output_len} "
                f"tokens, and max_model_len is {window} here"
            )
        if policy is not None and not getattr(policy, "heeds_priority", True):
            given = next((job.priority for job in self.jobs if job.priority), 0)
            if given:
                raise ConfigError(
                    f"the trace has priorities, such as {given}, but the scheduler "
                    f"{policy.name!r} does not use them; leave them out, or use another "
                    "(--scheduler priority)"
                )
        if self.config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size is {self.config.data_parallel_size}; one engine is simulated: "
                "leave it out, and give the engine its share of the requests"
            )


def limits_of(plan: Plan) -> RunnerLimits:
    """The memory of an engine, by its plan."""
    groups = tuple(
        CacheSpec() if group.window is None else CacheSpec("window", group.window)
        for group in plan.groups
    )
    return RunnerLimits(
        plan.num_blocks + 1, plan.block_size, plan.block_bytes, plan.max_model_len, 0,
        num_host_blocks=plan.num_host_blocks, kv_groups=groups, model=plan.model,
    )  # fmt: skip
