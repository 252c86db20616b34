"""Calls drawn at random from a format's grammar: the parser reads each, and it is valid.

The tokens are bytes, so that a draw can end a value wherever the grammar lets it.
"""

import json
import random
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tests.text.tools import transcripts
from tests.text.tools.grammars import Calls

from octavo.errors import RequestError
from octavo.text import json_schema
from octavo.text.tools.base import Tool
from octavo.text.tools.gemma_call import GemmaFormat
from octavo.text.tools.pythonic import PythonicFormat
from octavo.text.tools.registry import FORMATS
from octavo.text.tools.tagged import TaggedFormat

NODE = {
    "type": "object", "required": ["v"], "additionalProperties": False,
    "properties": {"v": {"type": "integer"},
                   "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
}  # fmt: skip
SCHEMAS = [
    {"type": "string"}, {"type": "string", "minLength": 2, "maxLength": 5}, {"type": "boolean"},
    {"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, {"type": "string", "pattern": "b|^c"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"}, {"type": "string", "format": "ipv6"}, {"type": "null"},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 40}, {"type": "integer", "multipleOf": 5},
    {"type": "number", "minimum": -1.5, "maximum": 2}, {"type": ["string", "null"]}, {},
    {"enum": ["a", 1, None, True, "1", [1], {"k": "v"}]}, {"type": "string", "enum": ["a", 3]},
    {"type": ["integer", "string"]}, {"type": ["string", "boolean"], "minLength": 2},
    {"minimum": 3},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": ["boolean", "null"]}}, {"type": ["array", "object"]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
     "required": ["b"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}}, {"$ref": "#/$defs/node"},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 100}]},
    {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
               {"$ref": "#/$defs/node"}, {"type": "null"}]},
    {"allOf": [{"type": "string"}, {"minLength": 3}]},
]  # fmt: skip
_LETTERS = [*range(32, 127), 10, 9, *b"0123456789\"'{}[]:,truefalsnl-TFN abc "]
_ENDS = ["\n</parameter>\n", "</parameter>\n", "</arg_value>\n", "</arg_value>", '<|"|>',
         "<escape>", '"', '"]', "}", '"}', ")", "]", "'"]  # fmt: skip
_MOST = 600  # tokens of a draw


def drawn(grammar: Calls, draw: random.Random) -> str | None:
    """A text of the grammar; None if none was at its end in time."""
    matcher, found = grammar.start(), list[int]()
    mask = allocate_token_bitmask(1, 257)  # bytes, an end; markers fit, too
    for step in range(_MOST):
        if matcher.is_accepting():
            return grammar.spelled(found)
        more = matcher.compute_ff_tokens() or list(_end(grammar, matcher, draw, step))
        if not more:
            fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            more = [draw.choice([i for i in _LETTERS if bits[i]] or np.flatnonzero(bits).tolist())]
        matcher.consume_tokens(more)
        found += more
    return None


def _end(grammar: Calls, matcher, draw: random.Random, step: int) -> Iterator[int]:
    """Something that ends a value, the likelier the longer the text is."""
    if draw.random() < 0.25 + step / _MOST:
        for ids in map(grammar.ids, _ENDS):
            if matcher.validate_tokens(ids) == len(ids):
                yield from ids
                return


def check(tool_format, draw: random.Random, schemas, count: int) -> None:
    """Draws `count` calls for each schema that the format can be held to."""
    complete = 0
    for schema in schemas:
        properties = {"p": schema, "q": {"type": "integer"}}
        whole = {"type": "object", "properties": properties, "required": ["p"],
                 "additionalProperties": False, "$defs": {"node": NODE}}  # fmt: skip
        tool = Tool("f", parameters=json_schema.load(json.dumps(whole), "parameters"))
        try:
            grammar = Calls(tool_format, [tool], 1, added=draw.random() < 0.5)
        except RequestError:
            continue
        for text in filter(None, (drawn(grammar, draw) for _ in range(count))):
            found = transcripts.parse(tool_format, grammar.markers, text, {"f": tool})
            ((_, arguments, ended),) = found.calls
            assert ended, text
            assert found.content == "", text
            jsonschema.validate(
                json.loads(arguments), whole, format_checker=jsonschema.FormatChecker()
            )
            complete += 1
    assert complete > len(schemas) * count // 2


@pytest.mark.parametrize(
    "tool_format",
    [
        pytest.param(one, id=type(one).__name__)
        for one in FORMATS
        if isinstance(one, PythonicFormat | TaggedFormat | GemmaFormat)
    ],
)
def test_what_a_grammar_allows_is_read_and_valid(tool_format):
    draw = random.Random(6)
    check(tool_format, draw, draw.sample(SCHEMAS, 12), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool_format", [pytest.param(one, id=type(one).__name__) for one in FORMATS]
)
def test_much_of_what_a_grammar_allows_is_read_and_valid(tool_format):
    check(tool_format, random.Random(7), SCHEMAS, 10)
