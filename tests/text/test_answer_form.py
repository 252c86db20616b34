"""The texts that the grammar of an answer takes and refuses, and what its parser reads in them."""

import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
from tests import kit

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Reasoning, joined
from octavo.text.answer_form import AnswerForm
from octavo.text.matcher import Grammars
from octavo.text.reasoning import registry as reasoning
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import registry
from octavo.text.tools.base import Call, Tool
from octavo.text.tools.harmony import MARKERS

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

    def walk(self, form, rng, most=400):
        """Tokens that the engine may draw for an answer, to its end; None for one that is long."""
        state, sections, ids = self._state(form), form.sections(self.tokenizer), []
        if sections is not None:
            ids.append(sections.triggers[0])
        while not state.complete and len(ids) < most:
            may = sorted(_allowed(state) & self.likely) or sorted(_allowed(state))
            if kit.EOS in may and rng.random() < 0.5:
                break
            ids.append(rng.choice([i for i in may if i != kit.EOS] or may))
            if ids[-1] == kit.EOS:
                ids.pop()
                break
            state.advance(ids[-1])
        return ids if len(ids) < most else None

    @property
    def likely(self):
        """Without the white space of which a random text would mostly consist."""
        return {*range(0x21, 0x7F), ord(" "), ord("\n"), *range(256, 400)}

    def text(self, form, ids):
        """As the parser gets it, of one byte each and markers."""
        characters = form.markers(self.tokenizer).characters
        pieces = [characters[i].encode("utf-8", "surrogatepass") if i in characters
                  else self.tokenizer.token_bytes(i) for i in ids]  # fmt: skip
        return b"".join(pieces).decode("utf-8", "surrogatepass")

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
    found = Model(
        tmp_path_factory.mktemp("tokens"), ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    )
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


def thinking(inside=False, **options):
    choice = options.pop("choice", "none")
    return form(choice, reasoning=reasoning.find("qwen3"), in_reasoning=inside, **options)


THOUGHTS = {
    # the form; texts that it takes behind reasoning, and texts that it does not
    "schema": (lambda **o: thinking(structured=SCHEMA, **o), ['{"a": 1}'], ["", "Hi", '{"b": 1}']),
    "choice": (lambda **o: thinking(structured=StructuredOutputsParams(choice=["yes", "no"]), **o),
               ["yes", "no"], ["", "maybe", "yesno"]),
    "required": (lambda **o: thinking(choice="required", **o), [PARIS, f"{PARIS}\n{NOW}"],
                 ["", "Hi", NOW.replace("clock", "clocks")]),
    "either": (lambda **o: thinking(choice="auto", structured=SCHEMA, **o), ['{"a": 1}', PARIS],
               ["", "Hi", f'{PARIS}{{"a": 1}}']),
    "auto": (lambda **o: thinking(choice="auto", **o), ["", "Hi", f"Hm: {NOW} Done.", PARIS],
             [PARIS.replace("weather", "weatherman")]),
}  # fmt: skip


@pytest.mark.parametrize("kind", THOUGHTS)
@pytest.mark.parametrize("tokenizer", ["model", "plain"])
def test_what_may_follow_reasoning(kind, tokenizer, request):
    found = request.getfixturevalue(tokenizer)
    make, right, wrong = THOUGHTS[kind]
    before = {
        False: [
            "<think>Hm.</think>",
            "<think>\nHm {} a < b\n</think>\n\n",
            "",
            "\n<think></think>",
        ],
        True: ["Hm.</think>", "\nHm {} a < b\n</think>\n\n", "</think>\n"],
    }
    for inside, thoughts in before.items():
        for thought in thoughts:
            for text in right:
                assert found.accepts(make(inside=inside), thought + text), thought + text
                events = found.read(make(inside=inside), thought + text)
                said = "".join(e.text for e in events if isinstance(e, Reasoning))
                assert said == thought.replace("think>", "").strip("</\n"), thought
                assert len(calls(events)) == text.count("<tool_call>")
                if "<tool_call>" not in text:
                    assert events[-1:] == ([Content(text)] if text else events[-1:])
            for text in wrong:
                assert not found.accepts(make(inside=inside), thought + text), thought + text


