"""The logical blocks of one sequence, in order, as physical block ids: a list per KV group."""

from collections.abc import Sequence


class BlockTable:
    """Block i of each group holds tokens i * block_size up to (i + 1) * block_size.

    groups: per KV group, the block ids; all of one length, and no list while the table is empty.
        The first `first[group]` of them are the null block 0: they are behind the window.
    num_published: how many blocks, from the front, need no more publishing.

    The table owns one reference to each block but the null block; the KV manager takes and
    returns them.
    """

    __slots__ = ("_ids", "first", "groups", "num_published")

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.first: list[int] = []
        self.num_published = 0
        self._ids: tuple[tuple[int, ...], ...] | None = ()

    def __len__(self) -> int:
        """Logical blocks."""
        return len(self.groups[0]) if self.groups else 0

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The block ids of each group; the same tuple object until the table changes."""
        if self._ids is None:
            self._ids = tuple([tuple(blocks) for blocks in self.groups])
        return self._ids

    @property
    def num_held(self) -> int:
        """Physical blocks, in all groups."""
        return len(self) * len(self.groups) - sum(self.first)

    def extend(self, groups: Sequence[Sequence[int]]) -> None:
        """Append blocks: as many for each group."""
        if not self.groups:
            self.groups = [[] for _ in groups]
            self.first = [0] * len(groups)
        for held, blocks in zip(self.groups, groups, strict=True):
            held.extend(blocks)
        self._ids = None

    def replace(self, group: int, index: int, block: int) -> None:
        """Replace the block at `index` by `block`: copy-on-write."""
        self.groups[group][index] = block
        self._ids = None

    def truncate(self, count: int) -> list[int]:
        """Keep the first `count` logical blocks; returns the others, which the caller releases."""
        if count >= len(self):
            return []
        rows = zip(*(blocks[count:] for blocks in self.groups), strict=True)
        dropped = [block for row in rows for block in row]
        for blocks in self.groups:
            del blocks[count:]
        self._ids = None
        return dropped

    def drop_front(self, group: int, end: int) -> list[int]:
        """Replace the blocks before `end` by the null block; returns the replaced ones."""
        first = self.first[group]
        if end <= first:
            return []
        blocks = self.groups[group]
        dropped = blocks[first:end]
        blocks[first:end] = [0] * (end - first)
        self.first[group] = end
        self._ids = None
        return dropped

    def fork(self) -> "BlockTable":
        """A table of the same blocks. The caller adds the references."""
        child = BlockTable()
        child.groups = [blocks.copy() for blocks in self.groups]
        child.first = self.first.copy()
        child.num_published = self.num_published
        child._ids = self.ids
        return child

    def held(self) -> list[int]:
        """All physical blocks but the null block: the groups of the first block, of the next..."""
        if len(self.groups) == 1 and not self.first[0]:
            return self.groups[0]
        return [block for row in zip(*self.groups, strict=True) for block in row if block]

    def clear(self) -> list[int]:
        """Empty the table; returns the held blocks, which the caller releases."""
        held, self.groups, self.first = self.held(), [], []
        self._ids = ()
        self.num_published = 0
        return held
