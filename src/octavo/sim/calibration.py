"""Measures what steps take on this machine: a few seconds of the real runner, and of the host.

The shapes say which term is which (`sim.calibrated`): rows with and without logits, few and many,
over short and long contexts, shared or not. They are run in turn, several times, so that what
else the machine does hits all of them alike. No workload is among them.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.config import EngineConfig
from octavo.core.plan import (
    BlockCopy,
    PlanRow,
    RowResult,
    RunnerLimits,
    SampleSpec,
    StepPlan,
    StepResult,
)
from octavo.core.policy import FIFOScheduler
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor, create_executor
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.sim.calibrated import Calibration, Measured, fit
from octavo.sim.cost import StepShape

Clock = Callable[[], float]

_GREEDY = SamplingParams(temperature=0.0)
_DRAW = (SampleSpec(_GREEDY, seed=0, index=0, position=0),)
_ROUNDS, _SECONDS = 4, 6.0  # no round is begun after that time, but for the first two
_LONG = 256  # tokens of a probe that takes as long as many others
_LONGEST = 2048  # context of a probe
_COPIES = 32  # blocks
_HOST_STEPS, _HOST_ROWS = 48, 32


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to run: `count` sequences, each with `tokens` tokens after `context` others, of which
    `shared` are in the same blocks. draws: whether each draws a token after its last one."""

    count: int
    tokens: int
    context: int
    draws: bool = True
    shared: int = 0

    @property
    def held(self) -> int:
        """Tokens of a sequence after it."""
        return self.context + self.tokens

    @property
    def shape(self) -> StepShape:
        """As the simulation describes such a step."""
        rows, single = self.count * self.tokens, self.tokens == 1
        attended = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        return StepShape(
            rows=rows,
            samples=self.count if self.draws else 0,
            kv_read=self.count * self.held if single else 0,
            prefill_tokens=0 if single else rows,
            prefill_pairs=0 if single else self.count * attended,
            sequences=self.count,
            captured=single and self.draws,
            swapped_blocks=0,
            kv_shared=(self.count - 1) * self.shared if single else 0,
        )


