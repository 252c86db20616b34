"""The web process's side of the engine: submit, stream, abort, health.

The reports of an engine process (`engine.link`) become text (`engine.output`) here; each batch of
requests has one place for its deltas. Unread deltas are merged, so a slow reader's backlog is
bounded by its own answer, and no other reader waits for it.

When the engine dies, all batches in flight raise EngineDeadError, so does every later submit,
and `died` is set. Silence (`engine.link`) fails the requests in flight in the same way, until the
process sends again.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine.launcher import Launcher, LocalLauncher
from octavo.engine.link import EngineLink, RequestReport
from octavo.engine.messages import Abort, Accepted, Add, FinishChoice, Refused, Stats, Step
from octavo.engine.output import OutputProcessor
from octavo.errors import EngineDeadError, EngineError, OctavoError, QueueFullError, counted
from octavo.log import get_logger
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.processes import Owner
from octavo.text.tokenizer import Tokenizer

logger = get_logger(__name__)

EXECUTOR = "octavo.engine.executor:create_executor"


class Batch:
    """The outputs of requests that were submitted together, as `(position, output)` pairs.

    Iterate once. Each pair holds what is new of one request since its last pair. Ends when all
    have ended. Raises EngineError when one of them fails. `close` aborts what has not ended.
    """

    def __init__(self, client: "EngineClient", ids: Sequence[str]) -> None:
        self._client = client
        self._position = {request_id: i for i, request_id in enumerate(ids)}
        self._open = dict.fromkeys(ids)
        self._queued = set(ids)  # sent, and neither accepted nor refused yet
        self._pending: dict[str, RequestOutput] = {}  # deltas that were not read yet
        self._failure: Exception | None = None
        self._event = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """What is new of one request; merged into what was not read yet."""
        unread = self._pending.get(output.request_id)
        self._pending[output.request_id] = output if unread is None else merge(unread, output)
        self._event.set()

    def accept(self, request_id: str) -> None:
        self._queued.discard(request_id)
        self._event.set()

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._event.set()

    def close(self) -> None:
        self._client.abort(list(self._open))
        self._open.clear()

    async def accepted(self) -> None:
        """Wait until the engine has queued all of them. Raises what it refuses one with."""
        while self._queued:
            if self._failure:
                raise self._failure
            self._event.clear()
            await self._event.wait()

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
                    raise EngineError(output.error)
                if output.finished:
                    del self._open[request_id]
                return self._position[request_id], output
            self._event.clear()
            await self._event.wait()
        raise StopAsyncIteration


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
    old.finished, old.metrics, old.error = new.finished, new.metrics, new.error
    return old


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids.extend(new.token_ids)
    if new.logprobs:
        old.logprobs = [*(old.logprobs or ()), *new.logprobs]
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason


@dataclass(slots=True)
class InFlight:
    """A request that has not ended: where its outputs go, and which engine computes it."""

    submission: Submission
    batch: Batch
    link: EngineLink


class EngineClient:
    """The requests of one event loop, and the engine process that computes them."""

    def __init__(
        self,
        config: EngineConfig,
        executor: str = EXECUTOR,
        launcher: Callable[[], Launcher] = LocalLauncher,
    ) -> None:
        self.config = config
        self.died = asyncio.Event()
        self.reason: str | None = None  # why the engine is dead
        self.on_stats: Callable[[Stats], None] = _ignore
        self.links = [EngineLink(config, executor, launcher(), self)]
        self._ids = itertools.count()
        self._requests: dict[str, InFlight] = {}
        self._owner = Owner("this engine client")

    async def start(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """Start the process, wait until the model is loaded. `tokenizer` runs meanwhile.

        Raises ConfigError when the engine cannot start as asked, EngineDeadError otherwise.
        """
        try:
            for link in self.links:
                await link.open()
            self.tokenizer = await asyncio.to_thread(tokenizer)
            self._outputs = OutputProcessor(self.tokenizer, time.time() - time.monotonic())
            self.capabilities = await self.links[0].loaded()
        except BaseException as error:
            await self._give_up()
            if isinstance(error, (OSError, zmq.ZMQError)):
                raise EngineDeadError(f"it could not be started: {error}") from error
            raise

    async def _give_up(self) -> None:
        """Undo a start that has failed; what goes wrong here must not hide why it failed."""
        try:
            await self.close()
        except Exception:
            logger.exception("closing after a failed start")

    # Requests.

    def new_id(self) -> str:
        """A request id that no other request to this engine has."""
        return f"r{next(self._ids)}"

    def check_queue(self, count: int) -> None:
        """Raise QueueFullError unless `count` more requests fit, EngineDeadError if none can."""
        self._check_alive()
        limit = self.config.max_num_seqs + self.config.waiting_limit
        if len(self._requests) + count > limit:
            raise QueueFullError(
                f"{counted(len(self._requests), 'request')} in flight and {count} more would "
                f"exceed the limit of {limit} (max_num_seqs + max_waiting); try again later"
            )

    async def submit(self, submissions: Sequence[Submission]) -> Batch:
        """Send admitted requests to the engine; returns when it has queued all of them.

        All or none: raises QueueFullError when they do not fit in the queue or the scheduler
        refuses one, RequestError as the engine raised it, EngineError, EngineDeadError.
        """
        self.check_queue(len(submissions))
        batch = Batch(self, [submission.request_id for submission in submissions])
        for submission in submissions:
            arrival = submission.arrival_time
            self._outputs.add(submission, None, time.monotonic() if arrival is None else arrival)
            request = InFlight(submission, batch, self.links[0])
            self._requests[submission.request_id] = request
            request.link.send(Add(submission))
        try:
            await batch.accepted()
        except BaseException:
            batch.close()
            raise
        return batch

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort those of the requests that are still in flight."""
        if not self._owner.is_here():
            return
        known = [found for i in request_ids if (found := self._requests.pop(i, None))]
        for request in known:
            self._outputs.abort(request.submission.request_id)
        self._send_aborts(known)

    def finish(self, request_ids: Sequence[str]) -> None:
        """As `abort`, but their batches get what there is, with the finish reason `abort`."""
        for request_id in request_ids:
            if request := self._requests.pop(request_id, None):
                if output := self._outputs.abort(request_id, time.monotonic()):
                    request.batch.put(output)
                request.batch.accept(request_id)
                self._send_aborts([request])

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes. False if running requests still hold some."""
        self._check_alive()
        return all(await asyncio.gather(*(link.reset_prefix_cache() for link in self.links)))

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def unhealthy_reason(self) -> str | None:
        """Why nothing is answered at the moment; None when the engine is healthy."""
        return self.reason or self.links[0].unhealthy_reason

    def fail_all(self, error: Exception) -> None:
        """End everything in flight with `error`."""
        self._fail(list(self._requests.values()), error)

    async def close(self) -> None:
        """Stop the process and wait for its end; kill it if it does not exit in time.

        In a fork, does nothing: engine and sockets belong to the process that made them.
        """
        if not self._owner.is_here():
            return
        for link in self.links:
            await link.close()

    def _check_alive(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self.reason is not None:
            raise EngineDeadError(self.reason)
        if (reason := self.unhealthy_reason) is not None:
            raise EngineError(reason)

    def _fail(self, requests: Sequence[InFlight], error: Exception) -> None:
        for request in requests:
            del self._requests[request.submission.request_id]
        for request in requests:
            self._outputs.abort(request.submission.request_id)
            request.batch.fail(error)
        self._send_aborts(requests)

    def _send_aborts(self, requests: Sequence[InFlight]) -> None:
        """Tell the engines that compute these requests to stop; the dead ones have."""
        for link in self.links:
            ids = [one.submission.request_id for one in requests if one.link is link]
            if ids and link.reason is None:
                link.send(Abort(ids))

    # Reports of a link.

    def received(self, link: EngineLink, report: RequestReport) -> None:
        if isinstance(report, Step):
            self._step(link, report)
        elif isinstance(report, Stats):
            self.on_stats(report)
        elif isinstance(report, Refused):
            if request := self._of(link, report.request_id):
                del self._requests[report.request_id]
                self._outputs.abort(report.request_id)
                request.batch.fail(report.fault.error())
        elif isinstance(report, Accepted):
            for request_id in report.request_ids:
                if request := self._of(link, request_id):
                    request.batch.accept(request_id)

    def link_died(self, link: EngineLink, error: OctavoError) -> None:
        self.reason = link.reason
        self._fail(self._computed_by(link), EngineDeadError(link.reason or str(error)))
        self.died.set()

    def link_silent(self, link: EngineLink, reason: str) -> None:
        if requests := self._computed_by(link):
            logger.error("%s; requests in flight fail", reason)
            self._fail(requests, EngineError(reason))

    def _of(self, link: EngineLink, request_id: str) -> InFlight | None:
        """The request, if it is in flight and computed by this link's engine."""
        request = self._requests.get(request_id)
        return request if request is not None and request.link is link else None

    def _computed_by(self, link: EngineLink) -> list[InFlight]:
        return [request for request in self._requests.values() if request.link is link]

    def _step(self, link: EngineLink, step: Step) -> None:
        # Without the updates of requests that were aborted meanwhile.
        updates = [u for u in step.updates if self._of(link, u.request_id)]
        outputs, stops = self._outputs.process(updates, time.monotonic())
        for request_id, index in stops:
            link.send(FinishChoice(request_id, index))
        for output in outputs:
            batch = self._requests[output.request_id].batch
            if output.finished:
                del self._requests[output.request_id]
            batch.put(output)


def _ignore(stats: Stats) -> None:
    """Without a listener, statistics are dropped."""
