"""The tools of a request: what the model is offered, and what its calls are called."""

import pytest

from octavo.errors import RequestError
from octavo.server.responses_tools import ToolName, flat_name, tool_choice, toolbox
from octavo.text.tool_request import ToolChoice
from octavo.text.tools.base import Tool

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch."}


def box(*tools):
    return toolbox([(f"tools[{i}]", tool) for i, tool in enumerate(tools)])


def refused(work, *args):
    with pytest.raises(RequestError) as caught:
        work(*args)
    return caught.value


def test_functions_are_offered_as_they_are():
    tool = {**WEATHER, "description": "Today's.", "strict": False, "defer_loading": True}
    found = box(tool)
    assert found.functions == (Tool("weather", "Today's.", {"type": "object"}, strict=False),)
    assert found.echo[0]["strict"] is False
    assert box(WEATHER).echo[0]["strict"] is True


def test_a_custom_tool_is_a_function_with_one_text():
    found = box(PATCH)
    (function,) = found.functions
    assert function.parameters["properties"] == {"input": {"type": "string"}}
    assert function.parameters["required"] == ["input"]
    assert found.name_of("patch") == ToolName("custom", "patch")
    assert found.echo == ({**PATCH, "format": {"type": "text"}},)


def test_an_expression_is_enforced_and_a_grammar_is_shown():
    regex = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    lark = {**PATCH, "name": "p", "format": {"type": "grammar", "syntax": "lark",
                                             "definition": "start: /x/"}}  # fmt: skip
    one, two = box(regex, lark).functions
    assert one.parameters["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert two.description.startswith("Apply a patch.")
    assert two.description.endswith("start: /x/")


def test_tools_of_a_namespace_have_it_in_their_name_and_are_answered_without():
    space = {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Files.",
        "tools": [{**WEATHER, "name": "read"}, {**PATCH, "name": "write"}, {"type": "web_search"}],
    }
    found = box(space, {**WEATHER, "name": "read"})
    names = [tool.name for tool in found.functions]
    assert names == ["mcp__files__read", "mcp__files__write", "read"]
    assert found.functions[0].description == "Files."
    assert found.name_of("mcp__files__read") == ToolName("function", "read", "mcp__files")
    assert found.name_of("mcp__files__write") == ToolName("custom", "write", "mcp__files")
    assert found.places == ("tools[0].tools[0]", "tools[0].tools[1]", "tools[1]")
    assert [tool["name"] for tool in found.echo[0]["tools"]] == ["read", "write"]
    assert flat_name("read", "mcp__files__") == "mcp__files__read"


def test_a_flat_name_is_never_too_long_and_stays_apart():
    names = {flat_name("a" * 60 + end, "b" * 60) for end in ("x", "y")}
    assert [len(name) for name in names] == [64, 64]


def test_tools_that_cannot_run_here_are_left_out_and_named():
    odd = ("web_search", "image_generation", "local_shell", "mcp", "tool_search", "web_search")
    found = box(*({"type": kind} for kind in odd), WEATHER)
    assert found.left_out == ("web_search", "image_generation", "local_shell", "mcp", "tool_search")
    assert [tool["name"] for tool in found.echo] == ["weather"]
    assert box({"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}).echo == ()


@pytest.mark.parametrize(
    ("tool", "param", "says"),
    [
        ("x", "tools[0]", "an object"),
        ({"name": "f"}, "tools[0].type", "one of function"),
        ({"type": "fucntion", "name": "f"}, "tools[0].type", "did you mean 'function'"),
        ({"type": "function"}, "tools[0].name", "missing"),
        ({"type": "function", "name": 3}, "tools[0].name", "expected"),
        ({**WEATHER, "parameters": "x"}, "tools[0].parameters", "expected"),
        ({**WEATHER, "function": {}}, "tools[0].function", "unknown field"),
        ({**WEATHER, "async": True}, "tools[0].async", "not supported"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}},
         "tools[0].format", "lark, regex"),
        ({**WEATHER, "name": "a b"}, "tools[0].name", "A-Z"),
        ({**WEATHER, "parameters": {"type": "array"}}, "tools[0].parameters.type", "object"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function"}]},
         "tools[0].tools[0].name", "missing"),
    ],
)  # fmt: skip
def test_a_bad_tool_is_refused_by_its_path(tool, param, says):
    error = refused(box, tool)
    assert (error.param, says in str(error)) == (param, True), error


def test_two_tools_of_one_name_are_refused():
    assert refused(box, WEATHER, {**PATCH, "name": "weather"}).param == "tools[1].name"


def test_a_choice_is_a_mode_or_a_tool():
    found = box(WEATHER, PATCH)
    assert tool_choice(None, found) == tool_choice("auto", found) == ToolChoice("auto")
    assert tool_choice("required", found) == ToolChoice("required")
    assert tool_choice("none", found) == tool_choice("auto", box()) == ToolChoice("none")
    assert tool_choice({"type": "custom", "name": "patch"}, found) == ToolChoice(
        "required", "patch"
    )


def test_allowed_tools_are_those_that_may_be_called():
    patch = {"type": "custom", "name": "patch"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [patch, patch]}
    found = tool_choice(allowed, box(WEATHER, PATCH))
    assert found == ToolChoice("required", None, ("patch",))


@pytest.mark.parametrize(
    ("choice", "param", "says"),
    [
        ("sometimes", "tool_choice", "'sometimes'"),
        ({"type": "function", "name": "g"}, "tool_choice.name", "'g'"),
        ({"type": "custom", "name": "weather"}, "tool_choice.name", "no custom tool"),
        ({"type": "mcp", "server_label": "x"}, "tool_choice", "cannot run"),
        ({"type": "shell"}, "tool_choice.type", "'shell'"),
        ({"type": "allowed_tools", "mode": "x", "tools": []}, "tool_choice.mode", "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools", "list"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
         "tool_choice.tools[0].name", "'g'"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_met_is_refused(choice, param, says):
    error = refused(tool_choice, choice, box(WEATHER, {"type": "mcp"}))
    assert (error.param, says in str(error)) == (param, True), error


def test_required_needs_a_tool_that_is_offered():
    assert "cannot run web_search" in str(
        refused(tool_choice, "required", box({"type": "web_search"}))
    )
