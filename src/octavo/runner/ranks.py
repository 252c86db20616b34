"""A runner's place among the ranks of an engine, as it is known before they have met."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.dist.base import SINGLE, Group


def _alone(device: str) -> Group:
    return SINGLE


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank: this runner's, of `size`; here: how many share this machine; engine: a name that all
    ranks of one engine have, and no others.

    connect: given the device, as torch knows it, forms the group; waits for the other ranks.
    """

    rank: int = 0
    size: int = 1
    here: int = 1
    engine: str = ""
    connect: Callable[[str], Group] = _alone


ALONE = Ranks()


def all_agree(group: Group, here: bool) -> bool:
    """Whether `here` is true on every rank: what one cannot do, none may begin."""
    return here if group.size == 1 else bool(group.min(int(here)))


def of_first(group: Group, value: int) -> int:
    """The `value` of rank 0; values are below 2**62."""
    return value if group.size == 1 else group.min(value if group.rank == 0 else 2**62)
