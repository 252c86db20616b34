"""From the items of a Responses request to messages in the form of chat completions.

What an assistant's turn consists of (reasoning, text, calls) comes as items of their own, which
become one message again, so that the template renders the turn as the model wrote it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from octavo.errors import RequestError, RequestTypeError, shown
from octavo.server.protocol import Body, NeutralValues, inner, object_at
from octavo.server.responses_tools import flat_name

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = MappingProxyType(
    {"input_text": "text", "output_text": "text", "refusal": "refusal"}
)  # type -> the field with the text
_STATELESS = MappingProxyType(
    {
        "item_reference": "this server keeps no items; send the item itself",
        "compaction": "it was not made by this server, which cannot read it",
        "compaction_trigger": "this server does not compact conversations",
    }
)


class _Item(Body, kw_only=True):
    """What every item may have, as it came in an answer: nothing of it is needed."""

    type: str | None = None
    id: str | None = None
    status: str | None = None


class _Message(_Item, kw_only=True):
    role: str
    content: str | list[Any]
    phase: str | None = None  # a label of OpenAI's own models
    end_turn: bool | None = None


class _Reasoning(_Item, kw_only=True):
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class _Call(_Item, kw_only=True):
    refused: ClassVar[NeutralValues] = {"caller": ({"type": "direct"},), "async": (False,)}
    call_id: str
    name: str
    namespace: str | None = None


class _FunctionCall(_Call, kw_only=True):
    arguments: str


class _CustomCall(_Call, kw_only=True):
    input: str


class _CallOutput(_Item, kw_only=True):
    refused: ClassVar[NeutralValues] = {"caller": ({"type": "direct"},)}
    call_id: str
    output: str | list[Any]
    name: str | None = None
    namespace: str | None = None


class _AdditionalTools(_Item, kw_only=True):
    tools: list[Any]
    role: str | None = None


class Read(msgspec.Struct, frozen=True):
    """What an input consists of. tools: those among its items, each with its path."""

    messages: list[Message]
    tools: list[tuple[str, Any]]


def read_input(given: str | Sequence[Any], instructions: str | None) -> Read:
    """The messages of `given`, after the instructions. Raises RequestError naming an item."""
    reader = _Reader(instructions)
    if isinstance(given, str):
        reader.add({"role": "user", "content": given})
    else:
        for i, item in enumerate(given):
            reader.item(item, f"input[{i}]")
    for message in reader.messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # of a turn that was cut off while it reasoned
    return Read(reader.messages, reader.tools)


class _Reader:
    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        self.tools: list[tuple[str, Any]] = []
        self._calls: dict[str, bool] = {}  # call_id -> whether its output has come
        if instructions:
            self.add({"role": "system", "content": instructions})

    def add(self, message: Message) -> None:
        """Instructions and what else opens the conversation as system messages are one: templates
        have a place for one."""
        leading = all(m["role"] in ("system", "developer") for m in self.messages)
        if self.messages and leading and message["role"] in ("system", "developer"):
            self.messages[-1]["content"] += "\n\n" + message["content"]
        else:
            self.messages.append(message)

    def item(self, item: object, where: str) -> None:
        fields = object_at(item, where)
        kind = fields.get("type") or ("message" if "role" in fields else None)
        if not isinstance(kind, str) or kind not in _READERS:
            why = _STATELESS.get(kind) if isinstance(kind, str) else None
            known = f"must be one of {', '.join(_READERS)}, not {shown(kind, 60)}"
            raise RequestError(f"{where}.type {why or known}", f"{where}.type")
        _READERS[kind](self, item, where)

    def message(self, item: object, where: str) -> None:
        read = inner(item, _Message, where)
        if read.role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(read.role, 60)}",
                f"{where}.role",
            )
        text = _text(read.content, f"{where}.content")
        turn = self._turn()
        if read.role == "assistant" and turn and not ("content" in turn or "tool_calls" in turn):
            turn["content"] = text
        else:
            self.add({"role": read.role, "content": text})

    def reasoning(self, item: object, where: str) -> None:
        read = inner(item, _Reasoning, where)
        parts = read.content or read.summary or ()
        field = "content" if read.content else "summary"
        if not parts and read.encrypted_content:
            raise RequestError(
                f"{where}.encrypted_content was not made by this server, which cannot read it; "
                "leave the item out",
                f"{where}.encrypted_content",
            )
        texts = [
            _part(part, ("reasoning_text", "summary_text"), f"{where}.{field}[{i}]")
            for i, part in enumerate(parts)
        ]
        if texts:
            self.messages.append({"role": "assistant", "reasoning": "".join(texts)})

    def function_call(self, item: object, where: str) -> None:
        read = inner(item, _FunctionCall, where)
        _check_arguments(read.arguments, f"{where}.arguments")
        self._call(read, read.arguments, where)

    def custom_call(self, item: object, where: str) -> None:
        read = inner(item, _CustomCall, where)
        self._call(read, json.dumps({"input": read.input}, ensure_ascii=False), where)

    def _call(self, call: _Call, arguments: str, where: str) -> None:
        if self._calls.get(call.call_id) is False:  # some models count calls anew in each answer
            raise RequestError(
                f"{where}.call_id: two calls have the call_id {shown(call.call_id, 60)}",
                f"{where}.call_id",
            )
        self._calls[call.call_id] = False
        turn = self._turn()
        if turn is None:
            turn = {"role": "assistant"}
            self.messages.append(turn)
        turn.setdefault("tool_calls", []).append(
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": flat_name(call.name, call.namespace),
                    "arguments": arguments,
                },
            }
        )

    def call_output(self, item: object, where: str) -> None:
        read = inner(item, _CallOutput, where)
        if self._calls.get(read.call_id) is not False:
            state = "is answered twice" if read.call_id in self._calls else "has no call before it"
            raise RequestError(
                f"{where}.call_id {shown(read.call_id, 60)} {state}", f"{where}.call_id"
            )
        self._calls[read.call_id] = True
        text = _text(read.output, f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": read.call_id, "content": text})

    def additional_tools(self, item: object, where: str) -> None:
        read = inner(item, _AdditionalTools, where)
        self.tools += [(f"{where}.tools[{i}]", tool) for i, tool in enumerate(read.tools)]

    def _turn(self) -> Message | None:
        """The assistant's message that the items before this one have begun."""
        last = self.messages[-1] if self.messages else None
        return last if last and last["role"] == "assistant" else None


