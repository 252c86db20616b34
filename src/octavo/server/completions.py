"""`POST /v1/completions`: one generator of chunks, sent as they come or folded into one answer."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.client import Job
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.params import SamplingParams
from octavo.server.logprobs import CompletionArrays, prompt_logprobs
from octavo.server.protocol import CompletionBody, prompts
from octavo.server.replies import (
    Completion,
    CompletionChoice,
    Maybe,
    Reason,
    Usage,
)
from octavo.server.service import FINGERPRINT, Call, Service, chunk_usage, wants_usage
from octavo.server.sse import Answer, EventStream

MAX_CHOICES = 4096  # of one HTTP request
PromptLogprobs = Sequence[PositionLogprobs | None] | None


async def create_completion(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await service.asked(request, CompletionBody)
    each = prompts(body)
    if len(each) * params.n > MAX_CHOICES:
        raise RequestError(
            f"n ({params.n}) times the number of prompts ({len(each)}) must be at most "
            f"{MAX_CHOICES}",
            "n",
        )
    service.check_room(len(each))
    jobs = [await _job(service, prompt, params, body) for prompt in each]
    call = service.call(request, body, "cmpl", jobs)
    writer = _Writer(call, body)
    if body.stream:
        stall = service.options.stall_timeout
        return EventStream(writer.chunks(), call.headers, call.close, stall)
    return Answer(writer.whole(), call.headers, call.close)


async def _job(
    service: Service, prompt: str | list[int], params: SamplingParams, body: CompletionBody
) -> Job:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        ids = await service.encode(prompt, special)
        return await service.job(ids, prompt, params, body)
    if body.add_special_tokens is not None:
        raise RequestError("add_special_tokens needs a prompt as text", "add_special_tokens")
    job = await service.job(prompt, None, params, body)
    if not body.echo:
        return job
    return replace(job, prompt=service.tokenizer.decode(prompt, params.skip_special_tokens))


class _Writer:
    """From a call's deltas to chunks of one completion."""

    def __init__(self, call: Call, body: CompletionBody) -> None:
        self._call = call
        self._body = body
        self._n = call.jobs[0].params.n
        self._scoring = bool(body.echo and body.max_tokens == 0)
        spelling = call.service.spelling(body)
        self._arrays = defaultdict[int, CompletionArrays](
            lambda: CompletionArrays(spelling, body.logprobs or 0)
        )
        self._begun: set[int] = set()
        self._prompts: list[PromptLogprobs] = [None] * len(call.jobs)

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        """The chunks of the stream; the last one has the usage, if it was asked for."""
        async for position, output in self._call.deltas():
            self._note(position, output)
            deltas = [delta for delta in output.outputs if self._tells(delta)]
            if deltas:
                choices = [self._choice(position, delta) for delta in deltas]
                yield self._chunk(choices, chunk_usage(self._body, self._usage))
        if wants_usage(self._body):
            yield self._chunk([], self._usage())

    async def whole(self) -> Completion:
        """The same choices as one answer. (Not streamed, a request has one output, its last.)"""
        choices: list[CompletionChoice] = []
        async for position, output in self._call.deltas():
            self._note(position, output)
            choices += [self._choice(position, delta) for delta in output.outputs]
        return self._chunk(sorted(choices, key=lambda choice: choice.index), self._usage())

    def _tells(self, delta: CompletionOutput) -> bool:
        """Whether a chunk has anything to say: text may be held back for a stop string."""
        exact = self._body.logprobs is not None or self._body.return_token_ids
        return bool(delta.text or delta.finish_reason or (exact and delta.token_ids))

    def _note(self, position: int, output: RequestOutput) -> None:
        # They come once, maybe with a delta that has nothing to say.
        self._prompts[position] = self._prompts[position] or output.prompt_logprobs

    def _choice(self, position: int, delta: CompletionOutput) -> CompletionChoice:
        body, job = self._body, self._call.jobs[position]
        if self._scoring:  # the one token that was made is not shown
            end: Reason = "length" if delta.finish_reason else None
            delta = CompletionOutput(delta.index, "", [], finish_reason=end)
        index = position * self._n + delta.index
        choice = CompletionChoice(index, delta.text, delta.finish_reason, delta.stop_reason)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        if index in self._begun:
            self._add_logprobs(choice, delta, None)
            return choice
        self._begun.add(index)
        known = self._prompts[position]
        self._add_logprobs(choice, delta, (job, known) if body.echo else None)
        if body.echo:
            choice.text = (job.prompt or "") + choice.text
        if body.prompt_logprobs is not None and known:
            choice.prompt_logprobs = prompt_logprobs(known)
        if body.return_token_ids:
            choice.prompt_token_ids = job.token_ids
        return choice

    def _add_logprobs(
        self,
        choice: CompletionChoice,
        delta: CompletionOutput,
        echo: tuple[Job, PromptLogprobs] | None,
    ) -> None:
        """The arrays of a chunk, with those of the prompt in front where it is echoed."""
        if self._body.logprobs is None:
            return
        tokens: list[int] = []
        positions: list[PositionLogprobs | None] = []
        if echo:
            tokens += echo[0].token_ids
            positions += echo[1] or [None] * len(tokens)
        tokens += delta.token_ids
        positions += delta.logprobs or []
        choice.logprobs = self._arrays[choice.index].take(tokens, positions)

    def _usage(self) -> Usage:
        usage = self._call.usage()
        if self._scoring:
            cached = usage.prompt_tokens_details["cached_tokens"]
            return Usage.of(usage.prompt_tokens, 0, cached)
        return usage

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | Maybe | None) -> Completion:
        call = self._call
        return Completion(
            call.id, "text_completion", call.created, call.model, FINGERPRINT, choices, usage
        )
