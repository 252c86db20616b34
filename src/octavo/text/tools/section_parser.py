"""Parsers of answers in which sections with tool calls stand between content.

Here is what all formats share: finding where a section begins, holding back what may be a marker or
a call, what is content and what only envelope. What a section has inside is the subclass's part.

- A call is announced when its name is complete and is one of the tools; from there on it stays one.
  What comes before in its section is envelope, and dropped, and so is what its arguments stand in.
- What is no call is content as it was written, the section's opening marker included. Reading goes
  on where it failed.
- White space alone, before the first call, between calls and after the last, is envelope. Content
  before a call loses the one character that the format puts between the two (`lead`); all else of
  it stays.
- At the end, what is undecided is content, unless it is nothing but the section's opening or
  closing marker, or a beginning of one that was due.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Event, joined
from octavo.text.markers import Markers
from octavo.text.tools.base import Tool
from octavo.text.tools.json_scanner import JsonScanner

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A part of the parser's work: it yields where it needs more text."""

SPACE = " \t\r\n"


class NoCallError(Exception):
    """What was read is no part of a call."""


class _CutOffError(Exception):
    """The text has ended where more was needed."""


class SectionParser(ABC):
    """A `Parser` of one answer.

    begins: what opens a section, markers spelled. lead: one character that the format puts between
    content and a section, or none. new_id: of a call, by its index and name.
    """

    def __init__(
        self,
        begins: Sequence[str],
        lead: str,
        tools: Mapping[str, Tool],
        markers: Markers,
        new_id: Callable[[int, str], str],
    ) -> None:
        self.tools = tools
        self._markers, self._new_id = markers, new_id
        self._begins = sorted(map(markers.in_text, filter(None, begins)), key=len, reverse=True)
        self._begin = re.compile("|".join(map(re.escape, self._begins)))
        self._content = _ContentBuffer(lead)
        self._text = ""  # what is still needed of the text
        self._start = self._at = 0  # of what is undecided; of what is not read
        self._closed = False
        self._only_envelope = False  # all that is undecided
        self._open_call: int | None = None
        self._ids: list[str] = []  # of calls
        self._events: list[Event] = []
        self._steps = self._answer()

    @abstractmethod
    def section(self, begin: str) -> Steps[None]:
        """Reads a section, from after `begin`. Raises NoCallError where the text is none."""

    def feed(self, text: str) -> list[Event]:
        self._text = self._text[self._start :] + text
        self._at -= self._start
        self._start = 0
        next(self._steps, None)
        return self._take_events()

    def finish(self) -> list[Event]:
        self._closed = True
        next(self._steps, None)
        self._add_content(self._content.finish())
        return self._take_events()

    # For subclasses: reading.

    def more(self) -> Steps[None]:
        """Waits for more text."""
        if self._closed:
            raise _CutOffError
        yield

    def peek(self) -> Steps[str]:
        """The next character, which is not read by this."""
        while self._at == len(self._text):
            yield from self.more()
        return self._text[self._at]

    def skip(self, characters: str = SPACE) -> Steps[int]:
        """Reads any number of `characters`. Returns how many there were."""
        count = 0
        while (yield from self.peek()) in characters:
            self._at += 1
            count += 1
        return count

    def unread(self, count: int) -> None:
        """Goes back over the last `count` characters, which are undecided."""
        self._at -= count

    def literal(self, literal: str) -> Steps[bool]:
        """Reads exactly `literal`, markers spelled, if that is what comes."""
        expected = self._markers.in_text(literal)
        while True:
            found = self._text[self._at : self._at + len(expected)]
            if found == expected:
                self._at += len(found)
                return True
            if not expected.startswith(found):
                return False
            yield from self.more()

    def expect(self, literal: str) -> Steps[None]:
        """Reads `literal`. Raises NoCallError if something else comes."""
        if not (yield from self.literal(literal)):
            raise NoCallError

    def expect_words(self, words: str) -> Steps[None]:
        """Reads `words`, with any or no white space where it has some."""
        for word in words.split():
            yield from self.skip()
            yield from self.expect(word)
        if words[-1:] in SPACE:
            yield from self.skip()

    def ahead(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes; it is not read by this."""
        found = yield from self.literal(literal)
        if found:
            self.unread(len(self._markers.in_text(literal)))
        return found

    def upto(
        self, words: Sequence[str], take: Callable[[str], None], due: bool = False
    ) -> Steps[str]:
        """Reads up to the first of `words`, markers spelled, and that too. `take` is told the text
        before it as it comes. Returns the word. due: a word that is cut off is none of the text."""
        expected = sorted(map(self._markers.in_text, words), key=len, reverse=True)
        end = re.compile("|".join(map(re.escape, expected)))
        while True:
            found = end.search(self._text, self._at)
            held = 0 if self._closed and not due else self._held_back(expected)
            stop = found.start() if found else len(self._text) - held
            text, self._at = self._text[self._at : stop], stop
            if text:
                take(self._markers.spelled(text))
            if found:
                self._at += len(found[0])
                return self._markers.spelled(found[0])
            yield from self.more()

    def here(self, pattern: "re.Pattern[str]") -> str:
        """Reads what `pattern` matches of the text that has come."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return self._markers.spelled(found[0])

    def after(self, count: int) -> Steps[str]:
        """The character `count` places after the next one, which is not read by this."""
        while self._at + count >= len(self._text):
            yield from self.more()
        return self._text[self._at + count]

    def advance(self, count: int) -> None:
        """Reads characters that `after` has shown."""
        self._at += count

    def spelled(self, text: str) -> str:
        return self._markers.spelled(text)

    @property
    def first(self) -> bool:
        """Whether a section that begins now is the first of the answer, without content before."""
        return self._content.blank and not self._ids

    def run(self, pattern: "re.Pattern[str]", most: int) -> Steps[str]:
        """Reads up to `most` characters, of which each one matches `pattern`."""
        found = ""
        while pattern.fullmatch(letter := (yield from self.peek())):
            if len(found) == most:
                raise NoCallError
            found += letter
            self._at += 1
        return found

    def json(self, take: Callable[[str], None]) -> Steps[None]:
        """Reads a JSON value, whose text `take` is told as it comes."""
        scanner = JsonScanner()
        while True:
            self._at, written = scanner.feed(self._text, self._at)
            if written:
                take(self._markers.spelled(written))
            if scanner.complete:
                return
            if scanner.failed:
                raise NoCallError
            yield from self.more()

    def attempt(self, steps: Steps[_T]) -> Steps[_T | None]:
        """What `steps` reads and makes of it, without telling of it; None where it fails or is cut
        off, and then nothing is read."""
        read = self._at - self._start
        try:
            return (yield from steps)
        except (NoCallError, _CutOffError):
            self._at = self._start + read
            return None

    # For subclasses: what it was.

    def body(self) -> None:
        """What follows is more than envelope: it is content if no call comes of it."""
        self._only_envelope = False

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call of the tool `name`. What is undecided before is envelope. call_id: if the model
        gives one."""
        self._content.drop()
        self._open_call = len(self._ids)
        if call_id is None or call_id in self._ids:
            call_id = self._new_id(self._open_call, name)
        self._ids.append(call_id)
        self._events.append(CallBegin(self._open_call, call_id, name))
        self._start, self._only_envelope = self._at, True

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        assert self._open_call is not None, "no call has begun"
        if text:
            self._events.append(CallArguments(self._open_call, text))
        self._start = self._at

    def end_call(self) -> None:
        """The arguments of the call are complete."""
        assert self._open_call is not None, "no call has begun"
        self._events.append(CallEnd(self._open_call))
        self._open_call = None
        self._start = self._at

    def drop(self) -> None:
        """What is undecided is envelope."""
        self._start = self._at

    def emit(self, event: Event) -> None:
        """An event of another kind. All that has been read is decided."""
        self._events.append(event)
        self._start = self._at

    def reject(self) -> None:
        """What is undecided is content."""
        self._add_content(self._content.add(self._text[self._start : self._at]))
        self._start = self._at

    # The answer.

    def _answer(self) -> Steps[None]:
        while (yield from self._find_section()):
            begin = self._markers.spelled(self._text[self._start : self._at])
            yield from self._decided(self.section(begin))

    def _decided(self, section: Steps[None]) -> Steps[None]:
        """Reads a section, or as much of it as there is."""
        self._only_envelope = True
        try:
            yield from section
        except NoCallError:
            self._only_envelope = False
        except _CutOffError:
            self._at = len(self._text)
        self._open_call = None
        if not self._only_envelope:
            self.reject()
        self._start = self._at

    def _find_section(self) -> Steps[bool]:
        """Reads to the end of what opens the next section; content before it is decided."""
        while True:
            if found := self._begin.search(self._text, self._at):
                self._at = found.start()
                self.reject()
                self._at = found.end()
                return True
            self._at = len(self._text) - (0 if self._closed else self._held_back(self._begins))
            self.reject()
            if self._closed:
                return False
            yield

    def _held_back(self, words: Sequence[str]) -> int:
        """How many characters at the end of the text, of those that are not read, may be the
        beginning of one of `words`, the longest first."""
        for length in range(min(len(words[0]) - 1, len(self._text) - self._at), 0, -1):
            if any(word.startswith(self._text[-length:]) for word in words):
                return length
        return 0

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(Content(self._markers.spelled(text)))

    def _take_events(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events


class _ContentBuffer:
    """Content, of which white space is held back that may be envelope.

    lead: see `SectionParser`. blank: so far, or since the last call.
    """

    def __init__(self, lead: str) -> None:
        self._lead = lead
        self._held: list[str] = []
        self._after_call = False
        self.blank = True

    def add(self, text: str) -> str:
        """More content. Returns what of it can be handed on."""
        if self.blank and not text.strip(SPACE):
            self._held.append(text)  # not joined each time: models that go astray write much of it
            return ""
        self.blank = False
        text = "".join(self._held) + text
        kept = len(self._lead) if self._lead and text.endswith(self._lead) else 0
        self._held = [text[len(text) - kept :]]
        return text[: len(text) - kept]

    def drop(self) -> None:
        """A call begins: what is held back is envelope."""
        self._held, self.blank, self._after_call = [], True, True

    def finish(self) -> str:
        """What is held back and yet content."""
        return "" if self._after_call and self.blank else "".join(self._held)
