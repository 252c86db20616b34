"""Grammars against a tokenizer: which tokens may follow, and what is refused."""

import json

import numpy as np
import pytest
from tests import kit

from octavo.errors import EngineError, RequestError
from octavo.models.files import resolve_tokenizer
from octavo.structured_outputs import TOO_COMPLEX, StructuredOutputsParams
from octavo.text.grammar import grammar_of
from octavo.text.matcher import Grammars, _Tokens
from octavo.text.tokenizer import load_tokenizer

VOCAB = 300  # of a head with rows that no token stands for


def matcher(grammars, stop_ids=(), **form):
    grammar = grammar_of(StructuredOutputsParams(**form))
    return grammars.matcher(grammars.compile(grammar).result(), stop_ids)


def allowed(found):
    return set(np.flatnonzero(np.unpackbits(
        found.mask().words().view(np.uint8), bitorder="little")).tolist())  # fmt: skip


def follow(found, text):
    for byte in text.encode():
        assert byte in allowed(found), (text, chr(byte))
        found.advance(byte)
    return found


def accepts(found, text):
    """Whether the whole text is one of the grammar's."""
    for byte in text.encode():
        if found.complete or byte not in allowed(found):
            return False
        found.advance(byte)
    return found.complete or kit.EOS in allowed(found)


def test_masks_have_the_tokens_that_may_follow(grammars):
    found = matcher(grammars, choice=["yes", "no"])
    yes = 259
    assert allowed(found) == {ord("y"), ord("n"), yes}
    other = found.copy()
    found.advance(yes)
    assert found.complete
    assert allowed(other) == {ord("y"), ord("n"), yes}
    follow(other, "no")
    assert other.complete
    assert allowed(other) == {kit.EOS}


def test_added_tokens_and_ids_without_a_token_never_follow(grammars):
    found = allowed(matcher(grammars, regex="(.|\n)*"))
    assert found == {*range(128), *(found & set(range(128, 256))), kit.EOS, 259, 260, 261}


def test_stop_ids_follow_where_the_text_may_end(grammars):
    found = matcher(grammars, [ord("z"), kit.EOS], regex="[0-9]{2,4}")
    assert ord("z") not in allowed(found)
    follow(found, "12")
    assert {ord("z"), kit.EOS} <= allowed(found)
    found.advance(ord("z"))  # no part of the text
    assert ord("3") in allowed(found)


def test_what_may_not_follow_is_an_error(grammars):
    found = matcher(grammars, regex="[0-9]+")
    with pytest.raises(EngineError, match="the grammar failed"):
        found.advance(ord("a"))


def test_a_mask_is_filled_once(grammars):
    found = matcher(grammars, regex="[0-9]+")
    mask = found.mask()
    grammars.fill([mask])
    assert found.mask() is mask
    assert mask.words() is mask.words()
    found.advance(ord("1"))
    assert found.mask() is not mask


def test_an_unchecked_grammar_that_does_not_compile_is_refused(grammars):
    with pytest.raises(RequestError) as caught:
        grammars.compile("start: nothing").result()
    assert caught.value.param == "structured_outputs"
    assert "<" not in str(caught.value)


def test_limits_of_the_library_are_not_told_in_its_words(grammars):
    three = " & ".join(f"/.*{letter}.{{60}}/" for letter in "abc")
    grammar = grammar_of(StructuredOutputsParams(grammar=f"start: A\nA: {three}"))
    with pytest.raises(RequestError) as caught:
        grammars.compile(grammar).result()
    assert str(caught.value) == TOO_COMPLEX


def test_as_many_ways_to_go_on_as_may_be_asked_for(grammars):
    every = [f"{number:04}" for number in range(4096)]
    found = matcher(grammars, choice=every)
    assert allowed(follow(found, "409")) == set(b"012345")
    names = {"properties": {f"p{number}": {} for number in range(500)}}
    assert ord("p") in allowed(follow(matcher(grammars, json=names), '{"'))


def test_whitespace_is_bounded(grammars):
    assert accepts(matcher(grammars, json={"type": "array"}), "[" + " " * 40 + "]")
    assert not accepts(matcher(grammars, json={"type": "array"}), "[" + "\n" * 41)
    nested = json.dumps({"a": {"b": [1, {"c": None}]}}, indent=4)
    assert accepts(matcher(grammars, json_object=True), nested)
    tight = {"json_object": True, "disable_any_whitespace": True}
    assert accepts(matcher(grammars, **tight), '{"a":1}')
    assert not accepts(matcher(grammars, **tight), '{"a": 1}')
    own = {"json_object": True, "whitespace_pattern": "_?"}
    assert accepts(matcher(grammars, **own), '{"a":_1}')


