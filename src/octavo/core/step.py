"""One step while it is being planned: which requests it serves, and with how many tokens each.

A step serves
1. running requests that lag by one token: their next token is due, and nothing delays it; the
   policy's budget limits how long the rest of the step may take;
2. in the policy's order, running requests that lag by more, and waiting ones, if all their
   tokens fit in memory beside the blocks that running requests still need;
3. with the tokens that are left, drafts: tokens proposed to follow those of a request, which the
   same step computes and verifies.

A request that cannot catch up in this step gets at most half of the remaining tokens while
others want some: a long prompt slows short ones but never stops them, and the first in the order
has the largest share. A new request that lacks memory may be overtaken by at most
`MAX_OVERTAKEN` others.

When memory runs out, or the policy lets a waiting request displace a running one, the victim is
preempted. A request with a row in a plan in flight keeps its blocks until that plan is
committed: it is never preempted. One that awaits its next token from such a plan is not served
again before; or, where steps are planned ahead, only if the last plan draws that token: its row
then says which draw it is. Knows neither tensors nor text, and reads no clock.
"""

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from octavo.core.fallback import FallbackPolicy
from octavo.core.plan import NOT_DRAWN, PlanRow, StepPlan
from octavo.core.policy import Load
from octavo.core.prefix_cache import Prefix
from octavo.core.queues import Queues
from octavo.core.request import Request, Status
from octavo.errors import EngineError

MAX_OVERTAKEN = 32  # requests that may start before an earlier one that lacks memory
LOOK_AHEAD = 8  # requests lacking memory that are skipped in one step
MAX_DISPLACED = 3  # times that a request may be displaced before it has gained another token
MIN_SHARE = 64  # tokens; smaller chunks of a long prompt cost more than they give others


class PlannedStep(NamedTuple):
    """A plan in flight, and the requests of its rows.

    num_tokens: that it computes. computing: names of the full blocks that it computes; others
    wait for them and share them. draws: where steps are planned ahead, the requests that gain
    one token, and the number of its draw. blocked: whether a request in flight should have been
    preempted: everything must be committed before the next plan.
    """

    plan: StepPlan
    requests: list[Request]
    num_tokens: int
    computing: set[bytes]
    draws: dict[Request, int]
    blocked: bool


