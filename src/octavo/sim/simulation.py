"""A simulated engine: the real scheduler, KV manager and policy plan every step, and a cost model
says how long it takes.

The loop is the engine's (`engine.Engine.step`), on a clock that only the cost of steps moves.
Stretches in which nothing can be decided are skipped (`core.steady`), with the same result as
step by step. Not here: what the steps cost (`sim.cost`), where the requests come from
(`sim.workload`), nor what the figures mean (`sim.report`).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.core.plan import RowResult, RunnerLimits, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.scheduler import Scheduler
from octavo.core.steady import may_skip
from octavo.engine.scheduling import make_scheduler, queue_space
from octavo.errors import EngineError, QueueFullError
from octavo.sim.cost import StepCost, StepShape
from octavo.sim.record import Record
from octavo.sim.requests import DRAWN, Job, SimulatedRequest

_GAINED = RowResult("", ((DRAWN,),))
_COMPUTED = RowResult("")
_NOTHING = StepShape(0, 0, 0, 0, 0, 0, False, 0)
_LEAST = 3  # steps that are worth the preparations of skipping them


class _Step(NamedTuple):
    """A plan in flight. seconds: it takes; 0 if there is nothing to compute. blocks, unwritten:
    blocks held, and slots of its rows that it leaves unwritten."""

    plan: StepPlan
    shape: StepShape
    seconds: float
    blocks: int
    unwritten: int


class Simulation:
    """Runs `jobs`, which are sorted by arrival, to their end; used once.

    plans_ahead: whether the next step is planned while one is computed. max_concurrency: requests
    that the client has in flight at most; others arrive when one of those has ended. skips: False
    plans every step. on_plan: told of every plan, for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: RunnerLimits,
        policy: Policy,
        cost: StepCost,
        jobs: Sequence[Job],
        *,
        plans_ahead: bool = False,
        max_concurrency: int | None = None,
        skips: bool = True,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.scheduler: Scheduler = make_scheduler(config, limits, policy, plans_ahead)
        self.record = Record()
        self.now = 0.0
        self._config = config
        self._window = limits.max_model_len
        self._cost = cost
        self._jobs = jobs
        self._next = 0  # the first of them that has not arrived
        self._max_concurrency = max_concurrency or len(jobs)
        self._skips = skips and may_skip(policy)
        self._has_windows = any(spec.window is not None for spec in limits.kv_groups)
        self._on_plan = on_plan
        self._free_since = 0.0  # when the client had as many in flight as it may, last
        self._live: dict[str, SimulatedRequest] = {}
        self._submitted: deque[_Step] = deque()
        self._ends: list[tuple[int, str]] = []  # a heap: steps after which a request may end
        self._all_gained = False  # every running request, in the last step

    def run(self) -> Record:
        """Until every request has ended or was refused."""
        if self._jobs:
            self.now = self.record.started_at = self.record.ended_at = self._jobs[0].arrival
        while True:
            self._deliver()
            if self.scheduler.has_work():
                if not self._skip():
                    self._step()
            elif self._next < len(self._jobs):
                self.now = max(self.now, self._jobs[self._next].arrival)
            else:
                break
        self._close()
        return self.record

    def _close(self) -> None:
        scheduler, record = self.scheduler, self.record
        usage = scheduler.kv.usage()
        record.total_slots = usage.total_slots
        record.most_running = scheduler.peak_running
        record.most_held, record.most_written = usage.most_held_slots, usage.most_written_slots
        record.cached_tokens = usage.cached_tokens
        record.swapped = scheduler.num_swap_outs
        record.recomputed = scheduler.num_preemptions - record.swapped
        record.displaced = scheduler.num_displaced
        scheduler.close()

    # Requests in.

    def _deliver(self) -> None:
        """Add what has arrived."""
        while self._next_arrival() <= self.now:
            number = self._next
            self._next += 1
            self._add(number, self._jobs[number])

    def _next_arrival(self) -> float:
        if self._next == len(self._jobs) or len(self._live) >= self._max_concurrency:
            return float("inf")
        return self._jobs[self._next].arrival

    def _add(self, number: int, job: Job) -> None:
        if job.prompt_len + job.output_len > self._window:
            self.record.refuse(f"longer than max_model_len ({self._window})")
            return
        if queue_space(self._config, self.scheduler) <= 0:
            self.record.refuse(f"max_waiting ({self._config.waiting_limit}) requests waited")
            return
        request = SimulatedRequest(number, job, max(job.arrival, self._free_since))
        try:
            self.scheduler.add(request)
        except QueueFullError:
            self.record.refuse(f"refused by the scheduler {self.scheduler.policy.name}")
            return
        self._live[request.request_id] = request

    # Steps, as `Engine.step` has them.

    def _step(self) -> None:
        if not self._submitted:
            self._plan()
        if self.scheduler.may_plan_ahead and self._submitted[0].seconds:
            self._plan()
        self._commit()
        if self._submitted and not self._submitted[0].seconds:
            self._finish(self._submitted.popleft().plan)

    def _plan(self) -> None:
        plan = self.scheduler.schedule(self.now)
        if self._on_plan is not None:
            self._on_plan(plan)
        if plan.rows or plan.copies:
            kv = self.scheduler.kv
            shape, unwritten = shape_of(plan, kv.block_size)
            if kv.pool.num_shared:
                single = [row for row in plan.rows if len(row.token_ids) == 1]
                read = ((self._live[row.request_id], row.start + 1) for row in single)
                shape = shape._replace(kv_shared=self._shared(read))
            seconds = self._cost.seconds(shape)
            self._submitted.append(_Step(plan, shape, seconds, kv.pool.num_used, unwritten))
        else:
            self._submitted.append(_Step(plan, _NOTHING, 0.0, 0, 0))

    def _shared(self, reading: Iterable[tuple[SimulatedRequest, int]]) -> int:
        """Tokens that requests, each of which reads so many, read from blocks of others among
        them, all but one reading of each."""
        kv, shared = self.scheduler.kv, 0
        full = [group for group, spec in enumerate(kv.groups) if spec.window is None]
        if not kv.pool.num_shared or not full:
            return 0
        readers = Counter[int]()
        for request, tokens in reading:
            if blocks := min(request.shared_len, tokens) // kv.block_size:
                # Equal last blocks of prefixes follow equal blocks.
                last = request.table.groups[full[0]][blocks - 1]
                shared += blocks * kv.block_size if readers[last] else 0
                readers[last] += 1
        return shared

    def _commit(self) -> None:
        step = self._submitted.popleft()
        if not step.seconds:
            self._idle(step.plan)
            return
        self._note(step.seconds, step.shape.sequences, step.blocks, step.unwritten)
        self._finish(step.plan, self.now + step.seconds)

    def _note(self, seconds: float, running: int, blocks: int, unwritten: int) -> None:
        """Record a step. unwritten: slots of the rows' last blocks, in one group."""
        kv = self.scheduler.kv
        held, unwritten = blocks * kv.block_size, unwritten * kv.num_groups
        self.record.step(seconds, running, held, unwritten)

    def _idle(self, plan: StepPlan) -> None:
        """Nothing can run now: the next request may change that."""
        self._finish(plan)
        arrival = self._next_arrival()
        if self.scheduler.has_work() and arrival == float("inf"):
            raise EngineError(f"{len(self._live)} requests wait, and none of them can run")
        self.now = max(self.now, arrival)

    def _finish(self, plan: StepPlan, end: float | None = None) -> None:
        """Commit `plan` at `end`, or at once."""
        before, self.now = self.now, self.now if end is None else end
        rows = [_GAINED if row.samples else _COMPUTED for row in plan.rows]
        updates = self.scheduler.commit(plan, StepResult(plan.step, tuple(rows)), self.now)
        now, steady, ended = self.now, 0, 0
        for update in updates:
            request = self._live[update.request_id]
            if request.gained_at == before:
                steady += 1
            elif request.gained_at < 0:
                request.first_at = now
                heappush(self._ends, (self.record.steps + request.max_tokens - 1, request.seq_id))
            else:
                self.record.gap(now - request.gained_at)
            request.gained_at = now
            if update.finish_reason is not None:
                ended += 1
                self._end(request)
        if steady:
            self.record.gap(now - before, steady)
        self._all_gained = len(updates) - ended == self.scheduler.num_running

    def _end(self, request: SimulatedRequest) -> None:
        if len(self._live) == self._max_concurrency:
            self._free_since = self.now
        del self._live[request.request_id]
        self.record.end(
            request.arrival_time, request.first_at, request.gained_at,
            request.num_prompt_tokens, request.num_output_tokens, self.now,
        )  # fmt: skip

    # Skipping.

    def _skip(self) -> bool:
        """Skip the steps that can be, if they are many enough; False if none was."""
        if not self._skips or self._steps_left() < _LEAST:
            return False
        if self._submitted:
            if not self._may_drain():
                return False
            self._commit()
        if not self._all_gained:
            return False
        count = self._advance()
        if count and self.scheduler.plans_ahead:
            self._plan()  # as it was while the last step was computed, before what came then
        return count > 0

    def _steps_left(self) -> int:
        """Steps before one in which a request may end; more if all of them were preempted."""
        ends, steps = self._ends, self.record.steps
        while ends:
            end, name = ends[0]
            request = self._live.get(name)
            if request is not None and end > steps:
                return end - steps
            heappop(ends)
            if request is not None:  # it was preempted, and is late
                left = request.max_tokens - request.num_output_tokens
                heappush(ends, (steps + max(left, 1), name))
        return 0

    def _may_drain(self) -> bool:
        """Whether the plan in flight can be committed before the next one is made: both serve the
        same requests in any case."""
        (plan,) = self._submitted
        queues, pool = self.scheduler.queues, self.scheduler.kv.pool
        count, rows = len(queues.running), plan.plan.rows
        if queues.waiting or plan.plan.copies or not plan.shape.samples == len(rows) == count:
            return False
        if self._has_windows or pool.num_free < 2 * count * self.scheduler.kv.num_groups:
            return False
        # Of those that end a prompt, be it with a row of one token, no end is known yet.
        rows_of = [(self._live[row.request_id], len(row.token_ids)) for row in rows]
        prompts = [request for request, size in rows_of if size > 1 or request.gained_at < 0]
        if any(r.max_tokens - r.num_output_tokens < _LEAST for r in prompts):
            return False
        return self._next_arrival() > self.now + plan.seconds

    def _advance(self) -> int:
        """Skip, with no plan in flight and each running request due its next token."""
        requests = [self._live[r.request_id] for r in self.scheduler.queues.running]
        size, count = self.scheduler.kv.block_size, len(requests)
        computed = [request.num_computed for request in requests]
        read, unwritten = sum(computed) + count, sum([-number % size for number in computed])
        new = [0] * size  # requests that begin a block, by the number of the step
        for number in computed:
            new[-number % size] += 1
        shared = self._shared((request, request.num_computed + 1) for request in requests)
        arrival = self._next_arrival()
        step = 0

        def end_of(blocks: int) -> float | None:
            nonlocal read, unwritten, step
            if arrival <= self.now:
                return None
            shape = StepShape(count, count, read, 0, 0, count, True, 0, shared)
            seconds = self._cost.seconds(shape)
            end = self.now + seconds
            unwritten += size * new[step % size] - count
            self._note(seconds, count, blocks, unwritten)
            self.record.gap(end - self.now, count)
            read += count
            step += 1
            self.now = end
            return end

        self.scheduler.advance(self.now, DRAWN, end_of)
        if step:
            for request in requests:
                request.gained_at = self.now
        return step


def shape_of(plan: StepPlan, block_size: int) -> tuple[StepShape, int]:
    """What a plan computes; and the slots of its rows' last blocks that it leaves unwritten."""
    tokens = samples = read = prefill = pairs = unwritten = 0
    for row in plan.rows:
        start, count = row.start, len(row.token_ids)
        if count == 1:
            read += start + 1
        else:
            prefill += count
            pairs += count * start + count * (count + 1) // 2
        tokens += count
        samples += len(row.samples)
        unwritten += -(start + count) % block_size
    sequences = len(plan.rows)
    captured = prefill == 0 and samples == sequences > 0
    shape = StepShape(tokens, samples, read, prefill, pairs, sequences, captured, len(plan.copies))
    return shape, unwritten
