"""The server's socket. It is bound first, so that a conflict shows before anything is loaded."""

import socket

from octavo.errors import ConfigError

_BACKLOG = 2048


def bind(host: str, port: int, stall_timeout: float) -> socket.socket:
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
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise _refusal(host, port, error) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1000 * stall_timeout)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
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
