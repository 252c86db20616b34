"""Calibration over an executor that takes as long as it is told: probes, terms, and their order."""

from dataclasses import dataclass, field

import pytest

from octavo.config import EngineConfig
from octavo.core.plan import RowResult, RunnerLimits, StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.sim import calibration
from octavo.sim.calibrated import CalibratedCost, Terms
from octavo.sim.calibration import Probe, calibrate, probes
from octavo.sim.cost import StepShape

TERMS = Terms(
    step=0.010, alone=0.002, slopes=(0.0, 1e-4, 2e-4, 4e-4, 5e-4), head=0.003,
    head_slopes=(1e-5, 2e-4, 3e-4), read=1e-6, shared=2e-7, pair=3e-7, copy=1e-4,
)  # fmt: skip


def shape_of(plan: StepPlan) -> StepShape:
    """Of any plan, row by row."""
    single = [row for row in plan.rows if len(row.token_ids) == 1]
    longer = [row for row in plan.rows if len(row.token_ids) > 1]
    blocks = [block for row in single for block in row.block_ids[0][: row.start // 16]]
    return StepShape(
        rows=plan.num_tokens,
        samples=sum(len(row.samples) for row in plan.rows),
        kv_read=sum(row.start + 1 for row in single),
        prefill_tokens=sum(len(row.token_ids) for row in longer),
        prefill_pairs=sum(
            row.start + i for row in longer for i in range(1, len(row.token_ids) + 1)
        ),
        sequences=len(plan.rows),
        captured=not longer and all(row.samples for row in plan.rows),
        swapped_blocks=len(plan.copies),
        kv_shared=16 * (len(blocks) - len(set(blocks))),
    )


@dataclass
class Modelled:
    """Takes the time of TERMS on a clock of its own."""

    limits: RunnerLimits
    now: float = 0.0
    runs_ahead: bool = False
    shapes: list[StepShape] = field(default_factory=list)
    closed: bool = False

    def execute(self, plan: StepPlan) -> StepResult:
        size, held = self.limits.block_size, set[int]()
        for row in plan.rows:
            (table,) = row.block_ids
            assert len(table) == -(-(row.start + len(row.token_ids)) // size)
            assert set(table) <= set(range(1, self.limits.num_blocks))
            assert not held & set(table[row.start // size :]), "two rows write to one block"
            held |= set(table[row.start // size :])
        self.shapes.append(shape_of(plan))
        self.now += CalibratedCost(TERMS).seconds(self.shapes[-1])
        rows = tuple(RowResult(row.request_id, ((1,),) * len(row.samples)) for row in plan.rows)
        return StepResult(plan.step, rows)

    def submit(self, plan):
        raise NotImplementedError

    def explain(self):
        return {}

    def close(self):
        self.closed = True


def limits(num_blocks=4000, window=4096):
    return RunnerLimits(
        num_blocks, 16, 1024, window, 256, num_host_blocks=100, model="models/toy",
        dtype="bfloat16", kv_cache_dtype="bfloat16", device="cpu",
    )  # fmt: skip


@pytest.fixture
def modelled(monkeypatch):
    made = Modelled(limits())
    monkeypatch.setattr(calibration, "create_executor", lambda config: made)
    return made


def test_the_terms_of_a_machine_are_found(modelled):
    found = calibrate(EngineConfig(model="toy", max_num_seqs=64), clock=lambda: modelled.now)
    assert modelled.closed
    assert (found.model, found.dtype, found.device) == ("toy", "bfloat16", "cpu")
    assert found.error < 1e-6
    assert abs(found.unsteadiness) < 1e-6
    for name in (
        "step",
        "alone",
        "slopes",
        "head",
        "head_slopes",
        "read",
        "shared",
        "pair",
        "copy",
    ):
        assert getattr(found.terms, name) == pytest.approx(getattr(TERMS, name), rel=1e-4), name
    # Every shape is described as it was planned, and each is run several times.
    known = {p.shape for p in probes(64, 2048, 4096, 3999 * 16)}
    planned = {shape for shape in modelled.shapes if shape.rows}
    assert known == planned


def test_a_machine_that_stalls_now_and_then(modelled):
    """The typical step gives the terms, and their sum what steps take on average."""
    execute, count = modelled.execute, iter(range(10_000))

    def stalling(plan):
        began, result = modelled.now, execute(plan)
        modelled.now += 0.2 * (modelled.now - began) if next(count) % 4 == 3 else 0.0
        return result

    modelled.execute = stalling
    found = calibrate(EngineConfig(model="toy", max_num_seqs=64), clock=lambda: modelled.now)
    assert 0.005 < found.unsteadiness < 0.15
    assert found.terms.step == pytest.approx(TERMS.step * (1 + found.unsteadiness), rel=0.2)


def test_a_small_pool_has_fewer_probes(modelled):
    modelled.limits = limits(200, 2048)
    calibrate(EngineConfig(model="toy", max_num_seqs=8), clock=lambda: modelled.now)
    assert max(shape.sequences for shape in modelled.shapes) == 8
    modelled.limits = limits(3, 32)
    with pytest.raises(ConfigError, match="probes fit in 32 tokens of KV and max_num_seqs=1: too"):
        calibrate(EngineConfig(model="toy", max_num_seqs=1), clock=lambda: modelled.now)


def test_shapes_of_probes():
    assert Probe(3, 1, 99).shape == StepShape(3, 3, 300, 0, 0, 3, True, 0)
    assert Probe(1, 4, 10, draws=False).shape == StepShape(4, 0, 0, 4, 50, 1, False, 0)
    assert Probe(4, 1, 40, shared=32).shape == StepShape(4, 4, 164, 0, 0, 4, True, 0, 96)
