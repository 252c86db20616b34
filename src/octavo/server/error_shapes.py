"""The shape of an error, by the API whose path was asked for.

All paths have OpenAI's (`HTTPError.body`), also those that nobody serves; those of Anthropic's
Messages API have its own, so that its clients raise the exceptions that their callers catch.
"""

import uuid
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.types import Scope

from octavo.errors import QueueFullError
from octavo.server.errors import HTTPError

ErrorShape = Callable[[HTTPError], Any]
MESSAGES = "/v1/messages"
REQUEST_ID = "request-id"
OVERLOADED = 529  # Anthropic's status of a full queue

_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        OVERLOADED: "overloaded_error",
    }
)


def messages_error(fault: HTTPError, request_id: str) -> dict[str, Any]:
    """An error as the Messages API has it, in a body or as an event."""
    usual = "api_error" if fault.status >= 500 else "invalid_request_error"
    error = {"type": _TYPES.get(fault.status, usual), "message": fault.message}
    return {"type": "error", "error": error, "request_id": request_id}


def answer_of(fault: HTTPError, scope: Scope) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of an answer with `fault` to the request of `scope`."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    if path != MESSAGES and not path.startswith(MESSAGES + "/"):
        return fault.status, fault.headers, fault.json()
    name = uuid.uuid4().hex
    status = OVERLOADED if fault.code == QueueFullError.code else fault.status
    body = msgspec.json.encode(messages_error(fault, name))
    return status, {**fault.headers, REQUEST_ID: name}, body
