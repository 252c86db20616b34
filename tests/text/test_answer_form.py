"""The texts that the grammar of an answer takes and refuses, and what its parser reads in them."""

import json

import jsonschema
import numpy as np
import pytest
from tests import kit

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, joined
from octavo.text.answer_form import AnswerForm
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import registry
from octavo.text.tools.base import Tool

WEATHER = Tool("weather", parameters={"properties": {"city": {"type": "string", "maxLength": 20}},
               "required": ["city"], "additionalProperties": False})  # fmt: skip
CLOCK = Tool("clock")
ANYTHING = Tool("anything", parameters={"type": "object", "not": {}}, strict=False)
TOOLS = (WEATHER, CLOCK, ANYTHING)
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
SCHEMA = StructuredOutputsParams(json={"properties": {"a": {"type": "integer"}}, "type": "object",
                                 "required": ["a"], "additionalProperties": False})  # fmt: skip


class Model:
    """A tokenizer, and texts held against the grammars of forms."""

    def __init__(self, folder, added):
        size = kit.write_tokenizer(folder, added=added)
        self.tokenizer = load_tokenizer(folder)
        self.grammars = Grammars(lambda: self.tokenizer, size, [kit.EOS])

    def ids(self, form, text):
        markers = form.markers(self.tokenizer)
        parts = [text] if markers is None else markers.parts(text)
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]

    def accepts(self, form, text):
        """Whether the engine would let the answer be `text`."""
        state, sections = self._state(form), form.sections(self.tokenizer)
        free = state is None or sections is not None
        for token in self.ids(form, text):
            if not free:
                if state.complete or token not in _allowed(state):
                    return False
                state.advance(token)
                if sections is not None and state.complete:
                    if not sections.repeats:
                        sections, free = None, False
                        continue
                    free = True
            elif sections is not None and token in sections.triggers:
                state, free = self._state(form), False
        if free:
            return sections is None or sections.may_end
        return state.complete or kit.EOS in _allowed(state)

    def _state(self, form):
        grammar = form.grammar(self.tokenizer)
        return None if grammar is None else self.grammars.matcher(
            self.grammars.compile(grammar).result())  # fmt: skip

    def read(self, form, text, cut=None):
        """The events of `text`, in two pieces if it is cut."""
        markers, parser = form.markers(self.tokenizer), form.parser(self.tokenizer)
        text = text if markers is None else markers.in_text(text)
        pieces = [text] if cut is None else [text[:cut], text[cut:]]
        return joined([*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()])


