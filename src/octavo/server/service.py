"""What the routes share: the engine's client, the tokenizer, and a call from arrival to log line.

Work on long texts (parsing, templates, tokenizing) is done on threads, so that the event loop
stays free for everyone else; a text that cannot fit into the window is refused before that.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request

from octavo.config import EngineConfig, ServerConfig
from octavo.core.plan import RunnerLimits
from octavo.core.request import MAX_SALT_LENGTH
from octavo.engine.admission import admit
from octavo.engine.client import EXECUTOR, Batch, EngineClient, Job
from octavo.errors import (
    ContextLengthError,
    EngineError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.log import get_logger
from octavo.models.files import resolve
from octavo.outputs import FinishReason, RequestOutput
from octavo.params import SamplingParams
from octavo.server.errors import HTTPError, unavailable
from octavo.server.logprobs import Spelling
from octavo.server.metrics import Metrics
from octavo.server.protocol import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    as_asked,
    parse,
    sampling_params,
)
from octavo.server.replies import Maybe, Usage
from octavo.text.chat import ChatPrompt, encode_chat, read_chat_template
from octavo.text.tokenizer import Tokenizer, bad_words_ids, load_tokenizer
from octavo.version import __version__

logger = get_logger(__name__)

FINGERPRINT = f"octavo-{__version__}"
DEATH_LINGER_SECONDS = 3.0  # after the engine's death, so that clients and probes are told
RESTART_SECONDS = 1.0  # so that an engine that dies at once does not keep the machine busy
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_INLINE_BYTES = 1 << 14  # shorter bodies are parsed in less time than a thread costs
T = TypeVar("T")
AskedT = TypeVar("AskedT", CompletionBody, ChatBody)


class Service:
    """One served model. `failure` says why the server must end; None while it need not."""

    client: EngineClient
    tokenizer: Tokenizer

    def __init__(
        self, config: EngineConfig, options: ServerConfig, executor: str = EXECUTOR
    ) -> None:
        self.config = config
        self.options = options
        self.names = _served_names(config, options)
        self.metrics = Metrics(self.names[0])
        self.created = int(time.time())
        self.failure: str | None = None
        self.draining = False
        self.ready = False
        self._executor = executor
        self._threads = ThreadPoolExecutor(2, "octavo-text")
        self._longest = 1  # characters in the vocabulary's longest token
        self._template = read_chat_template(config.chat_template) if config.chat_template else None

    # Life.

    async def live(self, announce: Callable[[], None]) -> None:
        """Start the engine and watch it; return, with `failure` set, when the server must end."""
        while True:
            self.client = EngineClient(self.config, self._executor)
            self.client.on_stats = self.metrics.update
            try:
                await self.client.start(self._load_tokenizer)
                self._loaded()
            except OctavoError as error:
                logger.error("the engine cannot start: %s", error)
                self.failure = "the engine could not start; the server's log says why"
                return
            announce()
            await self.client.died.wait()
            self.ready = False
            logger.error("the engine died: %s", self.client.reason)
            if not self.options.restart_engine:
                self.failure = f"the engine died: {self.client.reason}"
                await asyncio.sleep(DEATH_LINGER_SECONDS)
                return
            logger.warning("starting the engine again (--restart-engine)")
            await self.client.close()
            await asyncio.sleep(RESTART_SECONDS)

    def _load_tokenizer(self) -> Tokenizer:
        own = self.config.tokenizer
        tokenizer = load_tokenizer(
            Path(own) if own else resolve(self.config.model, self.config.revision).root
        )
        ids = range(tokenizer.vocab_size)
        self._longest = max((len(tokenizer.token_text(i)) for i in ids), default=1)
        return tokenizer

    def _loaded(self) -> None:
        self.tokenizer = self.client.tokenizer
        self.limits: RunnerLimits = self.client.limits
        self.metrics.loaded(self.limits)
        self.defaults: Mapping[str, Any] = {}
        if self.config.generation_config == "auto":
            self.defaults = dict(self.limits.generation_defaults)
        SamplingParams(**self.defaults)
        self.ready = True

    def trouble(self) -> str | None:
        """Why nothing can be answered now; None when all is well."""
        if self.draining:
            return "the server is shutting down"
        if self.failure is not None:
            return self.failure
        return self.client.trouble if self.ready else "the model is being loaded"

    def cut(self) -> None:
        """End what still runs: the time to drain is over."""
        if self.ready:
            self.client.fail_all(EngineError("the server is shutting down"))

    async def close(self) -> None:
        if hasattr(self, "client"):
            await self.client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Reading requests.

    async def in_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **options))

    async def read(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What `work` makes of the request's body. Raises HTTPError while nothing is answered."""
        if trouble := self.trouble():
            raise unavailable(trouble, "unavailable")
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise HTTPError(
                400, "the body must have Content-Type: application/json", code="invalid_media_type"
            )
        raw = await request.body()
        return work(raw) if len(raw) < _INLINE_BYTES else await self.in_thread(work, raw)

    async def asked(self, request: Request, kind: type[AskedT]) -> tuple[AskedT, SamplingParams]:
        """A request's body, for the model that it names, and the sampling that it asks for."""

        def work(raw: bytes) -> tuple[AskedT, SamplingParams]:
            body = parse(raw, kind)
            return body, sampling_params(body, self.defaults)

        body, params = await self.read(request, work)
        self.check_model(body.model)
        return body, params

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises HTTPError 404 for a model that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise HTTPError(
                404,
                f"the model {name[:100]!r} is not served here; this server has "
                f"{', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )
        return name

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check_length(len(text), "prompt")
        return await self.in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def render(
        self, body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]]
    ) -> ChatPrompt:
        """The prompt of a chat. Raises RequestError for messages that cannot be rendered."""
        self._check_length(sum(_characters(m.get("content")) for m in messages), "messages")
        return await self.in_thread(
            encode_chat,
            self.tokenizer,
            messages,
            chat_template=self._template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
        )

    def _check_length(self, characters: int, param: str) -> None:
        at_least = characters // self._longest
        if at_least >= self.limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has at least {at_least} tokens; the model's limit is "
                f"{self.limits.max_model_len} tokens",
                param,
            )

    async def job(
        self,
        ids: list[int],
        text: str | None,
        params: SamplingParams,
        body: CompletionBody | ChatBody,
    ) -> Job:
        """An admitted request. Raises RequestError for what the model cannot serve."""
        with as_asked(body):
            admit(ids, params, self.limits)
        priority, salt = body.priority or 0, body.cache_salt
        if not -(2**63) <= priority < 2**63:
            raise RequestError("priority must be a 64-bit signed integer", "priority")
        if priority and self.config.scheduler.split(",")[0] in ("fifo", "slo"):
            raise RequestError("priority needs a server with --scheduler priority", "priority")
        if salt is not None and not 1 <= len(salt) <= MAX_SALT_LENGTH:
            raise RequestError(
                f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters, not {len(salt)}",
                "cache_salt",
            )
        words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            words = await self.in_thread(bad_words_ids, self.tokenizer, params.bad_words)
        return Job(ids, params, text, words, priority, salt)

    def spelling(self, body: CompletionBody | ChatBody) -> Spelling:
        """How the tokens of an answer's log-probabilities are shown."""
        as_ids, skip = body.return_tokens_as_token_ids, body.skip_special_tokens
        return Spelling(self.tokenizer, bool(as_ids), skip is not False)

    def check_room(self, count: int) -> None:
        """Raise QueueFullError unless there is room for `count` more requests."""
        try:
            self.client.check_room(count)
        except QueueFullError:
            self.metrics.rejected("queue_full")
            raise

    def call(
        self, request: Request, body: CompletionBody | ChatBody, kind: str, jobs: Sequence[Job]
    ) -> "Call":
        """Submit the jobs. Raises QueueFullError when there is no room for all of them."""
        name = request_id(request, body.request_id)
        model = self.check_model(body.model)
        self.check_room(len(jobs))
        return Call(self, f"{kind}-{name}", name, model, jobs, self.client.submit(jobs))


