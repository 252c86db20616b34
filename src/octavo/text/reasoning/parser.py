"""The parser of reasoning, which hands what follows to another parser.

Reasoning begins with the answer's first word or not at all. Line breaks next to its markers are
part of neither side, and an end that is repeated is none. Without an end, all is reasoning.
"""

from collections.abc import Callable, Sequence

from octavo.text.answer import Event, Parser, Reasoning, joined
from octavo.text.markers import Markers

_SPACE = " \t\r\n"


class ReasoningParser:
    """A `Parser` of one answer.

    begins, ends: the markers, `blank` the characters next to them that are theirs. inside: whether
    the answer begins with reasoning. call: what else ends reasoning, and is part of the rest.
    """

    def __init__(
        self,
        begins: Sequence[str],
        ends: Sequence[str],
        markers: Markers,
        blank: str,
        inside: bool,
        call: str,
        rest: Parser,
    ) -> None:
        self._begins, self._ends = begins, ends
        self._markers, self._blank, self._inside = markers, blank, inside
        self._call, self._rest = call, rest
        self._held = ""
        self._step: Callable[[], list[Event] | None] = self._start
        # A token that ends reasoning is nothing else, wherever it is.
        self._stray = [end for end in ends if len(end) == 1]

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (more := self._step()) is not None:
            events += more
        return joined(events)

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        thinking = self._step == self._think
        if self._inside and self._step == self._start:
            thinking, held = True, held.lstrip(self._blank)
        events: list[Event] = []
        if thinking and held.strip(self._blank):
            events.append(Reasoning(self._markers.spelled(held)))
        elif held and not thinking:
            events += self._rest.feed(held)
        return joined([*events, *self._rest.finish()])

    # Each step returns its events, or None where more text is needed.

    def _start(self) -> list[Event] | None:
        text = self._held.lstrip(_SPACE)
        begin = next((word for word in self._begins if text.startswith(word)), None)
        if begin is None and any(word.startswith(text) for word in self._begins):
            return None
        if begin is not None:
            self._held = text[len(begin) :]
        self._step = self._content if begin is None and not self._inside else self._enter
        return []

    def _enter(self) -> list[Event] | None:
        """The beginning of the reasoning's text."""
        self._held = self._held.lstrip(self._blank)
        if not self._held:
            return None
        self._step = self._think
        return []

    def _think(self) -> list[Event] | None:
        words = [*self._ends, self._call] if self._call else self._ends
        places = [(at, word) for word in words if (at := self._held.find(word)) >= 0]
        if not places:
            text = self._held[: len(self._held) - self._partial(words)].rstrip(self._blank)
            self._held = self._held[len(text) :]
            return self._reasoning(text) or None
        at, word = min(places)
        text, self._held = self._held[:at].rstrip(self._blank), self._held[at:]
        self._step = self._content if word == self._call else self._end
        return self._reasoning(text)

    def _end(self) -> list[Event] | None:
        """After the reasoning: an end may be repeated."""
        self._held = self._held.lstrip(self._blank)
        for word in self._ends:
            if self._held.startswith(word):
                self._held = self._held[len(word) :]
                return []
            if word.startswith(self._held):
                return None
        self._step = self._content
        return []

    def _content(self) -> list[Event] | None:
        text, self._held = self._held, ""
        for word in self._stray:
            text = text.replace(word, "")
        return self._rest.feed(text) if text else None

    def _partial(self, words: Sequence[str]) -> int:
        """How many of the last characters may be the beginning of one of `words`."""
        longest = min(max(map(len, words)) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if any(word.startswith(self._held[-length:]) for word in words):
                return length
        return 0

    def _reasoning(self, text: str) -> list[Event]:
        return [Reasoning(self._markers.spelled(text))] if text else []
