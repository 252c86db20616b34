"""One HTTP request's generation: admitted, submitted, counted, and logged at its end.

A request that is refused, here or by the engine, is refused before its response starts: `submit`
returns when the engine has queued every prompt.
"""

import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import Protocol

from msgspec import UNSET
from starlette.requests import Request

from octavo.core.submission import Submission
from octavo.engine.admission import admit, deadline_at, output_limit
from octavo.engine.client import Batch
from octavo.errors import QueueFullError, RequestError
from octavo.log import get_logger
from octavo.outputs import FinishReason, RequestMetrics, RequestOutput
from octavo.params import SamplingParams
from octavo.server.logprobs import TokenFormatter
from octavo.server.protocol import ChatBody, CompletionBody
from octavo.server.replies import Maybe, Usage
from octavo.server.service import Service
from octavo.server.spans import Answered, RequestTrace
from octavo.text.answer_form import AnswerForm
from octavo.text.markers import Markers
from octavo.text.model_formats import Limits
from octavo.version import __version__

logger = get_logger(__name__)

FINGERPRINT = f"octavo-{__version__}"
_NO_ADDRESS = re.compile(r"[^0-9A-Za-z.:%_-]")
_LONGEST_ADDRESS = 64
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# A request, and its prompt's text where it came as text.
Prompted = tuple[Submission, str | None]


