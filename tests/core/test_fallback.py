"""A policy that fails costs nobody their answer: FIFO stands in, it is logged once, and counted."""

import logging
import math
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from tests.core.harness import Bench, alone, make

from octavo.core.fallback import FallbackPolicy
from octavo.core.policy import FIFOScheduler, Gauge, Load, PriorityScheduler, StepLatencies
from octavo.core.request import Request
from octavo.errors import ConfigError


class Broken:
    """Each method raises or returns an unusable answer, as configured."""

    name = "broken"
    displaces = True

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.fifo = FIFOScheduler()

    def _do(self, what: str, usual: Any) -> Any:
        answer = self.answers.get(what, usual)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        if self.answers.get("order") == "late":
            return self._late(waiting)
        return self._do("order", waiting)  # type: ignore[no-any-return]

    def _late(self, waiting: Collection[Request]) -> Iterable[Request]:
        yield from reversed(list(waiting)[1:])
        raise ZeroDivisionError("late")

    def victim(self, running: Collection[Request], for_request: Request, now: float) -> Any:
        return self._do("victim", self.fifo.victim(running, for_request, now))

    def budget(self, load: Load) -> Any:
        return self._do("budget", (load.max_tokens, load.max_sequences))

    def observe(self, latencies: StepLatencies) -> None:
        self._do("observe", None)

    def refusal(self, load: Load) -> Any:
        return self._do("refusal", None)


BAD = ValueError("no")
FAULTS: list[tuple[str, Any]] = [
    *((what, BAD) for what in ("order", "victim", "budget", "observe", "refusal")),
    ("order", "late"),
    ("order", None),
    ("order", [[]]),
    ("victim", [1]),
    *(("budget", wrong) for wrong in (None, (5,), (math.nan, 3), (3, math.inf), ("a", "b"))),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


@pytest.mark.parametrize(("what", "answer"), FAULTS, ids=lambda value: str(value)[:20])
def test_a_failing_policy_loses_and_holds_up_nobody(
    what: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(blocks=14, seqs=4, policy=Broken(**{what: answer}), num_host_blocks=8)
    with caplog.at_level(logging.WARNING):
        bench.run(make(f"r{i}", prompt(20, i), 40) for i in range(10))
    assert bench.scheduler.num_preemptions > 0
    for request in bench.requests.values():
        assert bench.outcomes[request.request_id, 0].token_ids == alone(request)[0]
    assert bench.scheduler.policy_errors > 1
    assert [record.getMessage() for record in caplog.records] == [
        f"scheduling policy Broken.{what} failed; falling back to FIFO"
    ]
    assert caplog.records[0].exc_info is not None


def test_whom_an_order_leaves_out_is_served_last_and_whom_it_invents_never() -> None:
    known = [make(f"r{i}", [1]) for i in range(4)]
    policy = Broken(order=[known[2], make("stranger", [1]), known[2], known[0]])
    fallback = FallbackPolicy(policy)
    assert list(fallback.order(known, 0.0)) == [known[2], known[0], known[1], known[3]]
    assert fallback.errors == 0
    bench = Bench(seqs=1, policy=Broken(order=[]))
    bench.run(make(f"r{i}", prompt(20, i), 5) for i in range(5))
    assert [name for name, _ in bench.outcomes] == [f"r{i}" for i in range(5)]


def test_an_order_that_fails_midway_is_kept_so_far() -> None:
    known = [make(f"r{i}", [1]) for i in range(4)]
    fallback = FallbackPolicy(Broken(order="late"))
    assert list(fallback.order(known, 0.0)) == [known[3], known[2], known[1], known[0]]
    assert fallback.errors == 1


def test_a_weight_that_fails_counts_as_a_failure_of_the_policy() -> None:
    bench = Bench(seqs=1, policy=PriorityScheduler(lambda request: math.nan))
    bench.run(make(f"r{i}", prompt(10, i), 3) for i in range(4))
    assert bench.scheduler.policy_errors > 0
    assert bench.scheduler.fallback.errors == 0


@pytest.mark.parametrize("bad", [BAD, None, [Gauge("depth", "How deep.", 1.0), None]])
def test_gauges_that_fail_are_left_out(bad: Any) -> None:
    class Shows(Broken):
        def gauges(self) -> Any:
            return self._do("gauges", bad)

    fallback = FallbackPolicy(Shows(gauges=bad))
    assert fallback.gauges() == ()
    assert fallback.errors == 1
    assert FallbackPolicy(Broken()).gauges() == ()


def test_a_gauge_has_a_name_that_fits_and_a_number() -> None:
    for name in ("", "9", "Depth", "a-b", "a b", 'a"'):
        with pytest.raises(ConfigError, match="gauge's name"):
            Gauge(name, "", 0.0)
    with pytest.raises(ConfigError, match="'depth' must be a number"):
        Gauge("depth", "", None)  # type: ignore[arg-type]


def test_a_victim_of_ones_own_is_asked_although_the_parent_displaces_nobody() -> None:
    class Displacing(FIFOScheduler):
        def victim(
            self, running: Collection[Request], for_request: Request, now: float
        ) -> Request | None:
            return None

    class Quiet(Displacing):
        displaces = False

    assert FallbackPolicy(Displacing()).displaces
    assert not FallbackPolicy(Quiet()).displaces
    assert not FallbackPolicy(FIFOScheduler()).displaces
    assert FallbackPolicy(PriorityScheduler()).displaces
