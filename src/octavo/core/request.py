"""The state of a request: its tokens, how many are computed, and its status.

A `Request` is one sequence of tokens, that is, one choice. A request with n > 1 begins as
choice 0; when its prompt is computed the scheduler forks it into its other choices, which share
its checked `Submission` (`engine.admission`). A request that another engine has begun continues
as one `Request` for each unfinished choice, with its output so far. Only the scheduler and the
KV manager change a request. What can be derived is not stored.
"""

from collections.abc import Collection, Sequence
from enum import Enum

from octavo.core.block_table import BlockTable
from octavo.core.constraint import Constraint
from octavo.core.plan import SampleSpec, TokenLogprobs
from octavo.core.submission import Submission


class Status(Enum):
    """PREEMPTED: its blocks were released. SWAPPED: its blocks are in the host pool."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Clock:
    """The time of a scheduler, in seconds; it sets `now`, its requests read it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


def choice_id(request_id: str, index: int) -> str:
    """The id of one choice: that of the request for the first one."""
    return request_id if index == 0 else f"{request_id}#{index}"


class Request:
    """One choice of one request.

    seed: 64 bits; draws depend on (seed, index, position) alone. max_tokens: output tokens at
    most. stop_ids: ids that end it (end-of-text unless ignored, and the caller's). eos_ids:
    which of them are end-of-text. arrival_time: seconds of the engine's clock. output_ids: the
    tokens that another engine has generated; they have to be computed like the prompt. constraint:
    what its next token may be, after them.

    What scheduling policies may read is listed in docs/scheduling.md; `core.policy.RequestView`
    has the same names.
    """

    __slots__ = (
        "arrival_time", "block_hashes", "clock", "constraint", "displaced", "drafts", "eos_ids",
        "host_blocks", "index", "last_token_at", "max_tokens", "num_cached_tokens", "num_computed",
        "num_in_flight", "num_preemptions", "num_prompt_tokens", "overtaken", "params", "priority",
        "prompt_ids", "prompt_logprobs", "request_id", "scheduled_at", "seed", "seq_id", "serial",
        "status", "stop_ids", "submission", "table", "tokens", "waited_before", "waiting_since",
    )  # fmt: skip

    def __init__(
        self,
        submission: Submission,
        *,
        seed: int,
        max_tokens: int,
        arrival_time: float = 0.0,
        stop_ids: Collection[int] = (),
        eos_ids: Collection[int] = (),
        index: int = 0,
        output_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        assert submission.token_ids, "an empty prompt was admitted"
        assert max_tokens >= 1, "a request without a token to generate was admitted"
        self.submission = submission
        # Read in every step, so they are direct attributes.
        self.request_id = submission.request_id
        self.params = submission.params
        self.priority = submission.priority
        self.index = index
        self.constraint = constraint
        self.seq_id = choice_id(self.request_id, index)
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_ids = tuple(stop_ids)
        self.eos_ids = tuple(eos_ids)
        self.arrival_time = arrival_time

        self.tokens = [*submission.token_ids, *output_ids]  # prompt, then output
        self.num_prompt_tokens = len(submission.token_ids)
        # tokens[:num_computed], and drafts after them, have their KV in `table`, or a plan in
        # flight computes it.
        self.num_computed = 0
        self.num_in_flight = 0  # plans, scheduled and not yet committed, that have a row of it
        self.drafts: tuple[int, ...] = ()  # proposed to follow `tokens`; cleared when it gains one
        self.num_cached_tokens = 0  # prompt tokens found in the cache when it first ran
        self.status = Status.WAITING
        self.table = BlockTable()
        self.host_blocks: list[int] = []  # while swapped: host copies of what is computed
        self.block_hashes: list[bytes] = []  # of the full blocks of `tokens`, as far as needed
        # For samplers that look back; the same object at every step.
        self.prompt_ids = submission.token_ids if self.params.needs_history else ()
        self.prompt_logprobs: list[TokenLogprobs] = []  # of tokens[1:], as far as computed
        self.num_preemptions = 0
        self.serial = 0  # order of arrival at the scheduler, which sets it
        self.overtaken = 0  # requests started before this one while it lacked memory
        self.displaced = (0, 0)  # tokens when it was last displaced, and times with so many
        self.clock: Clock | None = None  # of its scheduler, which sets it
        self.waiting_since = arrival_time
        self.waited_before = 0.0  # seconds waited, up to waiting_since
        self.last_token_at: float | None = None
        self.scheduled_at: float | None = None  # when it first started to run

    @property
    def deadline(self) -> float | None:
        """When the caller wants the answer, in seconds of the engine's clock."""
        return self.submission.deadline

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def prompt_len(self) -> int:
        """The same as `num_prompt_tokens`."""
        return self.num_prompt_tokens

    @property
    def output_len(self) -> int:
        """The same as `num_output_tokens`."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def waited(self) -> float:
        """Total seconds waited, by its scheduler's clock."""
        return self.waited_at(self.waiting_since if self.clock is None else self.clock.now)

    @property
    def lag(self) -> int:
        """Tokens that must be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not yet complete.

        They are reported with the first output token, so nobody needs them after it.
        """
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
            and len(self.tokens) == self.num_prompt_tokens
        )

    @property
    def to_fork(self) -> bool:
        """Whether this one sequence still stands for all n choices."""
        return self.params.n > 1 and len(self.tokens) == self.num_prompt_tokens

    def waited_at(self, now: float) -> float:
        """Total seconds waited, up to `now`."""
        if self.status is Status.RUNNING:
            return self.waited_before
        return self.waited_before + now - self.waiting_since

    def fork(self, index: int) -> "Request":
        """Choice `index` of this request: the same tokens, no blocks yet."""
        child = Request(
            self.submission, seed=self.seed, max_tokens=self.max_tokens,
            arrival_time=self.arrival_time, stop_ids=self.stop_ids, eos_ids=self.eos_ids,
            index=index, constraint=self.constraint and self.constraint.copy(),
        )  # fmt: skip
        child.tokens = self.tokens.copy()
        child.block_hashes = self.block_hashes.copy()
        child.num_cached_tokens = self.num_cached_tokens
        child.serial, child.clock = self.serial, self.clock
        child.waited_before, child.waiting_since = self.waited_before, self.waiting_since
        child.scheduled_at = self.scheduled_at
        return child

    def may_follow(self, max_model_len: int) -> bool:
        """Whether its next step can be planned although a plan in flight draws the token for it.

        Not if that token ends the request for certain. A sampler that looks back may lack the
        last token only.
        """
        coming = self.num_computed + 1  # tokens, with those that plans in flight draw
        most = min(self.num_prompt_tokens + self.max_tokens, max_model_len)
        if self.constraint is not None and not self.constraint.steady:
            return False  # it needs every token before it says what may follow
        return coming < most and (not self.prompt_ids or coming == len(self.tokens) + 1)

    def next_spec(self) -> SampleSpec:
        """What to draw after the tokens that plans in flight draw, the last of which is
        computed next."""
        return self._spec(self.index, self.num_computed + 1 - self.num_prompt_tokens)

    def sample_specs(self, drafts: tuple[int, ...] = ()) -> tuple[SampleSpec, ...]:
        """What to draw once every token is computed: one choice, or all n before the fork.

        With `drafts` computed after the tokens: what follows the last token and each draft.
        """
        position = len(self.tokens) - self.num_prompt_tokens
        if drafts:
            count = len(drafts)
            return tuple(
                [
                    self._spec(self.index, position + i, drafts[:i], count - i)
                    for i in range(count + 1)
                ]
            )
        if position == 0 and self.params.n > 1:
            return tuple([self._spec(index, position) for index in range(self.params.n)])
        return (self._spec(self.index, position),)

    def _spec(
        self, index: int, position: int, drafts: tuple[int, ...] = (), offset: int = 0
    ) -> SampleSpec:
        params = self.params
        min_left = params.min_tokens - position
        return SampleSpec(
            params,
            self.seed,
            index,
            position,
            self.prompt_ids,
            (*self.tokens[self.num_prompt_tokens :], *drafts) if self.prompt_ids else (),
            min_left if min_left > 0 else 0,
            self.stop_ids,
            self.submission.bad_words,
            offset,
            None if self.constraint is None else self.constraint.mask(),
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.seq_id!r}, {self.status.value}, "
            f"{self.num_computed}/{len(self.tokens)} tokens)"
        )
