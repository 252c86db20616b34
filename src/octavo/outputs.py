"""What a caller gets back, in vLLM's names."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token at one position.

    `logprob` is the raw log-softmax, before bias, penalties, temperature and filters.
    `rank` counts from 1 (the likeliest token of the vocabulary).
    """

    logprob: float
    rank: int
    decoded_token: str


# One position: token id -> Logprob, the sampled (or prompt) token first, then by rank.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of one request.

    `stop_reason` is the stop string or the stop token id that ended it; None for end-of-text,
    for the length limit, and while it runs.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds of the engine's monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: all its choices, finished or not."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
