"""Operations over shared memory: bits, sizes, waits, and what becomes of a group that is aborted.

The ranks are threads of this process, which the kernels cannot tell from processes.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from octavo.errors import PeerLostError
from octavo.kernels.capture import CaptureError
from octavo.kernels.cpu import abi, all_reduce_call, graph, openmp
from octavo.kernels.cpu.all_reduce_call import Exchange, lay_out, region_bytes

HALF, FLOAT = torch.bfloat16, torch.float32


def make(ranks, crowded=True):
    region = np.zeros(region_bytes(ranks) // 8, np.int64)
    lay_out(region, ranks, crowded)
    return [Exchange(region, rank) for rank in range(ranks)]


def on_ranks(work, exchanges):
    """work(exchange) of each rank, at once; an error of one ends the waits of all."""

    def run(exchange):
        try:
            return work(exchange)
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(run, exchanges))


def part(rank, shape, dtype):
    """Of sizes so different that the order of sums shows in the result."""
    made = torch.Generator().manual_seed(rank)
    return (
        torch.randn(shape, generator=made) * 10.0 ** torch.randint(-2, 3, shape, generator=made)
    ).to(dtype)


def expected(ranks, shape, dtype):
    """Plain torch: float32, rank after rank, rounded once."""
    total = part(0, shape, dtype).float()
    for rank in range(1, ranks):
        total = total + part(rank, shape, dtype).float()
    return total.to(dtype)


SHAPES = [(1, 1), (3, 7), (1, 576), (17, 33), (64, 576), (2, 20011), (70, 4099)]


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(("ranks", "crowded"), [(2, False), (2, True), (3, False), (4, True)])
def test_sums_are_those_of_plain_torch_to_the_bit(ranks, crowded, dtype):
    """Of one piece and of many, of each as a whole and in slices, on one lane and on all."""

    def work(exchange):
        return [exchange.all_reduce(part(exchange.rank, shape, dtype)) for shape in SHAPES * 2]

    for sums in on_ranks(work, make(ranks, crowded)):
        for found, shape in zip(sums, SHAPES * 2, strict=True):
            assert torch.equal(found, expected(ranks, shape, dtype)), shape


def test_the_order_of_ranks_shows():
    """What the test above compares is not the same in another order."""
    shape, dtype = (64, 576), FLOAT
    parts = [part(rank, shape, dtype) for rank in range(3)]
    assert not torch.equal(expected(3, shape, dtype), parts[2] + parts[1] + parts[0])


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(dtype):
    def work(exchange):
        whole = part(exchange.rank, (90, 1030), dtype)
        alone = [exchange.all_reduce(whole[n : n + 1].clone())[0] for n in (0, 44, 89)]
        few = exchange.all_reduce(whole[40:50].clone())[4]
        rows = exchange.all_reduce(whole)
        return torch.equal(torch.stack(alone), rows[[0, 44, 89]]) and torch.equal(few, rows[44])

    assert on_ranks(work, make(3, crowded=False)) == [True] * 3


def test_every_bfloat16_and_what_is_no_number():
    """Ties go to even, infinities and NaN stay, and x + 0 is x."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(HALF)
    normal = bits[(bits.abs() >= torch.finfo(HALF).tiny) | (bits == 0) | bits.isnan()]

    def work(exchange):
        other = torch.roll(normal, 12345) if exchange.rank else torch.zeros_like(normal)
        both = torch.roll(normal, 777) if exchange.rank else normal.clone()
        return exchange.all_reduce(other), exchange.all_reduce(both)

    for same, sums in on_ranks(work, make(2)):
        assert torch.equal(same.nan_to_num(7), torch.roll(normal, 12345).nan_to_num(7))
        wanted = (normal.float() + torch.roll(normal, 777).float()).to(HALF)
        large = wanted.abs() >= torch.finfo(HALF).tiny  # the processor may make the others 0
        assert torch.equal(sums.isnan(), wanted.isnan())
        assert torch.equal(sums[large], wanted[large])


@pytest.mark.parametrize("dtype", [torch.int64, HALF, torch.uint8])
def test_rows_are_gathered_side_by_side(dtype):
    shapes = [(1, 1), (3, 7), (64, 576), (5, 30011)]

    def x(rank, shape):
        return (torch.arange(shape[0] * shape[1]).reshape(shape) * 7 + rank).to(dtype)

    def work(exchange):
        return [exchange.gather(x(exchange.rank, shape)) for shape in shapes]

    for found in on_ranks(work, make(3)):
        for got, shape in zip(found, shapes, strict=True):
            assert torch.equal(got, torch.cat([x(rank, shape) for rank in range(3)], 1))


