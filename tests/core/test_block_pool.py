"""Blocks: none given out twice, none lost, every operation as cheap as in a small pool."""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.core.harness import Bench, make

from octavo.core.block_pool import BlockPool
from octavo.errors import EngineError, NotEnoughMemoryError


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_block_0_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(EngineError, match="no free block"):
        pool.allocate()


def test_a_pool_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(NotEnoughMemoryError, match="not 1"):
        BlockPool(1)


def test_the_content_used_longest_ago_is_overwritten_first_and_empty_blocks_before_it() -> None:
    pool = BlockPool(6)
    blocks = [pool.allocate() for _ in range(5)]
    for number, block in enumerate(blocks[:4]):
        pool.publish(block, name(number))
    for block in (*blocks[:4], blocks[4]):
        pool.release(block)
    assert pool.num_free == 5
    assert pool.allocate() == blocks[4]  # it holds nothing
    found = pool.find(name(0))
    assert found == blocks[0]
    pool.share(found)  # out of the middle of the list
    assert [pool.allocate() for _ in range(3)] == blocks[1:4]
    assert pool.num_evictions == 3
    assert pool.find(name(1)) is None
    assert pool.find(name(0)) == blocks[0]
    pool.check()


def test_two_blocks_of_one_content_have_one_name() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, name(1))
    pool.publish(second, name(1))
    assert pool.find(name(1)) == first
    assert not pool.writable(first)
    assert pool.writable(second)
    pool.check()


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(EngineError, match="once too often"):
        pool.release(block)


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_against_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([2, 3, 8, 40]))
    held: list[int] = []  # one entry for each reference
    named: dict[bytes, int] = {}
    for step in range(600):
        match rng.randrange(5):
            case 0 if pool.num_free:
                block = pool.allocate()
                assert block not in held
                named = {n: b for n, b in named.items() if b != block}
                held.append(block)
            case 1 if held:
                pool.release(held.pop(rng.randrange(len(held))))
            case 2 if held:
                block = rng.choice(held)
                if name(step) not in named and block not in named.values():
                    named[name(step)] = block
                pool.publish(block, name(step))
            case 3 if named:
                wanted, block = rng.choice(list(named.items()))
                assert pool.find(wanted) == block
                pool.share(block)
                held.append(block)
            case 4 if rng.random() < 0.02:
                pool.forget()
                named.clear()
        pool.check()
        assert pool.num_used == len(set(held))
        assert pool.num_cached == len(named)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.refs.__setitem__(1, 5),
        lambda pool: pool._next.__setitem__(0, 3),
        lambda pool: pool._prev.__setitem__(3, 5),
        lambda pool: pool.hashes.__setitem__(2, b"x"),
        lambda pool: setattr(pool, "num_free", 2),
        lambda pool: setattr(pool, "num_shared", 2),
        lambda pool: setattr(pool, "peak_used", 0),
    ],
)
def test_check_sees_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(8)
    block = pool.allocate()
    pool.publish(block, b"y")
    pool.check()
    damage(pool)
    with pytest.raises(EngineError):
        pool.check()


class Counted(list[Any]):
    """A list that refuses what takes time in its length."""

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("an operation in the length of the pool")

    __contains__ = __iter__ = index = insert = remove = count = copy = sort = _refuse


def operations(num_blocks: int) -> int:
    """Lines of `octavo.core` run by a fixed piece of work over a pool of `num_blocks`."""
    bench = Bench(blocks=num_blocks, budget=64, check=False, num_host_blocks=num_blocks)
    for pool in (bench.kv.pool, bench.kv.host):
        assert pool
        for part in ("refs", "hashes", "_next", "_prev"):
            setattr(pool, part, Counted(getattr(pool, part)))
    # As in a server that has run for long: no block is without a cached content.
    while bench.kv.pool.num_cached < bench.kv.pool.num_blocks - 1:
        taken = [bench.kv.pool.allocate() for _ in range(bench.kv.pool.num_free)]
        for block in taken:
            bench.kv.pool.publish(block, name(block))
        for block in taken:
            bench.kv.pool.release(block)
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "octavo/core" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(20):
            shared = [1] * (number % 3 * 20)
            bench.add(
                make(f"r{number}", [*shared, *range(number, number + 50)], 20, n=1 + number % 2)
            )
            bench.step()
        queues = bench.scheduler.queues
        victim = next(iter(queues.running))
        queues.preempt(victim, bench.now, victim)
        while bench.scheduler.has_work():
            bench.step()
    finally:
        sys.settrace(before)
    assert bench.kv.usage().evictions > 0
    return lines


def test_every_operation_costs_the_same_in_a_small_and_in_a_large_pool() -> None:
    assert operations(1_000) == operations(100_000) > 10_000


def test_forgotten_blocks_are_the_next_to_be_given_out() -> None:
    """They were written before; blocks never used may have no memory behind them yet."""
    pool = BlockPool(20)
    used = [pool.allocate() for _ in range(6)]
    for block in used:
        pool.publish(block, bytes([block]))
    for block in used[:5]:
        pool.release(block)
    pool.forget()
    pool.check()
    assert {pool.allocate() for _ in range(5)} == set(used[:5])
    assert pool.peak_used == 6
    assert pool.allocate() not in used
