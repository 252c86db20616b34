"""Runners of several ranks, as threads of this process: what they agree on, and who draws."""

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import ThreadGroup, on_ranks

from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, SampleSpec, StepPlan
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.runner import steps
from octavo.runner.model_runner import ModelRunner
from octavo.runner.ranks import Ranks, all_agree, of_first

GREEDY = SampleSpec(SamplingParams(temperature=0, logprobs=1), 0, 0, 0)


def config(folder: Path, **changes: Any) -> EngineConfig:
    options = {"dtype": "float32", "num_gpu_blocks_override": 20, "max_model_len": 100}
    return EngineConfig(str(folder), device="cpu", load_progress=False, **{**options, **changes})


def runner(group: ThreadGroup, given: EngineConfig) -> ModelRunner:
    group.kind, group.operations = "threads", 0  # type: ignore[attr-defined]
    return ModelRunner(given, Ranks(group.rank, group.size, group.size, "e", lambda d: group))


def test_what_the_ranks_of_an_engine_agree_on() -> None:
    def call(group: ThreadGroup) -> tuple[bool, bool, int]:
        return (
            all_agree(group, True),
            all_agree(group, group.rank != 2),
            of_first(group, 7 - group.rank),
        )

    assert on_ranks(3, call) == [(True, False, 7)] * 3


def test_the_rank_with_least_room_decides_for_all(tiny_folder: Path) -> None:
    def call(group: ThreadGroup) -> tuple[int, int, int]:
        blocks = 20 if group.rank == 0 else 15
        swap = 0.001 if group.rank == 0 else 0.0001
        made = runner(group, config(tiny_folder, num_gpu_blocks_override=blocks, swap_space=swap))
        limits = made.limits
        assert len(made.cache.layers[0]) == limits.num_blocks
        assert made.explain()["tensor parallel"] == "2 ranks over threads"
        return limits.num_blocks - 1, limits.num_host_blocks, limits.block_bytes

    first, second = on_ranks(2, call)
    assert first == second
    assert first[0] == 15
    assert 0 < first[1] == int(0.0001 * 2**30) // 2 // first[2]


def test_rank_0_draws_and_the_others_compute_their_part(tiny_folder: Path) -> None:
    """Also of the logits of a prompt, in the same order."""
    asks = {"num_prompt_logprobs": 1, "prompt_targets": (2, 3)}
    rows = (
        PlanRow("a", (1, 2, 3), 0, ((1,),), (GREEDY,), **asks),
        PlanRow("b", (4, 5), 0, ((2,),)),
        PlanRow("c", (6,), 0, ((3,),), (GREEDY, GREEDY)),
    )  # fmt: skip
    alone = ModelRunner(config(tiny_folder)).execute(StepPlan(1, rows)).rows

    def call(group: ThreadGroup) -> Any:
        made = runner(group, config(tiny_folder))
        return made.execute(StepPlan(1, rows)).rows

    first, second = on_ranks(2, call)
    assert [row.choices for row in first] == [row.choices for row in alone]
    assert [len(row.prompt_logprobs) for row in first] == [2, 0, 0]
    assert [(row.request_id, row.choices, row.prompt_logprobs) for row in second] == [
        ("a", (), ()), ("b", (), ()), ("c", (), ()),
    ]  # fmt: skip


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_ranks_that_would_compute_otherwise_are_refused(
    tiny_folder: Path, changes: dict[str, Any]
) -> None:
    def call(group: ThreadGroup) -> None:
        with pytest.raises(ConfigError, match=r"the ranks differ: rank \d has octavo"):
            runner(group, config(tiny_folder, **(changes if group.rank else {})))

    on_ranks(2, call)


@pytest.mark.parametrize("part", ["_capture", "_replays"])
def test_steps_are_captured_on_all_ranks_or_on_none(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Here rank 0 could, and rank 1 cannot."""
    here = threading.local()

    def capture(*arguments: object) -> object:
        if part == "_capture" and here.rank == 1:
            raise steps.CaptureError("no such kernel")
        return object()

    def replays(*arguments: object) -> bool:
        return part == "_capture" or here.rank == 0

    monkeypatch.setattr(steps, "_capture", capture)
    monkeypatch.setattr(steps, "_replays", replays)

    def call(group: ThreadGroup) -> bool:
        here.rank = group.rank
        return runner(group, config(tiny_folder)).captured is None

    assert on_ranks(2, call) == [True, True]
