"""The web process's side of the engines: submit, stream, abort, health.

Each request is computed by one engine of the pool (`engine.pool`), which `engine.routing` chooses.
The reports of an engine process become text (`engine.output`) here; each batch of requests has one
place for its deltas. Unread deltas are merged, so a slow reader's backlog is bounded by its own
answer, and no other reader waits for it.

When an engine dies or is silent (`engine.link`), its requests continue on another one, or when it
has been started again (`engine.resumption`). When none is left and none is started again, all
batches raise EngineDeadError, so does every later submit, and `died` is set.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.core.prefix_cache import block_names
from octavo.core.submission import Submission
from octavo.engine.admission import admit
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.launcher import local_launchers
from octavo.engine.link import EngineLink, RequestReport
from octavo.engine.messages import Abort, Accepted, Add, FinishChoice, Refused, Stats, Step
from octavo.engine.output import OutputProcessor
from octavo.engine.pool import EnginePool, Launchers
from octavo.engine.ray_launcher import ray_launchers
from octavo.engine.resumption import Resumption
from octavo.engine.routing import Load, Reason, Router
from octavo.engine.seeds import SeedSource
from octavo.errors import (
    EngineDeadError,
    EngineError,
    OctavoError,
    QueueFullError,
    RequestError,
    counted,
)
from octavo.log import get_logger
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.processes import Owner
from octavo.text.markers import Markers
from octavo.text.tokenizer import Tokenizer

logger = get_logger(__name__)

EXECUTOR = "octavo.engine.executor:create_process_executor"


class Batch:
    """The outputs of requests that were submitted together, as `(position, output)` pairs.

    Iterate once. Each pair holds what is new of one request since its last pair. Ends when all
    have ended. Raises EngineError when one of them fails, RequestError when it asks for what turns
    out to be impossible. `close` aborts what has not ended.
    """

    def __init__(self, client: "EngineClient", ids: Sequence[str]) -> None:
        self._client = client
        self._position = {request_id: i for i, request_id in enumerate(ids)}
        self._open = dict.fromkeys(ids)
        self._queued = set(ids)  # sent, and neither accepted nor refused yet
        self._pending: dict[str, RequestOutput] = {}  # deltas that were not read yet
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader
        self._engines = [0] * len(ids)
        self.on_read: Callable[[int, RequestOutput], None] | None = None  # told what is read

    def assign(self, request_id: str, engine: int) -> None:
        """The engine of this number computes a request from now on."""
        self._engines[self._position[request_id]] = engine

    def engine_of(self, position: int) -> int:
        """The number of the engine that computes a request, or did at its end."""
        return self._engines[position]

    def put(self, output: RequestOutput) -> None:
        """What is new of one request; merged into what was not read yet."""
        unread = self._pending.get(output.request_id)
        self._pending[output.request_id] = output if unread is None else merge(unread, output)
        self._wake()

    def accept(self, request_id: str) -> None:
        self._queued.discard(request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake()

    def close(self) -> None:
        self._client.abort(list(self._open))
        self._open.clear()

    async def _news(self) -> None:
        """Wait until something is put, accepted or failed. (An `asyncio.Event` takes twice as
        long, and this is waited for once for every token.)"""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def accepted(self) -> None:
        """Wait until the engine has queued all of them. Raises what it refuses one with."""
        while self._queued:
            if self._failure:
                raise self._failure
            await self._news()

    def __aiter__(self) -> "Batch":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while self._open:
            if self._failure:
                raise self._failure
            if self._pending:
                request_id = next(iter(self._pending))
                output = self._pending.pop(request_id)
                if output.error is not None:
                    refused = output.error_param is not None
                    kind = RequestError if refused else EngineError
                    raise kind(output.error, output.error_param)
                if output.finished:
                    del self._open[request_id]
                position = self._position[request_id]
                if self.on_read is not None:
                    self.on_read(position, output)
                return position, output
            await self._news()
        raise StopAsyncIteration


def _launchers_of(config: EngineConfig) -> Launchers:
    """Where the configuration says that engines run. Raises ConfigError."""
    if config.distributed_executor_backend == "ray":
        return ray_launchers(config)
    return local_launchers(config)


def merge(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one. `old` is changed and returned."""
    choices = {choice.index: choice for choice in old.outputs}
    for choice in new.outputs:
        if choice.index in choices:
            _append(choices[choice.index], choice)
        else:
            old.outputs.append(choice)
    old.prompt_logprobs = new.prompt_logprobs or old.prompt_logprobs
    old.num_cached_tokens = new.num_cached_tokens or old.num_cached_tokens
    old.finished, old.metrics = new.finished, new.metrics
    old.error, old.error_param = new.error, new.error_param
    return old


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids.extend(new.token_ids)
    if new.logprobs:
        old.logprobs = [*(old.logprobs or ()), *new.logprobs]
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    old.message = new.message


