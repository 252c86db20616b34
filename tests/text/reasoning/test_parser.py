"""Answers with reasoning, cut in every way: what is reasoning, what is content."""

import pytest
from tests import kit

from octavo.text.answer import CallBegin, Content, Reasoning, joined
from octavo.text.answer_form import AnswerForm
from octavo.text.reasoning import registry
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import registry as tools
from octavo.text.tools.base import Tool

TOKENS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<tool_call>"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """One has the markers as added tokens, one has none of them."""
    found = {}
    for name, added in (("tokens", TOKENS), ("plain", [])):
        folder = tmp_path_factory.mktemp(name)
        kit.write_tokenizer(folder, added=added)
        found[name] = load_tokenizer(folder)
    return found


def read(form, tokenizer, text, *cuts):
    markers, parser = form.markers(tokenizer), form.parser(tokenizer)
    text = markers.in_text(text)
    pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    return joined([*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()])


def thought(text, *rest):
    return [Reasoning(text), *map(Content, rest)]


CASES = [
    # format, whether the prompt ends in reasoning, the answer, its events
    ("openai_gptoss", False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
     "<|channel|>final<|message|>Yes.", thought("Hm.", "Yes.")),
    ("openai_gptoss", True, "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     thought("Hm.", "Yes.")),
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", thought("Hm.", "Yes.")),
    ("qwen3", False, "Yes. a < b", [Content("Yes. a < b")]),
    ("qwen3", False, "\n <think>Hm.</think>Yes.", thought("Hm.", "Yes.")),
    ("qwen3", False, "\n Yes.\n", [Content("\n Yes.\n")]),
    ("qwen3", False, "<thin", [Content("<thin")]),
    ("qwen3", False, "", []),
    ("qwen3", True, "Hm.\n\nSo.\n</think>\n\nYes.\n", thought("Hm.\n\nSo.", "Yes.\n")),
    ("qwen3", True, "<think>\nHm.</think>Yes.", thought("Hm.", "Yes.")),
    ("qwen3", True, "Hm.</think>\n</think>\n\nYes.", thought("Hm.", "Yes.")),
    ("qwen3", True, "\n\n</think>\n\nYes.", [Content("Yes.")]),
    ("qwen3", True, "Hm. </thi", thought("Hm. </thi")),
    ("qwen3", True, "\n<thi", thought("<thi")),
    ("qwen3", True, "\n\n", []),
    ("qwen3", True, "Hm.</think>\n\n", thought("Hm.")),
    ("deepseek_r1", True, "Hm. 1 < 2. No end", thought("Hm. 1 < 2. No end")),
    ("deepseek_v3", True, "Hm.</think>Yes.", thought("Hm.", "Yes.")),
    ("deepseek_v3", False, "Yes.", [Content("Yes.")]),
    ("glm45", False, "\n<think>Hm.</think>\nYes.", thought("Hm.", "Yes.")),
    ("olmo3", True, "Hm.</think>\n\nYes.", thought("Hm.", "Yes.")),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", thought("Hm.", "Yes.")),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", thought("Hm.", "Yes.")),
    ("gemma4", False, "Yes.", [Content("Yes.")]),
    ("granite", False, "Here is my thought process: Hm.\nHere is my response: Yes.",
     thought("Hm.", "Yes.")),
    ("granite", False, "Here's my thought process:\nHm.\n\nHere's my response:\nYes.",
     thought("Hm.", "Yes.")),
    ("granite", False, "Here is my thoughtful answer.", [Content("Here is my thoughtful answer.")]),
    ("granite", False, "Here is my thought process: Here is my r",
     thought("Here is my r")),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["tokens", "plain"])
@pytest.mark.parametrize(("name", "inside", "text", "events"), CASES)
def test_answers_in_every_chunking(tokenizers, kind, name, inside, text, events):
    form = AnswerForm(reasoning=registry.find(name), in_reasoning=inside)
    tokenizer = tokenizers[kind]
    length = len(form.markers(tokenizer).in_text(text))
    for cut in range(length + 1):
        assert read(form, tokenizer, text, cut) == events, cut
    assert read(form, tokenizer, text, *range(length + 1)) == events


def test_an_end_that_is_an_added_token_is_never_content(tokenizers):
    form = AnswerForm(reasoning=registry.find("qwen3"))
    assert read(form, tokenizers["tokens"], "Yes.</think> Or") == [Content("Yes. Or")]
    assert read(form, tokenizers["plain"], "Yes.</think> Or") == [Content("Yes.</think> Or")]


def test_the_characters_of_a_token_are_text(tokenizers):
    """A model that writes about the marker, in characters, goes on reasoning."""
    form = AnswerForm(reasoning=registry.find("qwen3"), in_reasoning=True)
    parser = form.parser(tokenizers["tokens"])
    written = [*parser.feed("Its end is </think>, they say."), *parser.finish()]
    assert joined(written) == thought("Its end is </think>, they say.")


def test_only_tokens_count_where_a_tokenizer_has_them(tokenizers):
    form = AnswerForm(reasoning=registry.find("mistral"))
    markers = form.markers(tokenizers["plain"])
    assert not markers.token_ids
    for text in ("<think>Hm.</think>Yes.", "[THINK]Hm.[/THINK]Yes."):
        assert read(form, tokenizers["plain"], text) == thought("Hm.", "Yes.")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "granite"])
def test_a_call_ends_reasoning_where_a_token_begins_it(tokenizers, name):
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    form = AnswerForm(tools=(Tool("clock"),), choice="auto", format=tools.find("hermes"),
                      reasoning=registry.find(name), in_reasoning=True)  # fmt: skip
    for cut in range(30):
        events = read(form, tokenizers["tokens"], f"Let me look.\n{call}", cut)
        assert events[0] == Reasoning("Let me look.")
        assert isinstance(events[1], CallBegin)
    (event,) = read(form, tokenizers["plain"], f"Let me look.\n{call}")
    assert event == Reasoning(f"Let me look.\n{call}")
