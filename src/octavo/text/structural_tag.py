"""Structural tags: free text in which certain tags begin a structure.

Two forms, those of vLLM: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and
xgrammar's tree, `{"format": {"type": ...}}`. Both become a Lark grammar for llguidance, in which
free text ends at the first place where a trigger, or what closes a tag, is spelled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import RequestError, shown
from octavo.text import json_schema
from octavo.text.lark import LarkRules

_MAX_TAGS = 128


def grammar(text: str, param: str) -> str:
    """The grammar of a structural tag. Raises RequestError, whose field is `param`."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not JSON: {error}", param) from None
    if not isinstance(tag, dict):
        raise RequestError(f"{param} must be an object, not {shown(tag)}", param)
    rules = _Rules(param)
    if "format" in tag:
        start = rules.format(tag["format"], "format", 0)
    elif {"structures", "triggers"} <= tag.keys():
        start = rules.triggered(_from_structures(rules, tag), "structures")
    else:
        raise RequestError(
            f"{param} must have 'format', or 'structures' and 'triggers'; it has "
            f"{shown(sorted(tag))}",
            param,
        )
    return rules.lark.grammar(start)


def _from_structures(rules: "_Rules", tag: Mapping[str, Any]) -> dict[str, Any]:
    """The first form as a `triggered_tags` of the second."""
    structures = rules.several(tag["structures"], "structures")
    tags = []
    for number, structure in enumerate(structures):
        at = f"structures[{number}]"
        rules.fields(structure, at, ("begin", "schema", "end"), ("begin", "end"))
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"triggers": tag["triggers"], "tags": tags}


