"""`POST /v1/chat/completions`: one generator of chunks, sent as they come or folded into one."""

from collections.abc import AsyncGenerator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput
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
    ChatMessage,
    Maybe,
    Usage,
)
from octavo.server.service import Service
from octavo.server.sse import Answer, EventStream
from octavo.text.answer import Content
from octavo.text.message import message_of


async def create_chat(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await parse_request(service, request, ChatBody)
    with body_field_names(body):
        dialogue = await start(service, request, _conversation(body), params, "chatcmpl-")
    writer = _Writer(dialogue, body)
    headers = dialogue.generation.headers
    if body.stream:
        stall = service.options.stall_timeout
        return EventStream(writer.chunks(), headers, dialogue.close, stall)
    return Answer(writer.whole(), headers, dialogue.close)


def _conversation(body: ChatBody) -> Conversation:
    return Conversation(
        messages=body.messages,
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
            choice.message = ChatMessage("assistant", message_of(events).content)
            answer.choices.append(choice)
        self._add_prompt(answer)
        answer.usage = self._dialogue.usage()
        return answer

    def _streamed(self, part: Part) -> ChatChoice:
        index, events, output = part
        choice = self._choice(output)
        first = index not in self._begun
        self._begun.add(index)
        text = "".join(event.text for event in events if isinstance(event, Content))
        choice.delta = ChatDelta(
            content=text if text or first else UNSET,
            role="assistant" if first else UNSET,
        )
        return choice

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
