"""From a request's outputs, streamed or whole, to the events of its answers."""

from octavo.outputs import CompletionOutput
from octavo.text.answer import CallBegin, Event, Parser, joined
from octavo.text.answer_form import AnswerForm
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

    def read(self, output: CompletionOutput) -> list[Event]:
        """The events of what is new of a choice; its text is made one without markers."""
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self.form.parser(self._tokenizer)
        events = parser.feed(output.text) if output.text else []
        if output.finished:
            events = joined([*events, *parser.finish()])
        for event in events:
            if isinstance(event, CallBegin):
                self._calls[output.index] = event.index + 1
        if self.markers is not None:
            output.text = self.markers.plain(output.text, self._skips)
        return events

    def calls(self, index: int) -> int:
        """How many calls this choice has begun."""
        return self._calls.get(index, 0)
