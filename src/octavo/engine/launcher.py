"""Where an engine process runs: starts it there, and gives its sockets their addresses.

`LocalLauncher` starts a child of this process and talks to it over sockets in a folder that only
this user may enter. What is sent over the sockets, and what an end means, is `engine.link`.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple, Protocol

import zmq

from octavo import devices, topology
from octavo.config import EngineConfig
from octavo.engine.messages import Launch, launch_line
from octavo.errors import ConfigError, counted
from octavo.log import environment_for_child, get_logger, visible_gpus
from octavo.processes import module_command
from octavo.topology import Processors

logger = get_logger(__name__)

_FOLDER_PREFIX = "octavo-"
_SOCKET_NAMES = ("inbox", "outbox")
# Linux has 108 bytes for a socket's path and the zero behind it; mkdtemp adds 8 characters.
_SOCKET_PATH_LIMIT = 107
_SOCKET_NAME_BYTES = len(f"/{_FOLDER_PREFIX}12345678/{_SOCKET_NAMES[1]}")
_SHORT_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")
# Iterations (some 50 ns each) that libgomp's threads spin for more work before they sleep. The
# default, thirty times as many, keeps busy the core that this process needs between two steps.
SPIN_COUNT = "10000"
# Engines that share a processor take turns, and each has a copy of the weights; on a small machine
# a few are useful to try things.
_ENGINES_PER_PROCESSOR, _FEW_ENGINES = 4, 8

Exited = Callable[[str], None]
AnySocket = zmq.Socket[bytes]


class Addresses(NamedTuple):
    """ZeroMQ addresses as the engine process uses them: of its commands and of its reports."""

    inbox: str
    outbox: str


class EngineProcess(Protocol):
    """An engine process that was started."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n if signal n ended it, or its machine."""
        ...

    async def kill(self) -> None:
        """End it at once and wait for its end. Does nothing if it has ended."""
        ...


class Launcher(Protocol):
    """The place of one engine process. In order: `connect`, `start`, `close`; any may be last.

    remote: whether that may be another machine. Its clock is another one then, and if nothing
    comes from there, it is lost.
    """

    remote: bool

    async def connect(self, inbox: AnySocket, outbox: AnySocket) -> Addresses:
        """Bind or connect this side's ends: `inbox` sends commands, `outbox` receives reports.

        Raises ConfigError, OSError or ZMQError.
        """
        ...

    async def start(self, launch: Launch, exited: Exited) -> EngineProcess:
        """Start the process. `exited` is called on the running loop, and told how it ended.

        Leaves no process behind when it raises (OSError, or an OctavoError that says more).
        """
        ...

    def close(self) -> None:
        """Undo what `connect` and `start` have made. The process has ended, the sockets are closed.

        Their context is not: it is ended after this.
        """
        ...


class LocalLauncher:
    """A child of this process, and sockets in a folder of its own.

    processors: those that it may use; none: as this process. gpus: what it sees as CUDA devices, in
    the terms of CUDA_VISIBLE_DEVICES; None: as this process.
    """

    remote = False

    def __init__(self, processors: Processors = (), gpus: str | None = None) -> None:
        self.folder: str | None = None
        self._processors, self._gpus = processors, gpus
        self._undo = contextlib.ExitStack()

    async def connect(self, inbox: AnySocket, outbox: AnySocket) -> Addresses:
        # The side that connects may send before the other one has bound, and nothing is lost: so
        # each side binds the socket it reads.
        folder = self.folder = socket_folder()
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = Addresses(*(f"ipc://{folder}/{name}" for name in _SOCKET_NAMES))
        inbox.connect(addresses.inbox)
        outbox.bind(addresses.outbox)
        return addresses

    async def start(self, launch: Launch, exited: Exited) -> EngineProcess:
        env = _share_of(child_environment(), self._processors, self._gpus)
        process = start_child("octavo.engine.process", self._processors, env, self._undo)
        started = _LocalProcess(process)
        try:
            args = (process, asyncio.get_running_loop(), exited)
            threading.Thread(target=_wait_for, args=args, daemon=True).start()
            send_launch(process, launch_line(launch))
        except BaseException:
            started.end()
            raise
        return started

    def close(self) -> None:
        self._undo.close()


