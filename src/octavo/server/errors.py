"""Every failure as one shape: `{"error": {"message", "type", "param", "code"}}`.

Messages never hold a trace or a path of this machine, and are cut, so that a large bad request
does not come back as a large answer.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import EngineDeadError, OctavoError, QueueFullError, RequestError

_MAX_MESSAGE = 2000
RETRY_AFTER_SECONDS = 1


class HTTPError(OctavoError):
    """An error as an answer: the HTTP status, and the fields of the error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`, which tells the caller's fault from the server's."""
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


def unavailable(message: str, code: str) -> HTTPError:
    """503: the same request may be served later."""
    return HTTPError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def fault_of(error: Exception) -> HTTPError:
    """The answer for `error`. Unexpected exceptions are not disclosed."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, QueueFullError):
        return unavailable(str(error), error.code)
    if isinstance(error, RequestError):
        return HTTPError(400, str(error), code=error.code, param=error.param)
    if isinstance(error, EngineDeadError):
        return unavailable(str(error), "engine_dead")
    if isinstance(error, OctavoError):
        return HTTPError(500, str(error), code="engine_error")
    return HTTPError(500, "the server failed; its log says why", code="internal_error")
