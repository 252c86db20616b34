"""How tensor parallelism divides the parameters of a model among its ranks.

An architecture says per parameter how it is cut (`Cut`), as data. From that follow the sizes that
divide a model, the shapes on one rank, and the regions of stored tensors that it reads. Nothing
here reads, computes or communicates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.attention.base import AttentionSpec
from octavo.dist.base import Group
from octavo.errors import ConfigError
from octavo.quant.base import Region

# column: the outputs (rows of [N, K], values of a bias) are divided; row: the inputs (columns),
# and the products of all ranks are added up; vocabulary: as column, in equal shares of which the
# last may be padding; replicated: every rank has all of it; first: rank 0 alone has it, since it
# is added once (the bias of a row-cut product).
CutKind = Literal["replicated", "column", "row", "vocabulary", "first"]
# Shares of the vocabulary are multiples of this, so that packed formats and tiles are not cut.
_VOCABULARY_UNIT = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Group) -> "Shard":
        return cls(group.rank, group.size)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows or columns that ranks divide evenly.

    length: how many; count: of the equal units that they form and that stay whole (heads); field:
    the config's name of that number. shared: ranks beyond the number of units hold copies: rank r
    of n has unit r * count // n.
    """

    length: int
    count: int
    field: str
    shared: bool = False

    def allows(self, size: int) -> bool:
        return self.count % size == 0 or (self.shared and size % self.count == 0)

    def part(self, shard: Shard) -> tuple[int, int]:
        """The rows or columns of a rank, counted from the first of the span."""
        each = max(1, self.count // shard.size)
        begin, unit = shard.rank * self.count // shard.size, self.length // self.count
        return begin * unit, (begin + each) * unit

    def refusal(self, size: int) -> str:
        said = f"tensor_parallel_size={size}"
        if self.shared:
            return f"{said} neither divides {self.field}={self.count} nor is a multiple of it"
        return f"{said} does not divide {self.field}={self.count}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is divided. spans: what its rows (row: its columns) consist of, in order;
    vocabulary: one span of the rows that are used."""

    kind: CutKind = "replicated"
    spans: tuple[Span, ...] = ()

    def parts(self, shard: Shard) -> list[tuple[int, int]]:
        """The rows or columns of a rank."""
        if self.kind == "vocabulary":
            rows, each = self.spans[0].length, self.share(shard.size)
            return [(min(shard.rank * each, rows), min((shard.rank + 1) * each, rows))]
        found, at = [], 0
        for span in self.spans:
            begin, end = span.part(shard)
            found.append((at + begin, at + end))
            at += span.length
        return found

    def share(self, size: int) -> int:
        """The rows of a vocabulary on each of so many ranks, padding included."""
        return -(-self.spans[0].length // (size * _VOCABULARY_UNIT)) * _VOCABULARY_UNIT

    def regions(self, shape: tuple[int, ...], shard: Shard) -> list[Region]:
        """What a rank has of a parameter of `shape`, in pieces to be stacked."""
        whole = tuple((0, size) for size in shape)
        if shard.size == 1 or self.kind == "replicated":
            return [whole]
        if self.kind == "first":
            return [whole] if shard.rank == 0 else []
        at = len(shape) - (1 if self.kind == "row" else min(2, len(shape)))
        parts = self.parts(shard)
        assert len(parts) == 1 or at == 0, "a stack of joined matrices"
        return [(*whole[:at], part, *whole[at + 1 :]) for part in parts]


REPLICATED, FIRST = Cut(), Cut("first")


def column(*spans: Span) -> Cut:
    return Cut("column", spans)


def row(span: Span) -> Cut:
    return Cut("row", (span,))


def vocabulary(ids: int, rows: int) -> Cut:
    """ids: that exist; rows: of the weight, which may be more, and which are not read."""
    used = min(rows, -(-ids // _VOCABULARY_UNIT) * _VOCABULARY_UNIT)
    return Cut("vocabulary", (Span(used, 1, "vocab_size", shared=True),))


def local_shape(shape: tuple[int, ...], cut: Cut, shard: Shard) -> tuple[int, ...]:
    """The shape that a rank has of a parameter."""
    sizes = [tuple(end - begin for begin, end in r) for r in cut.regions(shape, shard)]
    if not sizes:
        return (0, *shape[1:])
    return (sum(size[0] for size in sizes), *sizes[0][1:])


def local_attention(specs: Sequence[AttentionSpec], size: int) -> list[AttentionSpec]:
    """The attention of each layer on one rank; ranks beyond the KV heads hold copies of them."""
    if size == 1:
        return list(specs)
    return [
        replace(s, num_heads=s.num_heads // size, num_kv_heads=max(1, s.num_kv_heads // size))
        for s in specs
    ]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something that a size must fulfil. refusal: the message for one that does not."""

    allows: Callable[[int], bool]
    refusal: Callable[[int], str]


def even(cuts: Mapping[str, Cut]) -> list[Requirement]:
    """Heads and the like are divided evenly."""
    spans = dict.fromkeys(
        span for cut in cuts.values() if cut.kind in ("column", "row") for span in cut.spans
    )
    return [Requirement(span.allows, span.refusal) for span in spans]


def most_ranks(cuts: Mapping[str, Cut]) -> int:
    """A bound of the sizes that divide these parameters."""
    spans = [span for cut in cuts.values() if cut.kind != "vocabulary" for span in cut.spans]
    return min((span.count for span in spans if not span.shared), default=1)


def aligned(name: str, cut: Cut, multiple: int, what: str) -> Requirement:
    """A parameter is cut at multiples of so many rows (row: columns) only.

    what: the format whose groups would be torn.
    """
    length, side = (
        sum(span.length for span in cut.spans),
        "inputs" if cut.kind == "row" else "outputs",
    )

    def allows(size: int) -> bool:
        if not all(span.allows(size) for span in cut.spans):
            return True  # which is an error of its own
        parts = [part for rank in range(size) for part in cut.parts(Shard(rank, size))]
        borders = [border for part in parts for border in part]
        return all(border % multiple == 0 or border == length for border in borders)

    def refusal(size: int) -> str:
        return (
            f"tensor_parallel_size={size} cuts the {length} {side} of {name} inside a group of "
            f"{multiple} ({what})"
        )

    return Requirement(allows, refusal)


def check_size(size: int, model: str, requirements: Iterable[Requirement], most: int) -> None:
    """Raise ConfigError for a size that does not divide `model`, naming those that do.

    most: the largest size that any model of these sizes could have.
    """
    wanted = list(requirements)
    failed = next((one for one in wanted if not one.allows(size)), None)
    if failed is None:
        return
    possible = [
        str(other) for other in range(1, most + 1) if all(one.allows(other) for one in wanted)
    ]
    raise ConfigError(f"{failed.refusal(size)} of {model}; possible: {', '.join(possible)}")
