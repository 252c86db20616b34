"""All that the scheduler asks about memory: match, grow, fork, publish, swap, free.

Tables live in the requests; this is the only place that changes them. It touches no tensor:
what must be copied is collected as `BlockCopy`, in order, for the next plan.
"""

from dataclasses import dataclass

from octavo.core.block_pool import BlockPool, expect
from octavo.core.plan import BlockCopy
from octavo.core.prefix_cache import PrefixCache, hash_block, root
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class KVUsage:
    """The pool in slots (one slot: the keys and values of one token), and the cache's luck.

    held_slots: of all blocks that some request holds; written_slots: of them, computed;
    shared_slots: of them, held by more than one request. Shared ones count once. most_*: the
    most so far. *_blocks count blocks, swapped ones since the start.
    """

    total_slots: int
    held_slots: int
    written_slots: int
    shared_slots: int
    most_held_slots: int
    most_written_slots: int
    cached_blocks: int
    evictions: int
    queried_tokens: int
    cached_tokens: int
    host_blocks: int = 0
    most_host_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0

    @property
    def fragmentation(self) -> float:
        """Unwritten slots in held blocks / slots in held blocks."""
        return 1 - self.written_slots / self.held_slots if self.held_slots else 0.0


class KVManager:
    """The block tables of all requests over one pool.

    num_blocks: of the pool, the null block included. enable_prefix_caching: whether equal
    prefixes share blocks across requests. num_host_blocks: of the swap pool, its own null block
    included; below 2 there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks) if num_host_blocks >= 2 else None
        self.cache = PrefixCache(self.pool, block_size)
        self.caching = enable_prefix_caching
        self._holders: dict[Request, None] = {}
        self._on_host: dict[Request, None] = {}
        self._num_out = self._num_in = 0
        self._most_written = 0
        self._copies: list[BlockCopy] = []

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return (self.pool.num_blocks - 1) * self.block_size

    # Entering: what is cached already, and is there room for the rest?

    def find(self, request: Request) -> list[int]:
        """Blocks of `request`, which holds none, whose content the pool has already.

        The longest computed prefix; of a swapped request, any that it will need. Changes
        nothing, and is stale once any block is allocated. A request that needs the
        log-probabilities of its prompt must compute it and finds none.
        """
        if request.host_blocks:
            names = self._content(request)[: request.num_computed // self.block_size]
            return [block for name in names if (block := self.pool.find(name)) is not None]
        if not self.caching or request.wants_prompt_logprobs:
            return []
        return self.cache.find(request)

    def shortage(self, request: Request, found: list[int], spare: int) -> int:
        """Blocks that lack for `request` to fit whole, with `found`, and leave `spare` free."""
        refs = self.pool.refs
        needed = self._blocks(len(request.tokens)) - len(found)
        needed += sum([refs[block] == 0 for block in found])  # free now, and then not
        if len(found) * self.block_size == len(request.tokens):
            needed += refs[found[-1]] > 0  # the copy that `take` speaks of
        return needed + spare - self.pool.num_free

    def take(self, request: Request, found: list[int]) -> int:
        """Give `found` to `request` as its first tokens; returns how many tokens that is.

        At most all tokens but one, whose logits are needed. When every block is found, the
        last token is computed again into a copy of the last block, or, if no block is left for
        a copy, the last block is computed again.
        """
        last = len(request.tokens) - 1
        if len(found) * self.block_size > last:
            free = sum([self.pool.refs[block] == 0 for block in found])
            if self.pool.num_free - free < 1:
                found = found[:-1]
        for block in found:
            self.pool.share(block)
        request.table.extend(found)
        request.num_computed = min(len(found) * self.block_size, last)
        request.table.num_published = request.num_computed // self.block_size
        self._holders[request] = None
        return request.num_computed

    def match(self, request: Request) -> int:
        """Start `request` on the longest cached prefix; returns its tokens, at most all but one."""
        return self.take(request, self.find(request))

    def count_query(self, request: Request) -> None:
        """Note for the hit rate that `request` has been looked up for the first time."""
        self.cache.queried_tokens += request.num_prompt_tokens
        self.cache.cached_tokens += request.num_cached_tokens

    # Running: more tokens, more choices, more published blocks.

    def grow_each(self, requests: list[Request]) -> list[Request]:
        """`grow` each by one token; returns those for which there was no block.

        Each step does this for each running request, so the common case, a slot in a block of
        its own, is decided here.
        """
        size, refs, hashes = self.block_size, self.pool.refs, self.pool.hashes
        short: list[Request] = []
        for request in requests:
            index, offset = divmod(request.num_computed, size)
            if offset:
                block = request.table.blocks[index]
                if refs[block] == 1 and hashes[block] is None:
                    continue
            if not self.grow(request, 1):
                short.append(request)
        return short

    def missing(self, request: Request) -> int:
        """Blocks that `request` still needs for the tokens it has."""
        return self._blocks(len(request.tokens)) - len(request.table.blocks)

    def room(self, request: Request) -> int:
        """The most tokens that `grow` could give `request` now."""
        free = self.pool.num_free - self._must_copy(request)
        if free < 0:
            return 0
        return (len(request.table.blocks) + free) * self.block_size - request.num_computed

    def grow(self, request: Request, count: int) -> bool:
        """Hold writable blocks for the next `count` tokens; False, and no change, if too few.

        A block that others hold or may find is copied before `request` writes to it.
        """
        start = request.num_computed
        blocks = request.table.blocks
        needed = -(-(start + count) // self.block_size) - len(blocks)
        copy = self._must_copy(request)
        if needed <= 0 and not copy:
            return True
        if max(needed, 0) + copy > self.pool.num_free:
            return False
        if copy:
            self._copy_on_write(request, start // self.block_size)
        if needed > 0:
            request.table.extend([self.pool.allocate() for _ in range(needed)])
            self._holders[request] = None
        return True

    def _must_copy(self, request: Request) -> bool:
        start = request.num_computed
        if start % self.block_size == 0:
            return False
        return not self.pool.writable(request.table.blocks[start // self.block_size])

    def _copy_on_write(self, request: Request, index: int) -> None:
        table = request.table
        old, new = table.blocks[index], self.pool.allocate()
        self._copies.append(BlockCopy("copy", old, new))
        table.replace(index, new)
        # The old block may be allocated again within this step: its copy is made before any
        # row writes, and copies are made in the order in which they are asked for.
        self.pool.release(old)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` start where `parent` is, on the same blocks, a half-full last one included.

        parent  [ full ][ full ][ half ]      refs 2, 2, 2; whoever writes first to `half`
        child   [ full ][ full ][ half ]      copies it, the last one writes in place
        """
        child.table = parent.table.fork()
        child.num_computed = parent.num_computed
        for block in child.table.blocks:
            self.pool.share(block)
        self._holders[child] = None

    def publish(self, request: Request, computed: int) -> None:
        """After a step: let others find the blocks of `request` whose tokens are computed, which
        the first `computed` tokens are."""
        if self.caching:
            self.cache.publish(request, computed)

    def rewind(self, request: Request, computed: int) -> None:
        """Keep the first `computed` tokens of `request`, and release the blocks after them: the
        rest were drafts that were rejected. No block after them has been published."""
        request.num_computed = computed
        for block in reversed(request.table.truncate(self._blocks(computed))):
            self.pool.release(block)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies asked for since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    # To the host and back.

    def swap_out(self, request: Request) -> bool:
        """Free the blocks of `request`, with what it has computed copied to the host.

            pool  [  7  ][  4  ][ 9: half ]      7 is shared with a request that was swapped
            host  [  3  ][ new ][   new   ]      before: its copy, 3, is found by name and shared

        False, and no change, if the host has no room. The copies run before any row writes.
        """
        host = self.host
        if host is None:
            return False
        names = self._content(request)
        found = [host.find(name) for name in names]
        taken = sum([block is None or host.refs[block] == 0 for block in found])
        if taken > host.num_free:
            return False
        for block in found:  # all of them first: allocating may overwrite what was found
            if block is not None:
                host.share(block)
        for source, name, there in zip(request.table.blocks, names, found, strict=False):
            request.host_blocks.append(self._copy_out(host, source, name, there))
        # Those that are still in the pool when the request comes back need no copy.
        full = request.num_computed // self.block_size
        for source, name in zip(request.table.blocks[:full], names, strict=False):
            self.pool.publish(source, name)
        self._release_table(request)
        self._on_host[request] = None
        return True

    def _copy_out(self, host: BlockPool, source: int, name: bytes, there: int | None) -> int:
        if there is not None:
            return there
        target = host.allocate()
        host.publish(target, name)
        self._copies.append(BlockCopy("out", source, target))
        self._num_out += 1
        return target

    def swap_in(self, request: Request) -> None:
        """Bring back what `swap_out` took; the caller has seen that there is no shortage."""
        names = self._content(request)
        full = request.num_computed // self.block_size
        found = [self.pool.find(name) for name in names[:full]]
        for block in found:
            if block is not None:
                self.pool.share(block)
        for index, name in enumerate(names):
            here = found[index] if index < full else None
            if here is None:
                here = self._copy_in(request.host_blocks[index], name if index < full else None)
            request.table.append(here)
        request.table.num_published = full
        self._holders[request] = None
        self._release_host(request)

    def _copy_in(self, source: int, name: bytes | None) -> int:
        target = self.pool.allocate()
        if name is not None:
            self.pool.publish(target, name)
        self._copies.append(BlockCopy("in", source, target))
        self._num_in += 1
        return target

    def _content(self, request: Request) -> list[bytes]:
        """The name of each block's computed content, of a half-full last one too."""
        full, rest = divmod(request.num_computed, self.block_size)
        names = self.cache.names(request, full)[:full]
        if rest:
            parent = names[-1] if names else root(request)
            names.append(
                hash_block(
                    parent, request.tokens[request.num_computed - rest : request.num_computed]
                )
            )
        return names

    def leaving_cost(self, request: Request) -> tuple[int, int]:
        """(tokens to compute again, blocks to copy there and back) if `request` leaves now.

        What others hold too stays, and costs neither.
        """
        refs = self.pool.refs
        blocks = request.table.blocks[: self._blocks(request.num_computed)]
        shared = sum([refs[block] > 1 for block in blocks])
        tokens = max(request.num_computed - shared * self.block_size, 0)
        return tokens, 2 * (len(blocks) - shared)

    def freed_by(self, request: Request, wanted: list[int]) -> int:
        """Blocks that become free when `request` leaves, beside those that are `wanted` as is."""
        refs = self.pool.refs
        keep = set(wanted)
        return sum([refs[block] == 1 and block not in keep for block in request.table.blocks])

    # Leaving.

    def free(self, request: Request) -> None:
        """Give all blocks back, the tail first. Published ones stay findable until overwritten.

            tokens   [0 .. 15][16 .. 31][32 .. 39, 8 slots unwritten]
            blocks      7         4         9
            release     3rd       2nd       1st
            list     front: 9, ...  (nothing cached: used next)  ..., 4, 7: back

        Without its beginning a cached prefix is of no use, so the beginning goes last.
        """
        self._release_table(request)
        self._release_host(request)
        request.num_computed = 0

    def _release_table(self, request: Request) -> None:
        for block in reversed(request.table.clear()):
            self.pool.release(block)
        self._holders.pop(request, None)

    def _release_host(self, request: Request) -> None:
        if self.host is not None:
            for block in reversed(request.host_blocks):
                self.host.release(block)
            request.host_blocks.clear()
            self._on_host.pop(request, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False if requests hold blocks, which they keep."""
        self.pool.forget()
        if self.host is not None:
            self.host.forget()
        return self.pool.num_used == 0

    # Looking.

    def usage(self) -> KVUsage:
        """Counts of this moment; costs time in the number of requests that hold blocks."""
        size, pool = self.block_size, self.pool
        held = pool.num_used * size
        return KVUsage(
            total_slots=self.capacity,
            held_slots=held,
            written_slots=held - self._unwritten(),
            shared_slots=pool.num_shared * size,
            most_held_slots=pool.peak_used * size,
            most_written_slots=self._most_written,
            cached_blocks=pool.num_cached,
            evictions=pool.num_evictions,
            queried_tokens=self.cache.queried_tokens,
            cached_tokens=self.cache.cached_tokens,
            host_blocks=self.host.num_used if self.host else 0,
            most_host_blocks=self.host.peak_used if self.host else 0,
            swapped_out_blocks=self._num_out,
            swapped_in_blocks=self._num_in,
        )

    def note_written(self, coming: int) -> None:
        """The step just planned writes `coming` of the slots that requests hold."""
        held = self.pool.num_used * self.block_size
        if held > self._most_written:  # else it cannot be a new high-water mark
            self._most_written = max(self._most_written, held - self._unwritten() + coming)

    def usage_of(self, request: Request) -> tuple[int, int, int]:
        """(held, written, shared) slots of one request."""
        blocks = request.table.blocks
        shared = sum([self.pool.refs[block] > 1 for block in blocks])
        written = request.num_computed if blocks else 0
        return len(blocks) * self.block_size, written, shared * self.block_size

    def _unwritten(self) -> int:
        """Slots of held blocks that no holder has computed.

        Only blocks from a request's first uncomputed token on can have any; a block that two
        requests hold has what the further one of them has written.
        """
        size = self.block_size
        empty: dict[int, int] = {}
        for request in self._holders:
            blocks, computed = request.table.blocks, request.num_computed
            for index in range(computed // size, len(blocks)):
                block = blocks[index]
                unwritten = size - max(0, computed - index * size)
                if self.pool.hashes[block] is None:  # a published block is full
                    empty[block] = min(unwritten, empty.get(block, size))
        return sum(empty.values())

    def check(self) -> None:
        """Verify both pools, and that references are just those of the tables. For tests, idle."""
        tables = [(request, request.table.blocks) for request in self._holders]
        for request, blocks in tables:
            expect(
                request.num_computed <= len(blocks) * self.block_size,
                f"{request!r} has more tokens than slots",
            )
            expect(request.table.ids == tuple(blocks), f"{request!r} has a stale tuple of blocks")
            expect(not request.host_blocks, f"{request!r} is in two places")
        _check_references(self.pool, [blocks for _, blocks in tables])
        if self.host is not None:
            _check_references(self.host, [request.host_blocks for request in self._on_host])

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _check_references(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.check()
    counts = [0] * pool.num_blocks
    for blocks in tables:
        for block in blocks:
            counts[block] += 1
    expect(counts == pool.refs, "references and tables differ")
