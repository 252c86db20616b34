"""What a caller gets back, in vLLM's names.

Each type has `as_dict()`, whose result `json.dumps` takes as it is: strings as keys, and no NaN or
infinity.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

# Not a package. With a `__path__`, an import of a name that is missing here asks the finders, of
# which `octavo._Refusals` knows the reason for vLLM's names.
__path__ = ()

FinishReason = Literal["stop", "length", "abort", "error"]

FLOOR = -9999.0  # the lowest log-probability in JSON, which has no infinity


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token at one position.

    `logprob` is the raw log-softmax, before bias, penalties, temperature and filters.
    `rank` counts from 1 (the likeliest token of the vocabulary).
    """

    logprob: float
    rank: int
    decoded_token: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "logprob": finite(self.logprob),
            "rank": self.rank,
            "decoded_token": self.decoded_token,
        }


# One position: token id -> Logprob, the sampled (or prompt) token first, then by rank.
PositionLogprobs = dict[int, Logprob]


def position_as_dict(position: PositionLogprobs) -> dict[str, Any]:
    """A position's entries under their token ids, which are strings in JSON."""
    return {str(token): entry.as_dict() for token, entry in position.items()}


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a model has made. arguments: JSON text; the beginning of it if it was cut off."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "arguments": self.arguments}


class AnswerMessage(msgspec.Struct, frozen=True):
    """What an answer's text says, taken apart.

    content: None if there is nothing but reasoning or calls. reasoning: None if there was none.
    """

    content: str | None = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "reasoning": self.reasoning,
            "tool_calls": [call.as_dict() for call in self.tool_calls],
        }

    def as_message(self) -> dict[str, Any]:
        """To append to a conversation."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return found


@dataclass(slots=True)
class CompletionOutput:
    """One choice of one request.

    `stop_reason` is the stop string or the stop token id that ended it; None for end-of-text,
    for the length limit, and while it runs. `message`: of a conversation's answer, once it has
    ended: reasoning and tool calls apart from what is said.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: AnswerMessage | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def as_dict(self) -> dict[str, Any]:
        total, positions = self.cumulative_logprob, self.logprobs
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "cumulative_logprob": None if total is None else finite(total),
            "logprobs": None if positions is None else [position_as_dict(p) for p in positions],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "message": None if self.message is None else self.message.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, as `time.time()` has them, and how often it was preempted.

    arrival_time: when it was given to the engine; first_scheduled_time: when it first started to
    run. Times that have not come yet are None. preemptions: of all its choices, once it is
    finished.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    error_param: str | None = None  # the request's field that causes it; None: the engine's fault

    def as_dict(self) -> dict[str, Any]:
        known = self.prompt_logprobs
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [choice.as_dict() for choice in self.outputs],
            "finished": self.finished,
            "prompt_logprobs": None
            if known is None
            else [None if position is None else position_as_dict(position) for position in known],
            "num_cached_tokens": self.num_cached_tokens,
            "metrics": None if self.metrics is None else self.metrics.as_dict(),
            "error": self.error,
            "error_param": self.error_param,
        }
