"""What goes out over HTTP: the shapes of answers and of the chunks of a stream.

One struct serves a whole answer and a chunk of a stream: a field that is UNSET is not sent.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from octavo.outputs import FinishReason

Reason = FinishReason | None
ChatReason = FinishReason | Literal["tool_calls"] | None
Maybe = msgspec.UnsetType


class Usage(msgspec.Struct):
    """`completion_tokens_details` of models that reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | Maybe = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int | None = None) -> "Usage":
        details = UNSET if reasoning is None else {"reasoning_tokens": reasoning}
        return cls(prompt, completion, prompt + completion, {"cached_tokens": cached}, details)


class CompletionLogprobs(msgspec.Struct):
    """Parallel arrays; `text_offset` counts characters from the start of `text`."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Reason
    stop_reason: int | str | None
    logprobs: CompletionLogprobs | None = None
    token_ids: Sequence[int] | Maybe = UNSET
    prompt_token_ids: Sequence[int] | Maybe = UNSET
    prompt_logprobs: Any = UNSET


class Completion(msgspec.Struct):
    """A whole completion, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | Maybe | None = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatFunction(msgspec.Struct):
    """`name` only where a call begins; `arguments` is JSON text, or more of it."""

    arguments: str
    name: str | Maybe = UNSET


class ChatToolCall(msgspec.Struct):
    """`index` in chunks, which have `id` and `type` only where a call begins."""

    function: ChatFunction
    index: int | Maybe = UNSET
    id: str | Maybe = UNSET
    type: Literal["function"] | Maybe = UNSET


class ChatMessage(msgspec.Struct):
    """`content` is null if there is nothing but reasoning or calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | Maybe = UNSET
    reasoning_content: str | Maybe = UNSET
    tool_calls: list[ChatToolCall] | Maybe = UNSET


class ChatDelta(msgspec.Struct):
    """`role` only in the first delta of a choice."""

    content: str | Maybe = UNSET
    role: str | Maybe = UNSET
    reasoning: str | Maybe = UNSET
    reasoning_content: str | Maybe = UNSET
    tool_calls: list[ChatToolCall] | Maybe = UNSET


class ChatChoice(msgspec.Struct):
    """`message` in a whole answer, `delta` in a chunk."""

    index: int
    finish_reason: ChatReason
    stop_reason: int | str | None
    message: ChatMessage | Maybe = UNSET
    delta: ChatDelta | Maybe = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | Maybe = UNSET


class ChatCompletion(msgspec.Struct):
    """A whole chat answer, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | Maybe | None = UNSET
    prompt_token_ids: Sequence[int] | Maybe = UNSET
    prompt_logprobs: Any = UNSET


class Model(msgspec.Struct):
    """`max_model_len` is null while the model is being loaded."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """`models` is for Codex CLI, which needs it there: no model has a description for it."""

    object: str
    data: list[Model]
    models: list[Any] = []


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | Maybe = UNSET


class Text(msgspec.Struct):
    prompt: str


class Links(msgspec.Struct):
    """`GET /`: what this is, and where to go."""

    name: str
    version: str
    models: str
    chat: str
    completions: str
    docs: str
    openapi: str
    health: str
    metrics: str


class Load(msgspec.Struct):
    """`GET /load`: requests in progress."""

    server_load: int


class Degraded(msgspec.Struct):
    """`GET /health` while some of several engines do not answer: how many do, and why others do
    not, by number."""

    serving: int
    down: dict[int, str]


class Version(msgspec.Struct):
    version: str
