"""Grammars of tool calls against a byte tokenizer: which texts one takes."""

from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tests.text.tools.transcripts import NoTokens

from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Tool, ToolFormat

_EOS = 256


class _Bytes:
    """A tokenizer of single bytes, with some words as added tokens."""

    def __init__(self, words: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
        self.tokens += [word.encode() for word in words]
        self.special_token_ids = list(range(_EOS, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = _EOS, None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Calls:
    """The grammar of sections of one format. added: whether its markers are added tokens. text:
    of any answer, of a format that opens sections with nothing."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Tool], most: int = 1, added: bool = False,
        text: bool = False,
    ) -> None:  # fmt: skip
        words = tool_format.markers if added else ()
        tokenizer = NoTokens(words)
        tokenizer._ids = {word: _EOS + 1 + i for i, word in enumerate(words)}
        tokenizer.added_tokens = dict.fromkeys(tokenizer._ids.values())  # type: ignore[arg-type]
        self._words = {number: word for word, number in tokenizer._ids.items()}
        self.markers = Markers(tokenizer, tool_format.markers)  # type: ignore[arg-type]
        rules = LarkRules(self.markers)
        section = tool_format.section(rules, tools, most)
        start = f"{rules.literal(tool_format.begin)} {section}" if tool_format.begin else section
        if text:
            start = tool_format.in_text(rules, tools, most)
        self.grammar = LLMatcher.grammar_from_lark(rules.text(start))
        self._matcher = LLMatcher(_table(words), self.grammar, log_level=0)
        assert not self._matcher.is_error(), (self._matcher.get_error(), rules.text(start))

    def start(self) -> LLMatcher:
        """The state before the first token."""
        return self._matcher.deep_copy()

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, markers spelled."""
        parts = self.markers.parts(text)
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]

    def spelled(self, ids: Sequence[int]) -> str:
        pieces = (self._words[i].encode() if i in self._words else bytes([i]) for i in ids)
        return b"".join(pieces).decode()

    def take(self, text: str) -> str:
        """What of a text, markers spelled, is refused: "" if it is taken, and may end there."""
        matcher, at = self._matcher.deep_copy(), 0
        for part in self.markers.parts(text):
            ids = [part] if isinstance(part, int) else list(part.encode())
            taken = matcher.try_consume_tokens(ids)
            if taken < len(ids):
                return (
                    text[at:]
                    if isinstance(part, int)
                    else part.encode()[taken:].decode(errors="replace") or "?"
                )
            at += len(part if isinstance(part, str) else self._words[part])
        return "" if matcher.is_accepting() else "<end>"


@lru_cache
def _table(words: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(words)))
