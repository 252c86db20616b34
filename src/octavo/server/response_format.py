"""OpenAI's `response_format` and vLLM's `structured_outputs` of a body, as one value."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError, RequestTypeError, nearest, shown
from octavo.structured_outputs import FIELD, KINDS, StructuredOutputsParams

NAME = "response_format"
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA = f"{NAME}.json_schema"


def structured_outputs(
    response_format: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """The form that a body asks for; None for free text.

    `response_format` says which, with the options of `structured_outputs` if there are any.
    """
    form = _of_response_format(response_format or {"type": "text"})
    if not form:
        return None if given is None else StructuredOutputsParams.of(given)
    options = {name: value for name, value in (given or {}).items() if value is not None}
    if others := [name for name in KINDS if name in options and name not in form]:
        raise RequestError(
            f"{NAME} and {FIELD}.{others[0]} are both given; leave one of them out", NAME
        )
    return StructuredOutputsParams.of({**options, **form})


def renamed(error: RequestError) -> RequestError:
    """An error of `structured_outputs` as one of the `response_format` that asked for it."""
    if not (error.param or "").startswith(FIELD):
        return error
    text = str(error)
    for old, new in (
        ("json", f"{_SCHEMA}.schema"),
        ("structural_tag", NAME),
        ("json_object", NAME),
    ):
        text = text.replace(f"{FIELD}.{old} ", f"{new} ").replace(f"{FIELD}.{old}:", f"{new}:")
    return type(error)(text, NAME)


def _of_response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    kind = value.get("type")
    if kind not in _TYPES:
        raise RequestError(
            f"{NAME}.type must be one of {', '.join(_TYPES)}, not {shown(kind)}", f"{NAME}.type"
        )
    if kind == "structural_tag":
        return {kind: {name: part for name, part in value.items() if name != "type"}}
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _check_fields(value, known, NAME)
    if kind == "json_schema":
        return {"json": _schema(value.get("json_schema"))}
    return {kind: True} if kind == "json_object" else {}


def _schema(described: object) -> object:
    if not isinstance(described, Mapping):
        raise RequestTypeError(
            f"{_SCHEMA} must be an object with 'name' and 'schema', not {shown(described)}", _SCHEMA
        )
    _check_fields(described, ("name", "description", "schema", "strict"), _SCHEMA)
    if not isinstance(described.get("name"), str):
        raise RequestError(f"{_SCHEMA}.name is missing: a short text", f"{_SCHEMA}.name")
    schema = described.get("schema")
    if not isinstance(schema, (Mapping, bool)):
        raise RequestTypeError(
            f"{_SCHEMA}.schema must be a JSON Schema, an object, not {shown(schema)}",
            f"{_SCHEMA}.schema",
        )
    return schema


def _check_fields(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise RequestError(
                f"unknown field {where}.{name[:60]!r}{nearest(name[:60], known)}",
                f"{where}.{name[:60]}",
            )
