"""Arguments as JSON text, of values that a format writes otherwise."""

import json
import math
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_JSON_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MOST_DIGITS = 4000  # of a number; Python converts no longer ones


def string(text: str) -> str:
    """The JSON of a string."""
    return value(text)


def read_string(text: str) -> str:
    """The string of which `text` is the JSON."""
    found: str = json.loads(text)
    return found


def value(value: Any) -> str:
    """The JSON of any value. Half a surrogate pair, which an escape may make, stays an escape."""
    return _SURROGATE.sub(
        lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def integer(text: str) -> str | None:
    """The JSON of what is written as an integer; None if it is none."""
    if len(text) > MOST_DIGITS:
        return None
    if _JSON_INTEGER.fullmatch(text):
        return text
    if _INTEGER.fullmatch(text):
        return str(int(text))
    if _NUMBER.fullmatch(text) and float(text).is_integer() and abs(float(text)) < 2**53:
        return str(int(float(text)))
    return None


def number(text: str, finite: bool = True) -> str | None:
    """The JSON of what is written as a number; None if it is none. finite: also None if it is
    beyond what a float holds; JSON has such numbers, and so may a grammar of JSON."""
    if len(text) > MOST_DIGITS or not _NUMBER.fullmatch(text):
        return None
    if _INTEGER.fullmatch(text):
        return integer(text)
    if _JSON_NUMBER.fullmatch(text) and not finite:
        return text
    if not math.isfinite(float(text)):
        return None
    return text if _JSON_NUMBER.fullmatch(text) else repr(float(text))


def composite(text: str, kind: type) -> str | None:
    """The JSON of what is written as JSON, if it is a `kind` (dict, list)."""
    for strict in (True, False):  # models write line breaks within strings as they are
        try:
            found = json.loads(text, strict=strict, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, kind):
            return text if strict else value(found)
    return None


def _refuse(word: str) -> None:
    raise ValueError(word)


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(text)
    return found
