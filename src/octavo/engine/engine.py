"""The engine: requests in, tokens out. One step is three calls: plan, run, commit.

Where the device works beside the host, the next step is planned and submitted before the result
of the one being computed is read. The engine combines the scheduler, which decides, and the
executor, which computes, and handles neither text nor sockets. Not thread-safe: one thread owns
an engine.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.request import Request
from octavo.core.scheduler import Update
from octavo.core.submission import Continuation, Submission
from octavo.engine.admission import output_limit
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.constraints import constraint_of, may_make
from octavo.engine.executor import Executor, FailsIdle
from octavo.engine.scheduling import make_scheduler, queue_space
from octavo.engine.seeds import SeedSource
from octavo.engine.stats import EngineStats, StatsRecorder
from octavo.errors import (
    EngineDeadError,
    EngineError,
    OctavoError,
    QueueFullError,
    counted,
)
from octavo.log import get_logger
from octavo.models.files import resolve_tokenizer
from octavo.params import SamplingParams
from octavo.processes import Owner
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)

Clock = Callable[[], float]

T = TypeVar("T")


class SubmittedStep(NamedTuple):
    """A step that the executor was given. result: waits for it."""

    plan: StepPlan
    result: Callable[[], StepResult]
    started: float


class Engine:
    """Runs requests to completion on one executor.

    `clock` gives seconds, monotonic; a simulation passes its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        policy: Policy,
        clock: Clock = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        limits = executor.limits
        self.config = config
        self.executor = executor
        self.limits = limits
        self.clock = clock
        ahead = config.async_scheduling
        self._runs_ahead = executor.runs_ahead if ahead is None else ahead
        self._submitted: deque[SubmittedStep] = deque()
        self._ended = 0.0  # the last step
        self.scheduler = make_scheduler(config, limits, policy, self._runs_ahead)
        self.capabilities = EngineCapabilities(
            limits,
            str(policy.name),
            heeds_priority=bool(getattr(policy, "heeds_priority", True)),
            heeds_deadline=bool(getattr(policy, "heeds_deadline", True)),
            gauges=self.scheduler.fallback.gauges(),
            explain=executor.explain(),
        )
        self.grammars = grammars or _grammars(config, limits)
        self.recorder = StatsRecorder()
        self._dead: str | None = None
        self._owner = Owner("this engine")
        self._seeds = SeedSource(config.seed)

    def add_request(self, submission: Submission) -> None:
        """Queue a request that `admission.admit` has accepted; waits until its grammar is compiled.

        Raises RequestError if its id is in flight or its grammar is too large, QueueFullError when
        too many wait or the policy refuses it, EngineDeadError when the engine has stopped. A
        request that another engine has accepted continues; it is not refused.
        """
        self._check_alive()
        if submission.continuation is not None:
            self._resume(submission, submission.continuation)
            return
        if self.queue_space <= 0:
            count = self.scheduler.num_waiting
            raise QueueFullError(
                f"{counted(count, 'request')} {'waits' if count == 1 else 'wait'} already, which "
                "is the limit (max_waiting); try again later"
            )
        request = self._request(submission, self._seed_of(submission))
        self.scheduler.add(request)
        self.recorder.arrived(request)

    def _resume(self, submission: Submission, continuation: Continuation) -> None:
        seed, now = self._seed_of(submission), self.clock()
        choices = [
            self._request(submission, seed, index, outputs)
            for index, outputs in enumerate(continuation.outputs or ((),))
            if outputs is not None
        ]
        self.scheduler.resume(choices, now)
        self.recorder.resumed(choices, now)

    def _seed_of(self, submission: Submission) -> int:
        for seed in (submission.params.seed, submission.seed):
            if seed is not None:
                return seed
        return self._seeds.next()

    def _request(
        self, submission: Submission, seed: int, index: int = 0, outputs: tuple[int, ...] = ()
    ) -> Request:
        arrival = submission.arrival_time
        params, eos = submission.params, self.limits.eos_token_ids
        ends = stop_ids(params, eos)
        return Request(
            submission,
            seed=seed,
            max_tokens=output_limit(submission, self.limits),
            arrival_time=self.clock() if arrival is None else arrival,
            stop_ids=ends,
            eos_ids=() if params.ignore_eos else eos,
            index=index,
            output_ids=outputs,
            constraint=constraint_of(submission, self.grammars, (*eos, *ends), outputs),
        )

    def may_add(self, submission: Submission) -> bool:
        """Whether `add_request` need not wait: begins to compile a grammar if there is one."""
        return may_make(submission, self.grammars)

    @property
    def queue_space(self) -> int:
        """How many more requests may be added now: those that may wait, or run at once."""
        return queue_space(self.config, self.scheduler)

    def step(self) -> list[Update]:
        """Plan, run, commit. Returns what each choice gained; empty if nothing could run.

        Running ahead, the step after it is planned and submitted first. Raises EngineDeadError if
        the executor fails; the engine is dead from then on.
        """
        self._check_alive()
        if not self._submitted:
            self._plan()
        if self.scheduler.may_plan_ahead and _computes(self._submitted[0].plan):
            self._plan()
        updates = self._commit()
        self._discard_if_idle()
        return updates

    def _plan(self) -> None:
        started = self.clock()
        plan = self.scheduler.schedule(started)
        if self.grammars.in_use:  # masks are filled while the model runs
            self.grammars.fill({s.mask: None for row in plan.rows for s in row.samples if s.mask})
        self._submitted.append(SubmittedStep(plan, self._submit(plan), started))

    def _commit(self) -> list[Update]:
        """Commit the oldest step, and one after it that computes nothing."""
        step = self._submitted[0]
        plan, result = step.plan, self._guarded(step.plan, step.result)
        self._submitted.popleft()
        ended = self.clock()
        discarded = self.scheduler.num_discarded_tokens
        updates = self.scheduler.commit(plan, result, ended)
        if plan.rows or updates:
            discarded = self.scheduler.num_discarded_tokens - discarded
            started = max(step.started, self._ended)  # when the step before it was done
            self.recorder.step(plan, updates, started, ended, discarded)
        self._ended = ended
        if self._submitted and not _computes(self._submitted[0].plan):
            empty = self._submitted.popleft()
            self.scheduler.commit(empty.plan, empty.result(), ended)
        return updates

    def _discard_if_idle(self) -> None:
        """Give up steps whose requests have all ended, without a wait for their results.

        Their blocks may be used again: steps are computed in the order of their submission.
        """
        if not self._submitted or self.scheduler.has_work():
            return
        now = self.clock()
        self.scheduler.discard()
        for plan, _, _ in self._submitted:
            self.recorder.step(plan, [], now, now, plan.num_tokens)
        self._submitted.clear()

    def abort(self, request_id: str) -> bool:
        """End a request, all its choices, and free its blocks. False if it is not in flight."""
        known = self.scheduler.abort(request_id)
        self.recorder.aborted(request_id, self.clock())
        self._discard_if_idle()
        return known

    def finish_choice(self, request_id: str, index: int) -> None:
        """End one choice whose text contains a stop string, as detected by the caller."""
        self.scheduler.finish_choice(request_id, index)
        self.recorder.choice_stopped(request_id, self.clock())
        self._discard_if_idle()

    def has_work(self) -> bool:
        return self._dead is None and self.scheduler.has_work()

    def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes. False if running requests still hold some."""
        return self.scheduler.kv.reset_prefix_cache()

    def close(self) -> None:
        """Release the executor's memory. May be called again."""
        self._dead = self._dead or "it was closed"
        self._submitted.clear()
        self.scheduler.close()
        self.executor.close()
        self.grammars.close()

    def explain(self) -> dict[str, str]:
        """What implements each operation, and why."""
        return dict(self.capabilities.explain)

    @property
    def stats(self) -> EngineStats:
        """A snapshot; `print` shows it, `as_dict()` is for JSON."""
        return self.recorder.snapshot(self.scheduler, self.clock())

    def slots(self) -> dict[str, tuple[int, int, int]]:
        """KV slots held, written, and shared with others, for each running choice by its id."""
        return self.scheduler.slots()

    @property
    def dead(self) -> str | None:
        """Why the engine is dead, or None."""
        return self._dead

    def _submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        if not _computes(plan):
            return lambda: StepResult(plan.step, ())
        if not self._runs_ahead:
            return partial(self.executor.execute, plan)
        return self._guarded(plan, lambda: self.executor.submit(plan))

    def _guarded(self, plan: StepPlan, call: Callable[[], T]) -> T:
        """What the executor answers; the engine is dead if it fails."""
        try:
            return call()
        except EngineDeadError as error:
            self._died(error)
            raise
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            logger.exception("step %d failed; the engine stops", plan.step)
            raise EngineDeadError(self._dead) from error

    def check_executor(self) -> None:
        """Raise EngineDeadError if an executor that may fail idle has failed."""
        self._check_alive()
        if isinstance(self.executor, FailsIdle):
            try:
                self.executor.check()
            except OctavoError as error:
                self._died(error)
                raise EngineDeadError(self._dead or "") from error

    def _died(self, error: OctavoError) -> None:
        """The executor says why; where in this process it was met says no more."""
        self._dead = error.reason if isinstance(error, EngineDeadError) else str(error)
        logger.error("%s; the engine stops", self._dead)

    def _check_alive(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self._dead is not None:
            raise EngineDeadError(self._dead)


def _computes(plan: StepPlan) -> bool:
    """Whether there is something to do for the executor."""
    return bool(plan.rows or plan.copies)


def _grammars(config: EngineConfig, limits: RunnerLimits) -> Grammars:
    """Grammars over the model's tokenizer, which is not read before the first one comes."""

    def tokenizer() -> Tokenizer:
        return load_tokenizer(resolve_tokenizer(config.model, config.revision, config.tokenizer))

    return Grammars(tokenizer, limits.vocab_size, limits.eos_token_ids)


def stop_ids(params: SamplingParams, eos: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that end a text: end-of-text ids unless ignored, and the caller's own."""
    own = tuple(params.stop_token_ids or ())
    return own if params.ignore_eos else (*eos, *(i for i in own if i not in eos))
