"""A scheduler on a bench: over the strict runner of `engine.fake`, checked after each step.

Tokens are a hash of their history, which the runner reads only through the plan's blocks; what a
request must answer is known without scheduler or blocks (`alone`).
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.kv_manager import KVManager
from octavo.core.plan import (
    FULL,
    CacheSpec,
    RowResult,
    RunnerLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.core.policy import FIFOScheduler, Policy
from octavo.core.request import Request
from octavo.core.scheduler import PreemptionMode, Scheduler, Update
from octavo.core.submission import Submission
from octavo.engine.fake import FakeRunner
from octavo.params import SamplingParams

VOCAB = 1000
EOS = 2


def draw(history: tuple[int, ...], spec: SampleSpec) -> int:
    """The next token: of the history, and of (seed, index, position) unless greedy."""
    noise = () if spec.params.greedy else (spec.seed, spec.index, spec.position)
    past = hash((spec.prompt_ids, spec.output_ids)) if spec.params.needs_history else 0
    token = hash((history, noise, past)) % VOCAB
    if spec.params.logit_bias:  # a bias of 100 wins
        token = max(spec.params.logit_bias, key=lambda t: spec.params.logit_bias[t])
    while spec.min_tokens_left > 0 and token in spec.stop_ids:
        token = (token + 7) % VOCAB
    return token


def logprobs_of(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs((token,), (-float(position) - 1.0,), (1,))


class SimulatedRunner(FakeRunner):
    """The strict runner, over as many blocks as are asked for, with draws of its own."""

    def __init__(self, block_size: int, groups: Sequence[CacheSpec] = (FULL,)) -> None:
        limits = RunnerLimits(0, block_size, 0, 0, VOCAB, kv_groups=tuple(groups))
        super().__init__(limits, lambda history, spec: draw(tuple(history), spec))

    def logprobs(self, token: int, count: int, position: int) -> TokenLogprobs:
        return logprobs_of(token, position)

    def _choose(self, history: Sequence[int], spec: SampleSpec) -> int:
        assert self.next_token  # also where it draws what a sampler must not
        return self.next_token(history, spec)


class QuickRunner(SimulatedRunner):
    """Draws the same token always and looks at nothing: for tests of time alone."""

    def execute(self, plan: StepPlan) -> StepResult:
        rows = [RowResult(row.request_id, ((5,),) * len(row.samples)) for row in plan.rows]
        return StepResult(plan.step, tuple(rows))


def modelled(
    fixed: float = 0.01, token: float = 1e-4, read: float = 1e-7, block: float = 1e-4
) -> Callable[[StepPlan], float]:
    """Seconds of a step: weights once, each token, each token of history, each block swapped."""

    def cost(plan: StepPlan) -> float:
        history = sum(row.start for row in plan.rows)
        swapped = sum(copy.kind != "copy" for copy in plan.copies)
        compute = fixed + token * plan.num_tokens + read * history if plan.rows else 0.0
        return compute + block * swapped

    return cost


@dataclass
class Outcome:
    """What one choice gave in all its updates."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class Bench:
    """A scheduler over a simulated runner, checked after each step."""

    def __init__(
        self,
        *,
        blocks: int = 200,
        block_size: int = 16,
        budget: int = 64,
        seqs: int = 32,
        window: int | None = None,
        caching: bool = True,
        policy: Policy | None = None,
        check: bool = True,
        mode: PreemptionMode = "auto",
        cost: Callable[[StepPlan], float] = lambda plan: 0.01,
        quick: bool = False,
        groups: Sequence[CacheSpec] = (FULL,),
        ahead: bool = False,
        **kv_options: int,
    ) -> None:
        kv_options.setdefault("max_chunk", budget)
        self.kv = KVManager(blocks, block_size, caching, groups=groups, **kv_options)
        self.scheduler = Scheduler(
            self.kv,
            policy or FIFOScheduler(),
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=min(window or 10**9, self.kv.capacity),
            preemption_mode=mode,
            plans_ahead=ahead,
        )
        self.runner = (QuickRunner if quick else SimulatedRunner)(block_size, groups)
        self.budget = budget
        self.seqs = seqs
        self.now = 0.0
        self.steps = 0
        self.check = check and not quick
        self.cost = cost
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.proposer: Callable[[Request], Sequence[int]] | None = None

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request

    def step(self, depth: int = 1) -> list[Update]:
        """Schedule a plan; commit the oldest ones until fewer than `depth` are in flight, or
        none, where the next one must wait for that."""
        self.schedule()
        updates: list[Update] = []
        ahead = not self.scheduler.plans_ahead or self.scheduler.may_plan_ahead
        while len(self.in_flight) >= (depth if ahead else 1):
            updates += self.commit()
        return updates

    def schedule(self) -> StepPlan:
        self.steps += 1
        if self.proposer:
            for request in self.scheduler.queues.running:
                drafts = self.proposer(request)
                self.scheduler.propose(request.request_id, request.index, drafts)
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        assert plan.num_tokens <= self.budget
        assert len(plan.rows) <= self.seqs
        if self.check:
            self.scheduler.check()
            for earlier in self.in_flight:
                self._check_apart(earlier, plan)
        self.in_flight.append(plan)
        return plan

    def commit(self) -> list[Update]:
        """Execute and commit the oldest plan in flight."""
        plan = self.in_flight.popleft()
        result = self.runner.execute(plan)
        self.now += self.cost(plan)
        updates = self.scheduler.commit(plan, result, self.now)
        if self.check:
            self.scheduler.check()
        for update in updates:
            self._note(update)
        return updates

    def drain(self) -> None:
        while self.in_flight:
            self.commit()

    def _check_apart(self, earlier: StepPlan, later: StepPlan) -> None:
        """`later` writes to no block that a row of another request in `earlier` sees."""
        size = self.kv.block_size
        owners = {
            block: row.request_id
            for row in earlier.rows
            for spec, blocks in zip(self.kv.groups, row.block_ids, strict=True)
            for block in blocks[spec.first_needed(row.start) // size :]
        }
        assert not {copy.target for copy in later.copies if copy.kind != "out"} & owners.keys()
        for row in later.rows:
            end = row.start + len(row.token_ids)
            for blocks in row.block_ids:
                for block in blocks[row.start // size : -(-end // size)]:
                    assert owners.get(block, row.request_id) == row.request_id, "a block in use"

    def _note(self, update: Update) -> None:
        key = (update.request_id, update.index)
        outcome = self.outcomes.setdefault(key, Outcome([], []))
        assert outcome.finish_reason is None, f"{key} goes on after its end"
        outcome.token_ids += update.token_ids
        outcome.logprobs += update.logprobs
        outcome.finish_reason = update.finish_reason
        outcome.stop_reason = update.stop_reason
        outcome.num_cached_tokens = update.num_cached_tokens
        outcome.error = update.error
        if update.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is None, "prompt log-probabilities came twice"
            outcome.prompt_logprobs = update.prompt_logprobs

    def run(self, requests: Iterable[Request] = (), limit: int = 20_000, depth: int = 1) -> None:
        for request in requests:
            self.add(request)
        start = self.steps
        while self.scheduler.has_work():
            self.step(depth)
            assert self.steps - start < limit, "no end in sight"
        self.drain()
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is left behind, and the whole pool can be used again."""
        self.scheduler.check()
        assert self.kv.pool.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.num_swapped == 0
        assert not self.kv.take_copies()
        usage = self.kv.usage()
        assert usage.held_slots == usage.written_slots == 0


def make(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str | None = None,
    deadline: float | None = None,
    eos: tuple[int, ...] = (EOS,),
    **params: object,
) -> Request:
    """A request as the engine would make it; greedy unless a temperature is given."""
    options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, **params}
    sampling = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    ends = () if sampling.ignore_eos else eos
    submission = Submission(
        request_id,
        tuple(prompt),
        sampling,
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
    )
    return Request(
        submission,
        seed=sampling.seed or 0,
        max_tokens=max_tokens,
        arrival_time=arrival,
        stop_ids=(*ends, *(sampling.stop_token_ids or ())),
        eos_ids=ends,
    )


def alone(request: Request, window: int = 10**9) -> dict[int, list[int]]:
    """The tokens that each choice must have, from the definition: no scheduler, no blocks."""
    return {index: _choice(request, index, window) for index in range(request.params.n)}


def _choice(request: Request, index: int, window: int) -> list[int]:
    params = request.params
    prompt = tuple(request.tokens[: request.num_prompt_tokens])
    output: list[int] = []
    while len(output) < request.max_tokens and len(prompt) + len(output) < window:
        spec = SampleSpec(
            params,
            request.seed,
            index,
            len(output),
            prompt if params.needs_history else (),
            tuple(output) if params.needs_history else (),
            max(0, params.min_tokens - len(output)),
            request.stop_ids,
        )
        output.append(draw((*prompt, *output), spec))
        if output[-1] in request.stop_ids and len(output) > params.min_tokens:
            break
    return output


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 100_003 + length).choices(range(1000), k=length)


def same_as_alone(bench: Bench) -> None:
    for name in bench.requests:
        same_as_alone_of(bench, name)


def same_as_alone_of(bench: Bench, name: str) -> None:
    request = bench.requests[name]
    for index, tokens in alone(request, bench.scheduler.max_model_len).items():
        outcome = bench.outcomes[name, index]
        assert outcome.token_ids == tokens, name
        assert outcome.finish_reason in ("stop", "length")


def say(*script: int) -> Callable[[tuple[int, ...], SampleSpec], int]:
    return lambda history, spec: script[min(spec.position, len(script) - 1)]


def disturb(bench: Bench, rng: random.Random, number: int) -> set[str]:
    """Abort, end a choice of, or leave alone one of the requests r0 to r`number`, and now and then
    reset the prefix cache; the requests that were ended."""
    victim, ended = f"r{rng.randrange(number + 1)}", set[str]()
    if rng.random() < 0.15:
        bench.scheduler.abort(victim)
        ended.add(victim)
    elif rng.random() < 0.1:
        bench.scheduler.finish_choice(victim, rng.randrange(3))
        ended.add(victim)
    if rng.random() < 0.03:
        bench.kv.reset_prefix_cache()
    bench.scheduler.check()
    return ended