def test_json_keeps_to_its_schema(grammars):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^\d$"},
              "b": {}}, "required": ["a"]}  # fmt: skip
    assert accepts(matcher(grammars, json=schema), '{"a": "7", "b": [1]}')
    assert accepts(matcher(grammars, json=schema), '{"a": "7", "other": 1}')
    assert not accepts(matcher(grammars, json=schema), '{"b": 1}')
    assert not accepts(matcher(grammars, json=schema), '{"a": "٧"}')
    closed = {"json": schema, "disable_additional_properties": True}
    assert not accepts(matcher(grammars, **closed), '{"a": "7", "other": 1}')


def test_an_expression_matches_the_whole_text(grammars):
    assert accepts(matcher(grammars, regex="a/b\\\\[/]\n"), "a/b\\/\n")
    assert not accepts(matcher(grammars, regex="a|bc"), "ab")
    assert accepts(matcher(grammars, choice=["é\n\"/\\"]), "é\n\"/\\")  # fmt: skip


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "not a regular expression: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: b"}, 'unknown name: "b"'),
        ({"grammar": "root ::= b"}, "Rule 'b' not found"),
        ({"grammar": 'root ::= "a'}, "cannot be enforced"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
        ({"json": {"format": "phone", "type": "string"}}, "Unknown format"),
        ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json": {"$ref": "http://example.com/a"}}, "cannot be enforced"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        ({"json_object": True, "whitespace_pattern": "["}, "not a regular expression"),
    ],
)
def test_what_cannot_be_enforced_is_refused(form, words):
    params = StructuredOutputsParams(**form)
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        grammar_of(params)
    assert words in str(caught.value)
    assert caught.value.param == params.param
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize(
    "pattern", ["a{1,2000000000}", "([ab]*a[ab]{20})", "(a+)+b", "((a{1,99}){1,99}){1,99}"]
)
def test_costly_expressions_cost_little(grammars, pattern):
    found = matcher(grammars, regex=pattern)
    assert ord("a") in allowed(found)


def test_structural_tags(grammars):
    schema = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
    legacy = {"structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}],
              "triggers": ["<f="]}  # fmt: skip
    for text, right in [
        ("free text", True), ("", True), ("say <f=a>{\"q\": 1}</f> and on", True),
        ("<f=b>", False), ("<f=a>no", False), ("a < b <f <f=a>{\"q\":2}</f>", True),
        ("<f=a>{\"q\": 1}</f><f=a>{\"q\": 1}</f>", True), ("<f=a>{\"q\": 1}", False),
    ]:  # fmt: skip
        assert accepts(matcher(grammars, structural_tag=legacy), text) == right, text


TAG = {"begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
DIGITS = {"begin": "<d>", "content": {"type": "regex", "pattern": r"\d/\d"}, "end": ""}


@pytest.mark.parametrize(
    ("format_", "right", "wrong"),
    [
        ({"type": "const_string", "value": "TEXT"}, ["TEXT"], ["text", ""]),
        ({"type": "any_text"}, ["", "a\nb"], []),
        ({"type": "regex", "pattern": "a/b"}, ["a/b"], ["a"]),
        ({"type": "json_schema", "json_schema": {"type": "null"}}, ["null"], ["1"]),
        ({"type": "tag", **TAG}, ["<t></t>", "<t>a</b</t>"], ["<t>", "a<t></t>"]),
        ({"type": "sequence", "elements": [{"type": "tag", **TAG}, {"type": "const_string",
          "value": "!"}]}, ["<t>x</t>!"], ["<t>x</t>"]),
        ({"type": "or", "elements": [{"type": "tag", **TAG}, {"type": "tag", **DIGITS}]},
         ["<t></t>", "<d>1/2"], ["<d>1"]),
        ({"type": "triggered_tags", "triggers": ["<t", "<d"], "tags": [TAG, DIGITS],
          "at_least_one": True}, ["a<t>b</t>c<d>1/2d"], ["a", "<t>"]),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [TAG, DIGITS],
          "stop_after_first": True}, ["a", "a<t>b</t>"], ["a<t>b</t>c", "<x>"]),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": ","},
         ["", "<t></t>", "<t></t>,<t>a</t>"], ["<t></t><t></t>", ","]),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True,
          "stop_after_first": True}, ["<t></t>"], ["", "<t></t>,<t>a</t>"]),
    ],
)  # fmt: skip
def test_formats_of_structural_tags(grammars, format_, right, wrong):
    for text in right:
        assert accepts(matcher(grammars, structural_tag={"format": format_}), text), text
    for text in wrong:
        assert not accepts(matcher(grammars, structural_tag={"format": format_}), text), text


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "must have 'format'"),
        ({"format": {"type": "qwen_xml_parameter"}}, "type is one of"),
        ({"format": {"type": "tag", "begin": "a", "end": "b"}}, "lacks 'content'"),
        ({"format": {"type": "regex", "pattern": 1}}, "must be a text"),
        ({"format": {"type": "regex", "patern": "a"}}, "unknown field 'patern'"),
        ({"format": {"type": "sequence", "elements": []}}, "a list of 1 to 128"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, TAG]}}, "put it last"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<b"]}, "none of"),
        ({"structures": [{"begin": "<a", "schema": {"typ": 1}, "end": ""}], "triggers": ["<"]},
         "did you mean 'type'"),
    ],
)  # fmt: skip
def test_structural_tags_that_are_wrong(tag, words):
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredOutputsParams(structural_tag=tag))
    assert words in str(caught.value)
    assert caught.value.param == "structured_outputs.structural_tag"


