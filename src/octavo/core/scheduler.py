"""Requests in, plans out, results in, updates out.

    Every request has tokens, and a count of how many are computed. A step assigns at most
    `max_num_batched_tokens` tokens to requests whose computed count lags behind; the model
    computes them; a request whose computed count has caught up gains a new token.

A new prompt, a chunk of a long one, a prompt with a cached prefix, a preempted request that is
recomputed: they differ only in how far the computed count lags.

The scheduler admits requests, lets `step` plan, keeps the plans in flight, and commits their
results. It knows neither tensors nor text, and reads no clock: `now` is an argument.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import get_args

import msgspec

from octavo.core.block_pool import expect
from octavo.core.constraint import Constraint
from octavo.core.fallback import FallbackPolicy
from octavo.core.kv_manager import KVManager
from octavo.core.plan import PlanRow, RowResult, StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import Load, Policy, StepLatencies
from octavo.core.policy_registry import bind, unbind
from octavo.core.queues import PreemptionMode, Queues
from octavo.core.rates import Rates
from octavo.core.request import Clock, Request, Status
from octavo.core.steady import SteadyRun
from octavo.core.step import PlannedStep, StepBuilder
from octavo.errors import (
    ConfigError,
    EngineError,
    QueueFullError,
    RequestError,
)
from octavo.outputs import FinishReason

_Logprobs = tuple[TokenLogprobs | None, ...]
# Tokens, their log-probabilities, why they end the request, a stop id of its own, an error.
_Gain = tuple[tuple[int, ...], _Logprobs, FinishReason | None, int | None, EngineError | None]


class Update(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one choice gained in a step.

    prompt_logprobs: complete, once, with the first update of choice 0 (one entry for each
    prompt token after the first); None otherwise. scheduled_time: when the request first started
    to run, with the first token; None otherwise. num_preemptions: of the choice, so far. complete:
    whether the choice ends since a grammar allows nothing more, so that its last token is text.
    error_param: the request's field that causes the error; None for a fault of the engine.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    scheduled_time: float | None = None
    num_preemptions: int = 0
    complete: bool = False
    error_param: str | None = None


class Scheduler:
    """Plans steps for the requests it was given, and commits their results.

    Several plans may be in flight, scheduled and not yet committed. Plans must be executed, and
    are committed, in the order in which they were scheduled. While a request has a row in a plan
    in flight, it keeps its blocks: it is not preempted, and if it is aborted or ends, they are
    released when the last such plan is committed.

    max_num_seqs: requests that run at once; at most max_num_batched_tokens, so that each can get
    a token in each step. max_num_batched_tokens: tokens of one step. max_model_len: tokens of one
    request, prompt and output; the pool must hold one such request, so that a request that runs
    alone can always finish. preemption_mode: whether the KV of a preempted request is swapped
    out (if the KV manager has a host pool with free blocks) or recomputed; auto chooses what is
    expected to be faster, by measured step times. plans_ahead: whether a plan may have rows whose
    token the plan before it draws, if that is in flight; see `may_plan_ahead`.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption_mode: PreemptionMode = "auto",
        plans_ahead: bool = False,
    ) -> None:
        _check_limits(kv, max_model_len, preemption_mode)
        self.kv = kv
        bind(policy, self)
        self.policy = policy
        self.fallback = FallbackPolicy(policy)
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.plans_ahead = plans_ahead
        self.num_discarded_tokens = 0  # computed for requests that had ended meanwhile
        self.rates = Rates()
        self.queues = Queues(kv, self.rates, preemption_mode)
        self._groups: dict[str, dict[int, Request]] = {}  # request id -> index -> live choice
        self._any_redrawn = False  # of the draws that are being committed
        self._ended: list[Update] = []  # of choices that had ended when they were resumed
        self._serial = 0
        self._num_steps = 0
        self._in_flight: deque[PlannedStep] = deque()
        self._clock = Clock()
        self._planned_at = 0.0  # the last plan
        self.last_budget = (0, 0, 0)  # of that step: see StepBuilder.budget
        self._committed_at = 0.0  # the last result

    # Adding and ending requests.

    def add(self, request: Request) -> None:
        """Queue an admitted request. Raises RequestError if its id is in flight, QueueFullError
        if the policy rejects it."""
        self._check_id(request.request_id)
        assert request.num_prompt_tokens < self.max_model_len, "admitted, but beyond the window"
        self._clock.now = max(self._clock.now, request.arrival_time)
        if self.fallback.refuses and (reason := self.fallback.refusal(self._load())):
            raise QueueFullError(reason)
        self._serial += 1
        self._register(request)
        self.queues.enqueue(request)

    def resume(self, choices: Sequence[Request], now: float) -> None:
        """Queue the unfinished choices of a request that another engine has accepted.

        The policy is not asked, since the request was accepted before. Raises RequestError if its
        id is in flight. A choice whose end its caller has not seen ends with the next commit.
        """
        self._check_id(choices[0].request_id)
        self._clock.now = max(self._clock.now, now)
        self._serial += 1
        for request in choices:
            reason, stop = self._end_of(request)
            if reason is not None:
                complete = reason == "stop" and _is_complete(request)
                update = Update(
                    request.request_id, request.index, (), (), reason, stop, complete=complete
                )
                self._ended.append(update)
                continue
            self._register(request)
            if request.num_output_tokens:
                # Of the time since its last token, only the wait here is known.
                request.waiting_since = request.last_token_at = self._clock.now
            self.queues.enqueue_resumed(request)

    def _check_id(self, request_id: str) -> None:
        if request_id in self._groups:
            raise RequestError(
                f"a request with the id {request_id[:128]!r} is in flight", "request_id"
            )

    def _register(self, request: Request) -> None:
        request.serial, request.clock = self._serial, self._clock
        self._groups.setdefault(request.request_id, {})[request.index] = request

    def abort(self, request_id: str) -> bool:
        """End a request, all its choices, at once. False if there is none of this id."""
        choices = list(self._groups.get(request_id, {}).values())
        for request in choices:
            self._finish(request)
        return bool(choices)

    def finish_choice(self, request_id: str, index: int, reason: FinishReason = "stop") -> None:
        """End one choice for an external reason, such as a stop string. No update follows."""
        if request := self._groups.get(request_id, {}).get(index):
            self._finish(request)

    def propose(self, request_id: str, index: int, drafts: Sequence[int]) -> bool:
        """Let the next step that serves a choice verify `drafts`: tokens that may follow its own.

        An answer does not depend on them, only the number of steps that it takes. They are cut
        to what the choice may still gain. False if it has ended or awaits its next token, or is in
        a grammar: what may follow a draft is not known.
        """
        request = self._groups.get(request_id, {}).get(index)
        if request is None or request.lag < 1:
            return False
        if request.constraint is not None and not request.constraint.steady:
            return False
        gain = min(
            request.max_tokens - request.num_output_tokens,
            self.max_model_len - request.num_tokens,
        )
        request.drafts = tuple(drafts[: gain - 1])
        return True

    def choices(self, request_id: str) -> Collection[Request]:
        """The choices of a request that have not ended, by their index."""
        return self._groups.get(request_id, {}).values()

    def close(self) -> None:
        """Let go of the policy: another scheduler may use it."""
        unbind(self.policy, self)

    def has_work(self) -> bool:
        """Whether a request has not ended. Plans in flight must be committed in any case."""
        return bool(self._groups or self._ended)

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._num_steps

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_swapped(self) -> int:
        return len(self.kv.on_host)

    @property
    def num_waiting(self) -> int:
        """Waiting requests without blocks on the host: new ones, and those to recompute."""
        return len(self.queues.waiting) - self.num_swapped

    @property
    def num_in_flight(self) -> int:
        """Plans that are scheduled and not yet committed."""
        return len(self._in_flight)

    @property
    def may_plan_ahead(self) -> bool:
        """Whether a plan may be made while the last one is in flight.

        Not if the last one found that a request in flight has to be preempted: with further
        plans its turn might never come.
        """
        return self.plans_ahead and not (self._in_flight and self._in_flight[-1].blocked)

    @property
    def num_preemptions(self) -> int:
        """For memory and by displacement."""
        return self.queues.num_preemptions

    @property
    def num_displaced(self) -> int:
        return self.queues.num_displaced

    @property
    def num_swap_outs(self) -> int:
        return self.queues.num_swap_outs

    @property
    def peak_running(self) -> int:
        return self.queues.peak_running

    @property
    def policy_errors(self) -> int:
        """How often the policy failed and FIFO answered, or a `weight_fn` counted as 0."""
        return self.fallback.errors + int(getattr(self.policy, "weight_faults", 0))

    def slots(self) -> dict[str, tuple[int, int, int]]:
        """Slots held, written, and shared with others, for each running choice by its id."""
        return {request.seq_id: self.kv.usage_of(request) for request in self.queues.running}

    def check(self) -> None:
        """Verify queues, plans in flight and memory; raises EngineError. For tests, idle."""
        live = {request for group in self._groups.values() for request in group.values()}
        self.queues.check(live)
        rows: dict[Request, int] = {}
        for step in self._in_flight:
            for request in step.requests:
                rows[request] = rows.get(request, 0) + 1
        for request in live | rows.keys():
            count = rows.get(request, 0)
            expect(request.num_in_flight == count, "{!r} is in {} plans in flight", request, count)
            expect(request in live or request.status is Status.FINISHED, "{!r} is lost", request)
        self.kv.check()

    def _finish(self, request: Request) -> None:
        if not request.num_in_flight:  # else `commit` frees its blocks
            self.kv.free(request)
        self.queues.remove(request)
        request.status = Status.FINISHED
        group = self._groups[request.request_id]
        del group[request.index]
        if not group:
            del self._groups[request.request_id]

    def _load(self) -> Load:
        queues = self.queues
        return Load(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            queues.running.keys(),
            (),
            queues.waiting.keys(),
            self._clock.now,
            self.rates,
        )

    # A step: plan it, and commit its result.

    def schedule(self, now: float) -> StepPlan:
        """The next step; its rows are empty if nothing can run now. Each plan must be committed.

        A request whose next token comes from a plan in flight is not served, unless it is the
        last one and steps are planned ahead; the next chunk of a prompt is. Times are in seconds
        of one clock; step times are measured between `schedule` and `commit`.
        """
        since_last = max(now - self._planned_at, 0.0) if self._num_steps else 0.0
        self._clock.now = self._planned_at = now
        self._num_steps += 1
        builder = StepBuilder(
            self.queues,
            self.fallback,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self._in_flight,
            now,
            since_last,
            self.max_model_len if self.plans_ahead else None,
        )
        step = builder.build(self._num_steps)
        self.last_budget = builder.budget
        self._in_flight.append(step)
        return step.plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Update]:
        """Advance every request of `plan`; what each choice gained, in the plan's order.

        `plan` must be the first one in flight, and `result` its result; else EngineError is raised,
        and nothing changes. Rows of requests that ended meanwhile are dropped.
        """
        step = self._take(plan, result)
        self._clock.now = now
        updates, self._ended = self._ended, []
        running = Status.RUNNING
        for request, row, gained in zip(step.requests, plan.rows, result.rows, strict=True):
            request.num_in_flight -= 1
            if request.status is not running:
                self._drop(request, row)
                continue
            if gained.error is not None:
                self._fail(request, gained, updates)
                continue
            if row.num_prompt_logprobs is not None:
                _collect(request, row, gained)
            computed = row.start + len(row.token_ids)
            if not row.samples:
                self.kv.publish(request, computed)
            elif len(gained.choices) == 1:
                if row.samples[0].offset:
                    computed = self._reject_drafts(request, row, gained)
                logprobs = (
                    gained.logprobs[0] if gained.logprobs else (None,) * len(gained.choices[0])
                )
                updates.append(self._advance(request, row, computed, gained.choices[0], logprobs))
            else:
                self._draw_all(request, row, gained, updates)
        self._measure(step, updates)
        self._committed_at = now
        if self._any_redrawn:
            self._any_redrawn = False
            return [u for u in updates if u.token_ids or u.finish_reason is not None]
        return updates

    def advance(self, now: float, token: int, end_of: Callable[[int], float | None]) -> int:
        """Plan and commit steps at once, for a simulation, while each of them can only give every
        running request its next token, which is `token`; returns how many. See `core.steady`.

        Every request, the queues and the KV manager are then as after so many calls of `schedule`
        and `commit`; no request ends. `end_of` says when the next step ends, in which requests hold
        as many blocks as it is told; None: it is not to be skipped. No plan may be in flight.
        """
        assert not self._in_flight, "plans in flight come first"
        run = SteadyRun(
            self.queues,
            self.fallback,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.max_model_len,
            self.plans_ahead,
            self._committed_at,
            token,
        )
        count = 0
        while not self._ended and run.may_step(now):
            if (end := end_of(run.blocks)) is None:
                break
            run.step(now, end)
            self._planned_at = now
            self._clock.now = self._committed_at = now = end
            count += 1
        run.close()
        self._num_steps += count
        return count

    def discard(self) -> None:
        """Commit the plans in flight without their results. Every request must have ended.

        Nobody waits for them, so the time that they take is not known, and not measured.
        """
        assert not self._groups, "a request has not ended"
        while self._in_flight:
            step = self._in_flight.popleft()
            for request, row in zip(step.requests, step.plan.rows, strict=True):
                request.num_in_flight -= 1
                self._drop(request, row)

    def _drop(self, request: Request, row: PlanRow) -> None:
        """A row of a request that has ended meanwhile."""
        self.num_discarded_tokens += len(row.token_ids)
        if not request.num_in_flight:
            self.kv.free(request)

    def _take(self, plan: StepPlan, result: StepResult) -> PlannedStep:
        """Remove `plan`, if `result` is its result, from those in flight."""
        if not self._in_flight or self._in_flight[0].plan is not plan:
            first = f"plan {self._in_flight[0].plan.step} is" if self._in_flight else "none is"
            raise EngineError(f"plan {plan.step} cannot be committed: {first} next in flight")
        if result.step != plan.step or len(result.rows) != len(plan.rows):
            raise EngineError(
                f"result {result.step} ({len(result.rows)} rows) does not belong to plan "
                f"{plan.step} ({len(plan.rows)} rows)"
            )
        return self._in_flight.popleft()

    def _measure(self, step: PlannedStep, updates: list[Update]) -> None:
        """Update the rates with the time of a step, which began when the one before it ended."""
        plan, tokens = step.plan, step.num_tokens
        if not plan.rows and not plan.copies:
            return
        seconds = self._clock.now - max(plan.planned_at, self._committed_at)
        swapped = sum([copy.kind != "copy" for copy in plan.copies]) if plan.copies else 0
        if not swapped:
            self.rates.note_step(tokens, seconds)
        elif (usual := self.rates.seconds(tokens)) is not None:
            self.rates.note_copies(swapped, seconds - usual)
        if self.fallback.observes:
            num_tokens = sum([len(update.token_ids) for update in updates])
            self.fallback.observe(self._latencies(step, num_tokens, seconds))

    def _latencies(self, step: PlannedStep, num_tokens: int, seconds: float) -> StepLatencies:
        """How long each choice that gained a token had waited for it."""
        gaps: list[float] = []
        firsts: list[float] = []
        num_due = sum([len(row.token_ids) == 1 for row in step.plan.rows])
        for request, row in zip(step.requests, step.plan.rows, strict=True):
            if not row.samples:
                continue  # a chunk of a prompt that is not the last one
            if len(request.tokens) == row.start + len(row.token_ids) - row.num_drafts:
                continue  # nothing was drawn for it: it failed or was aborted
            if request.last_token_at is None:
                firsts.append(self._clock.now - request.arrival_time)
            else:
                gaps.append(self._clock.now - request.last_token_at)
            request.last_token_at = self._clock.now
        return StepLatencies(
            self._clock.now, num_tokens, gaps, firsts, seconds, num_due, step.num_tokens - num_due
        )

    def _draw_all(
        self, request: Request, row: PlanRow, gained: RowResult, out: list[Update]
    ) -> None:
        """Fork, and add the first token of each choice."""
        computed = row.start + len(row.token_ids)
        self.kv.publish(request, computed)
        choices = [request, *(self._fork(request, spec.index) for spec in row.samples[1:])]
        logprobs = gained.logprobs or ((None,),) * len(choices)
        for choice, tokens, entries in zip(choices, gained.choices, logprobs, strict=True):
            out.append(self._advance(choice, row, computed, tokens, entries))
        for choice in reversed(choices):
            if choice.status is Status.RUNNING and len(self.queues.running) > self.max_num_seqs:
                self.queues.requeue(choice, self._clock.now)

    def _fork(self, parent: Request, index: int) -> Request:
        child = parent.fork(index)
        child.last_token_at = self._clock.now
        self.kv.fork(parent, child)
        self.queues.run(child)
        self._groups[parent.request_id][index] = child
        return child

    def _reject_drafts(self, request: Request, row: PlanRow, gained: RowResult) -> int:
        """Rewind `request` to the drafts that were accepted; returns its computed tokens."""
        end, drafts, tokens = row.start + len(row.token_ids), row.num_drafts, gained.choices[0]
        accepted = len(tokens) - 1
        first = len(row.token_ids) - drafts
        if not 0 <= accepted <= drafts or tokens[:-1] != row.token_ids[first : first + accepted]:
            raise EngineError(f"{request!r} gained {tokens}, which does not follow from its drafts")
        computed = end - drafts + accepted
        if accepted < drafts:
            self.kv.rewind(request, computed)
        return computed

    def _advance(
        self,
        request: Request,
        row: PlanRow,
        computed: int,
        tokens: tuple[int, ...],
        logprobs: _Logprobs,
    ) -> Update:
        """Append `tokens`, which `row` drew, up to one that ends the request. `computed`: tokens
        that have KV."""
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if (
            request.params.prompt_logprobs is not None
            and request.index == 0
            and len(request.tokens) == request.num_prompt_tokens
        ):
            prompt_logprobs = tuple(request.prompt_logprobs)
        first = len(request.tokens) == request.num_prompt_tokens
        reason: FinishReason | None = None
        stop: int | None = None
        error: str | None = None
        error_param: str | None = None
        used = 0
        if request.constraint is not None:
            tokens, logprobs, reason, stop, failure = self._advance_held(
                request, request.constraint, row, tokens, logprobs
            )
            if failure is not None:
                error, error_param = str(failure), failure.param
            computed = min(computed, len(request.tokens) - 1)
            if reason is None and not request.num_in_flight and request.num_computed > computed:
                self.kv.rewind(request, computed)
            used = len(tokens)
        else:
            while reason is None and used < len(tokens):
                token = tokens[used]
                used += 1
                request.tokens.append(token)
                length = len(request.tokens)
                # Most often none of this holds, and no call is made.
                if (
                    token in request.stop_ids
                    or length - request.num_prompt_tokens >= request.max_tokens
                    or length >= self.max_model_len
                ):
                    reason, stop = self._end_of(request)
        if used < len(tokens):
            tokens, logprobs = tokens[:used], logprobs[:used]
        request.drafts = ()
        if computed // self.kv.block_size > request.table.num_published:
            self.kv.publish(request, min(computed, len(request.tokens)))
        if reason is not None:
            self._finish(request)
        return Update(
            request.request_id,
            request.index,
            tokens,
            logprobs,
            reason,
            stop,
            request.num_cached_tokens,
            prompt_logprobs,
            error,
            request.scheduled_at if first else None,
            request.num_preemptions,
            reason == "stop" and _is_complete(request),
            error_param,
        )

    def _advance_held(
        self,
        request: Request,
        constraint: Constraint,
        row: PlanRow,
        drawn: tuple[int, ...],
        logprobs: _Logprobs,
    ) -> _Gain:
        """Append to a request that is held to a form what `row` drew for it, up to a token that
        ends it, or one that was drawn before it was known what may follow the token before; then
        the tokens that must follow."""
        count, reason, stop, error = 0, None, None, None
        # Planned ahead of tokens that were forced meanwhile, nothing of it counts.
        end = row.start + len(row.token_ids) - row.num_drafts
        stale = row.from_draw is not None and end != len(request.tokens)
        while not stale and reason is None and count < len(drawn):
            followed = count > 0 or row.from_draw is not None
            if followed and row.samples[count].mask is not constraint.mask():
                break
            reason, stop, error = self._append_held(request, constraint, drawn[count])
            count += 1
        self._any_redrawn = self._any_redrawn or not count
        tokens, entries = [*drawn[:count]], [*logprobs[:count]]
        forces = reason is None and count == len(drawn) and _may_force(request)
        while forces and reason is None and (forced := constraint.forced()):
            for token in forced:
                if token in request.stop_ids or reason is not None:
                    forces = False
                    break
                reason, stop, error = self._append_held(request, constraint, token)
                tokens.append(token)
                entries.append(_certain(token, request.params.logprobs))
        return tuple(tokens), tuple(entries), reason, stop, error

    def _append_held(
        self, request: Request, constraint: Constraint, token: int
    ) -> tuple[FinishReason | None, int | None, EngineError | None]:
        """Append one token; why it ends the request, a stop id of its own, and an error."""
        request.tokens.append(token)
        try:
            constraint.advance(token)
        except EngineError as error:
            return "error", None, error
        return *self._end_of(request), None

    def _end_of(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Why `request` ends with the tokens it has, if it does, and a stop id of its own."""
        token, count = request.tokens[-1], len(request.tokens) - request.num_prompt_tokens
        if token in request.stop_ids and count > request.params.min_tokens:
            return "stop", None if token in request.eos_ids else token
        if request.constraint is not None and request.constraint.complete:
            return "stop", None
        if count >= request.max_tokens or len(request.tokens) >= self.max_model_len:
            return "length", None
        return None, None

    def _fail(self, request: Request, gained: RowResult, out: list[Update]) -> None:
        """End this choice, or all choices that it still stands for, with an error."""
        indices = range(request.params.n) if request.to_fork else (request.index,)
        self._finish(request)
        out += [
            Update(
                request.request_id,
                index,
                finish_reason="error",
                error=gained.error,
                error_param=gained.error_param,
            )
            for index in indices
        ]


def _check_limits(kv: KVManager, max_model_len: int, preemption_mode: str) -> None:
    if max_model_len > kv.capacity:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the KV cache holds {kv.capacity} tokens; "
            f"lower max_model_len to {kv.capacity} or give the KV cache more memory"
        )
    if preemption_mode not in get_args(PreemptionMode):
        modes = ", ".join(get_args(PreemptionMode))
        raise ConfigError(f"preemption_mode must be one of {modes}, not {preemption_mode!r}")


def _may_force(request: Request) -> bool:
    """Whether a token that a form forces would be drawn: nothing else excludes tokens."""
    params = request.params
    return params.allowed_token_ids is None and not params.bad_words


def _certain(token: int, num_logprobs: int | None) -> TokenLogprobs | None:
    """The log-probabilities of a token without alternatives, as a sampler gives them."""
    if num_logprobs is None:
        return None
    count = 2 if num_logprobs else 1
    return TokenLogprobs((token,) * count, (0.0,) * count, (1,) * count)


def _is_complete(request: Request) -> bool:
    """Whether a request that has stopped did so since nothing may follow its last token."""
    return request.constraint is not None and request.tokens[-1] not in request.stop_ids


def _collect(request: Request, row: PlanRow, gained: RowResult) -> None:
    """Append the new prompt log-probabilities; a recomputed chunk repeats some."""
    request.prompt_logprobs += gained.prompt_logprobs[len(request.prompt_logprobs) - row.start :]
