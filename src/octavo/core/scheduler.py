"""Which tokens the next step computes.

    Every request has tokens, and a count of how many are computed. A step hands out at most
    `max_num_batched_tokens` tokens to requests whose computed count lags behind; the model
    computes them; a request whose computed count has caught up gains a new token.

A new prompt, a chunk of a long one, a prompt found in the cache but for its end, a request that
lost its blocks and computes them again: all are a computed count that lags, by more or less.

A step serves
1. running requests that lag by one token: their next token is due, and nothing delays it; the
   policy's budget keeps the rest of the step from taking too long for them;
2. in the policy's order, running requests that lag by more, and waiting ones, if all their
   tokens fit in memory beside what the running ones are promised.

One that cannot catch up in this step takes at most half of what is left while others want some,
so a long prompt slows short ones but never stops them, and the first in line has the largest
share. A new one that memory does not hold yet is passed by at most `MAX_OVERTAKEN` others.

When memory runs out, or the policy lets a waiting request displace a running one, the victim
gives up its blocks: they are copied to the host, or its tokens, its own output included, are
computed again when its turn comes, whichever is expected to take less time. Nothing here knows
tensors, text or the time: `now` is given.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Literal, get_args

import msgspec

from octavo.core.block_pool import expect
from octavo.core.fallback import FallbackPolicy
from octavo.core.kv_manager import KVManager
from octavo.core.plan import PlanRow, RowResult, StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import Load, Policy, StepLatencies
from octavo.core.rates import Rates
from octavo.core.request import Request, Status
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    QueueFullError,
    RequestError,
)
from octavo.outputs import FinishReason

PreemptionMode = Literal["auto", "swap", "recompute"]

MAX_OVERTAKEN = 32  # requests that may start before an earlier one that memory does not hold yet
LOOK_AHEAD = 8  # requests without room that are looked past in one step
MAX_DISPLACED = 3  # times that a request may be displaced before it has gained another token
MIN_SHARE = 64  # tokens; smaller pieces of a long prompt cost more than they give others


class Update(msgspec.Struct, array_like=True, frozen=True, gc=False):
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
    that runs alone always ends. preemption_mode: whether a victim's blocks are copied to the
    host (if the KV manager has a host pool, and room there) or computed again; auto takes what
    is expected to be quicker, from the times between `schedule` and `commit`.
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
    ) -> None:
        _check_limits(kv, max_model_len, preemption_mode)
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.preemption_mode = preemption_mode
        self.rates = Rates()
        self.num_preemptions = 0  # all of them: for memory, and displaced ones
        self.num_displaced = 0
        self.num_swap_outs = 0
        self.peak_running = 0
        self.fallback = FallbackPolicy(policy)
        self._groups: dict[str, dict[int, Request]] = {}  # request id -> index -> live choice
        self._running: dict[Request, None] = {}
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._serial = 0
        self._step = 0
        self._planned: list[Request] = []
        self._planned_at = 0.0
        # Of the step being planned:
        self._now = 0.0
        self._since_last = 0.0
        self._budget = 0  # tokens
        self._left = 0  # of them, not yet handed out
        self._sequences = 0  # requests that may run
        self._grants: dict[Request, int] = {}
        self._unfinished: list[Request] = []  # running ones that lagged by more than one token
        self._passed: list[Request] = []  # waiting ones that memory does not hold
        self._reserved_blocks = 0  # blocks that running requests still need
        self._preempted: set[Request] = set()
        self._in_flight: set[bytes] = set()  # names of blocks that this step computes

    # Coming and going.

    def add(self, request: Request) -> None:
        """Let `request` wait for its turn. Raises RequestError if it can never be served, and
        QueueFullError if the policy turns it away."""
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
        self._now = max(self._now, request.arrival_time)
        if self.fallback.is_adaptive and (reason := self.fallback.refusal(self._load(()))):
            raise QueueFullError(reason)
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
        return sum(request.status is Status.SWAPPED for request in self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait with nothing on the host: new ones, and those to compute again."""
        return len(self._waiting) - self.num_swapped

    @property
    def policy_errors(self) -> int:
        """How often the policy failed and was replaced, or its `weight_fn` counted as 0."""
        return self.fallback.errors + int(getattr(self.policy, "weight_faults", 0))

    def slots(self) -> dict[str, tuple[int, int, int]]:
        """Of each running choice, by its id: slots held, written, and shared with others."""
        return {request.seq_id: self.kv.usage_of(request) for request in self._running}

    def check(self) -> None:
        """Verify queues, groups and memory; raises EngineError. For tests and idle times."""
        live = {request for group in self._groups.values() for request in group.values()}
        expect(self._running.keys() | self._waiting.keys() == live, "a live request has no queue")
        expect(not self._running.keys() & self._waiting.keys(), "a request is in both queues")
        for request in live:
            running = request.status is Status.RUNNING
            expect(running == (request in self._running), f"{request!r} is in the wrong queue")
            expect(running or not request.table.blocks, f"{request!r} waits and holds blocks")
            swapped = request.status is Status.SWAPPED
            expect(swapped == bool(request.host_blocks), f"{request!r} is not where it says")
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
        """The next step; its rows are empty if nothing can run. Each plan must be committed.

        Times are in seconds of one clock; that between `schedule` and `commit` is taken for the
        step's.
        """
        self._since_last = max(now - self._planned_at, 0.0) if self._step else 0.0
        self._now = now
        self._passed.clear()
        self._preempted.clear()
        self._in_flight.clear()
        lagging = self._serve_due()
        self._set_budget(lagging)
        if lagging or self._waiting:
            self._serve_others(lagging)
        return self._plan()

    def _serve_due(self) -> list[Request]:
        """One token for each running request that lags by one; returns those that lag more."""
        due: list[Request] = []
        lagging: list[Request] = []
        for request in self._running:
            one = len(request.tokens) - request.num_computed == 1
            (due if one else lagging).append(request)
        self._grants = dict.fromkeys(due, 1)
        short = self.kv.grow_each(due)
        for request in short:
            del self._grants[request]
        for request in short:
            # One that gave way to an earlier one is not RUNNING any more.
            if request.status is Status.RUNNING and self._make_room(request):
                self._grants[request] = 1
        if self._preempted:
            lagging = [request for request in lagging if request.status is Status.RUNNING]
        return lagging

    def _load(self, lagging: Collection[Request]) -> Load:
        return Load(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self._grants.keys(),
            lagging,
            self._waiting.keys(),
            self._now,
            self.rates,
        )

    def _set_budget(self, lagging: list[Request]) -> None:
        due = len(self._grants)
        tokens, sequences = self.fallback.budget(self._load(lagging))
        # Whatever a policy says, those that lag can move and an idle engine can start.
        self._budget = min(max(tokens, due + 1), self.max_num_batched_tokens)
        self._left = self._budget - due
        self._sequences = min(max(sequences, 1), self.max_num_seqs)

    def _serve_others(self, lagging: list[Request]) -> None:
        """Hand the rest of the step to requests that lag by more than one token, or wait."""
        self._unfinished = lagging.copy()
        self._reserved_blocks = sum([self.kv.missing(request) for request in lagging])
        # After memory ran out, whoever came in would only be sent out again.
        entering = bool(self._waiting) and not self._preempted
        # Once nobody may enter, the urgent still may.
        pressing = entering and self.fallback.displaces
        for request in self._candidates(lagging, entering):
            if request.status is Status.RUNNING:
                entering = self._serve_lagging(request) and entering
            elif request in self._preempted:
                continue
            elif entering:
                entering = self._try_start(request)
            elif pressing:
                pressing = bool(self._victim_of(request, self._running)) and self._try_start(
                    request
                )
        self._top_up()
        for request in self._unfinished:
            if request not in self._grants and request.status is Status.RUNNING:
                request.waited += self._since_last  # it has its place, and waits all the same

    def _candidates(self, lagging: list[Request], entering: bool) -> Iterable[Request]:
        slots = self._sequences - len(self._running)
        if not entering or (slots <= 0 and not self.fallback.displaces):
            return self.fallback.order(lagging, self._now) if len(lagging) > 1 else lagging
        order = self.fallback.order([*lagging, *self._waiting], self._now)
        # A list, since starting a request takes it out of what `order` may iterate over.
        return list(islice(order, len(lagging) + max(slots, 0) + LOOK_AHEAD))

    def _serve_lagging(self, request: Request) -> bool:
        """Give a running request its share; False if memory ran out."""
        if not self._left:
            return True
        enough = self.kv.room(request) > 0
        if enough or self._make_room(request):
            self._grant(request)
        return enough

    def _grant(self, request: Request) -> None:
        """Hand out tokens to a request that has room for one at least."""
        lag = len(request.tokens) - request.num_computed
        count = min(lag, self._left)
        if count < lag and (self._waiting or len(self._running) > 1):
            count = min(count, max(self._left // 2, MIN_SHARE))
        self._assign_tokens(request, min(count, self.kv.room(request)))

    def _assign_tokens(self, request: Request, count: int) -> None:
        held, blocks = self._grants.get(request, 0), len(request.table)
        if count <= 0 or not self.kv.grow(request, held + count):
            raise EngineError(f"no blocks for {count} tokens of {request!r} after all")
        self._grants[request] = held + count
        self._left -= count
        self._reserved_blocks -= len(request.table) - blocks
        if self.kv.caching:
            size = self.kv.block_size
            first, end = request.num_computed // size, (request.num_computed + held + count) // size
            self._in_flight.update(request.block_hashes[first:end])

    def _top_up(self) -> None:
        """Hand out what is left when nobody else wants any."""
        for request in self._unfinished:
            if not self._left:
                break
            if request.status is not Status.RUNNING:
                continue
            held = self._grants.get(request, 0)
            count = min(request.lag - held, self._left, self.kv.room(request) - held)
            if count > 0:
                self._assign_tokens(request, count)

    # Giving way.

    def _make_room(self, request: Request) -> bool:
        """Preempt until `request` can grow by one token. False if it had to go itself."""
        while not self.kv.grow(request, 1):
            victim = self.fallback.victim(self._running.keys(), request, self._now)
            if victim is None:
                victim = request
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._left += self._grants.pop(request, 0)
        self._preempted.add(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._requeue(request)

    def _displace(self, request: Request) -> None:
        num_tokens, times = request.displaced
        again = num_tokens == len(request.tokens)
        request.displaced = len(request.tokens), times + 1 if again else 1
        self.num_displaced += 1
        self._preempt(request)

    def _requeue(self, request: Request) -> None:
        """Take all blocks from `request` and let it wait, before those that never ran."""
        if self._prefers_swap(request) and self.kv.swap_out(request):
            request.status = Status.SWAPPED
            self.num_swap_outs += 1
        else:
            self.kv.free(request)
            request.status = Status.PREEMPTED
        self._running.pop(request, None)
        request.waiting_since = self._now
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def _prefers_swap(self, request: Request) -> bool:
        if self.preemption_mode == "recompute" or not request.num_computed:
            return False
        if self.preemption_mode == "swap":
            return True
        tokens, blocks = self.kv.leaving_cost(request)
        token, block = self.rates.token_seconds, self.rates.block_seconds
        if token is None or block is None:
            return tokens > 0  # to learn what it costs
        return blocks * block < tokens * token

    # Starting.

    def _try_start(self, request: Request) -> bool:
        """Start a waiting request if it has its place and memory, or can displace for them.

        Returns whether those after it in the order should be tried too.
        """
        full = len(self._running) >= self._sequences
        crowded = full or not self._left or self.kv.pool.num_free <= self._spare()
        if crowded and not self._victim_of(request, self._running):
            return False
        found = self.kv.find(request)
        if self._computed_now(request, len(found)):
            return True
        victims = self._victims(request, found, full)
        if victims is None:
            self._passed.append(request)
            return self._may_overtake(request)
        for victim in victims:
            self._displace(victim)
        if victims and self.kv.shortage(request, found, 0) > 0:
            return False  # what they shared with others stayed; next time
        self._start(request, found)
        return True

    def _may_overtake(self, request: Request) -> bool:
        """Whether others may start before `request`, which memory does not hold yet.

        Not if it has run: newcomers would take the memory that it was sent away for lack of.
        """
        return (
            request.status is Status.WAITING
            and request.overtaken < MAX_OVERTAKEN
            and len(self._passed) < LOOK_AHEAD
        )

    def _computed_now(self, request: Request, found: int) -> bool:
        """Whether this step computes the next block of `request`, which can wait and share it."""
        names = request.block_hashes
        return (
            request.status is not Status.SWAPPED
            and found < len(names)
            and names[found] in self._in_flight
        )

    def _spare(self) -> int:
        """Blocks to leave free: what is promised, and one more for each running request."""
        return self._reserved_blocks + len(self._running) if self._running else 0

    def _victim_of(self, request: Request, staying: dict[Request, None]) -> Request | None:
        """Which of `staying` the waiting `request` may displace."""
        if not self.fallback.displaces:
            return None
        # Whatever a policy says, nobody is sent away for ever.
        may_go = {r: None for r in staying if r.displaced != (len(r.tokens), MAX_DISPLACED)}
        return self.fallback.victim(may_go.keys(), request, self._now)

    def _victims(self, request: Request, found: list[int], full: bool) -> list[Request] | None:
        """Whom to preempt so that `request` can start: often nobody; None if it must wait."""
        short = self.kv.shortage(request, found, self._spare())
        victims: list[Request] = []
        left = self._left
        staying = self._running
        while full or short > 0 or not left:
            victim = self._victim_of(request, staying)
            if victim is None:
                return None
            victims.append(victim)
            staying = {other: None for other in staying if other is not victim}
            # Of what it holds, what only it holds and is not found; its promise; its spare block.
            short -= self.kv.freed_by(victim, found) + self.kv.missing(victim) + 1
            if not staying:
                short = 0  # alone, every request fits
            left += self._grants.get(victim, 0)
            full = len(staying) >= self._sequences
        return victims

    def _start(self, request: Request, found: list[int]) -> None:
        if request.host_blocks:
            self.kv.swap_in(request)
        else:
            cached = self.kv.take(request, found)
            if request.status is Status.WAITING:
                request.num_cached_tokens = cached
                self.kv.count_query(request)
        request.waited = request.waited_at(self._now)
        request.status = Status.RUNNING
        request.overtaken = 0
        del self._waiting[request]
        self._running[request] = None
        self._unfinished.append(request)
        self.peak_running = max(self.peak_running, len(self._running))
        self._reserved_blocks += self.kv.missing(request)
        self._grant(request)
        for earlier in self._passed:
            earlier.overtaken += 1

    # The plan.

    def _plan(self) -> StepPlan:
        self._step += 1
        self._planned = list(self._grants)
        self._planned_at = self._now
        self.kv.note_written(self._budget - self._left)
        rows = tuple([_row(request, count) for request, count in self._grants.items()])
        return StepPlan(self._step, rows, self.kv.take_copies())

    # Taking in what the step gave.

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Update]:
        """Advance every request of `plan`; what each choice gained, in the plan's order.

        Raises EngineError if `plan` is not the last one, or `result` is not its result.
        """
        planned = self._take_planned(plan, result)
        self._now = now
        updates: list[Update] = []
        size, running = self.kv.block_size, Status.RUNNING
        for request, row, gained in zip(planned, plan.rows, result.rows, strict=True):
            if request.status is not running:
                continue  # aborted since
            if gained.error is not None:
                self._fail(request, gained.error, updates)
                continue
            computed = request.num_computed = row.start + len(row.token_ids)
            if computed // size > request.table.num_published:
                self.kv.publish(request)
            if row.num_prompt_logprobs is not None:
                _collect(request, row, gained)
            if len(row.samples) == 1:
                logprob = gained.logprobs[0] if gained.logprobs else None
                updates.append(self._advance(request, gained.token_ids[0], logprob))
            elif row.samples:
                self._draw_all(request, row, gained, updates)
        self._learn(plan, planned, updates)
        return updates

    def _take_planned(self, plan: StepPlan, result: StepResult) -> list[Request]:
        planned, self._planned = self._planned, []
        if not plan.step == result.step == self._step or not (
            len(planned) == len(plan.rows) == len(result.rows)
        ):
            raise EngineError(f"result {result.step} does not belong to plan {self._step}")
        return planned

    def observe_copies(self, blocks: int, seconds: float) -> None:
        """Tell what copying `blocks` blocks between pool and host took, if it was measured."""
        self.rates.note_copies(blocks, seconds)

    def _learn(self, plan: StepPlan, planned: list[Request], updates: list[Update]) -> None:
        tokens, seconds = self._budget - self._left, self._now - self._planned_at
        swapped = sum([copy.kind != "copy" for copy in plan.copies]) if plan.copies else 0
        if not swapped:
            self.rates.note_step(tokens, seconds)
        elif (usual := self.rates.seconds(tokens)) is not None:
            self.rates.note_copies(swapped, seconds - usual)
        if self.fallback.is_adaptive:
            self.fallback.observe(self._latencies(plan, planned, len(updates)))

    def _latencies(self, plan: StepPlan, planned: list[Request], num_tokens: int) -> StepLatencies:
        """How long each choice that gained a token had waited for it."""
        gaps: list[float] = []
        firsts: list[float] = []
        for request, row in zip(planned, plan.rows, strict=True):
            if len(request.tokens) == row.start + len(row.token_ids):
                continue  # nothing was drawn for it
            if request.last_token_at is None:
                firsts.append(self._now - request.arrival_time)
            else:
                gaps.append(self._now - request.last_token_at)
            request.last_token_at = self._now
        return StepLatencies(self._now, num_tokens, gaps, firsts)

    def _draw_all(
        self, request: Request, row: PlanRow, gained: RowResult, out: list[Update]
    ) -> None:
        """Fork, and add the first token of each choice."""
        choices = [request, *(self._fork(request, spec.index) for spec in row.samples[1:])]
        logprobs = gained.logprobs or (None,) * len(choices)
        for choice, token, logprob in zip(choices, gained.token_ids, logprobs, strict=True):
            out.append(self._advance(choice, token, logprob))
        for choice in reversed(choices):
            if choice.status is Status.RUNNING and len(self._running) > self.max_num_seqs:
                self._requeue(choice)

    def _fork(self, parent: Request, index: int) -> Request:
        child = parent.fork(index)
        child.last_token_at = self._now
        self.kv.fork(parent, child)
        child.status = Status.RUNNING
        self._running[child] = None
        self.peak_running = max(self.peak_running, len(self._running))
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


def _check_limits(kv: KVManager, max_model_len: int, preemption_mode: str) -> None:
    if max_model_len > kv.capacity:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the KV cache holds {kv.capacity} tokens; "
            f"lower max_model_len to {kv.capacity} or give the KV cache more memory"
        )
    if preemption_mode not in get_args(PreemptionMode):
        modes = ", ".join(get_args(PreemptionMode))
        raise ConfigError(f"preemption_mode must be one of {modes}, not {preemption_mode!r}")


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
