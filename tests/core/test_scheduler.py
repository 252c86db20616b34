"""The scheduler over a simulated model: same request, same tokens, whatever happens around it."""

import inspect
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.core.harness import (
    Bench,
    Outcome,
    alone,
    disturb,
    logprobs_of,
    make,
    prompt,
    same_as_alone,
    same_as_alone_of,
    say,
)

from octavo.core.kv_manager import KVManager
from octavo.core.plan import RowResult, SampleSpec, StepResult
from octavo.core.policy import FIFOScheduler, Load, Policy, PriorityScheduler, StepLatencies
from octavo.core.queues import Queues
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.slo import SLOScheduler
from octavo.core.step import LOOK_AHEAD, MAX_OVERTAKEN, StepBuilder
from octavo.errors import ConfigError, EngineError, RequestError


class Careless:
    """A user's policy that forgets, reverses, and answers nonsense: nothing may be lost."""

    name = "careless"

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        return [r for r in reversed(list(waiting)) if self.rng.random() < 0.7]

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        if for_request not in running and self.rng.random() < 0.8:
            return None
        return self.rng.choice([*running, make("stranger", [1]), for_request])

    def budget(self, load: Load) -> tuple[int, int]:
        return self.rng.choice([(-5, -5), (10**9, 10**9), (7, 3)])


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [1, 2, 16, 17, 32, 64, 4096])
def test_sch_07_chunked_equals_unchunked(budget: int, caching: bool) -> None:
    bench = Bench(budget=budget, caching=caching)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 100]
    bench.run(make(f"r{n}", prompt(n), 5, logprobs=0) for n in lengths)
    same_as_alone(bench)
    for request in bench.requests.values():
        outcome = bench.outcomes[request.request_id, 0]
        assert len(outcome.token_ids) == 5
        assert [lp.logprobs[0] for lp in outcome.logprobs if lp] == [
            -float(request.num_prompt_tokens + i) - 1 for i in range(5)
        ]


@pytest.mark.parametrize("caching", [False, True])
def test_sch_01_preempted_requests_lose_and_repeat_nothing(caching: bool) -> None:
    bench = Bench(blocks=24, caching=caching)
    kinds = ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}, {"logprobs": 0})
    bench.run(make(f"r{i}", prompt(20, i), 120, **kinds[i % 4]) for i in range(6))
    assert bench.scheduler.num_preemptions > 0
    same_as_alone(bench)
    assert all(len(outcome.token_ids) == 120 for outcome in bench.outcomes.values())


def test_the_preempted_go_before_those_that_never_ran() -> None:
    bench = Bench(blocks=14, seqs=3, quick=True)
    bench.run(make(f"r{i}", prompt(20, i), 100) for i in range(8))
    assert bench.scheduler.num_preemptions > 0
    started = list(dict.fromkeys(row.request_id for plan in bench.plans for row in plan.rows))
    ended = list(bench.outcomes)
    assert started == [f"r{i}" for i in range(8)]
    assert [name for name, _ in ended] == started
    # Who was sent back is among the first three to end, and not behind the others.
    last_row = {row.request_id: step for step, plan in enumerate(bench.plans) for row in plan.rows}
    assert sorted(last_row, key=last_row.__getitem__)[:3] == started[:3]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("blocks", [12, 24, 200])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 33])
