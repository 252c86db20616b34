"""Policies by name or as objects: what is accepted, and what an error says of the rest."""

import copy
import gc
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest
from tests.core.harness import Bench, make, modelled

from octavo.core.policy import FIFOScheduler, Gauged, Policy, PriorityScheduler, StepLatencies
from octavo.core.policy_registry import create_policy
from octavo.core.request import Request
from octavo.core.slo import SLOScheduler
from octavo.errors import ConfigError


class OnlyObserves(FIFOScheduler):
    """One of two optional methods."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepLatencies] = []

    def observe(self, latencies: StepLatencies) -> None:
        self.seen.append(latencies)


def test_policies_are_made_by_name() -> None:
    assert type(create_policy("fifo")) is FIFOScheduler
    priority = create_policy("priority, max_wait=5, max_stretch=3")
    assert isinstance(priority, PriorityScheduler)
    assert (priority.max_wait, priority.max_stretch) == (5.0, 3.0)
    slo = create_policy("slo,p99_ttft_ms=300,p99_itl_ms=40,shed=true")
    assert isinstance(slo, SLOScheduler)
    assert (slo.ttft, slo.itl, slo.shed) == (0.3, 0.04, True)
    named = create_policy("slo, target_p99_ms=50")
    assert isinstance(named, SLOScheduler)
    assert named.itl == SLOScheduler(target_p99_ms=50).itl == 0.05
    own = create_policy("octavo.core.policy:FIFOScheduler,max_stretch=2")
    assert isinstance(own, FIFOScheduler)
    assert create_policy(own) is own


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("fifi", r"adaptive, fifo, priority, slo; did you mean 'fifo'"),
        ("slo", "p99_ttft_ms or p99_itl_ms"),
        ("slo,p99_itl_ms=-5", "p99_itl_ms must be above 0"),
        ("slo,p99_itl_ms=fast", "name=number"),
        ("fifo,speed=3", "does not take the option 'speed'; its options are: max_stretch"),
        ("slo,p99_latency_ms=5", "p99_itl_ms, .*shed; did you mean 'p99_itl_ms'"),
        ("adaptive,speed=3", "does not take"),
        ("slo,target_p99_ms=0", "target_p99_ms must be above 0"),
        ("slo,target_p99_ms=5,p99_itl_ms=5", "another name of p99_itl_ms .5.0.; give one"),
        ("nowhere:Policy", "cannot be imported"),
        ("octavo.core.policy:Nothing", "cannot be imported"),
        (FIFOScheduler, r"not the class FIFOScheduler; pass an object: FIFOScheduler\(\)"),
        (7, "must be a name"),
        (None, "must be a name"),
    ],
)
def test_a_wrong_scheduler_is_an_error_that_says_what_is_right(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_policy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "itl", "ttft"),
    [
        ("adaptive", 0.2, math.inf),
        ("adaptive,target_p99_ms=50", 0.05, math.inf),
        ("adaptive,p99_itl_ms=50", 0.05, math.inf),
        ("adaptive,p99_ttft_ms=300", math.inf, 0.3),
    ],
)
def test_adaptive_is_the_latency_policy_with_a_default_target(
    text: str, itl: float, ttft: float
) -> None:
    policy = create_policy(text)
    assert isinstance(policy, SLOScheduler)
    assert (policy.itl, policy.ttft) == (itl, ttft)


class Nothing(Policy):
    """Derived from the interface, and nothing is defined."""


class OrderOnly(Policy):
    name = "order-only"

    def order(self, waiting: Collection[Request], now: float) -> Collection[Request]:
        return waiting


class NoGauges(FIFOScheduler, Gauged):
    """Derived from an optional interface, without its method."""


class Narrow(FIFOScheduler):
    def order(self, waiting: Collection[Request]) -> Collection[Request]:  # type: ignore[override]
        return waiting


class Unnamed:
    order, victim, budget = FIFOScheduler.order, FIFOScheduler.victim, FIFOScheduler.budget


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Nothing, "Nothing does not define name, order, victim, budget; derive it from"),
        (OrderOnly, "OrderOnly does not define victim, budget; derive it from octavo.schedulers"),
        (NoGauges, "NoGauges does not define gauges"),
        (Narrow, r"Narrow.order must be a method order\(self, waiting, now\): too many"),
        (Unnamed, "Unnamed does not define name"),
    ],
)
def test_a_policy_that_could_not_work_is_refused(policy: type[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_policy(policy())


@pytest.mark.parametrize("kind", [FIFOScheduler, lambda: PriorityScheduler(), OnlyObserves])
def test_one_policy_serves_one_engine_at_a_time(kind: Callable[[], Policy]) -> None:
    policy = kind()
    first = Bench(policy=policy)
    with pytest.raises(ConfigError, match="serves another engine; give each engine"):
        Bench(policy=policy)
    with pytest.raises(ConfigError, match="serves another engine"):
        create_policy(policy)  # before a model is loaded for it
    Bench(policy=copy.deepcopy(policy)).scheduler.close()
    first.scheduler.close()
    again = Bench(policy=create_policy(policy))
    again.run([make("a", list(range(10)), 3)])
    del first, again
    gc.collect()
    Bench(policy=policy)  # the engine before it is gone, though never closed


def test_a_policy_may_only_observe() -> None:
    policy = OnlyObserves()
    bench = Bench(policy=create_policy(policy), cost=modelled())
    bench.run([make("a", list(range(10)), 3), make("b", list(range(7)), 3)])
    assert [(seen.num_due, seen.num_other) for seen in policy.seen] == [(0, 17), (2, 0), (2, 0)]
    times = [seen.now for seen in policy.seen]
    gaps = [second - first for first, second in itertools.pairwise([0.0, *times])]
    assert [seen.seconds for seen in policy.seen] == pytest.approx(gaps)
    assert policy.seen[1].gaps == pytest.approx([gaps[1]] * 2)
    assert bench.scheduler.policy_errors == 0
