"""Streamed events are those of the whole answer, wherever tokens are cut into outputs and whatever
ends the answer; its text is what it would be without markers."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tool_model
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine.output import OutputProcessor
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.answer import CallBegin, joined
from octavo.text.answer_form import AnswerForm
from octavo.text.answer_reader import AnswerReader
from octavo.text.reasoning import registry as reasoning
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tool_request import read_tools
from octavo.text.tools import registry as tools
from tool_model import call

EOS = 257
SAID = [
    call(),
    f"I look.\n{call()}\n{call('clock', '{}')}",
    f"<think>hm\n</think>\n\n{call(arguments=chr(0x7B) + chr(0x7D))}",
    "<think>a <tool_call> b",
    "Hello <tool",
    "Hello <tool_call>\n{} ST",
    '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call> STOP',
    f"漢 {call(arguments='{' + chr(34) + 'city' + chr(34) + ': ' + chr(34) + '🌶' + chr(34) + '}')}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tool_model.write(tmp_path_factory.mktemp("model") / "thinks")
    tokenizer = load_tokenizer(folder)
    form = AnswerForm(
        tools=read_tools(tool_model.TOOLS),
        choice="auto",
        format=tools.find("hermes"),
        reasoning=reasoning.find("qwen3"),
    )
    return folder, tokenizer, form


def read(model, groups, reason, kind, **params):
    """(events, text, reasoning tokens, calls) of one request whose tokens come in these groups."""
    _, tokenizer, form = model
    asked = SamplingParams(output_kind=kind, **params)
    reader = AnswerReader(form, tokenizer, asked.skip_special_tokens)
    processor = OutputProcessor(tokenizer)
    processor.add(Submission("r", (1,), asked), None, 0.0, reader.markers)
    events, text = [], ""
    for i, group in enumerate(groups):
        last = i == len(groups) - 1
        update = Update("r", 0, tuple(group), finish_reason=reason if last else None)
        for output in processor.process([update], 1.0)[0]:
            (choice,) = output.outputs
            events += reader.read(choice)
            text += choice.text
    return joined(events), text, reader.reasoning_tokens, reader.calls(0)


def without_ids(events):
    return [CallBegin(e.index, "", e.name) if isinstance(e, CallBegin) else e for e in events]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_and_whole_are_the_same(model, data):
    text = data.draw(st.sampled_from(SAID))
    ids = tool_model.ids(model[0], text)
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    ids += [EOS] if reason == "stop" else []
    stop = data.draw(st.sampled_from([None, "STOP", '"}', "</tool_call>", "k"]))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=8)))
    places = [0, *(cut for cut in cuts if cut < len(ids)), len(ids)]
    groups = [ids[a:b] for a, b in itertools.pairwise(places)]
    whole = read(model, [ids], reason, RequestOutputKind.FINAL_ONLY, stop=stop)
    for parts in (groups, [[i] for i in ids]):
        streamed = read(model, parts, reason, RequestOutputKind.DELTA, stop=stop)
        assert without_ids(streamed[0]) == without_ids(whole[0])
        assert streamed[1:] == whole[1:]
    assert "\\ud8" not in ascii(whole), "no marker's character leaves the parser"
    assert text.startswith(whole[1].rstrip("\ufffd"))  # where a character was cut in two
