"""Finds full blocks of a request that are in the pool, by a hash of all that they depend on.

The name of a block is a hash of the name of the preceding block and of its own tokens, so equal
names mean equal histories. The root of the chain includes everything else that restricts sharing:
the salt, tagged so that it cannot collide with other data. A request caches its names: no block is
hashed twice. Each KV group caches different layers of the same tokens, so the pool identifies a
block by its name and its group.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.core.block_pool import BlockPool
from octavo.core.plan import FULL, CacheSpec
from octavo.core.request import Request

_DIGEST = 16  # bytes; 2**64 blocks until two histories are likely to share a name
_ROOT = b"octavo"


@dataclass(frozen=True, slots=True)
class Prefix:
    """A computed prefix: the blocks of each KV group, all of one length.

    The first `first[group]` of them are the null block: they are behind the window.
    """

    groups: Sequence[list[int]]
    first: Sequence[int]

    def __len__(self) -> int:
        """Logical blocks."""
        return len(self.groups[0])

    def held(self) -> list[int]:
        """The physical blocks, without the null block."""
        if len(self.groups) == 1 and not self.first[0]:
            return self.groups[0]
        return [block for blocks in self.groups for block in blocks if block]


class PrefixCache:
    """Names blocks of `pool` and finds them by name. groups: the KV groups."""

    __slots__ = (
        "_full", "_windowed", "block_size", "cached_tokens", "groups", "pool",
        "queried_tokens", "tags",
    )  # fmt: skip

    def __init__(
        self, pool: BlockPool, block_size: int, groups: Sequence[CacheSpec] = (FULL,)
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.groups = tuple(groups)
        self._full = [g for g, spec in enumerate(self.groups) if spec.window is None]
        self._windowed = [g for g, spec in enumerate(self.groups) if spec.window is not None]
        # Appended to a name, a tag gives the name of the block of one group.
        self.tags = [b"", *(group.to_bytes(2, "big") for group in range(1, len(self.groups)))]
        self.queried_tokens = 0  # prompt tokens looked up when requests first ran
        self.cached_tokens = 0  # of them, found

    def names(self, request: Request, count: int) -> list[bytes]:
        """The names of at least the first `count` full blocks of `request`, cached in it."""
        names = request.block_hashes
        size = self.block_size
        while len(names) < count:
            start = len(names) * size
            parent = names[-1] if names else root(request.submission.cache_salt)
            names.append(hash_block(parent, request.tokens[start : start + size]))
        return names

    def find(self, request: Request, limit: int | None = None) -> Prefix:
        """The longest computed prefix of `request`, of at most `limit` blocks, that every group
        can serve.

        Changes no block; stale once any block is allocated.
        """
        names = self.names(request, len(request.tokens) // self.block_size)[:limit]
        found: dict[int, list[int]] = {}
        for group in self._full:
            found[group] = self._run(names, group)
            names = names[: len(found[group])]
        if self._windowed:
            names = names[: self._end_of_windows(request, names)]
        start, find = self._start(request, len(names)), self.pool.find
        first = [self._first_block(group, start) for group in range(len(self.groups))]
        for group in self._windowed:
            begin, tag = first[group], self.tags[group]
            found[group] = [0] * begin + [find(name + tag) or 0 for name in names[begin:]]
        return Prefix([found[group][: len(names)] for group in range(len(first))], first)

    def _start(self, request: Request, num_blocks: int) -> int:
        """The first token to compute after a prefix of `num_blocks`: at the latest the last one,
        whose logits are needed."""
        return min(num_blocks * self.block_size, len(request.tokens) - 1)

    def _run(self, names: list[bytes], group: int) -> list[int]:
        """The blocks of `names`, up to the first one that the pool does not have."""
        find, tag = self.pool.find, self.tags[group]
        found: list[int] = []
        for name in names:
            block = find(name + tag)
            if block is None:
                break
            found.append(block)
        return found

    def _end_of_windows(self, request: Request, names: list[bytes]) -> int:
        """The longest prefix, in blocks, before whose end each window group has what the next
        token sees.

            tokens  ..............[ window - 1 tokens ](next)
            blocks  [    ][    ][    ][    ][    ][    ]
                     any   any   ---- must be cached --
        """
        end = len(names)
        while end:
            start = self._start(request, end)
            missing = max(
                self._last_missing(names, self._first_block(group, start), end, group)
                for group in self._windowed
            )
            if missing < 0:
                break
            # Every prefix that ends between the missing block and `end` needs it.
            end = missing
        return end

    def _first_block(self, group: int, start: int) -> int:
        """The first block that a query at `start` needs."""
        return self.groups[group].first_needed(start) // self.block_size

    def _last_missing(self, names: list[bytes], begin: int, end: int, group: int) -> int:
        """The last of blocks begin..end-1 that the pool does not have for `group`, or -1."""
        find, tag = self.pool.find, self.tags[group]
        for index in range(end - 1, begin - 1, -1):
            if find(names[index] + tag) is None:
                return index
        return -1

    def publish(self, request: Request, computed: int) -> None:
        """Let others find the full blocks among the first `computed` tokens of `request`."""
        table = request.table
        full = computed // self.block_size
        if full <= table.num_published:
            return
        names = self.names(request, full)
        for blocks, tag in zip(table.groups, self.tags, strict=True):
            for index in range(table.num_published, full):
                if block := blocks[index]:
                    self.pool.publish(block, names[index] + tag)


def root(salt: str | None) -> bytes:
    """The root of the chain: what else restricts sharing, tagged and with its length."""
    if salt is None:
        return _ROOT
    text = salt.encode("utf-8", "surrogatepass")
    parts = (_ROOT, b"salt", len(text).to_bytes(4, "big"), text)
    return blake2b(b"".join(parts), digest_size=_DIGEST).digest()


def block_names(tokens: Sequence[int], block_size: int, salt: str | None) -> list[bytes]:
    """The names of the full blocks of a prompt."""
    names, parent = [], root(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash_block(parent, tokens[end - block_size : end])
        names.append(parent)
    return names


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block after the block named `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST).digest()