@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0400-02-29", "2023-12-31", "0001-01-01"],
         ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-00-10"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2021-06-30T00:00:00.5+02:00"],
         ["2023-02-29T00:00:00Z", "1998-12-31T23:58:60Z"]),
        ("time", ["23:59:59Z", "00:00:00.25-08:00"], ["22:59:60Z", "24:00:00Z"]),
    ],
)  # fmt: skip
def test_dates_and_times_that_do_not_exist_do_not_match(grammars, form, valid, invalid):
    for given in ({}, {"pattern": "[0-9]"}):
        schema = {"type": "string", "format": form, **given}
        for text in (*valid, *invalid):
            found = matcher(grammars, json=schema)
            assert accepts(found, json.dumps(text)) is (text in valid), (text, given)


FORCING = (
    {"json": {"type": "object", "properties": {
        "block": {"enum": ["a request", "the pool"]}, "été": {"const": "x  y\n"},
        "count": {"type": "integer"}, "keys": {"type": "string", "maxLength": 9}},
        "required": ["block", "count"], "additionalProperties": False},
     "disable_any_whitespace": True},
    {"choice": ["a request has tokens", "a request lags", "a re"]},
    {"regex": "(the pool|the request): [0-9]{2} tokens, 漢字[a-z]{2}\\.\n\n\n\tend"},
    {"grammar": 'start: "<tool>" name "</tool>\\n"\nname: "get_block" | "get_blocks"'},
)  # fmt: skip


def walk(tokenizer, form, seed):
    """Random texts of a form: at each place the tokens that are forced, and the only ones that the
    masks there allow."""
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, [1])
    draw = np.random.default_rng(seed)
    compiled = grammars.compile(grammar_of(StructuredOutputsParams(**form))).result()
    for _ in range(6):
        found = grammars.matcher(compiled)
        for _ in range(30):
            if found.complete:
                break
            forced, step, single = [int(i) for i in found.forced()], found.copy(), []
            while not step.complete and len(only := allowed(step)) == 1:
                single += only
                step.advance(single[-1])
            yield forced, single
            found.advance(int(draw.choice(sorted(allowed(found)))))
    grammars.close()


def check_forced(tokenizer):
    count = 0
    for seed, form in enumerate(FORCING):
        for forced, single in walk(tokenizer, form, seed):
            assert single[: len(forced)] == forced
            assert bool(forced) == bool(single)
            count += len(forced)
    assert count > 50


@pytest.mark.parametrize("name", ["byte", "spm", "llama"])
def test_forced_tokens_are_those_that_masks_leave_one_by_one(kinds, name):
    """Byte-level BPE, SentencePiece BPE, Llama's: where characters are forced, a mask allows none
    but the tokenizer's own split, so that appending it at once gives the same ids."""
    check_forced(kinds[name].ours)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"])
def test_forced_tokens_of_real_tokenizers(model):
    check_forced(load_tokenizer(resolve_tokenizer(model, None, None)))


def test_a_tokenizer_that_changes_texts_splits_none_of_them(kinds):
    """Unigrams that normalize: ids of another text would be forced in place of what was."""
    tokens = _Tokens(kinds["unigram"].ours, 400, [1])
    for text in ("a request", "x\n\ny", "{", "\u00bd", " the pool"):
        assert b"".join(tokens.tokens[i] for i in tokens(text)) in (b"", text.encode())
    assert tokens(" the pool")
