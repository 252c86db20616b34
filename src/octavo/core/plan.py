"""The frozen messages between the scheduler, which decides, and the runner, which computes.

A plan is self-contained, so the runner keeps no per-request state: the same plan gives the same
result, here or in another process. Lengths are in tokens, positions count from
0 in the request's own sequence, blocks are physical block ids of the KV pool.

The values created in every step are msgspec structs: as frozen as a dataclass, but created in
0.1 us instead of 1.1 us, and a step of 128 rows creates about 500. They contain no reference
cycles, so the garbage collector does not track them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from octavo.errors import ConfigError
from octavo.params import SamplingParams

MOST_TOKENS = 2**31 - 1  # of one sequence: lengths are 32-bit integers
NOT_DRAWN = -1  # the token id of a row whose token the step before draws


class TokenMask(Protocol):
    """The tokens that one choice may gain next."""

    def words(self) -> Any:
        """A NumPy array int32 [ceil(V / 32)]: bit i of word w is 1 where token 32 w + i may follow.

        Raises EngineError where it cannot be said; that ends the request.
        """
        ...


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """One token to draw from the logits of one of a row's tokens.

    The draw is a pure function of the logits and of this value; no state is kept between steps.

    offset: which of the row's tokens, counted back from the last one, which is 0.

    seed: the request's seed (64 bits); index: the choice; position: how many output tokens
        this choice already has. Random numbers are a function of these three alone.
    prompt_ids, output_ids: the tokens so far; empty unless `params.needs_history`.
    min_tokens_left: above 0, `stop_ids` cannot be drawn at this position.
    stop_ids: end-of-text ids (unless ignored) and the caller's stop ids.
    bad_words: each banned text as token sequences (from the tokenizer, made once).
    mask: the tokens that a grammar allows here; None for all.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    min_tokens_left: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    offset: int = 0
    mask: TokenMask | None = None