def _allowed(state):
    words = state.mask().words().view(np.uint8)
    return set(np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = Model(tmp_path_factory.mktemp("tokens"), ["<tool_call>", "</tool_call>"])
    yield found
    found.grammars.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Its tokenizer spells all markers."""
    found = Model(tmp_path_factory.mktemp("plain"), [])
    yield found
    found.grammars.close()


def form(choice="auto", tools=TOOLS, **options):
    return AnswerForm(tools=tools, choice=choice, format=registry.find("hermes"), **options)


def calls(events):
    """(name, arguments) of each complete call."""
    names = {e.index: e.name for e in events if isinstance(e, CallBegin)}
    texts = {e.index: e.text for e in events if isinstance(e, CallArguments)}
    return [(names[e.index], json.loads(texts[e.index])) for e in events if isinstance(e, CallEnd)]


RIGHT = {
    "auto": ["", "Hi <b>", PARIS, f"Let me see.\n{PARIS}\n{NOW} Done.", NOW],
    "required": [PARIS, f"{PARIS}\n{NOW}\n{PARIS}",
                 '<tool_call>\n{"name": "anything", "arguments": {"x": [1]}}\n</tool_call>'],
    "named": [PARIS],
    "single": ["Hi", PARIS, f"Well: {PARIS}"],
    "structured": ['{"a": 1}', PARIS, f"{PARIS}\n{NOW}"],
}  # fmt: skip
WRONG = {
    "auto": [PARIS.replace("weather", "weatherman"), PARIS.replace("Paris", "Paris" * 5), NOW[:-1],
             PARIS.replace('"city"', '"town"')],
    "required": ["", "Hi", f"Hi {PARIS}", f"{PARIS} Hi", NOW.replace("clock", "clocks"),
                 NOW.replace("{}", "[]")],
    "named": ["", NOW, f"{PARIS}\n{PARIS}"],
    "single": [f"{PARIS}\n{NOW}", f"{PARIS} Done."],
    "structured": ["", "Hi", '{"a": "1"}', f'{PARIS}{{"a": 1}}', '{"b": 1}'],
}  # fmt: skip
FORMS = {
    "auto": lambda: form(),
    "required": lambda: form("required"),
    "named": lambda: form("required", named="weather"),
    "single": lambda: form(parallel=False),
    "structured": lambda: form(structured=SCHEMA),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tokenizer", ["model", "plain"])
def test_what_an_answer_may_be(kind, tokenizer, request):
    found = request.getfixturevalue(tokenizer)
    for text in RIGHT[kind]:
        assert found.accepts(FORMS[kind](), text), text
    for text in WRONG[kind]:
        assert not found.accepts(FORMS[kind](), text), text


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tokenizer", ["model", "plain"])
def test_what_is_accepted_is_read_as_that(kind, tokenizer, request):
    found, declared = request.getfixturevalue(tokenizer), {tool.name: tool for tool in TOOLS}
    for text in RIGHT[kind]:
        events = found.read(FORMS[kind](), text)
        made = calls(events)
        assert len(made) == text.count("<tool_call>"), text
        for name, arguments in made:
            jsonschema.validate(arguments, declared[name].schema)
        said = "".join(e.text for e in events if isinstance(e, Content))
        assert bool(said.strip()) == bool(text.replace(PARIS, "").replace(NOW, "").strip()) or made


def test_a_call_behind_a_token_costs_nothing_before_it(model, plain):
    assert form().sections(model.tokenizer).triggers == (
        model.tokenizer.token_id("<tool_call>"),)  # fmt: skip
    assert form(parallel=False).sections(model.tokenizer).repeats is False
    for other in (form("required"), form(structured=SCHEMA)):
        assert other.sections(model.tokenizer) is None
    assert form().sections(plain.tokenizer) is None


@pytest.mark.parametrize("structured", [None, SCHEMA])
def test_without_a_choice_nothing_is_read_or_forced(model, structured):
    none = form("none", structured=structured)
    assert none.markers(model.tokenizer) is None
    assert none.sections(model.tokenizer) is None
    assert (none.grammar(model.tokenizer) is None) == (structured is None)
    assert model.read(none, PARIS) == [Content(PARIS)]
    assert model.accepts(none, '{"a": 1}')
    assert model.accepts(none, PARIS) == (structured is None)


def test_at_most_128_calls(model):
    many = "\n".join([NOW] * 128)
    assert model.accepts(form("required"), many)
    assert not model.accepts(form("required"), f"{many}\n{NOW}")


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": (CLOCK, WEATHER, CLOCK)}, "tools", "2 tools are called 'clock'"),
        ({"tools": (Tool("a b"),)}, "tools", "'a b'; a name has 1 to 64"),
        ({"tools": (Tool("x" * 65),)}, "tools", "a name has 1 to 64"),
        ({"tools": (Tool(""),)}, "tools", "a name has 1 to 64"),
        ({"tools": (), "choice": "auto"}, "tool_choice", "needs tools"),
        ({"choice": "required", "named": "wether"}, "tool_choice", "none of the tools"),
        ({"choice": "auto", "format": None}, "tools", "--tool-call-parser"),
        ({"tools": tuple(Tool(f"t{i}") for i in range(600))}, "tools", "at most 512"),
    ],
)
def test_what_cannot_be_is_refused(options, param, words):
    with pytest.raises(RequestError) as caught:
        AnswerForm(
            **{"tools": TOOLS, "choice": "auto", "format": registry.find("hermes"), **options}
        )
    assert words in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"a": {"type": "string", "maxLenght": 1}}}, "did you mean 'maxLength'"),
        ({"type": "array"}, "of type 'object'"),
        ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "without an end"),
        ({"properties": {"a": {"pattern": "(?=b)"}}}, "look-around"),
    ],
)
def test_parameters_that_cannot_be_enforced_name_the_tool_and_the_way_out(model, parameters, words):
    tool = Tool("search", parameters=parameters)
    for choice in ("auto", "required"):
        with pytest.raises(RequestError) as caught:
            form(choice, (WEATHER, tool)).grammar(model.tokenizer)
        message = str(caught.value)
        assert words in message
        assert "'search'" in message
        assert "strict: false" in message
        assert caught.value.param == "tools"
    assert form("none", (tool,)).grammar(model.tokenizer) is None
