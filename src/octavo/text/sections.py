"""A grammar that holds parts of a text: free text in which a token begins a section.

While the text is free, a token costs the look whether it begins a section; there is no matcher, and
no mask but where the text may not end yet. What the sections of an answer are is the caller's part.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from octavo.text.matcher import Mask, Matcher, Words


class SectionMatcher:
    """The state of one such text; see `Matcher`, whose methods it has.

    triggers: ids that begin a section. start: a matcher of what follows. repeats: whether free text
    follows a section, else nothing. outside: the mask of free text, None for any token.
    """

    __slots__ = ("_ended", "_outside", "_repeats", "_section", "_start", "_triggers")

    def __init__(
        self,
        triggers: Collection[int],
        start: Callable[[], Matcher],
        repeats: bool = True,
        outside: Mask | None = None,
    ) -> None:
        self._triggers = frozenset(triggers)
        self._start, self._repeats, self._outside = start, repeats, outside
        self._section: Matcher | None = None
        self._ended = False

    def mask(self) -> Mask | None:
        """Of the next token, None for any."""
        return self._outside if self._section is None else self._section.mask()

    @property
    def steady(self) -> bool:
        """Whether the text is free, so that `mask` stays the same up to a trigger."""
        return self._section is None

    def forced(self) -> Sequence[int]:
        """The tokens that must follow."""
        return () if self._section is None else self._section.forced()

    def advance(self, token_id: int) -> None:
        """The text gains a token. Raises EngineError for one that its section does not allow."""
        if self._section is not None:
            self._section.advance(token_id)
        elif token_id in self._triggers:
            self._section = self._start()
        else:
            return
        if self._section.complete:
            self._section = None
            self._ended = not self._repeats

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the last section has ended."""
        return self._ended

    def copy(self) -> "SectionMatcher":
        """The same state, for another choice of the request."""
        made = SectionMatcher(self._triggers, self._start, self._repeats, self._outside)
        made._section = self._section and self._section.copy()
        made._ended = self._ended
        return made


def all_but(token_ids: Collection[int], vocab_size: int) -> Mask:
    """Of every token except `token_ids`."""

    def fill() -> Words:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[:vocab_size] = 1
        bits[[i for i in token_ids if i < vocab_size]] = 0
        words: Any = np.packbits(bits, bitorder="little").view(np.int32)
        return words  # type: ignore[no-any-return]

    return Mask(fill)
