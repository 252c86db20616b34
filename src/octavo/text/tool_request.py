"""What a request says of tools, checked: which there are, and whether one must be called.

The shapes are those of OpenAI's chat completions; APIs that write tools otherwise make each with
`tool`. How a model writes its calls is `octavo.text.tools`'s part.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError, RequestTypeError, nearest, shown
from octavo.text.tools.base import Tool

Mode = Literal["none", "auto", "required"]

_MODES = ("none", "auto", "required")
_MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")  # of a tool
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools are called. name: the one that must be. allowed: those that may be; None: all.
    The prompt shows all of them in any case but `none`, where the operator says."""

    mode: Mode = "none"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.mode == "none":
            return ()
        names = self.allowed if self.name is None else (self.name,)
        return tuple(tool for tool in tools if names is None or tool.name in names)


def read_tools(given: object) -> tuple[Tool, ...]:
    """The tools of a field `tools`. Raises RequestError."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestTypeError(f"tools must be a list of tools, not {shown(given)}", "tools")
    check_count(len(given))
    tools = tuple(_chat_tool(value, f"tools[{i}]") for i, value in enumerate(given))
    return checked(tools)


def checked(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """`tools`, of which there must be some, with different names."""
    if not tools:
        raise RequestError(f"{param} is empty; leave it out, or describe a tool", param)
    check_count(len(tools), param)
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"{param}[{i}]: two tools are named {tool.name!r}", f"{param}[{i}]")
        seen.add(tool.name)
    return tuple(tools)


def check_count(count: int, param: str = "tools") -> None:
    """Raise RequestError for more tools than one request may have."""
    if count > _MAX_TOOLS:
        raise RequestError(f"{param} has {count} tools, more than {_MAX_TOOLS}", param)


def tool(name: object, description: object, parameters: object, strict: object, where: str) -> Tool:
    """One tool, of an object whose fields have these values. where: its path in the body."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not {shown(name)}",
            f"{where}.name",
        )
    if description is not None and not isinstance(description, str):
        raise RequestTypeError(
            f"{where}.description must be a text, not {shown(description)}", f"{where}.description"
        )
    if strict is not None and not isinstance(strict, bool):
        raise RequestTypeError(
            f"{where}.strict must be true or false, not {shown(strict)}", f"{where}.strict"
        )
    return Tool(name, description, _parameters(parameters, where), strict is not False)


def described(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates show them: the same for each API, so that prompts are too."""
    found = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = dict(tool.parameters)
        found.append({"type": "function", "function": function})
    return found


def read_choice(given: object, tools: Sequence[Tool]) -> ToolChoice:
    """The choice of a field `tool_choice` (None: absent) among `tools`. Raises RequestError."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(given, str):
        return _mode(given, tools)
    if not isinstance(given, Mapping):
        raise RequestTypeError(
            f"tool_choice must be one of {', '.join(_MODES)}, or an object that names a function, "
            f"not {shown(given)}",
            "tool_choice",
        )
    if not tools:
        raise RequestError("tool_choice needs tools", "tool_choice")
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, tools)
    if kind != "function":
        raise RequestError(
            f"tool_choice.type must be 'function' or 'allowed_tools', not {shown(kind)}",
            "tool_choice.type",
        )
    return ToolChoice("required", _function_name(given, "tool_choice", tools))


def allowed(
    fields: Mapping[str, Any], where: str, name_of: Callable[[object, str], str]
) -> ToolChoice:
    """OpenAI's way to show a model more tools than it may call at the moment.

    fields: has `mode` and `tools`, at the path `where`. name_of: from an item of these tools and
    its path to the tool's name. Raises RequestError.
    """
    mode, listed = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(
            f"{where}.mode must be 'auto' or 'required', not {shown(mode)}", f"{where}.mode"
        )
    if not isinstance(listed, list) or not listed:
        raise RequestError(
            f"{where}.tools must be a list of tools, not {shown(listed)}", f"{where}.tools"
        )
    names = [name_of(item, f"{where}.tools[{i}]") for i, item in enumerate(listed)]
    return ToolChoice("auto" if mode == "auto" else "required", None, tuple(dict.fromkeys(names)))


def named(name: object, tools: Sequence[Tool], where: str = "tool_choice") -> str:
    """A name, of `tools`. Raises RequestError."""
    names = [tool.name for tool in tools]
    if name not in names:
        hint = nearest(name[:64], names) if isinstance(name, str) else ""
        raise RequestError(f"{where} names {shown(name)}, which is not in tools{hint}", where)
    assert isinstance(name, str)
    return name


def _chat_tool(value: object, where: str) -> Tool:
    fields = _fields(value, ("type", "function"), where)
    if fields.get("type") != "function":
        raise RequestError(
            f"{where}.type must be 'function', not {shown(fields.get('type'))}", f"{where}.type"
        )
    where = f"{where}.function"
    known = ("name", "description", "parameters", "strict")
    function = _fields(fields.get("function"), known, where)
    name, description, parameters, strict = map(function.get, known)
    return tool(name, description, parameters, strict, where)


def _fields(value: object, known: Sequence[str], where: str) -> dict[str, Any]:
    """The fields of an object that are not null."""
    if not isinstance(value, Mapping):
        raise RequestTypeError(f"{where} must be an object, not {shown(value)}", where)
    for name in value:
        if name not in known:
            name = str(name)[:60]
            raise RequestError(
                f"unknown field {where}.{name!r}{nearest(name, known)}", f"{where}.{name}"
            )
    return {name: item for name, item in value.items() if item is not None}


def _parameters(given: object, where: str) -> Mapping[str, Any]:
    where = f"{where}.parameters"
    if given is None:
        return _NO_PARAMETERS
    if not isinstance(given, Mapping):
        raise RequestTypeError(
            f"{where} must be a JSON Schema, an object, not {shown(given)}", where
        )
    if given.get("type", "object") != "object":
        raise RequestError(
            f"{where}.type must be 'object', not {shown(given['type'])}: arguments have names",
            f"{where}.type",
        )
    return given


def _mode(given: str, tools: Sequence[Tool]) -> ToolChoice:
    if given == "none":
        return ToolChoice("none")
    if given not in _MODES:
        raise RequestError(
            f"tool_choice must be one of {', '.join(_MODES)}, or an object that names a function, "
            f"not {shown(given)}",
            "tool_choice",
        )
    if not tools:
        raise RequestError(f"tool_choice={given!r} needs tools", "tool_choice")
    return ToolChoice("required" if given == "required" else "auto")


def _allowed(given: Mapping[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    fields = _fields(given, ("type", "allowed_tools"), "tool_choice")
    inner = _fields(fields.get("allowed_tools"), ("mode", "tools"), where)
    return allowed(inner, where, lambda item, place: _function_name(item, place, tools))


def _function_name(value: object, where: str, tools: Sequence[Tool]) -> str:
    fields = _fields(value, ("type", "function"), where)
    function = _fields(fields.get("function"), ("name",), f"{where}.function")
    return named(function.get("name"), tools, f"{where}.function.name")
