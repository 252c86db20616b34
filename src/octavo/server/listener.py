"""The server's socket. It is bound first, so that a conflict shows before anything is loaded."""

import contextlib
import errno
import os
import socket
import stat
import time
from typing import Any

from octavo.errors import ConfigError
from octavo.server.limits import LIMITS
from octavo.server.options import ServerConfig

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MODE = 0o660  # of a Unix socket: its owner and group may connect
_LONGEST_PATH = 107  # Linux has 108 bytes for a socket's path and the zero behind it
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


class UnixListener(Listener):
    """A listener on a Unix socket, whose file goes when it is closed."""

    file: os.stat_result  # of the path, so that a successor's socket is left alone

    def close(self) -> None:
        path = self.getsockname() if self.fileno() >= 0 else ""
        super().close()
        with contextlib.suppress(OSError):
            if path and os.path.samestat(os.stat(path), self.file):
                os.unlink(path)


def bind_unix(path: str) -> UnixListener:
    """A listening Unix socket with mode 0660. Raises ConfigError, naming the path.

    A socket without a listener, left by a process that was killed, is replaced. Any other
    file is left alone.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"uds: {path} is longer than the {_LONGEST_PATH} bytes that a socket's "
                          "path may have")  # fmt: skip
    _remove_stale(path)
    listener = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), _MODE)  # before it has a name, so that it never has more
        listener.bind(path)
        os.chmod(path, _MODE)
        listener.file = os.stat(path)
        listener.listen(LIMITS.backlog)
    except OSError as error:
        socket.socket.close(listener)
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds: {path} exists and is not a socket; it is left as it is")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"uds: cannot listen on {path}: {error.strerror}") from error
        else:
            raise ConfigError(f"uds: another process listens on {path}")


def open_listener(options: ServerConfig) -> Listener:
    """The socket that the options ask for."""
    if options.uds is not None:
        return bind_unix(options.uds)
    return bind(options.host, options.port, options.stall_timeout)


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}")


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Where it listens: `http://HOST:PORT`, or `unix:PATH`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
