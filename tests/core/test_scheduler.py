"""The scheduler over a simulated model: same request, same tokens, whatever happens around it."""

import random
from collections.abc import Callable, Collection, Iterable

import pytest
from tests.core.harness import Bench, alone, logprobs_of, make

from octavo.core.policy import FIFOScheduler, Load, Policy, PriorityScheduler
from octavo.core.request import Request
from octavo.core.slo import SLOScheduler


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


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


def same_as_alone(bench: Bench) -> None:
    for request in bench.requests.values():
        for index, tokens in alone(request, bench.scheduler.max_model_len).items():
            outcome = bench.outcomes[request.request_id, index]
            assert outcome.token_ids == tokens, request.request_id
            assert outcome.finish_reason in ("stop", "length")


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


POLICIES: dict[str, Callable[[], Policy]] = {
    "fifo": FIFOScheduler,
    "priority": lambda: PriorityScheduler(max_wait=0.5),
    "weighted": lambda: PriorityScheduler(lambda r: 1 / r.prompt_len, max_wait=0.5),
    "slo": lambda: SLOScheduler(p99_itl_ms=15.0, p99_ttft_ms=100.0, window=1.0),
    "careless": Careless,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations(seed: int, mode: str, policy: str) -> None:
    """Adds, aborts, stops, forks and steps in any order; every block accounted for each time."""
    rng = random.Random(f"{seed}{mode}{policy}")
    bench = Bench(
        blocks=rng.choice([9, 14, 30, 200]),
        block_size=rng.choice([8, 16]),
        budget=rng.choice([3, 16, 17, 32, 64]),
        seqs=rng.choice([2, 5, 32]),
        caching=rng.random() < 0.7,
        policy=POLICIES[policy](),
        mode=mode,
        num_host_blocks=rng.choice([0, 5, 40]),
    )
    window = bench.scheduler.max_model_len
    gone: set[str] = set()
    for number in range(40):
        for _ in range(rng.randrange(6)):
            bench.step()
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
            salt=rng.choice([None, None, "a"]),
            priority=rng.choice([0, 0, 1, 5]),
            deadline=rng.choice([None, bench.now + 1]),
        )
        bench.add(request)
        victim = f"r{rng.randrange(number + 1)}"
        if rng.random() < 0.15:
            bench.scheduler.abort(victim)
            gone.add(victim)
        elif rng.random() < 0.1:
            bench.scheduler.finish_choice(victim, rng.randrange(3))
            gone.add(victim)
        if rng.random() < 0.03:
            bench.kv.reset_prefix_cache()
        bench.scheduler.check()
    bench.run()
    bench.requests = {k: v for k, v in bench.requests.items() if k not in gone}
    same_as_alone(bench)
    for request in bench.requests.values():
        if request.params.prompt_logprobs is not None:
            expected = tuple(
                logprobs_of(t, i)
                for i, t in enumerate(request.tokens[1 : request.num_prompt_tokens])
            )
            assert bench.outcomes[request.request_id, 0].prompt_logprobs == expected
