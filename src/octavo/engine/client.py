"""The web process's side of the engine: submit, stream, abort, health.

One task reads the engine's reports and turns them into text (`engine.output`); each batch of
requests has one place for its deltas. Unread deltas are merged, so a slow reader's backlog is
bounded by its own answer, and no other reader waits for it.

When the engine dies, all batches in flight raise EngineDeadError, so does every later submit,
and `died` is set. A process that has sent nothing for `FREEZE_SECONDS` (stopped, or swapped out)
fails the requests in flight in the same way, until it sends again.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine.messages import (
    Abort,
    Accepted,
    Add,
    Command,
    Dead,
    FinishChoice,
    Launch,
    PrefixCacheReset,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Stats,
    Step,
    Stop,
)
from octavo.engine.output import OutputProcessor
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    OctavoError,
    QueueFullError,
    counted,
)
from octavo.log import environment_for_child, get_logger
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.processes import Owner, module_command
from octavo.text.tokenizer import Tokenizer

logger = get_logger(__name__)

EXECUTOR = "octavo.engine.executor:create_executor"
FREEZE_SECONDS = 5.0
_TICK_SECONDS = 0.5
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.01
_FOLDER_PREFIX = "octavo-"
_SOCKET_NAMES = ("inbox", "outbox")
# Linux has 108 bytes for a socket's path and the zero behind it; mkdtemp adds 8 characters.
_SOCKET_PATH_LIMIT = 107
_SOCKET_NAME_BYTES = len(f"/{_FOLDER_PREFIX}12345678/{_SOCKET_NAMES[1]}")
_START_DESCRIPTORS = 16  # of sockets, wake-up pipes and the process; the loop's own are open
_SHORT_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")
_LAST_MESSAGE_SECONDS = 0.2
_RECONNECT_MS = 10
# Iterations (some 50 ns each) that libgomp's threads spin for more work before they sleep. The
# default, thirty times as many, keeps busy the core that this process needs between two steps.
_SPIN_COUNT = "10000"


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


class EngineClient:
    """Starts an engine process and communicates with it, on one event loop."""

    def __init__(self, config: EngineConfig, executor: str = EXECUTOR) -> None:
        self.config = config
        self.died = asyncio.Event()
        self.reason: str | None = None  # why the engine is dead
        self.on_stats: Callable[[Stats], None] = _ignore
        self._launch_executor = executor
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        # Not `_ready.done()`: to cancel the start cancels the future too.
        self._loaded = False
        self._silent_ticks = 0
        self._ids = itertools.count()
        self._batches: dict[str, Batch] = {}
        self._resets: deque[asyncio.Future[bool]] = deque()  # in the order of their answers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._tasks: list[asyncio.Task[None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._undo = contextlib.ExitStack()  # of what `start` has made so far
        self._owner = Owner("this engine client")

    async def start(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """Start the process, wait until the model is loaded. `tokenizer` runs meanwhile.

        Raises ConfigError when the engine cannot start as asked, EngineDeadError otherwise.
        """
        try:
            self._open()
            self.tokenizer = await asyncio.to_thread(tokenizer)
            self._outputs = OutputProcessor(self.tokenizer, time.time() - time.monotonic())
            ready = await self._ready
            self._loaded = True
        except BaseException as error:
            await self._give_up()
            if isinstance(error, (OSError, zmq.ZMQError)):
                raise EngineDeadError(f"it could not be started: {error}") from error
            raise
        self.capabilities = ready.capabilities

    def _open(self) -> None:
        """Sockets, process, tasks; each step leaves its undo, so that any may fail."""
        check_descriptors()
        self._folder = socket_folder()
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.asyncio.Context()
        self._undo.callback(self._context.destroy, 0)
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        # The side that connects may send before the other one has bound, and nothing is lost: so
        # each side binds the socket it reads.
        self._inbox = plain.socket(zmq.PUSH)
        self._undo.callback(self._inbox.close)
        self._outbox = self._context.socket(zmq.PULL)
        self._undo.callback(self._outbox.close)
        for end in (self._inbox, self._outbox):
            end.set_hwm(0)
            end.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        addresses = [f"ipc://{self._folder}/{name}" for name in _SOCKET_NAMES]
        self._inbox.connect(addresses[0])
        self._outbox.bind(addresses[1])
        self._spawn(Launch(self.config, addresses[0], addresses[1], self._launch_executor))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    def _spawn(self, launch: Launch) -> None:
        # Its standard input closes when this process ends, however it ends: the engine process
        # then exits. In its own session it does not receive a terminal's Ctrl-C.
        process = subprocess.Popen(
            module_command("octavo.engine.process"),
            stdin=subprocess.PIPE,
            env=environment_for_child(GOMP_SPINCOUNT=_SPIN_COUNT),
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        self._undo.callback(_close_quietly, process.stdin)
        loop = asyncio.get_running_loop()
        args = (process, loop, self._exited)
        threading.Thread(target=_wait_for, args=args, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_exited` reports
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()

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
        if len(self._batches) + count > limit:
            raise QueueFullError(
                f"{counted(len(self._batches), 'request')} in flight and {count} more would exceed "
                f"the limit of {limit} (max_num_seqs + max_waiting); try again later"
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
            self._batches[submission.request_id] = batch
            self._send(Add(submission))
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
        known = [i for i in request_ids if self._batches.pop(i, None)]
        for request_id in known:
            self._outputs.abort(request_id)
        if known and self.reason is None:
            self._send(Abort(known))

    def finish(self, request_ids: Sequence[str]) -> None:
        """As `abort`, but their batches get what there is, with the finish reason `abort`."""
        for request_id in request_ids:
            if batch := self._batches.pop(request_id, None):
                if output := self._outputs.abort(request_id, time.monotonic()):
                    batch.put(output)
                batch.accept(request_id)
                if self.reason is None:
                    self._send(Abort([request_id]))

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes. False if running requests still hold some."""
        self._check_alive()
        done = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send(ResetPrefixCache())
        dropped: bool = await done
        return dropped

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine answers nothing at the moment; None when it is healthy."""
        if self.reason is not None:
            return self.reason
        if not self._ready.done():
            return "the model is being loaded"
        if self._silent_ticks * _TICK_SECONDS > FREEZE_SECONDS:
            return f"the engine process has been silent for more than {FREEZE_SECONDS:g} s"
        return None

    def fail_all(self, error: Exception) -> None:
        """End everything in flight with `error`."""
        batches, self._batches = dict(self._batches), {}
        for request_id, batch in batches.items():
            self._outputs.abort(request_id)
            batch.fail(error)
        if batches and self.reason is None:
            self._send(Abort(list(batches)))

    async def close(self) -> None:
        """Stop the process and wait for its end; kill it if it does not exit in time.

        In a fork, does nothing: engine and sockets belong to the process that made them.
        """
        if not self._owner.is_here():
            return
        with self._undo:
            if self._process is not None:
                await self._stop(self._process)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if not self._ready.cancel() and not self._ready.cancelled():
                self._ready.exception()  # read, or asyncio logs that it never was

    async def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            if not self._loaded:
                process.kill()  # it reads its inbox only once the model is loaded
                process.wait()
            if self.reason is None:
                self._send(Stop())
                self._mark_dead(EngineDeadError("shutdown requested"))
            if not await _ends_within(process, _EXIT_SECONDS):
                logger.warning("the engine process did not stop in %g s; killing it", _EXIT_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()  # not in a thread, of which there may be no more; takes no time

    def _check_alive(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self.reason is not None:
            raise EngineDeadError(self.reason)
        if (reason := self.unhealthy_reason) is not None:
            raise EngineError(reason)

    def _send(self, command: Command) -> None:
        self._inbox.send(self._encoder.encode(command), zmq.NOBLOCK)

    # Reports.

    async def _receive(self) -> None:
        while True:
            report = self._decoder.decode(await self._outbox.recv())
            self._silent_ticks = 0
            self._handle(report)
            await asyncio.sleep(0)  # a message that is there already does not yield

    def _handle(self, report: Report) -> None:
        if isinstance(report, Step):
            self._step(report)
        elif isinstance(report, Stats):
            self.on_stats(report)
        elif isinstance(report, Refused):
            if batch := self._batches.pop(report.request_id, None):
                self._outputs.abort(report.request_id)
                batch.fail(report.fault.error())
        elif isinstance(report, Accepted):
            for request_id in report.request_ids:
                if batch := self._batches.get(request_id):
                    batch.accept(request_id)
        elif isinstance(report, PrefixCacheReset):
            if not (done := self._resets.popleft()).done():
                done.set_result(report.dropped)
        elif isinstance(report, Ready):
            self._ready.set_result(report)
        elif isinstance(report, Dead):
            self._mark_dead(report.fault.error())

    def _step(self, step: Step) -> None:
        # Without the updates of requests that were aborted meanwhile.
        updates = [u for u in step.updates if u.request_id in self._batches]
        outputs, stops = self._outputs.process(updates, time.monotonic())
        for request_id, index in stops:
            self._send(FinishChoice(request_id, index))
        for output in outputs:
            batch = self._batches[output.request_id]
            if output.finished:
                del self._batches[output.request_id]
            batch.put(output)

    # Life and death.

    async def _watch(self) -> None:
        """Count ticks without a message; ticks, not time: our own pauses must not count."""
        await asyncio.shield(self._ready)
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._silent_ticks += 1
            if self._batches and (reason := self.unhealthy_reason):
                logger.error("%s; requests in flight fail", reason)
                self.fail_all(EngineError(reason))

    def _exited(self, code: int) -> None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # Its own Dead message, if it sent one, is on the way and says more.
        error = EngineDeadError(f"its process ended with {how}")
        loop = asyncio.get_running_loop()
        loop.call_later(_LAST_MESSAGE_SECONDS, self._mark_dead, error)

    def _mark_dead(self, error: OctavoError) -> None:
        if self.reason is not None:
            return
        self.reason = error.reason if isinstance(error, EngineDeadError) else str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self.fail_all(EngineDeadError(self.reason))
        for done in self._resets:
            if not done.done():
                done.set_exception(EngineDeadError(self.reason))
        self.died.set()


async def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether it ends in time. Not by `to_thread`: there are none while the interpreter exits."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return process.poll() is not None


def check_descriptors() -> None:
    """Raise ConfigError unless the descriptors of a start are free; libzmq would end this process.

    See src/epoll.cpp there: errno_assert.
    """
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(_START_DESCRIPTORS):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"the engine cannot be started: {error.strerror}; it needs {_START_DESCRIPTORS} "
                "more file descriptors than are open now, and each client needs one: raise the "
                "limit (ulimit -n)"
            ) from error


def socket_folder() -> str:
    """A new folder for the sockets, which only its owner may enter.

    In TMPDIR, or in another folder where the names would be too long there. Raises ConfigError.
    """
    tried = []
    for parent in _socket_parents():
        length = len(os.fsencode(parent)) + _SOCKET_NAME_BYTES
        if length > _SOCKET_PATH_LIMIT:
            tried.append(f"{parent} (a socket's path would have {length} bytes)")
            continue
        try:
            return tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)
        except OSError as error:
            tried.append(f"{parent} ({error.strerror or error})")
    raise ConfigError(
        "there is no folder for the sockets between server and engine: set TMPDIR to a folder that "
        f"can be written and whose path has at most {_SOCKET_PATH_LIMIT - _SOCKET_NAME_BYTES} "
        f"bytes; tried: {', '.join(tried)}"
    )


def _socket_parents() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # no folder that Python knows can be written
        yield tempfile.gettempdir()
    yield from _SHORT_FOLDERS


def _close_quietly(stream: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # unsent bytes of a process that has ended
        stream.close()


def _wait_for(
    process: "subprocess.Popen[bytes]",
    loop: asyncio.AbstractEventLoop,
    exited: Callable[[int], None],
) -> None:
    code = process.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(exited, code)


def _ignore(stats: Stats) -> None:
    """Without a listener, statistics are dropped."""
