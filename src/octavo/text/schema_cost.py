"""Schemas that are small and yet cost a lot to enforce, or more than the library can bear.

llguidance intersects the expressions that hold for one value, compares those of the names of
properties, counts in remainders for `multipleOf`, and follows references recursively: what it needs
grows out of proportion, and too deep a recursion ends the process. The limits here keep each check
far below a second (decision 47).
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from octavo.errors import RequestError
from octavo.text.schema_parts import DEFINITIONS, inside, schemas, target

MAX_NESTED = 400  # schemas within each other, through references too
MAX_REFERENCES = 1000  # different ones
MAX_OPTIONAL = 500  # properties of one object
MAX_EXPRESSIONS = 12  # that hold for one value
MAX_PATTERNS = 64  # of the names of properties
MAX_REMAINDERS = 100_000  # of all `multipleOf`
MAX_PRODUCT = 1000  # of those that hold for one value, and of all where several do

_DATES = ("date", "time", "date-time")  # an expression of ours beside the library's


def check(schema: Mapping[str, Any], param: str) -> None:
    """Raise RequestError, which names `param`, for a schema that is too costly."""
    parts = [part for _, part in schemas(schema, param)]
    refs = {ref for part in parts if isinstance(ref := part.get("$ref"), str)}
    bound("different references ($ref)", len(refs), MAX_REFERENCES, param)
    named = [part["patternProperties"] for part in parts if "patternProperties" in part]
    patterns = sum(len(names) for names in named if isinstance(names, Mapping))
    bound("patternProperties", patterns, MAX_PATTERNS, param)
    remainders = sum(_remainders(part) for part in parts if "multipleOf" in part)
    bound("remainders of multipleOf", remainders, MAX_REMAINDERS, param)
    tree = _Tree(schema)
    bound("schemas within each other", tree.depth(), MAX_NESTED, param)
    bound("properties of one object that are not required", tree.most(_optional), MAX_OPTIONAL,
           param)  # fmt: skip
    what = "patterns and formats for one value (allOf)"
    bound(what, tree.most(_expressions), MAX_EXPRESSIONS, param)
    if tree.most(lambda part: "multipleOf" in part) > 1:
        bound("remainders of multipleOf in allOf", remainders, MAX_PRODUCT, param)
        product = round(math.exp(min(20, tree.most(lambda part: math.log(_remainders(part))))))
        bound("remainders of multipleOf for one value", product, MAX_PRODUCT, param)


def bound(what: str, found: float, most: int, param: str) -> None:
    """Raise RequestError, which names `param`, if there are more of `what` than `most`."""
    if found > most:
        raise RequestError(f"{param} is too complex: at most {most} {what} can be enforced", param)


def _optional(part: Mapping[str, Any]) -> int:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, Mapping):
        return 0
    named = (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else ()
    )
    return len(properties.keys() - named)


def _expressions(part: Mapping[str, Any]) -> int:
    form = part.get("format")
    return ("pattern" in part) + (form is not None) + (isinstance(form, str) and form in _DATES)


def _remainders(part: Mapping[str, Any]) -> int:
    """How many states it takes to know whether a number is a multiple, at least 1."""
    value = part.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 1
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    if not isinstance(exponent, int) or exponent > 20:
        return MAX_REMAINDERS + 1
    return max(1, int(Decimal((0, digits, max(exponent, 0)))))


class _Tree:
    """A schema with what its references lead to in their places; a cycle counts once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def depth(self) -> int:
        """How many schemas are within each other; a number above MAX_NESTED for all above."""
        known: dict[str, int] = {}

        def of(part: Any, above: int) -> int:
            if not isinstance(part, Mapping):
                return 0
            if above > MAX_NESTED:
                return 1
            found = 0
            for _, inner in inside(part):  # in a loop: frames are few here, too
                found = max(found, of(inner, above + 1))
            ref = part.get("$ref")
            if isinstance(ref, str) and known.get(ref) is None:
                known[ref] = 0  # while it is looked at, and then of a cycle
                known[ref] = of(target(self._schema, ref), above + 1)
            return 1 + max(found, known.get(ref, 0) if isinstance(ref, str) else 0)

        return of(self._schema, 0)

    def most(self, own: Callable[[Mapping[str, Any]], float]) -> float:
        """What `own` counts in schemas that hold for one value, added up; at most of all values."""
        known: dict[str, float] = {}

        def of(part: Any) -> float:
            if not isinstance(part, Mapping):
                return 0
            found = own(part)
            several: dict[str, float] = {"allOf": 0, "anyOf": 0, "oneOf": 0}
            for step, inner in inside(part):
                name = step.partition("/")[0]
                if name == "allOf":
                    several[name] += of(inner)
                elif name in several:
                    several[name] = max(several[name], of(inner))
                elif name not in DEFINITIONS:
                    found = max(found, of(inner))
            ref = part.get("$ref")
            if isinstance(ref, str) and ref not in known:
                known[ref] = 0
                known[ref] = of(target(self._schema, ref))
            return found + sum(several.values()) + (known[ref] if isinstance(ref, str) else 0)

        return of(self._schema)
