"""One server from its socket to its exit code.

The port is taken first, so that a conflict shows before any weight is read. The server answers
while the model loads (`/health` with 503), and while it drains.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.client import EXECUTOR
from octavo.errors import ConfigError
from octavo.log import get_logger
from octavo.server.app import create_app
from octavo.server.service import Service
from octavo.version import __version__

logger = get_logger(__name__)

_BACKLOG = 2048


def bind(host: str, port: int, stall_timeout: float) -> socket.socket:
    """A listening socket. Raises ConfigError, naming host and port, when it cannot be had.

    It listens at once, so that a second server fails at once; it can be had again right after a
    crash, but never by two servers at a time. The kernel drops clients that take nothing.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(1000 * stall_timeout)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would end the process with the signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Runner:
    """A service behind a socket. `run` returns the exit code."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        self.address = _address(listener)
        options = service.options
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                create_app(service),
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Only the last resort: `cut` ends what is left after the drain.
                timeout_graceful_shutdown=int(options.drain_timeout) + 5,
            )
        )

    async def run(self) -> int:
        """Serve until a signal, or until the engine's end. 0 after a signal, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.drain)
        life = asyncio.create_task(self.service.live(self._announce))
        life.add_done_callback(lambda _: self._leave())
        await self._server.serve(sockets=[self._listener])
        if not life.done():
            life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await self.service.close()
        if not life.cancelled() and (error := life.exception()):
            raise error
        if self.service.failure and not self.service.draining:
            logger.error("%s", self.service.failure)
            return 1
        return 0

    def drain(self) -> None:
        """Take no new requests, let running ones finish in time. A second call ends them now."""
        if self.service.draining:
            self.service.cut()
            return
        seconds = self.service.options.drain_timeout
        logger.info("shutting down; running requests have %g s (again: end them now)", seconds)
        self.service.draining = True
        asyncio.get_running_loop().call_later(seconds, self.service.cut)
        self._leave()

    def _leave(self) -> None:
        self._server.should_exit = True

    def _announce(self) -> None:
        for line in banner(self.service, self.address):
            logger.info("%s", line)


def serve(config: EngineConfig, options: ServerConfig, executor: str = EXECUTOR) -> int:
    """Serve until told to stop; returns the exit code. Raises ConfigError before any work."""
    # uvicorn's own words are for its developers; what went wrong inside an app is not.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    async def main() -> int:
        service = Service(config, options, executor)
        return await Runner(service, listener).run()

    listener = bind(options.host, options.port, options.stall_timeout)
    with contextlib.closing(listener):
        return asyncio.run(main())


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(service: Service, address: str) -> list[str]:
    """What an operator wants to know, ending with the line to try."""
    limits, config = service.limits, service.config
    gib = 1 << 30
    memory = ", ".join(f"{name} {size / gib:.2f} GiB" for name, size in limits.memory.items())
    defaults = ", ".join(f"{name}={value}" for name, value in service.defaults.items())
    return [
        f"Octavo {__version__}: {limits.model} ({limits.architecture}) as "
        f"{', '.join(service.names)}; {limits.dtype} on {limits.device}, "
        f"KV {limits.kv_cache_dtype}",
        f"memory: {memory or 'not known'}; KV cache of {limits.kv_tokens} tokens, "
        f"{limits.kv_tokens // limits.max_model_len} full-length requests",
        f"limits: {limits.max_model_len} tokens a request, {config.max_num_seqs} at once, "
        f"{config.max_num_batched_tokens} tokens a step, {config.waiting_limit} waiting",
        f"sampling defaults from the model: {defaults or 'none'}",
        f"listening on {address} ({'with' if service.options.api_key else 'without'} API key); try",
        f"curl {address}/v1/completions -H 'Content-Type: application/json' -d "
        f'\'{{"prompt": "Once upon a time", "max_tokens": 32}}\'',
    ]
