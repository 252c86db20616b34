"""Tools in the prompts of models whose chat template knows none: told in words.

The descriptions go into the system message; calls become the text that the model has written, and
their results a message of the user's. So a model that was never taught tools sees what it may
call, and what came of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.tools.base import Call, ToolFormat

_TOLD = """\
# Tools

You may call these functions:
{functions}

To call one, write:
{example}"""
_EXAMPLE = Call("FUNCTION", {"ARGUMENT": "VALUE"})


def told(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_format: ToolFormat,
) -> list[dict[str, Any]]:
    """Checked messages (arguments are objects) without calls and results; tools: to describe."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "results": True})
        else:
            found.append(_with_calls_in_text(message, tool_format))
    if tools:
        found = _with_system(found, _description(tools, tool_format))
    return [{k: v for k, v in message.items() if k != "results"} for message in found]


def _with_calls_in_text(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        text = tool_format.write(
            [Call(f.get("name") or "", f.get("arguments") or {}) for f in functions]
        )
        content = message.get("content")
        made["content"] = f"{content}\n{text}" if content else text
    return made


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools)
    return _TOLD.format(functions=functions, example=tool_format.write([_EXAMPLE]))


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
