"""KV by groups: each layer finds just the keys that it may see, and what no layer sees is free.

The simulated runner reads every key that a layer of a group would read through the plan's block
tables: a block released too early, or found by the prefix cache for the wrong group, is caught
where it is read.
"""

import random

import pytest
from tests.core.harness import Bench, alone, make
from tests.core.test_scheduler import POLICIES, drafter

from octavo.core.plan import FULL, CacheSpec


def window(tokens: int) -> CacheSpec:
    return CacheSpec("window", tokens)


LAYOUTS = {
    "full": (FULL,),
    "window": (window(20),),
    "window and full": (window(20), FULL),
    "full and small window": (FULL, window(3)),
    "two windows": (window(40), window(9)),
    "five to one": (*[window(17)] * 5, FULL),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


def same_as_alone(bench: Bench, window: int = 10**9) -> None:
    for request in bench.requests.values():
        for index, tokens in alone(request, window).items():
            assert bench.outcomes[request.request_id, index].token_ids == tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_random_operations(layout: str, policy: str, mode: str) -> None:
    """Adds, aborts, stops, forks and drafts in any order, with several plans in flight."""
    groups = LAYOUTS[layout]
    rng = random.Random(f"{layout}{policy}{mode}")
    size = rng.choice([8, 16])
    bench = Bench(
        blocks=len(groups) * rng.choice([9, 14, 30]) + 1,
        block_size=size,
        budget=rng.choice([3, 16, 17, 32, 64]),
        seqs=rng.choice([2, 5, 32]),
        caching=rng.random() < 0.8,
        policy=POLICIES[policy](),
        mode=mode,
        groups=groups,
        num_host_blocks=len(groups) * rng.choice([0, 5, 40]),
        window=400,
    )
    if rng.random() < 0.5:
        bench.proposer = drafter(bench, 5, rng.randrange(100))
    limit = bench.scheduler.max_model_len
    depth = rng.choice([1, 1, 2, 3])
    ended: set[str] = set()
    for number in range(30):
        for _ in range(rng.randrange(6)):
            bench.step(depth)
        length = min(rng.choice([1, 5, 16, 20, 48, 60, 100]), limit - 1)
        shared = prompt(100, rng.randrange(2))[: rng.randrange(length + 1)]
        bench.add(
            make(
                f"r{number}",
                [*shared, *prompt(length - len(shared), number)],
                max(1, min(rng.choice([1, 3, 20, 40]), limit - length)),
                arrival=bench.now,
                n=rng.choice([1, 1, 1, 2, 5]),
                temperature=rng.choice([0.0, 1.0]),
                seed=number,
                ignore_eos=rng.random() < 0.5,
                prompt_logprobs=rng.choice([None, None, 0]),
                salt=rng.choice([None, None, "a"]),
                priority=rng.choice([0, 0, 1, 5]),
            )
        )
        victim = f"r{rng.randrange(number + 1)}"
        if rng.random() < 0.15:
            bench.scheduler.abort(victim)
            ended.add(victim)
        elif rng.random() < 0.1:
            bench.scheduler.finish_choice(victim, rng.randrange(3))
            ended.add(victim)
        if rng.random() < 0.03:
            bench.kv.reset_prefix_cache()
        bench.scheduler.check()
    bench.run(depth=depth)
    bench.requests = {k: v for k, v in bench.requests.items() if k not in ended}
    same_as_alone(bench, limit)
