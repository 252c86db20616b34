"""The conversation of `octavo chat`: its turns, what of them fits into the window, its answers.

Not here: anything of the terminal. A caller passes `show`, which gets the text as it is
generated, and `think`, which gets the reasoning before it, and prints what the returned `Reply`
says. Reasoning is part of no turn: templates leave earlier turns' out.
"""

import bisect
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.cli.chat_backend import Backend, Message, Piece, Prompt
from octavo.errors import ContextLengthError, RequestError
from octavo.params import SamplingParams

# Room to keep for an answer if max_tokens does not say how long it may get.
_ANSWER_ROOM = 1024

Show = Callable[[str], None]
# complete: the model ended it. stopped: Ctrl-C. max_tokens, window: cut by that limit. limit: by
# one that the user did not set, of a server.
Ending = Literal["complete", "stopped", "max_tokens", "window", "limit"]


class _Shows(NamedTuple):
    """What is told of the pieces of an answer."""

    text: Show
    reasoning: Show


def _nowhere(text: str) -> None:
    """Shows nothing."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the user and its answer."""

    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and how it came about.

    seconds_to_first: until the first token, None if there was none. rate: tokens per second
    after the first one, None for fewer than two. dropped: turns that this message pushed out of
    the window.
    """

    text: str
    ending: Ending
    num_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    seconds_to_first: float | None
    rate: float | None
    dropped: int = 0

    @property
    def used(self) -> int | None:
        """Tokens of the window that the conversation takes with this answer."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.num_tokens


