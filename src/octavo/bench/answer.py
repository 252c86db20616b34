"""One streamed answer of an OpenAI-compatible server: what came, when, and whether it is whole.

No sockets and no clock: the caller passes each piece of the stream with the time of its arrival.
An answer counts as a success only if it says so in full: status 200, no error event, a finish
reason, `[DONE]`, and, where end-of-text is ignored, as many tokens as were asked for.
"""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """One request as the client saw it. Times are seconds; `sent` is on the run's clock.

    ttft: to the first text. itl: between pieces of text. latency: to the last one.
    failure: '' for a success, else its kind, such as "HTTP 503"; `error` is the whole message.
    """

    prompt_len: int
    asked: int
    sent: float = 0.0
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    failure: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    def fail(self, kind: str, message: str = "") -> None:
        """Record the first failure; later ones follow from it."""
        if not self.failure:
            self.failure, self.error = kind, message or kind


class EventReader:
    """Server-sent events out of pieces of a stream, cut anywhere.

    Lines may end with LF or CRLF; comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Answer:
    """Reads the stream of one request into an `Outcome`."""

    def __init__(self, outcome: Outcome, begun: float) -> None:
        self.outcome = outcome
        self._begun = begun
        self._last = begun
        self._started = False
        self._finish: str | None = None
        self._done = False
        self._reader = EventReader()
        self.counted = False  # whether the server said how many tokens came

    def feed(self, piece: bytes, now: float) -> None:
        """A piece of the body, received at `now`."""
        for event in self._reader.feed(piece):
            if self._done:
                self.outcome.fail("data after [DONE]", event.decode(errors="replace"))
            elif event == b"[DONE]":
                self._done = True
            else:
                self._event(event, now)

    def end(self, ignore_eos: bool, now: float) -> None:
        """The body has ended: decide whether the answer is whole."""
        outcome = self.outcome
        if not self._done:
            outcome.fail("no [DONE]", "the stream ended without [DONE]")
        if self._finish is None:
            outcome.fail("no finish reason", "the stream ended without a finish_reason")
        if not self._started:  # tokens without text, such as special ones
            outcome.ttft = now - self._begun
            outcome.latency = outcome.ttft
        if not self.counted:
            outcome.output_len = len(outcome.itl) + self._started
        if ignore_eos and self.counted and outcome.output_len < outcome.asked:
            outcome.fail(
                "too few tokens", f"{outcome.output_len} tokens came, {outcome.asked} were asked"
            )

    def _event(self, event: bytes, now: float) -> None:
        try:
            chunk = json.loads(event)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.outcome.fail("not JSON", f"an event is no JSON object: {event[:200]!r}")
            return
        if chunk.get("error"):
            self.outcome.fail("error event", error_message(chunk))
            return
        for choice in chunk.get("choices") or ():
            self._choice(choice, now)
        if usage := chunk.get("usage"):
            self.counted = "completion_tokens" in usage
            self.outcome.output_len = int(usage.get("completion_tokens") or 0)
            self.outcome.prompt_len = int(usage.get("prompt_tokens") or self.outcome.prompt_len)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or thought:
            if self._started:
                self.outcome.itl.append(now - self._last)
            else:
                self.outcome.ttft = now - self._begun
                self._started = True
            self._last = now
            self.outcome.latency = now - self._begun
            self.outcome.text += thought + text
        self._finish = choice.get("finish_reason") or self._finish


def error_message(body: Any) -> str:
    """The message of an error's body, whatever its shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body)
