"""Equal histories share blocks, computed once and hashed once; others never do."""

import random

import pytest
from tests.core.harness import Bench, alone, make

from octavo.core import prefix_cache
from octavo.core.request import Request


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


def answers(bench: Bench, request: Request) -> None:
    for index, tokens in alone(request).items():
        assert bench.outcomes[request.request_id, index].token_ids == tokens


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("length", [16, 17, 31, 32, 48])
def test_pfx_01_full_hit_recomputes_last_token(
    length: int, max_tokens: int, together: bool
) -> None:
    bench = Bench()
    requests = [make(f"r{i}", prompt(length), max_tokens, n=1 + i % 2) for i in range(8)]
    if together:
        bench.run(requests)
    else:
        for request in requests:
            bench.run([request])
    expected = min(length // 16 * 16, length - 1)
    for request in requests:
        answers(bench, request)
    for request in requests[1:]:
        assert bench.outcomes[request.request_id, 0].num_cached_tokens == expected
    longer = make("longer", [*prompt(length), *prompt(16, 5)], max_tokens)
    bench.run([longer])
    answers(bench, longer)
    assert bench.outcomes["longer", 0].num_cached_tokens >= length // 16 * 16


def test_pfx_01_full_hit_of_the_whole_pool_has_no_block_for_a_copy() -> None:
    bench = Bench(blocks=5)
    bench.run([make("a", prompt(63), 1)])
    bench.run([make("b", prompt(63), 1)])
    last = make("c", prompt(63)[:48], 1)
    bench.run([last])
    answers(bench, last)
    assert bench.outcomes["c", 0].num_cached_tokens in (32, 47)


@pytest.mark.parametrize("count", [32, 512])
def test_pfx_02_a_resumed_request_finds_its_prefix_again(count: int) -> None:
    bench = Bench(blocks=25, check=count < 100)
    shared = prompt(64)
    bench.run(make(f"r{i}", [*shared, i], 100 if count < 100 else 40) for i in range(count))
    assert bench.scheduler.num_preemptions > 0
    for request in bench.requests.values():
        answers(bench, request)
        assert len(bench.outcomes[request.request_id, 0].token_ids) == request.max_tokens


@pytest.mark.parametrize("seed", range(50))
def test_pfx_03_blocks_in_flight_are_waited_for_and_computed_once(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(budget=80)
    requests = [make(f"r{i}", prompt(64), 4) for i in range(16)]
    for request in requests:
        for _ in range(rng.choice([0, 0, 0, 1]) if seed else 0):
            bench.step()
        bench.add(request)
    bench.run()
    for request in requests:
        answers(bench, request)
    # The prompt once, its last token again for each other request, three more tokens each.
    assert bench.runner.tokens == 64 + 15 + 16 * 3


def test_pfx_03_a_shared_beginning_is_waited_for_block_by_block() -> None:
    bench = Bench(budget=32)
    bench.run(make(f"r{i}", [*prompt(320), i], 1) for i in range(6))
    assert bench.runner.tokens == 321 + 5
    for request in bench.requests.values():
        answers(bench, request)


def test_pfx_06_cached_blocks_become_free_again() -> None:
    bench = Bench(blocks=33)
    for number in range(300):
        bench.add(make(f"r{number}", prompt(64, number), 2))
        while bench.scheduler.has_work():
            bench.step()
            usage = bench.kv.usage()
            assert 0 <= usage.written_slots <= usage.held_slots <= usage.total_slots
        assert bench.outcomes[f"r{number}", 0].finish_reason == "length"
    bench.run([make("large", prompt(30 * 16), 4)])
    assert bench.outcomes["large", 0].finish_reason == "length"
    bench.check_idle()


def test_pfx_09_only_equal_salts_share() -> None:
    bench = Bench()
    kinds = {
        "none": {},
        "a": {"salt": "a"},
        "b": {"salt": "b"},
        "odd": {"salt": "salt\x00a"},
    }
    for kind, keys in kinds.items():
        for number in range(2):
            request = make(f"{kind}{number}", prompt(64), 2, **keys)
            bench.run([request])
            answers(bench, request)
            cached = bench.outcomes[request.request_id, 0].num_cached_tokens
            assert cached == (63 if number else 0), kind


@pytest.mark.parametrize("blocks", [16, 200])
def test_each_block_is_hashed_once(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(blocks=blocks, budget=17, mode="recompute")
    hashed: list[tuple[bytes, tuple[int, ...]]] = []
    original = prefix_cache.hash_block

    def counting(parent: bytes, tokens: list[int]) -> bytes:
        hashed.append((parent, tuple(tokens)))
        return original(parent, tokens)

    monkeypatch.setattr(prefix_cache, "hash_block", counting)
    requests = [make(f"r{i}", prompt(50, i), 60) for i in range(6)]
    bench.run(requests)
    assert (bench.scheduler.num_preemptions > 0) == (blocks == 16)
    # 109 tokens are computed: six full blocks each, whatever was preempted and computed again.
    assert len(hashed) == len(set(hashed)) == 6 * 6


def test_choices_do_not_hash_their_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = prefix_cache.hash_block

    def counting(parent: bytes, tokens: list[int]) -> bytes:
        nonlocal count
        count += 1
        return original(parent, tokens)

    monkeypatch.setattr(prefix_cache, "hash_block", counting)
    Bench().run([make("r", prompt(160), 33, n=4, temperature=1.0)])
    assert count == 10 + 4 * 2


def test_without_prefix_caching_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "hash_block", None)
    bench = Bench(blocks=16, caching=False)
    bench.run(make(f"r{i}", prompt(50), 20) for i in range(6))


def test_forgetting_the_cache_keeps_running_requests_right() -> None:
    bench = Bench()
    first = make("first", prompt(100), 40)
    bench.add(first)
    for _ in range(20):
        bench.step()
    assert not bench.kv.reset_prefix_cache()  # some blocks are held
    bench.run([make("second", prompt(100), 4)])
    assert bench.outcomes["second", 0].num_cached_tokens == 0
    answers(bench, first)
    assert bench.kv.reset_prefix_cache()


def test_hit_rate_counts_prompts_once() -> None:
    bench = Bench(blocks=12)
    bench.run(make(f"r{i}", prompt(48), 60) for i in range(4))
    assert bench.scheduler.num_preemptions > 0
    usage = bench.kv.usage()
    assert usage.queried_tokens == 4 * 48
    assert usage.cached_tokens == 3 * 47
