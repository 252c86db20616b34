"""From input items to messages: what an agent sends back is the turn that the model wrote."""

import json

import pytest

from octavo.errors import RequestError
from octavo.server.responses_input import read_input

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}


def messages(*items, instructions=None):
    return read_input(list(items), instructions).messages


def refused(*items):
    with pytest.raises(RequestError) as caught:
        messages(*items)
    return caught.value


def test_a_text_is_the_user_s_and_instructions_stand_before_it():
    assert read_input("hi", None).messages == [USER]
    assert read_input("hi", "Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        USER,
    ]


def test_a_turn_of_reasoning_text_and_calls_is_one_message():
    turn = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "status": "completed",
            "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": text} for text in ("I ", "see")],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Let me", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed", "namespace": None},
        {**CALL, "call_id": "call_2", "name": "get", "namespace": "mcp__files__"},
        OUTPUT,
        {**OUTPUT, "call_id": "call_2", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": "done"},
    ]  # fmt: skip
    assert messages(USER, *turn) == [
        USER,
        {
            "role": "assistant",
            "reasoning": "I see",
            "content": "Let me",
            "tool_calls": [
                {"id": "call_1", "type": "function",
                 "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "function",
                 "function": {"name": "mcp__files__get", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "tool", "tool_call_id": "call_2", "content": "x"},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip


def test_reasoning_and_text_after_calls_are_turns_of_their_own():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    found = messages(USER, CALL, {"role": "assistant", "content": "x"}, OUTPUT, thought)
    assert [m["role"] for m in found] == ["user", "assistant", "assistant", "tool", "assistant"]
    assert found[-1] == {"role": "assistant", "reasoning": "so", "content": ""}


def test_a_custom_call_is_one_of_a_function_with_an_input():
    text = 'a "b"\nč'
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": text}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    found = messages(USER, call, output)[1]["tool_calls"][0]["function"]
    assert found["name"] == "patch"
    assert json.loads(found["arguments"]) == {"input": text}


def test_system_messages_at_the_beginning_are_one():
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Rules"}]}
    found = messages(developer, {"role": "system", "content": "More"}, USER, developer,
                     instructions="You are")  # fmt: skip
    assert found == [
        {"role": "system", "content": "You are\n\nRules\n\nMore"},
        USER,
        {"role": "developer", "content": "Rules"},
    ]


def test_call_ids_may_begin_anew_in_the_next_answer():
    assert len(messages(USER, CALL, OUTPUT, CALL, OUTPUT)) == 5


def test_tools_among_the_items_have_their_path():
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom"}]}
    read = read_input([USER, item], None)
    assert read.messages == [USER]
    assert read.tools == [("input[1].tools[0]", {"type": "custom"})]


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        (1, "input[1]", "an object"),
        ({}, "input[1].type", "one of message"),
        ({"type": "image"}, "input[1].type", "'image'"),
        ({"type": ["x"]}, "input[1].type", "one of"),
        ({"type": "item_reference", "id": "x"}, "input[1].type", "send the item itself"),
        ({"role": "robot", "content": ""}, "input[1].role", "'robot'"),
        ({"role": "user"}, "input[1].content", "missing"),
        ({"role": "user", "content": 1}, "input[1].content", "expected"),
        ({"role": "user", "content": "", "colour": 1}, "input[1].colour", "unknown field"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
         "input[1].content[0].type", "reads text"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text",
         "must be text"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]", "an object"),
        (OUTPUT, "input[1].call_id", "no call before it"),
        ({**CALL, "arguments": "{"}, "input[1].arguments", "not JSON"),
        ({**CALL, "arguments": "[" * 100_000}, "input[1].arguments", "not JSON"),
        ({**CALL, "arguments": "[1]"}, "input[1].arguments", "an object"),
        ({**CALL, "arguments": {"a": 1}}, "input[1].arguments", "expected str"),
        ({**CALL, "caller": {"type": "program"}}, "input[1].caller", "not supported"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id", "missing"),
        ({"type": "reasoning", "encrypted_content": "x"}, "input[1].encrypted_content",
         "cannot read"),
        ({"type": "reasoning", "content": [{"type": "x"}]}, "input[1].content[0].type",
         "reasoning_text"),
    ],
)  # fmt: skip
def test_a_bad_item_is_refused_by_its_path(item, param, says):
    error = refused(USER, item)
    assert (error.param, says in str(error)) == (param, True), error
    assert len(str(error)) < 500


def test_a_call_that_is_answered_twice_and_two_that_share_an_id_are_refused():
    assert refused(USER, CALL, OUTPUT, OUTPUT).param == "input[3].call_id"
    assert refused(USER, CALL, CALL).param == "input[2].call_id"
