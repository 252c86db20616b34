"""An engine that records what it does: `create_engine` makes one where the configuration has a
trace, and else an engine that knows nothing of it.

On the engine's thread a step leaves one record: its plan, times, updates, and which requests were
started and preempted. What is made of it, and where it goes, is `engine.trace_events` and
`engine.trace_file`, on a thread of the trace.
"""

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.request import Request, Status
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine.admission import output_limit
from octavo.engine.engine import Clock, Engine
from octavo.engine.executor import Executor
from octavo.engine.trace_events import (
    Arrived,
    Counts,
    Ended,
    Failed,
    Move,
    RequestEvents,
    Span,
    Stepped,
)
from octavo.engine.trace_file import TRACE_BYTES, TraceFile, TraceWriter, trace_path
from octavo.errors import EngineDeadError
from octavo.text.matcher import Grammars
from octavo.version import __version__

_SPARE = 64  # requests that have ended and are still known, above as many as run


@dataclass(slots=True)
class _Times:
    """Of one step. ready: planned. submitted: with the executor. waited: its result was asked
    for. done: the result was there."""

    ready: float = 0.0
    submitted: float = 0.0
    waited: float = 0.0
    done: float = 0.0


def create_engine(
    config: EngineConfig,
    executor: Executor,
    policy: Policy,
    clock: Clock = time.monotonic,
    grammars: Grammars | None = None,
    engine: int = 0,
    engines: int = 1,
) -> Engine:
    """An engine, traced if `config.trace` says where to. engine: its number among `engines`.

    Raises ConfigError where the trace cannot be written.
    """
    if config.trace is None:
        return Engine(config, executor, policy, clock, grammars)
    number = f" {engine}" if engines > 1 else ""
    events = RequestEvents(
        os.getpid(),
        f"octavo engine{number}: {config.model}",
        (clock(), time.time()),
        {"version": __version__, "engine": engine, "scheduler": str(policy.name)},
    )
    path = trace_path(config.trace, engine, engines)
    writer = TraceWriter(TraceFile(path, config.trace_size or TRACE_BYTES, events))
    return TracedEngine(config, executor, policy, clock, grammars, writer)


class TracedEngine(Engine):
    """Records its steps and requests with `writer`, which it closes with itself."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        grammars: Grammars | None,
        writer: TraceWriter,
    ) -> None:
        super().__init__(config, executor, policy, clock, grammars)
        self._writer = writer
        # An engine that is not closed, since its process ends: the trace gets its end all the same.
        self._finalizer = weakref.finalize(self, writer.close)
        self._times: dict[int, _Times] = {}  # of steps in flight
        self._moves: list[Move] = []  # that no record has yet
        self._done = 0.0  # the last result
        self._known: dict[Request, None] = {}  # that run, and some that did
        self._preemptions = 0

    def add_request(self, submission: Submission) -> None:
        super().add_request(submission)
        params, continuation = submission.params, submission.continuation
        outputs = continuation.outputs if continuation else ()
        choices = tuple([i for i, ids in enumerate(outputs) if ids is not None]) or (0,)
        arrival = submission.arrival_time
        args: dict[str, Any] = {
            "prompt_tokens": len(submission.token_ids),
            "max_tokens": output_limit(submission, self.limits),
        }
        if params.n > 1:
            args["n"] = params.n
        if submission.priority:
            args["priority"] = submission.priority
        self._writer.put(
            Arrived(
                submission.request_id,
                # Of one that another engine had, the time before is in that engine's trace.
                self.clock() if continuation or arrival is None else arrival,
                args,
                choices,
                len(choices) if outputs else params.n,
                bool(outputs),
            )
        )

    def abort(self, request_id: str) -> bool:
        known = super().abort(request_id)
        if known:
            self._writer.put(Ended(request_id, None, "abort", self.clock()))
        return known

    def finish_choice(self, request_id: str, index: int) -> None:
        super().finish_choice(request_id, index)
        self._writer.put(Ended(request_id, index, "stop", self.clock()))

    def close(self) -> None:
        super().close()
        self._writer.close()

    def _submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        times = self._times[plan.step] = _Times(ready=self.clock())
        self._note_moves(times.ready)
        result = super()._submit(plan)
        times.submitted = self.clock()

        def timed() -> StepResult:
            times.waited = self.clock()
            found = result()
            times.done = self.clock()
            return found

        return timed

    def _note_moves(self, now: float) -> None:
        """What the plan that was just made has started and preempted."""
        known, running = self._known, self.scheduler.queues.running
        if self.scheduler.num_preemptions != self._preemptions:
            self._preemptions = self.scheduler.num_preemptions
            for request in [r for r in known if r.status is not Status.RUNNING]:
                del known[request]
                if request.status is not Status.FINISHED:
                    self._moves.append(Move(request.seq_id, request.status.value, now))
        for request in reversed(running):  # new ones are at the end
            if request in known:
                break
            known[request] = None
            self._moves.append(Move(request.seq_id, "running", now, request.num_cached_tokens))
        if len(known) > 2 * len(running) + _SPARE:
            self._known = {request: None for request in known if request in running}

    def _commit(self) -> list[Update]:
        step = self._submitted[0]
        discarded = self.scheduler.num_discarded_tokens
        try:
            updates = super()._commit()
        except EngineDeadError as error:
            self._writer.put(Failed(error.reason, self.clock()))
            raise
        plan = step.plan
        times, moves = self._times.pop(plan.step), self._moves
        if plan.rows or plan.copies or updates or moves:
            self._moves = []
            start = times.submitted if self._runs_ahead else times.waited
            self._writer.put(
                Stepped(
                    plan,
                    Span(step.started, times.ready),
                    Span(max(start, self._done), times.done),
                    Span(times.done, self.clock()),
                    updates,
                    moves,
                    self._counts(),
                    self.scheduler.num_discarded_tokens - discarded,
                )
            )
        self._done = times.done
        for number in [number for number in self._times if number < plan.step]:
            del self._times[number]  # its result was not asked for
        return updates

    def _counts(self) -> Counts:
        scheduler = self.scheduler
        swapped = scheduler.num_swapped if self._preemptions else 0
        waiting = len(scheduler.queues.waiting) - swapped
        held = scheduler.kv.pool.num_used
        return Counts(scheduler.num_running, waiting, swapped, held)
