"""Steps that decide nothing, at once: as one by one, and only those."""

from collections.abc import Callable, Sequence

import pytest
from tests.core.harness import Bench, make, prompt

from octavo.core.plan import FULL, CacheSpec
from octavo.core.policy import FIFOScheduler, PriorityScheduler
from octavo.core.slo import SLOScheduler
from octavo.core.steady import may_skip

DRAWN = 5  # what the bench's quick runner draws
GROUPS = [(FULL,), (FULL, CacheSpec("window", 20))]


def bench(groups: Sequence[CacheSpec] = (FULL,), **options: object) -> Bench:
    made = Bench(quick=True, groups=groups, blocks=60, budget=128, **options)  # type: ignore[arg-type]
    for number in range(3):
        made.add(make(f"r{number}", prompt(10 + 9 * number, number), 40))
    while any(request.lag > 1 or not request.output_len for request in made.requests.values()):
        made.step()
    return made


def left(made: Bench) -> int:
    """Steps before the one that ends a request."""
    return min(r.max_tokens - r.output_len for r in made.scheduler.queues.running) - 1


def advance(made: Bench, most: int = 1000) -> int:
    """As many steps of 10 ms as there may be, up to `most`."""
    count = 0

    def end_of(blocks: int) -> float | None:
        nonlocal count
        if count == most:
            return None
        count += 1
        made.now += 0.01
        return made.now

    assert made.scheduler.advance(made.now, DRAWN, end_of) == count
    made.scheduler.check()
    return count


def contents(made: Bench) -> object:
    scheduler, pool = made.scheduler, made.kv.pool
    requests = {
        request.seq_id: (request.tokens, request.num_computed, request.table.ids,
                         request.block_hashes, request.last_token_at)
        for request in scheduler.queues.running
    }  # fmt: skip
    return requests, made.kv.usage(), pool.hashes, pool._next, scheduler.rates._points, made.now


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "windowed"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", [FIFOScheduler, lambda: SLOScheduler(p99_itl_ms=50)])
def test_a_run_is_as_step_by_step(
    groups: Sequence[CacheSpec], caching: bool, policy: Callable[[], FIFOScheduler]
) -> None:
    one, many = (bench(groups, caching=caching, policy=policy()) for _ in range(2))
    count = left(one)
    assert advance(many) == count > 30
    for _ in range(count):
        one.step()
    assert contents(many) == contents(one)
    for made in (one, many):
        made.step()
        assert made.scheduler.num_running < 3
    assert contents(many) == contents(one)


def test_a_run_ends_when_it_is_told() -> None:
    made = bench()
    assert advance(made, 7) == 7
    assert advance(made, 0) == 0
    assert advance(made) == 31


def test_prompts_and_requests_that_may_start_are_not_skipped() -> None:
    made = bench(seqs=4)
    made.add(make("long", prompt(300), 40))
    assert advance(made) == 0  # it may start
    made.step()
    assert advance(made) == 0  # it lags
    made.step()
    made.step()
    made.add(make("late", prompt(10), 40))
    assert advance(made, 5) == 5  # no slot


def test_where_no_block_is_to_spare_a_waiting_request_changes_nothing() -> None:
    made = Bench(quick=True, blocks=8, budget=128)
    for number in range(3):
        made.add(make(f"r{number}", prompt(30, number), 60))
    made.step()
    assert made.scheduler.num_running == 2
    assert made.kv.pool.num_free == 3
    assert advance(made) == 0  # it is one block short, by the KV manager's count
    while made.kv.pool.num_free > 2:
        made.step()
    assert advance(made) > 10


def test_a_step_without_blocks_for_all_is_not_skipped() -> None:
    made = Bench(quick=True, blocks=7, budget=128)
    made.add(make("a", prompt(30), 60))
    made.add(make("b", prompt(30, 1), 60))
    made.step()
    assert advance(made) == 18  # to the ends of their third blocks
    made.step()
    assert made.scheduler.num_preemptions == 1


def test_choices_that_share_a_block_and_displacement_are_not_skipped() -> None:
    made = Bench(quick=True, policy=PriorityScheduler())
    made.add(make("n", prompt(20), 40, n=2))
    made.step()
    assert advance(made) == 0
    made = bench(policy=PriorityScheduler(), seqs=3)
    made.add(make("waits", prompt(20), 40))
    assert advance(made) == 0


class _Own(FIFOScheduler):
    pass


def test_only_policies_that_count_requests_let_steps_be_skipped() -> None:
    assert may_skip(FIFOScheduler())
    assert may_skip(SLOScheduler(p99_itl_ms=50))
    assert not may_skip(_Own())
    made = bench(policy=_Own())
    assert advance(made) == 0


def test_no_plan_may_be_in_flight() -> None:
    made = bench()
    made.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        advance(made)
