"""Policies rank; the scheduler over a modelled clock shows what comes of it."""

import logging
import math
import random
import re
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from tests.core.harness import Bench, alone, make, modelled

from octavo.core.policy import (
    FIFOScheduler,
    Policy,
    PriorityScheduler,
    RequestView,
    view,
)
from octavo.core.request import Request
from octavo.core.slo import SLOScheduler
from octavo.core.step import MAX_DISPLACED, MAX_OVERTAKEN
from octavo.errors import ConfigError


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


def first_tokens(bench: Bench) -> dict[str, float]:
    """Run to the end; when each request got its first token."""
    times: dict[str, float] = {}
    while bench.scheduler.has_work():
        for update in bench.step():
            times.setdefault(update.request_id, bench.now)
    bench.check_idle()
    return times


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: PriorityScheduler(weight_fn=3), "weight_fn must be a function"),
        (lambda: PriorityScheduler(max_wait=0), "max_wait must be above 0"),
        (lambda: FIFOScheduler(max_stretch=math.nan), "max_stretch"),
        (lambda: SLOScheduler(p99_itl_ms=-1), "p99_itl_ms must be above 0"),
        (lambda: SLOScheduler(p99_itl_ms=True), "p99_itl_ms must be a number"),
        (lambda: SLOScheduler(p99_ttft_ms=math.inf), "finite"),
        (lambda: SLOScheduler(p99_itl_ms=5, min_throughput=-1), "min_throughput"),
        (lambda: SLOScheduler(min_throughput=5), "needs p99"),
        (lambda: SLOScheduler(p99_itl_ms=5, shed=True), "shed needs p99_ttft_ms"),
        (lambda: SLOScheduler(p99_itl_ms=5, window=0), "window"),
    ],
)
def test_a_wrong_setting_is_an_error(make_one: Callable[[], Policy], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_one()


# Order.


def test_fifo_serves_in_order_of_arrival() -> None:
    bench = Bench(seqs=1, policy=FIFOScheduler())
    for number in range(5):
        bench.add(make(f"r{number}", prompt(10, number), 3, priority=-number))
    times = first_tokens(bench)
    assert sorted(times, key=times.__getitem__) == [f"r{i}" for i in range(5)]


def test_priority_then_slack_then_weight_then_arrival() -> None:
    bench = Bench(seqs=1, policy=PriorityScheduler(lambda r: r.prompt_len))
    bench.add(make("plain", prompt(10), 3, priority=1))
    bench.add(make("long", prompt(40), 3, priority=1))
    bench.add(make("long2", prompt(40, 1), 3, priority=1))
    bench.add(make("later", prompt(10), 3, priority=1, deadline=9.0))
    bench.add(make("sooner", prompt(10), 3, priority=1, deadline=5.0))
    bench.add(make("urgent", prompt(5), 3, priority=0))
    times = first_tokens(bench)
    assert sorted(times, key=times.__getitem__) == [
        "urgent", "sooner", "later", "long", "long2", "plain",
    ]  # fmt: skip


def documented() -> list[str]:
    """The names in the table of docs/scheduling.md."""
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    section = page.split("### What a policy reads of a request")[1].split("\n#")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_order_and_weight_fn_see_the_same_names() -> None:
    names, seen = documented(), set[str]()

    class Reads(FIFOScheduler):
        def order(self, waiting: Collection[Request], now: float) -> Collection[Request]:
            for request in waiting:
                for name in names:
                    assert getattr(request, name) == getattr(view(request, now), name), name
                    seen.add(name)
            return waiting

    properties = {name for name, value in vars(RequestView).items() if isinstance(value, property)}
    assert set(names) == {*RequestView.__struct_fields__, *properties}
    assert {"prompt_len", "num_prompt_tokens", "waited", "deadline"} <= set(names)
    bench = Bench(blocks=14, seqs=4, policy=Reads(), cost=modelled())
    bench.run(make(f"r{i}", prompt(20, i), 40, deadline=50.0 - i, priority=i) for i in range(9))
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.policy_errors == 0
    assert seen == set(names)


def test_a_weight_fn_sees_the_documented_fields() -> None:
    seen: list[RequestView] = []

    def weight(view: RequestView) -> float:
        seen.append(view)
        return 1 / view.prompt_len

    bench = Bench(seqs=1, policy=PriorityScheduler(weight))
    bench.add(make("a", prompt(10), 3, priority=2, deadline=7.0))
    bench.add(make("b", prompt(10), 3))
    first_tokens(bench)
    assert seen[0] == RequestView(10, 0, 0.0, 0.0, 2, 7.0, max_tokens=3, request_id="a")
    assert seen[-1].waited > 0


@pytest.mark.parametrize(
    "bad", [lambda r: math.nan, lambda r: 1 / 0, lambda r: None, lambda r: "x"]
)
def test_a_broken_weight_fn_falls_back_to_arrival(
    bad: Callable[[RequestView], float], caplog: pytest.LogCaptureFixture
) -> None:
    policy = PriorityScheduler(bad)
    bench = Bench(seqs=1, policy=policy)
    for number in range(4):
        bench.add(make(f"r{number}", prompt(10, number), 3))
    with caplog.at_level(logging.WARNING):
        times = first_tokens(bench)
    assert sorted(times, key=times.__getitem__) == [f"r{i}" for i in range(4)]
    assert policy.weight_faults > 3
    assert any("using 0" in record.message for record in caplog.records)
    assert len(caplog.records) <= 2  # not once for each request and step


# Displacement.


def test_sch_06_a_strictly_earlier_request_displaces_a_running_later_one() -> None:
    bench = Bench(seqs=2, policy=PriorityScheduler())
    low = [make(f"low{i}", prompt(20, i), 60, priority=5) for i in range(2)]
    for request in low:
        bench.add(request)
    for _ in range(5):
        bench.step()
    bench.add(make("equal", prompt(20, 7), 4, priority=5, arrival=bench.now))
    bench.add(make("high", prompt(20, 9), 4, priority=0, arrival=bench.now))
    arrived = bench.steps
    while ("high", 0) not in bench.outcomes:
        bench.step()
    assert bench.steps - arrived <= 2
    assert ("equal", 0) not in bench.outcomes
    assert bench.scheduler.num_displaced == 1
    bench.run()
    for request in bench.requests.values():
        assert bench.outcomes[request.request_id, 0].token_ids == alone(request)[0]


def test_sch_06_displacement_for_memory() -> None:
    bench = Bench(blocks=20, policy=PriorityScheduler())
    for number in range(3):
        bench.add(make(f"low{number}", prompt(80, number), 20, priority=5))
    for _ in range(8):
        bench.step()
    assert bench.scheduler.num_running == 3
    bench.add(make("high", prompt(150), 4, priority=0, arrival=bench.now))
    arrived = bench.steps
    while ("high", 0) not in bench.outcomes:
        bench.step()
    assert bench.steps - arrived <= 3  # 150 tokens at 64 a step
    bench.run()
    for request in bench.requests.values():
        assert bench.outcomes[request.request_id, 0].token_ids == alone(request)[0]


def test_displacement_counts_blocks_that_both_would_hold_once() -> None:
    """The urgent one shares most of the victim's blocks: that the victim leaves frees few."""
    bench = Bench(blocks=12, seqs=4, budget=200, policy=PriorityScheduler())
    bench.add(make("low", prompt(128), 20, priority=5))
    bench.step()
    bench.add(make("other", prompt(20, 3), 20, priority=0))
    bench.step()
    bench.add(make("high", [*prompt(128), *prompt(40, 1)], 4, priority=0, arrival=bench.now))
    bench.run()
    assert bench.scheduler.num_displaced > 0
    for request in bench.requests.values():
        assert bench.outcomes[request.request_id, 0].token_ids == alone(request)[0]


def test_a_running_prompt_that_gets_nothing_becomes_overdue_too() -> None:
    bench = Bench(seqs=8, budget=64, policy=PriorityScheduler(max_wait=1.0), quick=True)
    bench.add(make("low", prompt(640), 2, priority=9))
    bench.step()
    number = 0
    while ("low", 0) not in bench.outcomes:
        while bench.scheduler.num_waiting < 4:
            number += 1
            bench.add(make(f"high{number}", prompt(60, number), 2, arrival=bench.now))
        bench.step()
        assert bench.now < 2.0
    bench.run()


def test_nobody_is_displaced_in_vain() -> None:
    bench = Bench(blocks=20, seqs=4, policy=PriorityScheduler())
    bench.add(make("high", prompt(200), 60, priority=0))
    bench.add(make("low", prompt(16), 60, priority=5))
    for _ in range(10):
        bench.step()
    # Even without `low` there is no room for it beside the first.
    bench.add(make("high2", prompt(150), 4, priority=1, arrival=bench.now))
    bench.step()
    assert bench.scheduler.num_displaced == 0
    bench.run()


def test_aging_bounds_the_wait_under_a_flood_of_urgent_requests() -> None:
    bench = Bench(seqs=4, policy=PriorityScheduler(max_wait=1.0), quick=True)
    bench.add(make("low", prompt(20), 10, priority=9))
    number = 0
    while ("low", 0) not in bench.outcomes:
        while bench.scheduler.num_waiting < 8:
            number += 1
            bench.add(make(f"high{number}", prompt(20, number), 10, arrival=bench.now))
        bench.step()
        assert bench.now < 1.2
    assert bench.now > 0.9
    # Once it runs it is not sent away again, though others are more urgent.
    bench.run()
    assert bench.requests["low"].num_preemptions <= 1


def test_overdue_requests_leave_places_for_urgent_ones() -> None:
    bench = Bench(seqs=8, policy=PriorityScheduler(max_wait=0.2), quick=True)
    for number in range(60):
        bench.add(make(f"low{number}", prompt(20, number), 40, priority=5))
    while bench.now < 1.0:
        bench.step()
    bench.add(make("high", prompt(20), 4, arrival=bench.now))
    arrived = bench.now
    assert first_tokens(bench)["high"] - arrived < 0.05
    assert len(bench.outcomes) == 61


def test_an_overdue_request_without_room_does_not_hold_up_urgent_ones() -> None:
    bench = Bench(blocks=30, policy=PriorityScheduler(max_wait=0.1), check=False)
    for number in range(2):  # both are overdue from the start: not to be displaced
        bench.add(make(f"old{number}", prompt(150, number), 60, priority=5, arrival=-1.0))
    for _ in range(10):
        bench.step()
    big = make("big", prompt(300), 5, priority=5, arrival=bench.now - 1.0)
    bench.add(big)
    big.overtaken = MAX_OVERTAKEN  # nobody may start before it any more
    for _ in range(5):
        bench.step()
    assert ("big", 0) not in bench.outcomes
    bench.add(make("high", prompt(150, 9), 5, priority=0, arrival=bench.now))
    arrived = bench.steps
    while ("high", 0) not in bench.outcomes:
        bench.step()
    assert bench.steps - arrived < 12
    bench.run()
    assert len(bench.outcomes) == 4


def test_one_that_may_not_be_displaced_again_does_not_protect_the_others() -> None:
    bench = Bench(seqs=2, policy=PriorityScheduler())
    for number in range(2):
        bench.add(make(f"low{number}", prompt(20, number), 60, priority=5))
    for _ in range(5):
        bench.step()
    last = bench.requests["low1"]  # the policy's first choice
    last.displaced = (len(last.tokens) + 1, MAX_DISPLACED)  # as many tokens as it will have next
    bench.step()
    bench.add(make("high", prompt(20, 9), 4, priority=0, arrival=bench.now))
    bench.step()
    assert bench.scheduler.num_displaced == 1
    assert last.num_preemptions == 0
    bench.run()


def test_an_urgent_prompt_has_the_step_to_itself() -> None:
    bench = Bench(budget=2048, blocks=400, policy=PriorityScheduler(), cost=modelled(), quick=True)
    for number in range(4):
        bench.add(make(f"low{number}", prompt(20, number), 300, priority=5))
    for _ in range(20):
        bench.step()
    bench.add(make("slow", prompt(2000), 5, priority=5, arrival=bench.now))
    bench.step()
    assert bench.plans[-1].num_tokens < 300
    bench.add(make("high", prompt(900), 5, priority=0, arrival=bench.now))
    bench.step()
    given = {row.request_id: len(row.token_ids) for row in bench.plans[-1].rows}
    assert given == {**{f"low{i}": 1 for i in range(4)}, "high": 900}


# Bounded gaps, on a modelled clock.


POLICIES: dict[str, tuple[Callable[[], Policy], float]] = {
    "fifo": (FIFOScheduler, 0.065),
    "priority": (PriorityScheduler, 0.052),
    "weighted": (lambda: PriorityScheduler(lambda r: -r.prompt_len), 0.052),
    "slo": (lambda: SLOScheduler(p99_itl_ms=30), 0.033),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_sch_05_running_requests_are_never_starved(policy: str, seed: int) -> None:
    """A step costs 10 ms, 0.1 ms a token, and a little for history; four streams run, a prompt
    of 12,000 tokens comes, ten short ones, and a flood."""
    create, bound = POLICIES[policy]
    rng = random.Random(seed)
    bench = Bench(
        blocks=3000, budget=2048, policy=create(), cost=modelled(), caching=False, quick=True
    )
    for number in range(4):
        bench.add(make(f"stream{number}", prompt(20, number), 300))
    for _ in range(20):
        bench.step()
    start = bench.now
    bench.add(make("long", prompt(12_000), 5, arrival=start))
    for number in range(10):
        bench.add(make(f"short{number}", prompt(5, number), 5, arrival=start))
    for number in range(100):
        bench.add(make(f"flood{number}", prompt(rng.randrange(1, 600), number), 5, arrival=start))
    gaps, firsts = _gaps(bench)
    assert max(gaps) <= bound
    assert max(firsts[f"short{i}"] for i in range(10)) - start < 10 * bound
    if policy != "weighted":  # by weight the long one is last
        # It has at least half of what each step gives to prompts.
        assert firsts["long"] - start < 6.0
    assert len(bench.outcomes) == 115


def _gaps(bench: Bench) -> tuple[list[float], dict[str, float]]:
    last: dict[str, float] = {}
    firsts: dict[str, float] = {}
    gaps: list[float] = []
    while bench.scheduler.has_work():
        for update in bench.step():
            name = update.request_id
            if name in last:
                gaps.append(bench.now - last[name])
            firsts.setdefault(name, bench.now)
            last[name] = bench.now
    return gaps, firsts


@pytest.mark.parametrize(("lengths", "least", "most"), [([6000], 250, 310), ([200] * 63, 450, 560)])
def test_a_flood_comes_in_larger_pieces_than_one_long_prompt(
    lengths: list[int], least: int, most: int
) -> None:
    """A step costs 10 ms and 0.1 ms a token: 4 times the step of two tokens allows 308 tokens, of
    all 64 who have come 556."""
    cost = modelled(read=0.0)
    bench = Bench(blocks=3000, budget=2048, seqs=64, cost=cost, caching=False, quick=True)
    bench.add(make("stream", prompt(10), 100))
    for _ in range(5):
        bench.step()
    for number, length in enumerate(lengths):
        bench.add(make(f"r{number}", prompt(length, number), 30, arrival=bench.now))
    for _ in range(40):
        bench.step()
    assert least <= max(plan.num_tokens for plan in bench.plans) <= most


def test_work_that_nobody_watches_may_fill_the_step() -> None:
    bench = Bench(budget=512, policy=FIFOScheduler(max_stretch=None), cost=modelled())
    bench.add(make("first", prompt(10), 50))
    for _ in range(5):
        bench.step()
    bench.add(make("long", prompt(1000), 5))
    bench.step()
    assert bench.plans[-1].num_tokens == 512
    bench.run()


# Preemption by cost.


@pytest.mark.parametrize(("block", "swaps"), [(1e-5, True), (1e-2, False)])
def test_auto_preemption_takes_the_cheaper_way(block: float, swaps: bool) -> None:
    def run(mode: str) -> Bench:
        bench = Bench(
            blocks=60, mode=mode, cost=modelled(block=block), num_host_blocks=200, budget=256,
            check=False,
        )  # fmt: skip
        bench.run(make(f"r{i}", prompt(40, i), 150) for i in range(10))
        return bench

    auto, swap, recompute = (run(mode) for mode in ("auto", "swap", "recompute"))
    assert recompute.scheduler.num_preemptions > 3
    assert recompute.scheduler.num_swap_outs == 0
    assert swap.scheduler.num_swap_outs == swap.scheduler.num_preemptions
    assert (swap.now < recompute.now) == swaps
    assert auto.now <= 1.05 * min(swap.now, recompute.now)
    if swaps:
        assert auto.scheduler.num_swap_outs == auto.scheduler.num_preemptions
    else:
        assert auto.scheduler.num_swap_outs <= 2  # tried, measured, left
    for key, outcome in auto.outcomes.items():
        assert outcome.token_ids == swap.outcomes[key].token_ids
        assert outcome.token_ids == recompute.outcomes[key].token_ids


def test_measured_copies_are_taken_as_told() -> None:
    bench = Bench(num_host_blocks=10)
    bench.scheduler.rates.note_copies(4, 0.02)
    assert bench.scheduler.rates.block_seconds == pytest.approx(0.005)
