"""What goes out over `/v1/responses`: the response, its items, its usage.

Items are frozen: one that grows is a new one, so that an event keeps what it was made with.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from octavo.server.replies import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[TokenLogprob] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: tuple[OutputText, ...]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """A summary is not made."""

    id: str
    status: Status
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """namespace: of the tool, null for one that has none."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomToolCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = None


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class ResponsesUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and what was asked for. Stateless: nothing of it is kept."""

    events: ClassVar[str] = "events in OpenAI's order, each named as its `type`"
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: tuple[Item, ...] = ()
    usage: ResponsesUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    tools: Sequence[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    reasoning: dict[str, str | None]
    text: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str]
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    background: Literal[False] = False
    previous_response_id: None = None
    max_tool_calls: None = None
