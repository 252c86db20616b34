"""`POST /v1/responses`: OpenAI's Responses API, without a store.

A response is made of the same events whether it is streamed or whole: the stream tells of each
item as it grows, a whole response has the same items at once.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.log import get_logger
from octavo.outputs import CompletionOutput
from octavo.params import SamplingParams
from octavo.server.body import read_body
from octavo.server.conversation import Conversation, Dialogue, start
from octavo.server.errors import HTTPError
from octavo.server.logprobs import TokenFormatter, chat_logprobs
from octavo.server.protocol import parse
from octavo.server.replies import TokenLogprob
from octavo.server.responses_input import read_input
from octavo.server.responses_output import Output, StreamEvent
from octavo.server.responses_protocol import (
    LOGPROBS,
    Reasoning,
    ResponsesBody,
    field_names,
    responses_params,
)
from octavo.server.responses_replies import ResponseError, ResponseObject, ResponsesUsage
from octavo.server.responses_tools import Toolbox, tool_choice, toolbox
from octavo.server.service import Service
from octavo.server.sse import Answer, EventStream, Wire, named_event

logger = get_logger(__name__)


class _Asked(msgspec.Struct, frozen=True):
    """A request, read."""

    body: ResponsesBody
    params: SamplingParams
    conversation: Conversation
    tools: Toolbox


async def create_response(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    asked = await read_body(service, request, lambda raw: _read(raw, service.defaults))
    service.model_name(asked.body.model)
    with field_names(asked.body, asked.tools.places):
        dialogue = await start(service, request, asked.conversation, asked.params, "resp_")
    if asked.tools.left_out:
        logger.warning(
            "%s: tools that this server cannot run are not offered to the model: %s",
            dialogue.generation.id,
            ", ".join(asked.tools.left_out),
        )
    writer = _Writer(dialogue, asked)
    headers = dialogue.generation.headers
    if asked.body.stream:
        wire = Wire(named_event, writer.failed, b"")
        return EventStream(writer.events(), headers, dialogue.close, service.streams, wire)
    return Answer(writer.whole(), headers, dialogue.close)


def _read(raw: bytes, defaults: Mapping[str, Any]) -> _Asked:
    body = parse(raw, ResponsesBody)
    params = responses_params(body, defaults)
    if not body.input and body.max_output_tokens != 1:
        # With one token it is a client's probe of whether the model answers.
        raise RequestError("input is empty: give a text or items", "input")
    read = read_input(body.input or "", body.instructions)
    given = [(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    tools = toolbox(given + read.tools)
    conversation = Conversation(
        messages=read.messages,
        tools=tools.functions,
        tool_choice=tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        include_reasoning=body.include_reasoning is not False,
        chat_template_kwargs=body.chat_template_kwargs,
        model=body.model,
        request_id=body.request_id,
        priority=body.priority,
        deadline=body.deadline,
        cache_salt=body.cache_salt,
    )
    return _Asked(body, params, conversation, tools)


class _Writer:
    """From a dialogue's events to a response, and to the events of its stream."""

    def __init__(self, dialogue: Dialogue, asked: _Asked) -> None:
        self._dialogue = dialogue
        self._asked = asked
        self._output = Output(asked.tools.name_of)
        self._begun = _begun(dialogue, asked)
        self._count = 0  # events that were made
        tokenizer = dialogue.generation.service.prompts.tokenizer
        self._formatter = TokenFormatter(
            tokenizer, False, asked.body.skip_special_tokens is not False
        )

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """The events of the stream, the last of which has the whole response."""
        yield self._numbered({"type": "response.created", "response": self._begun})
        yield self._numbered({"type": "response.in_progress", "response": self._begun})
        complete = True
        async for _, events, output in self._dialogue.events():
            for event in self._output.feed(events, self._logprobs(output)):
                yield self._numbered(event)
            complete = complete and output.finish_reason != "length"
        for event in self._output.finish(complete):
            yield self._numbered(event)
        ended = self._ended(complete)
        yield self._numbered({"type": f"response.{ended.status}", "response": ended})

    async def whole(self) -> ResponseObject:
        """The response in the last of these events."""
        last: StreamEvent = {}
        async for event in self.events():
            last = event
        found: ResponseObject = last["response"]
        return found

    def failed(self, fault: HTTPError) -> StreamEvent:
        """The event that ends a stream which an error has cut off."""
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        response = msgspec.structs.replace(
            self._begun,
            status="failed",
            error=ResponseError(code, fault.message),
            output=tuple(self._output.items),
        )
        return self._numbered({"type": "response.failed", "response": response})

    def _ended(self, complete: bool) -> ResponseObject:
        return msgspec.structs.replace(
            self._begun,
            status="completed" if complete else "incomplete",
            completed_at=int(time.time()) if complete else None,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            output=tuple(self._output.items),
            usage=_usage(self._dialogue),
        )

    def _numbered(self, event: StreamEvent) -> StreamEvent:
        event["sequence_number"] = self._count
        self._count += 1
        return event

    def _logprobs(self, output: CompletionOutput) -> list[TokenLogprob]:
        body = self._asked.body
        if LOGPROBS not in (body.include or ()):
            return []
        top, positions = body.top_logprobs or 0, output.logprobs or []
        return chat_logprobs(self._formatter, top, output.token_ids, positions).content


def _usage(dialogue: Dialogue) -> ResponsesUsage:
    usage = dialogue.usage()
    return ResponsesUsage(
        usage.prompt_tokens,
        {"cached_tokens": usage.prompt_tokens_details["cached_tokens"]},
        usage.completion_tokens,
        usage.completion_tokens_details or {"reasoning_tokens": 0},
        usage.total_tokens,
    )


def _begun(dialogue: Dialogue, asked: _Asked) -> ResponseObject:
    """The response before its answer: what was asked for, and what was taken for the rest."""
    body, made = asked.body, dialogue.generation
    reasoning = body.reasoning or Reasoning()
    form = body.text.format if body.text else None
    return ResponseObject(
        id=made.id,
        created_at=made.created,
        status="in_progress",
        model=made.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=asked.params.temperature,
        top_p=asked.params.top_p,
        top_logprobs=body.top_logprobs or 0,
        tools=asked.tools.echo,
        tool_choice=body.tool_choice or "auto",
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
        text={"format": form or {"type": "text"}, "verbosity": "medium"},
        metadata=body.metadata or {},
        user=body.user,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
    )
