"""Text to token ids and back, whatever file the tokenizer came from.

The `tokenizers` library encodes. Decoding is done here, from the exact bytes of each token, so
that whole and incremental decoding cannot disagree: the text of some ids is their bytes joined,
read as UTF-8 with U+FFFD for each broken part, less the one space that SentencePiece models put
in front. Nothing ever "cleans up" spaces.

Not here: the chat template (`chat.py`), streaming (`detokenizer.py`).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.errors import RequestError, RequestTypeError
from octavo.text.control import ControlTokens
from octavo.text.decoding import TokenBytes, byte_rule
from octavo.text.loading import Parts, read_parts

# Characters that no tokenizer joins to what follows; tried in turn as a left neighbour.
_NEUTRAL = ("\x00", "\n")


class _Table(dict[int, Any]):
    """Values made on first use: a subscript costs what a dict's costs."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Any:
        if not 0 <= token_id < 1 << 32:
            raise RequestError(f"token id {token_id} is not in the vocabulary", "token_ids")
        value = self[token_id] = self._make(token_id)
        return value


class Tokenizer:
    """Encodes and decodes; immutable for its users, and safe to share between threads.

    vocab_size: one more than the largest id (a model's table may be longer still).
    bos_id, eos_ids: what the tokenizer's own files say; a model's configs may add more ends.
    special_ids: ids that `skip_special_tokens` leaves out.
    named: "bos_token", "eos_token", ... -> text, as chat templates expect them.
    chat_templates: name -> jinja source; the usual one is called "default".
    adds_bos: whether `encode` puts BOS in front by default.
    strips_space: whether decoding drops one leading space.
    """

    def __init__(self, parts: Parts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.RLock()
        self.named = dict(parts.named)
        self.chat_templates = dict(parts.chat_templates)
        self.added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, t in self.added_tokens.items() if t.special)
        largest = max(self.added_tokens, default=-1)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), largest + 1)
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *parts.eos_ids]))
        self._around = self._forced(parts.add_bos, parts.add_eos, eos_id)
        self._rule = byte_rule(backend)
        self.strips_space = self._rule.strips_space
        self._bytes: dict[int, bytes] = _Table(TokenBytes(backend, self.added_tokens, self._rule))
        self._shown = _Table(self._piece)
        self._plain = _Table(lambda i: "" if i in self.special_ids else self._shown[i])
        self.adds_bos = self.bos_id is not None and self.encode("")[:1] == [self.bos_id]

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def control(self) -> ControlTokens:
        """The special tokens as texts."""
        return ControlTokens({i: self.added_tokens[i] for i in self.special_ids})

    def _named_id(self, name: str) -> int | None:
        text = self.named.get(name)
        return None if text is None else self.token_id(text)

    def _forced(
        self, add_bos: bool | None, add_eos: bool | None, eos_id: int | None
    ) -> tuple[list[int], list[int]] | None:
        """Ids put before and after a text; None leaves that to the backend's own rule."""
        if add_bos is None and add_eos is None:
            return None
        before = [self.bos_id] if add_bos and self.bos_id is not None else []
        after = [eos_id] if add_eos and eos_id is not None else []
        return before, after

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled `text`, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled in it are recognized.

        `add_special_tokens` adds what this tokenizer adds by default (BOS, rarely EOS); a text
        that starts with BOS already gets no second one. Raises RequestError for lone surrogates.
        """
        with self._lock:
            ids = self._ids(text, add_special_tokens and self._around is None)
        if not add_special_tokens:
            return ids
        if self._around is not None:
            ids = [*self._around[0], *ids, *self._around[1]]
        bos = self.named.get("bos_token")
        if bos and ids[:2] == [self.bos_id, self.bos_id] and text.startswith(bos):
            del ids[0]
        return ids

    def encode_ordinary(self, text: str, at_start: bool = True) -> list[int]:
        """Ids of `text` read as mere text: no special token is recognized in it.

        `at_start` is whether it opens the sequence; some tokenizers put a space there alone.
        """
        with self._ordinary():
            inside = self._rule.prefixes == "first" and not at_start
            return self._inside(text) if inside else self._ids(text, False)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of `text` as mere text that directly follows other text."""
        with self._ordinary():
            return self._inside(text) if self._rule.prefixes else self._ids(text, False)

    @contextmanager
    def _ordinary(self) -> Iterator[None]:
        with self._lock:
            self._backend.encode_special_tokens = True
            try:
                yield
            finally:
                self._backend.encode_special_tokens = False

    def _inside(self, text: str) -> list[int]:
        """Encoded after a neutral neighbour, whose ids are then dropped."""
        for neighbour in _NEUTRAL:
            known, ids = self._ids(neighbour, False), self._ids(neighbour + text, False)
            if known and ids[: len(known)] == known:
                return ids[len(known) :]
        return self._ids(text, False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestTypeError(f"a prompt must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}; send valid Unicode"
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids the vocabulary has no token for add nothing."""
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        data = b"".join(map(self._bytes.__getitem__, ids))
        if self.strips_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds to a text; a special token's are its spelling."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token for display: its bytes as text, U+FFFD where they are part of a character."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, str | bytes]:
        """id -> what it adds to a text: str, or bytes when they are not whole characters."""
        return self._plain if skip_special_tokens else self._shown

    def _piece(self, token_id: int) -> str | bytes:
        data = self._bytes[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


def load_tokenizer(path: str | Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of the folder, `tokenizer.json`, `tokenizer.model` or `.gguf` at `path`.

    `metadata` is a GGUF's, where the caller has read it already.
    Raises ModelNotFoundError when there is nothing there, CheckpointError when what is there
    is damaged, incomplete or of a kind that is not known.
    """
    return Tokenizer(read_parts(path, metadata))


def bad_words_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The id sequences that spell each word, as a text's start and after a space.

    Raises RequestError for a word that is empty or that the tokenizer cannot spell.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        spelled = word.lstrip(" ") if isinstance(word, str) else ""
        if not spelled:
            raise RequestError(f"bad_words must hold words, not {word!r}", "bad_words")
        bare = tuple(tokenizer.encode_inside(spelled))
        spaced = tuple(tokenizer.encode_inside(" " + spelled))
        for ids in (bare, spaced):
            if not ids or spelled not in tokenizer.decode(ids, skip_special_tokens=False):
                raise RequestError(
                    f"bad_words: {word!r} cannot be written with this model's tokens", "bad_words"
                )
            sequences[ids] = None
    return tuple(sequences)
