"""A whole answer's message, from the events of its text."""

from collections.abc import Iterable

from octavo.outputs import AnswerMessage, ToolCall
from octavo.text.answer import CallArguments, CallBegin, Content, Event, Reasoning


def message_of(events: Iterable[Event]) -> AnswerMessage:
    """The message that these events of one choice make up."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            calls[event.index] = event
            arguments[event.index] = []
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.text)
    text, thought = "".join(content), "".join(reasoning)
    return AnswerMessage(
        text or (None if calls or thought else ""),
        thought or None,
        tuple(
            ToolCall(call.id, call.name, "".join(arguments[index]))
            for index, call in sorted(calls.items())
        ),
    )
