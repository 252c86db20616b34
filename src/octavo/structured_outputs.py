"""`StructuredOutputsParams`: the form that a request's text must have.

Names and meanings are vLLM's. A value is frozen, and its shape is validated when it is created;
whether a schema or a grammar can be enforced is checked in `octavo.text.grammar`.
"""

import json as json_library
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import RequestError, RequestTypeError, nearest, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHARACTERS = 2**17  # of a schema, expression or grammar
MAX_CHOICES = 4096
FIELD = "structured_outputs"
# Why a text ends for which a limit of the library was reached on the way: the request's own fault.
TOO_COMPLEX = (
    "the form of the answer (structured_outputs, response_format, or the tools' schemas) is too "
    "complex to be enforced"
)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text must be. Exactly one of the first six fields is given.

    json: a value of this JSON Schema; its text, or an object.
    regex: this regular expression matches the whole of it (Rust's syntax).
    choice: one of these texts.
    grammar: a text of this grammar, in Lark's form or, where a rule has `::=`, in GBNF.
    json_object: any JSON object; only True asks for something.
    structural_tag: free text in which certain tags begin a structure; JSON text, or an object.
    disable_any_whitespace: no whitespace between the tokens of JSON. By default there may be up to
        40 characters at each place, so that no text consists of it.
    disable_additional_properties: objects have only the properties that the schema lists.
    whitespace_pattern: a regular expression of the whitespace between the tokens of JSON.

    Raises RequestTypeError or RequestError, naming the field, the value and what would be valid.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{', '.join(given)} are given" if given else "none is"
            raise RequestError(
                f"{FIELD} must have exactly one of {', '.join(KINDS)}; {found}", FIELD
            )
        self._check(given[0], getattr(self, given[0]))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), "true or false")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
        for name in ("disable_any_whitespace", "disable_additional_properties",
                     "whitespace_pattern"):  # fmt: skip
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise RequestError(
                    f"{FIELD}.{name} is for json and json_object; {given[0]} is given",
                    f"{FIELD}.{name}",
                )

    def _check(self, kind: str, value: Any) -> None:
        settle = self.__dict__.__setitem__  # the one place where a frozen value is filled in
        if kind in ("json", "structural_tag"):
            settle(kind, _json_text(kind, value))
        elif kind == "choice":
            settle(kind, _choices(value))
        elif kind == "json_object":
            if value is not True:
                raise RequestError(
                    f"{FIELD}.json_object must be true, not {shown(value)}; leave it out otherwise",
                    f"{FIELD}.json_object",
                )
        else:
            _check_text(kind, value)

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def param(self) -> str:
        """The field of a request that an error of it names."""
        return f"{FIELD}.{self.kind}"

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """`value` itself, or one made of a mapping of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestTypeError(
                f"{FIELD} must be StructuredOutputsParams or an object of its fields, not "
                f"{shown(value)}",
                FIELD,
            )
        known = [item.name for item in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestTypeError(
                    f"unknown field {shown(name)} of {FIELD}{nearest(str(name), known)}",
                    f"{FIELD}.{name}",
                )
        return cls(**{name: part for name, part in value.items() if part is not None})


def _json_text(name: str, value: object) -> str:
    """`value` as JSON text, properties in the order in which they are written."""
    if isinstance(value, str):
        _check_text(name, value)
        return value
    if not isinstance(value, (Mapping, bool)) or (name != "json" and isinstance(value, bool)):
        raise _wrong_type(name, value, "an object or its JSON text")
    if _is_longer(value, MAX_CHARACTERS):  # and would take as long to write
        raise RequestError(
            f"{FIELD}.{name} must have at most {MAX_CHARACTERS} characters", f"{FIELD}.{name}"
        )
    try:
        text = json_library.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{FIELD}.{name} is no JSON: {error}", f"{FIELD}.{name}") from None
    _check_text(name, text)
    return text


def _is_longer(value: object, most: int) -> bool:
    """Whether the JSON text of `value` has more than `most` characters, or is not known to have
    fewer; in a time that `most` bounds."""
    left, size = [value], 0
    while left and size <= most:
        part = left.pop()
        size += len(part) + 2 if isinstance(part, (str, Mapping, list, tuple)) else 1
        if isinstance(part, Mapping) and size <= most:
            left += part.keys()
            left += part.values()
        elif isinstance(part, (list, tuple)) and size <= most:
            left += part
    return size > most


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a string")
    if not value.strip() and name != "whitespace_pattern":
        raise RequestError(f"{FIELD}.{name} is empty", f"{FIELD}.{name}")
    if len(value) > MAX_CHARACTERS:
        raise RequestError(
            f"{FIELD}.{name} must have at most {MAX_CHARACTERS} characters, not {len(value)}",
            f"{FIELD}.{name}",
        )
    if "\0" in value:
        raise RequestError(f"{FIELD}.{name} must not hold a NUL character", f"{FIELD}.{name}")


def _choices(value: object) -> tuple[str, ...]:
    at = f"{FIELD}.choice"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong_type("choice", value, "a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise RequestError(f"{at} must have 1 to {MAX_CHOICES} texts, not {len(value)}", at)
    for text in value:
        if not isinstance(text, str):
            raise RequestTypeError(f"{at} must hold strings, not {shown(text)}", at)
        if not text or "\0" in text:
            raise RequestError(f"{at} must hold texts that are not empty, without NUL", at)
    if (size := sum(map(len, value))) > MAX_CHARACTERS:
        raise RequestError(f"{at} must have at most {MAX_CHARACTERS} characters, not {size}", at)
    return tuple(dict.fromkeys(value))


def _wrong_type(name: str, value: object, right: str) -> RequestTypeError:
    at = f"{FIELD}.{name}"
    return RequestTypeError(f"{at} must be {right}, not {shown(value)}", at)
