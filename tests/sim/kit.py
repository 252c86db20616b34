"""Small simulations: random workloads on few blocks, so that memory runs out."""

import random
from dataclasses import astuple
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.core.plan import FULL, CacheSpec, RunnerLimits, StepPlan
from octavo.core.policy_registry import create_policy
from octavo.sim.cost import LinearCost, StepShape
from octavo.sim.requests import Job
from octavo.sim.simulation import Simulation

POLICIES = (
    "fifo",
    "fifo,max_stretch=none",
    "priority,max_wait=0.5",
    "slo,p99_itl_ms=20,p99_ttft_ms=200",
    "slo,p99_ttft_ms=50,shed=true",
    "adaptive",
)
COST = LinearCost(step=0.004, token=1e-4, read=1e-6, block=1e-4)


class SharingCost(NamedTuple):
    """COST, less for what is read once for several requests."""

    def seconds(self, shape: StepShape) -> float:
        return COST.seconds(shape) - 0.5 * COST.read * shape.kv_shared


def jobs(draw: random.Random, count: int, rate: float, most: int) -> list[Job]:
    """Random requests of at most `most` tokens, some with common prefixes."""
    now, found = 0.0, []
    for _ in range(count):
        prompt, group = draw.randint(1, most // 2), draw.choice((0, 0, 1, 2))
        output = draw.randint(1, most - prompt)
        found.append(Job(now, prompt, output, draw.randint(0, 2), group, 40 if group else 0))
        now += draw.expovariate(rate) if draw.random() < 0.8 else 0.0
    return found


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 128, **options})


def limits(blocks: int, host: int = 0, windowed: bool = False) -> RunnerLimits:
    groups = (FULL, CacheSpec("window", 24)) if windowed else (FULL,)
    window = 160
    return RunnerLimits(blocks, 16, 1024, window, 1000, (), host, groups)


class Case(NamedTuple):
    """What a simulation takes."""

    config: EngineConfig
    limits: RunnerLimits
    jobs: list[Job]
    plans_ahead: bool
    max_concurrency: int | None


def case(policy: str, draws: int) -> Case:
    """A random simulation, the same for the same `draws`."""
    draw = random.Random(draws)
    windowed = draw.random() < 0.25
    found = limits(draw.choice((26, 40, 200)), draw.choice((0, 30)), windowed)
    made = config(
        scheduler=policy,
        enable_prefix_caching=draw.random() < 0.7,
        preemption_mode=draw.choice(("auto", "swap", "recompute")),
        max_num_seqs=draw.choice((4, 16)),
        max_waiting=draw.choice((8, None)),
    )
    work = jobs(draw, draw.choice((10, 60)), draw.choice((3, 30, 300)), 150)
    return Case(made, found, work, draw.random() < 0.5, draw.choice((None, None, 6)))


def simulated(policy: str, draws: int, **options: Any) -> Simulation:
    """`options` are those of `Simulation`."""
    made = case(policy, draws)
    return Simulation(
        made.config, made.limits, create_policy(policy), SharingCost(), made.jobs,
        plans_ahead=made.plans_ahead, max_concurrency=made.max_concurrency, **options,
    )  # fmt: skip


def state(simulation: Simulation) -> tuple[Any, ...]:
    """All that two runs of the same simulation have to agree on."""
    scheduler, record = simulation.scheduler, simulation.record
    pool = scheduler.kv.pool
    return (
        astuple(record),
        scheduler.kv.usage(),
        (scheduler.num_preemptions, scheduler.num_swap_outs, scheduler.num_displaced),
        scheduler._num_steps,
        scheduler.rates._points,
        scheduler.rates.block_seconds,
        (pool.hashes, pool._next, pool.peak_used),
    )


def shown(plan: StepPlan) -> tuple[Any, ...]:
    """A plan as far as an engine computes it."""
    rows = tuple(
        (row.request_id, row.start, len(row.token_ids), row.block_ids, len(row.samples))
        for row in plan.rows
    )
    return plan.step, plan.planned_at, rows, plan.copies
