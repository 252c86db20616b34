"""What a format of reasoning has to say: its markers.

From them come the parser, the part of a grammar that lets a model think, and the state in which
an answer begins. A new format is a file of its own and a line in `octavo.text.reasoning.registry`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from octavo.constraints import Thinking
from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.reasoning.parser import ReasoningParser
from octavo.text.tokenizer import Tokenizer

# Some tokenizers do not call them special.
_TURN = re.compile(r"<[|｜].*[|｜]>")
_NEAR = 20_000  # characters


class ReasoningFormat(ABC):
    """How a family of models marks reasoning.

    name, aliases: of `--reasoning-parser`, vLLM's. begins, ends: what may begin and end reasoning;
    where some are added tokens of the tokenizer, only those do. markers: the words that a tokenizer
    may have as added tokens; by default `begins` and `ends`. blank: characters next to a marker
    that belong to it. recurs: whether reasoning may begin anywhere; else with the first word or not
    at all. content: what a model writes before a text for the user.
    """

    name: str
    aliases: tuple[str, ...] = ()
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    blank: str = "\n"
    recurs: bool = False
    content: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a model with this chat template marks reasoning so."""

    def starts_in_reasoning(self, prompt: str, tokenizer: Tokenizer) -> bool:
        """Whether an answer to this rendered prompt begins with reasoning: by the last marker
        after the last special token, which begins the turn."""
        turn = self._last_turn(prompt, tokenizer)
        begin = max(turn.rfind(word) for word in self.begins)
        end = max(turn.rfind(word) for word in self.ends)
        return begin > end

    def parser(self, rest: Parser, markers: Markers, inside: bool, calls: str = "") -> Parser:
        """A parser of an answer. rest: of what follows the reasoning. inside: whether the answer
        begins with reasoning. calls: what begins tool calls, which ends reasoning if it is an added
        token."""
        ends = [markers.in_text(word) for word in _known(self.ends, markers)]
        begins = [markers.in_text(word) for word in _known(self.begins, markers)]
        call = calls if markers.in_text(calls) != calls else ""
        return ReasoningParser(begins, ends, markers, self.blank, inside, markers.in_text(call),
                               rest)  # fmt: skip

    def grammar(self, rules: LarkRules, markers: Markers, inside: bool) -> str:
        """An expression of the reasoning before an answer, to its end; optional unless the answer
        begins `inside`."""
        ends = [rules.until(word) for word in _known(self.ends, markers)]
        thought = rules.rule(f"({' | '.join(ends)}) {self.after()}")
        if inside:
            return thought
        begins = " | ".join(rules.literal(word) for word in _known(self.begins, markers))
        return f'("\\n"? ({begins}) {thought})?'

    def after(self) -> str:
        """An expression of what may stand between the end of reasoning and the answer."""
        return r'("\n" | "\n\n")?'

    def end_ids(self, markers: Markers) -> tuple[int, ...]:
        """Tokens of which each ends reasoning; none where characters end it."""
        ends = [markers.parts(word) for word in _known(self.ends, markers)]
        return tuple(i for end in ends if len(end) == 1 and isinstance(i := end[0], int))

    def thinking(self, tokenizer: Tokenizer, inside: bool) -> Thinking:
        """The markers as tokens."""
        markers = Markers(tokenizer, self.markers)
        begin, end = _known(self.begins, markers)[0], _known(self.ends, markers)[0]
        return Thinking(_ids(begin, markers, tokenizer), _ids(end, markers, tokenizer), inside)

    def _last_turn(self, prompt: str, tokenizer: Tokenizer) -> str:
        """What follows the last token that marks turns; users cannot write one."""
        words, lengths, ends = _turn_words(tokenizer)
        own = "".join(self.markers)
        text = prompt[-_NEAR:]
        for at in range(len(text) - 1, -1, -1):
            if text[at] not in ends:
                continue
            found = (text[max(0, at + 1 - length) : at + 1] for length in lengths)
            if any(word in words and word not in own for word in found):
                return text[at + 1 :]
        return prompt  # a long text that is continued


@lru_cache(8)
def _turn_words(tokenizer: Tokenizer) -> tuple[frozenset[str], list[int], frozenset[str]]:
    """The tokens that mark turns, as texts; their lengths, and the characters that end them."""
    words = frozenset(
        token.content
        for token in tokenizer.added_tokens.values()
        if token.content and (token.special or _TURN.fullmatch(token.content))
    )
    return words, sorted({len(word) for word in words}), frozenset(word[-1] for word in words)


def _known(words: Sequence[str], markers: Markers) -> Sequence[str]:
    """Those of `words` that begin with an added token, if any does; else all."""
    found = [word for word in words if isinstance(markers.parts(word)[0], int)]
    return found or words


def _ids(word: str, markers: Markers, tokenizer: Tokenizer) -> tuple[int, ...]:
    parts = [[p] if isinstance(p, int) else tokenizer.encode_inside(p) for p in markers.parts(word)]
    return tuple(i for part in parts for i in part)
