"""What an answer consists of: reasoning, content and tool calls, as they come.

A parser turns the text that a model writes into `Event`s, in any chunking with the same result: a
streamed answer and a whole one are made from the same events. The text has markers that are added
tokens as `octavo.text.markers` says.
"""

from typing import Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins. index: from 0 in its answer. id: a new one, in the format's style."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments. Joined, they are valid JSON once the call has
    ended, `{}` for one without arguments; of a call that was cut off, the beginning of it."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call is complete."""

    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """Of one choice's text."""

    def feed(self, text: str) -> list[Event]:
        """The events of more text; what may still become a marker is held back."""
        ...

    def finish(self) -> list[Event]:
        """The events of what was held back: the text is complete, or cut off. What is no call is
        content, as the model wrote it; what has begun as a call stays one."""
        ...


def joined(events: "list[Event]") -> "list[Event]":
    """Neighbours of one kind (and one call) as one event: the same for each chunking of a text."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and event.index == last.index
        ):
            found[-1] = CallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
