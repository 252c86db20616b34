"""`POST /v1/completions`: one generator of chunks, sent as they come or folded into one answer."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.submission import Submission
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.params import SamplingParams
from octavo.server.body import parse_request
from octavo.server.generation import (
    FINGERPRINT,
    Generation,
    Prompted,
    check_queue,
    chunk_usage,
    make_submission,
    submit,
    token_formatter,
    wants_usage,
)
from octavo.server.logprobs import CompletionArrays, prompt_logprobs
from octavo.server.protocol import CompletionBody, body_field_names, prompts
from octavo.server.replies import (
    Completion,
    CompletionChoice,
    Maybe,
    Reason,
    Usage,
)
from octavo.server.service import Service
from octavo.server.sse import Answer, EventStream

MAX_CHOICES = 4096  # of one HTTP request
PromptLogprobs = Sequence[PositionLogprobs | None] | None


async def create_completion(service: Service, request: Request) -> Response:
    """Check everything, submit, and return the response that will run."""
    body, params = await parse_request(service, request, CompletionBody)
    each = prompts(body)
    if len(each) * params.n > MAX_CHOICES:
        raise RequestError(
            f"n ({params.n}) times the number of prompts ({len(each)}) must be at most "
            f"{MAX_CHOICES}",
            "n",
        )
    check_queue(service, len(each))
    with body_field_names(body):
        prompted = [await _prompted(service, prompt, params, body) for prompt in each]
        generation = await submit(service, request, body, "cmpl-", prompted)
    writer = _Writer(generation, body)
    if body.stream:
        return EventStream(writer.chunks(), generation.headers, generation.close, service.streams)
    return Answer(writer.whole(), generation.headers, generation.close)


async def _prompted(
    service: Service, prompt: str | list[int], params: SamplingParams, body: CompletionBody
) -> Prompted:
    if isinstance(prompt, str):
        ids = await service.prompts.encode(prompt, body.add_special_tokens is not False)
        params = _fitting(params, body, len(ids), service)
        return await make_submission(service, ids, params, body), prompt
    if body.add_special_tokens:  # false has no effect on ids
        raise RequestError("add_special_tokens needs a prompt as text", "add_special_tokens")
    params = _fitting(params, body, len(prompt), service)
    submission = await make_submission(service, prompt, params, body)
    if not body.echo:
        return submission, None
    return submission, service.prompts.tokenizer.decode(prompt, params.skip_special_tokens)


def _fitting(
    params: SamplingParams, body: CompletionBody, prompt_length: int, service: Service
) -> SamplingParams:
    """`params`, up to the window where the default of `max_tokens` does not fit into it.

    Only a `max_tokens` that the request has can be at fault.
    """
    left = service.limits.max_model_len - prompt_length
    if body.max_tokens is not None or (params.max_tokens or 0) <= left:
        return params
    return params.with_(max_tokens=None)


class _Writer:
    """From a generation's deltas to chunks of one completion."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._generation = generation
        self._body = body
        self._n = generation.prompted[0][0].params.n
        self._scoring = bool(body.echo and body.max_tokens == 0)
        formatter = token_formatter(generation.service, body)
        self._arrays = defaultdict[int, CompletionArrays](
            lambda: CompletionArrays(formatter, body.logprobs or 0)
        )
        self._begun: set[int] = set()
        self._prompts: list[PromptLogprobs] = [None] * len(generation.prompted)

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        """The chunks of the stream; the last one has the usage, if it was asked for."""
        exact = self._body.logprobs is not None or self._body.return_token_ids
        async for position, output in self._generation.deltas():
            self._note(position, output)
            choices = [
                self._choice(position, delta)
                for delta in output.outputs
                # Text may be held back for a stop string.
                if delta.text or delta.finish_reason or (exact and delta.token_ids)
            ]
            if choices:
                yield self._chunk(choices, chunk_usage(self._body, self._usage))
        if wants_usage(self._body):
            yield self._chunk([], self._usage())

    async def whole(self) -> Completion:
        """The same choices as one answer. (Not streamed, a request has one output, its last.)"""
        choices: list[CompletionChoice] = []
        async for position, output in self._generation.deltas():
            self._note(position, output)
            choices += [self._choice(position, delta) for delta in output.outputs]
        return self._chunk(sorted(choices, key=lambda choice: choice.index), self._usage())

    def _note(self, position: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:  # once, maybe with a delta that has no text
            self._prompts[position] = output.prompt_logprobs

    def _choice(self, position: int, delta: CompletionOutput) -> CompletionChoice:
        body, (submission, text) = self._body, self._generation.prompted[position]
        if self._scoring:  # the one token that was made is not shown
            end: Reason = "length" if delta.finish_reason else None
            delta = CompletionOutput(delta.index, "", [], finish_reason=end)
        index = position * self._n + delta.index
        choice = CompletionChoice(index, delta.text, delta.finish_reason, delta.stop_reason)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        if index in self._begun:
            if body.logprobs is not None:
                self._add_logprobs(choice, delta, None)
            return choice
        self._begun.add(index)
        known = self._prompts[position]
        self._add_logprobs(choice, delta, (submission, known) if body.echo else None)
        if body.echo:
            choice.text = (text or "") + choice.text
        if body.prompt_logprobs is not None and known:
            choice.prompt_logprobs = prompt_logprobs(known)
        if body.return_token_ids:
            choice.prompt_token_ids = submission.token_ids
        return choice

    def _add_logprobs(
        self,
        choice: CompletionChoice,
        delta: CompletionOutput,
        echo: tuple[Submission, PromptLogprobs] | None,
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
        usage = self._generation.usage()
        if self._scoring:
            cached = usage.prompt_tokens_details["cached_tokens"]
            return Usage.of(usage.prompt_tokens, 0, cached)
        return usage

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | Maybe | None) -> Completion:
        made = self._generation
        return Completion(
            made.id, "text_completion", made.created, made.model, FINGERPRINT, choices, usage
        )