def test_nothing_to_sum():
    empty = torch.empty(0, 5)
    assert make(2)[0].all_reduce(empty) is empty
    assert make(2)[0].gather(empty).shape == (0, 10)


def test_ranks_of_different_numbers_of_threads(monkeypatch):
    """Lanes are cut by the data alone."""
    counts = threading.local()
    monkeypatch.setattr(openmp, "threads", lambda: counts.here)
    shape = (200, 1000)

    def work(exchange):
        counts.here = 1 + exchange.rank
        return [exchange.all_reduce(part(exchange.rank, shape, FLOAT)) for _ in range(5)]

    for sums in on_ranks(work, make(2)):
        assert all(torch.equal(found, expected(2, shape, FLOAT)) for found in sums)


def test_operations_are_counted_alike_on_all_ranks():
    def work(exchange):
        counts = []
        for shape in SHAPES:
            exchange.all_reduce(part(exchange.rank, shape, HALF))
            counts.append(exchange.begun)
        return counts

    first, second = on_ranks(work, make(2))
    assert first == second
    assert first == sorted(set(first))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_replay_sums_what_is_there_now(threads, monkeypatch):
    """For any number of rows; the marks go on where eager operations have left them."""
    monkeypatch.setattr(openmp, "threads", lambda: threads)

    def work(exchange):
        given = torch.zeros(100, 576, dtype=HALF)
        run = graph.capture(lambda: exchange.all_reduce(given))
        found = []
        for rows in (1, 64, 100, 3, 100):
            given[:rows] = part(exchange.rank, (100, 576), HALF)[:rows]
            found.append(run.replay(rows).clone())
            found.append(exchange.all_reduce(part(exchange.rank, (rows, 9), HALF)))
        return found

    for found in on_ranks(work, make(2)):
        for rows, sums, eager in zip((1, 64, 100, 3, 100), found[::2], found[1::2], strict=True):
            assert torch.equal(sums, expected(2, (100, 576), HALF)[:rows])
            assert torch.equal(eager, expected(2, (rows, 9), HALF))


def test_a_sum_of_other_rows_than_the_step_s_is_not_captured():
    def work(exchange):
        given = torch.zeros(10, 16)

        def run():
            exchange.all_reduce(given)
            return exchange.all_reduce(given[:4])

        with pytest.raises(CaptureError, match="different numbers of rows"):
            graph.capture(run)

    on_ranks(work, make(2))


@pytest.mark.parametrize("crowded", [False, True])
def test_a_wait_ends_when_the_group_is_aborted(crowded):
    first, second = make(2, crowded)
    waits = threading.Thread(target=lambda: errors.append(raised(first.all_reduce, torch.ones(5))))
    errors = []
    waits.start()
    while not first.begun:
        pass
    assert waits.is_alive()
    second.abort()
    waits.join(60)
    assert "the group was aborted" in errors[0]
    # No later operation begins, on any rank.
    begun = first.begun, second.begun
    assert "rank 1 of 2" in raised(second.all_reduce, torch.ones(5))
    assert "rank 0 of 2" in raised(first.gather, torch.ones(1, 5))
    assert (first.begun, second.begun) == begun


def raised(call, x):
    with pytest.raises(PeerLostError) as caught:
        call(x)
    return str(caught.value)


def test_a_replay_of_an_aborted_group_raises():
    exchanges = make(2)
    given = [torch.ones(4, 16), torch.ones(4, 16)]
    runs = on_ranks(lambda one: graph.capture(lambda: one.all_reduce(given[one.rank])), exchanges)
    exchanges[1].abort()
    with pytest.raises(PeerLostError, match="rank 0 of 2"):
        runs[0].replay(2)


def test_an_operation_that_was_complete_is_valid():
    """Though the group was aborted since, as by a rank that leaves after the last one."""

    def work(exchange):
        found = exchange.all_reduce(torch.ones(3, 3))
        exchange.abort()
        exchange.check()
        return found

    assert all(torch.equal(found, torch.full((3, 3), 2.0)) for found in on_ranks(work, make(2)))


def test_a_rank_s_words_lie_apart_and_its_slots_on_lines_of_their_own():
    assert abi.RANK_LOST + abi.MARK_BYTES <= abi.RANK_SLOTS
    assert abi.SHARED_REGION.nbytes <= abi.RANK_AREAS
    assert all_reduce_call.SLOT_BYTES % 64 == 0
    assert region_bytes(2) % 4096 == 0
