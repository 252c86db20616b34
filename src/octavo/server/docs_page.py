"""`/docs`: the OpenAPI document as one page, without scripts and without requests to elsewhere."""

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8888; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
tr { border-bottom: 1px solid #8884; }
"""
_METHODS = ("get", "head", "post")


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML for the document that `server.document` makes."""
    return "\n".join(_page(document)) + "\n"


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    prefix = document["servers"][0]["url"] if "servers" in document else ""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f"<title>{title}</title>"
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield f"<p>{html.escape(info['description'])}. The same for programs: "
    yield f'<a href="{html.escape(prefix)}/openapi.json">openapi.json</a>.'
    if "securitySchemes" in document["components"]:
        yield "Operations with a key need the header <code>Authorization: Bearer KEY</code>."
    yield "</p>\n<h2>Operations</h2>\n<table>"
    yield "<tr><th>Request</th><th>Body</th><th>Answer</th></tr>"
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                yield _operation(f"{method.upper()} {prefix}{path}", operations[method])
    yield "</table>"
    for name, schema in document["components"]["schemas"].items():
        yield from _schema(name, schema)
    yield "</body>\n</html>"


def _operation(name: str, operation: Mapping[str, Any]) -> str:
    body = _content(operation.get("requestBody", {}))
    answer = _content(operation["responses"]["200"])
    key = " (key)" if "security" in operation else ""
    shown = html.escape(name)
    return f"<tr><td><code>{shown}</code>{key}</td><td>{body}</td><td>{answer}</td></tr>"


def _content(holder: Mapping[str, Any]) -> str:
    kinds = [
        _type(content["schema"]) if media == "application/json" else html.escape(media)
        for media, content in holder.get("content", {}).items()
    ]
    return ", or ".join(kinds)


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    shown = html.escape(name)
    yield f'<h2 id="{shown}">{shown}</h2>'
    if text := schema.get("description"):
        yield f"<p>{html.escape(text)}</p>"
    yield "<table>\n<tr><th>Field</th><th>Value</th><th></th></tr>"
    required = schema.get("required", ())
    for field, value in schema.get("properties", {}).items():
        note = "required" if field in required else html.escape(value.get("description", ""))
        yield (
            f"<tr><td><code>{html.escape(field)}</code></td><td>{_type(value)}</td>"
            f"<td>{note}</td></tr>"
        )
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words; a struct as a link to its table."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return "only " + " or ".join(
            html.escape(json.dumps(value, ensure_ascii=False)) for value in schema["enum"]
        )
    kind = schema.get("type", "any value")
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    return html.escape(kind)
