"""A plan that is written and read is the same plan, whatever came before it."""

from dataclasses import replace

import msgspec
import numpy as np

from octavo.config import EngineConfig
from octavo.core.plan import BlockCopy, PlanRow, SampleSpec, StepPlan
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.worker_plans import PlanReader, PlanWriter
from octavo.errors import EngineError
from octavo.params import SamplingParams

PENALTY = SamplingParams(repetition_penalty=1.2, max_tokens=30, ignore_eos=True, temperature=0)


def plain(plan: StepPlan) -> object:
    """What the reader is to know; when it was planned is of no use to it."""
    return msgspec.structs.replace(plan, planned_at=0.0)


def test_plans_of_a_busy_engine_are_the_same_when_read() -> None:
    """Chunks, preemption, swapping, choices, penalties, prompt log-probabilities."""
    writer, reader, plans = PlanWriter(with_draws=True), PlanReader(), []

    def check(plan: StepPlan) -> None:
        assert plain(reader.read(writer.write(plan))) == plain(plan)
        plans.append(plan)

    runner = FakeRunner(before_step=check)
    runner.limits = replace(runner.limits, num_blocks=24, max_model_len=200)
    config = EngineConfig(max_num_batched_tokens=48, preemption_mode="swap")
    engine = Engine(config, runner, create_policy("fifo"))
    kinds = [
        PENALTY, SamplingParams(n=3, temperature=1, seed=4, max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=20, prompt_logprobs=1, ignore_eos=True, min_tokens=5,
                       stop_token_ids=[7], bad_words=["x"]),
    ]  # fmt: skip
    for i in range(9):
        prompt = tuple(range(i, i + 40 + i))
        engine.add_request(Submission(f"r{i}", prompt, kinds[i % 3]))
    while engine.has_work():
        engine.step()
    assert any(copy.kind == "in" for plan in plans for copy in plan.copies)
    assert any(row.num_prompt_logprobs is not None for plan in plans for row in plan.rows)


def test_a_table_that_stays_is_the_same_object() -> None:
    """The runner fills it in again where it is another."""
    writer, reader = PlanWriter(with_draws=True), PlanReader()
    spec = SampleSpec(PENALTY, 2**64 - 1, 0, 0)
    table = ((1, 2, 3), (4, 5, 0))
    row = PlanRow("r", (5,), 40, table, (spec,))
    first = reader.read(writer.write(StepPlan(1, (row,))))
    second = reader.read(writer.write(StepPlan(2, (row,), (BlockCopy("copy", 1, 2),))))
    assert second.rows[0].block_ids is first.rows[0].block_ids
    grown = msgspec.structs.replace(row, block_ids=((1, 2, 3, 9), (0, 5, 0)))
    assert reader.read(writer.write(StepPlan(3, (grown,)))).rows == (grown,)


def test_a_long_request_costs_little_after_its_first_step() -> None:
    writer = PlanWriter(with_draws=True)
    spec = SampleSpec(PENALTY, 1, 0, 0, prompt_ids=tuple(range(5000)))
    row = PlanRow("r", (5,), 5000, (tuple(range(400)),), (spec,))
    assert len(writer.write(StepPlan(1, (row,)))) > 5000
    later = msgspec.structs.replace(spec, position=1, output_ids=(8,))
    after = msgspec.structs.replace(row, samples=(later,))
    assert len(writer.write(StepPlan(2, (after,)))) < 100


def test_ranks_that_do_not_draw_know_how_many_tokens_are_drawn() -> None:
    writer, reader = PlanWriter(with_draws=False), PlanReader()
    specs = tuple(SampleSpec(PENALTY, 1, 0, i, offset=2 - i) for i in range(3))
    row = PlanRow("r", (5, 6, 7), 40, ((1, 2, 3),), specs)
    for step in range(2):
        (got,) = reader.read(writer.write(StepPlan(step, (row,)))).rows
        assert [spec.offset for spec in got.samples] == [2, 1, 0]
        assert msgspec.structs.replace(got, samples=specs) == row


class Mask:
    def __init__(self, words: list[int] | None) -> None:
        self._words = words

    def words(self) -> np.ndarray:
        if self._words is None:
            raise EngineError("the grammar failed")
        return np.array(self._words, np.int32)


def test_masks_reach_the_ranks_that_draw() -> None:
    spec = SampleSpec(SamplingParams(), 1, 0, 0, mask=Mask([5, -1]))
    row = PlanRow("r", (5,), 0, ((1,),), (spec, msgspec.structs.replace(spec, mask=Mask(None))))
    for with_draws in (True, False):
        writer, reader = PlanWriter(with_draws=with_draws), PlanReader()
        first, failed = reader.read(writer.write(StepPlan(1, (row,)))).rows[0].samples
        if not with_draws:
            assert first.mask is None
            continue
        assert first.mask is not None
        assert first.mask.words().tolist() == [5, -1]
        assert failed.mask is not None
        assert failed.mask.words().size == 0


def test_every_field_of_a_plan_reaches_the_ranks_that_draw() -> None:
    """A field that a plan gains has to be added here, and to what is sent."""
    spec = SampleSpec(PENALTY, 5, 2, 3, (1, 2), (3, 4), 6, (7,), ((8, 9),), 1, Mask([-1, 5]))
    row = PlanRow("r", (5, 6), 40, ((1, 2, 3),), (spec, spec), 2, (6, 7), 4)
    plan = StepPlan(1, (row,), (BlockCopy("out", 1, 2),), 9.0)
    for value in (spec, row, plan):
        for field in msgspec.structs.fields(value):
            assert getattr(value, field.name) != field.default, f"{field.name} is not tried"
    (got,) = PlanReader().read(PlanWriter(with_draws=True).write(plan)).rows
    assert [sample.mask.words().tolist() for sample in got.samples] == [[-1, 5], [-1, 5]]
    samples = tuple(msgspec.structs.replace(one, mask=spec.mask) for one in got.samples)
    assert msgspec.structs.replace(got, samples=samples) == row
