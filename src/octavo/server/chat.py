"""`POST /v1/chat/completions`: one generator of chunks, sent as they come or folded into one."""

from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput, PositionLogprobs
from octavo.server.body import parse_request
from octavo.server.generation import (
    FINGERPRINT,
    Generation,
    chunk_usage,
    make_submission,
    submit,
    token_formatter,
    wants_usage,
)
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.protocol import ChatBody
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


async def create_chat(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await parse_request(service, request, ChatBody)
    prompt = await service.prompts.render(body, body.messages)
    submission = await make_submission(service, prompt.token_ids, params, body)
    generation = await submit(service, request, body, "chatcmpl", [(submission, prompt.text)])
    writer = _Writer(generation, body)
    if body.stream:
        stall = service.options.stall_timeout
        return EventStream(writer.chunks(), generation.headers, generation.close, stall)
    return Answer(writer.whole(), generation.headers, generation.close)


class _Writer:
    """From a generation's deltas to chunks of one chat answer."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._generation = generation
        self._body = body
        self._formatter = token_formatter(generation.service, body)
        self._begun: set[int] = set()
        # They come once, maybe with a delta that has no text.
        self._prompt_logprobs: Sequence[PositionLogprobs | None] | None = None

    async def chunks(self) -> AsyncGenerator[ChatCompletion, None]:
        """The chunks of the stream; the last one has the usage, if it was asked for."""
        first = True
        async for _, output in self._generation.deltas():
            self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
            choices = [
                self._streamed(delta) for delta in output.outputs if self._has_content(delta)
            ]
            if choices:
                usage = chunk_usage(self._body, self._generation.usage)
                chunk = self._chunk("chat.completion.chunk", choices, usage)
                if first:
                    self._add_prompt(chunk)
                first = False
                yield chunk
        if wants_usage(self._body):
            yield self._chunk("chat.completion.chunk", [], self._generation.usage())

    async def whole(self) -> ChatCompletion:
        """The same choices as one answer. (Not streamed, a request has one output, its last.)"""
        answer = self._chunk("chat.completion", [], UNSET)
        async for _, output in self._generation.deltas():
            for delta in output.outputs:
                choice = self._choice(delta)
                choice.message = ChatMessage("assistant", delta.text)
                answer.choices.append(choice)
            self._prompt_logprobs = output.prompt_logprobs
        self._add_prompt(answer)
        answer.usage = self._generation.usage()
        return answer

    def _streamed(self, delta: CompletionOutput) -> ChatChoice:
        choice = self._choice(delta)
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice.delta = ChatDelta(
            content=delta.text if delta.text or first else UNSET,
            role="assistant" if first else UNSET,
        )
        return choice

    def _choice(self, delta: CompletionOutput) -> ChatChoice:
        body = self._body
        choice = ChatChoice(delta.index, delta.finish_reason, delta.stop_reason)
        if body.logprobs:
            positions, top = delta.logprobs or [], body.top_logprobs or 0
            choice.logprobs = chat_logprobs(self._formatter, top, delta.token_ids, positions)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _has_content(self, delta: CompletionOutput) -> bool:
        """Whether a chunk is sent for it: text may be held back for a stop string."""
        exact = self._body.logprobs or self._body.return_token_ids
        return bool(delta.text or delta.finish_reason or (exact and delta.token_ids))

    def _add_prompt(self, answer: ChatCompletion) -> None:
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._generation.prompted[0][0].token_ids
        if self._body.prompt_logprobs is not None and self._prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._prompt_logprobs)

    def _chunk(
        self, kind: str, choices: list[ChatChoice], usage: Usage | Maybe | None
    ) -> ChatCompletion:
        made = self._generation
        return ChatCompletion(made.id, kind, made.created, made.model, FINGERPRINT, choices, usage)
