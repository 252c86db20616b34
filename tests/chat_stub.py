"""A backend for `octavo chat` that does what its messages say, without an engine.

A word is a token, and each message takes two more. `!N` answers with N numbered words, `!slow`
with words until the window is full, one in 10 ms (`!N slowly`: N of them); `!fail` fails after
a word, `!say TEXT` says it, everything else is repeated.

`python tests/chat_stub.py [--window N] ...` is `octavo chat ...` over this backend.
"""

import itertools
import re
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from octavo.cli.chat_backend import Message, Piece, Prompt
from octavo.errors import ContextLengthError, RequestError
from octavo.params import SamplingParams


class Stub:
    """Keeps what it was asked, and how many streams were closed."""

    name = "stub"
    knows_defaults = True

    def __init__(self, window: int | None = 100, counts: bool = True) -> None:
        self.window = window
        self.counts = counts
        self.asked: list[list[Message]] = []
        self.params: list[SamplingParams] = []
        self.loaded = False
        self.prepared = 0
        self.closed = 0
        self.fault: BaseException | None = None  # raised after the first piece

    def default_params(self, given: Mapping[str, Any]) -> tuple[SamplingParams, str]:
        return SamplingParams(**{"max_tokens": None, "temperature": 0.8, **given}), "the stub's"

    def prepare(self, messages: Sequence[Message]) -> Prompt:
        self.prepared += 1
        size = sum(len(m["content"].split()) + 2 for m in messages)
        return Prompt(size if self.counts else None, [dict(m) for m in messages])

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        if "refused" in (params.bad_words or ()):
            raise RequestError("the stub refuses these bad_words")

    def load(self) -> None:
        self.loaded = True

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: frozenset[str]
    ) -> Generator[Piece, None, None]:
        size = sum(len(m["content"].split()) + 2 for m in prompt.content)
        if self.window is not None and size >= self.window:
            raise ContextLengthError(f"the prompt has {size} tokens, the window {self.window}")
        self.asked.append(prompt.content)
        self.params.append(params)
        room = 10_000 if self.window is None else self.window - size
        limit = room if params.max_tokens is None else params.max_tokens
        try:
            words = list(itertools.islice(self._words(prompt.content[-1]["content"]), limit + 1))
            for i, word in enumerate(words[:limit]):
                yield Piece(word, 1, size)
                if self.fault is not None:
                    raise self.fault
                if "slow" in prompt.content[-1]["content"]:
                    time.sleep(0.01)
                if i == 0 and "!fail" in prompt.content[-1]["content"]:
                    raise RequestError("this answer was told to fail")
            yield Piece("", 0, size, 0, "length" if len(words) > limit else "stop")
        finally:
            self.closed += 1

    def _words(self, text: str) -> Iterator[str]:
        if "!slow" in text:
            return (f"word{i} " for i in itertools.count())
        if count := re.fullmatch(r"!(\d+)( slowly)?", text.strip()):
            return (f"w{i} " for i in range(int(count[1])))
        return iter(re.findall(r"\s*\S+|\s+$", text.removeprefix("!say ")))


if __name__ == "__main__":
    from octavo.cli import chat
    from octavo.cli.main import main

    window = int(sys.argv.pop(2)) if sys.argv[1:2] == ["--window"] and sys.argv.pop(1) else 1000
    chat.open_backend = lambda args: Stub(window)
    sys.exit(main(["chat", *sys.argv[1:]]))