class StepBuilder:
    """Plans one step over `queues`; used once.

    max_tokens, max_sequences: the configured limits. in_flight: plans not yet committed.
    now: the time of planning; since_last: seconds since the previous step was planned.
    ahead: None, or where steps are planned ahead, the most tokens of a request.
    """

    def __init__(
        self,
        queues: Queues,
        policy: FallbackPolicy,
        max_tokens: int,
        max_sequences: int,
        in_flight: "deque[PlannedStep]",
        now: float,
        since_last: float,
        ahead: int | None = None,
    ) -> None:
        self._queues = queues
        self._kv = queues.kv
        self._policy = policy
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._in_flight = in_flight
        self._now = now
        self._since_last = since_last
        self._ahead = ahead
        self._budget = 0  # tokens of this step
        self._left = 0  # of them, not yet assigned
        self._sequences = 0  # requests that may run
        self._assigned: dict[Request, int] = {}  # tokens of each request in this step
        self._drafts: dict[Request, tuple[int, ...]] = {}  # that follow them
        self._unfinished: list[Request] = []  # running ones that lagged by more than one token
        self._lacking: list[Request] = []  # waiting ones that lack memory
        self._reserved_blocks = 0  # that running requests still need for the tokens they have
        self._preempted: set[Request] = set()
        self._out_of_memory = False
        self._blocked = False
        self._computing: set[bytes] = set()

    @property
    def budget(self) -> tuple[int, int, int]:
        """(tokens that the step may have, requests that may run, tokens that it has)."""
        return self._budget, self._sequences, self._budget - self._left

    def build(self, number: int) -> PlannedStep:
        """Plan step `number`. Its rows are empty if nothing can run."""
        lagging = self._serve_due()
        self._set_budget(lagging)
        if lagging or self._queues.waiting:
            self._serve_others(lagging)
        if self._left:
            self._assign_drafts()
        return self._plan(number)

    def _plan(self, number: int) -> PlannedStep:
        self._kv.note_written(self._budget - self._left)
        drafts = self._drafts
        before = self._in_flight[-1].draws if self._in_flight else {}
        rows = tuple(
            [
                _row(request, count, drafts.get(request, ()) if drafts else ())
                if request.num_computed < len(request.tokens)
                else _next_row(request, before[request])
                for request, count in self._assigned.items()
            ]
        )
        draws = {} if self._ahead is None else _single_draws(self._assigned, rows)
        for request, count in self._assigned.items():
            request.num_computed += count
            request.num_in_flight += 1
        for request, proposed in drafts.items():
            request.num_computed += len(proposed)
        plan = StepPlan(number, rows, self._kv.take_copies(), self._now)
        num_tokens = self._budget - self._left
        return PlannedStep(
            plan, list(self._assigned), num_tokens, self._computing, draws, self._blocked
        )

    # Assigning tokens.

    def _serve_due(self) -> list[Request]:
        """One token for each running request that lags by one; returns those that lag more."""
        due: list[Request] = []
        lagging: list[Request] = []
        before = self._in_flight[-1].draws if self._in_flight else {}
        for request in self._queues.running:
            lag = len(request.tokens) - request.num_computed
            if lag == 1:
                due.append(request)
            elif lag > 1:
                lagging.append(request)
            elif request in before and self._ahead and request.may_follow(self._ahead):
                due.append(request)
            # Else its next token comes from a plan in flight.
        self._assigned = dict.fromkeys(due, 1)
        short = self._kv.grow_each(due)
        for request in short:
            del self._assigned[request]
        for request in short:
            # One that was preempted for an earlier one is not RUNNING any more.
            if request.status is Status.RUNNING and self._preempt_for(request):
                self._assigned[request] = 1
        if self._preempted:
            lagging = [request for request in lagging if request.status is Status.RUNNING]
        return lagging

    def _set_budget(self, lagging: list[Request]) -> None:
        due = len(self._assigned)
        load = Load(
            self._max_tokens,
            self._max_sequences,
            self._assigned.keys(),
            lagging,
            self._queues.waiting.keys(),
            self._now,
            self._queues.rates,
        )
        tokens, sequences = self._policy.budget(load)
        # Whatever the policy answers, lagging requests progress and an idle engine can start one.
        self._budget = min(max(tokens, due + 1), self._max_tokens)
        self._left = self._budget - due
        self._sequences = min(max(sequences, 1), self._max_sequences)

    def _serve_others(self, lagging: list[Request]) -> None:
        """Assign the rest of the step to requests that lag by more than one token, or wait."""
        self._unfinished = lagging.copy()
        self._reserved_blocks = sum([self._kv.missing(request) for request in lagging])
        # After memory ran out, a request that started would only be preempted again.
        may_start = bool(self._queues.waiting) and not self._out_of_memory
        # Where no request may start otherwise, it may still displace another.
        may_displace = may_start and self._policy.displaces
        for request in self._candidates(lagging, may_start):
            if request.status is Status.RUNNING:
                may_start = self._serve_lagging(request) and may_start
            elif request in self._preempted:
                continue
            elif may_start:
                may_start = self._try_start(request)
            elif may_displace:
                victim = self._victim_of(request, self._queues.running)
                may_displace = bool(victim) and self._try_start(request)
        self._top_up()
        for request in self._unfinished:
            if request not in self._assigned and request.status is Status.RUNNING:
                request.waited_before += self._since_last  # running, but not served

    def _candidates(self, lagging: list[Request], may_start: bool) -> Iterable[Request]:
        slots = self._sequences - len(self._queues.running)
        if not may_start or (slots <= 0 and not self._policy.displaces):
            return self._policy.order(lagging, self._now) if len(lagging) > 1 else lagging
        order = self._policy.order([*lagging, *self._queues.waiting], self._now)
        # A list, since starting a request removes it from the dict that `order` may iterate over.
        return list(islice(order, len(lagging) + max(slots, 0) + LOOK_AHEAD))

    def _serve_lagging(self, request: Request) -> bool:
        """Assign its share to a running request; False if memory ran out."""
        if not self._left:
            return True
        enough = self._kv.max_growth(request) > 0
        if enough or self._preempt_for(request):
            self._assign_share(request)
        return enough

    def _assign_share(self, request: Request) -> None:
        """Assign tokens to a request that has memory for at least one."""
        lag = len(request.tokens) - request.num_computed
        count = min(lag, self._left)
        if count < lag and (self._queues.waiting or len(self._queues.running) > 1):
            count = min(count, max(self._left // 2, MIN_SHARE))
        self._assign_tokens(request, min(count, self._kv.max_growth(request)))

    def _assign_tokens(self, request: Request, count: int) -> None:
        """Assign `count` more tokens, with their blocks."""
        total, missing = self._assigned.get(request, 0) + count, self._kv.missing(request)
        if count <= 0 or not self._kv.grow(request, total):
            raise EngineError(f"no blocks for {count} tokens of {request!r}, which were counted")
        self._assigned[request] = total
        self._left -= count
        self._reserved_blocks -= missing - self._kv.missing(request)
        if self._kv.caching:
            size = self._kv.block_size
            first, end = request.num_computed // size, (request.num_computed + total) // size
            self._computing.update(request.block_hashes[first:end])

    def _top_up(self) -> None:
        """Assign the tokens that are left after every request had its share."""
        for request in self._unfinished:
            if not self._left:
                break
            if request.status is not Status.RUNNING:
                continue
            assigned = self._assigned.get(request, 0)
            count = min(request.lag - assigned, self._left, self._kv.max_growth(request) - assigned)
            if count > 0:
                self._assign_tokens(request, count)

    def _assign_drafts(self) -> None:
        """Assign the rest of the step to drafts, in blocks that no other request needs now."""
        for request, count in self._assigned.items():
            if not request.drafts or count != request.lag or request.to_fork:
                continue
            if self._kv.pool.num_free <= self._spare():
                return
            drafts = request.drafts[: min(self._left, self._kv.max_growth(request) - count)]
            if drafts and self._kv.grow(request, count + len(drafts)):
                self._drafts[request] = drafts
                self._left -= len(drafts)

    # Preempting.

    def _preempt_for(self, request: Request) -> bool:
        """Preempt others until `request` can grow by one token.

        False if it cannot in this step: it was preempted itself, or the victim has a row in a
        plan in flight, whose commit must come first.
        """
        while not self._kv.grow(request, 1):
            self._out_of_memory = True
            victim = self._policy.victim(self._queues.running.keys(), request, self._now)
            if victim is None:
                victim = request
            if victim.num_in_flight:
                self._blocked = True
                return False
            self._withdraw(victim)
            self._queues.preempt(victim, self._now, request)
            if victim is request:
                return False
        return True

    def _withdraw(self, victim: Request) -> None:
        """Withdraw this step's tokens from a request that is being preempted."""
        self._left += self._assigned.pop(victim, 0)
        self._preempted.add(victim)

    # Starting.

    def _try_start(self, request: Request) -> bool:
        """Start a waiting request if there is a slot and memory, or it can displace others.

        Returns whether the requests after it in the order should be tried too.
        """
        full = len(self._queues.running) >= self._sequences
        crowded = full or not self._left or self._kv.pool.num_free <= self._spare()
        if crowded and not self._victim_of(request, self._queues.running):
            return False
        found = self._kv.find(request)
        if self._is_being_computed(request, len(found)):
            return True
        victims = self._victims(request, found, full)
        if victims is None:
            self._lacking.append(request)
            return self._may_overtake(request)
        for victim in victims:
            self._withdraw(victim)
            self._queues.displace(victim, self._now, request)
        if victims and self._kv.shortage(request, found, 0) > 0:
            return False  # the victims shared blocks with others; retried in the next step
        self._start(request, found)
        return True

    def _may_overtake(self, request: Request) -> bool:
        """Whether others may start before `request`, which lacks memory.

        A preempted request may not be overtaken: newcomers would take the memory that it was
        preempted for.
        """
        return (
            request.status is Status.WAITING
            and request.overtaken < MAX_OVERTAKEN
            and len(self._lacking) < LOOK_AHEAD
        )

    def _is_being_computed(self, request: Request, found: int) -> bool:
        """Whether this step, or a plan in flight, computes the first block that `request` lacks:
        it can wait and share it."""
        names = request.block_hashes
        if request.status is Status.SWAPPED or found >= len(names):
            return False
        name = names[found]
        return name in self._computing or any(name in step.computing for step in self._in_flight)

    def _spare(self) -> int:
        """Blocks to leave free: the reserved ones, and for each running request one more in each
        KV group."""
        running = self._queues.running
        return self._reserved_blocks + len(running) * self._kv.num_groups if running else 0

    def _victim_of(self, request: Request, staying: Collection[Request]) -> Request | None:
        """Which of `staying` the waiting `request` may displace now."""
        if not self._policy.displaces:
            return None
        # Whatever the policy answers, no request is displaced indefinitely.
        candidates = {
            other: None
            for other in staying
            if other.displaced != (len(other.tokens), MAX_DISPLACED)
        }
        victim = self._policy.victim(candidates.keys(), request, self._now)
        if victim is not None and victim.num_in_flight:
            self._blocked = True
            return None
        return victim

    def _victims(self, request: Request, found: Prefix, full: bool) -> list[Request] | None:
        """The requests to displace so that `request` can start, most often none; None if it must
        wait."""
        short = self._kv.shortage(request, found, self._spare())
        victims: list[Request] = []
        left = self._left
        staying = self._queues.running
        while full or short > 0 or not left:
            victim = self._victim_of(request, staying)
            if victim is None:
                return None
            victims.append(victim)
            staying = {other: None for other in staying if other is not victim}
            # Blocks that only it holds and `request` does not share; the blocks reserved for it;
            # its spare blocks.
            reserved = self._kv.missing(victim) + self._kv.num_groups
            short -= self._kv.freed_by(victim, found) + reserved
            if not staying:
                short = 0  # alone, every request fits
            left += self._assigned.get(victim, 0)
            full = len(staying) >= self._sequences
        return victims

    def _start(self, request: Request, found: Prefix) -> None:
        if request.host_blocks:
            self._kv.swap_in(request)
        else:
            cached = self._kv.take(request, found)
            if request.status is Status.WAITING:
                request.num_cached_tokens = cached
                self._kv.count_query(request)
        request.waited_before = request.waited_at(self._now)
        if request.scheduled_at is None:
            request.scheduled_at = self._now
        request.overtaken = 0
        if request.status is Status.WAITING:
            self._queues.run(request)
        else:
            self._queues.resume(request, self._now)
        self._unfinished.append(request)
        self._reserved_blocks += self._kv.missing(request)
        self._assign_share(request)
        for earlier in self._lacking:
            earlier.overtaken += 1


def _single_draws(requests: Iterable[Request], rows: Iterable[PlanRow]) -> dict[Request, int]:
    """The requests that gain one token, and the number of its draw among all of the step."""
    found: dict[Request, int] = {}
    count = 0
    for request, row in zip(requests, rows, strict=True):
        if len(row.samples) == 1:
            found[request] = count
        count += len(row.samples)
    return found


def _next_row(request: Request, draw: int) -> PlanRow:
    """The token that the step before draws for `request`, by the number of that draw."""
    return PlanRow(
        request.seq_id, (NOT_DRAWN,), request.num_computed, request.table.ids,
        (request.next_spec(),), from_draw=draw,
    )  # fmt: skip


def _row(request: Request, count: int, drafts: tuple[int, ...]) -> PlanRow:
    """The next `count` tokens of `request`, and `drafts` after its last token."""
    start, tokens = request.num_computed, request.tokens
    end = start + count
    samples = request.sample_specs(drafts) if end == len(tokens) else ()
    if count == 1 and not drafts:
        ids: tuple[int, ...] = (tokens[start],)
    else:
        ids = (*tokens[start:end], *drafts)
    if request.wants_prompt_logprobs:
        targets = tuple(tokens[start + 1 : min(end + 1, request.num_prompt_tokens)])
        return PlanRow(
            request.seq_id, ids, start, request.table.ids, samples,
            request.params.prompt_logprobs, targets,
        )  # fmt: skip
    return PlanRow(request.seq_id, ids, start, request.table.ids, samples)