class Asked(Protocol):
    """What a body says of its request, whatever its answer is to be."""

    @property
    def model(self) -> str | None: ...
    @property
    def request_id(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def cache_salt(self) -> str | None: ...


async def make_submission(
    service: Service,
    token_ids: Sequence[int],
    params: SamplingParams,
    asked: Asked,
    form: AnswerForm | None = None,
) -> Submission:
    """An admitted request. form: of its answers; None if `params` say all of it.

    Raises RequestError for what the model cannot serve.
    """
    now = time.monotonic()
    if form is None:
        limits = Limits(await service.prompts.grammar(params.structured_outputs))
    else:
        limits = await service.prompts.limits(form)
    submission = Submission(
        service.client.new_id(),
        tuple(token_ids),
        params,
        await service.prompts.bad_words(params.bad_words),
        arrival_time=now,
        priority=asked.priority or 0,
        deadline=deadline_at(asked.deadline, now),
        cache_salt=asked.cache_salt,
        grammar=limits.grammar,
        sections=limits.sections,
        thinking=limits.thinking,
    )
    return admit(submission, service.client.capabilities)


def check_queue(service: Service, count: int) -> None:
    """Raise QueueFullError unless the queue takes `count` more requests."""
    try:
        service.client.check_queue(count)
    except QueueFullError as error:
        service.metrics.rejected(error.code)
        raise


async def submit(
    service: Service,
    request: Request,
    asked: Asked,
    kind: str,
    prompted: Sequence[Prompted],
    markers: Markers | None = None,
) -> "Generation":
    """Start generating. markers: of the parser that the texts are for.

    Raises QueueFullError when the prompts are refused.
    """
    name = request_id(request, asked.request_id)
    model = service.model_name(asked.model)
    try:
        batch = await service.client.submit([made for made, _ in prompted], markers)
    except QueueFullError as error:
        service.metrics.rejected(error.code)
        raise
    client, answer_id = client_of(request), kind + name
    if service.dashboard:
        for made, _ in prompted:
            service.dashboard.names.add(made.request_id, answer_id, name)
    generation = Generation(service, answer_id, name, model, client, prompted, batch, markers)
    if service.spans is not None:
        generation.trace = service.spans.trace(request.headers, kind)
    return generation


class Generation:
    """What the engine makes of one HTTP request, until its line in the log."""

    def __init__(
        self,
        service: Service,
        name: str,
        request_id: str,
        model: str,
        client: str,
        prompted: Sequence[Prompted],
        batch: Batch,
        markers: Markers | None = None,
    ) -> None:
        self.service = service
        self._markers = markers
        self.id = name
        self.model = model
        self.client = client
        self.prompted = prompted
        self.created = int(time.time())
        self.headers = [(b"x-request-id", request_id.encode())]
        count = len(prompted)
        self._batch = batch
        arrivals = [s.arrival_time for s, _ in prompted if s.arrival_time is not None]
        self._started = min(arrivals, default=time.monotonic())
        self._first: float | None = None
        self._cached = [0] * count
        self._seen = [False] * count
        self._generated = [0] * count
        self._ended = [0] * count  # choices that have
        self._reasons: list[list[FinishReason]] = [[] for _ in range(count)]  # of their choices
        self._logs_texts = service.options.log_requests
        self._texts: dict[tuple[int, int], str] = {}
        self._times: list[RequestMetrics | None] = [None] * count  # once a choice has ended
        self.trace: RequestTrace | None = None
        for position, (submission, _) in enumerate(prompted):
            most = output_limit(submission, service.limits)
            service.metrics.received(submission.params.n, most, batch.engine_of(position))

    def deltas(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What is new, as (position of the prompt, output). Raises EngineError."""
        self._batch.on_read = self._note
        return self._batch

    def _note(self, position: int, output: RequestOutput) -> None:
        if self._first is None:
            self._first = time.monotonic()
            if (times := output.metrics) and times.first_token_time is not None:
                # Of the wall's clock; between it and now the engine's process may have run on.
                self._first = self._started + times.first_token_time - times.arrival_time
        self._seen[position] = True
        self._cached[position] = output.num_cached_tokens
        for choice in output.outputs:
            self._generated[position] += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._ended[position] += 1
                self._reasons[position].append(choice.finish_reason)
                self._times[position] = output.metrics
                engine = self._batch.engine_of(position)
                self.service.metrics.ended(choice.finish_reason, engine=engine)
            if self._logs_texts:
                key = (position, choice.index)
                text = choice.text if self._markers is None else self._markers.spelled(choice.text)
                self._texts[key] = self._texts.get(key, "") + text

    def parsed(self, calls: bool) -> None:
        """A choice that may have had tool calls has ended, and whether it had."""
        self.service.metrics.parsed(calls, self._batch.engine_of(0))

    def usage(self) -> Usage:
        prompt = sum(len(submission.token_ids) for submission, _ in self.prompted)
        return Usage.of(prompt, sum(self._generated), sum(self._cached))

    def close(self, error: Exception | None = None) -> None:
        """Abort what still runs, and log. `error` is what the client was answered, if anything."""
        self._batch.close()
        metrics = self.service.metrics
        reason: FinishReason = "error" if error else "abort"
        for i, (submission, _) in enumerate(self.prompted):
            engine = self._batch.engine_of(i)
            if self._seen[i]:
                count = len(submission.token_ids)
                metrics.answered(count, self._cached[i], self._generated[i], engine)
            if missing := submission.params.n - self._ended[i]:
                metrics.ended(reason, missing, engine)
                self._reasons[i].append(reason)
        if self.trace is not None:
            self._add_spans(self.trace, error)
        self._log()

    def _add_spans(self, trace: RequestTrace, error: Exception | None) -> None:
        """One for each prompt."""
        for i, (submission, _) in enumerate(self.prompted):
            trace.add(
                Answered(
                    self.model,
                    self.id,
                    submission,
                    output_limit(submission, self.service.limits),
                    self._generated[i],
                    self._cached[i],
                    list(dict.fromkeys(self._reasons[i])),
                    self._times[i],
                    self._batch.engine_of(i),
                    error,
                )
            )

    def _log(self) -> None:
        usage, now = self.usage(), time.monotonic()
        first = None if self._first is None else round(self._first - self._started, 6)
        reasons = list(dict.fromkeys(chain.from_iterable(self._reasons)))
        fields = {
            "event": "request",
            "request_id": self.id,
            "client": self.client,
            "model": self.model,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": sum(self._cached),
            "output_tokens": usage.completion_tokens,
            "finish_reasons": reasons,
            "ttft_seconds": first,
            "total_seconds": round(now - self._started, 6),
        }
        logger.info(
            "%s prompt=%d cached=%d output=%d finish=%s ttft=%s total=%.3f client=%s",
            self.id,
            usage.prompt_tokens,
            sum(self._cached),
            usage.completion_tokens,
            ",".join(reasons),
            "-" if first is None else f"{first:.3f}",
            now - self._started,
            self.client,
            extra={"fields": fields},
        )
        if self.service.options.log_requests:
            texts = [text or list(submission.token_ids) for submission, text in self.prompted]
            logger.info("%s prompts=%r answers=%r", self.id, texts, list(self._texts.values()))


def token_formatter(service: Service, body: CompletionBody | ChatBody) -> TokenFormatter:
    """How the tokens of an answer's log-probabilities are shown."""
    as_ids, skip = body.return_tokens_as_token_ids, body.skip_special_tokens
    return TokenFormatter(service.prompts.tokenizer, bool(as_ids), skip is not False)


def wants_usage(body: CompletionBody | ChatBody) -> bool:
    """Whether a stream ends with a chunk that has the usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


def chunk_usage(
    body: CompletionBody | ChatBody, usage: Callable[[], Usage]
) -> Usage | Maybe | None:
    """The usage that an ordinary chunk has: none, null, or what was used so far."""
    options = body.stream_options
    if not (options and options.include_usage):
        return UNSET
    return usage() if options.continuous_usage_stats else None


def client_of(request: Request) -> str:
    """The client's address for the log: the peer's, or the one that a trusted proxy names.

    uvicorn takes it from X-Forwarded-For, whose text anybody may have written: what no address
    has is replaced.
    """
    host = request.client.host if request.client else ""
    return _NO_ADDRESS.sub("?", host[:_LONGEST_ADDRESS]) or "unix"


def request_id(request: Request, given: str | None) -> str:
    """The id to answer with: the body's, else the header's if it is safe to repeat, else new.

    Raises RequestError for one in the body that is not safe. It is never the engine's key, so
    equal ids in flight do not meet.
    """
    if given is not None:
        if not _SAFE_ID.fullmatch(given):
            raise RequestError(
                "request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", "request_id"
            )
        return given
    header = request.headers.get("x-request-id", "")
    return header if _SAFE_ID.fullmatch(header) else uuid.uuid4().hex
