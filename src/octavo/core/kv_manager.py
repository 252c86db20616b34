"""The scheduler's interface to KV memory: match, grow, fork, publish, swap, free.

Tables live in the requests; this is the only place that changes them. It touches no tensor:
what must be copied is collected as `BlockCopy`, in order, for the next plan.

Layers with equal `CacheSpec` form a KV group. All groups allocate from one pool, and a request has
a list of blocks for each: a logical block of its tokens is one physical block per group. Blocks
behind the window of a group are released, so such a group holds few blocks however long the
sequence is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool, expect
from octavo.core.plan import FULL, MOST_TOKENS, BlockCopy, CacheSpec, longest_sequence
from octavo.core.prefix_cache import Prefix, PrefixCache, hash_block, root
from octavo.core.request import Request
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVUsage:
    """The pool in slots, and the prefix-cache hits.

    A slot holds the keys and values of one token in the layers of one KV group.

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
    included; below 2 there is none. groups: what the layers of each KV group cache. max_chunk:
    the most tokens of one request in a step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        groups: Sequence[CacheSpec] = (FULL,),
        max_chunk: int = MOST_TOKENS,
    ) -> None:
        _check_groups(groups)
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks) if num_host_blocks >= 2 else None
        self.cache = PrefixCache(self.pool, block_size, groups)
        self.caching = enable_prefix_caching
        self._windowed = [g for g, spec in enumerate(self.groups) if spec.window is not None]
        # Of each windowed group, the most blocks that a request needs at once.
        self._window_blocks = [
            self.groups[group].most_blocks(MOST_TOKENS, max_chunk, block_size)
            for group in self._windowed
        ]
        self._holders: dict[Request, None] = {}
        self._on_host: dict[Request, None] = {}
        self._num_out = self._num_in = 0
        self._most_written = 0
        self._copies: list[BlockCopy] = []

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the whole pool holds."""
        return longest_sequence(self.groups, self.pool.num_blocks - 1, self.block_size)

    @property
    def holders(self) -> Collection[Request]:
        """The requests that hold blocks of the pool."""
        return self._holders.keys()

    @property
    def on_host(self) -> Collection[Request]:
        """The requests that hold blocks of the host's pool."""
        return self._on_host.keys()

    # Starting: what is cached already, and is there memory for the rest?

    def find(self, request: Request) -> Prefix:
        """Blocks of `request`, which holds none, whose content the pool has already.

        The longest computed prefix that every group can serve; of a swapped request, any block
        that it will need. Changes nothing, and is stale once any block is allocated. A request
        that needs the log-probabilities of its prompt must compute it and finds none.
        """
        if request.host_blocks:
            found = [self.pool.find(name) for name in self._full_names_on_host(request)]
            return Prefix([[block for block in found if block is not None]], (0,))
        if not self.caching or request.wants_prompt_logprobs:
            return Prefix([[] for _ in self.groups], [0] * self.num_groups)
        return self.cache.find(request)

    def shortage(self, request: Request, found: Prefix, spare: int) -> int:
        """Blocks missing to hold all tokens of `request`, with `found`, and leave `spare` free.

        The peak during the request: blocks behind a window are released chunk by chunk. If that
        exceeds the pool, the chunks are made smaller.
        """
        refs, blocks = self.pool.refs, found.held()
        needed = sum([refs[block] == 0 for block in blocks])  # free now, and then not
        if request.host_blocks:
            on_host = len(request.host_blocks) - request.host_blocks.count(0)
            needed += on_host - len(blocks)
            needed += self._more(request, self._blocks(request.num_computed))
        else:
            needed += self._more(request, len(found))
            if len(found) * self.block_size == len(request.tokens):
                # The copies described in `take`.
                needed += sum([refs[group[-1]] > 0 for group in found.groups])
        return min(needed, self.pool.num_blocks - 1) + spare - self.pool.num_free

    def _more(self, request: Request, num_blocks: int, held: Sequence[int] = ()) -> int:
        """Blocks needed, at once and at most, for the tokens after `num_blocks` logical blocks.

        held: of each windowed group, blocks held that are released on the way.
        """
        new = self._blocks(len(request.tokens)) - num_blocks
        needed = new * (self.num_groups - len(self._windowed))
        for index, most in enumerate(self._window_blocks):
            needed += min(new, max(0, most - held[index]) if held else most)
        return needed

    def take(self, request: Request, found: Prefix) -> int:
        """Assign `found` to `request` as its first tokens; returns how many tokens that is.

        At most all tokens but one, whose logits are needed. When every block is found, the
        last token is computed again into a copy of the last block, or, if no block is left for
        a copy, the last block is computed again.
        """
        last = len(request.tokens) - 1
        if len(found) * self.block_size > last:
            free = sum([self.pool.refs[block] == 0 for block in found.held()])
            if self.pool.num_free - free < self.num_groups:
                found = self.cache.find(request, len(found) - 1)
        for block in found.held():
            self.pool.share(block)
        table = request.table
        table.extend(found.groups)
        table.first = list(found.first)
        request.num_computed = min(len(found) * self.block_size, last)
        table.num_published = request.num_computed // self.block_size
        self._holders[request] = None
        return request.num_computed

    def match(self, request: Request) -> int:
        """Start `request` on the longest cached prefix; returns its tokens, at most all but one."""
        return self.take(request, self.find(request))

    def count_query(self, request: Request) -> None:
        """Count the first lookup of `request` for the hit rate."""
        self.cache.queried_tokens += request.num_prompt_tokens
        self.cache.cached_tokens += request.num_cached_tokens

    # Running: more tokens, more choices, more published blocks.

    def grow_each(self, requests: list[Request]) -> list[Request]:
        """`grow` each by one token; returns those for which there was no block.

        Each step does this for each running request, so the common case, a free slot in an
        unshared block, is handled here.
        """
        size, refs, hashes = self.block_size, self.pool.refs, self.pool.hashes
        short: list[Request] = []
        for request in requests:
            index, offset = divmod(request.num_computed, size)
            if offset:
                for blocks in request.table.groups:
                    block = blocks[index]
                    if refs[block] != 1 or hashes[block] is not None:
                        break
                else:
                    continue
            if not self.grow(request, 1):
                short.append(request)
        return short

    def missing(self, request: Request) -> int:
        """Blocks that `request` still needs, at once and at most, for the tokens it has."""
        table = request.table
        held: list[int] = []
        # A block shared with others does not become free when it is released.
        if self._windowed and not self.pool.num_shared and table.groups:
            held = [len(table) - table.first[group] for group in self._windowed]
        return self._more(request, len(table), held)

    def max_growth(self, request: Request) -> int:
        """The most tokens by which `request` could `grow` now."""
        free = self.pool.num_free - len(self._must_copy(request))
        if free < 0:
            return 0
        blocks = len(request.table) + free // self.num_groups
        return blocks * self.block_size - request.num_computed

    def grow(self, request: Request, count: int) -> bool:
        """Hold writable blocks for the next `count` tokens; False, and no change, if too few.

        A block that others hold or may find is copied before `request` writes to it.
        """
        start, table = request.num_computed, request.table
        needed = -(-(start + count) // self.block_size) - len(table)
        copied = self._must_copy(request)
        if needed <= 0 and not copied:
            return True
        if max(needed, 0) * self.num_groups + len(copied) > self.pool.num_free:
            return False
        for group in copied:
            self._copy_on_write(request, group, start // self.block_size)
        if needed > 0:
            allocate = self.pool.allocate
            table.extend([[allocate() for _ in range(needed)] for _ in self.groups])
            self._holders[request] = None
        return True

    def _must_copy(self, request: Request) -> list[int]:
        """The groups whose block that `request` writes to next is not its own."""
        index, offset = divmod(request.num_computed, self.block_size)
        if not offset:
            return []
        writable = self.pool.writable
        groups = request.table.groups
        return [group for group, blocks in enumerate(groups) if not writable(blocks[index])]

    def _copy_on_write(self, request: Request, group: int, index: int) -> None:
        table = request.table
        old, new = table.groups[group][index], self.pool.allocate()
        self._copies.append(BlockCopy("copy", old, new))
        table.replace(group, index, new)
        # The old block may be allocated again within this step: its copy is made before any
        # row writes, and copies are made in the order in which they were requested.
        self.pool.release(old)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` start where `parent` is, on the same blocks, a half-full last one included.

        parent  [ full ][ full ][ half ]      refs 2, 2, 2; the first to write to `half`
        child   [ full ][ full ][ half ]      copies it, the last holder writes in place
        """
        child.table = parent.table.fork()
        child.num_computed = parent.num_computed
        for block in child.table.held():
            self.pool.share(block)
        self._holders[child] = None

    def publish(self, request: Request, computed: int) -> None:
        """After a step, which computed `request` up to its first `computed` tokens: let others
        find its full blocks, and release those that no later query sees.

        Plans that are still in flight begin at `computed` or later, so they do not see them.
        """
        table = request.table
        if self.caching:
            self.cache.publish(request, computed)
        table.num_published = max(table.num_published, computed // self.block_size)
        for group in self._windowed:
            self._release_behind(request, group, computed)

    def _release_behind(self, request: Request, group: int, computed: int) -> None:
        """Release the blocks of `group` that are wholly behind the window of the next token.

            tokens   0 ............ computed - window ][ window - 1 tokens ] computed
            before   [  5  ][  8  ][  2  ][  9  ][  4  ][  7  ]
            after    [  0  ][  0  ][  2  ][  9  ][  4  ][  7  ]
                                    ^ holds the first token that is seen

        The null block 0 keeps the place of what was released. Kernels may read it, since they
        read whole splits of keys, and mask what they read: it holds finite zeros.
        """
        end = self.groups[group].first_needed(computed) // self.block_size
        for block in request.table.drop_front(group, end):
            self.pool.release(block)

    def rewind(self, request: Request, computed: int) -> None:
        """Keep the first `computed` tokens of `request`, and release the blocks after them: the
        rest were drafts that were rejected. No block after them has been published."""
        request.num_computed = computed
        for block in reversed(request.table.truncate(self._blocks(computed))):
            self.pool.release(block)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies requested since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    # Swapping.

    def swap_out(self, request: Request) -> bool:
        """Free the blocks of `request`, with what it has computed copied to the host.

            pool  [  7  ][  4  ][ 9: half ]      7 is shared with a request that was swapped
            host  [  3  ][ new ][   new   ]      before: its copy, 3, is found by name and shared

        False, and no change, if the host has no free blocks. The copies run before any row
        writes.
        """
        host = self.host
        if host is None:
            return False
        blocks, names = self._computed_blocks(request), self._content(request)
        found = [host.find(name) if block else 0 for block, name in zip(blocks, names, strict=True)]
        needed = sum([block is None or (block > 0 and host.refs[block] == 0) for block in found])
        if needed > host.num_free:
            return False
        for there in found:  # all of them first: allocating may overwrite what was found
            if there:
                host.share(there)
        for source, name, there in zip(blocks, names, found, strict=True):
            request.host_blocks.append(self._copy_out(host, source, name, there))
        # Blocks that are still in the pool when the request resumes need no copy.
        full = request.num_computed // self.block_size * self.num_groups
        for source, name in zip(blocks[:full], names, strict=False):
            if source:
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
        """Undo `swap_out`; the caller has checked that there is no shortage."""
        sources, names = request.host_blocks, self._content(request)
        full = request.num_computed // self.block_size * self.num_groups
        found = [
            self.pool.find(name) if source else 0
            for source, name in zip(sources[:full], names, strict=False)
        ]
        for block in found:
            if block:
                self.pool.share(block)
        blocks: list[int] = []
        for index, (source, name) in enumerate(zip(sources, names, strict=True)):
            here = found[index] if index < full else None
            if here is None:
                here = self._copy_in(source, name if index < full else None)
            blocks.append(here)
        groups = [blocks[group :: self.num_groups] for group in range(self.num_groups)]
        table = request.table
        table.extend(groups)
        table.first = [sum([block == 0 for block in group]) for group in groups]
        table.num_published = full // self.num_groups
        self._holders[request] = None
        self._release_host(request)

    def _copy_in(self, source: int, name: bytes | None) -> int:
        target = self.pool.allocate()
        if name is not None:
            self.pool.publish(target, name)
        self._copies.append(BlockCopy("in", source, target))
        self._num_in += 1
        return target

    def _computed_blocks(self, request: Request) -> list[int]:
        """The blocks with computed content: all groups of the first logical block, of the next,
        ...; the null block for those behind a window."""
        rows = list(zip(*request.table.groups, strict=True))
        return [block for row in rows[: self._blocks(request.num_computed)] for block in row]

    def _content(self, request: Request) -> list[bytes]:
        """The names of `_computed_blocks`, of a half-full last one too."""
        full, rest = divmod(request.num_computed, self.block_size)
        names = self.cache.names(request, full)[:full]
        if rest:
            parent = names[-1] if names else root(request.submission.cache_salt)
            names.append(
                hash_block(
                    parent, request.tokens[request.num_computed - rest : request.num_computed]
                )
            )
        return [name + tag for name in names for tag in self.cache.tags]

    def _full_names_on_host(self, request: Request) -> list[bytes]:
        """The names of the full blocks of a swapped request."""
        full = request.num_computed // self.block_size * self.num_groups
        names = self._content(request)[:full]
        return [n for n, block in zip(names, request.host_blocks, strict=False) if block]

    def preemption_cost(self, request: Request) -> tuple[int, int]:
        """(tokens to recompute, block copies to swap out and in) if `request` is preempted now.

        Blocks that others hold too remain in the pool at no cost; their tokens need no
        recomputation if that holds in every group.
        """
        refs = self.pool.refs
        blocks = self._computed_blocks(request)
        shared = [block == 0 or refs[block] > 1 for block in blocks]
        step = self.num_groups
        saved = sum([all(shared[at : at + step]) for at in range(0, len(shared), step)])
        tokens = max(request.num_computed - saved * self.block_size, 0)
        return tokens, 2 * shared.count(False)

    def freed_by(self, request: Request, wanted: Prefix) -> int:
        """Blocks that become free when `request` is preempted, without those that are `wanted`."""
        refs = self.pool.refs
        keep = set(wanted.held())
        return sum([refs[block] == 1 and block not in keep for block in request.table.held()])

    # Releasing.

    def free(self, request: Request) -> None:
        """Release all blocks, the last one first. Published ones can be found until overwritten.

            tokens   [0 .. 15][16 .. 31][32 .. 39, 8 slots unwritten]
            blocks      7         4         9
            release     3rd       2nd       1st
            list     front: 9, ...  (nothing cached: used next)  ..., 4, 7: back

        A cached prefix is useless without its beginning, so the beginning is released last.
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
                if block:
                    self.host.release(block)
            request.host_blocks.clear()
            self._on_host.pop(request, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False if requests hold blocks, which they keep."""
        self.pool.forget()
        if self.host is not None:
            self.host.forget()
        return self.pool.num_used == 0

    # Statistics and checks.

    def usage(self) -> KVUsage:
        """Current counts; takes time linear in the number of requests that hold blocks."""
        size, pool = self.block_size, self.pool
        held = pool.num_used * size
        return KVUsage(
            total_slots=(pool.num_blocks - 1) * size,
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
        """The step just planned computes `coming` of the tokens that requests hold slots for."""
        held = self.pool.num_used * self.block_size
        if held > self._most_written:  # else it cannot be a new high-water mark
            written = held - self._unwritten() + coming * self.num_groups
            self._most_written = max(self._most_written, written)

    def usage_of(self, request: Request) -> tuple[int, int, int]:
        """(held, written, shared) slots of one request, in all groups."""
        table, size = request.table, self.block_size
        shared = sum([self.pool.refs[block] > 1 for block in table.held()])
        written = sum([request.num_computed - first * size for first in table.first])
        return table.num_held * size, written, shared * size

    def _unwritten(self) -> int:
        """Slots of held blocks that no holder has computed.

        Only blocks from a request's first uncomputed token on can have any; a block that two
        requests hold has what the further one of them has written.
        """
        size = self.block_size
        empty: dict[int, int] = {}
        for request in self._holders:
            table, computed = request.table, request.num_computed
            for index in range(computed // size, len(table)):
                unwritten = size - max(0, computed - index * size)
                for blocks in table.groups:
                    block = blocks[index]
                    if self.pool.hashes[block] is None:  # a published block is full
                        empty[block] = min(unwritten, empty.get(block, size))
        return sum(empty.values())

    def check(self) -> None:
        """Verify both pools, and that their references match the tables. For tests, idle."""
        for request in self._holders:
            self._check_table(request)
            expect(not request.host_blocks, "{!r} is in two places", request)
        _check_references(self.pool, [request.table.held() for request in self._holders])
        if self.host is not None:
            _check_references(self.host, [request.host_blocks for request in self._on_host])

    def _check_table(self, request: Request) -> None:
        table = request.table
        expect(
            request.num_computed <= len(table) * self.block_size,
            "{!r} has more tokens than slots",
            request,
        )
        ids = tuple(tuple(blocks) for blocks in table.groups)
        expect(table.ids == ids, "{!r} has a stale tuple of blocks", request)
        for spec, blocks, first in zip(self.groups, table.groups, table.first, strict=False):
            expect(len(blocks) == len(table), "{!r} has groups of different lengths", request)
            expect(
                not any(blocks[:first]) and all(blocks[first:]),
                "{!r} has the null block elsewhere than behind the window",
                request,
            )
            expect(
                first * self.block_size <= spec.first_needed(request.num_computed),
                "{!r} lacks a block that a window of {} sees",
                request,
                spec.window,
            )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _check_groups(groups: Sequence[CacheSpec]) -> None:
    if not groups:
        raise ConfigError("a KV cache needs at least one group of layers")
    for group, spec in enumerate(groups):
        if spec.kind == "state":
            raise ConfigError(
                f"KV group {group} caches a state of fixed size, which is not served yet: it "
                "needs one slot per request, written in place, and snapshots for the prefix cache"
            )


def _check_references(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.check()
    counts = [0] * pool.num_blocks
    for blocks in tables:
        for block in blocks:
            counts[block] += block > 0
    expect(counts == pool.refs, "references and tables differ")
