"""A runner without weights: engine, scheduler and server are tested, and simulated, on it.

`FakeRunner` obeys the same contract as the real one and is stricter: it keeps a simulated KV
cache and reads each row's history only through the row's block ids, so a wrong block table, a
block handed out twice or a token not yet computed is an error and not a plausible answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.core.plan import (
    PlanRow,
    RowResult,
    RunnerLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    row_result,
)

NextToken = Callable[[Sequence[int], SampleSpec], int]


def hashed(history: Sequence[int], spec: SampleSpec, vocab_size: int = 256) -> int:
    """A next token that depends on every token so far, and on seed and choice if not greedy."""
    state = 1469598103934665603
    salt = () if spec.params.greedy else (spec.seed, spec.index, spec.position)
    for token in (*history, *salt):
        state = ((state ^ (token + 1)) * 1099511628211) % 2**64
    return state % vocab_size


@dataclass
class FakeRunner:
    """`next_token(history, spec)` chooses; `before_step` may raise, sleep or count."""

    limits: RunnerLimits = field(
        default_factory=lambda: RunnerLimits(
            num_blocks=257,
            block_size=16,
            block_bytes=1024,
            max_model_len=1024,
            vocab_size=256,
            eos_token_ids=(2,),
            num_host_blocks=256,
            model="fake",
            architecture="fake",
            dtype="none",
            kv_cache_dtype="none",
            device="none",
        )
    )
    next_token: NextToken | None = None
    before_step: Callable[[StepPlan], None] | None = None
    failing: set[str] = field(default_factory=set)
    steps: int = 0

    def __post_init__(self) -> None:
        self._pool: dict[int, dict[int, int]] = {}  # block -> offset -> token
        self._host: dict[int, dict[int, int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.before_step:
            self.before_step(plan)
        self._copy(plan)
        for row in plan.rows:
            self._write(row)
        return StepResult(plan.step, tuple(self._row(row) for row in plan.rows))

    def explain(self) -> dict[str, str]:
        return {"all": "fake: no weights"}

    def close(self) -> None:
        self._pool.clear()
        self._host.clear()

    def _copy(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            source = self._host if copy.kind == "in" else self._pool
            target = self._host if copy.kind == "out" else self._pool
            target[copy.target] = dict(source.get(copy.source, {}))

    def _write(self, row: PlanRow) -> None:
        size = self.limits.block_size
        for position, token in enumerate(row.token_ids, row.start):
            for blocks in row.block_ids:
                block = blocks[position // size]
                if block == 0:
                    raise AssertionError(f"{row.request_id} writes to the null block")
                self._pool.setdefault(block, {})[position % size] = token

    def _history(self, row: PlanRow) -> list[int]:
        size = self.limits.block_size
        end = row.start + len(row.token_ids)
        blocks = row.block_ids[0]
        return [self._pool[blocks[p // size]][p % size] for p in range(end)]

    def _row(self, row: PlanRow) -> RowResult:
        if row.request_id in self.failing:
            return RowResult(row.request_id, error="this row was told to fail")
        history = self._history(row) if row.samples else []
        tokens = [self._choose(history[: len(history) - spec.offset], spec) for spec in row.samples]
        logprobs = [
            None if spec.params.logprobs is None else self._logprobs(token, spec.params.logprobs)
            for token, spec in zip(tokens, row.samples, strict=True)
        ]
        prompt: tuple[TokenLogprobs, ...] = ()
        if row.num_prompt_logprobs is not None:
            count = row.num_prompt_logprobs
            prompt = tuple(self._logprobs(token, count) for token in row.prompt_targets)
        return row_result(row, tokens, logprobs, prompt)

    def _choose(self, history: Sequence[int], spec: SampleSpec) -> int:
        if self.next_token:
            token = self.next_token(history, spec)
        else:
            token = hashed(history, spec, self.limits.vocab_size)
        while spec.min_tokens_left > 0 and token in spec.stop_ids:
            token = (token + 1) % self.limits.vocab_size
        return token

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """Made-up values: the token itself is the likeliest, the next ids follow, halving."""
        ids = tuple((token + i) % self.limits.vocab_size for i in range(count))
        values = tuple(-math.log(2) * (i + 1) for i in range(count))
        return TokenLogprobs((token, *ids), (-math.log(2), *values), (1, *range(1, count + 1)))
