"""The tools of a Responses request: what the model is offered, and what its calls are called.

The model knows functions alone. A custom tool is one with a single text `input`, and a tool of a
namespace has the namespace in its name; calls are answered under the names that the client gave.
Tools that the server would have to run are left out.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from octavo.errors import RequestError, nearest, shown
from octavo.server.protocol import Body, NeutralValues, inner, object_at
from octavo.text.tool_request import ToolChoice, allowed, check_count, checked, read_choice
from octavo.text.tool_request import tool as checked_tool
from octavo.text.tools.base import Tool

Kind = Literal["function", "custom"]
_OFFERED = ("function", "custom", "namespace")
_LONGEST_NAME = 64  # of a function that a model is offered
_SEPARATOR = "__"


class _Tool(Body, kw_only=True):
    """What tools of both kinds have. `defer_loading` has no effect: there is no search for tools,
    so that all are offered."""

    refused: ClassVar[NeutralValues] = {"allowed_callers": (["direct"],), "async": (False,)}
    type: str
    name: str
    description: str | None = None
    defer_loading: bool | None = None


class FunctionTool(_Tool, kw_only=True):
    """`output_schema`, of what the function returns, has no effect on calls."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(_Tool, kw_only=True):
    format: dict[str, Any] | None = None


class Namespace(Body, kw_only=True):
    type: str
    name: str
    tools: list[Any]
    description: str | None = None


class ToolName(msgspec.Struct, frozen=True):
    """What the client calls a tool."""

    kind: Kind
    name: str
    namespace: str | None = None


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of a request.

    functions: what a model is offered. places: the path of each in the body. names: of each
    function, by the model's name for it. echo: the tools that are offered, as they were given.
    left_out: the types of the others.
    """

    functions: tuple[Tool, ...] = ()
    places: tuple[str, ...] = ()
    names: Mapping[str, ToolName] = {}
    echo: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()

    def name_of(self, function: str) -> ToolName:
        """What the client calls the function that a model called."""
        return self.names.get(function) or ToolName("function", function)


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function for a model; one that would be too long has a digest at its end."""
    if not namespace:
        return name
    separator = "" if namespace.endswith(_SEPARATOR) else _SEPARATOR
    full = f"{namespace}{separator}{name}"
    if len(full) <= _LONGEST_NAME:
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()[:8]
    return f"{full[: _LONGEST_NAME - 9]}_{digest}"


def toolbox(places: Sequence[tuple[str, Any]]) -> Toolbox:
    """The tools of a request, each with its path in the body. Raises RequestError."""
    found = _Collected()
    echo = [given for where, tool in places if (given := found.add(tool, where)) is not None]
    functions = tuple(found.functions.values())
    return Toolbox(
        checked(functions) if functions else (),
        tuple(found.places),
        found.names,
        tuple(echo),
        tuple(dict.fromkeys(found.left_out)),
    )


class _Collected:
    def __init__(self) -> None:
        self.functions: dict[str, Tool] = {}
        self.places: list[str] = []
        self.names: dict[str, ToolName] = {}
        self.left_out: list[str] = []

    def add(
        self, tool: object, where: str, namespace: Namespace | None = None
    ) -> dict[str, Any] | None:
        """Take a tool in; what is echoed of it, None for one that is left out."""
        kind = _type(tool, where)
        if kind == "function":
            return self._function(inner(tool, FunctionTool, where), where, namespace)
        if kind == "custom":
            return self._custom(inner(tool, CustomTool, where), where, namespace)
        if kind == "namespace" and namespace is None:
            return self._namespace(inner(tool, Namespace, where), where)
        self.left_out.append(kind)
        return None

    def _namespace(self, space: Namespace, where: str) -> dict[str, Any] | None:
        tools = [
            given
            for i, tool in enumerate(space.tools)
            if (given := self.add(tool, f"{where}.tools[{i}]", space)) is not None
        ]
        if not tools:
            return None
        return {
            "type": "namespace",
            "name": space.name,
            "description": space.description or "",
            "tools": tools,
        }

    def _function(self, tool: FunctionTool, where: str, space: Namespace | None) -> dict[str, Any]:
        strict = tool.strict is not False
        self._offer("function", tool, where, space, tool.parameters, strict)
        return {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters or {},
            "strict": strict,
        }

    def _custom(self, tool: CustomTool, where: str, space: Namespace | None) -> dict[str, Any]:
        text, note = _custom_input(tool.format or {"type": "text"}, f"{where}.format")
        parameters = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        self._offer("custom", tool, where, space, parameters, True, note)
        return {
            "type": "custom",
            "name": tool.name,
            "description": tool.description,
            "format": tool.format or {"type": "text"},
        }

    def _offer(
        self,
        kind: Kind,
        tool: _Tool,
        where: str,
        space: Namespace | None,
        parameters: Mapping[str, Any] | None,
        strict: bool,
        note: str = "",
    ) -> None:
        name = flat_name(tool.name, space.name if space else None)
        if name in self.functions:
            raise RequestError(
                f"{where}.name: two tools are called {shown(tool.name, 60)}", f"{where}.name"
            )
        told = tool.description or (space.description if space else None) or ""
        description = "\n\n".join(part for part in (told, note) if part) or None
        check_count(len(self.functions) + 1)
        self.functions[name] = checked_tool(name, description, parameters, strict, where)
        self.places.append(where)
        self.names[name] = ToolName(kind, tool.name, space.name if space else None)


