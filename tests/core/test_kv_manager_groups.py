"""KV by groups: each layer finds just the keys that it may see, and what no layer sees is free.

The simulated runner reads every key that a layer of a group would read through the plan's block
tables: a block released too early, or found by the prefix cache for the wrong group, is caught
where it is read.
"""

import random

import pytest
from tests.core.harness import Bench, alone, disturb, make
from tests.core.test_scheduler import POLICIES, drafter

from octavo.core.kv_manager import KVManager
from octavo.core.plan import FULL, CacheSpec, blocks_needed, longest_sequence
from octavo.core.request import Request
from octavo.errors import ConfigError, EngineError


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
        ended |= disturb(bench, rng, number)
    bench.run(depth=depth)
    bench.requests = {k: v for k, v in bench.requests.items() if k not in ended}
    same_as_alone(bench, limit)


def manager(*groups: CacheSpec, blocks: int = 100, host: int = 0) -> KVManager:
    return KVManager(blocks, 16, True, host, groups, max_chunk=64)


def computed(kv: KVManager, request: Request, count: int, chunk: int = 64) -> Request:
    """`request` as it is when its first `count` tokens are computed, `chunk` at a time."""
    kv.match(request)
    while request.num_computed < count:
        step = min(chunk, count - request.num_computed)
        assert kv.grow(request, step)
        request.num_computed += step
        kv.publish(request, request.num_computed)
        kv.check()
    return request


def test_a_window_holds_its_blocks_and_the_null_block_stands_for_the_others() -> None:
    kv = manager(window(32), FULL)
    request = computed(kv, make("r", range(200)), 160)
    windowed, full = request.table.ids
    # The query at 160 sees 129..160: blocks 8 and 9 are held, 0..7 are behind it.
    assert windowed[:8] == (0,) * 8
    assert all(windowed[8:])
    assert len(windowed) == len(full) == 10
    assert all(full)
    assert request.table.num_held == kv.pool.num_used == 12
    assert kv.usage_of(request) == (12 * 16, 12 * 16, 0)
    kv.free(request)
    assert kv.pool.num_used == 0
    kv.check()


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_a_request_never_holds_more_than_is_counted_for_it(
    groups: tuple[CacheSpec, ...], chunk: int
) -> None:
    kv = manager(*groups, blocks=200)
    request = make("r", range(300))
    counted: list[int] = []  # before each step: held, and still needed
    while request.num_computed < 300:
        counted.append(kv.pool.num_used + kv.missing(request))
        step = min(chunk, 300 - request.num_computed)
        assert kv.grow(request, step)
        assert kv.pool.num_used <= min(counted)
        request.num_computed += step
        kv.publish(request, request.num_computed)
    assert kv.pool.peak_used <= blocks_needed(groups, 300, 16, chunk)


def test_memory_of_a_long_sequence_with_five_windows_to_one() -> None:
    """The shape of Gemma 3 270M: three layers in a block, 15 with a window of 512, 3 full."""
    groups = (*[window(512)] * 5, FULL)
    kv = KVManager(2000, 16, True, 0, groups, max_chunk=512)
    computed(kv, make("r", range(4200)), 4096, chunk=512)
    assert kv.pool.num_used == 256 + 5 * 32
    assert kv.pool.num_used < 0.28 * 6 * 256  # where all layers cache all keys
    assert kv.pool.peak_used <= 256 + 5 * (32 + 1 + 32)


def test_a_hit_ends_where_every_window_is_cached() -> None:
    kv = manager(window(32), FULL)
    first = computed(kv, make("a", range(160)), 160, chunk=16)
    windowed = first.table.groups[0]
    kv.free(first)
    again = make("b", range(160))
    assert len(kv.find(again)) == 10
    # Overwrite one block of the last window: the hit ends before it.
    lost = windowed[9]
    name = kv.pool.hashes[lost]
    assert name is not None
    kv.pool.hashes[lost] = None
    del kv.pool._block_of[name]
    found = kv.find(again)
    assert len(found) == 9
    assert found.groups[0][:7] == [0] * 7
    assert found.first == [7, 0]
    # Without the block before it, which it sees, the hit ends one block earlier, and so on.
    kv.check()
    assert kv.take(again, found) == 144
    assert again.table.num_held == 2 + 9
    kv.check()


def test_a_full_hit_keeps_what_the_last_token_sees() -> None:
    """It is computed again, one token before the end of the hit."""
    kv = manager(window(17), FULL)
    kv.free(computed(kv, make("a", range(160)), 160))
    again = make("b", range(160))
    assert kv.match(again) == 159
    assert again.table.first == [8, 0]  # token 143 is in block 8
    assert kv.grow(again, 1)
    assert len(kv.take_copies()) == 2
    kv.check()


def test_swapping_moves_what_is_held() -> None:
    kv = manager(window(20), FULL, host=30)
    request = computed(kv, make("r", range(200)), 100)
    held, ids = request.table.num_held, request.table.ids
    assert held == 2 + 7
    assert kv.swap_out(request)
    assert len(kv.take_copies()) == held
    assert kv.pool.num_used == 0
    kv.pool.forget()
    kv.check()
    found = kv.find(request)
    assert kv.shortage(request, found, 0) == 9 + 6 + 6 - 99  # of 200 tokens, 6 blocks are new
    kv.swap_in(request)
    assert len(kv.take_copies()) == held
    assert [[block == 0 for block in group] for group in request.table.ids] == [
        [block == 0 for block in group] for group in ids
    ]
    kv.check()


def test_need_is_bounded_by_window_and_chunk() -> None:
    kv = manager(window(32), FULL, blocks=1000)
    request = make("r", range(3200))
    found = kv.find(request)
    # Of the window group: 31 tokens before, a block, and 63 more tokens.
    assert kv.shortage(request, found, 0) == 200 + (2 + 1 + 4) - 999


def test_a_window_alone_has_no_end_and_a_small_pool_cuts_the_chunks() -> None:
    assert longest_sequence((window(100),), 8, 16) > 10**9
    assert longest_sequence((window(100),), 7, 16) == 112
    assert longest_sequence((FULL,), 7, 16) == 112
    assert longest_sequence((window(100), FULL), 20, 16) == 12 * 16
    bench = Bench(blocks=9, budget=64, groups=(window(100),), window=2000)
    bench.run([make("long", prompt(600), 20), make("other", prompt(300, 1), 20)])
    same_as_alone(bench)
    assert bench.kv.pool.peak_used <= 8


def test_state_is_named_and_refused() -> None:
    with pytest.raises(ConfigError, match="group 1 caches a state of fixed size"):
        manager(FULL, CacheSpec("state"))
    with pytest.raises(ConfigError, match="at least one group"):
        manager()
    with pytest.raises(ConfigError, match="window must be at least 1"):
        window(0)
    with pytest.raises(ConfigError, match="'full' has no window"):
        CacheSpec("full", 3)


def test_check_sees_a_block_missing_in_a_window() -> None:
    kv = manager(window(32), FULL)
    request = computed(kv, make("r", range(200)), 160)
    for block in request.table.drop_front(0, 9):
        kv.pool.release(block)
    with pytest.raises(EngineError, match="lacks a block that a window of 32 sees"):
        kv.check()
