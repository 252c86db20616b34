"""Static batching: places for the longest request, and batches that end with their last answer."""

import pytest
from tests.sim.kit import limits

from octavo.sim.cost import LinearCost
from octavo.sim.requests import Job
from octavo.sim.static import StaticBatching

COST = LinearCost(step=1.0, token=0.0, read=0.0, block=0.0)


def static(jobs: list[Job], max_num_seqs: int = 16, **options: int) -> StaticBatching:
    return StaticBatching(limits(21), max_num_seqs, COST, jobs, **options)


def test_a_place_is_as_large_as_the_longest_request() -> None:
    assert static([]).places == 2  # 20 blocks of 16 tokens for 160 each
    assert static([], max_num_seqs=1).places == 1


def test_a_batch_ends_with_its_last_answer() -> None:
    run = static([Job(0.0, 10, 3), Job(0.0, 10, 5), Job(0.0, 10, 2)])
    record = run.run()
    assert list(record.firsts) == [1.0, 1.0, 6.0]
    assert list(record.latencies) == [5.0, 5.0, 7.0]
    assert list(record.per_token) == [1.0, 1.0, 1.0]
    assert sum(record.gap_counts) == record.output_tokens - 3
    assert (record.steps, record.busy, record.most_running) == (7, 7.0, 2)
    assert record.most_held == 320
    assert record.most_written == 26  # what is computed after an answer is not of one
    assert record.running / record.busy == pytest.approx((2 * 5 + 2) / 7)


def test_requests_that_come_late_or_are_too_long() -> None:
    record = static([Job(0.0, 10, 2), Job(0.5, 10, 1), Job(9.0, 10, 1), Job(9.0, 100, 61)]).run()
    assert list(record.latencies) == [2.0, 2.5, 1.0]
    assert record.refused == {"longer than max_model_len (160)": 1}
    assert record.ended_at == 10.0


def test_a_client_with_few_in_flight_sends_the_next_one_when_a_batch_ends() -> None:
    record = static([Job(0.0, 10, 2)] * 3, max_concurrency=2).run()
    assert list(record.latencies) == [2.0, 2.0, 2.0]
