"""The logical blocks of one sequence, in order, as physical block ids."""


class BlockTable:
    """Block i holds tokens i * block_size up to (i + 1) * block_size of the sequence.

    The table owns one reference to each of its blocks; the KV manager takes and returns them.
    num_published: how many blocks, from the front, need no more publishing.
    """

    __slots__ = ("_ids", "blocks", "num_published")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_published = 0
        self._ids: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def ids(self) -> tuple[int, ...]:
        """The block ids; the same tuple object until the table changes."""
        if self._ids is None:
            self._ids = tuple(self.blocks)
        return self._ids

    def append(self, block: int) -> None:
        self.blocks.append(block)
        self._ids = None

    def extend(self, blocks: list[int]) -> None:
        self.blocks.extend(blocks)
        self._ids = None

    def replace(self, index: int, block: int) -> None:
        """Put `block` at `index` instead of what is there: copy-on-write."""
        self.blocks[index] = block
        self._ids = None

    def truncate(self, count: int) -> list[int]:
        """Keep the first `count` blocks; returns the others, which the caller gives back."""
        dropped = self.blocks[count:]
        if dropped:
            del self.blocks[count:]
            self._ids = None
        return dropped

    def fork(self) -> "BlockTable":
        """A table of the same blocks. The caller takes the references."""
        child = BlockTable()
        child.blocks = self.blocks.copy()
        child.num_published = self.num_published
        child._ids = self.ids
        return child

    def clear(self) -> list[int]:
        """Empty the table; returns the blocks it had, which the caller gives back."""
        blocks, self.blocks = self.blocks, []
        self._ids = ()
        self.num_published = 0
        return blocks
