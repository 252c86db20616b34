"""The strict runner catches every plan that the real one would compute wrongly."""

import msgspec
import numpy as np
import pytest

from octavo.core.plan import BlockCopy, CacheSpec, PlanRow, RunnerLimits, SampleSpec, StepPlan
from octavo.engine.fake import FakeRunner, hashed
from octavo.errors import EngineError
from octavo.params import SamplingParams

SIZE = 4
DRAW = (SampleSpec(SamplingParams(temperature=0), 0, 0, 0),)


def runner(*groups):
    limits = RunnerLimits(9, SIZE, 1, 64, 256, kv_groups=groups or (CacheSpec(),))
    return FakeRunner(limits)


def row(name, tokens, start, *tables, samples=()):
    return PlanRow(name, tuple(tokens), start, tuple(map(tuple, tables)), samples)


def run(fake, *steps):
    """Each step: its rows, or its copies."""
    results = []
    for number, items in enumerate(steps, 1):
        rows = tuple(item for item in items if isinstance(item, PlanRow))
        copies = tuple(item for item in items if isinstance(item, BlockCopy))
        results.append(fake.execute(StepPlan(number, rows, copies)))
    return results


PROMPT = [11, 12, 13, 14, 15, 16]


def test_a_right_plan_gives_a_token_of_its_history():
    fake = runner()
    first, second = run(fake, [row("a", PROMPT[:5], 0, [1, 2])],
                        [row("a", PROMPT[5:], 5, [1, 2], samples=DRAW)])  # fmt: skip
    assert first.rows[0].choices == ()
    assert second.rows[0].choices == ((hashed(PROMPT, DRAW[0]),),)
    assert (fake.steps, fake.tokens) == (2, 6)


def test_a_mask_that_fails_is_an_error_of_its_row_alone():
    class Failing:
        def words(self):
            raise EngineError("the grammar failed")

    class Empty:
        def words(self):
            return np.zeros(8, np.int32)

    spec = (msgspec.structs.replace(DRAW[0], mask=Failing()),)
    none = (msgspec.structs.replace(DRAW[0], mask=Empty()),)
    (result,) = run(runner(), [row("a", PROMPT, 0, [1, 2], samples=spec),
                               row("b", PROMPT, 0, [3, 4], samples=DRAW),
                               row("c", PROMPT, 0, [5, 6], samples=none)])  # fmt: skip
    assert result.rows[0].error == "the grammar failed"
    assert result.rows[1].choices
    assert result.rows[2].error == "no token is left to draw"


def test_blocks_may_be_shared_copied_and_swapped():
    fake = runner()
    run(
        fake,
        [row("a", PROMPT, 0, [1, 2])],
        [BlockCopy("copy", 2, 3), row("b", [16], 5, [1, 3])],
        [BlockCopy("out", 3, 1), BlockCopy("in", 1, 5), row("b", [17], 6, [1, 5])],
    )
    assert fake.copies == {"copy": 1, "out": 1, "in": 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (row("a", [], 6, [1, 2]), "computes nothing"),
        (row("a", [17], 6, [1]), "has 1 blocks"),
        (row("a", [17], 6, [1, 2, 3]), "has 3 blocks"),
        (row("a", [17], 6, [1, 2], [1, 2]), "KV groups"),
        (row("a", [17], 6, [1, 0]), "never written|null block"),
        (row("a", [15, 16, 17], 4, [1, 0]), "writes to the null block"),
        (row("a", [17], 7, [1, 2]), "slot 2:2, which was never written"),
        (row("a", [17], 6, [1, 3]), "never written"),
        (row("a", [17], 6, [2, 2]), "never written|as 0"),
        (row("a", [17], 6, [4, 2]), "another history"),
        (row("a", [17], 4, [2, 1]), "reads 1|never written|as 3"),
        (BlockCopy("copy", 7, 8), "a block never written"),
        (BlockCopy("in", 1, 8), "a block never written"),
        (BlockCopy("copy", 1, 0), "null block"),
    ],
)
def test_a_wrong_plan_fails(wrong, says):
    fake = runner()
    run(fake, [row("a", PROMPT, 0, [1, 2]), row("b", [90, 91, 92, 93], 0, [4])])
    with pytest.raises(AssertionError, match=says):
        run(fake, [wrong])


def test_rows_of_one_step_do_not_meet():
    with pytest.raises(AssertionError, match="two rows write slot 1:0"):
        run(runner(), [row("a", [1], 0, [1]), row("b", [2], 0, [1])])
    with pytest.raises(AssertionError, match="reads what this step writes"):
        run(runner(), [row("a", PROMPT[:4], 0, [1]), row("b", [15], 4, [1, 2])])


def test_a_block_that_was_given_to_another_is_noticed():
    fake = runner()
    run(fake, [row("a", PROMPT, 0, [1, 2])], [row("b", [90], 0, [1])])
    with pytest.raises(AssertionError, match="another history"):
        run(fake, [], [], [row("a", [17], 6, [1, 2])])


def test_a_window_needs_no_block_behind_it_and_every_block_within():
    groups = CacheSpec(), CacheSpec("window", 3)
    fake = runner(*groups)
    run(fake, [row("a", PROMPT, 0, [1, 2], [3, 4])], [row("a", [17], 6, [1, 2], [0, 4])])
    with pytest.raises(AssertionError, match="never written"):
        run(fake, [], [], [row("a", [18], 7, [1, 2], [0, 5])])
    fake, eight = runner(*groups), [*PROMPT, 17, 18]
    run(fake, [row("a", eight, 0, [1, 2], [3, 4])])
    with pytest.raises(AssertionError, match="reads group 0 in group 1"):
        run(fake, [], [row("a", [19], 8, [1, 2, 5], [0, 2, 6])])
