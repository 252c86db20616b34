"""Plans in flight and drafts: neither changes an answer, and no block has two owners."""

import pytest
from tests.core.harness import Bench, alone, logprobs_of, make, prompt, same_as_alone, say

from octavo.core.plan import PlanRow, SampleSpec, num_gained, row_result
from octavo.core.request import Request
from octavo.params import SamplingParams


def test_blocks_are_published_when_their_plan_is_committed() -> None:
    bench = Bench(budget=64)
    bench.add(make("a", prompt(160), 3))
    for _ in range(3):
        bench.schedule()
    for tokens in (64, 128, 160):
        bench.commit()
        assert bench.kv.usage().cached_blocks == tokens // 16


def test_a_request_that_awaits_its_token_is_not_served_before_the_commit() -> None:
    bench = Bench(budget=64)
    bench.add(make("a", prompt(20), 3))
    assert [len(bench.schedule().rows) for _ in range(3)] == [1, 0, 0]
    bench.add(make("b", prompt(20, 1), 3))
    assert [row.request_id for row in bench.schedule().rows] == ["b"]
    for _ in range(3):
        bench.commit()
    assert [row.request_id for row in bench.schedule().rows] == ["a"]
    bench.run()
    same_as_alone(bench)


def test_equal_prompts_wait_for_the_blocks_that_a_plan_in_flight_computes() -> None:
    bench = Bench(budget=4096)
    bench.add(make("r0", prompt(1008), 2))
    bench.schedule()
    for number in range(1, 8):
        bench.add(make(f"r{number}", prompt(1008), 2))
    assert bench.schedule().rows == ()
    bench.run(depth=3)
    assert bench.runner.tokens == 1008 + 7 + 8
    same_as_alone(bench)


def test_blocks_of_an_aborted_request_stay_its_own_while_a_plan_in_flight_writes_them() -> None:
    bench = Bench(blocks=9, budget=64, caching=False)
    bench.add(make("a", prompt(120), 5))
    bench.schedule()
    bench.schedule()
    assert bench.scheduler.abort("a")
    assert bench.kv.pool.num_free == 0
    bench.add(make("a", prompt(100, 1), 5))  # the id is free again, the memory is not
    assert bench.schedule().rows == ()
    assert bench.commit() == []
    assert bench.kv.pool.num_free == 0  # the second plan still writes
    assert bench.commit() == []
    assert bench.kv.pool.num_free == 8
    bench.run()
    same_as_alone(bench)


@pytest.mark.parametrize("depth", [2, 3])
def test_memory_runs_out_while_the_victim_is_in_flight(depth: int) -> None:
    """The request that lacks a block waits for the commit, then the latest one is preempted."""
    bench = Bench(blocks=14, caching=False)
    bench.run([make(f"r{i}", prompt(20, i), 100) for i in range(6)], depth=depth)
    assert bench.scheduler.num_preemptions > 0
    assert bench.requests["r0"].num_preemptions == 0
    same_as_alone(bench)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("right", range(6))