@pytest.mark.parametrize("kind", ["schema", "choice", "required", "either"])
def test_reasoning_that_does_not_end_is_no_answer(model, plain, kind):
    make, right, _ = THOUGHTS[kind]
    for found in (model, plain):
        assert not found.accepts(make(inside=True), "Hm.")
        assert not found.accepts(make(inside=True), f"Hm. {right[0]}")
        assert not found.accepts(make(inside=False), "<think>Hm.")


def test_while_a_model_only_thinks_nothing_is_masked(model, plain):
    end = model.tokenizer.token_id("</think>")
    sections = thinking(inside=True, structured=SCHEMA).sections(model.tokenizer)
    assert (sections.triggers, sections.repeats, sections.may_end) == ((end,), False, False)
    assert thinking(inside=False, structured=SCHEMA).sections(model.tokenizer) is None
    assert thinking(inside=True, structured=SCHEMA).sections(plain.tokenizer) is None
    for free in (thinking(), thinking(inside=True)):
        assert free.grammar(model.tokenizer) is None
        assert free.sections(model.tokenizer) is None


def test_a_call_in_the_midst_of_reasoning_is_held_to_its_schema(model):
    auto = thinking(inside=True, choice="auto")
    assert model.accepts(auto, f"Let me look.\n{PARIS}")
    assert not model.accepts(auto, f"Let me look.\n{PARIS.replace('city', 'town')}")
    assert [name for name, _ in calls(model.read(auto, f"Hm.\n{PARIS}"))] == ["weather"]


ROOM = Tool("room.set-1", parameters={"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 6}, "level": {"type": "integer", "minimum": -9,
    "maximum": 99}, "on": {"type": "boolean"}, "mode": {"enum": ["a", "b<", None, 3]},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    "size": {"type": "object", "properties": {"w": {"type": "number", "minimum": 0, "maximum": 9}},
             "required": ["w"], "additionalProperties": False}},
    "required": ["name", "level"], "additionalProperties": False})  # fmt: skip
OFF = Tool("off", parameters={"type": "object", "properties": {}, "additionalProperties": False})


@pytest.mark.parametrize("tries", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["tokens", "characters"])
@pytest.mark.parametrize("format", registry.FORMATS, ids=lambda f: type(f).__name__)
def test_every_answer_of_a_grammar_is_read_as_calls(format, how, tries, tmp_path):
    """Random texts of the grammars of each format."""
    found = Model(tmp_path, format.markers if how == "tokens" else [])
    declared = {tool.name: tool for tool in (ROOM, OFF)}
    rng = random.Random(0)
    try:
        for choice in ("required", "auto"):
            asked = AnswerForm(tools=(ROOM, OFF), choice=choice, format=format)
            if choice == "auto" and asked.sections(found.tokenizer) is None:
                continue
            for _ in range(tries):
                ids = found.walk(asked, rng)
                if ids is None:
                    continue
                text = found.text(asked, ids)
                parser = asked.parser(found.tokenizer)
                events = joined([*parser.feed(text), *parser.finish()])
                made = calls(events)
                assert made or format.trigger != format.begin, text
                assert not any(isinstance(e, Content) for e in events), text
                assert len(made) == sum(isinstance(e, CallBegin) for e in events), text
                for name, arguments in made:
                    jsonschema.validate(arguments, declared[name].schema)
    finally:
        found.grammars.close()


# gpt-oss, where what a message is stands in its header.

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
TO_PARIS = f'{CALL}{{"city": "Paris"}}'
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    found = Model(tmp_path_factory.mktemp("channels"), MARKERS)
    yield found
    found.grammars.close()


