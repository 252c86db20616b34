"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

One generator of events, sent as they come or folded into one message. What the fields mean is
in `server.messages_conversation`, what goes out in `server.messages_events`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import read_body
from octavo.server.conversation import Conversation, Dialogue, Part, render, start
from octavo.server.error_shapes import REQUEST_ID, messages_error
from octavo.server.generation import request_id
from octavo.server.messages_conversation import conversation, field_names, loosened, sampling
from octavo.server.messages_events import (
    BlockDelta,
    Blocks,
    BlockStart,
    BlockStop,
    Ending,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StreamEvent,
    TokenCount,
    content,
    stop_of,
)
from octavo.server.messages_protocol import MessagesBody, PromptBody
from octavo.server.models import json_response
from octavo.server.protocol import parse
from octavo.server.service import Service
from octavo.server.sse import Answer, EventStream, Wire, named_event

PING_SECONDS = 15.0
BodyT = TypeVar("BodyT", bound=PromptBody)


async def create_message(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, asked = await _parsed(service, request, MessagesBody)
    name = request_id(request, None)
    with field_names(body):
        thinks = service.prompts.formats.reasoning is not None
        params = sampling(body, service.defaults, thinks)
        named = msgspec.structs.replace(asked, request_id=name)
        dialogue = await start(service, request, named, params, "msg_")
    writer = _Writer(dialogue, body)
    headers = [*dialogue.generation.headers, (REQUEST_ID.encode(), name.encode())]
    wire = Wire(named_event, partial(messages_error, request_id=name), b"")
    if body.stream:
        return EventStream(writer.events(), headers, dialogue.close, service.streams, wire)
    return Answer(writer.whole(), headers, dialogue.close, wire)


async def count_tokens(service: Service, request: Request) -> Response:
    """How long the prompt is that `create_message` would compute."""
    body, asked = await _parsed(service, request, PromptBody)
    with field_names(body):
        prompt = await render(service, asked)
    return json_response(TokenCount(len(prompt.token_ids)))


async def _parsed(
    service: Service, request: Request, kind: type[BodyT]
) -> tuple[BodyT, Conversation]:
    def work(raw: bytes) -> tuple[BodyT, Conversation]:
        body = parse(raw, kind)
        return body, conversation(body, service.prompts.placement)

    body, asked = await read_body(service, request, work)
    service.model_name(body.model)
    if body.tools:
        tools = await service.prompts.in_time("tools", loosened, asked.tools, body)
        asked = msgspec.structs.replace(asked, tools=tools)
    return body, asked


async def _with_pings(parts: AsyncGenerator[Part, None]) -> AsyncGenerator[Part | None, None]:
    """`parts`; before the first one, None every PING_SECONDS: a long prompt may take minutes, and
    what is between here and a client may close a connection that is silent."""
    first = asyncio.ensure_future(anext(parts, None))
    try:
        while not first.done():
            await asyncio.wait({first}, timeout=PING_SECONDS)
            if not first.done():
                yield None
        if (part := first.result()) is not None:
            yield part
        async for part in parts:
            yield part
    finally:
        first.cancel()
        await asyncio.wait({first})
        await parts.aclose()


class _Writer:
    """From a dialogue's events to those of one message."""

    def __init__(self, dialogue: Dialogue, body: MessagesBody) -> None:
        self._dialogue = dialogue
        display = getattr(body.thinking, "display", None)
        self._blocks = Blocks(shows_thinking=display != "omitted")

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """The events of a stream."""
        begun = False
        ending = Ending("end_turn", None)
        async with contextlib.aclosing(_with_pings(self._dialogue.events())) as parts:
            async for part in parts:
                if part is None:
                    yield Ping()
                    continue
                if not begun:  # now, since the usage says what the cache had
                    begun = True
                    yield MessageStart(self._message())
                    yield Ping()
                _, events, output = part
                for event in self._blocks.feed(events):
                    yield event
                if output.finish_reason is not None:
                    calls = self._blocks.calls
                    ending = Ending(*stop_of(output.finish_reason, output.stop_reason, calls))
        for event in self._blocks.finish():
            yield event
        yield MessageDelta(ending, MessageUsage.of(self._dialogue.usage()))
        yield MessageStop()

    async def whole(self) -> Message:
        """The message that a reader of the stream has at its end."""
        message = self._message()
        blocks: list[BlockStart | BlockDelta | BlockStop] = []
        async for event in self.events():
            if isinstance(event, (BlockStart, BlockDelta, BlockStop)):
                blocks.append(event)
            elif isinstance(event, MessageDelta):
                message.stop_reason = event.delta.stop_reason
                message.stop_sequence = event.delta.stop_sequence
                message.usage = event.usage
        message.content = content(blocks)
        return message

    def _message(self) -> Message:
        made, usage = self._dialogue.generation, MessageUsage.of(self._dialogue.usage())
        return Message(made.id, "message", "assistant", made.model, [], None, None, usage)
