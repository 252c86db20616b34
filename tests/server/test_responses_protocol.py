"""Bodies of `/v1/responses`: whatever is in one, it is read, or refused by its field."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.server.protocol import parse
from octavo.server.responses_input import read_input
from octavo.server.responses_protocol import (
    ResponsesBody,
    field_names,
    responses_params,
)
from octavo.server.responses_tools import tool_choice, toolbox

GOOD = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d",
         "output": [{"type": "input_text", "text": "x"}]},
    ],
    "instructions": "i",
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "p",
         "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        {"type": "namespace", "name": "n", "description": "d",
         "tools": [{"type": "function", "name": "g"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}]},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
             "verbosity": "medium"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "max_output_tokens": 9,
    "stop": ["x"],
}  # fmt: skip


def read(body):
    found = parse(json.dumps(body).encode(), ResponsesBody)
    params = responses_params(found, {})
    messages = read_input(found.input, found.instructions)
    given = [(f"tools[{i}]", tool) for i, tool in enumerate(found.tools or ())]
    tools = toolbox(given + messages.tools)
    return params, messages, tools, tool_choice(found.tool_choice, tools)


def paths(value, at=()):
    """Of everything in a body."""
    yield at
    entries = (
        value.items() if isinstance(value, dict)
        else enumerate(value) if isinstance(value, list)
        else ()
    )  # fmt: skip
    for key, inner in entries:
        yield from paths(inner, (*at, key))


def outcome(body):
    """The refusal, or None."""
    try:
        read(body)
    except RequestError as error:
        return error
    return None


def put(body, path, value):
    changed = copy.deepcopy(body)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["function", "custom", "message", "reasoning", "web_search", "auto"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.sampled_from(["type", "name"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
PLACES = [path for path in paths(GOOD) if path]


def test_a_body_with_everything_is_read():
    params, messages, tools, choice = read(GOOD)
    assert (params.max_tokens, params.logprobs) == (9, 2)
    assert [m["role"] for m in messages.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert [tool.name for tool in tools.functions] == ["f", "p", "n__g"]
    assert choice.allowed == ("f",)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_read_or_refused_by_its_field(path, value):
    error = outcome(put(GOOD, path, value))
    # A number that is none in JSON is an error of the body's text.
    assert error is None or error.param or "not valid JSON" in str(error)
    assert error is None or len(str(error)) < 1000


@pytest.mark.parametrize(
    ("error", "param", "says"),
    [
        (RequestError("max_tokens must be 1", "max_tokens"), "max_output_tokens",
         "max_output_tokens must be 1"),
        (RequestError("all messages are odd", "messages"), "input", "all messages are odd"),
        (RequestError("messages[1] is odd", "messages[1]"), "input[1]", "input[1] is odd"),
        (RequestError("tools[1].function.name is", "tools[1].function.name"),
         "tools[4].tools[0].name", "tools[4].tools[0].name is"),
        (RequestError("other", None), None, "other"),
    ],
)  # fmt: skip
def test_errors_have_the_names_of_this_api(error, param, says):
    body = ResponsesBody(input="")
    with (
        pytest.raises(RequestError) as caught,
        field_names(body, ("tools[0]", "tools[4].tools[0]")),
    ):
        raise error
    assert (caught.value.param, str(caught.value)) == (param, says)
