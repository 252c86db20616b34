"""Grammars of users that are small and yet cost a lot to enforce, or more than the library can
bear.

llguidance follows rules recursively, and too deep a recursion ends the process; it puts terminals
in the places of their names, so that a few doublings make an expression of millions; and many rules
that may be empty are tried at each token. The limits keep checks and steps far below a second
(decision 47). The text is only looked over here: what is wrong with it is the library's to say.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from octavo.text import json_schema
from octavo.text.schema_cost import bound

MAX_RULES = 1000
MAX_REFERENCES = 2000  # to rules and terminals
MAX_NESTED = 400  # rules within each other
MAX_TERMINAL = 200_000  # characters of a terminal with those that it refers to

_DEFINITION = re.compile(
    r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_JSON = re.compile(r"%json\s*(?={)")
_BLANK = re.compile(r"\n\s*\n")


def without_blank_lines(text: str) -> str:
    """A grammar as GBNF's converter reads it in linear time."""
    return _BLANK.sub("\n", text)


def check_count(lines: Sequence[str], param: str) -> None:
    """Raise RequestError for more rules of GBNF than are converted in time."""
    bound("rules and terminals", sum(line.count("::=") for line in lines), MAX_RULES, param)


def check(text: str, param: str) -> None:
    """Raise RequestError, which names `param`, for a Lark grammar that is too costly, or has a
    schema that is refused."""
    _check_schemas(text, param)
    bodies = dict(_definitions(_TEXT.sub('""', text)))
    bound("rules and terminals", len(bodies), MAX_RULES, param)
    refs = {name: [w for w in _WORD.findall(body) if w in bodies] for name, body in bodies.items()}
    bound("references", sum(map(len, refs.values())), MAX_REFERENCES, param)
    nested = dict.fromkeys(bodies, 1)
    long = {name: len(body) for name, body in dict(_definitions(text)).items()}
    for name in _inner_first(refs):
        inner = [ref for ref in refs[name] if ref != name]
        nested[name] = 1 + max((nested[ref] for ref in inner), default=0)
        if name.isupper():
            long[name] += sum(long[ref] for ref in inner)
    bound("rules within each other", max(nested.values(), default=0), MAX_NESTED, param)
    longest = max((long[name] for name in bodies if name.isupper()), default=0)
    bound("characters of a terminal", longest, MAX_TERMINAL, param)


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    """Names and what follows them, up to the next definition."""
    found = list(_DEFINITION.finditer(text))
    for number, definition in enumerate(found, 1):
        end = found[number].start() if number < len(found) else len(text)
        yield definition[1], text[definition.end() : end]


def _inner_first(refs: Mapping[str, list[str]]) -> Iterator[str]:
    """Names, each after those that it refers to, as far as they do not refer back."""
    seen: set[str] = set()
    for start in refs:
        left = [(start, iter(refs[start]))] if start not in seen else []
        seen.add(start)
        while left:
            name, inner = left[-1]
            following = next((ref for ref in inner if ref not in seen), None)
            if following is None:
                left.pop()
                yield name
            else:
                seen.add(following)
                left.append((following, iter(refs[following])))


def _check_schemas(text: str, param: str) -> None:
    for found in _JSON.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue  # the library says what is wrong
        schema.pop("x-guidance", None)
        json_schema.load(json.dumps(schema), param)