def test_sch_12_choices_share_the_prompt_and_nothing_else(
    length: int, blocks: int, caching: bool
) -> None:
    bench = Bench(blocks=blocks, caching=caching)
    bench.run([make("r", prompt(length), 40, n=4, temperature=1.0, seed=11)])
    same_as_alone(bench)
    answers = {tuple(bench.outcomes["r", i].token_ids) for i in range(4)}
    assert len(answers) == 4
    if blocks == 200:  # the whole prompt was computed once, its last block copied for three
        assert bench.runner.tokens == length + 4 * 39
        assert bench.runner.copies["copy"] == (3 if length % 16 else 0)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_sch_12_a_choice_that_ends_leaves_its_siblings_whole(mode: str) -> None:
    """Two groups in a pool for one of them: they are sent out, come back, and lose a choice."""
    bench = Bench(blocks=14, mode=mode, num_host_blocks=60)
    for name in ("a", "b"):
        bench.add(make(name, prompt(33, ord(name)), 40, n=4, temperature=1.0, seed=11))
    for _ in range(12):
        bench.step()
    bench.scheduler.finish_choice("a", 1)
    bench.scheduler.finish_choice("b", 0)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert (bench.scheduler.num_swap_outs > 0) == (mode == "swap")
    for name, ended in (("a", 1), ("b", 0)):
        for index, tokens in alone(bench.requests[name]).items():
            got = bench.outcomes[name, index].token_ids if (name, index) in bench.outcomes else []
            assert got == (tokens[: len(got)] if index == ended else tokens), (name, index)


def test_sch_08_one_token_steps_and_no_room_for_more() -> None:
    bench = Bench(budget=4, seqs=10)
    bench.run(make(f"r{i}", prompt(3, i), 20) for i in range(4))
    assert max(len(plan.rows) for plan in bench.plans) == 4
    for number in range(4):
        bench.add(make(f"s{number}", prompt(3, number), 30))
    for _ in range(8):
        bench.step()
    bench.add(make("late", prompt(40), 3))  # every token of a step is due to another
    bench.run()
    same_as_alone(bench)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("after", range(8))
def test_sch_08_abort_between_chunks_frees_everything(after: int, caching: bool) -> None:
    bench = Bench(budget=16, caching=caching)
    bench.add(make("r", prompt(100), 5, n=2))
    for _ in range(after):
        bench.step()
    assert bench.scheduler.abort("r")
    assert not bench.scheduler.abort("r")
    bench.check_idle()
    bench.run([make("again", prompt(100), 5)])
    same_as_alone_of(bench, "again")


def test_an_abort_while_the_step_runs_is_kept() -> None:
    bench = Bench()
    bench.add(make("gone", prompt(20), 5))
    bench.add(make("stays", prompt(20, 1), 5))
    plan = bench.scheduler.schedule(0.0)
    result = bench.runner.execute(plan)
    bench.scheduler.abort("gone")
    updates = bench.scheduler.commit(plan, result, 0.1)
    assert [update.request_id for update in updates] == ["stays"]


def test_sch_08_half_a_prompt_of_room() -> None:
    """Two long prompts whose sum exceeds the pool: each ends, neither holds the other up."""
    bench = Bench(blocks=12, budget=16, caching=False)
    bench.run(make(f"r{i}", prompt(100, i), 30) for i in range(3))
    same_as_alone(bench)


def test_sch_10_one_id_is_in_flight_once() -> None:
    bench = Bench()
    bench.add(make("same", prompt(10), 5))
    with pytest.raises(RequestError, match="in flight") as caught:
        bench.add(make("same", prompt(12), 5))
    assert caught.value.param == "request_id"
    bench.step()
    bench.scheduler.abort("same")
    bench.outcomes.clear()
    bench.run([make("same", prompt(12), 5)])
    same_as_alone(bench)


def test_sch_10_a_choice_is_not_taken_for_a_request_of_its_name() -> None:
    bench = Bench()
    bench.run([make("a", prompt(20), 8, n=2, seed=1, temperature=1.0), make("a#1", prompt(9), 8)])
    same_as_alone(bench)


def test_lim_13_a_pool_too_small_for_the_window_is_a_start_error() -> None:
    with pytest.raises(ConfigError, match=r"4096.*holds 128 tokens.*lower max_model_len to 128"):
        Scheduler(
            KVManager(9, 16, True),
            FIFOScheduler(),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=4096,
        )
    with pytest.raises(ConfigError, match="auto, swap, recompute"):
        Bench(mode="both")


