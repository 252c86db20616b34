"""A limit to how long a text reasons: after so many tokens, the marker of its end is forced.

Composes with whatever else holds the text to a form, which sees the forced tokens like any others.
Where a model's markers come from is the caller's part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from octavo.text.matcher import Mask, Words

TokenBytes = Callable[[int], bytes]


class _Mask(Protocol):
    def words(self) -> Any: ...


class _Form(Protocol):
    """What a text is held to, such as a `Matcher`."""

    @property
    def complete(self) -> bool: ...

    @property
    def steady(self) -> bool: ...

    def mask(self) -> _Mask | None: ...

    def forced(self) -> Sequence[int]: ...

    def advance(self, token_id: int) -> None: ...

    def copy(self) -> "_Form": ...


class Marker:
    """One marker. token_ids: as it is forced; empty: there is none. token_bytes: of the
    tokenizer's tokens, needed for more than one id: then the marker is found however the model has
    split its characters."""

    def __init__(self, token_ids: Sequence[int], token_bytes: TokenBytes | None = None) -> None:
        self.token_ids = tuple(token_ids)
        self._token_bytes = token_bytes if len(self.token_ids) > 1 else None
        self._text = b"".join(map(self._token_bytes, self.token_ids)) if self._token_bytes else b""

    def read(self, before: bytes, token_id: int) -> tuple[bool, bytes]:
        """Whether the marker ends in this token, and what of the text may belong to one that ends
        later. before: the same of the token before; empty at first."""
        if self._token_bytes is None:
            return self.token_ids == (token_id,), b""
        text = before + self._token_bytes(token_id)
        return self._text in text, text[max(0, len(text) - len(self._text) + 1) :]

    def begun(self, token_ids: Sequence[int]) -> int:
        """How many tokens of the marker, but not all, are at the end of `token_ids`."""
        for count in range(min(len(self.token_ids) - 1, len(token_ids)), 0, -1):
            if tuple(token_ids[-count:]) == self.token_ids[:count]:
                return count
        return 0


class BudgetedThinking:
    """The state of one text; see `Matcher`, whose methods it has.

    budget: reasoning tokens, of all that is between markers. inside: whether the text begins in
    reasoning. form: what holds it otherwise; where that does not allow the end of the reasoning,
    the next token at which it does is awaited.
    """

    __slots__ = ("_begin", "_begun", "_budget", "_count", "_end", "_form", "_inside", "_last",
                 "_mask", "_tail", "_vocab_size")  # fmt: skip

    def __init__(
        self, budget: int, begin: Marker, end: Marker, inside: bool, form: _Form | None,
        vocab_size: int,
    ) -> None:  # fmt: skip
        self._budget, self._vocab_size = budget, vocab_size
        self._begin, self._end, self._inside, self._form = begin, end, inside, form
        self._count = 0  # reasoning tokens, with those of an end marker that has begun
        self._begun = 0  # tokens of an end marker that has begun
        self._last: tuple[int, ...] = ()  # the last tokens, as far as they may be of a marker
        self._tail = b""  # see `Marker.read`
        self._mask: Mask | None = None

    def mask(self) -> _Mask | None:
        """Of the next token, None for any; the same object until the text gains one."""
        within = None if self._form is None else self._form.mask()
        if not self._spent:
            return within
        if self._mask is None:
            token_id = self._end.token_ids[self._begun]
            self._mask = Mask(partial(_only, token_id, within, self._vocab_size))
        return self._mask

    @property
    def steady(self) -> bool:
        """Whether `mask` stays the same until the budget is spent or the form begins."""
        return not self._spent and (self._form is None or self._form.steady)

    def forced(self) -> Sequence[int]:
        """The tokens that must follow."""
        if self._spent and (self._form is None or self._form.mask() is None):
            return (self._end.token_ids[self._begun],)
        return () if self._form is None else self._form.forced()

    def advance(self, token_id: int) -> None:
        """The text gains a token. Raises EngineError for one that the form does not allow."""
        self._mask = None
        if self._form is not None:
            self._form.advance(token_id)
        found, self._tail = (self._end if self._inside else self._begin).read(self._tail, token_id)
        if found:
            self._inside, self._tail, self._last = not self._inside, b"", ()
            self._count, self._begun = self._count - self._begun, 0
        elif self._inside:
            self._count += 1
            if kept := len(self._end.token_ids) - 1:
                self._last = (*self._last, token_id)[-kept:]
                self._begun = self._end.begun(self._last)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self._form is not None and self._form.complete

    def copy(self) -> "BudgetedThinking":
        """The same state, for another choice of the request."""
        form = self._form and self._form.copy()
        made = BudgetedThinking(
            self._budget, self._begin, self._end, self._inside, form, self._vocab_size
        )
        made._count, made._begun = self._count, self._begun
        made._last, made._tail = self._last, self._tail
        return made

    @property
    def _spent(self) -> bool:
        return self._inside and self._count - self._begun >= self._budget


def _only(token_id: int, within: _Mask | None, vocab_size: int) -> Words:
    """One token if `within` has it; else `within`."""
    words: Words = np.zeros(-(-vocab_size // 32), np.int32)
    words.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)
    if within is None:
        return words
    allowed: Words = within.words()
    return words if (words & allowed).any() else allowed
