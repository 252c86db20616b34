"""The interface of what limits a choice's next token, such as a grammar (`octavo.text.matcher`).

It belongs to a request. Its state is a function of the tokens that the choice has gained, so it
needs nothing for preemption, swap or the prefix cache.
"""

from collections.abc import Sequence
from typing import Protocol

from octavo.core.plan import TokenMask


class Constraint(Protocol):
    """The state of one choice."""

    @property
    def complete(self) -> bool:
        """Whether no token can follow: the choice ends here."""
        ...

    def mask(self) -> TokenMask | None:
        """Of the next token, None for any; the same object until the choice gains a token."""
        ...

    @property
    def steady(self) -> bool:
        """Whether `mask` most likely stays the same object when the choice gains a token, so that
        later tokens may be drawn with it. Those that follow one which changes it do not count."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must follow now, one after the other: at each, the mask would have no other.
        Need not be all of them."""
        ...

    def advance(self, token_id: int) -> None:
        """The choice gains a token; one that ends it changes nothing. Raises EngineError for one
        that may not follow."""
        ...

    def copy(self) -> "Constraint":
        """The same state, for another choice of the request."""
        ...
