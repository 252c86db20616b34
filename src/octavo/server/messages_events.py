"""What goes out at Anthropic's Messages API: content blocks, and the events of a stream.

`Blocks` makes the events of blocks from those of an answer (`octavo.text.answer`); `content` makes
the blocks of a whole answer from the same events.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET

from octavo.outputs import FinishReason
from octavo.server.messages_turns import TOOL_USE
from octavo.server.replies import Maybe, Usage
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.tools.base import CALL_ID

# A client sends it back with the thinking, which nobody here has to be sure of.
SIGNATURE = "octavo"
_LONG_INTEGER = 4000  # digits; Python reads no more than 4300
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOut(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingOut(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseOut(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that no cache had. `output_tokens_details` of models that think."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | Maybe = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        cached = usage.prompt_tokens_details["cached_tokens"]
        details = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens - cached,
            0,
            cached,
            usage.completion_tokens,
            details and {"thinking_tokens": details["reasoning_tokens"]},
        )


class Message(msgspec.Struct):
    """An answer: whole, or as a stream begins."""

    events: ClassVar[str] = "events in Anthropic's order, each named as its `type`"
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: BlockOut


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing new; the stream is alive."""


BlockEvent = BlockStart | BlockDelta | BlockStop
StreamEvent = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping


class Blocks:
    """From an answer's events to those of its content blocks.

    shows_thinking: else a block of thinking has its signature alone. calls: how many there were.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self.calls = 0
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: type[BlockOut] | None = None

    def feed(self, events: Iterable[Event]) -> list[BlockEvent]:
        found: list[BlockEvent] = []
        for event in events:
            if isinstance(event, Content):
                found += self._text(event.text)
            elif isinstance(event, Reasoning):
                found += self._thinking(event.text)
            elif isinstance(event, CallBegin):
                self.calls += 1
                found += self._begin(ToolUseOut(call_id(event.id), event.name, {}))
            elif isinstance(event, CallArguments):
                found.append(BlockDelta(self._index, InputDelta(event.text)))
            elif isinstance(event, CallEnd):
                found += self.finish()
        return found

    def finish(self) -> list[BlockEvent]:
        """The end of a block that is not complete: the answer is."""
        if self._open is None:
            return []
        signed = self._open is ThinkingOut
        self._open = None
        end: list[BlockEvent] = [BlockStop(self._index)]
        return [BlockDelta(self._index, SignatureDelta(SIGNATURE)), *end] if signed else end

    def _text(self, text: str) -> list[BlockEvent]:
        begun = [] if self._open is TextOut else self._begin(TextOut(""))
        return [*begun, BlockDelta(self._index, TextDelta(text))]

    def _thinking(self, text: str) -> list[BlockEvent]:
        begun = [] if self._open is ThinkingOut else self._begin(ThinkingOut("", ""))
        if not self._shows_thinking:
            return begun
        return [*begun, BlockDelta(self._index, ThinkingDelta(text))]

    def _begin(self, block: BlockOut) -> list[BlockEvent]:
        ended = self.finish()
        self._index += 1
        self._open = type(block)
        return [*ended, BlockStart(self._index, block)]


def content(events: Iterable[BlockEvent]) -> list[BlockOut]:
    """The blocks that a reader of these events has at their end."""
    blocks: list[BlockOut] = []
    inputs: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, BlockStart):
            blocks.append(msgspec.structs.replace(event.content_block))
        elif isinstance(event, BlockDelta):
            _add(blocks[event.index], event, inputs)
    for index, parts in inputs.items():
        block = blocks[index]
        assert isinstance(block, ToolUseOut)
        block.input = complete_part("".join(parts))
    return blocks


def _add(block: BlockOut, event: BlockDelta, inputs: dict[int, list[str]]) -> None:
    delta = event.delta
    if isinstance(delta, InputDelta):
        inputs.setdefault(event.index, []).append(delta.partial_json)
    elif isinstance(delta, TextDelta) and isinstance(block, TextOut):
        block.text += delta.text
    elif isinstance(delta, ThinkingDelta) and isinstance(block, ThinkingOut):
        block.thinking += delta.thinking
    elif isinstance(delta, SignatureDelta) and isinstance(block, ThinkingOut):
        block.signature = delta.signature


def call_id(name: str) -> str:
    """A call's id here, from the one that its format gave it."""
    return TOOL_USE + name.removeprefix(CALL_ID)


def stop_of(
    reason: FinishReason | None, stop: int | str | None, calls: int
) -> tuple[StopReason, str | None]:
    """(stop_reason, stop_sequence) of an answer that ended so, after so many calls."""
    if reason == "length":
        return "max_tokens", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if calls else "end_turn"), None


def complete_part(text: str) -> dict[str, Any]:
    """The object whose JSON this is; of one that was cut off, the values that are whole."""
    try:
        found = json.loads(text or "{}", parse_int=_integer)
    except ValueError:
        found = json.loads(_closed(text), parse_int=_integer)
    except RecursionError:  # as an object it cannot be sent
        return {}
    if not isinstance(found, dict):
        return {}
    return _without_halves(found) if "\\u" in text else found


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _LONG_INTEGER else float(digits)


def _without_halves(found: dict[str, Any]) -> dict[str, Any]:
    """The same, with U+FFFD for halves of surrogate pairs, which only JSON can spell."""
    text = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
    made: dict[str, Any] = json.loads(text.decode("utf-16", "replace"))
    return made


def _closed(text: str) -> str:
    """The beginning of JSON text, up to its last whole value, with its brackets closed."""
    closers: list[str] = []
    best, quoted, escaped, before = "{}", False, False, ""
    for i, letter in enumerate(text):
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
            if not quoted and (before == ":" or closers[-1:] == ["]"]):
                best = text[: i + 1] + "".join(reversed(closers))
            continue
        if letter == '"':
            quoted = True
            continue
        if letter == ",":
            best = text[:i] + "".join(reversed(closers))
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            best = text[: i + 1] + "".join(reversed(closers))
        elif letter in "}]":
            closers.pop()
            best = text[: i + 1] + "".join(reversed(closers))
        if not letter.isspace():
            before = letter
    return best
