"""The outermost layer of the application: what is in progress, and nothing new during a drain.

While the server drains, requests in progress continue; every other one is answered with 503, on
new connections and on those that were kept alive. `/metrics` alone is still served, so that a
drain can be watched. Each response that starts during a drain closes its connection.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import unavailable
from octavo.server.limits import LIMITS
from octavo.server.middleware import refuse
from octavo.server.service import Service

_CLOSE = (b"connection", b"close")


class Gate:
    """Counts the requests in progress; refuses new ones while `service.draining`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._open_path = f"{service.options.root_path}/metrics"
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._service.draining and scope["path"] != self._open_path:
            await self._refuse(scope, receive, send)
        else:
            await self._let_in(scope, receive, send)

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if self._service.draining and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE]}
            await send(message)

        self._in_progress += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, closing)
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A connection that closes while its client still sends is reset, and the answer is lost.
        if not _waits_for_continue(scope["headers"]):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_drop_body(receive), LIMITS.linger_seconds)
        reason = self._service.unavailable_reason() or "the server is shutting down"
        fault = unavailable(reason, "unavailable")
        fault.headers["Connection"] = "close"
        await refuse(fault, scope, send)


async def _drop_body(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def _waits_for_continue(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" and b"100-continue" in value.lower() for name, value in headers)