def test_drafts_change_the_number_of_steps_and_nothing_else(right: int, caching: bool) -> None:
    """`right` of 5 drafts are accepted; memory runs out, so requests are preempted too."""
    bench = Bench(blocks=24, budget=128, caching=caching)
    kinds = ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}, {"logprobs": 0})
    requests = [make(f"r{i}", prompt(20, i), 120, **kinds[i % 4]) for i in range(6)]
    answers = {request.request_id: alone(request)[0] for request in requests}

    def propose(request: Request) -> list[int]:
        done = request.num_output_tokens
        return [*answers[request.request_id][done : done + right], *[-1] * (5 - right)]

    bench.proposer = propose
    bench.run(requests)
    same_as_alone(bench)
    assert bench.scheduler.num_preemptions > 0
    assert bench.runner.drafts > 200
    for name in answers:
        entries = bench.outcomes[name, 0].logprobs
        wanted = kinds[int(name[1:]) % 4].get("logprobs") is not None
        assert entries == [logprobs_of(t, 20 + i) if wanted else None
                           for i, t in enumerate(answers[name])]  # fmt: skip
    alone_bench = Bench(budget=128)
    alone_bench.proposer = propose
    alone_bench.run([make("r0", prompt(20), 120)])
    assert alone_bench.steps == 1 + -(-119 // (right + 1))
    assert alone_bench.runner.accepted == 119 - (alone_bench.steps - 1)


@pytest.mark.parametrize(
    ("script", "options", "tokens", "reason"),
    [
        ((5, 6, 2, 7, 8, 9, 9), {"ignore_eos": False}, [5, 6, 2], ("stop", None)),
        ((5, 6, 77, 7, 8, 9, 9), {"stop_token_ids": [77]}, [5, 6, 77], ("stop", 77)),
        ((5, 6, 7, 2, 8, 2, 9), {"ignore_eos": False, "min_tokens": 4}, [5, 6, 7, 9, 8, 2],
         ("stop", None)),
        ((5, 6, 7, 8, 9, 10, 11), {}, [5, 6, 7, 8], ("length", None)),
    ],
)  # fmt: skip
def test_an_answer_ends_inside_its_accepted_drafts(
    script: tuple[int, ...], options: dict[str, object], tokens: list[int], reason: tuple[str, int]
) -> None:
    bench = Bench(budget=64)
    bench.runner.next_token = draw_script = say(*script)

    def draw(history: tuple[int, ...], spec: SampleSpec) -> int:
        token = draw_script(history, spec)
        return 9 if spec.min_tokens_left > 0 and token in spec.stop_ids else token

    bench.runner.next_token = draw
    bench.proposer = lambda request: [
        *script[request.num_output_tokens : 3], *([9] if "min_tokens" in options else script[3:4]),
        *script[4:],
    ]  # fmt: skip
    count = 4 if not options else 32
    bench.run([make("r", prompt(12), count, logprobs=0, **options)])
    outcome = bench.outcomes["r", 0]
    assert outcome.token_ids == tokens
    assert len(outcome.logprobs) == len(tokens)
    assert (outcome.finish_reason, outcome.stop_reason) == reason
    assert bench.runner.accepted > 1
    assert bench.steps == 2
    assert bench.kv.usage().cached_blocks == (len(tokens) > 4)  # none with tokens after the end


def test_blocks_are_published_up_to_the_accepted_draft_and_the_rest_released() -> None:
    bench = Bench(budget=64)
    request = make("r", prompt(30), 60)
    answer = alone(request)[0]
    bench.add(request)
    bench.step()  # 30 tokens computed, in 2 blocks, the first of them full
    bench.proposer = lambda request: [*answer[1:4], *[-1] * 30]
    (row,) = bench.schedule().rows
    assert (row.num_drafts, len(row.token_ids), len(row.block_ids[0])) == (33, 34, 4)
    assert [spec.offset for spec in row.samples] == [*range(33, -1, -1)]
    (update,) = bench.commit()
    assert list(update.token_ids) == answer[1:5]
    assert (request.num_computed, len(request.tokens)) == (34, 35)
    assert len(request.table) == 3
    assert bench.kv.usage().cached_blocks == 2
    bench.run()
    same_as_alone(bench)


def test_drafts_get_only_what_nobody_else_wants() -> None:
    bench = Bench(budget=40, blocks=7)
    bench.add(make("r", prompt(30), 20))
    bench.step()
    bench.proposer = lambda request: [-1] * 100
    bench.add(make("s", prompt(39, 1), 5))
    rows = bench.schedule().rows
    assert [(row.request_id, row.num_drafts) for row in rows] == [("r", 0), ("s", 0)]
    bench.commit()
    rows = bench.schedule().rows
    assert [row.num_drafts for row in rows] == [0, 0]  # each may need the one free block
    bench.proposer = None
    bench.run()
    same_as_alone(bench)


def test_drafts_are_refused_where_they_cannot_be_right() -> None:
    bench = Bench(budget=64)
    request = make("r", prompt(20), 6)
    bench.add(request)
    propose = bench.scheduler.propose
    assert propose("r", 0, range(9))
    assert request.drafts == (0, 1, 2, 3, 4)  # the sixth token is drawn after them
    bench.schedule()
    assert not propose("r", 0, [1])  # its next token comes first
    assert not propose("r", 1, [1])
    assert not propose("s", 0, [1])
    bench.commit()
    assert request.drafts == ()


def test_draws_after_a_wrong_draft_do_not_count() -> None:
    params = SamplingParams()
    specs = tuple(SampleSpec(params, 0, 0, n, offset=2 - n) for n in range(3))
    row = PlanRow("r", (1, 5, 6), 10, (1,), specs)
    entries = [logprobs_of(token, 0) for token in range(3)]
    for drawn, count in (((4, 6, 7), 1), ((5, 4, 7), 2), ((5, 6, 7), 3), ((5, 6, -1), 3)):
        assert num_gained(row, drawn) == count
        result = row_result(row, drawn, entries)
        assert result.choices == (drawn[:count],)
        assert result.logprobs == (tuple(entries[:count]),)
    choices = tuple(SampleSpec(params, 0, index, 0) for index in range(3))
    row = PlanRow("r", (1, 5, 6), 0, (1,), choices)
    assert row_result(row, [4, 4, 5], [None] * 3).choices == ((4,), (4,), (5,))
