"""The output items of a response, from the events of its answer, and how a stream tells of them.

A whole response has the items that its stream would have told of: both are made by one `Output`.
What surrounds the items (the response, its beginning and end) is `server.responses`' part.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from octavo.server.replies import TokenLogprob
from octavo.server.responses_replies import (
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from octavo.server.responses_tools import ToolName
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.tools.base import CALL_ID

StreamEvent = dict[str, Any]
Events = Iterator[StreamEvent]


class Output:
    """The items of one answer. `name_of`: what the client calls a function that the model calls.

    Each method gives the events of what it was told.
    """

    def __init__(self, name_of: Callable[[str], ToolName]) -> None:
        self.items: list[Item] = []
        self._name_of = name_of
        self._open: _Open | None = None
        self._blank = ""  # whitespace that may be the beginning of a message
        self._logprobs: list[TokenLogprob] = []

    def feed(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> Events:
        """logprobs: of the tokens that these events were made from."""
        self._logprobs += logprobs
        for event in events:
            if isinstance(event, Content):
                yield from self._content(event.text)
            elif isinstance(event, Reasoning):
                self._logprobs.clear()
                if not isinstance(self._open, _OpenReasoning):
                    yield from self._next(_OpenReasoning(self._place()))
                yield from self._grow(event.text)
            elif isinstance(event, CallBegin):
                self._logprobs.clear()
                yield from self._next(self._call(event))
            elif isinstance(event, CallArguments):
                yield from self._grow(event.text)
            elif isinstance(event, CallEnd):
                yield from self._close("completed")

    def finish(self, complete: bool) -> Events:
        """The end of the answer: an item that is not complete says so, if the answer is not."""
        if self._blank and not self.items and self._open is None:
            yield from self._message(self._blank)
        elif isinstance(self._open, _OpenMessage) and self._logprobs:
            yield from self._message("")
        yield from self._close("completed" if complete else "incomplete")
        if not self.items:
            yield from self._message("")
            yield from self._close("completed" if complete else "incomplete")

    def _content(self, text: str) -> Events:
        """Whitespace alone, such as what stands around calls, makes no message."""
        if not isinstance(self._open, _OpenMessage):
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
        self._blank = ""
        yield from self._message(text)

    def _message(self, text: str) -> Events:
        if not isinstance(self._open, _OpenMessage):
            yield from self._next(_OpenMessage(self._place()))
        assert isinstance(self._open, _OpenMessage)
        fresh, self._logprobs = self._logprobs, []
        yield from self._open.grow(text, fresh)

    def _call(self, begin: CallBegin) -> "_Open":
        name = self._name_of(begin.name)
        call_id = begin.id
        if call_id.startswith(CALL_ID):
            call_id = "call_" + call_id.removeprefix(CALL_ID)
        if name.kind == "custom":
            return _OpenCustomCall(self._place(), call_id, name)
        return _OpenCall(self._place(), call_id, name)

    def _place(self) -> int:
        return len(self.items) + (self._open is not None)

    def _grow(self, text: str) -> Events:
        if self._open is not None and text:
            yield from self._open.grow(text, ())

    def _next(self, opened: "_Open") -> Events:
        self._blank = ""
        yield from self._close("completed")
        self._open = opened
        yield _event("response.output_item.added", output_index=opened.index, item=opened.empty())
        yield from opened.begin()

    def _close(self, status: Status) -> Events:
        if self._open is None:
            return
        closed, self._open = self._open, None
        yield from closed.end()
        item = closed.item(status)
        self.items.append(item)
        yield _event("response.output_item.done", output_index=closed.index, item=item)


class _Open(Protocol):
    """An item that grows. index: its place among the items."""

    index: int

    def empty(self) -> Item: ...
    def item(self, status: Status) -> Item: ...
    def begin(self) -> Events: ...
    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events: ...
    def end(self) -> Events: ...


class _OpenText:
    """What items with one part of text share. kind: what their ids begin with."""

    def __init__(self, index: int, kind: str) -> None:
        self.index = index
        self._id = _new_id(kind)
        self._text: list[str] = []

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        where = {"item_id": self._id, "output_index": self.index, "content_index": 0}
        return _event(kind, **where, **fields)


class _OpenMessage(_OpenText):
    def __init__(self, index: int) -> None:
        super().__init__(index, "msg")
        self._logprobs: list[TokenLogprob] = []

    def empty(self) -> Item:
        return MessageItem(self._id, "in_progress", ())

    def item(self, status: Status) -> Item:
        return MessageItem(self._id, status, (self._part(),))

    def begin(self) -> Events:
        yield self._event("response.content_part.added", part=OutputText(""))

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self._text.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            yield self._event("response.output_text.delta", delta=text, logprobs=logprobs)

    def end(self) -> Events:
        part = self._part()
        yield self._event("response.output_text.done", text=part.text, logprobs=part.logprobs)
        yield self._event("response.content_part.done", part=part)

    def _part(self) -> OutputText:
        return OutputText("".join(self._text), (), tuple(self._logprobs))


class _OpenReasoning(_OpenText):
    def __init__(self, index: int) -> None:
        super().__init__(index, "rs")

    def empty(self) -> Item:
        return ReasoningItem(self._id, "in_progress", ())

    def item(self, status: Status) -> Item:
        return ReasoningItem(self._id, status, (ReasoningText("".join(self._text)),))

    def begin(self) -> Events:
        yield self._event("response.content_part.added", part=ReasoningText(""))

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self._text.append(text)
        yield self._event("response.reasoning_text.delta", delta=text)

    def end(self) -> Events:
        text = "".join(self._text)
        yield self._event("response.reasoning_text.done", text=text)
        yield self._event("response.content_part.done", part=ReasoningText(text))


class _OpenCall:
    """A call of a function."""

    _id_kind: ClassVar[str] = "fc"
    _events: ClassVar[str] = "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: ToolName) -> None:
        self.index = index
        self._id = _new_id(self._id_kind)
        self._call_id = call_id
        self._name = name
        self._text: list[str] = []

    def empty(self) -> Item:
        return self._item("in_progress", "")

    def item(self, status: Status) -> Item:
        return self._item(status, "".join(self._text))

    def begin(self) -> Events:
        yield from ()

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        if text:
            self._text.append(text)
            yield self._event("delta", delta=text)

    def end(self) -> Events:
        yield self._event("done", arguments="".join(self._text))

    def _item(self, status: Status, text: str) -> Item:
        name = self._name
        return FunctionCallItem(self._id, status, self._call_id, name.name, text, name.namespace)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        kind = f"{self._events}.{kind}"
        return _event(kind, item_id=self._id, output_index=self.index, **fields)


class _OpenCustomCall(_OpenCall):
    """A call of a custom tool: the input is the only string of the arguments."""

    _id_kind = "ctc"
    _events = "response.custom_tool_call_input"

    def __init__(self, index: int, call_id: str, name: ToolName) -> None:
        super().__init__(index, call_id, name)
        self._reader = InputReader()

    def grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        yield from super().grow(self._reader.feed(text), logprobs)

    def end(self) -> Events:
        yield self._event("done", input="".join(self._text))

    def _item(self, status: Status, text: str) -> Item:
        name = self._name
        return CustomToolCallItem(self._id, status, self._call_id, name.name, text, name.namespace)


_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Whole characters. The first half of a pair waits for the second.
_WHOLE = re.compile(rf'(?:[^"\\]|\\["\\/bfnrt]|{_HIGH}{_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}})*')


class InputReader:
    """Reads the text of `{"input": "..."}`, which comes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False

    def feed(self, text: str) -> str:
        """More of the input, as far as its characters are complete."""
        self._rest += text
        if not self._inside:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._inside, self._rest = True, self._rest[begin.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None  # it matches the empty text
        self._rest = self._rest[whole.end() :]
        found: str = json.loads(f'"{whole[0]}"', strict=False)
        return found.encode("utf-8", "replace").decode()


def _event(kind: str, **fields: Any) -> StreamEvent:
    return {"type": kind, **fields}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