def test_lim_13_a_prompt_that_fills_the_window_gains_one_token() -> None:
    bench = Bench(blocks=9)
    bench.run([make("short", prompt(10), 5), make("edge", prompt(127), 5)])
    assert bench.outcomes["edge", 0].finish_reason == "length"
    assert len(bench.outcomes["edge", 0].token_ids) == 1
    same_as_alone(bench)


def test_sch_05_a_request_without_room_is_passed_by_and_not_forgotten() -> None:
    bench = Bench(blocks=40, budget=64, quick=True)
    for number in range(3):
        bench.add(make(f"stream{number}", prompt(100, number), 150))
    for _ in range(8):
        bench.step()
    bench.add(make("big", prompt(400), 5))
    small = 0
    started_before = 0
    while ("big", 0) not in bench.outcomes:
        if bench.steps % 2 == 0:  # small ones keep coming
            small += 1
            bench.add(make(f"small{small}", prompt(8, small), 4))
        bench.step()
        started_before = sum(key[0].startswith("small") for key in bench.outcomes)
        assert bench.steps < 1000
    assert 1 <= started_before <= MAX_OVERTAKEN + LOOK_AHEAD
    bench.run()


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    bench = Bench(budget=4096)
    bench.run(make(f"r{i}", prompt(1008), 2) for i in range(8))
    assert bench.runner.tokens == 1008 + 7 + 8
    same_as_alone(bench)


