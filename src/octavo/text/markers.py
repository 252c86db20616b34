"""Markers of tool calls and of reasoning, in a text in which nothing else can be taken for one.

A model writes a marker such as `<tool_call>` as one added token if its tokenizer has it, and else
as ordinary characters. The parsers of `octavo.text.tools` and `octavo.text.reasoning` see an added
token as one lone surrogate: UTF-8 decodes to none, so neither a user's text nor a model that spells
the marker in a string can forge it.
"""

import re
from collections.abc import Iterable, Mapping

from octavo.text.tokenizer import Tokenizer

_FIRST = 0xD800  # of 2048 surrogates


class Markers:
    """Some markers as a tokenizer has them. Immutable.

    token_ids: marker -> id, of those that are added tokens.
    characters: id -> the character that stands for the token in a text to parse.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]) -> None:
        self.token_ids: Mapping[str, int] = {
            marker: token_id
            for marker in dict.fromkeys(markers)
            if (token_id := tokenizer.token_id(marker)) is not None
            and token_id in tokenizer.added_tokens
        }
        self._characters = {
            marker: chr(_FIRST + number) for number, marker in enumerate(self.token_ids)
        }
        self.characters: Mapping[int, str] = {
            self.token_ids[marker]: character for marker, character in self._characters.items()
        }
        self._spellings = {character: marker for marker, character in self._characters.items()}
        self._marker = _any_of(self._characters)
        self._character = _any_of(self._spellings)
        self._special = {
            self.characters[token_id]: ""
            for token_id in self.token_ids.values()
            if token_id in tokenizer.special_ids
        }

    def in_text(self, text: str) -> str:
        """`text`, such as a marker, as a text to parse has it: added tokens as characters."""
        if self._marker is None:
            return text
        return self._marker.sub(lambda found: self._characters[found[0]], text)

    def spelled(self, text: str) -> str:
        """A part of a text to parse as its reader gets it: added tokens as they are spelled."""
        if self._character is None:
            return text
        return self._character.sub(lambda found: self._spellings[found[0]], text)

    def plain(self, text: str, skip_special_tokens: bool) -> str:
        """A part of a text to parse as it would be without markers: added tokens as they are
        spelled, but for special ones where these are skipped."""
        if self._character is None:
            return text
        shown = self._spellings | self._special if skip_special_tokens else self._spellings
        return self._character.sub(lambda found: shown[found[0]], text)

    def parts(self, text: str) -> list[str | int]:
        """`text` cut at the markers that are added tokens, whose ids stand for them."""
        if self._marker is None:
            return [text] if text else []
        pieces = re.split(f"({self._marker.pattern})", text)
        return [self.token_ids.get(piece, piece) for piece in pieces if piece]


def _any_of(texts: Iterable[str]) -> "re.Pattern[str] | None":
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
