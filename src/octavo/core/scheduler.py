"""Which tokens the next step computes.

    Every request has tokens, and a count of how many are computed. A step hands out at most
    `max_num_batched_tokens` tokens to requests whose computed count lags behind; the model
    computes them; a request whose computed count has caught up gains a new token.

A new prompt, a chunk of a long one, a prompt found in the cache but for its end, a request that
lost its blocks and computes them again: all are a computed count that lags, by more or less.

A step serves, in this order:
1. running requests that lag by one token: their next token is due, and nothing delays it;
2. running requests that lag by more; one that cannot catch up in this step takes at most half
   of what is left while others want some, so a long prompt slows short ones but never stops
   them, and the first in line always has the largest share;
3. waiting requests, in the policy's order, if all their tokens fit in memory beside what the
   running ones are promised. One that does not fit is passed by at most `MAX_BYPASS` others.

When memory runs out, the policy's victim gives up its blocks and waits for its turn to compute
its tokens, its own output included, again. Nothing here knows tensors, text or the time: `now`
is given.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import msgspec

from octavo.core.block_pool import expect
from octavo.core.kv_manager import KVManager
from octavo.core.plan import PlanRow, RowResult, StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import Load, Policy
from octavo.core.request import Request, Status
from octavo.errors import ConfigError, ContextLengthError, EngineError, RequestError
from octavo.outputs import FinishReason

MAX_BYPASS = 32  # requests that may start before an earlier one that memory does not hold yet
MIN_SHARE = 64  # tokens; smaller pieces of a long prompt cost more than they give others


class Update(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained in a step.

    prompt_logprobs: complete, once, with the first update of choice 0 (one entry for each
    prompt token after the first); None otherwise.
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


class Scheduler:
    """Requests in; plans out; results in; updates out.

    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step; as no
    more requests run than a step has tokens, each can move in each step. max_model_len: tokens
    of one request, prompt and output; the pool must hold one such request, so that a request
    that runs alone always ends.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if max_model_len > kv.capacity:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the KV cache holds {kv.capacity} tokens; "
                f"lower max_model_len to {kv.capacity} or give the KV cache more memory"
            )
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._groups: dict[str, dict[int, Request]] = {}  # request id -> index -> live choice
        self._running: dict[Request, None] = {}
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._serial = 0
        self._step = 0
        self._planned: list[Request] = []
        # Of the step being planned:
        self._left = 0  # tokens not yet handed out
        self._grants: dict[Request, int] = {}
        self._preempted = False
        self._in_flight: set[bytes] = set()  # names of blocks that this step computes

    # Coming and going.

    def add(self, request: Request) -> None:
        """Let `request` wait for its turn. Raises RequestError if it can never be served."""
        if request.request_id in self._groups:
            raise RequestError(
                f"a request with the id {request.request_id[:128]!r} is in flight", "request_id"
            )
        if request.num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {request.num_prompt_tokens} tokens; at most "
                f"{self.max_model_len - 1} fit, with one of output, in the window of "
                f"{self.max_model_len}",
                "prompt",
            )
        self._serial += 1
        request.serial = self._serial
        self._groups[request.request_id] = {request.index: request}
        self._waiting[request] = None

    def abort(self, request_id: str) -> bool:
        """End a request, all its choices, at once. False if there is none of this id."""
        choices = list(self._groups.get(request_id, {}).values())
        for request in choices:
            self._finish(request)
        return bool(choices)

    def finish_choice(self, request_id: str, index: int, reason: FinishReason = "stop") -> None:
        """End one choice for a reason seen outside, such as a stop string. No update follows."""
        if request := self._groups.get(request_id, {}).get(index):
            self._finish(request)

    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Verify queues, groups and memory; raises EngineError. For tests and idle times."""
        live = {request for group in self._groups.values() for request in group.values()}
        expect(self._running.keys() | self._waiting.keys() == live, "a live request has no queue")
        expect(not self._running.keys() & self._waiting.keys(), "a request is in both queues")
        for request in live:
            running = request.status is Status.RUNNING
            expect(running == (request in self._running), f"{request!r} is in the wrong queue")
            expect(running or not request.table.blocks, f"{request!r} waits and holds blocks")
        self.kv.check()

    def _finish(self, request: Request) -> None:
        self.kv.free(request)
        self._running.pop(request, None)
        self._waiting.pop(request, None)
        request.status = Status.FINISHED
        group = self._groups[request.request_id]
        del group[request.index]
        if not group:
            del self._groups[request.request_id]

    # Planning a step.

    def schedule(self, now: float) -> StepPlan:
        """The next step; its rows are empty if nothing can run. Each plan must be committed."""
        self._grants, self._preempted = {}, False
        self._in_flight.clear()
        sequences = self._set_budget()
        lagging = self._serve_due(now)
        self._serve_lagging(lagging, now)
        if self._waiting and self._left and not self._preempted:
            lagging += self._admit(lagging, sequences - len(self._running), now)
        if self._left and lagging:
            self._top_up(lagging)
        return self._plan()

    def _set_budget(self) -> int:
        load = Load(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            len(self._running),
            len(self._waiting),
        )
        tokens, sequences = self.policy.budget(load)
        # Whatever a policy says, each running request can move and an idle engine can start.
        self._left = min(max(tokens, len(self._running), 1), self.max_num_batched_tokens)
        return min(max(sequences, 1), self.max_num_seqs)

    def _serve_due(self, now: float) -> list[Request]:
        """One token for each running request that lags by one; returns those that lag more."""
        lagging: list[Request] = []
        grow, grants = self.kv.grow, self._grants
        for request in list(self._running):
            if len(request.tokens) - request.num_computed > 1:
                lagging.append(request)
            elif request.status is Status.RUNNING and (
                grow(request, 1) or self._make_room(request, now)
            ):
                grants[request] = 1
                self._left -= 1
        return lagging

    def _serve_lagging(self, lagging: list[Request], now: float) -> None:
        for request in lagging:
            if not self._left:
                break
            if request.status is not Status.RUNNING:
                continue  # it gave way to an earlier one
            if self.kv.room(request) <= 0 and not self._make_room(request, now):
                continue
            self._grant(request, len(lagging) > 1 or bool(self._waiting))

    def _grant(self, request: Request, others_want: bool) -> None:
        """Hand out tokens to a request that has room for one at least."""
        count = min(request.lag, self._left)
        if count < request.lag and others_want:
            count = min(count, max(self._left // 2, MIN_SHARE))
        self._give(request, min(count, self.kv.room(request)))

    def _give(self, request: Request, count: int) -> None:
        held = self._grants.get(request, 0)
        if not self.kv.grow(request, held + count):
            raise EngineError(f"no blocks for {count} tokens of {request!r} after all")
        self._grants[request] = held + count
        self._left -= count
        self._note_in_flight(request)

    def _top_up(self, lagging: list[Request]) -> None:
        """Hand out what nobody else wanted."""
        for request in lagging:
            held = self._grants.get(request)
            if held is None:
                continue
            count = min(request.lag, held + self._left, self.kv.room(request)) - held
            if count > 0:
                self._give(request, count)

    def _make_room(self, request: Request, now: float) -> bool:
        """Preempt until `request` can grow by one token. False if it had to go itself."""
        while not self.kv.grow(request, 1):
            victim = self.policy.victim(self._running.keys(), request, now)
            if victim not in self._running:
                victim = request
            self._preempt(victim, now)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, now: float) -> None:
        self._left += self._grants.pop(request, 0)
        self._preempted = True
        self.num_preemptions += 1
        self._send_back(request, now)

    def _send_back(self, request: Request, now: float) -> None:
        """Take all blocks from `request` and let it wait, before those that never ran."""
        self.kv.free(request)
        self._running.pop(request, None)
        request.status = Status.PREEMPTED
        request.waiting_since = now
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    # Admission.

    def _admit(self, lagging: list[Request], slots: int, now: float) -> list[Request]:
        """Start waiting requests; returns those started."""
        started: list[Request] = []
        passed: list[Request] = []
        promised = sum(self.kv.missing(request) for request in lagging)
        for request in self._candidates(slots, now):
            if len(started) >= slots or not self._left:
                break
            found = self.kv.find(request)
            if self.kv.name_after(request, len(found)) in self._in_flight:
                continue  # this step computes its next block: in the next step it is there
            spare = promised + len(self._running) if self._running else 0
            if not self.kv.fits(request, found, spare):
                passed.append(request)
                if request.bypassed >= MAX_BYPASS:
                    break
                continue
            self._start(request, found, now)
            promised += self.kv.missing(request)
            started.append(request)
            for earlier in passed:
                earlier.bypassed += 1
        return started

    def _candidates(self, slots: int, now: float) -> Iterable[Request]:
        if slots <= 0:
            return ()
        order = self.policy.order(self._waiting.keys(), now)
        # A list, since starting a request takes it out of what `order` may iterate over.
        return list(islice(order, slots + MAX_BYPASS))

    def _start(self, request: Request, found: list[int], now: float) -> None:
        cached = self.kv.take(request, found)
        if request.status is Status.WAITING:
            request.num_cached_tokens = cached
            self.kv.count_query(request)
        request.status = Status.RUNNING
        request.bypassed = 0
        request.waited += now - request.waiting_since
        del self._waiting[request]
        self._running[request] = None
        self._grant(request, bool(self._waiting))

    def _note_in_flight(self, request: Request) -> None:
        if self.kv.caching:
            end = request.num_computed + self._grants[request]
            size = self.kv.block_size
            names = request.block_hashes[request.num_computed // size : end // size]
            self._in_flight.update(names)

    # The plan.

    def _plan(self) -> StepPlan:
        self._step += 1
        self._planned = list(self._grants)
        rows = tuple([_row(request, count) for request, count in self._grants.items()])
        return StepPlan(self._step, rows, self.kv.take_copies())

    # Taking in what the step gave.

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Update]:
        """Advance every request of `plan`; what each choice gained, in the plan's order.

        Raises EngineError if `plan` is not the last one, or `result` is not its result.
        """
        planned, self._planned = self._planned, []
        if not plan.step == result.step == self._step or not (
            len(planned) == len(plan.rows) == len(result.rows)
        ):
            raise EngineError(f"result {result.step} does not belong to plan {self._step}")
        updates: list[Update] = []
        size = self.kv.block_size
        for request, row, gained in zip(planned, plan.rows, result.rows, strict=True):
            if request.status is not Status.RUNNING:
                continue  # aborted since
            if gained.error is not None:
                self._fail(request, gained.error, updates)
                continue
            request.num_computed += len(row.token_ids)
            if request.num_computed // size > request.table.num_published:
                self.kv.publish(request)
            if row.num_prompt_logprobs is not None:
                _collect(request, row, gained)
            if row.samples:
                self._draw(request, row, gained, now, updates)
        return updates

    def _draw(
        self, request: Request, row: PlanRow, gained: RowResult, now: float, out: list[Update]
    ) -> None:
        """Add the drawn tokens: one to this choice, or the first of each choice at the fork."""
        choices = [request]
        if len(row.samples) > 1:
            choices += [self._fork(request, spec.index) for spec in row.samples[1:]]
        logprobs = gained.logprobs or (None,) * len(choices)
        for choice, token, logprob in zip(choices, gained.token_ids, logprobs, strict=True):
            out.append(self._advance(choice, token, logprob))
        for choice in choices[1:]:
            if choice.status is Status.RUNNING and len(self._running) > self.max_num_seqs:
                self._send_back(choice, now)

    def _fork(self, parent: Request, index: int) -> Request:
        child = parent.fork(index)
        self.kv.fork(parent, child)
        child.status = Status.RUNNING
        self._running[child] = None
        self._groups[parent.request_id][index] = child
        return child

    def _advance(self, request: Request, token: int, logprob: TokenLogprobs | None) -> Update:
        request.tokens.append(token)
        count = len(request.tokens) - request.num_prompt_tokens
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if count == 1 and request.index == 0 and request.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(request.prompt_logprobs)
        reason: FinishReason | None = None
        stop: int | None = None
        if token in request.stop_ids and count > request.params.min_tokens:
            reason = "stop"
            stop = None if token in request.eos_ids else token
        elif count >= request.max_tokens or len(request.tokens) >= self.max_model_len:
            reason = "length"
        if reason is not None:
            self._finish(request)
        return Update(
            request.request_id,
            request.index,
            (token,),
            (logprob,),
            reason,
            stop,
            request.num_cached_tokens,
            prompt_logprobs,
        )

    def _fail(self, request: Request, error: str, out: list[Update]) -> None:
        """End this choice, or all choices that it still stands for, with an error."""
        indices = range(request.params.n) if request.to_fork else (request.index,)
        self._finish(request)
        out += [
            Update(request.request_id, index, finish_reason="error", error=error)
            for index in indices
        ]


def _row(request: Request, count: int) -> PlanRow:
    start, tokens = request.num_computed, request.tokens
    end = start + count
    samples = request.sample_specs() if end == len(tokens) else ()
    if count == 1:
        ids: tuple[int, ...] = (tokens[start],)
    else:
        ids = tuple(tokens[start:end])
    if request.wants_prompt_logprobs:
        targets = tuple(tokens[start + 1 : min(end + 1, request.num_prompt_tokens)])
        return PlanRow(
            request.seq_id, ids, start, request.table.ids, samples,
            request.params.prompt_logprobs, targets, request.adapter,
        )  # fmt: skip
    return PlanRow(request.seq_id, ids, start, request.table.ids, samples, adapter=request.adapter)


def _collect(request: Request, row: PlanRow, gained: RowResult) -> None:
    """Keep the prompt log-probabilities that are new; a chunk computed again brings some twice."""
    request.prompt_logprobs += gained.prompt_logprobs[len(request.prompt_logprobs) - row.start :]
