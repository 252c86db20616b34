"""JSON in pieces: where a value ends, and what is none."""

import json

import pytest
from tests.text.tools.transcripts import in_two

from octavo.text.tools.json_scanner import JsonScanner


def scan(*pieces):
    """What was written of the value, what is left, and whether it is complete or failed."""
    scanner, written, left = JsonScanner(), "", ""
    for piece in pieces:
        at, text = scanner.feed(piece, 0)
        written += text
        left += piece[at:]
    return written, left, scanner.complete, scanner.failed


@pytest.mark.parametrize("value", [
    "{}", "[]", '""', '{"a": [1, -2.5e+3, true, false, null, {"b": {}}], "c": "d"}', " \n[ 1 , 2 ]",
    r'"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"', '"}]{["', '{"": ""}', '[[[[{"a":[]}]]]]', '"é🌶\u2028"',
])  # fmt: skip
def test_a_value_ends_where_it_ends_in_every_chunking(value):
    json.loads(value)
    for pieces in [[value + " }"], list(value + " }"), *in_two(value + " }")]:
        assert scan(*pieces) == (value, " }", True, False)


@pytest.mark.parametrize("scalar", ["0", "-1", "12.50", "1e9", "-0.1E-2", "true", "false", "null"])
def test_a_number_or_a_word_ends_where_another_character_follows(scalar):
    assert scan(scalar)[2:] == (False, False)
    for pieces in [[scalar + ","], list(scalar + ",")]:
        assert scan(*pieces) == (scalar, ",", True, False)


@pytest.mark.parametrize(("text", "read"), [
    ("}", 0), ("{1", 1), ('{"a" 1', 5), ('{"a":}', 5), ('{"a":1,}', 7), ("[1,]", 3), ("[,", 1),
    ("[1 2", 3), ('{"a":1]', 6), (r'"\x', 2), (r'"\u12g', 5), ("[01,", 3), ("[1.,", 3),
    ("[NaN,", 4), ("[tru,", 4), ("[+1,", 3), ("['a'", 1), ("[\ud800", 1),
])  # fmt: skip
def test_what_is_no_json_fails_where_it_is_none_in_every_chunking(text, read):
    whole = scan(text)
    assert whole[3]
    assert len(text) - len(whole[1]) == read
    for pieces in [list(text), *in_two(text)]:
        assert scan(*pieces) == whole


def test_control_characters_in_strings_become_escapes():
    assert scan('"a\nb\tc\x00"') == (r'"a\nb\tc\u0000"', "", True, False)


def test_deep_nesting_is_no_recursion():
    deep = "[" * 20_000
    assert scan(deep)[2:] == (False, False)
    assert scan(deep + "]" * 20_000)[2]
