"""Messages of the Messages API as chat messages: what becomes of blocks, and where they stand."""

import json

import pytest

from octavo.errors import RequestError
from octavo.server.messages_protocol import MessagesBody
from octavo.server.messages_turns import chat_messages
from octavo.server.protocol import parse
from octavo.text.placement import Placement

ANYWHERE = Placement(system=True, user_after_tool=True)
STRICT = Placement(system=False, user_after_tool=False)
HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": 1, "a": None}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}


def text(value, **extra):
    return {"type": "text", "text": value, **extra}


def read(*messages, **fields):
    fields = {"model": "m", "max_tokens": 16, "messages": list(messages or [HI]), **fields}
    return parse(json.dumps(fields).encode(), MessagesBody)


def chat(*messages, places=ANYWHERE, **fields):
    return chat_messages(read(*messages, **fields), places)


def refused(*messages, places=ANYWHERE, **fields):
    with pytest.raises(RequestError) as found:
        chat(*messages, places=places, **fields)
    return found.value


def test_instructions_are_the_first_message_without_the_header_of_claude_code():
    header = text("x-anthropic-billing-header: cc_version=1; cch=ab12;")
    parts = [header, text("You are", cache_control={"type": "ephemeral"}), text(" brief.")]
    system = {"role": "system", "content": "You are brief."}
    assert chat(system=parts) == [system, HI] == chat(system="You are brief.")
    for nothing in ("", [], [header], None):
        assert chat(system=nothing) == [HI]


def test_text_blocks_are_joined_and_neighbours_are_one_message():
    two = {"role": "user", "content": [text("a"), text("b", cache_control={"type": "x"})]}
    assert chat(two) == [{"role": "user", "content": "ab"}]
    assert chat(two, HI) == [{"role": "user", "content": "ab\n\nhi"}]
    answers = [{"role": "assistant", "content": c} for c in ("x", [text("y"), USE])]
    (_, answer, _) = chat(HI, *answers, {"role": "user", "content": [RESULT]})
    assert answer["content"] == "x\n\ny"
    assert [call["id"] for call in answer["tool_calls"]] == ["1"]


def test_calls_results_and_thinking_have_messages_of_their_own():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "d"}
    found = chat(
        HI,
        {"role": "assistant", "content": [hidden, thinking, text("so"), USE]},
        {"role": "user", "content": [RESULT, text("go on")]},
    )
    assert found == [
        HI,
        {"role": "assistant", "content": "so", "reasoning": "hm", "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "f", "arguments": {"b": 1, "a": None}}}]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"content": "r"}, "r"),
        ({"content": "r", "is_error": False}, "r"),
        ({"content": "r", "is_error": True}, "Error: r"),
        ({"content": [text("a"), text("b")]}, "ab"),
        ({"content": [{"type": "tool_reference", "tool_name": "g"}]}, "g"),
        ({"content": None}, ""),
        ({"content": []}, ""),
    ],
)
def test_what_a_result_says(result, content):
    user = {"role": "user", "content": [{**RESULT, **result}]}
    assert chat(HI, {"role": "assistant", "content": [USE]}, user)[-1]["content"] == content


def test_a_system_message_stays_where_it_is_if_the_template_can():
    note = {"role": "system", "content": [text("note")]}
    answer = {"role": "assistant", "content": "ok"}
    assert chat(HI, note, answer, HI, note, system="s") == [
        {"role": "system", "content": "s"}, HI, {"role": "system", "content": "note"}, answer,
        HI, {"role": "system", "content": "note"},
    ]  # fmt: skip
    both = {"role": "user", "content": "hi\n\nnote"}
    found = chat(HI, note, answer, HI, note, system="s", places=STRICT)
    assert found == [{"role": "system", "content": "s"}, both, answer, both]


def test_text_after_results_is_a_part_of_the_last_one_if_the_template_wants_it():
    turns = [
        HI,
        {"role": "assistant", "content": [USE, {**USE, "id": "toolu_2"}]},
        {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "toolu_2"}, text("t")]},
        {"role": "system", "content": "n"},
    ]
    tools = chat(*turns, places=STRICT)[2:]
    assert [(m["role"], m["content"]) for m in tools] == [("tool", "r"), ("tool", "r\n\nt\n\nn")]
    assert [m["role"] for m in chat(*turns)] == [
        "user", "assistant", "tool", "tool", "user", "system",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id",
         "no tool_use with the id 'toolu_1'"),
        ([HI, {"role": "assistant", "content": [USE]}], "messages[1]", "has no tool_result"),
        ([HI, {"role": "assistant", "content": [USE]}, HI], "messages[1]", "has no tool_result"),
        ([HI, {"role": "assistant", "content": [USE]}, HI, {"role": "assistant", "content": "x"},
          {"role": "user", "content": [RESULT]}], "messages[1]", "has no tool_result"),
        ([HI, {"role": "assistant", "content": [USE]},
          {"role": "user", "content": [RESULT, RESULT]}],
         "messages[2].content[1].tool_use_id", "still needs a result"),
        ([HI, {"role": "assistant", "content": [USE, USE]}], "messages[1]", "the same id"),
        ([HI, {"role": "assistant", "content": [USE]},
          {"role": "user", "content": [text("x"), RESULT]}], "messages[2]", "before text"),
    ],
)  # fmt: skip
def test_calls_and_results_belong_together(messages, param, words):
    error = refused(*messages)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    ("keep", "left"),
    [("all", [0, 1, 2]), ({"type": "all"}, [0, 1, 2]), (None, [2]),
     ({"type": "thinking_turns", "value": 2}, [1, 2]),
     ({"type": "thinking_turns", "value": 9}, [0, 1, 2])],
)  # fmt: skip
def test_thinking_of_earlier_turns_can_be_left_out(keep, left):
    turns = []
    for number in range(3):
        thought = {"type": "thinking", "thinking": f"t{number}", "signature": ""}
        turns += [HI, {"role": "assistant", "content": [thought, text("x")]}]
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    found = chat(*turns, HI, context_management={"edits": [edit]})
    assert [m["reasoning"] for m in found if "reasoning" in m] == [f"t{n}" for n in left]
    assert len(chat(*turns, HI, context_management={"edits": []})) == len(found)
    wrong = {**edit, "keep": {"type": "thinking_turns", "value": 0}}
    error = refused(*turns, HI, context_management={"edits": [wrong]})
    assert error.param == "context_management.edits[0].keep.value"