@pytest.mark.parametrize("stop", ["first eos", "second eos", "stop id"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [1, 50])
def test_stp_01_min_tokens_counts_output_only(length: int, n: int, stop: str) -> None:
    token = {"first eos": 2, "second eos": 11, "stop id": 77}[stop]
    for least in range(6):
        bench = Bench()
        request = make(
            "r", prompt(length), 32, eos=(2, 11), ignore_eos=False, n=n, min_tokens=least,
            logit_bias={token: 100.0}, stop_token_ids=[77],
        )  # fmt: skip
        bench.run([request])
        for index in range(n):
            outcome = bench.outcomes["r", index]
            assert len(outcome.token_ids) == least + 1
            assert outcome.token_ids[-1] == token
            assert token not in outcome.token_ids[:-1]
            assert outcome.finish_reason == "stop"
            assert outcome.stop_reason == (77 if stop == "stop id" else None)


def test_stp_01_holds_even_if_the_sampler_draws_what_it_must_not() -> None:
    for least in range(6):
        bench = Bench()
        bench.runner.next_token = say(2)
        bench.run([make("r", prompt(9), 32, ignore_eos=False, min_tokens=least)])
        assert bench.outcomes["r", 0].token_ids == [2] * (least + 1)


def test_stp_03_every_eos_stops_unless_ignored() -> None:
    def run(script: tuple[int, ...], **options: object) -> Outcome:
        bench = Bench()
        bench.runner.next_token = say(*script)
        bench.run([make("r", prompt(9), 8, eos=(2, 11), **options)])
        return bench.outcomes["r", 0]

    stopped = run((5, 6, 7, 8, 9, 11), ignore_eos=False)
    assert stopped.token_ids == [5, 6, 7, 8, 9, 11]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    ignored = run((5, 11, 2, 999), ignore_eos=True)
    assert ignored.token_ids == [5, 11, 2, 999, 999, 999, 999, 999]
    assert (ignored.finish_reason, ignored.stop_reason) == ("length", None)
    asked = run((5, 11, 2), ignore_eos=True, stop_token_ids=[2])
    assert asked.token_ids == [5, 11, 2]
    assert (asked.finish_reason, asked.stop_reason) == ("stop", 2)
    last = run((5, 5, 5, 5, 5, 5, 5, 2), ignore_eos=False)
    assert last.finish_reason == "stop"  # and not length


@pytest.mark.parametrize("end", ["length", "abort", "error", "stop string"])
def test_smp_23_nothing_of_a_request_is_left_for_the_next(end: str) -> None:
    def specs(bench: Bench) -> list[tuple[SampleSpec, ...]]:
        bench.run([make("b", prompt(30), 5)])
        return [row.samples for plan in bench.plans for row in plan.rows if row.request_id == "b"]

    bench = Bench(seqs=1)
    a = make(
        "a", prompt(30), 5, temperature=1.0, seed=4, logit_bias={7: 5.0}, min_tokens=3,
        presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0,
    )  # fmt: skip
    bench.add(a)
    bench.step()
    bench.step()
    if end == "abort":
        bench.scheduler.abort("a")
    elif end == "stop string":
        bench.scheduler.finish_choice("a", 0)
    elif end == "error":
        bench.runner.failing.add("a")
    assert specs(bench) == specs(Bench(seqs=1))
    same_as_alone_of(bench, "b")


def test_an_error_of_one_row_ends_that_request_alone() -> None:
    bench = Bench(budget=128)
    bench.runner.failing |= {"early", "late#1"}
    bench.add(make("early", prompt(30), 5, n=3))
    bench.add(make("late", prompt(30, 1), 5, n=2))
    bench.add(make("well", prompt(30, 2), 5))
    bench.run()
    for index in range(3):
        outcome = bench.outcomes["early", index]
        assert (outcome.finish_reason, outcome.error) == ("error", "failed on purpose")
        assert outcome.token_ids == []
    assert bench.outcomes["late", 1].finish_reason == "error"
    assert len(bench.outcomes["late", 1].token_ids) == 1
    same_as_alone_of(bench, "well")
    assert bench.outcomes["late", 0].finish_reason == "length"


@pytest.mark.parametrize("budget", [1, 16, 17, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_prompt_logprobs_come_once_and_whole(length: int, budget: int) -> None:
    bench = Bench(budget=budget)
    bench.run([make("warm", prompt(length), 2)])
    bench.run([make("r", prompt(length), 3, prompt_logprobs=1, n=2)])
    expected = tuple(logprobs_of(t, i) for i, t in enumerate(prompt(length)[1:]))
    assert bench.outcomes["r", 0].prompt_logprobs == expected
    assert bench.outcomes["r", 1].prompt_logprobs is None
    assert bench.outcomes["r", 0].num_cached_tokens == 0
    rows = [row for plan in bench.plans for row in plan.rows if row.request_id == "r"]
    for row in rows:
        ends_prompt = row.start + len(row.token_ids) == length
        if row.num_prompt_logprobs is not None:
            assert len(row.prompt_targets) == len(row.token_ids) - ends_prompt


def test_a_stop_seen_outside_ends_one_choice() -> None:
    bench = Bench()
    bench.add(make("r", prompt(20), 30, n=3, temperature=1.0, seed=1))
    for _ in range(5):
        bench.step()
    bench.scheduler.finish_choice("r", 1)
    bench.scheduler.finish_choice("r", 9)
    bench.scheduler.finish_choice("nobody", 0)
    seen = len(bench.outcomes["r", 1].token_ids)
    bench.run()
    assert len(bench.outcomes["r", 1].token_ids) == seen
    assert len(bench.outcomes["r", 0].token_ids) == len(bench.outcomes["r", 2].token_ids) == 30


def test_more_choices_than_places_take_turns() -> None:
    bench = Bench(seqs=3)
    bench.run([make("r", prompt(20), 10, n=8, temperature=1.0, seed=2)])
    same_as_alone(bench)
    assert max(len(plan.rows) for plan in bench.plans) == 3


def test_block_ids_keep_their_identity_and_history_is_only_given_where_needed() -> None:
    bench = Bench()
    bench.run([make("r", prompt(20), 20)])
    rows = [row for plan in bench.plans for row in plan.rows]
    changes = sum(a.block_ids is not b.block_ids for a, b in pairwise(rows))
    assert changes == 1  # 39 tokens: a third block, once
    assert all(not spec.prompt_ids for row in rows for spec in row.samples)


def test_plans_in_flight_are_committed_once_in_order_each_with_its_result() -> None:
    bench = Bench(budget=64)
    bench.add(make("a", prompt(100), 3))
    first = bench.scheduler.schedule(0.0)
    second = bench.scheduler.schedule(0.1)
    assert [(row.start, len(row.token_ids)) for row in (*first.rows, *second.rows)] == [
        (0, 64),
        (64, 36),
    ]
    results = [bench.runner.execute(plan) for plan in (first, second)]
    commit = bench.scheduler.commit
    with pytest.raises(EngineError, match="plan 2 cannot be committed: plan 1 is next"):
        commit(second, results[1], 0.2)
    with pytest.raises(EngineError, match=r"result 2 \(1 rows\) does not belong to plan 1"):
        commit(first, results[1], 0.2)
    with pytest.raises(EngineError, match=r"result 1 \(0 rows\) does not belong"):
        commit(first, StepResult(1, ()), 0.2)
    bench.scheduler.check()
    assert commit(first, results[0], 0.2) == []
    assert len(commit(second, results[1], 0.3)) == 1
    with pytest.raises(EngineError, match="plan 2 cannot be committed: none is next"):
        commit(second, results[1], 0.4)
    bench.scheduler.check()


def test_a_result_that_does_not_follow_from_the_drafts_is_refused() -> None:
    for tokens in ((), (7, 9), (8, 7, 1), (8, 9, 1, 1)):
        bench = Bench(budget=64)
        bench.add(make("r", prompt(20), 9))
        bench.step()
        bench.scheduler.propose("r", 0, [8, 9])
        plan = bench.scheduler.schedule(0.0)
        result = StepResult(plan.step, (RowResult("r", (tokens,)),))
        with pytest.raises(EngineError, match="does not follow from its drafts"):
            bench.scheduler.commit(plan, result, 0.1)


class Spiteful(FIFOScheduler):
    """Whoever waits displaces whoever runs: without end, if the scheduler let it."""

    name = "spiteful"
    displaces = True

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None:
        return next(iter(running))


def test_nobody_is_displaced_for_ever() -> None:
    bench = Bench(seqs=1, budget=16, caching=False, policy=Spiteful())
    bench.run([make("a", prompt(100), 5), make("b", prompt(100, 1), 5)], limit=400)
    assert bench.scheduler.num_displaced > 6
    same_as_alone(bench)


class Listening(FIFOScheduler):
    """Keeps the latencies that it is told."""

    def __init__(self) -> None:
        super().__init__(max_stretch=None)
        self.heard: list[StepLatencies] = []

    def observe(self, latencies: StepLatencies) -> None:
        self.heard.append(latencies)

    def refusal(self, load: Load) -> str | None:
        return None


def test_a_chunk_of_a_prompt_is_no_token_for_a_latency_policy() -> None:
    policy = Listening()
    bench = Bench(budget=64, policy=policy)
    bench.run([make("a", prompt(200), 3)])
    firsts = [seconds for heard in policy.heard for seconds in heard.firsts]
    gaps = [seconds for heard in policy.heard for seconds in heard.gaps]
    assert firsts == pytest.approx([0.04])  # four chunks of 0.01 s
    assert gaps == pytest.approx([0.01, 0.01])


def test_an_idle_scheduler_plans_nothing() -> None:
    bench = Bench()
    assert not bench.scheduler.has_work()
    assert bench.step() == []
    assert bench.plans[-1].rows == bench.plans[-1].copies == ()


def test_the_deciding_code_imports_no_torch() -> None:
    code = "import sys, octavo.core.scheduler, octavo.core.slo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_scheduler_has_no_phases() -> None:
    for part in (Scheduler, StepBuilder, Queues):
        source = Path(inspect.getfile(part)).read_text().lower()
        assert "prefill" not in source
        assert "decode" not in source


POLICIES: dict[str, Callable[[], Policy]] = {
    "fifo": FIFOScheduler,
    "priority": lambda: PriorityScheduler(max_wait=0.5),
    "weighted": lambda: PriorityScheduler(lambda r: 1 / r.prompt_len, max_wait=0.5),
    "slo": lambda: SLOScheduler(p99_itl_ms=15.0, p99_ttft_ms=100.0, window=1.0),
    "careless": Careless,
}


def drafter(bench: Bench, most: int, seed: int) -> Callable[[Request], list[int]]:
    """Proposes up to `most` tokens, of which up to all are right, and some may follow the end."""
    rng = random.Random(seed)
    answers: dict[str, dict[int, list[int]]] = {}

    def propose(request: Request) -> list[int]:
        if request.request_id not in answers:
            answers[request.request_id] = alone(
                bench.requests[request.request_id], bench.scheduler.max_model_len
            )
        done = request.num_output_tokens
        right = answers[request.request_id][request.index][done : done + rng.randint(0, most)]
        return [*right, *rng.choices(range(1000), k=rng.randint(0, most - len(right)))]

    return propose


@pytest.mark.parametrize(
    ("depth", "drafts", "ahead"),
    [(1, 0, False), (2, 0, True), (3, 0, False), (1, 5, False), (3, 20, True)],
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_random_operations(
    seed: int, mode: str, policy: str, depth: int, drafts: int, ahead: bool
) -> None:
    """Adds, aborts, stops, forks and steps in any order, with up to `depth` plans in flight and
    up to `drafts` drafts a row, planned ahead or not; every block accounted for each time."""
    rng = random.Random(f"{seed}{mode}{policy}")
    bench = Bench(
        blocks=rng.choice([9, 14, 30, 200]),
        block_size=rng.choice([8, 16]),
        budget=rng.choice([3, 16, 17, 32, 64]),
        seqs=rng.choice([2, 5, 32]),
        caching=rng.random() < 0.7,
        policy=POLICIES[policy](),
        mode=mode,
        ahead=ahead,
        num_host_blocks=rng.choice([0, 5, 40]),
    )
    if drafts:
        bench.proposer = drafter(bench, drafts, seed)
    window = bench.scheduler.max_model_len
    gone: set[str] = set()
    for number in range(40):
        for _ in range(rng.randrange(6)):
            bench.step(depth if rng.random() < 0.8 else 1)
        length = min(rng.choice([1, 5, 16, 20, 48, 60]), window - 1)
        shared = prompt(100, rng.randrange(2))[: rng.randrange(length + 1)]
        request = make(
            f"r{number}",
            [*shared, *prompt(length - len(shared), number)],
            max(1, min(rng.choice([1, 3, 20, 40]), window - length)),
            arrival=bench.now,
            n=rng.choice([1, 1, 1, 2, 5]),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=rng.choice([None, None, 0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            min_tokens=rng.choice([0, 0, 1]),
            salt=rng.choice([None, None, "a"]),
            priority=rng.choice([0, 0, 1, 5]),
            deadline=rng.choice([None, bench.now + 1]),
        )
        bench.add(request)
        gone |= disturb(bench, rng, number)
    bench.run(depth=depth)
    bench.requests = {k: v for k, v in bench.requests.items() if k not in gone}
    same_as_alone(bench)
    for request in bench.requests.values():
        if request.params.prompt_logprobs is not None:
            expected = tuple(
                logprobs_of(t, i)
                for i, t in enumerate(request.tokens[1 : request.num_prompt_tokens])
            )
            assert bench.outcomes[request.request_id, 0].prompt_logprobs == expected


def test_slots_of_each_running_choice() -> None:
    bench = Bench(budget=256)
    bench.add(make("a", prompt(40), 5, n=2, temperature=1.0, seed=1))
    bench.add(make("b", prompt(20, 1), 5))
    bench.step()
    assert bench.scheduler.slots() == {"a": (48, 40, 48), "a#1": (48, 40, 48), "b": (32, 20, 0)}
    assert bench.kv.usage().most_written_slots == 60
    bench.step()  # one of the two copies the block that both would write to
    assert bench.scheduler.slots() == {"a": (48, 41, 32), "a#1": (48, 41, 32), "b": (32, 21, 0)}
    bench.run()
    usage = bench.kv.usage()
    assert 60 < usage.most_written_slots <= usage.most_held_slots == 96
