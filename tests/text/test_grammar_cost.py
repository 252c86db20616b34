"""Grammars of users that would cost seconds, gigabytes or the process are refused."""

import json

import pytest

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text import grammar_cost
from octavo.text.grammar import grammar_of


def rules(count, body, name="r"):
    lines = [f"{name}{i}: {body.format(f'{name}{i + 1}')}" for i in range(count)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "a"'])


HOSTILE = [{"type": "string", "pattern": f".*{i:04}.{{20}}"} for i in range(30)]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (rules(600, "{0} {0}"), "rules within each other"),
        (rules(1200, "{0}"), "rules and terminals"),
        (rules(30, "{0} {0}", "T"), "characters of a terminal"),
        ('start: T0\nT0: "a" T1 | T1\nT1[lazy]: ' + '"b" ' * 60_000, "characters of a terminal"),
        ("start: " + "r? " * 3000 + '\nr: "a"?', "references"),
        (f"start: %json {json.dumps({'allOf': HOSTILE})}", "patterns and formats"),
        ('start: %json {"type": "string", "maxLenght": 1}', "did you mean 'maxLength'"),
        ("root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(4000)),
         "rules and terminals"),
        ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(600))
         + '\nr600 ::= "a"', "rules within each other"),
    ],
)  # fmt: skip
def test_a_costly_grammar_is_refused_with_the_reason(grammar, words):
    params = StructuredOutputsParams(grammar=grammar[: 2**17])
    with pytest.raises(RequestError) as caught:
        grammar_of(params)
    assert words in str(caught.value)
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        rules(300, "{0} {0}"),
        rules(12, "{0} {0}", "T"),
        'start: e\ne: e "+" t | t\nt: "(" e ")" | NUMBER\nNUMBER: /[0-9]+/',
        "start: " + " ".join(f'"r{i}: a"' for i in range(3000)),
        'start: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}',
        'root ::= "a" b\n\n\n# a comment\n\nb ::= [0-9]+ | b "c"\n' + "\n" * 50_000,
    ],
)
def test_what_costs_little_is_taken(grammar):
    assert grammar_of(StructuredOutputsParams(grammar=grammar))


def test_what_is_no_grammar_is_the_librarys_to_refuse():
    for text in ("", ":", "a", "start: %json {", 'start: "', "x: y: z", "%json {}"):
        grammar_cost.check(text, "the_field")