class Call:
    """One HTTP request's generation, from submission to its line in the log."""

    def __init__(
        self,
        service: Service,
        name: str,
        request_id: str,
        model: str,
        jobs: Sequence[Job],
        batch: Batch,
    ) -> None:
        self.service = service
        self.id = name
        self.model = model
        self.jobs = jobs
        self.created = int(time.time())
        self.headers = [(b"x-request-id", request_id.encode())]
        self._batch = batch
        self._started = time.monotonic()
        self._first: float | None = None
        self._cached = [0] * len(jobs)
        self._seen = [False] * len(jobs)
        self._generated = [0] * len(jobs)
        self._reasons: list[FinishReason] = []
        self._texts: dict[tuple[int, int], str] = {}
        for job in jobs:
            room = service.limits.max_model_len - len(job.token_ids)
            service.metrics.received(job.params.n, job.params.max_tokens or room)

    async def deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new, as (position of the prompt, output). Raises EngineError."""
        async for position, output in self._batch:
            self._note(position, output)
            yield position, output

    def _note(self, position: int, output: RequestOutput) -> None:
        if self._first is None:
            told = output.metrics and output.metrics.first_token_time
            self._first = told or time.monotonic()
        self._seen[position] = True
        self._cached[position] = output.num_cached_tokens
        for choice in output.outputs:
            self._generated[position] += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._reasons.append(choice.finish_reason)
                self.service.metrics.ended(choice.finish_reason)
            if self.service.options.log_requests:
                key = (position, choice.index)
                self._texts[key] = self._texts.get(key, "") + choice.text

    def usage(self) -> Usage:
        return Usage.of(
            sum(len(job.token_ids) for job in self.jobs), sum(self._generated), sum(self._cached)
        )

    def close(self, error: Exception | None = None) -> None:
        """Abort what still runs, and log. `error` is what the client was told, if anything."""
        self._batch.close()
        metrics = self.service.metrics
        for i, job in enumerate(self.jobs):
            if self._seen[i]:
                metrics.answered(len(job.token_ids), self._cached[i], self._generated[i])
        missing = sum(job.params.n for job in self.jobs) - len(self._reasons)
        if missing:
            reason: FinishReason = "error" if error else "abort"
            metrics.ended(reason, missing)
            self._reasons.append(reason)
        self._log()

    def _log(self) -> None:
        usage, now = self.usage(), time.monotonic()
        first = "-" if self._first is None else f"{self._first - self._started:.3f}"
        logger.info(
            "%s prompt=%d cached=%d output=%d finish=%s ttft=%s total=%.3f",
            self.id,
            usage.prompt_tokens,
            sum(self._cached),
            usage.completion_tokens,
            ",".join(dict.fromkeys(self._reasons)),
            first,
            now - self._started,
        )
        if self.service.options.log_requests:
            texts = [job.prompt or list(job.token_ids) for job in self.jobs]
            logger.info("%s prompts=%r answers=%r", self.id, texts, list(self._texts.values()))


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


def _characters(content: object) -> int:
    """The length of a message's text, given plain or in parts; 0 for what is neither."""
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    return sum(_characters(part.get("text")) for part in content if isinstance(part, dict))


def request_id(request: Request, asked: str | None) -> str:
    """The id to answer with: the body's, else the header's if it is safe to repeat, else new.

    Raises RequestError for one in the body that is not safe. It is never the engine's key, so
    equal ids in flight do not meet.
    """
    if asked is not None:
        if not _SAFE_ID.fullmatch(asked):
            raise RequestError(
                "request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", "request_id"
            )
        return asked
    header = request.headers.get("x-request-id", "")
    return header if _SAFE_ID.fullmatch(header) else uuid.uuid4().hex


def _served_names(config: EngineConfig, options: ServerConfig) -> tuple[str, ...]:
    """What requests may call the model. A path is not shown: its last part stands for it."""
    if options.served_model_name:
        names = [name.strip() for name in options.served_model_name.split(",")]
        return tuple(dict.fromkeys(name for name in names if name)) or ("model",)
    model = config.model.rstrip("/")
    if model.endswith(".gguf") or Path(model).expanduser().exists() or model.startswith((".", "/")):
        return (Path(model).name.removesuffix(".gguf"),)
    return (model,)
