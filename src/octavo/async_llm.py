"""`AsyncLLM`: the interface for asyncio programs, in vLLM's shape, over an engine process.

The engine's client runs on an event loop of its own, in a thread: so an AsyncLLM may be made inside
or outside of a loop, used from several, and a loop that is busy delays no other request. HTTP is
`octavo.server`'s part.
"""

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine.arg_utils import options_of
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.client import EXECUTOR, EngineClient, Observer, merge
from octavo.engine.messages import Stats
from octavo.engine.preflight import check_options
from octavo.engine.requests import (
    Chat,
    Messages,
    Prompt,
    Prompted,
    RequestMaker,
    add_messages,
    check_arguments,
)
from octavo.engine.stats import EngineStats, LatestStats, merged
from octavo.errors import ConfigError, EngineDeadError, EngineError, RequestError, RequestTypeError
from octavo.log import get_logger
from octavo.models.files import resolve_tokenizer
from octavo.outputs import RequestOutput
from octavo.params import RequestOutputKind, SamplingParams
from octavo.processes import Owner
from octavo.text.interface import ModelTokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.vllm_names import Kind, missing

logger = get_logger(__name__)

T = TypeVar("T")

_SHUT_DOWN = "this AsyncLLM was shut down; make a new one"


class AsyncLLM:
    """A model, ready to generate for asyncio tasks.

    Keywords are the fields of `config.EngineConfig`. Returns when the model is loaded: inside of a
    running loop that blocks it, as in vLLM. Raises ConfigError as `LLM` does. The engine is a
    process of its own, so `scheduler` is a policy's name (`module:Class` for your own), and a
    script needs no `if __name__ == "__main__"`.

    >>> engine = AsyncLLM("smollm2")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(), "request-1"):
    ...     print(output.outputs[0].text)
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        scheduler = options.get("scheduler", "")
        if not isinstance(scheduler, str):
            raise ConfigError(
                f"scheduler must be a name, not a {type(scheduler).__name__}: the engine is "
                "another process; name your own policy as 'module:Class'"
            )
        self._start(EngineConfig.from_options({"model": model, **options}), EXECUTOR)

    @classmethod
    def from_engine_args(cls, engine_args: object) -> "AsyncLLM":
        """The engine that `engine_args` describes: EngineArgs, an EngineConfig, or a mapping."""
        return cls(**options_of(engine_args))

    if not TYPE_CHECKING:  # a checker knows what there is

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing(Kind.ASYNC_METHOD, self, name), name=name, obj=self)

    @classmethod
    def over(cls, config: EngineConfig, executor: str = EXECUTOR) -> "AsyncLLM":
        """An engine over `executor`: `module:name` of a function that makes one of a config."""
        engine = cls.__new__(cls)
        engine._start(config, executor)
        return engine

    def _start(self, config: EngineConfig, executor: str) -> None:
        check_options(config)
        self.config = config
        self._owner = Owner("this AsyncLLM")
        self._ids = itertools.count()
        self._readers: dict[str, _Reader] = {}  # of requests in flight
        self._host = _Host(config, executor)
        # At the latest when the interpreter ends: a forgotten `shutdown` leaves no process.
        self._end = weakref.finalize(self, self._host.close)
        self._tokenizer = self._host.client.tokenizer
        capabilities = self._host.client.capabilities
        self._requests = RequestMaker(config, self._tokenizer, capabilities, time.monotonic)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **vllm_arguments: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields outputs as `sampling_params.output_kind` says.

        CUMULATIVE: all so far; DELTA: what is new; FINAL_ONLY: once. A reader that is late gets the
        outputs that it missed as one. Leaving the loop, or cancelling the task, aborts the request
        and frees its memory. `request_id` must differ from those in flight; None makes one.
        Raises RequestError naming the problem, EngineError when the engine fails.
        `vllm_arguments`: vLLM's others, with neutral values such as `lora_request=None`.
        """
        check_arguments("generate", vllm_arguments)
        self._check_usable()
        params = self._requests.default_params() if sampling_params is None else sampling_params
        outputs = self._outputs(prompt, params, request_id, priority, deadline)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def _outputs(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        deadline: float | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = self._request_id(request_id)
        reader = _Reader(asyncio.get_running_loop())
        if self._readers.setdefault(name, reader) is not reader:
            raise RequestError(
                f"a request with the id {name[:128]!r} is in flight; give each its own",
                "request_id",
            )
        pump: Future[None] | None = None
        try:
            kind = getattr(params, "output_kind", RequestOutputKind.DELTA)
            sent = RequestOutputKind.DELTA if kind is RequestOutputKind.CUMULATIVE else kind
            request = await asyncio.to_thread(
                self._requests.make, name, prompt, params, sent, priority, deadline
            )
            pump = self._host.start(_pump(self._host.client, request, reader))
            total: RequestOutput | None = None
            while (output := await reader.next()) is not None:
                output.prompt = request.text
                if isinstance(prompt, Chat):
                    add_messages(request.reader, output)
                if kind is RequestOutputKind.CUMULATIVE:
                    total = output if total is None else merge(total, output)
                    output = _copied(total)
                yield output
        finally:
            del self._readers[name]
            if pump is not None:
                pump.cancel()

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, as `generate` does; `template`: the keywords of `LLM.chat`.

        A choice that has ended has its `message`: reasoning and tool calls apart. Without
        `sampling_params` the answer may fill the model's window.
        """
        self._check_usable()
        params = self._requests.chat_params() if sampling_params is None else sampling_params
        prompt = await asyncio.to_thread(self._requests.chat, messages, **template)
        outputs = self._outputs(prompt, params, request_id, priority, deadline)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their loops get what there is, with the finish reason `abort`, and end."""
        self._check_usable()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._host.call(self._host.client.finish, ids)

    async def get_tokenizer(self) -> ModelTokenizer:
        return ModelTokenizer(self._tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults, or the built-in ones if those are switched off."""
        return self._requests.default_params()

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes. False if running requests still hold some."""
        self._check_usable()
        pending = self._host.start(self._host.client.reset_prefix_cache())
        return await asyncio.wrap_future(pending)

    async def check_health(self) -> None:
        """Raise EngineError (EngineDeadError) with the reason if the engine cannot answer."""
        self._check_usable()
        if self._host.client.reason is not None:
            raise self.dead_error
        if (reason := self._host.client.unhealthy_reason) is not None:
            raise EngineError(reason)

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, or was shut down."""
        return self._host.client.reason is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that says why the engine is dead."""
        return EngineDeadError(self._host.client.reason or "it is alive")

    @property
    def stats(self) -> EngineStats:
        """The engine's latest snapshot, at most a second old while it works."""
        return self._host.stats

    async def do_log_stats(self) -> None:
        """Log a line of statistics."""
        stats = self.stats
        logger.info(
            "%d running, %d waiting, %d swapped; tokens/s: %.1f in, %.1f out; KV cache %.1f%% "
            "held; prefix cache hits %.1f%%",
            stats.running, stats.waiting, stats.swapped, stats.prompt_throughput, stats.throughput,
            100 * stats.kv_blocks_usage, 100 * stats.cache_hit_rate,
        )  # fmt: skip

    def shutdown(self) -> None:
        """End the engine's process; requests in flight fail. May be called again.

        In a fork, does nothing.
        """
        self._host.close()

    async def __aenter__(self) -> "AsyncLLM":
        self._check_usable()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def _check_usable(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self._host.closed:
            raise EngineError(_SHUT_DOWN)

    def _request_id(self, given: str | None) -> str:
        if given is None:
            return f"octavo-{next(self._ids)}"
        if not isinstance(given, str):
            raise RequestTypeError(
                f"request_id must be a string, not {type(given).__name__}", "request_id"
            )
        return given


AsyncLLMEngine = AsyncLLM  # vLLM's older name


class _Host:
    """The client of an engine, and the thread whose event loop it lives on."""

    def __init__(self, config: EngineConfig, executor: str) -> None:
        self.closed = False
        self._observer = _Latest()
        self._owner = Owner("this engine")
        self._closing = threading.Lock()
        self._starting = threading.Lock()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="octavo-async-llm", daemon=True
        )
        self._thread.start()
        starting = self.start(self._open(config, executor))
        try:
            self.client = starting.result()
        except BaseException:  # also Ctrl-C: the client then ends the process that loads
            starting.cancel()
            self._stop_loop()
            raise

    async def _open(self, config: EngineConfig, executor: str) -> EngineClient:
        def tokenizer() -> Tokenizer:
            return load_tokenizer(
                resolve_tokenizer(config.model, config.revision, config.tokenizer)
            )

        client = EngineClient(config, executor)
        client.observer = self._observer
        await client.start(tokenizer)
        return client

    @property
    def stats(self) -> EngineStats:
        return merged(list(self._observer.stats.values()))

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run `work` on the loop; to cancel the future cancels the work.

        Raises EngineError where the loop stops: nobody would run it.
        """
        with self._starting:
            if self._stopping:
                work.close()
                raise EngineError(_SHUT_DOWN)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that is called on the loop."""

        async def work() -> T:
            return function(*args)

        return await asyncio.wrap_future(self.start(work()))

    def close(self) -> None:
        """End the engine and the thread. Does nothing in a fork, or a second time."""
        if not self._owner.is_here():
            return
        if threading.current_thread() is self._thread:  # the garbage collector's doing
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self._closing:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(CancelledError):
                    self.start(self.client.close()).result()
                self._stop_loop()

    def _stop_loop(self) -> None:
        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        self.closed = True
        with self._starting:
            self._stopping = True
        asyncio.run_coroutine_threadsafe(finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Latest(Observer):
    """The latest statistics of each engine."""

    def __init__(self) -> None:
        self._latest = LatestStats()

    @property
    def stats(self) -> dict[int, EngineStats]:
        return self._latest.by_engine

    def loaded(self, engine: int, capabilities: EngineCapabilities) -> None:
        self._latest.counters = [gauge.name for gauge in capabilities.gauges if gauge.counter]

    def update(self, engine: int, report: Stats) -> None:
        self._latest.update(engine, report.stats)

    def lost(self, engine: int) -> None:
        self._latest.lost(engine)


class _Reader:
    """The outputs of one request on their way from the engine's loop to a caller's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fresh = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: RequestOutput | None = None  # merged, so a late reader's are bounded
        self._ended = False
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            self._unread = output if self._unread is None else merge(self._unread, output)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error, self._ended = error, True
        self._wake()

    async def next(self) -> RequestOutput | None:
        """What is new; None at the end. Raises the error that the request ended with."""
        while True:
            self._fresh.clear()
            with self._lock:  # together: the last output may come just before the end
                output, self._unread = self._unread, None
                error, ended = self._error, self._ended
            if output is not None:
                return output
            if error is not None:
                raise error
            if ended:
                return None
            await self._fresh.wait()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(self._fresh.set)


async def _pump(client: EngineClient, request: Prompted, reader: _Reader) -> None:
    """Submit a request and pass its outputs on; to cancel it aborts the request."""
    try:
        batch = await client.submit([request.submission], request.markers)
        try:
            async for _, output in batch:
                reader.put(output)
        finally:
            batch.close()
    except BaseException as error:
        reader.end(error)
        raise
    reader.end()


def _copied(output: RequestOutput) -> RequestOutput:
    """A copy that later deltas do not change."""
    choices = [
        replace(
            choice,
            token_ids=choice.token_ids.copy(),
            logprobs=None if choice.logprobs is None else choice.logprobs.copy(),
        )
        for choice in sorted(output.outputs, key=lambda choice: choice.index)
    ]
    return replace(output, outputs=choices)
