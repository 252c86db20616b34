"""One server, from its socket to its exit code.

It answers while the model loads (`/health` with 503), and while it drains.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.client import EXECUTOR
from octavo.log import get_logger
from octavo.server.app import create_app
from octavo.server.listener import address_of
from octavo.server.service import Service
from octavo.version import __version__

logger = get_logger(__name__)


class _Server(uvicorn.Server):
    """Installs no signal handlers: uvicorn's end the process with the signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Runner:
    """A service behind a socket. `run` returns the exit code."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        self.address = address_of(listener)
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
                root_path=options.root_path,
                # A last resort: `abort_all` ends the requests that outlast the drain.
                timeout_graceful_shutdown=int(options.drain_timeout) + 5,
            )
        )

    async def run(self) -> int:
        """Serve until a signal, or until the engine's end. 0 after a signal, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.drain)
        engine = asyncio.create_task(self.service.run_engine(self._announce))
        engine.add_done_callback(lambda _: self._leave())
        await self._server.serve(sockets=[self._listener])
        if not engine.done():
            engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await self.service.close()
        if not engine.cancelled() and (error := engine.exception()):
            raise error
        return 1 if self.service.failure and not self.service.draining else 0

    def drain(self) -> None:
        """Take no new requests, let running ones finish in time. A second call ends them now."""
        if self.service.draining:
            self.service.abort_all()
            return
        seconds = self.service.options.drain_timeout
        logger.info("shutting down; running requests have %g s (again: end them now)", seconds)
        self.service.draining = True
        asyncio.get_running_loop().call_later(seconds, self.service.abort_all)
        self._leave()

    def _leave(self) -> None:
        self._server.should_exit = True

    def _announce(self) -> None:
        for line in banner(self.service, self.address):
            logger.info("%s", line)


def serve(
    listener: socket.socket, config: EngineConfig, options: ServerConfig, executor: str = EXECUTOR
) -> int:
    """Serve on `listener` until a signal or the engine's end; returns the exit code."""
    # Of uvicorn's log only errors: bad requests are not worth a line each.
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.setLevel(logging.ERROR)
    for handler in logging.getLogger("octavo").handlers:
        uvicorn_logger.addHandler(handler)

    _allow_many_connections()

    async def main() -> int:
        return await Runner(Service(config, options, executor), listener).run()

    return asyncio.run(main())


def _allow_many_connections() -> None:
    """Raise the limit on file descriptors, usually 1024: each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not settable everywhere
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def banner(service: Service, address: str) -> list[str]:
    """The start-up summary for the operator, ending with a command to try."""
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
