"""From a request's outputs, streamed or whole, to the events of its answers."""

from octavo.outputs import CompletionOutput
from octavo.text.answer import CallBegin, Event, Parser, joined
from octavo.text.answer_form import AnswerForm
from octavo.text.message import message_of
from octavo.text.reasoning.count import ReasoningCount
from octavo.text.tokenizer import Tokenizer


class AnswerReader:
    """Of one request. Its outputs' texts have `markers` as characters.

    skip_special_tokens: as in the request's parameters.
    """

    def __init__(self, form: AnswerForm, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.markers = form.markers(tokenizer)
        self.form = form
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._parsers: dict[int, Parser] = {}
        self._calls: dict[int, int] = {}  # begun, of each choice
        self._events: dict[int, list[Event]] = {}  # of those that `add_message` has read
        self._thinking = form.thinking(tokenizer)
        self._counts: dict[int, ReasoningCount] = {}

    def read(self, output: CompletionOutput) -> list[Event]:
        """The events of what is new of a choice; its text is made one without markers."""
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self.form.parser(self._tokenizer)
        events = parser.feed(output.text) if output.text else []
        if output.finished:
            events = joined([*events, *parser.finish()])
        self._count(output)
        for event in events:
            if isinstance(event, CallBegin):
                self._calls[output.index] = event.index + 1
        if self.markers is not None:
            output.text = self.markers.plain(output.text, self._skips)
        return events

    def add_message(self, output: CompletionOutput) -> None:
        """`read`, and what the events so far make up goes into the output once it is finished."""
        events = self._events.setdefault(output.index, [])
        events += self.read(output)
        if output.finished:
            output.message = message_of(events)

    def calls(self, index: int) -> int:
        """How many calls this choice has begun."""
        return self._calls.get(index, 0)

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all choices so far; None for a model that does not reason."""
        if self._thinking is None:
            return None
        return sum(counted.count for counted in self._counts.values())

    def _count(self, output: CompletionOutput) -> None:
        if self._thinking is None or self.form.reasoning is None:
            return
        counted = self._counts.get(output.index)
        if counted is None:
            counted = self._counts[output.index] = ReasoningCount(
                self._thinking,
                self._tokenizer.token_bytes,
                self.form.reasoning.recurs,
                self.form.calls_token(self._tokenizer),
            )
        by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        counted.add(output.token_ids[:-1] if by_token else output.token_ids)