def gpt_oss(choice="none", tools=TOOLS, **options):
    return AnswerForm(tools=tools, choice=choice, format=registry.find("openai"),
                      reasoning=reasoning.find("openai_gptoss"), **options)  # fmt: skip


@pytest.mark.parametrize("before", ["", ANALYSIS])
def test_an_answer_in_channels_that_is_forced(channels, before):
    required, schema = gpt_oss("required"), gpt_oss(structured=SCHEMA)
    either = gpt_oss("auto", structured=SCHEMA)
    call, text = f"{before}{TO_PARIS}", f'{before}{FINAL}{{"a": 1}}'
    assert channels.accepts(required, call)
    assert not channels.accepts(required, text)
    assert channels.accepts(schema, text)
    assert not channels.accepts(schema, call)
    assert channels.accepts(either, text)
    assert channels.accepts(either, call)
    assert not channels.accepts(either, call.replace("city", "town"))
    assert not channels.accepts(either, f"{before}{FINAL}Hi")
    thought = [Reasoning("Hm.")] if before else []
    assert channels.read(schema, text) == [*thought, Content('{"a": 1}')]
    assert calls(channels.read(required, call)) == [("weather", {"city": "Paris"})]


@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_in_channels_that_is_free(channels, parallel):
    auto = gpt_oss("auto", parallel=parallel)
    for right in (f"{ANALYSIS}{FINAL}Hi", f"{ANALYSIS}{TO_PARIS}<|call|>",
                  f"{FINAL}Hi"):  # fmt: skip
        assert channels.accepts(auto, right), right
    for wrong in (TO_PARIS.replace("city", "town"), TO_PARIS.replace("weather", "wether"),
                  "<|channel|>other<|message|>"):  # fmt: skip
        assert not channels.accepts(auto, f"{ANALYSIS}{wrong}"), wrong
    assert channels.read(auto, f"{ANALYSIS}{FINAL}Hi") == [
        Reasoning("Hm."), Content("Hi")]  # fmt: skip


def test_where_an_answer_in_channels_begins(channels):
    found = reasoning.find("openai_gptoss")
    turn = "<|start|>user<|message|>Hi <|channel|>analysis<|message|><|end|><|start|>assistant"
    assert not found.starts_in_reasoning(turn, channels.tokenizer)
    assert found.starts_in_reasoning(f"{turn}<|channel|>analysis<|message|>Hm",
                                     channels.tokenizer)  # fmt: skip
    inside = gpt_oss(in_reasoning=True)
    text = f"So.<|end|><|start|>assistant{FINAL}Hi"
    assert channels.read(inside, text) == [Reasoning("So."), Content("Hi")]


def test_calls_that_nothing_opens_begin_an_answer_or_are_text(tmp_path):
    model = Model(tmp_path, ())
    form = AnswerForm(tools=TOOLS, choice="auto", format=registry.find("pythonic"))
    for text in ('[weather(city="Paris")]', "[1] Paris", "", "[weather]", "So: [weather(1)]"):
        assert model.accepts(form, text), text
    for text in ("[weather(city=1)]", "[weather()]", '[weather(city="Paris")] and'):
        assert not model.accepts(form, text), text


@pytest.mark.parametrize("markers", [(), ("<|python_tag|>",)])
def test_calls_in_a_text_that_nothing_opens_are_held_once_they_are_known(markers, tmp_path):
    model = Model(tmp_path, markers)
    form = AnswerForm(tools=TOOLS, choice="auto", format=registry.find("llama3_json"))
    paris = '{"name": "weather", "parameters": {"city": "Paris"}}'
    spaced = '{\n  "name": "weather",\n  "parameters": {\n    "city": "Paris"\n  }\n}'
    typed = '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}'
    other = ('{"name": "weather", "year": 1}', '{"name": "wind", "parameters": {"city": 1}}')
    for text in (paris, spaced, typed, f"<|python_tag|>{paris}", f"So: {paris}; {paris} Well.",
                 *other, "Hello", ""):  # fmt: skip
        assert model.accepts(form, text), text
    for text in (paris.replace('"Paris"', "1"), spaced.replace("Paris", 30 * "a"),
                 f"So: {typed.replace('city', 'town')}"):  # fmt: skip
        assert not model.accepts(form, text), text
    alone = msgspec.structs.replace(form, parallel=False)
    assert model.accepts(alone, f"So: {paris}")
    assert not model.accepts(alone, f"{paris}; {paris}")


