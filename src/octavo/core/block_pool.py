"""Physical blocks: a free list, reference counts, and the hashes of cached contents.

Every operation is O(1). The free list is doubly linked through two arrays, with block 0 as its
head and tail, so a free block found by its hash is unlinked from the middle in O(1). Blocks
without cached contents are put at the front and used first; blocks with cached contents go to
the back, so the least recently used contents are overwritten first.

            front: next to be overwritten                       back: used last
    0 <-> [empty] <-> [empty] <-> [cached, old] <-> ... <-> [cached, recent] <-> 0
"""

from collections.abc import Collection

from octavo.errors import EngineError, NotEnoughMemoryError


class BlockPool:
    """`num_blocks` block ids from 0; 0 is the null block, which is never allocated.

    `refs[b]` is how many tables hold block b; `hashes[b]` names its published content or is
    None. Both are for reading: only the methods change them. A published block must not be
    written, not even by its only holder: others may find it at any time.
    """

    __slots__ = (
        "_block_of", "_next", "_prev", "hashes", "num_blocks", "num_evictions", "num_free",
        "num_shared", "peak_used", "refs",
    )  # fmt: skip

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise NotEnoughMemoryError(
                f"a pool needs at least 2 blocks (one is the null block), not {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1
        self.num_shared = 0  # blocks with two references or more
        self.num_evictions = 0  # cached contents overwritten so far
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks with a published content, held or free."""
        return len(self._block_of)

    @property
    def cached(self) -> Collection[int]:
        """Those blocks, in no order."""
        return self._block_of.values()

    def allocate(self) -> int:
        """The free block at the front, with one reference; its cached contents are dropped."""
        block = self._next[0]
        if block == 0:
            raise EngineError("no free block; the caller must look at num_free first")
        self._unlink(block)
        self.refs[block] = 1
        if (content := self.hashes[block]) is not None:
            self.hashes[block] = None
            del self._block_of[content]
            self.num_evictions += 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is held, or that `find` has just found."""
        count = self.refs[block]
        if count == 0:
            self._unlink(block)
        elif count == 1:
            self.num_shared += 1
        self.refs[block] = count + 1

    def release(self, block: int) -> None:
        """Drop one reference; the last one frees the block. Cached contents stay."""
        count = self.refs[block] - 1
        if count < 0:
            raise EngineError(f"block {block} was released once too often")
        self.refs[block] = count
        if count == 1:
            self.num_shared -= 1
        elif count == 0:
            before = 0 if self.hashes[block] is None else self._prev[0]
            self._link(block, before)

    def writable(self, block: int) -> bool:
        """Whether its one holder may write to it."""
        return self.refs[block] == 1 and self.hashes[block] is None

    def find(self, content: bytes) -> int | None:
        """The block published with this hash. Stale once any block is allocated."""
        return self._block_of.get(content)

    def publish(self, block: int, content: bytes) -> None:
        """Name the content of a full, computed block, unless another block has that name."""
        if self.hashes[block] is None and content not in self._block_of:
            self.hashes[block] = content
            self._block_of[content] = block

    def forget(self) -> None:
        """Drop all cached contents. Held blocks stay held; they are just not found again.

        Free ones move to the front: writing to memory that was written before is faster than
        faulting in new pages (2 s per GiB on one virtual machine).
        """
        for block in self._block_of.values():
            self.hashes[block] = None
            if self.refs[block] == 0:
                self._take_out(block)
                self._put_in(block, 0)
        self._block_of.clear()

    def _unlink(self, block: int) -> None:
        self._take_out(block)
        self.num_free -= 1
        used = self.num_blocks - 1 - self.num_free
        if used > self.peak_used:
            self.peak_used = used

    def _link(self, block: int, before: int) -> None:
        self._put_in(block, before)
        self.num_free += 1

    def _take_out(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _put_in(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after

    def check(self) -> None:
        """Verify every invariant; raises EngineError. O(num_blocks): for tests and idle times."""
        free = self._walk()
        expect(len(free) == self.num_free, f"{len(free)} blocks are linked, not {self.num_free}")
        expect(len(set(free)) == len(free), "a block is twice in the free list")
        expect(0 not in free and self.refs[0] == 0, "the null block was allocated")
        unheld = [b for b in range(1, self.num_blocks) if self.refs[b] == 0]
        expect(sorted(free) == unheld, "the free list is not the set of blocks without holder")
        shared = sum(count > 1 for count in self.refs)
        expect(shared == self.num_shared, f"{shared} blocks are shared, not {self.num_shared}")
        expect(self.num_used <= self.peak_used, "the high-water mark is too low")
        named = {content: b for b, content in enumerate(self.hashes) if content is not None}
        expect(named == self._block_of, "hashes and blocks do not name each other")

    def _walk(self) -> list[int]:
        free: list[int] = []
        block = 0
        while (after := self._next[block]) != 0 and len(free) < self.num_blocks:
            expect(self._prev[after] == block, "the free list is broken at block {}", after)
            free.append(after)
            block = after
        expect(self._prev[0] == block, "the free list has no proper end")
        return free


def expect(condition: bool, message: str, *values: object) -> None:
    """Raise EngineError with `message` unless `condition` holds.

    `values` fill the message's braces, only then: what is checked often is formatted rarely.
    """
    if not condition:
        raise EngineError(f"block accounting is broken: {message.format(*values)}")
