"""gpt-oss: messages in channels."""

import pytest
from tests.text.tools import transcripts
from tests.text.tools.transcripts import TOOLS, both_markers, events_of

from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Reasoning
from octavo.text.tools.harmony import Harmony, HarmonyParser

FORMAT = Harmony()
THOUGHT = "<|channel|>analysis<|message|>Is a < b?<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
CALLED = [CallBegin(0, "", "now"), CallArguments(0, '{"a": 1}'), CallEnd(0)]


def read(text, **options):
    """The events, the same for markers of both kinds and for each chunking."""
    found = []
    for markers in both_markers(FORMAT):
        for cut in (transcripts.whole, transcripts.characters):
            parser = HarmonyParser(TOOLS, markers, **options)
            found.append(events_of(parser, cut(markers.in_text(text))))
    assert all(one == found[0] for one in found)
    return found[0]


def test_an_answer_is_reasoning_content_and_calls():
    assert read(THOUGHT + CALL) == [Reasoning("Is a < b?"), *CALLED]
    said = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    assert read(THOUGHT + said + CALL) == [Reasoning("Is a < b?"), Content("One moment."), *CALLED]
    final = "<|channel|>final<|message|>No: a >= b.<|return|>"
    assert read(THOUGHT + final) == [Reasoning("Is a < b?"), Content("No: a >= b.")]


def test_a_line_break_stands_between_messages_of_one_kind():
    final = "<|channel|>final<|message|>Yes."
    assert read(THOUGHT + THOUGHT + final) == [Reasoning("Is a < b?\nIs a < b?"), Content("Yes.")]
    assert read(f"{final}<|end|><|start|>assistant{final}") == [Content("Yes.\nYes.")]


def test_a_recipient_may_come_before_the_channel():
    call = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}'
    assert read(call) == CALLED
    assert read(f"<|start|>assistant{call}<|call|>") == CALLED


def test_prompts_that_end_in_a_message():
    assert read("Hello <|return|>") == [Content("Hello ")]
    assert read("so it is.<|end|>" + CALL, in_reasoning=True) == [Reasoning("so it is."), *CALLED]
    assert read("so it", in_reasoning=True) == [Reasoning("so it")]


@pytest.mark.parametrize("text", [
    "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)",
    "<|channel|>commentary to=functions.other<|message|>{}",
    "<|channel|>other<|message|>Hello",
    "<|start|>user<|message|>Hello",
    "<|channel|>final " + "x" * 300,
    " to",
])  # fmt: skip
def test_what_is_no_message_of_a_known_kind_is_content_as_written(text):
    assert read(text) == [Content(text)]


def test_an_answer_that_is_cut_off():
    assert read("<|channel|>fi") == []
    assert read("<|channel|>analysis<|message|>Is a <") == [Reasoning("Is a <")]
    assert read(CALL[:-10]) == [CallBegin(0, "", "now"), CallArguments(0, '{"a": ')]
    assert read(CALL.replace('{"a": 1}', "")) == [
        CallBegin(0, "", "now"), CallArguments(0, "{}"), CallEnd(0)]  # fmt: skip


def test_a_message_without_an_end():
    assert read("<|channel|>analysis<|message|>Hm" + CALL) == [Reasoning("Hm"), *CALLED]