def _type(tool: object, where: str) -> str:
    """A tool's type. A misspelled one is an error; others that are not known are left out."""
    kind = object_at(tool, where).get("type")
    if not isinstance(kind, str):
        raise RequestError(
            f"{where}.type must be one of {', '.join(_OFFERED)}, not {shown(kind, 60)}",
            f"{where}.type",
        )
    if kind not in _OFFERED and (hint := nearest(kind[:60], _OFFERED)):
        raise RequestError(f"{where}.type is {shown(kind, 60)}{hint}", f"{where}.type")
    return kind[:60]


def _custom_input(form: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The schema of a custom tool's input, and what its description says of it.

    An expression is enforced. A grammar is shown to the model: inside a JSON text it cannot be.
    """
    kind, syntax, definition = (form.get(name) for name in ("type", "syntax", "definition"))
    if kind == "text":
        return {"type": "string"}, ""
    if kind != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError(
            f"{where} must have the type text, or grammar with a syntax (lark, regex) and a "
            f"definition, not {shown(form, 100)}",
            where,
        )
    if syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{definition})$"}, ""
    return {"type": "string"}, f"The input matches this grammar, in Lark's form:\n{definition}"


def tool_choice(given: str | Mapping[str, Any] | None, tools: Toolbox) -> ToolChoice:
    """Which of the tools may be called. Raises RequestError for what they cannot meet."""
    if given is None or isinstance(given, str):
        if not tools.functions and given == "required":
            raise _no_tool("required", tools)
        if not tools.functions and given == "auto":
            return ToolChoice("none")
        return read_choice(given, tools.functions)

    def name_of(item: object, where: str) -> str:
        return _chosen(item, tools, where)

    if given.get("type") == "allowed_tools":
        return allowed(given, "tool_choice", name_of)
    return ToolChoice("required", name_of(given, "tool_choice"))


def _chosen(given: object, tools: Toolbox, where: str) -> str:
    """The function that an object of `tool_choice` names."""
    fields = object_at(given, where)
    kind, name, namespace = (fields.get(key) for key in ("type", "name", "namespace"))
    if kind not in ("function", "custom"):
        if kind in tools.left_out:
            raise RequestError(f"{where}: this server cannot run {shown(kind, 60)}", where)
        raise RequestError(
            f"{where}.type must be function, custom or allowed_tools, not {shown(kind, 60)}",
            f"{where}.type",
        )
    for function, tool in tools.names.items():
        if (tool.kind, tool.name) == (kind, name) and namespace in (None, tool.namespace):
            return function
    raise RequestError(
        f"{where}.name: no {kind} tool of this request is called {shown(name, 60)}",
        f"{where}.name",
    )


def _no_tool(choice: str, tools: Toolbox) -> RequestError:
    why = f"; this server cannot run {', '.join(tools.left_out)}" if tools.left_out else ""
    return RequestError(f"tool_choice is {choice}, but no tool is offered{why}", "tool_choice")
