"""`POST /v1/chat/completions`: one generator of chunks, sent as they come or folded into one."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import AnswerMessage, CompletionOutput, ToolCall
from octavo.server.body import parse_request
from octavo.server.conversation import Conversation, Dialogue, Part, start
from octavo.server.generation import (
    FINGERPRINT,
    chunk_usage,
    token_formatter,
    wants_usage,
)
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.protocol import ChatBody, body_field_names
from octavo.server.replies import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatFunction,
    ChatMessage,
    ChatReason,
    ChatToolCall,
    Maybe,
    Usage,
)
from octavo.server.service import Service
from octavo.server.sse import Answer, EventStream
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.message import message_of
from octavo.text.tool_request import read_choice, read_tools


async def create_chat(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await parse_request(service, request, ChatBody)
    with body_field_names(body):
        dialogue = await start(service, request, _conversation(body), params, "chatcmpl-")
    writer = _Writer(dialogue, body)
    headers = dialogue.generation.headers
    if body.stream:
        return EventStream(writer.chunks(), headers, dialogue.close, service.streams)
    return Answer(writer.whole(), headers, dialogue.close)


def _conversation(body: ChatBody) -> Conversation:
    tools = () if body.tools is None else read_tools(body.tools)
    return Conversation(
        messages=body.messages,
        tools=tools,
        tool_choice=read_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        include_reasoning=body.include_reasoning is not False,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        model=body.model,
        request_id=body.request_id,
        priority=body.priority,
        deadline=body.deadline,
        cache_salt=body.cache_salt,
    )


class _Writer:
    """From a dialogue's events to chunks of one chat answer."""

    def __init__(self, dialogue: Dialogue, body: ChatBody) -> None:
        self._dialogue = dialogue
        self._body = body
        self._formatter = token_formatter(dialogue.generation.service, body)
        self._begun: set[int] = set()
        self._calls = defaultdict[int, tuple[int, int]](lambda: (0, 0))  # begun, ended
        self._named = isinstance(body.tool_choice, Mapping) and "function" in body.tool_choice

    async def chunks(self) -> AsyncGenerator[ChatCompletion, None]:
        """The chunks of the stream; the last one has the usage, if it was asked for."""
        first = True
        async for parts in self._dialogue.steps():
            choices = [self._streamed(part) for part in parts if self._is_shown(part)]
            if choices:
                usage = chunk_usage(self._body, self._dialogue.usage)
                chunk = self._chunk("chat.completion.chunk", choices, usage)
                if first:
                    self._add_prompt(chunk)
                first = False
                yield chunk
        if wants_usage(self._body):
            yield self._chunk("chat.completion.chunk", [], self._dialogue.usage())

    async def whole(self) -> ChatCompletion:
        """The same choices as one answer. (Not streamed, a request has one output, its last.)"""
        answer = self._chunk("chat.completion", [], UNSET)
        async for _, events, output in self._dialogue.events():
            choice = self._choice(output)
            choice.message = self._message(message_of(events))
            choice.finish_reason = self._reason(events, output)
            answer.choices.append(choice)
        self._add_prompt(answer)
        answer.usage = self._dialogue.usage()
        return answer

    def _message(self, found: AnswerMessage) -> ChatMessage:
        calls = [_tool_call(call) for call in found.tool_calls]
        message = ChatMessage("assistant", found.content, tool_calls=calls or UNSET)
        if found.reasoning is not None:
            self._add_reasoning(message, found.reasoning)
        return message

    def _streamed(self, part: Part) -> ChatChoice:
        index, events, output = part
        choice = self._choice(output)
        first = index not in self._begun
        self._begun.add(index)
        choice.finish_reason = self._reason(events, output)
        choice.delta = delta = ChatDelta(role="assistant" if first else UNSET)
        content = "".join(event.text for event in events if isinstance(event, Content))
        if content or (first and not events):
            delta.content = content
        if reasoning := "".join(event.text for event in events if isinstance(event, Reasoning)):
            self._add_reasoning(delta, reasoning)
        if calls := _call_deltas(events):
            delta.tool_calls = calls
        return choice

    def _add_reasoning(self, target: ChatMessage | ChatDelta, text: str) -> None:
        """Under both names: clients read one or the other."""
        names = self._dialogue.generation.service.options.reasoning_field
        if names != "reasoning_content":
            target.reasoning = text
        if names != "reasoning":
            target.reasoning_content = text

    def _reason(self, events: list[Event], output: CompletionOutput) -> ChatReason:
        """Why a choice has ended. A named tool was called because it had to be, as with OpenAI."""
        called, ended = self._calls[output.index]
        called += sum(isinstance(event, CallBegin) for event in events)
        ended += sum(isinstance(event, CallEnd) for event in events)
        self._calls[output.index] = called, ended
        by_itself = output.finish_reason == "stop" and called and called == ended
        return "tool_calls" if by_itself and not self._named else output.finish_reason

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        body = self._body
        choice = ChatChoice(output.index, output.finish_reason, output.stop_reason)
        if body.logprobs:
            positions, top = output.logprobs or [], body.top_logprobs or 0
            choice.logprobs = chat_logprobs(self._formatter, top, output.token_ids, positions)
        if body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def _is_shown(self, part: Part) -> bool:
        """Whether a chunk is sent for it: text may be held back for a stop string."""
        _, events, output = part
        exact = self._body.logprobs or self._body.return_token_ids
        return bool(events or output.finish_reason or (exact and output.token_ids))

    def _add_prompt(self, answer: ChatCompletion) -> None:
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._dialogue.prompt.token_ids
        positions = self._dialogue.prompt_logprobs
        if self._body.prompt_logprobs is not None and positions:
            answer.prompt_logprobs = prompt_logprobs(positions)

    def _chunk(
        self, kind: str, choices: list[ChatChoice], usage: Usage | Maybe | None
    ) -> ChatCompletion:
        made = self._dialogue.generation
        return ChatCompletion(made.id, kind, made.created, made.model, FINGERPRINT, choices, usage)


def _tool_call(call: ToolCall) -> ChatToolCall:
    return ChatToolCall(ChatFunction(call.arguments, call.name), id=call.id, type="function")


def _call_deltas(events: list[Event]) -> list[ChatToolCall]:
    """What is new of calls: each opens with its id and name, and goes on with arguments."""
    found: list[ChatToolCall] = []
    for event in events:
        if isinstance(event, CallBegin):
            function = ChatFunction("", event.name)
            found.append(ChatToolCall(function, event.index, event.id, "function"))
        elif isinstance(event, CallArguments):
            if found and found[-1].index == event.index:
                found[-1].function.arguments += event.text
            else:
                found.append(ChatToolCall(ChatFunction(event.text), event.index))
    return found
