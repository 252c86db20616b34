"""One server, from its socket to its exit code.

It answers while the model loads (`/health` with 503), and while it drains.
"""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import uvicorn
from setproctitle import setproctitle

from octavo.config import EngineConfig
from octavo.engine.client import EXECUTOR
from octavo.log import get_logger
from octavo.server.app import PATHS, create_app
from octavo.server.banner import banner
from octavo.server.connections import Connection, Connections
from octavo.server.gate import Gate
from octavo.server.http_metrics import HTTPMetrics
from octavo.server.limits import LIMITS, HTTPLimits
from octavo.server.listener import Listener, address_of
from octavo.server.options import ServerConfig
from octavo.server.rates import RatesLog
from octavo.server.service import Service

logger = get_logger(__name__)

_LAST_SECONDS = 1.0  # for the error events of requests that a drain has ended
_GRACE_SECONDS = 5  # for clients that read slowly, after the listener is closed


class _Server(uvicorn.Server):
    """Installs no signal handlers: uvicorn's end the process with the signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Runner:
    """A service behind a socket. `run` returns the exit code."""

    def __init__(
        self, service: Service, listener: socket.socket, limits: HTTPLimits = LIMITS
    ) -> None:
        self.service = service
        options = service.options
        self.address = address_of(listener, options.scheme)
        limits = replace(limits, keep_alive_seconds=options.keep_alive_timeout)
        self._listener = listener
        self._connections = Connections(limits, 0)
        service.metrics.unread = self._connections.unread
        service.metrics.stalled = lambda: service.streams.stalled + self._connections.timed_out
        self._gate = Gate(create_app(service), service)
        observed = HTTPMetrics(self._gate, service.metrics.registry, PATHS, options.root_path)
        self._server = _Server(
            uvicorn.Config(
                observed,
                http=cast(Any, functools.partial(Connection, table=self._connections)),
                backlog=limits.backlog,
                # uvicorn's own timer; `Connections` also ends connections that never ask.
                timeout_keep_alive=cast(int, limits.keep_alive_seconds),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=options.root_path,
                workers=1,
                # Always given: uvicorn's own defaults come from the environment.
                forwarded_allow_ips=list(options.forwarded_allow_ips),
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                ssl_ca_certs=options.ssl_ca_certs,
                ssl_cert_reqs=options.ssl_cert_reqs,
                # A last resort: `abort_all` ends the requests that outlast the drain.
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._share_descriptors()

    async def run(self) -> int:
        """Serve until a signal, or until the engine's end. 0 after a signal, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.drain)
        loop.set_exception_handler(_log_exception)
        options, started = self.service.options, loop.time()
        tasks = [loop.create_task(self._connections.sweep())]
        if not options.disable_log_stats:
            rates = RatesLog(self.service.metrics, options.stats_interval)
            tasks.append(loop.create_task(rates.run()))
        engine = asyncio.create_task(self.service.run_engine(self._announce))
        engine.add_done_callback(lambda _: self._leave())
        await self._server.serve(sockets=[self._listener])
        for task in tasks:
            task.cancel()
        if not engine.done():
            engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await self.service.close()
        if not engine.cancelled() and (error := engine.exception()):
            raise error
        code = 1 if self.service.failure and not self.service.draining else 0
        served = self.service.metrics.totals
        logger.info(
            "stopped after %.0f s with exit code %d: served %d requests, %d prompt tokens and %d "
            "output tokens", loop.time() - started, code, served.requests, served.prompt_tokens,
            served.generated_tokens,
        )  # fmt: skip
        return code

    def drain(self) -> None:
        """Refuse new requests, let running ones finish in time. A second call ends them now.

        The listener stays open until then: clients and probes get an answer that says so.
        """
        loop = asyncio.get_running_loop()
        if self.service.draining:
            self.service.abort_all()
            loop.call_later(_LAST_SECONDS, self._leave)
            return
        seconds = self.service.options.drain_timeout
        logger.info("shutting down; running requests have %g s (again: end them now)", seconds)
        self.service.drain()
        loop.call_later(seconds, self.service.abort_all)
        loop.call_later(seconds + _LAST_SECONDS, self._leave)
        self._drained = loop.create_task(self._gate.idle())
        self._drained.add_done_callback(lambda _: self._leave())

    def _leave(self) -> None:
        self._server.should_exit = True

    def _share_descriptors(self) -> None:
        """Give connections the descriptors that the rest of the process does not need."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 1 << 20
        used = _open_descriptors() - len(self._server.server_state.connections)
        self._connections.most = self._connections.limits.connections(limit, used)
        if isinstance(self._listener, Listener):
            self._listener.batch = self._connections.batch

    def _announce(self) -> None:
        self._share_descriptors()
        for line in banner(self.service, self.address):
            logger.info("%s", line)


def serve(
    listener: socket.socket, config: EngineConfig, options: ServerConfig, executor: str = EXECUTOR
) -> int:
    """Serve on `listener` until a signal or the engine's end; returns the exit code."""
    level = options.uvicorn_log_level
    # Of uvicorn's log usually only errors: bad requests are not worth a line each.
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.setLevel(5 if level == "trace" else level.upper())
    for handler in logging.getLogger("octavo").handlers:
        uvicorn_logger.addHandler(handler)

    _allow_many_connections()
    setproctitle(f"octavo serve: {config.model} on {address_of(listener, options.scheme)}")

    async def main() -> int:
        return await Runner(Service(config, options, executor), listener).run()

    return asyncio.run(main())


def _allow_many_connections() -> None:
    """Raise the limit on file descriptors, usually 1024: each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not settable everywhere
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # no such folder here
        return 64


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's report of an exception; one line where descriptors ran out."""
    if "out of system resource" in context.get("message", ""):
        logger.error("cannot accept connections: %s; trying again", context.get("exception"))
    else:
        loop.default_exception_handler(context)
