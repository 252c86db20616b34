"""Bodies of the Messages API: what is taken, and what is refused by the name of its place."""

import json

import pytest

from octavo.errors import RequestError
from octavo.server.messages_protocol import (
    ChooseAny,
    ClearThinking,
    MessagesBody,
    PromptBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo.server.protocol import parse

HI = [{"role": "user", "content": "hi"}]
GOOD = {"model": "m", "max_tokens": 16, "messages": HI}
MARK = {"type": "ephemeral", "ttl": "1h"}


def read(kind=MessagesBody, **fields):
    return parse(json.dumps({**GOOD, **fields}).encode(), kind)


def refused(kind=MessagesBody, **fields):
    with pytest.raises(RequestError) as found:
        read(kind, **fields)
    return found.value


def block(value, role="user"):
    return {"messages": [{"role": role, "content": [value]}]}


def test_blocks_are_read_with_and_without_cache_marks():
    for extra in ({}, {"cache_control": MARK}, {"cache_control": None}):
        user = [
            {"type": "tool_result", "tool_use_id": "a", "is_error": True, **extra,
             "content": [{"type": "text", "text": "x", **extra},
                         {"type": "tool_reference", "tool_name": "f", **extra}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "plain", **extra},
            {"type": "tool_result", "tool_use_id": "c", **extra},
            {"type": "text", "text": "y", "citations": None, **extra},
        ]  # fmt: skip
        assistant = [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"b": [None]},
             "caller": {"type": "direct"}, **extra},
        ]  # fmt: skip
        roles = {"user": user, "assistant": assistant, "system": [{"type": "text", "text": "z"}]}
        body = read(messages=[{"role": role, "content": c} for role, c in roles.items()])
        given, called, system = (message.content for message in body.messages)
        assert [type(b) for b in given] == [ToolResultBlock] * 3 + [TextBlock]
        assert [type(part) for part in given[0].content] == [TextBlock, ToolReferenceBlock]
        assert [type(b) for b in called] == [ThinkingBlock, RedactedThinkingBlock, ToolUseBlock]
        assert called[2].input == {"b": [None]}
        assert system[0].text == "z"


def test_the_other_objects_are_read():
    body = read(
        system=[{"type": "text", "text": "s", "cache_control": MARK}],
        tools=[
            {"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK},
            {"name": "g", "input_schema": {}, "type": "custom", "description": "d",
             "strict": True, "defer_loading": True, "eager_input_streaming": True,
             "allowed_callers": ["direct"], "input_examples": [{"a": 1}]},
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048, "display": "omitted"},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"a": None}}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stop_sequences=["x"], temperature=1, top_p=0.5, top_k=4.0, stream=True,
    )  # fmt: skip
    assert body.system[0].text == "s"
    assert [tool.strict for tool in body.tools] == [None, True]
    assert body.tool_choice == ChooseAny(disable_parallel_tool_use=True)
    assert body.thinking == ThinkingEnabled(budget_tokens=2048, display="omitted")
    assert body.output_config.format.schema == {"a": None}
    assert body.context_management.edits == [ClearThinking(keep="all")]
    assert body.top_k == 4


def test_what_clients_send_for_anthropic_alone_is_taken():
    extras = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": MARK,
        "betas": ["interleaved-thinking-2025-05-14"], "anthropic_beta": ["x"],
        "anthropic_version": "2023-06-01", "diagnostics": {"previous_message_id": None},
        "inference_geo": "eu", "user_profile_id": "u", "workspace_id": "w", "speed": "standard",
        "mcp_servers": [], "fallbacks": [], "container": None,
    }  # fmt: skip
    for kind in (MessagesBody, PromptBody):
        fields = {k: v for k, v in GOOD.items() if kind is MessagesBody or k != "max_tokens"}
        assert parse(json.dumps({**fields, **extras}).encode(), kind).model == "m"


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_what_must_be_there(name):
    error = refused(**{name: None})
    assert (error.param, str(error)) == (name, f"{name} is missing")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"stop": ["x"]}, "stop", "unknown field"),
        ({"user": "x"}, "user", "unknown field"),
        ({"seed": 1}, "seed", "unknown field"),
        ({"speed": "fast"}, "speed", "not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"container": "c"}, "container", "not supported"),
        ({"max_tokens": "16"}, "max_tokens", "expected int, got str: '16'"),
        ({"messages": {}}, "messages", "must be a list"),
        ({"messages": ["x"]}, "messages[0]", "must be an object, not 'x'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", "expected str"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0]", "content is empty"),
        ({"messages": [*HI, {"role": "user", "content": []}]}, "messages[1]", "content is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got int"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name",
         "unknown field"),
        (block("x"), "messages[0].content[0]", "must be an object"),
        (block({"text": "x"}), "messages[0].content[0].type", "text or tool_result, not None"),
        (block({"type": "tex"}), "messages[0].content[0].type", "did you mean 'text'"),
        (block({"type": ["text"]}), "messages[0].content[0].type", "must be text or"),
        (block({"type": "text"}), "messages[0].content[0].text", "is missing"),
        (block({"type": "text", "text": 5}), "messages[0].content[0].text", "expected str"),
        (block({"type": "text", "text": "x", "texts": 5}), "messages[0].content[0].texts",
         "unknown field"),
        (block({"type": "text", "text": "x", "citations": [{}]}),
         "messages[0].content[0].citations", "not supported"),
        (block({"type": "image", "source": {}}), "messages[0].content[0]", "'image' are not"),
        (block({"type": "document", "source": {}}), "messages[0].content[0]", "not supported"),
        (block({"type": "tool_use", "id": "a", "name": "f", "input": {}}),
         "messages[0].content[0]", "belongs into a message of the role 'assistant', not 'user'"),
        (block({"type": "thinking", "thinking": "x"}), "messages[0].content[0]", "belongs into"),
        (block({"type": "tool_result", "tool_use_id": "a"}, "assistant"),
         "messages[0].content[0]", "belongs into a message of the role 'user'"),
        (block({"type": "tool_result", "tool_use_id": "a"}, "system"), "messages[0].content[0]",
         "belongs into"),
        (block({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
         "messages[0].content[0].content[0].type", "text or tool_reference, not 'image'"),
        (block({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, "assistant"),
         "messages[0].content[0].input", "expected object, got str: '{}'"),
        ({"system": [{"type": "image"}]}, "system[0].type", "must be text"),
        ({"system": 5}, "system", "got int"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "is missing"),
        ({"tools": [{"name": "f", "input_schema": {}, "parameters": {}}]}, "tools[0].parameters",
         "unknown field"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type",
         "no tools of the type 'web_search_20250305'"),
        ({"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["x"]}]},
         "tools[0].allowed_callers", "not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "must be an object"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "auto or any or tool or none"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name", "unknown field"),
        ({"thinking": {"type": "on"}}, "thinking.type", "enabled or adaptive or disabled"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is missing"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens",
         "unknown field"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "huge"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget", "not supported"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type",
         "json_schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0].type", "clear_thinking_20251015"),
        ({"stop_sequences": "x"}, "stop_sequences", "expected array"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields, param, words):
    error = refused(**fields)
    assert error.param == param, str(error)
    assert words in str(error)


def test_a_count_has_no_sampling():
    assert refused(PromptBody).param == "max_tokens"
    raw = json.dumps({"model": "m", "messages": HI, "temperature": 1}).encode()
    with pytest.raises(RequestError, match="temperature"):
        parse(raw, PromptBody)
