"""Which tokens may follow: grammars compiled against a tokenizer, and the state of one text.

Owned by the engine: a `Matcher` belongs to one choice of one request, and is told each token that
the choice gains. What a grammar is and where it comes from is in `octavo.text.grammar`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from octavo.errors import EngineError, OctavoError, RequestError, brief
from octavo.structured_outputs import FIELD, TOO_COMPLEX
from octavo.text.grammar import limits
from octavo.text.tokenizer import Tokenizer

Words = NDArray[np.int32]

# Sets of tokens that the library treats as one where a state allows all of each: short runs of a
# string's characters too, so that a `maxLength` of which little is left does not have each token
# looked at. With the library's own (10, 30, any) a mask within such strings took twice as long.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{most}}}" for most in (1, 2, 4, 6, 8, 10, 15, 20, 30)),
    f"{_CHARACTER}+",
]
_ENCODED, _LONG = 4096, 200  # forced texts that are remembered, and characters of one that is not
_COMPILED = 64  # grammars that are kept; one of a 2 KB schema has some 100 KB


class Mask:
    """The tokens that one choice may gain next; filled once, when it is first needed.

    While the model runs, another thread may fill it; `words` then waits for that.
    """

    __slots__ = ("_fill", "_lock", "_words")

    def __init__(self, fill: Callable[[], Words]) -> None:
        self._fill = fill
        self._lock = threading.Lock()
        self._words: Words | None = None

    def words(self) -> Words:
        """int32 [ceil(V / 32)]: bit i of word w is 1 where token 32 w + i is allowed."""
        with self._lock:
            if self._words is None:
                self._words = self._fill()
            return self._words


class Matcher:
    """The state of one text under a grammar. Not thread-safe, but for filling its last mask.

    num_tokens: of the tokenizer, at most vocab_size. stop_ids: the caller's own ids that end a
    text; they are allowed where the text may end.
    """

    __slots__ = ("_ends", "_mask", "_num_tokens", "_state", "_stop_ids", "_vocab_size")

    def __init__(
        self, state: LLMatcher, num_tokens: int, vocab_size: int, stop_ids: Collection[int]
    ) -> None:
        self._state = state
        self._num_tokens, self._vocab_size = num_tokens, vocab_size
        self._stop_ids = np.array([i for i in stop_ids if i < vocab_size], np.int64)
        self._ends = frozenset(self._stop_ids.tolist())
        self._mask: Mask | None = None

    def mask(self) -> Mask:
        """Of the next token; the same object until the text gains one."""
        if self._mask is None:
            self._mask = Mask(self._fill)
        return self._mask

    @property
    def steady(self) -> bool:
        """False: each token has a mask of its own."""
        return False

    def forced(self) -> Sequence[int]:
        """The tokens that must follow: where characters are forced, the library allows none but
        those of the tokenizer's own split of them."""
        forced: Sequence[int] = self._state.compute_ff_tokens()
        return forced

    def advance(self, token_id: int) -> None:
        """The text gains a token; the caller's own stop ids are none of it. Raises EngineError for
        one that is not allowed."""
        self._mask = None
        if token_id in self._ends:
            return
        if not self._state.consume_token(token_id):
            raise self._failure(f"token {token_id} is not allowed")

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the text is all that the grammar asks for."""
        return bool(self._state.is_stopped())

    def copy(self) -> "Matcher":
        """The same state, for another choice of the request."""
        state, sizes = self._state.deep_copy(), (self._num_tokens, self._vocab_size)
        return Matcher(state, *sizes, self._stop_ids.tolist())

    def _fill(self) -> Words:
        row: Words = np.zeros(-(-self._vocab_size // 32), np.int32)
        fill_next_token_bitmask(self._state, row[None, : -(-self._num_tokens // 32)], 0)
        if self._state.is_error():
            raise self._failure("it gives no reason")
        if len(self._stop_ids):
            self._set_stop_ids(row)
        return row

    def _failure(self, otherwise: str) -> EngineError:
        problem = _why(self._state) or otherwise
        if problem == TOO_COMPLEX:
            return EngineError(problem, FIELD)
        return EngineError(f"the grammar failed: {problem}")

    def _set_stop_ids(self, row: Words) -> None:
        at, bits = self._stop_ids // 32, np.left_shift(1, self._stop_ids % 32).astype(np.uint32)
        unsigned = row.view(np.uint32)
        if self._state.is_accepting():
            np.bitwise_or.at(unsigned, at, bits)
        else:
            np.bitwise_and.at(unsigned, at, ~bits)


class Grammars:
    """Compiles grammars against one tokenizer, which is read when the first one comes.

    tokenizer: loads it. vocab_size: ids of the model's head; eos_ids: those that end its texts.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._load, self.vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._tokenizer: Tokenizer | None = None
        self._reading: Future[Tokenizer] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._table: LLTokenizer | None = None
        self.in_use = False  # whether there was one
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def tokenizer(self) -> "Future[Tokenizer]":
        """The tokenizer, or the RequestError of one that cannot be read, in a thread."""
        if self._reading is None:
            self._reading = self._worker.submit(self._read)
        return self._reading

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """The compiled grammar, or the RequestError for one that is too large, in a thread."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._worker.submit(self._compile, grammar)
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def matcher(self, compiled: LLMatcher, stop_ids: Collection[int] = ()) -> Matcher:
        """A new text under a compiled grammar. stop_ids: see `Matcher`."""
        self.in_use = True
        own = [i for i in stop_ids if i not in self._eos_ids]
        assert self._table is not None, "a grammar was compiled without a table"
        return Matcher(compiled.deep_copy(), self._table.vocab_size, self.vocab_size, own)

    def fill(self, masks: Iterable[Any]) -> None:
        """Begin to fill `masks` in a thread. What goes wrong there is raised by `Mask.words`."""
        if masks:
            self._worker.submit(_fill_all, masks)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def _worker(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
        return self._thread

    def _read(self) -> Tokenizer:
        """The tokenizer; called in the thread, which reads it once."""
        if self._tokenizer is None:
            try:
                self._tokenizer = self._load()
            except OctavoError as error:  # other requests need none
                raise RequestError(f"structured_outputs need the tokenizer: {brief(error)}",
                                   "structured_outputs") from error  # fmt: skip
        return self._tokenizer

    def _compile(self, grammar: str) -> LLMatcher:
        if self._table is None:
            self._table = token_table(self._read(), self.vocab_size, self._eos_ids)
        state = LLMatcher(self._table, grammar, log_level=0, limits=limits())
        if state.is_error():
            why = _why(state)
            cannot = why if why == TOO_COMPLEX else f"{FIELD} cannot be enforced: {why}"
            raise RequestError(cannot, FIELD)
        return state


def _why(state: LLMatcher) -> str:
    """The library's reason, if any; it gives those of its limits in words of its own code."""
    problem = state.get_error() and brief(ValueError(state.get_error()), 200)
    if not problem:
        return ""
    limits = ("limit", "fuel", "max is", "too many")
    return TOO_COMPLEX if any(word in problem.lower() for word in limits) else problem


def _fill_all(masks: Iterable[Mask]) -> None:
    for mask in masks:
        try:
            mask.words()
        except EngineError:
            continue  # raised again where the mask is used


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's table of a tokenizer, from the exact bytes of each token.

    vocab_size: ids of the model's head. Those without a token are left out, and an added
    token is allowed where a grammar names it, not as the characters of its spelling.
    """
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer, vocab_size, eos_ids)),
        eos_token=list(eos_ids) or None,
        slices=_SLICES,
    )


class _Tokens:
    """A tokenizer as `TokenizerWrapper` expects one. Nothing here may raise: that is a panic."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        count = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)]
        self.special_token_ids = sorted(i for i in tokenizer.added_tokens if i < count)
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._encode_again = lru_cache(_ENCODED)(self._encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """Asked wherever a grammar forces characters, which are often the same."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._encode(text) if len(text) > _LONG else self._encode_again(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            found = self._tokenizer.encode_inside(text)
        except RequestError:  # it holds half a surrogate pair
            return ()
        if max(found, default=0) >= len(self.tokens):
            return ()
        # A tokenizer that normalizes, or lacks a character, gives tokens of another text.
        spelled = b"".join([self.tokens[i] for i in found])
        return tuple(found) if spelled == text.encode() else ()
