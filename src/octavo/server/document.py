"""The OpenAPI document, made from the structs that parse bodies and that make answers.

Beside a struct's own fields it names those that are accepted without effect, and no others: an
object with any other field is refused, as the document says.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.server.error_shapes import MESSAGES
from octavo.server.middleware import open_paths
from octavo.server.options import ServerConfig
from octavo.server.protocol import without_effect
from octavo.version import __version__

# method, path, body, reply (or its media type)
Described = tuple[str, str, type | None, type | str | None]
_REF = "#/components/schemas/{name}"
_TEXT: dict[str, Any] = {"type": "string"}
_ERROR_FIELDS = {
    "message": _TEXT,
    "type": _TEXT,
    "param": {"anyOf": [_TEXT, {"type": "null"}]},
    "code": _TEXT,
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_MESSAGES_ERROR = {"type": _TEXT, "message": _TEXT}
_CHUNKS = "events whose data are chunks in the shape of the JSON, then [DONE]"


def openapi_document(routes: Iterable[Described], options: ServerConfig) -> dict[str, Any]:
    """Paths in the order of `routes`; a reply that is a struct with `choices`, or that says what
    its `events` are, may be streamed."""
    routes = list(routes)
    structs = [kind for _, _, *kinds in routes for kind in kinds if isinstance(kind, type)]
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REF)
    known: dict[object, Any] = dict(zip(structs, schemas, strict=True))
    for kind in structs:
        components[kind.__name__]["properties"].update(without_effect(kind))
    components["Error"] = _object({"error": _object(_ERROR_FIELDS)})
    components["MessagesError"] = _object(
        {"type": {"const": "error"}, "error": _object(_MESSAGES_ERROR), "request_id": _TEXT}
    )
    paths: dict[str, Any] = {}
    for method, path, body, reply in routes:
        shown = path.replace(":path", "")
        operation = _operation(method, shown, known.get(body), reply, known.get(reply))
        if options.api_key and path not in open_paths(options):
            operation["security"] = [{name: []} for name in _KEYS]
        paths.setdefault(shown, {})[method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "OpenAI-compatible server",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if options.root_path:
        document["servers"] = [{"url": options.root_path}]
    if options.api_key:
        document["components"]["securitySchemes"] = _KEYS
    return document


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _operation(
    method: str, path: str, body: Any, reply: type | str | None, schema: Any
) -> dict[str, Any]:
    shape = "MessagesError" if path.startswith(MESSAGES) else "Error"
    error = {"application/json": {"schema": {"$ref": _REF.format(name=shape)}}}
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    found: dict[str, Any] = {
        "operationId": f"{method} {path}",
        "responses": {
            "200": {"description": "the answer", **_content(reply, schema)},
            "4XX": {"description": "the request is at fault", "content": error},
            "503": {"description": "try again later", "content": error, "headers": retry},
            "5XX": {"description": "the server is at fault", "content": error},
        },
    }
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    if body:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _content(reply: type | str | None, schema: Any) -> dict[str, Any]:
    if reply is None:
        return {}
    if isinstance(reply, str):
        return {"content": {reply: {"schema": _TEXT}}}
    content = {"application/json": {"schema": schema}}
    usual = _CHUNKS if "choices" in getattr(reply, "__struct_fields__", ()) else None
    if events := getattr(reply, "events", usual):
        # No type: some readers take the schema for the whole text, some for each event.
        content["text/event-stream"] = {"schema": {"description": f"with `stream`: {events}"}}
    return {"content": content}
