"""The server's socket. It is taken first, so that a conflict shows before anything is loaded."""

import socket

from octavo.errors import ConfigError

_BACKLOG = 2048


def bind(host: str, port: int, stall_timeout: float) -> socket.socket:
    """A listening socket. Raises ConfigError, naming host and port, when it cannot be had.

    It listens at once, so that a second server fails at once; it can be had again right after a
    crash, but never by two servers at a time. The kernel drops clients that take nothing, and
    sends each event at once: held back for company (Nagle), it would wait 40 ms for the client's
    acknowledgement of the one before. asyncio sees to that only where the protocol is named.
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
