"""`POST /v1/chat/completions`: one generator of chunks, sent as they come or folded into one."""

from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionOutput, PositionLogprobs
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
from octavo.server.service import FINGERPRINT, Call, Service, chunk_usage, wants_usage
from octavo.server.sse import Answer, EventStream


async def create_chat(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await service.asked(request, ChatBody)
    prompt = await service.render(body, body.messages)
    job = await service.job(prompt.token_ids, prompt.text, params, body)
    call = service.call(request, body, "chatcmpl", [job])
    writer = _Writer(call, body)
    if body.stream:
        stall = service.options.stall_timeout
        return EventStream(writer.chunks(), call.headers, call.close, stall)
    return Answer(writer.whole(), call.headers, call.close)


class _Writer:
    """From a call's deltas to chunks of one chat answer."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        self._call = call
        self._body = body
        self._spelling = call.service.spelling(body)
        self._begun: set[int] = set()
        # They come once, maybe with a delta that has nothing to say.
        self._prompt_logprobs: Sequence[PositionLogprobs | None] | None = None

    async def chunks(self) -> AsyncGenerator[ChatCompletion, None]:
        """The chunks of the stream; the last one has the usage, if it was asked for."""
        first = True
        async for _, output in self._call.deltas():
            self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
            choices = [self._streamed(delta) for delta in output.outputs if self._tells(delta)]
            if choices:
                usage = chunk_usage(self._body, self._call.usage)
                chunk = self._chunk("chat.completion.chunk", choices, usage)
                if first:
                    self._add_prompt(chunk)
                first = False
                yield chunk
        if wants_usage(self._body):
            yield self._chunk("chat.completion.chunk", [], self._call.usage())

    async def whole(self) -> ChatCompletion:
        """The same choices as one answer. (Not streamed, a request has one output, its last.)"""
        answer = self._chunk("chat.completion", [], UNSET)
        async for _, output in self._call.deltas():
            for delta in output.outputs:
                choice = self._choice(delta)
                choice.message = ChatMessage("assistant", delta.text)
                answer.choices.append(choice)
            self._prompt_logprobs = output.prompt_logprobs
        self._add_prompt(answer)
        answer.usage = self._call.usage()
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
            choice.logprobs = chat_logprobs(self._spelling, top, delta.token_ids, positions)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _tells(self, delta: CompletionOutput) -> bool:
        """Whether a chunk has anything to say: text may be held back for a stop string."""
        exact = self._body.logprobs or self._body.return_token_ids
        return bool(delta.text or delta.finish_reason or (exact and delta.token_ids))

    def _add_prompt(self, answer: ChatCompletion) -> None:
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._call.jobs[0].token_ids
        if self._body.prompt_logprobs is not None and self._prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._prompt_logprobs)

    def _chunk(
        self, kind: str, choices: list[ChatChoice], usage: Usage | Maybe | None
    ) -> ChatCompletion:
        call = self._call
        return ChatCompletion(call.id, kind, call.created, call.model, FINGERPRINT, choices, usage)