def probes(most_rows: int, most_tokens: int, window: int, slots: int) -> list[Probe]:
    """The shapes for an engine of this size; slots: tokens that its pool holds."""
    long = min(_LONGEST, window - 1, slots // 2)
    wanted = [Probe(count, 1, 31) for count in (1, 2, 4, 8, 16, 32, 64)]
    wanted += [Probe(count, 1, 511) for count in (4, 16, 32, 64)]
    wanted += [Probe(1, 1, long), Probe(8, 1, long)]
    wanted += [Probe(32, 1, 527, shared=512), Probe(32, 1, 1055, shared=1024)]
    wanted += [Probe(1, tokens, 0, draws=False) for tokens in (2, 4, 8, 16, 64, 256, 512, 1024)]
    wanted += [Probe(1, 256, long - 256, draws=False), Probe(1, 16, 0)]
    return [
        probe
        for probe in dict.fromkeys(wanted)
        if probe.count <= most_rows
        and probe.count * probe.tokens <= most_tokens
        and probe.context >= 0
        and probe.held <= window
        and probe.shared + probe.count * (probe.held - probe.shared + 32) <= slots
    ]


def calibrate(config: EngineConfig, clock: Clock = time.perf_counter) -> Calibration:
    """Load the model of `config`, and measure it here. Raises ConfigError where it is too small
    for any probe."""
    executor = create_executor(config)
    try:
        return measure(executor, config, clock)
    finally:
        executor.close()


def measure(
    executor: Executor, config: EngineConfig, clock: Clock = time.perf_counter
) -> Calibration:
    """The same of a loaded model, whose blocks hold nothing that is needed. Raises as it."""
    return calibration_of([sample(executor, config, clock)], executor.limits)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured in some seconds. times: of each probe, one for each round. host_step,
    host_row, copy: as in `Terms`."""

    times: dict[Probe, list[float]]
    host_step: float
    host_row: float
    copy: float


def calibration_of(samples: Sequence[Sample], limits: RunnerLimits) -> Calibration:
    """From all samples together: what is typical of each probe, and how much longer steps take on
    average. The slowest tenth is left out: a stall of the machine may last for some seconds."""
    times: dict[Probe, list[float]] = defaultdict(list)
    for each in samples:
        for probe, seconds in each.times.items():
            times[probe] += seconds
    typical = {probe: statistics.median(seconds) for probe, seconds in times.items()}
    terms, error = fit([Measured(probe.shape, typical[probe]) for probe in times])
    shares = sorted(s / typical[probe] for probe, seconds in times.items() for s in seconds)
    longer = statistics.fmean(shares[: len(shares) - len(shares) // 10])
    terms = replace(
        terms,
        host_step=statistics.fmean(each.host_step for each in samples),
        host_row=statistics.fmean(each.host_row for each in samples),
        copy=statistics.fmean(each.copy for each in samples),
    )
    return Calibration(
        Path(limits.model).name, limits.dtype, limits.kv_cache_dtype, limits.device,
        terms.times(longer), error, longer - 1,
    )  # fmt: skip


def sample(executor: Executor, config: EngineConfig, clock: Clock = time.perf_counter) -> Sample:
    """Measure for some seconds. Raises ConfigError where hardly any probe fits."""
    limits, steps = executor.limits, _Steps(executor, clock)
    slots = (limits.num_blocks - 1) * limits.block_size // len(limits.kv_groups)
    found = probes(config.max_num_seqs, config.max_num_batched_tokens, limits.max_model_len, slots)
    if len(found) < 8:
        raise ConfigError(
            f"only {len(found)} probes fit in {slots} tokens of KV and max_num_seqs="
            f"{config.max_num_seqs}: too few to calibrate with; give more memory or sequences"
        )
    steps.fill()
    times: dict[Probe, list[float]] = {probe: [] for probe in found}
    began = clock()
    for turn in range(_ROUNDS):
        if turn > 1 and clock() - began > _SECONDS:
            break
        for probe in found:
            if turn == 0 and probe.tokens < _LONG:
                steps.run(probe)  # what is compiled or allocated when it is first run
            times[probe].append(steps.run(probe))
    return Sample(times, *_host(config, limits, clock), steps.copy_seconds())


class _Steps:
    """Runs probes on an executor. Their sequences are in blocks of their own, from 1 on."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor, self.clock = executor, clock
        self._limits = executor.limits

    def run(self, probe: Probe) -> float:
        """Seconds of one step."""
        plan = StepPlan(0, tuple(self._rows(probe)))
        began = self.clock()
        self._executor.execute(plan)
        return self.clock() - began

    def fill(self) -> None:
        """Write all blocks: pages that were never written are read from one page of zeros."""
        self.run(Probe(1, self._limits.block_size, 0, draws=False))
        self._copy("copy", range(2, self._limits.num_blocks))

    def copy_seconds(self) -> float:
        """Of one block, to the host and back on average; 0 where there is no room for any."""
        count = min(_COPIES, self._limits.num_host_blocks, self._limits.num_blocks - 1)
        if not count:
            return 0.0
        self._copy("out", range(count))  # touches them
        began = self.clock()
        self._copy("out", range(count))
        return (self.clock() - began) / count

    def _copy(self, kind: str, targets: Sequence[int]) -> None:
        copies = tuple(BlockCopy(kind, 1, target) for target in targets)  # type: ignore[arg-type]
        self._executor.execute(StepPlan(0, (), copies))

    def _rows(self, probe: Probe) -> Iterator[PlanRow]:
        size, groups = self._limits.block_size, len(self._limits.kv_groups)
        common = probe.shared // size
        each = -(-probe.held // size) - common
        for i in range(probe.count):
            first = 1 + common + i * each
            table = (*range(1, 1 + common), *range(first, first + each))
            yield PlanRow(
                f"probe-{i}", (1,) * probe.tokens, probe.context, (table,) * groups,
                _DRAW if probe.draws else (),
            )  # fmt: skip


@dataclass(slots=True)
class _Instant:
    """An executor that draws token 1 and takes no time."""

    limits: RunnerLimits
    runs_ahead: bool = field(default=False)

    def execute(self, plan: StepPlan) -> StepResult:
        rows = [RowResult(row.request_id, ((1,),) * len(row.samples), ((None,),) * len(row.samples))
                for row in plan.rows]  # fmt: skip
        return StepResult(plan.step, tuple(rows))

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.execute(plan)
        return lambda: result

    def explain(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def _host(config: EngineConfig, limits: RunnerLimits, clock: Clock) -> tuple[float, float]:
    """Seconds that plan and commit take: of a step, and of each sequence in it."""
    many = min(_HOST_ROWS, config.max_num_seqs, limits.num_blocks // 8)
    one, all_ = (_host_seconds(config, limits, clock, count) for count in (1, many))
    each = max(all_ - one, 0.0) / (many - 1) if many > 1 else 0.0
    return max(one - each, 0.0), each


def _host_seconds(config: EngineConfig, limits: RunnerLimits, clock: Clock, count: int) -> float:
    engine = Engine(
        config.with_(async_scheduling=False), _Instant(limits), FIFOScheduler(), grammars=None
    )
    params = SamplingParams(temperature=0.0, max_tokens=_HOST_STEPS + 2, ignore_eos=True)
    for i in range(count):
        engine.add_request(Submission(f"{i}", (3 + i,) * 16, params))
    engine.step()
    began = clock()
    for _ in range(_HOST_STEPS):
        engine.step()
    seconds = (clock() - began) / _HOST_STEPS
    engine.close()
    return seconds