class Session:
    """A conversation with one model.

    `turns` keeps all of it; the model reads the system message, the turns from `first` on and
    the newest message. Where those leave no room for an answer, the oldest turns are dropped: a
    few more than needed, so that the next messages find an unchanged prefix in the cache.
    """

    def __init__(
        self,
        backend: Backend,
        params: SamplingParams,
        system: str | None = None,
        given: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """given: the settings that the user gave; the others are the backend's."""
        self.backend = backend
        self.turns: list[Turn] = []
        self.first = 0
        self.replies: list[Reply] = []
        self._attempts = 0  # at the last message, for seeds
        self._clock = clock
        self._system: str | None = None
        self.set_system(system)
        self.set_params(params, given)

    @property
    def system(self) -> str | None:
        return self._system

    def set_system(self, text: str | None) -> None:
        """Replace the system message. Raises RequestError if the template or window refuses it."""
        prompt = self.backend.prepare(messages(text, (), "Hi"))
        window = self.backend.window
        if window is not None and prompt.num_tokens is not None and prompt.num_tokens >= window:
            raise ContextLengthError(
                f"the system message leaves no room for an answer: with a short message the prompt "
                f"has {prompt.num_tokens} tokens and the window {window}",
                "system",
            )
        self._system = text

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def given(self) -> frozenset[str]:
        return self._given

    def set_params(self, params: SamplingParams, given: Iterable[str]) -> None:
        """Replace the settings. Raises RequestError for those that the model cannot serve."""
        prompt = self.backend.prepare(messages(self._system, (), "Hi"))
        self.backend.check(prompt, params.with_(max_tokens=None))  # capped by the room anyway
        self._params = params
        self._given = frozenset(given)

    def clear(self) -> None:
        """Forget every turn; system message and settings stay."""
        self.restore([])

    def restore(self, turns: Sequence[Turn]) -> None:
        """Go on from other turns, such as saved ones."""
        self.turns = list(turns)
        self.first = 0
        self.replies = []
        self._attempts = 0

    def ask(self, text: str, show: Show, think: Show = _nowhere) -> Reply:
        """Answer a message. A turn is kept if its answer has text, also when it was stopped.

        Raises RequestError, with the conversation as it was, if the message cannot be answered.
        """
        reply, first = self._answer(self.turns, text, self.params, _Shows(show, think))
        self._attempts = 0
        self._keep(self.turns, Turn(text, reply.text), reply, first)
        return reply

    def regenerate(self, show: Show, think: Show = _nowhere) -> Reply:
        """Answer the last message once more, with another seed.

        The former answer is kept until the new one has text. Raises RequestError.
        """
        if not self.turns:
            raise RequestError("there is no answer to replace yet")
        *before, last = self.turns
        params = self.params
        if params.seed is not None:
            params = params.with_(seed=(params.seed + self._attempts + 1) % 2**63)
        reply, first = self._answer(before, last.user, params, _Shows(show, think))
        self._attempts += 1
        self._keep(before, Turn(last.user, reply.text), reply, first)
        return reply

    def _keep(self, before: list[Turn], turn: Turn, reply: Reply, first: int) -> None:
        if turn.answer:
            self.turns = [*before, turn]
            self.first = first
            self.replies.append(reply)

    def _answer(
        self, before: list[Turn], text: str, params: SamplingParams, shows: _Shows
    ) -> tuple[Reply, int]:
        """The reply to `text` after `before`, and the first turn that was sent for it."""
        first = min(self.first, len(before))
        prompt, first = self._fit(before, first, text)
        while True:
            try:
                reply = self._generate(prompt, params, shows, first - self.first)
            except ContextLengthError:
                # Only of a backend that cannot count: find the room by trying.
                if prompt.num_tokens is not None or first >= len(before):
                    raise
                first += 1
                prompt = self.backend.prepare(messages(self._system, before[first:], text))
            else:
                return reply, first

    def _fit(self, before: list[Turn], first: int, text: str) -> tuple[Prompt, int]:
        """The longest prompt that leaves room for an answer, and the first turn in it."""

        def prompt_from(turn: int) -> Prompt:
            return self.backend.prepare(messages(self._system, before[turn:], text))

        prompt, window = prompt_from(first), self.backend.window
        if window is None or prompt.num_tokens is None:
            return prompt, first
        reserve = self._reserve(window)
        if window - prompt.num_tokens < reserve and first < len(before):
            most = window - reserve - window // 8
            turns = range(first + 1, len(before))
            first += 1 + bisect.bisect_left(
                turns, True, key=lambda turn: (prompt_from(turn).num_tokens or 0) <= most
            )
            prompt = prompt_from(first)
        size = prompt.num_tokens or 0
        if window - size < max(1, self.params.min_tokens):
            raise ContextLengthError(_too_long(size, window, self._system is not None), "prompt")
        return prompt, first

    def _reserve(self, window: int) -> int:
        asked = self.params.max_tokens or min(_ANSWER_ROOM, window // 4)
        return max(1, self.params.min_tokens, min(asked, window // 2))

    def _generate(
        self, prompt: Prompt, params: SamplingParams, shows: _Shows, dropped: int
    ) -> Reply:
        if params.max_tokens is not None and self.backend.window and prompt.num_tokens is not None:
            room = self.backend.window - prompt.num_tokens
            params = params.with_(max_tokens=min(params.max_tokens, room))
        record = _Record(self._clock)
        stopped = False
        try:
            # Closing the stream aborts the request, even if Ctrl-C comes between two tokens.
            with contextlib.closing(self.backend.stream(prompt, params, self.given)) as pieces:
                for piece in pieces:
                    record.add(piece)
                    if piece.reasoning:
                        shows.reasoning(piece.reasoning)
                    shows.text(piece.text)
        except KeyboardInterrupt:
            stopped = True
        if stopped:
            return record.reply(prompt.num_tokens, "stopped", dropped)
        return record.reply(prompt.num_tokens, self._ending(record, prompt), dropped)

    def _ending(self, record: "_Record", prompt: Prompt) -> Ending:
        if record.reason != "length":
            return "complete"
        limit, window = self.params.max_tokens, self.backend.window
        if limit is not None and record.count >= limit:
            return "max_tokens"
        if window is not None and (prompt.num_tokens or 0) + record.count >= window:
            return "window"
        return "window" if self.backend.knows_defaults else "limit"


class _Record:
    """Text, counts and times of one answer while it is generated."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._first: tuple[float, int] | None = None  # time and tokens of the first piece
        self._last = self._start
        self._texts: list[str] = []
        self.count = 0
        self._piece = Piece("")
        self.reason: str | None = None

    def add(self, piece: Piece) -> None:
        self._last = self._clock()
        self._texts.append(piece.text)
        self.count += piece.num_tokens
        self._piece = piece
        self.reason = piece.finish_reason or self.reason
        if self._first is None and piece.num_tokens:
            self._first = (self._last, piece.num_tokens)

    def reply(self, prompt_tokens: int | None, ending: Ending, dropped: int) -> Reply:
        to_first = rate = None
        if self._first is not None:
            moment, tokens = self._first
            to_first = moment - self._start
            if self._last > moment and self.count > tokens:
                rate = (self.count - tokens) / (self._last - moment)
        prompt = self._piece.prompt_tokens
        return Reply(
            "".join(self._texts),
            ending,
            self.count,
            prompt_tokens if prompt is None else prompt,
            self._piece.cached_tokens,
            to_first,
            rate,
            dropped,
        )


def messages(system: str | None, turns: Sequence[Turn], text: str | None = None) -> list[Message]:
    """A conversation in the form that templates and files have."""
    found: list[Message] = []
    if system is not None:
        found.append({"role": "system", "content": system})
    for turn in turns:
        found.append({"role": "user", "content": turn.user})
        found.append({"role": "assistant", "content": turn.answer})
    if text is not None:
        found.append({"role": "user", "content": text})
    return found


def _too_long(size: int, window: int, system: bool) -> str:
    what = "the message and the system message have" if system else "the message has"
    return (
        f"{what} {size} tokens; the window has {window}, and the answer needs some of them. "
        "Shorten the message; the conversation is unchanged"
    )