@dataclass
class _Rules:
    """What the parts of a tag say, as rules. param: the field that errors name."""

    param: str
    lark: LarkRules = field(default_factory=LarkRules)

    def format(self, node: Any, at: str, depth: int, until: str | None = None) -> str:
        """What stands for a node of the tree in a rule. until: what closes the tag around it."""
        if depth > json_schema.MAX_DEPTH:
            raise self.error(at, f"is nested more than {json_schema.MAX_DEPTH} deep")
        kind = node.get("type") if isinstance(node, dict) else None
        maker = _FORMATS.get(kind) if isinstance(kind, str) else None
        if maker is None:
            raise self.error(at, f"must be an object whose type is one of {', '.join(_FORMATS)}")
        return maker(self, node, at, depth, until)

    def triggered(self, node: Mapping[str, Any], at: str, depth: int = 0) -> str:
        """Free text in which each of `triggers` begins one of `tags` that starts with it."""
        triggers = self.several(node.get("triggers"), f"{at}.triggers")
        tags = self.several(node.get("tags"), f"{at}.tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self.error(f"{at}.triggers", "must hold texts that are not empty")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for number, tag in enumerate(tags):
            place = f"{at}.tags[{number}]"
            begin = self.text(tag, "begin", place)
            owner = next((t for t in bodies if begin.startswith(t)), None)
            if owner is None:
                raise self.error(place, f"begins with {begin!r}, which none of the triggers starts")
            rest = f"{self.lark.literal(begin[len(owner) :])} " if begin != owner else ""
            bodies[owner].append(rest + self.body(tag, place, depth + 1))
        options = [
            self.lark.rule(f"{self.lark.until(trigger)} ({' | '.join(found)})")
            for trigger, found in bodies.items()
            if found
        ]
        one = f"({' | '.join(options)})"
        first = bool(node.get("at_least_one"))
        if node.get("stop_after_first"):
            return one if first else f"({one} | TEXT)"
        return f"{one}{'+' if first else '*'} TEXT"

    def body(self, tag: Mapping[str, Any], at: str, depth: int) -> str:
        """The content of a tag and what closes it."""
        self.fields(tag, at, ("type", "begin", "content", "end"), ("begin", "content", "end"))
        end = self.text(tag, "end", at)
        content = self.format(tag["content"], f"{at}.content", depth, end)
        closed = tag["content"].get("type") == "any_text"  # which the text before it contains
        return content if closed or not end else f"{content} {self.lark.literal(end)}"

    def text(self, node: Any, name: str, at: str) -> str:
        value = node.get(name) if isinstance(node, dict) else None
        if not isinstance(value, str):
            raise self.error(f"{at}.{name}", f"must be a text, not {shown(value)}")
        return value

    def several(self, value: Any, at: str) -> Sequence[Any]:
        if not isinstance(value, list) or not 1 <= len(value) <= _MAX_TAGS:
            raise self.error(at, f"must be a list of 1 to {_MAX_TAGS}, not {shown(value)}")
        return value

    def fields(self, node: Any, at: str, known: Sequence[str], needed: Sequence[str]) -> None:
        if not isinstance(node, dict):
            raise self.error(at, f"must be an object, not {shown(node)}")
        if unknown := sorted(node.keys() - set(known)):
            raise self.error(at, f"has an unknown field {unknown[0]!r}; known: {', '.join(known)}")
        if missing := [name for name in needed if name not in node]:
            raise self.error(at, f"lacks {missing[0]!r}")

    def error(self, at: str, problem: str) -> RequestError:
        return RequestError(f"{self.param}: {at} {problem}", self.param)


# rules, node, where it is, depth, what closes the tag around it -> what stands for it in a rule
_Format = Callable[[_Rules, dict[str, Any], str, int, str | None], str]


def _const_string(rules: _Rules, node: dict[str, Any], at: str, *_: Any) -> str:
    rules.fields(node, at, ("type", "value"), ("value",))
    return rules.lark.literal(rules.text(node, "value", at))


def _json_schema(rules: _Rules, node: dict[str, Any], at: str, *_: Any) -> str:
    rules.fields(node, at, ("type", "json_schema", "style"), ("json_schema",))
    if node.get("style") not in (None, "json"):
        raise rules.error(f"{at}.style", f"must be 'json', not {shown(node['style'])}")
    try:
        text = json.dumps(node["json_schema"], allow_nan=False)
    except ValueError as error:
        raise rules.error(f"{at}.json_schema", f"is no JSON: {error}") from None
    return rules.lark.json(json_schema.load(text, rules.param))


def _regex(rules: _Rules, node: dict[str, Any], at: str, *_: Any) -> str:
    rules.fields(node, at, ("type", "pattern"), ("pattern",))
    return rules.lark.regex(rules.text(node, "pattern", at))


def _any_text(
    rules: _Rules, node: dict[str, Any], at: str, depth: int, until: str | None
) -> str:  # fmt: skip
    rules.fields(node, at, ("type",), ())
    return rules.lark.until(until) if until else rules.lark.rule("TEXT")


def _sequence(
    rules: _Rules, node: dict[str, Any], at: str, depth: int, until: str | None
) -> str:  # fmt: skip
    rules.fields(node, at, ("type", "elements"), ("elements",))
    elements = rules.several(node["elements"], f"{at}.elements")
    *before, last = range(len(elements))
    for number in before:
        if isinstance(elements[number], dict) and elements[number].get("type") == "any_text":
            raise rules.error(
                f"{at}.elements[{number}]", "is any_text before other elements: where it ends is "
                "open; use triggered_tags, or put it last"
            )  # fmt: skip
    parts = [rules.format(elements[i], f"{at}.elements[{i}]", depth + 1) for i in before]
    return " ".join([*parts, rules.format(elements[last], f"{at}.elements[{last}]", depth + 1)])


def _or(rules: _Rules, node: dict[str, Any], at: str, depth: int, until: str | None) -> str:
    rules.fields(node, at, ("type", "elements"), ("elements",))
    elements = rules.several(node["elements"], f"{at}.elements")
    parts = [
        rules.format(element, f"{at}.elements[{i}]", depth + 1)
        for i, element in enumerate(elements)
    ]
    return f"({' | '.join(parts)})"


def _tag(rules: _Rules, node: dict[str, Any], at: str, depth: int, _: str | None) -> str:
    return f"{rules.lark.literal(rules.text(node, 'begin', at))} {rules.body(node, at, depth + 1)}"


def _triggered_tags(rules: _Rules, node: dict[str, Any], at: str, depth: int, _: str | None) -> str:
    known = ("type", "triggers", "tags", "at_least_one", "stop_after_first")
    rules.fields(node, at, known, ("triggers", "tags"))
    return rules.triggered(node, at, depth)


def _separated_tags(rules: _Rules, node: dict[str, Any], at: str, depth: int, _: str | None) -> str:
    known = ("type", "tags", "separator", "at_least_one", "stop_after_first")
    rules.fields(node, at, known, ("tags", "separator"))
    tags = rules.several(node["tags"], f"{at}.tags")
    options = [_tag(rules, tag, f"{at}.tags[{i}]", depth + 1, None) for i, tag in enumerate(tags)]
    one = f"({' | '.join(options)})"
    separator = rules.lark.literal(rules.text(node, "separator", at))
    several = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
    return several if node.get("at_least_one") else f"({several})?"


_FORMATS: Mapping[str, _Format] = {
    "const_string": _const_string,
    "json_schema": _json_schema,
    "regex": _regex,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _separated_tags,
}
