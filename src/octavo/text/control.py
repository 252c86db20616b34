"""The spellings of special tokens, and how a text is kept from making one."""

import re
from collections.abc import Callable, Iterable, Mapping

from tokenizers import AddedToken


class ControlTokens:
    """The spellings of the special tokens, and where a text could make one of them."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self.ids = {token.content: i for i, token in tokens.items() if token.content}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.starts = self._parts(lambda text, n: text[:n])
        self.ends = self._parts(lambda text, n: text[n:])
        self.reach = max(map(len, self.ids), default=0)
        self.strips = {
            text: (bool(tokens[i].lstrip), bool(tokens[i].rstrip)) for text, i in self.ids.items()
        }

    def _parts(self, part: Callable[[str, int], str]) -> set[str]:
        """Proper parts of the spellings. Mere letters are left out: `so` of a token `sop` begins
        nothing by itself, and templates look at such words."""
        found = {part(text, n) for text in self.ids for n in range(1, len(text))}
        return {text for text in found if not text.isalnum()}

    def cuts(self, text: str) -> list[int]:
        """The places in `text` where a mark keeps it from being, or helping to make, a special
        token: inside each one spelled out, inside a beginning of one at the text's end, inside
        an ending of one at the text's start."""
        found = [m.start() + 1 for m in self.pattern.finditer(text) if len(m[0]) > 1]
        size = len(text)
        for n in range(1, min(self.reach, size + 1)):
            if text[size - n :] in self.starts:
                found.append(size - n + 1)
            if text[:n] in self.ends:
                found.append(n - 1)
        return found

    def touches(self, texts: Iterable[str]) -> bool:
        return any(self.cuts(text) for text in texts)

    def marked(self, text: str, mark: str) -> str:
        """`text` with `mark` at every cut. Spellings may overlap: one more pass finds those that
        an earlier one was found over."""
        cuts = self.cuts(text)
        while cuts:
            text = _split_by(text, cuts, mark)
            cuts = [m.start() + 1 for m in self.pattern.finditer(text) if len(m[0]) > 1]
        return text


def _split_by(text: str, cuts: Iterable[int], mark: str) -> str:
    places = sorted(set(cuts))
    return mark.join(map(text.__getitem__, map(slice, [0, *places], [*places, len(text)])))
