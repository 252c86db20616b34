"""Many steps at once, for simulations: while every step can only give each running request its
next token.

Such a step decides nothing: nothing waits that could start, no request lags by more than its next
token, and there are free blocks for all. What it changes is known before it is planned. A run of
them changes what `StepBuilder` and `Scheduler.commit` would change, by the KV manager's own
operations in the same order, without a plan; the results are the same, block ids included. An
engine computes its plans, so it has no use for this.
"""

from collections.abc import Sequence

from octavo.core.fallback import FallbackPolicy
from octavo.core.policy import FIFOScheduler, Load, Policy, PriorityScheduler, StepLatencies
from octavo.core.queues import Queues
from octavo.core.request import Request
from octavo.core.slo import SLOScheduler

# Their budgets depend on how many requests there are and on measured times, not on how far the
# requests have come, which is written back only when a run ends.
_COUNT_REQUESTS = (FIFOScheduler, PriorityScheduler, SLOScheduler)


def may_skip(policy: Policy) -> bool:
    """Whether steps may be skipped under `policy`."""
    return type(policy) in _COUNT_REQUESTS


class SteadyRun:
    """A run of steady steps over `queues`; used once, with no plan in flight.

    max_tokens, max_sequences: as in `StepBuilder`. window: the most tokens of a request. is_ahead:
    whether steps are planned ahead, so that the step after the last one of the run has to be
    steady too. committed_at: when the last step ended. token: what every request draws. most:
    steps that the run may have, by what the requests may still gain: none of them ends in it.
    """

    def __init__(
        self,
        queues: Queues,
        policy: FallbackPolicy,
        max_tokens: int,
        max_sequences: int,
        window: int,
        is_ahead: bool,
        committed_at: float,
        token: int,
    ) -> None:
        self._queues = queues
        self._kv = queues.kv
        self._policy = policy
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._is_ahead = is_ahead
        self._has_windows = any(spec.window is not None for spec in self._kv.groups)
        self._token = token
        self._step = 0
        self._requests = list(queues.running)
        self._starts = [request.num_computed for request in self._requests]
        # Which requests need new blocks in a step: those of its phase.
        self._phases: list[list[int]] = [[] for _ in range(self._kv.block_size)]
        self._due = dict.fromkeys(self._requests, 1).keys()
        self._last_at = committed_at
        self.most = 0
        if self._may_begin(window):
            size = self._kv.block_size
            for index, start in enumerate(self._starts):
                self._phases[-start % size].append(index)

    def _may_begin(self, window: int) -> bool:
        if not self._requests or not may_skip(self._policy.policy):
            return False
        if self._queues.waiting and (self._policy.displaces or self._varies):
            return False
        if self._is_ahead and self._has_windows:
            return False
        left = [self._steps_left(request, window) for request in self._requests]
        self.most = max(0, min(left))
        return self.most > 0

    @property
    def _varies(self) -> bool:
        """Whether the order of measuring and planning matters to what may start."""
        return self._is_ahead and self._policy.observes

    def _steps_left(self, request: Request, window: int) -> int:
        """Steps that `request` may be in before the one that ends it; 0 if it is not steady."""
        done = len(request.tokens) - request.num_prompt_tokens
        if not done or len(request.tokens) != request.num_computed + 1:
            return 0
        if request.constraint is not None or request.drafts or request.params.n > 1:
            return 0
        if self._policy.observes and request.last_token_at != self._last_at:
            return 0
        return min(request.max_tokens - done, window - len(request.tokens)) - 1

    def may_step(self, now: float) -> bool:
        """Whether the next step, planned at `now`, is steady."""
        if self._step >= self.most:
            return False
        kv, count = self._kv, len(self._requests)
        free = kv.pool.num_free - self._new_blocks(self._step)
        if free < (self._new_blocks(self._step + 1) if self._is_ahead else 0):
            return False
        sequences = self._max_sequences
        if self._policy.observes:
            _, wanted = self._policy.budget(self._load(now))
            sequences = min(max(wanted, 1), sequences)
        # As `StepBuilder._try_start`: no slot, or no memory beside a block for each running one.
        return not self._queues.waiting or count >= sequences or free <= count * kv.num_groups

    @property
    def blocks(self) -> int:
        """That requests hold during the next step."""
        return self._kv.pool.num_used + self._new_blocks(self._step)

    def _new_blocks(self, step: int) -> int:
        return len(self._phase(step)) * self._kv.num_groups

    def _phase(self, step: int) -> Sequence[int]:
        return self._phases[step % self._kv.block_size]

    def _load(self, now: float) -> Load:
        queues = self._queues
        return Load(
            self._max_tokens, self._max_sequences, self._due, [], queues.waiting.keys(), now,
            queues.rates,
        )  # fmt: skip

    def step(self, now: float, end: float) -> None:
        """The step that is planned at `now` and committed at `end`."""
        step, kv, count = self._step, self._kv, len(self._requests)
        if not step:
            short = kv.grow_each(self._requests)
            assert not short, "the blocks of a steady step were counted"
        else:
            for index in self._phase(step):
                self._write_back(index, step)
                kv.grow(self._requests[index], 1)
        if self._has_windows:
            self._note_written(step)
        self._step = step = step + 1
        for index in self._phase(step):  # whose last block is full now
            request = self._requests[index]
            self._write_back(index, step)
            kv.publish(request, request.num_computed)
        seconds = end - max(now, self._last_at)
        self._queues.rates.note_step(count, seconds)
        if self._policy.observes:
            gaps = [end - self._last_at] * count
            self._policy.observe(StepLatencies(end, count, gaps, [], seconds, count, 0))
        self._last_at = end

    def _write_back(self, index: int, steps: int) -> None:
        """Give one request what it has gained in the first `steps` steps."""
        request = self._requests[index]
        gained = self._starts[index] + steps - request.num_computed
        if gained:
            request.tokens += [self._token] * gained
            request.num_computed += gained

    def _note_written(self, steps: int) -> None:
        for index in range(len(self._requests)):
            self._write_back(index, steps)
        self._kv.note_written(len(self._requests))

    def close(self) -> None:
        """Write back what the requests have gained."""
        if not self._step:
            return
        for index, request in enumerate(self._requests):
            self._write_back(index, self._step)
            if self._policy.observes:
                request.last_token_at = self._last_at
        if not self._has_windows:  # nothing is released in a run: its last step holds most
            self._kv.note_written(0)
