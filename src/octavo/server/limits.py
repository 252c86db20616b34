"""What the HTTP layer allows below the application: times, sizes, connections, in one table.

uvicorn, h11 and asyncio have a value of their own for each of these; none of theirs is used.
Limits of the application (queue, choices, tokens) are with what they limit.
"""

from dataclasses import dataclass

_MIN_CONNECTIONS = 8


@dataclass(frozen=True)
class HTTPLimits:
    """One value a row; docs/server.md has the same table with what a client sees.

    keep_alive_seconds: a connection on which nothing of a request has come is closed after it.
        Longer than the 60 s of common proxies: the side that sends requests must close first.
    head_seconds, head_bytes: from a head's first byte to its blank line. The bytes also bound the
        line in front of a chunk, and trailers.
    body_seconds: from the head to the body's last byte.
    linger_seconds: how long the rest of a refused request is read and dropped, so that a client
        which is still sending gets to read the answer.
    backlog: connections that the kernel holds until they are accepted.
    bodies_bytes: bodies of all requests in progress together, or one body where that is more.
    spare_descriptors: file descriptors that clients cannot take: the engine's start needs 16.
    sweep_seconds: how often times are checked.
    """

    keep_alive_seconds: float = 75.0
    head_seconds: float = 30.0
    head_bytes: int = 1 << 16
    body_seconds: float = 60.0
    bodies_bytes: int = 1 << 29
    linger_seconds: float = 5.0
    backlog: int = 2048
    spare_descriptors: int = 24
    sweep_seconds: float = 1.0

    def connections(self, descriptors: int, used: int) -> int:
        """The most connections, of a process that may have `descriptors` and uses `used`."""
        return max(_MIN_CONNECTIONS, descriptors - used - self.spare_descriptors)


LIMITS = HTTPLimits()
