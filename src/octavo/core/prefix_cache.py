"""Which full blocks of a request are in the pool already, by the hash of all they depend on.

The name of a block is a hash of the name of the block before it and of its own tokens, so equal
names mean equal histories. The first name of the chain holds what else decides who may share the
blocks: the salt, under a tag, so that nothing else can be mistaken for it. A request keeps its
names: no block is hashed twice.
"""

from array import array
from hashlib import blake2b

from octavo.core.block_pool import BlockPool
from octavo.core.request import Request

_DIGEST = 16  # bytes; 2**64 blocks until two histories are likely to share a name
_ROOT = b"octavo"


class PrefixCache:
    """The names of blocks, over a pool that finds and forgets them."""

    __slots__ = ("block_size", "cached_tokens", "pool", "queried_tokens")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.queried_tokens = 0  # prompt tokens looked up when requests first ran
        self.cached_tokens = 0  # of them, found

    def names(self, request: Request, count: int) -> list[bytes]:
        """The names of at least the first `count` full blocks of `request`, kept in it."""
        names = request.block_hashes
        size = self.block_size
        while len(names) < count:
            start = len(names) * size
            parent = names[-1] if names else root(request)
            names.append(hash_block(parent, request.tokens[start : start + size]))
        return names

    def find(self, request: Request) -> list[int]:
        """The blocks that hold the longest computed prefix of `request`, in order.

        Changes no block; stale once any block is allocated.
        """
        found: list[int] = []
        for name in self.names(request, len(request.tokens) // self.block_size):
            block = self.pool.find(name)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, request: Request, computed: int) -> None:
        """Let others find the full blocks among the first `computed` tokens of `request`."""
        table = request.table
        full = computed // self.block_size
        if full <= table.num_published:
            return
        names = self.names(request, full)
        for index in range(table.num_published, full):
            self.pool.publish(table.blocks[index], names[index])
        table.num_published = full


def root(request: Request) -> bytes:
    """The start of the chain: what the tokens do not say, tagged and with its length."""
    salt = request.submission.cache_salt
    if salt is None:
        return _ROOT
    text = salt.encode("utf-8", "surrogatepass")
    parts = (_ROOT, b"salt", len(text).to_bytes(4, "big"), text)
    return blake2b(b"".join(parts), digest_size=_DIGEST).digest()


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    """The name of a full block after the block named `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST).digest()
