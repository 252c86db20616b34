"""What a chat template does with messages where most conversations have none.

Many templates know a system message at the beginning only: one further on is refused, left out, or
moved to the front. Some want a tool's result to be followed by the assistant. It is found out by
rendering such conversations; no list of models says it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.text.chat import encode_chat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.base import ToolFormat

_CALL = {
    "id": "call00001",  # in the form of the strictest templates
    "type": "function",
    "function": {"name": "probe", "arguments": {"a": 1}},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


class Placement(msgspec.Struct, frozen=True):
    """system: a system message is written where it stands, also after the first message.
    user_after_tool: so is a user's message after a tool's result."""

    system: bool
    user_after_tool: bool


def placement(
    tokenizer: Tokenizer, chat_template: str | None, tool_format: ToolFormat | None = None
) -> Placement:
    """What the template does. chat_template, tool_format: as in `encode_chat`."""

    def keeps(*roles: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        texts = [f"octavo-probe-{number}" for number in range(len(roles))]
        messages = [_message(role, text) for role, text in zip(roles, texts, strict=True)]
        try:
            prompt = encode_chat(
                tokenizer,
                messages,
                chat_template=chat_template,
                tools=tools,
                tool_format=tool_format,
            ).text
        except RequestError:
            return False
        shown = [
            text for text, message in zip(texts, messages, strict=True) if "content" in message
        ]
        places = [prompt.find(text) for text in shown]
        once = all(prompt.count(text) == 1 for text in shown)
        return once and places == sorted(places)

    turns = ("system", "user", "system", "assistant", "user", "system")
    with_tools = not keeps("user", tools=_TOOLS) or keeps(*turns, tools=_TOOLS)
    return Placement(
        system=keeps(*turns) and with_tools,
        user_after_tool=keeps("user", "call", "tool", "user", tools=_TOOLS),
    )


def _message(role: str, text: str) -> dict[str, Any]:
    if role == "call":
        return {"role": "assistant", "tool_calls": [_CALL]}
    message = {"role": role, "content": text}
    return {**message, "tool_call_id": _CALL["id"], "name": "probe"} if role == "tool" else message