_Read = Callable[[_Reader, object, str], None]
_READERS: Mapping[str, _Read] = MappingProxyType(
    {
        "message": _Reader.message,
        "reasoning": _Reader.reasoning,
        "function_call": _Reader.function_call,
        "function_call_output": _Reader.call_output,
        "custom_tool_call": _Reader.custom_call,
        "custom_tool_call_output": _Reader.call_output,
        "additional_tools": _Reader.additional_tools,
    }
)


def _text(content: str | list[Any], where: str) -> str:
    """The text of a content, given plain or in parts, which are joined as they are."""
    if isinstance(content, str):
        return content
    return "".join(_part(p, tuple(_TEXT_PARTS), f"{where}[{i}]") for i, p in enumerate(content))


def _part(part: object, known: Sequence[str], where: str) -> str:
    fields = object_at(part, where)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in known:
        raise RequestError(
            f"{where}.type must be one of {', '.join(known)}, not {shown(kind, 60)}: this server "
            "reads text",
            f"{where}.type",
        )
    field = _TEXT_PARTS.get(kind, "text")
    text = fields.get(field)
    if not isinstance(text, str):
        raise RequestTypeError(
            f"{where}.{field} must be text, not {shown(text, 60)}", f"{where}.{field}"
        )
    return text


def _check_arguments(text: str, where: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {str(error)[:100]}", where) from None
    if not isinstance(value, dict):
        raise RequestError(
            f"{where} must be the JSON text of an object, not {shown(text, 60)}", where
        )
