"""The map of blocks says what tables, references and names say, after any history."""

import random
import sys
from typing import Any

import numpy as np
import pytest
from tests.core.harness import Bench, disturb, make, prompt
from tests.core.test_kv_manager_groups import LAYOUTS

from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager
from octavo.core.plan import FULL
from octavo.core.request import Request
from octavo.engine import watch_blocks
from octavo.engine.watch import (
    CACHED,
    FREE,
    HOST,
    NO_GROUP,
    SEVERAL,
    SHARED,
    BlockMap,
)
from octavo.engine.watch_blocks import device_map, host_map, tables_of

Block = tuple[int, int, int, int]  # owner, fill, flags, group


def read(found: BlockMap, groups: int) -> list[Block]:
    group = found.group if groups > 1 else bytes(found.shown)
    owner = np.frombuffer(found.owner, "<u2").tolist()
    assert {len(owner), len(found.fill), len(found.flags), len(group)} == {found.shown}
    return list(zip(owner, found.fill, found.flags, group, strict=True))


def expected(
    kv: KVManager, pool: BlockPool, numbers: dict[Request, int], on_host: bool
) -> list[Block]:
    """Block by block, from what the pool's own check compares too."""
    held: dict[int, list[tuple[int, int, int]]] = {}
    for request, number in numbers.items():
        groups = request.table.groups
        if on_host:
            groups = [request.host_blocks[group :: kv.num_groups] for group in range(kv.num_groups)]
        for group, blocks in enumerate(groups):
            for index, block in enumerate(blocks):
                if block:
                    tokens = max(request.num_computed - index * kv.block_size, 0)
                    held.setdefault(block, []).append((number, tokens, group))
    found: list[Block] = []
    for block in range(pool.num_blocks):
        holders = held.get(block, [])
        assert len(holders) == pool.refs[block]
        cached = pool.hashes[block] is not None
        flags = SHARED * (len(holders) > 1) | CACHED * cached | HOST * on_host
        most = min(max([tokens for _, tokens, _ in holders], default=0), kv.block_size)
        fill = max(1, 255 * most // kv.block_size) if most else 0
        owner = holders[0][0] if len(holders) == 1 else SEVERAL if holders or cached else FREE
        group = holders[0][2] if holders else NO_GROUP if kv.num_groups > 1 else 0
        found.append((owner, fill if holders or not cached else 255, flags, group))
    return found


def check(bench: Bench) -> int:
    """Compare, and count what is worth comparing."""
    kv, seen = bench.kv, 0
    bench.scheduler.check()
    for pool, holders, made in (
        (kv.pool, kv.holders, device_map),
        (kv.host, kv.on_host, host_map),
    ):
        numbers = {request: number for number, request in enumerate(holders, 1)}
        found = made(kv, numbers.__getitem__)
        assert (found is None) == (pool is None)
        if pool is None or found is None:
            continue
        blocks = read(found, kv.num_groups)
        assert blocks == expected(kv, pool, numbers, pool is kv.host)
        seen |= 1 << 8 if pool is kv.host and pool.num_used else 0
        for _, _, flags, _ in blocks:
            seen |= flags
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_map_is_what_tables_and_pool_say(layout: str, mode: Any) -> None:
    groups, rng = LAYOUTS[layout], random.Random(f"{layout}{mode}")
    bench = Bench(
        blocks=len(groups) * 12 + 1, block_size=8, budget=48, seqs=12, mode=mode, groups=groups,
        num_host_blocks=len(groups) * 20 if mode == "swap" else 0, window=100, check=False,
    )  # fmt: skip
    seen = 0
    for number in range(40):
        for _ in range(rng.randrange(5)):
            bench.step(rng.choice([1, 2]))
            seen |= check(bench)
        shared = prompt(60, rng.randrange(2))[: rng.randrange(40)]
        tokens = [*shared, *prompt(rng.randrange(1, 40), number)]
        count = rng.choice([3, 30, 40])
        bench.add(make(f"r{number}", tokens, count, arrival=bench.now, n=rng.choice([1, 1, 3])))
        disturb(bench, rng, number)
    bench.drain()
    seen |= check(bench)
    assert seen & SHARED
    assert seen & CACHED
    # Five windowed groups hold so little that nothing has to go.
    assert mode == "recompute" or layout == "five to one" or seen >> 8, "nothing was swapped out"


def test_a_table_lists_blocks_in_order_wherever_they_are() -> None:
    bench = Bench(blocks=41, block_size=4, mode="swap", num_host_blocks=21, groups=(FULL, FULL))
    request = make("r", prompt(10), 20)
    bench.add(request)
    bench.step()
    (table,) = tables_of([request], 2)
    assert (table.choice, table.on_host, table.computed) == (0, False, 10)
    assert [np.frombuffer(b, "<u4").tolist() for b in table.groups] == request.table.groups
    bench.drain()
    bench.scheduler.queues.preempt(request, bench.now, request)
    (table,) = tables_of([request], 2)
    assert table.on_host
    there = [np.frombuffer(blocks, "<u4").tolist() for blocks in table.groups]
    assert [block for row in zip(*there, strict=True) for block in row] == request.host_blocks
    waiting = make("w", prompt(5), 1)
    assert tables_of([waiting], 2)[0].groups == (b"", b"")


def test_of_a_pool_that_is_too_large_the_first_blocks_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_blocks, "MOST_BLOCKS", 7)
    bench = Bench(blocks=41, block_size=4)
    bench.add(make("r", prompt(60), 1))
    bench.schedule()
    found = device_map(bench.kv, lambda request: 5)
    assert (found.blocks, found.shown, len(found.owner)) == (41, 7, 14)
    bench.drain()


def test_a_large_pool_takes_no_loop_over_its_blocks() -> None:
    """Lines of Python per map: of requests, not of blocks."""

    def lines(num_blocks: int) -> int:
        bench = Bench(blocks=num_blocks, block_size=4, check=False, quick=True, budget=8192)
        for number in range(4):
            bench.add(make(f"r{number}", prompt(num_blocks // 2, number), 20))
        for _ in range(6):
            bench.step()
        assert bench.kv.pool.num_used > num_blocks // 4
        count = 0

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal count
            if "octavo" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            device_map(bench.kv, lambda request: 1)
        finally:
            sys.settrace(before)
        return count

    assert lines(300) == lines(6000)