class Observer:
    """Who is told what the engines do, each by its number; here nobody."""

    def update(self, engine: int, report: Stats) -> None:
        """A snapshot came."""

    def routed(self, engine: int, reason: Reason) -> None:
        """One of several engines was chosen for a request."""

    def loaded(self, engine: int, capabilities: EngineCapabilities) -> None:
        """Its model is loaded, for the first time or again."""

    def lost(self, engine: int) -> None:
        """It is dead."""

    def resumed(self, engine: int) -> None:
        """It continues a request of an engine that has died."""


@dataclass(slots=True)
class InFlight:
    """A request that has not ended: where its outputs go, and which engine computes it.

    arrived: seconds of our clock. link: None while it waits for another engine. queued: its engine
    has not accepted it yet. started: it has a token from there.
    """

    submission: Submission
    batch: Batch
    arrived: float
    link: EngineLink | None = None
    queued: bool = True
    started: bool = False

    @property
    def request_id(self) -> str:
        return self.submission.request_id


class EngineClient:
    """The requests of one event loop, and the engine processes that compute them.

    restart: start an engine that has died again. launchers: where each of them runs; default: as
    the configuration says.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: str = EXECUTOR,
        launchers: Launchers | None = None,
        restart: bool = False,
    ) -> None:
        self.config = config
        self.died = asyncio.Event()
        self.reason: str | None = None  # why no engine is left
        self.observer = Observer()
        self._pool = EnginePool(config, executor, launchers or _launchers_of(config), self, restart)
        self._ids = itertools.count()
        self._requests: dict[str, InFlight] = {}
        self._seeds = SeedSource(config.seed)
        self._resumption = Resumption(lambda: self._pool.serving, self._continue, self._fail_one)
        self._loads = [Load() for _ in self.links]
        self._owner = Owner("this engine client")

    async def start(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """Start the processes, wait until the model is loaded. `tokenizer` runs meanwhile.

        Raises ConfigError when an engine cannot start as asked, EngineDeadError otherwise.
        """
        try:
            await self._pool.open()
            self.tokenizer = await asyncio.to_thread(tokenizer)
            self._outputs = OutputProcessor(self.tokenizer, time.time() - time.monotonic())
            self.capabilities = await self._pool.loaded()
        except BaseException as error:
            await self._give_up()
            if isinstance(error, (OSError, zmq.ZMQError)):
                raise EngineDeadError(f"it could not be started: {error}") from error
            raise
        self._router = Router(len(self.links), self.capabilities.limits.num_blocks)
        for link in self.links:
            self.observer.loaded(link.index, link.capabilities or self.capabilities)

    async def _give_up(self) -> None:
        """Undo a start that has failed; what goes wrong here must not hide why it failed."""
        try:
            await self.close()
        except Exception:
            logger.exception("closing after a failed start")

    @property
    def links(self) -> list[EngineLink]:
        """One for each engine, by its number."""
        return self._pool.links

    # Requests.

    def new_id(self) -> str:
        """A request id that no other request to these engines has."""
        return f"r{next(self._ids)}"

    def check_queue(self, count: int) -> None:
        """Raise QueueFullError unless `count` more requests fit, EngineDeadError if none can."""
        self._check_alive()
        engines = len(self._pool.serving)
        limit = engines * (self.config.max_num_seqs + self.config.waiting_limit)
        if len(self._requests) + count > limit:
            terms = "(max_num_seqs + max_waiting)"
            terms = terms if engines == 1 else f"({engines} engines x {terms})"
            raise QueueFullError(
                f"{counted(len(self._requests), 'request')} in flight and {count} more would "
                f"exceed the limit of {limit} {terms}; try again later"
            )

    async def submit(
        self, submissions: Sequence[Submission], markers: Markers | None = None
    ) -> Batch:
        """Send admitted requests to engines; returns when these have queued all of them.

        markers: of the parser that their texts are for; None where there is none.
        All or none: raises QueueFullError when they do not fit in the queue or a scheduler
        refuses one, RequestError as the engine raised it, EngineError, EngineDeadError.
        """
        self.check_queue(len(submissions))
        batch = Batch(self, [submission.request_id for submission in submissions])
        for submission in map(self._with_seed, submissions):
            arrival = submission.arrival_time
            arrival = time.monotonic() if arrival is None else arrival
            self._outputs.add(submission, None, arrival, markers)
            request = InFlight(submission, batch, arrival)
            self._requests[request.request_id] = request
            self._send(request, submission, self._route(submission, self._pool.serving))
        try:
            await batch.accepted()
        except BaseException:
            batch.close()
            raise
        return batch

    def _with_seed(self, submission: Submission) -> Submission:
        """With the seed that every engine draws with, if it has none of its own."""
        if submission.params.seed is not None:
            return submission
        return msgspec.structs.replace(submission, seed=self._seeds.next())

    def _send(self, request: InFlight, submission: Submission, link: EngineLink) -> None:
        """Have an engine compute a request, from its beginning or as `submission` continues it."""
        request.link, request.queued, request.started = link, True, False
        self._count(request, +1)
        request.batch.assign(request.request_id, link.index)
        link.send(Add(submission))

    def _route(self, submission: Submission, among: Sequence[EngineLink]) -> EngineLink:
        """The engine for a request, one of several that serve."""
        if len(self.links) == 1:
            return self.links[0]
        names: list[bytes] = []
        if self.config.enable_prefix_caching:
            size = self.capabilities.limits.block_size
            names = block_names(submission.token_ids, size, submission.cache_salt)
        loads = {link.index: self._loads[link.index] for link in among}
        route = self._router.choose(names, loads)
        self.observer.routed(route.replica, route.reason)
        return self.links[route.replica]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort those of the requests that are still in flight."""
        if not self._owner.is_here():
            return
        known = [found for i in request_ids if (found := self._pop(i))]
        for request in known:
            self._outputs.abort(request.request_id)
        self._send_aborts(known)

    def finish(self, request_ids: Sequence[str]) -> None:
        """As `abort`, but their batches get what there is, with the finish reason `abort`."""
        for request_id in request_ids:
            if request := self._pop(request_id):
                if output := self._outputs.abort(request_id, time.monotonic()):
                    request.batch.put(output)
                request.batch.accept(request_id)
                self._send_aborts([request])

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes of all engines. False if running requests still hold some, or
        an engine is silent."""
        self._check_alive()
        links = self._pool.serving
        silent = any(link.is_silent for link in self.links)
        dropped = await asyncio.gather(*(link.reset_prefix_cache() for link in links))
        for link, done in zip(links, dropped, strict=True):
            if done:
                self._router.forget(link.index)
        return all(dropped) and not silent

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def engine_of(self, request_id: str) -> int | None:
        """The number of the engine that computes a request in flight, if one does."""
        request = self._requests.get(request_id)
        return request.link.index if request and request.link else None

    @property
    def down(self) -> dict[int, str]:
        """Why engines answer nothing at the moment, by number; those that do are not there."""
        return self._pool.down

    @property
    def unhealthy_reason(self) -> str | None:
        """Why nothing is answered at the moment; None when an engine is healthy."""
        if self.reason is not None:
            return self.reason
        return None if self._pool.serving else _told(self.down)

    def fail_all(self, error: Exception) -> None:
        """End everything in flight with `error`."""
        self._fail(list(self._requests.values()), error)

    async def close(self) -> None:
        """Stop the processes and wait for their ends; kill those that do not exit in time.

        In a fork, does nothing: engines and sockets belong to the process that made them.
        """
        if not self._owner.is_here():
            return
        self._die("shutdown requested")
        self._resumption.close()
        await self._pool.close()

    def _check_alive(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self.reason is not None:
            raise EngineDeadError(self.reason)
        if (reason := self.unhealthy_reason) is not None:
            raise EngineError(reason)

    def _pop(self, request_id: str) -> InFlight | None:
        """Take a request out of those in flight."""
        if request := self._requests.pop(request_id, None):
            self._count(request, -1)
            if self._resumption:
                self._resumption.forget(request_id)
        return request

    def _count(self, request: InFlight, sign: int) -> None:
        """Add a request to the load of its engine, if it has one, or take it off."""
        if request.link is None:
            return
        waiting, running = self._loads[request.link.index]
        choices = sign * request.submission.params.n
        more = (0, choices) if request.started else (choices, 0)
        self._loads[request.link.index] = Load(waiting + more[0], running + more[1])

    def _fail(self, requests: Sequence[InFlight], error: Exception) -> None:
        for request in requests:
            self._pop(request.request_id)
        for request in requests:
            self._outputs.abort(request.request_id)
            request.batch.fail(error)
        self._send_aborts(requests)

    def _send_aborts(self, requests: Sequence[InFlight]) -> None:
        """Tell the engines that compute these requests to stop; the dead ones have."""
        for link in self.links:
            ids = [request.request_id for request in requests if request.link is link]
            if ids and link.reason is None:
                link.send(Abort(ids))

    # Reports of a link.

    def received(self, link: EngineLink, report: RequestReport) -> None:
        if isinstance(report, Step):
            self._step(link, report)
        elif isinstance(report, Stats):
            if link.reason is None:  # else what it ran, others have taken over
                self.observer.update(link.index, report)
        elif isinstance(report, Refused):
            if request := self._of(link, report.request_id):
                self._pop(report.request_id)
                self._outputs.abort(report.request_id)
                request.batch.fail(report.fault.error())
        elif isinstance(report, Accepted):
            for request_id in report.request_ids:
                if request := self._of(link, request_id):
                    request.queued = False
                    request.batch.accept(request_id)
        else:
            link.saw(report)

    def link_died(self, link: EngineLink, error: OctavoError) -> None:
        if self.reason is not None:
            return
        self.observer.lost(link.index)
        if self._pool.is_lost:
            self._die(_told(self._pool.down))
            return
        self._router.forget(link.index)
        self._interrupt(link, f"{link.name} died ({link.reason or error})")

    def link_ready(self, link: EngineLink) -> None:
        assert link.capabilities is not None
        self.observer.loaded(link.index, link.capabilities)
        self._resumption.go_on()

    def link_silent(self, link: EngineLink, reason: str) -> None:
        requests = self._computed_by(link)
        if requests and self._pool.serving:
            self._send_aborts(requests)  # for when it answers again
            self._interrupt(link, f"{link.name} does not answer ({reason})")
        elif requests:
            count = counted(len(requests), "request")
            logger.error("%s does not answer (%s): %s failed", link.name, reason, count)
            self._fail(requests, EngineError(reason))

    def _interrupt(self, link: EngineLink, reason: str) -> None:
        """What this engine computed, another one continues, unless engines may die of it."""
        failed: list[tuple[InFlight, str]] = []
        requests = self._computed_by(link)
        for request in requests:
            self._count(request, -1)
            request.link = None
            why = self._resumption.interrupt(request.request_id, request.submission.deadline)
            if why is not None:
                failed.append((request, why))
        logger.error("%s%s", reason, self._told_what_follows(len(requests) - len(failed)))
        for request, why in failed:
            logger.error("request %s fails: %s", request.request_id, why)
            self._fail([request], EngineError(f"{reason}; {why}"))
        self._resumption.go_on()

    def _told_what_follows(self, count: int) -> str:
        if not count:
            return ""
        names = " and ".join(link.name for link in self._pool.serving)
        verb = ("continue" if names else "wait") + ("s" if count == 1 else "")
        where = f"on {names}" if names else "for an engine"
        return f": {counted(count, 'request')} {verb} {where}"

    def _continue(self, request_id: str, links: Sequence[EngineLink]) -> EngineLink | None:
        """Have one of `links` go on with a request; None, and it fails, if they cannot."""
        request = self._requests[request_id]
        submission = msgspec.structs.replace(
            request.submission,
            arrival_time=request.arrived,
            continuation=self._outputs.interrupted(request_id),
        )
        link = self._route(submission, links)
        try:
            admit(submission, link.capabilities or self.capabilities)
        except RequestError as error:
            self._fail([request], error)
            return None
        self._send(request, submission, link)
        self.observer.resumed(link.index)
        return link

    def _fail_one(self, request_id: str, error: EngineError) -> None:
        self._fail([self._requests[request_id]], error)

    def _die(self, reason: str) -> None:
        """No engine is left."""
        if self.reason is None:
            self.reason = reason
            self.fail_all(EngineDeadError(reason))
            self.died.set()

    def _of(self, link: EngineLink, request_id: str) -> InFlight | None:
        """The request, if it is in flight and computed by this link's engine."""
        request = self._requests.get(request_id)
        return request if request is not None and request.link is link else None

    def _computed_by(self, link: EngineLink) -> list[InFlight]:
        return [request for request in self._requests.values() if request.link is link]

    def _step(self, link: EngineLink, step: Step) -> None:
        # Without the updates of requests that were aborted meanwhile.
        updates = []
        interrupted = len(self._resumption) > 0
        for update in step.updates:
            request = self._requests.get(update.request_id)
            # What comes while it is queued is from its first time at this engine.
            if request is None or request.link is not link or request.queued:
                continue
            updates.append(update)
            if interrupted:
                self._resumption.gained(update.request_id, len(update.token_ids))
            if not request.started and update.token_ids:
                self._count(request, -1)
                request.started = True
                self._count(request, +1)
        outputs, stops = self._outputs.process(updates, time.monotonic())
        for request_id, index in stops:
            link.send(FinishChoice(request_id, index))
        for output in outputs:
            batch = self._requests[output.request_id].batch
            if output.finished:
                self._pop(output.request_id)
            batch.put(output)


def _told(down: dict[int, str]) -> str:
    """Why engines are down, in one line."""
    if len(down) == 1:
        return next(iter(down.values()))
    if not down:
        return "the model is being loaded"  # everywhere it just was
    return "; ".join(f"engine {index}: {reason}" for index, reason in down.items())
