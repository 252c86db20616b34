"""A runner without weights, for tests and simulations of engine, scheduler and server.

`FakeRunner` has the same interface as the real runner and is stricter. Each slot of its simulated
KV cache remembers what was written to it, at which position, in which step and for which KV
group, and a row's history is read only through the row's block ids. A wrong block table, a block
allocated twice, or a slot that is overwritten or not yet written fails an assertion immediately
instead of producing a plausible answer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.plan import (
    BlockCopy,
    PlanRow,
    RowResult,
    RunnerLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    draws,
    num_gained,
    resolved,
    row_result,
)
from octavo.errors import EngineError
from octavo.structured_outputs import FIELD

NextToken = Callable[[Sequence[int], SampleSpec], int]


def hashed(history: Sequence[int], spec: SampleSpec, vocab_size: int = 256) -> int:
    """A next token that depends on every token so far, and on seed and choice if not greedy."""
    state = 1469598103934665603
    salt = () if spec.params.greedy else (spec.seed, spec.index, spec.position)
    for token in (*history, *salt):
        state = ((state ^ (token + 1)) * 1099511628211) % 2**64
    return state % vocab_size


class Chain(NamedTuple):
    """A token and all before it. digest: a hash of the whole; equal ones mean equal histories."""

    before: "Chain | None"
    token: int
    digest: int


class Slot(NamedTuple):
    """What was written to a slot. chain: the history that ends there; group: the KV group."""

    position: int
    chain: Chain
    step: int
    group: int


@dataclass(slots=True)
class _Submitted:
    """A step, and its result once it is computed."""

    plan: StepPlan
    result: StepResult | None = None


@dataclass
class FakeRunner:
    """`next_token(history, spec)` chooses; `before_step` may raise, sleep or count.

    failing: requests whose rows fail. runs_ahead: see `Executor`. copies, tokens, drafts,
    accepted: counts of what was done. Raises AssertionError for a plan that the real runner would
    compute wrongly.
    """

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
    runs_ahead: bool = False
    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.copies = {"copy": 0, "out": 0, "in": 0}
        self._pool: dict[int, dict[int, Slot]] = {}  # block -> offset -> slot
        self._host: dict[int, dict[int, Slot]] = {}
        self._drawn: list[int] = []  # in the last step
        self._last: _Submitted | None = None

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes nothing before the result is asked for, or the next step submitted: as late
        as a device may."""
        last, self._last = self._last, _Submitted(plan)
        if last:
            self._finish(last)
        return functools.partial(self._finish, self._last)

    def _finish(self, submitted: "_Submitted") -> StepResult:
        if submitted.result is None:
            submitted.result = self.execute(submitted.plan)
        return submitted.result

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.before_step:
            self.before_step(plan)
        for copy in plan.copies:
            self._copy(copy)
        written: set[tuple[int, int]] = set()
        rows = resolved(plan.rows, self._drawn)
        for row in rows:
            self._write(row, plan.step, written)
        results = tuple(self._row(row, plan.step) for row in rows)
        self._drawn = draws(rows, results)
        return StepResult(plan.step, results)

    def explain(self) -> dict[str, str]:
        return {"all": "fake: no weights"}

    def close(self) -> None:
        self._pool.clear()
        self._host.clear()

    def logprobs(self, token: int, count: int, position: int) -> TokenLogprobs:
        """Artificial values: the token itself is the likeliest, the next ids follow, halving."""
        ids = tuple((token + i) % self.limits.vocab_size for i in range(count))
        values = tuple(-math.log(2) * (i + 1) for i in range(count))
        return TokenLogprobs((token, *ids), (-math.log(2), *values), (1, *range(1, count + 1)))

    # The cache.

    def _copy(self, copy: BlockCopy) -> None:
        source = self._host if copy.kind == "in" else self._pool
        target = self._host if copy.kind == "out" else self._pool
        assert copy.source in source, f"{copy} of a block never written"
        assert copy.target != 0, f"{copy} to the null block"
        target[copy.target] = dict(source[copy.source])
        self.copies[copy.kind] += 1

    def _write(self, row: PlanRow, step: int, written: set[tuple[int, int]]) -> None:
        """Put a row's tokens into its slots. `written`: the slots that this step has written."""
        size, end = self.limits.block_size, row.start + len(row.token_ids)
        assert row.token_ids, f"{row.request_id} computes nothing"
        assert len(row.block_ids) == len(self.limits.kv_groups), f"{row.request_id}: KV groups"
        for blocks in row.block_ids:
            assert len(blocks) == -(-end // size), f"{row.request_id} has {len(blocks)} blocks"
        chain = self._slot(row, 0, row.start - 1).chain if row.start else None
        for position, token in enumerate(row.token_ids, row.start):
            chain = Chain(chain, token, hash((chain.digest if chain else 0, token)))
            for group, blocks in enumerate(row.block_ids):
                block, offset = blocks[position // size], position % size
                assert block != 0, f"{row.request_id} writes to the null block"
                assert (block, offset) not in written, f"two rows write slot {block}:{offset}"
                written.add((block, offset))
                self._pool.setdefault(block, {})[offset] = Slot(position, chain, step, group)
        self.tokens += len(row.token_ids)

    def _slot(self, row: PlanRow, group: int, position: int) -> Slot:
        """The slot that a layer of `group` reads at a position of the row."""
        index, offset = divmod(position, self.limits.block_size)
        block = row.block_ids[group][index]
        slot = self._pool.get(block, {}).get(offset)
        assert slot, f"{row.request_id} reads slot {block}:{offset}, which was never written"
        assert slot.position == position, f"{row.request_id} reads {slot.position} as {position}"
        assert slot.group == group, f"{row.request_id} reads group {slot.group} in group {group}"
        return slot

    def _history(self, row: PlanRow, step: int) -> list[int]:
        """The row's tokens so far; every group must hold those that its queries see."""
        end = row.start + len(row.token_ids)
        chain: Chain | None = self._slot(row, 0, end - 1).chain
        chains: list[Chain] = []
        while chain:
            chains.append(chain)
            chain = chain.before
        chains.reverse()
        assert len(chains) == end, f"{row.request_id} has a history of {len(chains)} tokens"
        for group, spec in enumerate(self.limits.kv_groups):
            for position in range(spec.first_needed(row.start), end):
                slot, wanted = self._slot(row, group, position), chains[position].digest
                assert slot.chain.digest == wanted, f"{row.request_id} reads another history"
                new = position >= row.start
                assert new or slot.step < step, f"{row.request_id} reads what this step writes"
        history = [link.token for link in chains]
        assert tuple(history[row.start :]) == row.token_ids, f"{row.request_id} was overwritten"
        return history

    # The draws.

    def _row(self, row: PlanRow, step: int) -> RowResult:
        history = self._history(row, step)
        if row.request_id in self.failing:
            return RowResult(row.request_id, error="failed on purpose")
        end = len(history)
        try:
            tokens = [self._choose(history[: end - spec.offset], spec) for spec in row.samples]
        except EngineError as error:  # of a mask: the real sampler, too, fails the row alone
            return RowResult(row.request_id, error=str(error), error_param=error.param)
        logprobs = [
            None if count is None else self.logprobs(token, count, end - spec.offset)
            for token, spec in zip(tokens, row.samples, strict=True)
            for count in (spec.params.logprobs,)
        ]
        prompt: tuple[TokenLogprobs, ...] = ()
        if (count := row.num_prompt_logprobs) is not None:
            targets = enumerate(row.prompt_targets, row.start)
            prompt = tuple([self.logprobs(token, count, position) for position, token in targets])
        self.drafts += row.num_drafts
        self.accepted += num_gained(row, tokens) - 1 if row.num_drafts else 0
        return row_result(row, tokens, logprobs, prompt)

    def _choose(self, history: Sequence[int], spec: SampleSpec) -> int:
        if self.next_token:
            token = self.next_token(history, spec)
        else:
            token = hashed(history, spec, self.limits.vocab_size)
        while spec.min_tokens_left > 0 and token in spec.stop_ids:
            token = (token + 1) % self.limits.vocab_size
        if spec.mask is not None:
            words = spec.mask.words()
            if not words.any():
                raise EngineError("no token is left to draw", FIELD)
            while not words[token // 32] >> (token % 32) & 1:
                token = (token + 1) % self.limits.vocab_size
        return token