NAMED = StructuredOutputsParams(
    json={"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
          "required": ["name"], "additionalProperties": False}
)  # fmt: skip
CITY = {"$ref": "#/$defs/c"}
BY_REFERENCE = Tool("weather", parameters={"$defs": {"c": {"enum": ["Paris", "Rome"]}},
                    "properties": {"city": CITY}, "required": ["city"]})  # fmt: skip


@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", registry.FORMATS, ids=lambda f: type(f).__name__)
def test_calls_or_a_form_even_where_both_begin_alike(format, parallel, tmp_path):
    found = Model(tmp_path, format.markers)
    call = format.write([Call("weather", {"city": "Paris"})])
    try:
        for structured, texts in (
            (NAMED, ['{"name": "weather"}', '{"name": "clock", "n": 3}']),
            (StructuredOutputsParams(json={"type": "array"}), ["[]", "[1, [2]]"]),
            (StructuredOutputsParams(choice=["yes", "[w"]), ["yes", "[w"]),
        ):
            either = AnswerForm(tools=(BY_REFERENCE, CLOCK), choice="auto", format=format,
                                structured=structured, parallel=parallel)  # fmt: skip
            assert found.accepts(either, call)
            assert not found.accepts(either, call.replace("Paris", "Mars"))
            for text in texts:
                assert found.accepts(either, text), text
    finally:
        found.grammars.close()


@pytest.mark.parametrize("how", ["tokens", "characters"])
@pytest.mark.parametrize("format", reasoning.FORMATS, ids=lambda f: f.name)
def test_an_answer_has_its_form_behind_reasoning_of_each_format(format, how, tmp_path):
    found = Model(tmp_path, format.markers if how == "tokens" else [])
    yes = StructuredOutputsParams(choice=["yes", "no"])
    try:
        for begin in format.begins:
            for end in format.ends:
                for inside in (False, True):
                    form = AnswerForm(structured=yes, reasoning=format, in_reasoning=inside)
                    text = f"{'' if inside else begin}Hm. [1] <a>{end}"
                    for answer, right in (("yes", True), ("perhaps", False), ("", False)):
                        whole = f"{text}{format.content}{answer}"
                        assert found.accepts(form, whole) == right, whole
                    events = found.read(form, f"{text}{format.content}yes")
                    assert events == [Reasoning("Hm. [1] <a>"), Content("yes")]
    finally:
        found.grammars.close()


def test_schemas_of_tools_are_bounded_each_and_together(model):
    def tool(name, size):
        return Tool(name, parameters={"description": "x" * size})

    with pytest.raises(RequestError, match=r"'big': .* at most 131072 .* strict: false") as caught:
        form("required", (CLOCK, tool("big", 2**17))).grammar(model.tokenizer)
    assert caught.value.param == "tools"
    many = tuple(tool(f"t{i}", 100_000) for i in range(6))
    with pytest.raises(RequestError, match="at most 524288 characters together"):
        form("auto", many).grammar(model.tokenizer)
    costly = [{"type": "string", "pattern": f".*{i:04}.{{20}}"} for i in range(30)]
    slow = Tool("slow", parameters={"properties": {"a": {"allOf": costly}}})
    with pytest.raises(RequestError, match="'slow': its schema is too complex"):
        form("required", (slow,)).grammar(model.tokenizer)
    free = tuple(msgspec.structs.replace(t, strict=False) for t in (*many, slow))
    assert form("required", free).grammar(model.tokenizer)
