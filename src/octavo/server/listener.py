"""The server's socket. It is bound first, so that a conflict shows before anything is loaded."""

import errno
import socket
import time
from typing import Any

from octavo.errors import ConfigError
from octavo.server.limits import LIMITS

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.5  # shorter than asyncio's pause after an error


class Listener(socket.socket):
    """A listening socket for asyncio, which accepts until nothing is left.

    It stops after `batch` connections, so that those get to send before more are accepted; and
    after the first lack of descriptors, of which asyncio would report one for each try.
    """

    batch = 256
    _accepted = 0
    _retry_at = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() < self._retry_at:
            raise BlockingIOError
        if self._accepted >= self.batch:
            self._accepted = 0
            raise BlockingIOError
        try:
            accepted = super().accept()
        except BlockingIOError:
            self._accepted = 0
            raise
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._retry_at = time.monotonic() + _PAUSE_SECONDS
            raise
        self._accepted += 1
        return accepted


def bind(host: str, port: int, stall_timeout: float) -> Listener:
    """A listening socket. Raises ConfigError, naming host and port, when it cannot be bound.

    It listens at once, so that a second server on the port fails at start; the port is free again
    right after a crash. The kernel drops clients that acknowledge nothing for `stall_timeout`
    seconds. asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP; without it each
    event waits up to 40 ms for a delayed ACK of the one before.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise _refusal(host, port, error) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1000 * stall_timeout)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind(address)
        listener.listen(LIMITS.backlog)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from error
    listener.setblocking(False)
    return listener


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}")


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
