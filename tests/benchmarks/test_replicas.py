"""Engines against one: every token is timed, and the ratio is that of medians."""

import asyncio
from types import SimpleNamespace

from benchmarks.replicas import Result, _row, _run
from benchmarks.workloads import Job


class Engine:
    """Two tokens an output; the last of three has one."""

    async def generate(self, prompt, params):
        left = params.max_tokens
        while left:
            await asyncio.sleep(0)
            count, left = min(2, left), left - min(2, left)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * count)])


def test_every_token_of_every_request_is_timed():
    result = asyncio.run(_run(Engine(), [Job([5], 3), Job([6], 5)]))
    assert (result.tokens, len(result.ttft), len(result.itl)) == (8, 2, 2 + 4)
    assert min(result.itl) == 0.0  # two in one output came together


def test_a_row_has_medians_and_the_ratio_of_speeds():
    walls = ((4.0, 2.0, 3.0), (2.0, 1.0, 9.0))
    runs = [[Result(wall, 100, [wall / 10], [0.01, 0.5]) for wall in each] for each in walls]
    values = _row("W1", 2, 2, runs)
    assert values["ratio"] == 1.5
    assert values["one"]["wall_s"] == 3.0
    assert values["one"]["tokens_per_s"] == 33.3
    assert values["several"]["ttft_p50_s"] == 0.2
    assert values["several"]["itl_p99_s"] == 0.5
    assert values["several"]["all_s"] == [2.0, 1.0, 9.0]
