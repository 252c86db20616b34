"""Token ids to text as they arrive, and stop strings.

What a `Detokenizer` has given out, joined, is exactly decode(prompt + output) with
decode(prompt) taken from its front; a character split over tokens appears when it is whole,
and bytes that are no character become U+FFFD only once that is certain. Time is linear in the
text: each token is looked at once, and stop strings are followed by one automaton.
"""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from octavo.params import SamplingParams
from octavo.text.markers import Markers
from octavo.text.tokenizer import Tokenizer


class StopStrings:
    """The automaton of Aho and Corasick (1975) over some strings.

    A state is the longest suffix of the text so far that begins some string; so its depth is
    what has to be held back. goto[state][char] -> state; found[state]: the longest string that
    ends here; held[state]: characters that may still become a string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        depth = [0]
        for string in strings:
            state = 0
            for char in string:
                if char not in self.goto[state]:
                    self.goto[state][char] = len(self.goto)
                    self.goto.append({})
                    self.found.append(None)
                    depth.append(depth[state] + 1)
                state = self.goto[state][char]
            self.found[state] = string
        self.first = frozenset(self.goto[0])
        self.fail = [0] * len(self.goto)
        self.held = [d if self.goto[s] else 0 for s, d in enumerate(depth)]
        self._link()

    def _link(self) -> None:
        """Suffix links, breadth first, so that a state's link is complete before its children."""
        queue = list(self.goto[0].values())
        for state in queue:
            link = self.fail[state]
            self.found[state] = self.found[state] or self.found[link]
            self.held[state] = self.held[state] or self.held[link]
            for char, child in self.goto[state].items():
                self.fail[child] = self.step(link, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while True:
            following = self.goto[state].get(char)
            if following is not None:
                return following
            if not state:
                return 0
            state = self.fail[state]


@lru_cache(maxsize=64)
def _automaton(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


def _in_marked_text(strings: Iterable[str], markers: Markers) -> dict[str, str]:
    """What ends a text with markers as these stop strings do, each with its stop string.

    A marker that is written as one token contains what it is spelled with. (A stop string that
    begins within a marker and ends after it is not found.)
    """
    found: dict[str, str] = {}
    for string in strings:
        found.setdefault(markers.in_text(string), string)
        for marker, token_id in markers.token_ids.items():
            if string in marker:
                found.setdefault(markers.characters[token_id], string)
    return {marked: string for marked, string in found.items() if marked != string}


class _Marked(dict[int, str | bytes]):
    """A tokenizer's pieces, but for markers, for which characters stand."""

    def __init__(self, pieces: Mapping[int, str | bytes], markers: Markers) -> None:
        super().__init__(markers.characters)
        self._others = pieces

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._others[token_id]
        return piece


class Detokenizer:
    """The text of one choice.

    `append` takes new ids; `text` is all that may be shown, `take_delta` what is new in it
    since the last call; `stopped` is the stop string that was seen, after which nothing more
    is added. `finish` releases what was held back.

    stop_ids: ids whose text is not shown, since they end the output (unless
    `include_stop_str_in_output`); None takes the tokenizer's ends (unless `ignore_eos`) and
    `stop_token_ids`. markers: tokens of the output for which the text has a character, for a
    parser (`octavo.text.markers`), special ones too; stop strings find them as they are spelled.
    """

    __slots__ = ("_aliases", "_delta", "_first", "_held", "_include", "_min_tokens", "_parts",
                 "_pieces", "_state", "_stop_ids", "_stops", "_tail", "_text", "count",
                 "stopped")  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        stop_ids: Collection[int] | None = None,
        markers: Markers | None = None,
    ) -> None:
        if stop_ids is None:
            ends = () if params.ignore_eos else tokenizer.eos_ids
            stop_ids = {*ends, *(params.stop_token_ids or ())}
        self._pieces = tokenizer.pieces(params.skip_special_tokens) if params.detokenize else None
        self._include = params.include_stop_str_in_output
        self._stop_ids = () if self._include else stop_ids
        self._aliases: Mapping[str, str] = {}
        strings = params.stop_strings
        if markers is not None and strings:
            self._aliases = _in_marked_text(strings, markers)
            strings = (*strings, *self._aliases)
        self._stops = _automaton(strings) if strings else None
        self._min_tokens = params.min_tokens
        self._state = 0
        self._held = ""
        self._text = ""
        self._parts: list[str] = []
        self._delta: list[str] = []
        self._tail = b""
        self._first: str | None = None
        self.count = 0
        self.stopped: str | None = None
        if self._pieces is not None:
            self._start_after(prompt_token_ids, tokenizer.strips_space)
            if markers is not None:
                self._pieces = _Marked(self._pieces, markers)

    def _start_after(self, prompt: Sequence[int], strips_space: bool) -> None:
        """Take over the state in which decoding the prompt ends.

        Its last bytes may be an unfinished character, shown as U+FFFD by the prompt's own text
        and so not again by ours; and if it has no text, the leading space is ours to drop.
        """
        assert self._pieces is not None
        last = b""
        for token_id in reversed(prompt):
            piece = self._pieces[token_id]
            last = (piece.encode() if isinstance(piece, str) else piece) + last
            if len(last) >= 4:
                break
        for size in range(1, min(4, len(last) + 1)):
            if codecs.utf_8_decode(last[-size:], "replace", False)[1] == 0:
                self._tail, self._first = last[-size:], "\ufffd"
        if strips_space and not last:
            self._first = " "

    def append(self, token_ids: Iterable[int]) -> None:
        """Add generated ids, in order."""
        pieces = self._pieces
        for token_id in token_ids:
            if self.stopped is not None:
                return
            self.count += 1
            if pieces is None or token_id in self._stop_ids:
                continue
            piece = pieces[token_id]
            if isinstance(piece, str) and not self._tail:
                text = piece
            else:
                text = self._decoded(piece)
            if self._first is not None and text:
                text = self._trimmed(text)
            if self._stops is not None:
                self._follow(text)
            elif text:
                self._parts.append(text)
                self._delta.append(text)

    def _decoded(self, piece: str | bytes, final: bool = False) -> str:
        """The characters that are certain now; the rest waits in `_tail`."""
        if isinstance(piece, str):  # whole characters: what they follow is no part of one
            if not piece:
                return ""
            text, self._tail = self._tail.decode("utf-8", "replace") + piece, b""
            return text
        data = self._tail + piece
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._tail = data[used:]
        return text

    def _trimmed(self, text: str) -> str:
        """The first text, without a first character that is not ours to show."""
        drop, self._first = self._first, None
        return text[1:] if text[0] == drop else text

    def _follow(self, text: str) -> None:
        """Pass `text` through the automaton; release all but what may begin a stop string."""
        stops = self._stops
        assert stops is not None
        state = self._state
        if state == 0 and stops.first.isdisjoint(text):
            self._release(text)
            return
        best: tuple[int, int, str] | None = None
        at = len(self._held)
        for char in text:
            state = stops.step(state, char)
            at += 1
            if (string := stops.found[state]) and self.count > self._min_tokens:
                match = (at - len(string), at, string)
                best = match if best is None else min(best, match)
        text = self._held + text
        if best is not None:
            start, end, string = best
            self.stopped = self._aliases.get(string, string)
            text, self._held = text[: end if self._include else start], ""
        else:
            cut = len(text) - stops.held[state]
            text, self._held = text[:cut], text[cut:]
        self._state = state
        self._release(text)

    def _release(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._delta.append(text)

    def finish(self) -> None:
        """The output is complete: an unfinished character and held-back text are released."""
        if self.stopped is None and self._pieces is not None:
            if self._tail:
                text = self._decoded(b"", final=True)
                text = self._trimmed(text) if self._first is not None else text
                self._held += text
            self._release(self._held)
            self._held = ""

    @property
    def text(self) -> str:
        """All text released so far."""
        if self._parts:
            self._text += "".join(self._parts)
            self._parts.clear()
        return self._text

    def take_delta(self) -> str:
        """The text released since the last call."""
        delta = "".join(self._delta)
        self._delta.clear()
        return delta