class _LocalProcess:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()  # not in a thread, of which there may be no more; takes no time


def local_launchers(config: EngineConfig) -> Callable[[int], LocalLauncher]:
    """Of each engine, by its number: on this machine, whose processors and GPUs they divide.

    Raises ConfigError for so many engines that this machine is no place for them.
    """
    count, ranks = config.data_parallel_size, config.tensor_parallel_size
    if count == 1:
        return lambda engine: LocalLauncher()
    _check_count(count, len(topology.usable()))
    processors = topology.shares(count) or [()] * count
    if 0 < (there := len({one for share in processors for one in share})) < count:
        logger.warning(
            "%d engines share %d processors: they wait for each other; a data_parallel_size of %d "
            "or less gives each its own", count, there, there
        )  # fmt: skip
    uses_gpus = devices.kind(config.device) in ("auto", "cuda")
    return lambda engine: LocalLauncher(
        processors[engine], gpus_of(engine, ranks, visible_gpus()) if uses_gpus else None
    )


def _check_count(count: int, processors: int) -> None:
    """processors: that there are; 0 where that is unknown."""
    most = max(_FEW_ENGINES, _ENGINES_PER_PROCESSOR * processors)
    if processors and count > most:
        raise ConfigError(
            f"data_parallel_size is {count}, and this machine has "
            f"{counted(processors, 'processor')} for engines, each of which keeps all of the model "
            f"in memory: at most {most} are started here, and {processors} have a processor each; "
            "with distributed_executor_backend='ray' engines run on several machines"
        )


def gpus_of(engine: int, ranks: int, visible: Sequence[str] | None) -> str:
    """The GPUs of an engine of `ranks` ranks; those before it have as many each.

    visible: those that there are, by index or id; None: unknown, then they are counted.
    """
    mine = range(engine * ranks, (engine + 1) * ranks)
    if visible is None:
        return ",".join(map(str, mine))
    return ",".join(visible[mine.start : mine.stop])


def _share_of(
    environment: dict[str, str], processors: Processors, gpus: str | None
) -> dict[str, str]:
    """What a process on its share of the machine inherits: no more threads than processors."""
    share = dict(environment)
    threads = share.get("OMP_NUM_THREADS", "")
    if processors and threads.isdecimal() and int(threads) > len(processors):
        share["OMP_NUM_THREADS"] = str(len(processors))
    if gpus is not None:
        share["CUDA_VISIBLE_DEVICES"] = gpus
    return share


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


def remove_socket_folder(address: str) -> None:
    """What `LocalLauncher.close` would remove: for an engine process whose web process is gone."""
    folder = os.path.dirname(address.removeprefix("ipc://"))
    if address.startswith("ipc://") and os.path.basename(folder).startswith(_FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _socket_parents() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # no folder that Python knows can be written
        yield tempfile.gettempdir()
    yield from _SHORT_FOLDERS


def how_it_ended(code: int) -> str:
    """An exit code in words; -n where signal n ended the process."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its process ended with {how}"


def child_environment() -> dict[str, str]:
    return environment_for_child(GOMP_SPINCOUNT=SPIN_COUNT)


def start_child(
    module: str, processors: Processors, env: dict[str, str], undo: contextlib.ExitStack
) -> "subprocess.Popen[bytes]":
    """`python -m module`, on `processors` if there are any. undo: will close its standard input.

    That closes also when this process ends, however it ends: the child then exits. In its own
    session it does not receive a terminal's Ctrl-C.
    """
    process = subprocess.Popen(
        module_command(module, processors=processors),
        stdin=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    assert process.stdin is not None
    undo.callback(close_quietly, process.stdin)
    return process


def send_launch(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Say on a child's standard input what to do. One that has ended is no error here: whoever
    watches it says so."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def close_quietly(stream: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # unsent bytes of a process that has ended
        stream.close()


def _wait_for(
    process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop, exited: Exited
) -> None:
    how = how_it_ended(process.wait())
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(exited, how)