class PlanRow(msgspec.Struct, frozen=True, gc=False):
    """One request's tokens in a step.

    token_ids: the tokens to compute, at positions start, start + 1, ...
    block_ids: for each KV group, the blocks of the request in order; each covers start +
        len(token_ids) tokens. Blocks behind the window of a group are the null block 0.
        The same tuple object is passed until the table changes, so that it can be compared
        by identity.
    samples: empty while the prompt is not yet complete; else one spec, for the next token; at
        the end of a prompt with n > 1 one per choice. If the last k of `token_ids` are drafts,
        k + 1 specs of one choice, with offsets k, k - 1, ..., 0: each draws the token that
        follows, and the drafts are verified by the draws (see `num_gained`).
    prompt_targets: for prompt log-probabilities, the prompt tokens that follow each of
        `token_ids` (one fewer at the prompt's last token); `num_prompt_logprobs` says how many
        alternatives, None for off.
    from_draw: None, or for a row planned before its token was known: the token is draw number
        `from_draw` of the step before, counted over all its samples, and `token_ids` is
        (NOT_DRAWN,). The output of its spec lacks that token too. See `resolved`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    samples: tuple[SampleSpec, ...] = ()
    num_prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()
    from_draw: int | None = None

    @property
    def num_drafts(self) -> int:
        """How many of the last tokens are drafts."""
        return self.samples[0].offset if self.samples else 0


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy one whole block, in all layers of its KV group.

    `copy`: pool to pool; `out`: pool to host; `in`: back.
    """

    kind: Literal["copy", "out", "in"]
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """A step: first the copies, in order, then the rows, all at once.

    Steps are executed in the order of their numbers. planned_at: seconds of the engine's clock.
    """

    step: int
    rows: tuple[PlanRow, ...]
    copies: tuple[BlockCopy, ...] = ()
    planned_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position: the token itself first, then the likeliest, in order.

    `token_ids[0]` is the sampled (or prompt) token and `ranks[0]` its rank from 1; then the k
    likeliest tokens with ranks 1..k. The sampled token may occur a second time among them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What a row produced, or an error that ends only this request. error_param: the request's
    field that causes it; None for a fault of the engine.

    choices: for each choice that the row draws for, the tokens that it gained: one, and one more
        for each accepted draft. logprobs: of those tokens.
    """

    request_id: str
    choices: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    error_param: str | None = None


def num_gained(row: PlanRow, drawn: Sequence[int]) -> int:
    """How many of the tokens drawn for the samples of `row`, in order, count.

    With drafts: those up to the first that differs from its draft. It replaces the draft; later
    ones were drawn after a token that is not part of the answer.
    """
    num_drafts = row.num_drafts
    if not num_drafts:
        return len(drawn)
    drafts = row.token_ids[-num_drafts:]
    for count, (draft, token) in enumerate(zip(drafts, drawn, strict=False), 1):
        if draft != token:
            return count
    return num_drafts + 1


def row_result(
    row: PlanRow,
    drawn: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> RowResult:
    """The result of `row` from the tokens drawn for its samples, in order."""
    if row.num_drafts:
        count = num_gained(row, drawn)
        choices, entries = (tuple(drawn[:count]),), (tuple(logprobs[:count]),)
        return RowResult(row.request_id, choices, entries, prompt_logprobs)
    return RowResult(
        row.request_id,
        tuple([(token,) for token in drawn]),
        tuple([(entry,) for entry in logprobs]),
        prompt_logprobs,
    )


def draws(rows: Sequence[PlanRow], results: Sequence[RowResult]) -> list[int]:
    """The token of each sample of a step, in order; 0 for those of rows that no row may follow:
    rows with drafts, and failed ones, whose requests have ended."""
    drawn: list[int] = []
    for row, result in zip(rows, results, strict=True):
        if row.num_drafts or result.error is not None:
            drawn += [0] * len(row.samples)
        else:
            drawn += [tokens[0] for tokens in result.choices]
    return drawn


def resolved(rows: tuple[PlanRow, ...], drawn: Sequence[int]) -> tuple[PlanRow, ...]:
    """`rows` with the tokens that the step before drew; drawn: its `draws`."""
    return tuple(
        [row if row.from_draw is None else _followed(row, drawn[row.from_draw]) for row in rows]
    )


def _followed(row: PlanRow, token: int) -> PlanRow:
    (spec,) = row.samples
    if spec.params.needs_history:
        spec = msgspec.structs.replace(spec, output_ids=(*spec.output_ids, token))
    return PlanRow(row.request_id, (token,), row.start, row.block_ids, (spec,))


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """The results of a plan's rows, in the plan's order."""

    step: int
    rows: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a layer caches of a sequence; the layers of a KV group have equal ones.

    full: the keys and values of all its tokens. window: of the last `window` tokens, the current
    one included. state: one value of fixed size, whatever the length (recurrent layers).
    """

    kind: Literal["full", "window", "state"] = "full"
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "window") != (self.window is not None):
            raise ConfigError(f"a cache of kind {self.kind!r} has no window of {self.window!r}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1 token, not {self.window}")

    def first_needed(self, position: int) -> int:
        """The first token whose keys the query at `position`, and all later ones, need."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, num_blocks: int, chunk: int, block_size: int) -> int:
        """The most blocks held at once on the way to `num_blocks` blocks of tokens, computed at
        most `chunk` tokens at a time.

        Behind a window blocks are released when a block of tokens has been completed:

            window - 1 tokens, from     last token    chunk - 1 more, from
            within a block                            within a block
            [..|##][######][######]     [#.....]      [......][..|   ]
        """
        if self.window is None:
            return num_blocks
        behind, ahead = -(-(self.window - 1) // block_size), -(-(chunk - 1) // block_size)
        return min(num_blocks, behind + 1 + ahead)


FULL = CacheSpec()


def blocks_needed(groups: Sequence[CacheSpec], tokens: int, block_size: int, chunk: int = 1) -> int:
    """Physical blocks that a sequence of `tokens` tokens holds at most at once, in all groups."""
    blocks = -(-tokens // block_size)
    return sum([group.most_blocks(blocks, chunk, block_size) for group in groups])


def longest_sequence(groups: Sequence[CacheSpec], num_blocks: int, block_size: int) -> int:
    """The tokens of the longest sequence that `num_blocks` physical blocks can hold."""
    low, high = 0, MOST_TOKENS // block_size
    while low < high:
        middle = (low + high + 1) // 2
        fits = blocks_needed(groups, middle * block_size, block_size) <= num_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * block_size


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a loaded runner can do, as plain values that may cross a process boundary.

    num_blocks: KV blocks in the pool, the null block 0 included; each has `block_bytes` bytes
        over all layers of a KV group. num_host_blocks: blocks of the swap pool.
    kv_groups: what the layers of each group cache; a request has a block table for each.
    max_model_len: tokens of one request, prompt and output together; fits the pool.
    eos_token_ids: every id that ends a text. generation_defaults: sampling values that the
        checkpoint recommends. memory: the terms of the KV budget, in bytes.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_host_blocks: int = 0
    kv_groups: tuple[CacheSpec, ...] = (FULL,)
    model: str = ""
    architecture: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    device: str = ""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds, in sequences of `max_model_len` tokens."""
        size = self.block_size
        tokens = -(-self.max_model_len // size) * size
        needed = blocks_needed(self.kv_groups, tokens, size)
        return (self.num_blocks - 1) * tokens // needed
