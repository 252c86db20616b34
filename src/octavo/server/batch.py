"""A batch of requests in OpenAI's file format, answered by the server's own application.

Each line is answered as `POST` to the application would be, over an ASGI call in place of a
socket, so that a field means the same in a batch and over HTTP. Reading lines and writing answers
is this module's part; files, resuming and progress are `cli.run_batch`'s.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from octavo.config import EngineConfig
from octavo.engine.client import EXECUTOR
from octavo.errors import ConfigError, EngineDeadError, RequestError, nearest
from octavo.server.app import create_app
from octavo.server.options import ServerConfig
from octavo.server.service import Service

URLS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = ("custom_id", "method", "url", "body")
_MAX_ID = 512
_BUSY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch that can be sent."""

    custom_id: str
    url: str
    body: bytes


def parse_line(line: bytes) -> BatchRequest:
    """Raises RequestError for a line that cannot be sent; its body is checked when it is."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {type(value).__name__}")
    for name in value:
        if name not in _FIELDS:
            raise RequestError(f"unknown field {name[:60]!r}{nearest(name[:60], _FIELDS)}")
    name = value.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID:
        raise RequestError(f"custom_id must be a text of 1 to {_MAX_ID} characters")
    if value.get("method") != "POST":
        raise RequestError(f"method must be 'POST', not {value.get('method')!r:.60}")
    if value.get("url") not in URLS:
        raise RequestError(f"url must be one of {', '.join(URLS)}, not {value.get('url')!r:.60}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise RequestError("body must be a JSON object")
    if body.get("stream"):
        raise RequestError("body.stream: a batch has whole answers; leave stream out")
    return BatchRequest(name, value["url"], json.dumps(body).encode())


def custom_id_of(line: bytes) -> str | None:
    """The id of a line, also of one that cannot be sent, if it has one."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            return str(value["custom_id"])
    return None


def error_line(custom_id: str | None, number: int, message: str) -> dict[str, Any]:
    """The reply to a line that was not sent."""
    error = {"code": "invalid_request", "message": f"line {number}: {message}", "line": number}
    return _reply(custom_id, None, error)


class BatchEngine:
    """An engine in its own process, and the server's application over it."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        self._service = service
        self._app = app

    async def answer(self, request: BatchRequest) -> dict[str, Any]:
        """The reply to a line. Raises EngineDeadError when the engine stops."""
        while True:
            status, headers, body = await _post(self._app, request)
            if self._service.failure is not None or not self._service.ready:
                raise EngineDeadError(self._service.failure or "it stopped")
            if status != 503:
                break
            await asyncio.sleep(_BUSY_SECONDS)  # the queue is full
        found = json.loads(body)
        name = headers.get(b"x-request-id", b"").decode() or uuid.uuid4().hex
        response = {"status_code": status, "request_id": name, "body": found}
        if status == 200:
            return _reply(request.custom_id, response, None)
        error = {"code": found["error"]["code"], "message": found["error"]["message"]}
        return _reply(request.custom_id, response, error)

    @property
    def names(self) -> tuple[str, ...]:
        """What bodies may call the model."""
        return self._service.names


@contextlib.asynccontextmanager
async def batch_engine(
    config: EngineConfig, served_model_name: tuple[str, ...] = (), executor: str = EXECUTOR
) -> AsyncIterator[BatchEngine]:
    """Start an engine; stop it at the end. Raises ConfigError where it cannot start."""
    options = ServerConfig(served_model_name=served_model_name)
    service = Service(config, options, executor)
    ready = asyncio.Event()
    engine = asyncio.create_task(service.run_engine(ready.set))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({engine, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            engine.result()
            raise ConfigError(service.failure or "the engine could not start")
        yield BatchEngine(service, create_app(service))
    finally:
        for task in (engine, waiting):
            task.cancel()
        await asyncio.gather(engine, waiting, return_exceptions=True)
        await service.close()


def _reply(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


async def _post(app: ASGIApp, request: BatchRequest) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, body) of the application's answer."""
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": request.url, "raw_path": request.url.encode(),
        "query_string": b"", "root_path": "", "client": ("batch", 0), "server": ("batch", 80),
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(request.body)).encode()),
        ],
    }  # fmt: skip
    sent = False
    never = asyncio.Event()
    status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await never.wait()  # the client of a batch does not disconnect
        sent = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)
