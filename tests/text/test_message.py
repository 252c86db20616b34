"""A message has what its events say, however they were cut."""

from octavo.outputs import AnswerMessage, ToolCall
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.message import message_of

EVENTS: list[Event] = [
    Reasoning("h"), Reasoning("m"), Content("a"), CallBegin(0, "x", "f"), CallArguments(0, "{"),
    CallArguments(0, "}"), CallEnd(0), Content("b"), CallBegin(1, "y", "g"), CallArguments(1, "{"),
]  # fmt: skip


def test_a_message_of_everything() -> None:
    calls = (ToolCall("x", "f", "{}"), ToolCall("y", "g", "{"))
    assert message_of(EVENTS) == AnswerMessage("ab", "hm", calls)


def test_content_is_none_only_where_there_is_something_else() -> None:
    assert message_of([]) == AnswerMessage("", None)
    assert message_of([Content("")]) == AnswerMessage("", None)
    assert message_of([Reasoning("hm")]) == AnswerMessage(None, "hm")
    assert message_of(EVENTS[3:7]).content is None


def test_a_message_goes_back_into_the_conversation() -> None:
    assert message_of(EVENTS[:7]).as_message() == {
        "role": "assistant",
        "content": "a",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    assert message_of([Content("a")]).as_message() == {"role": "assistant", "content": "a"}
