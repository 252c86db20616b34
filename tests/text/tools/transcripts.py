"""Answers with tool calls, made from a seed, and what a parser must make of them.

A format's tests give these to `ToolFormat.write` and to its parser, in every chunking.
"""

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.text.answer import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
    Reasoning,
    joined,
)
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.tagged import TaggedFormat


@dataclass(frozen=True)
class Token:
    """What a tokenizer says of an added token."""

    content: str


class NoTokens:
    """A tokenizer whose added tokens are `words`, as far as `Markers` asks it."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.added_tokens = {1000 + i: Token(word) for i, word in enumerate(words)}
        self._ids = {word: 1000 + i for i, word in enumerate(words)}
        self.special_ids = frozenset(self.added_tokens)

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)


def both_markers(tool_format: ToolFormat) -> list[Markers]:
    """The format's markers for a tokenizer that has them as added tokens, and one that has none."""
    words = tool_format.markers
    return [Markers(NoTokens(), words), Markers(NoTokens(words), words)]  # type: ignore[arg-type]


def tool(name: str, required: Sequence[str] = (), **properties: Any) -> Tool:
    return Tool(name, f"About {name}.", {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    })  # fmt: skip


TOOLS = {one.name: one for one in (
    tool("get_weather", ["city"], city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
    tool("send-mail.v2", ["to", "body"], to={"type": "array", "items": {"type": "string"}},
         body={"type": "string"}, urgent={"type": "boolean"},
         headers={"type": "object", "additionalProperties": {"type": "string"}}),
    tool("plot", ["points"], points={"type": "array", "items": {"type": "number"}},
         options={"type": "object", "properties": {"title": {"type": "string"},
                  "grid": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
         note={"type": ["string", "null"]}),
)}  # fmt: skip

_WORDS = ("Rome", "São Paulo", "東京", "naïve café", "🌶 and 👩‍👩‍👧", "a 'b' \"c\"", "back\\slash",
          "line\nbreak", "tab\there", "", " ", "{", "}", "[]", "name", '{"name": "now"}', "1",
          "true", "null", "\u2028", "</s>", "é\u0301", "```json", "; ", ", ")  # fmt: skip
_TEXTS = ("I will look that up.", "Sure!\nOne moment", "Été: 100 % 🌶", "a < b && c > d", "Wait...",
          "First\n\nsecond", "- a list\n- of things.")  # fmt: skip


@dataclass(frozen=True)
class Transcript:
    """calls: one after another, in one answer. before, after: content."""

    calls: tuple[Call, ...]
    before: str = ""
    after: str = ""
    tools: dict[str, Tool] = field(default_factory=lambda: TOOLS)


def transcripts(
    markers: Sequence[str], count: int = 100, seed: int = 0, most: int = 3
) -> list[Transcript]:
    """`count` of them; markers: of the format, some stand in the arguments' texts."""
    draw = random.Random(seed)
    return [_transcript(draw, markers, most) for _ in range(count)]


def _transcript(draw: random.Random, markers: Sequence[str], most: int) -> Transcript:
    number = draw.choice((0, 1, 1, 1, 2, most))
    calls = tuple(_call(draw, markers) for _ in range(number))
    before = draw.choice(_TEXTS) if draw.random() < 0.4 or not calls else ""
    after = draw.choice(_TEXTS) if calls and draw.random() < 0.15 else ""
    return Transcript(calls, before, after)


def _call(draw: random.Random, markers: Sequence[str]) -> Call:
    name = draw.choice(list(TOOLS))
    arguments: dict[str, Any] = {}
    schema = TOOLS[name].parameters
    for key, kind in schema["properties"].items():
        if key in schema["required"] or draw.random() < 0.5:
            arguments[key] = _value(draw, kind, markers)
    return Call(name, arguments)


def _value(draw: random.Random, schema: dict[str, Any], markers: Sequence[str]) -> Any:
    kind = schema["type"]
    if isinstance(kind, list):
        kind = draw.choice(kind)
    if kind == "string":
        return _string(draw, markers)
    if kind == "integer":
        return draw.choice((0, -1, 7, 2**53, -(10**20), draw.randrange(1000)))
    if kind == "number":
        return draw.choice((0, 1.5, -2.25, 1e300, 5e-7, draw.random()))
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        return [_value(draw, schema["items"], markers) for _ in range(draw.randrange(4))]
    found = {}
    for key, inner in schema.get("properties", {}).items():
        if draw.random() < 0.7:
            found[key] = _value(draw, inner, markers)
    if "additionalProperties" in schema:
        for _ in range(draw.randrange(3)):
            key = "".join(draw.choices(string.ascii_letters + " ü\"'", k=draw.randrange(1, 6)))
            found[key] = _value(draw, schema["additionalProperties"], markers)
    return found


def _string(draw: random.Random, markers: Sequence[str]) -> str:
    if draw.random() < 0.02:
        return "".join(draw.choices(string.printable, k=2000))
    words = [*_WORDS, *markers] if draw.random() < 0.5 else _WORDS
    return draw.choice((" ", "")).join(draw.choices(words, k=draw.randrange(1, 4)))


def of_format(
    tool_format: ToolFormat, count: int = 100, seed: int = 0, with_markers: bool = True
) -> list[Transcript]:
    """Of those, what the format can write. A raw value ends with its closing tag or quote,
    wherever that stands, and null of a string that may be null is no string."""
    raw = isinstance(tool_format, TaggedFormat)
    ends = {getattr(tool_format, "value_end", None), getattr(tool_format, "quote", None)}
    inside = [word for word in tool_format.markers if with_markers and word not in ends]
    return [made for made in transcripts(inside, count, seed) if not raw or not any(
        call.arguments.get("note") == "null" for call in made.calls
    )]  # fmt: skip


# How a text is cut.


def whole(text: str) -> list[str]:
    return [text]


def characters(text: str) -> list[str]:
    return list(text)


def in_two(text: str) -> Iterator[list[str]]:
    """Every way to cut it in two."""
    return ([text[:at], text[at:]] for at in range(1, len(text)))


def at_random(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    most = max(0, min(len(text) - 1, draw.randrange(1, 12)))
    cuts = sorted(draw.sample(range(1, len(text)), most)) if most else []
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


# What a parser makes of it.


def events_of(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    """All of one answer, with ids left out, for they are new each time."""
    found: list[Event] = []
    for piece in pieces:
        found += parser.feed(piece)
    return joined([_without_id(event) for event in [*found, *parser.finish()]])


def _without_id(event: Event) -> Event:
    return CallBegin(event.index, "", event.name) if isinstance(event, CallBegin) else event


@dataclass
class Answer:
    """calls: name, the text of the arguments, whether it is complete."""

    content: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)


def answer_of(events: Sequence[Event]) -> Answer:
    found = Answer()
    for event in events:
        match event:
            case Content(text):
                found.content += text
            case CallBegin(index, _, name):
                assert index == len(found.calls)
                found.calls.append((name, "", False))
            case CallArguments(index, text):
                name, arguments, ended = found.calls[index]
                assert not ended
                found.calls[index] = (name, arguments + text, False)
            case CallEnd(index):
                name, arguments, ended = found.calls[index]
                assert not ended
                found.calls[index] = (name, arguments, True)
            case Reasoning():
                pass  # of the formats that have it in their own frame
    return found


def parse(
    tool_format: ToolFormat,
    markers: Markers,
    text: str,
    tools: dict[str, Tool] = TOOLS,
    cut: Callable[[str], Sequence[str]] = whole,
) -> Answer:
    """Of a text whose markers are spelled."""
    pieces = cut(markers.in_text(text))
    return answer_of(events_of(tool_format.parser(tools, markers), pieces))


def read(tool_format: ToolFormat, text: str) -> Answer:
    """Of a text, asserted to be the same with and without markers as tokens, whole and by
    character."""
    first, *others = [
        parse(tool_format, markers, text, cut=cut)
        for markers in both_markers(tool_format)
        for cut in (whole, characters)
    ]
    assert all(other == first for other in others)
    return first
