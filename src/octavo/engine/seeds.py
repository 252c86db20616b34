"""The seeds of requests that come without one.

Drawn once for each request: by the client of an engine process, so that another engine can
continue the request with the same draws, or by an engine in its caller's process.
"""

import hashlib
import itertools
import secrets


class SeedSource:
    """Random seeds; or with a seed of its own, the same ones in the same order.

    >>> source = SeedSource(0)
    >>> source.next() != source.next()
    True
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._count = itertools.count()

    def next(self) -> int:
        """The seed of the next request that has none: 64 bits."""
        if self._seed is None:
            return secrets.randbits(64)
        name = f"{self._seed} {next(self._count)}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
