"""The application: routes, errors in one shape, and what stands before them.

Routes are thin: each hands the request to a function of its own module.
"""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from octavo.log import get_logger
from octavo.server.chat import create_chat
from octavo.server.completions import create_completion
from octavo.server.document import openapi_document
from octavo.server.errors import HTTPError, unavailable
from octavo.server.middleware import BodyLimit, KeyGuard
from octavo.server.models import detokenize, get_model, json_response, list_models, tokenize
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.replies import (
    ChatCompletion,
    Completion,
    Model,
    ModelList,
    Text,
    Tokens,
    Version,
)
from octavo.server.service import Service
from octavo.server.sse import log_fault
from octavo.version import __version__

logger = get_logger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]

# method, path, handler, body, reply (or its media type)
_ROUTES: tuple[tuple[str, str, Handler, type | None, type | str | None], ...] = (
    ("POST", "/v1/completions", create_completion, CompletionBody, Completion),
    ("POST", "/v1/chat/completions", create_chat, ChatBody, ChatCompletion),
    ("GET", "/v1/models", list_models, None, ModelList),
    ("GET", "/v1/models/{name:path}", get_model, None, Model),
    ("POST", "/tokenize", tokenize, TokenizeBody, Tokens),
    ("POST", "/detokenize", detokenize, DetokenizeBody, Text),
)


async def health(service: Service, request: Request) -> Response:
    """200 while the engine answers; 503 with the reason while it does not."""
    if reason := service.unavailable_reason():
        return _error_response(unavailable(reason, "unavailable"))
    return Response(status_code=200)


async def version(service: Service, request: Request) -> Response:
    return json_response(Version(__version__))


async def metrics(service: Service, request: Request) -> Response:
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def create_app(service: Service) -> ASGIApp:
    """The ASGI application over a service, whose engine may still be loading."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        description="OpenAI-compatible server",
        redoc_url=None,
        redirect_slashes=False,
    )
    routes = [
        *_ROUTES,
        ("GET", "/health", health, None, None),
        ("GET", "/version", version, None, Version),
        ("GET", "/metrics", metrics, None, "text/plain"),
    ]
    for method, path, handler, _, _ in routes:
        app.add_api_route(path, _endpoint(handler, service), methods=[method])
    document = openapi_document(
        [(method, path, body, reply) for method, path, _, body, reply in routes], service.options
    )
    app.add_api_route("/health", _endpoint(health, service), methods=["HEAD"])
    app.add_exception_handler(HTTPException, _framework_error)
    app.openapi = lambda: document  # type: ignore[method-assign]
    return _guarded(app, service)


def _guarded(app: FastAPI, service: Service) -> ASGIApp:
    options = service.options
    guarded: ASGIApp = BodyLimit(app, options.max_body_mb)
    guarded = KeyGuard(guarded, options.api_key, options.root_path)
    if options.allowed_origins:
        origins = [origin.strip() for origin in options.allowed_origins.split(",")]
        guarded = CORSMiddleware(
            guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return guarded


def _endpoint(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:  # noqa: BLE001 - told to the client, and logged
            fault = log_fault(error)
            logger.info(
                "%s %r refused: %d %s param=%r", request.method, request.url.path[:100],
                fault.status, fault.code, fault.param,
            )  # fmt: skip
            return _error_response(fault)

    return endpoint


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _error_response(HTTPError(error.status_code, text, code=code, headers=error.headers))


def _error_response(fault: HTTPError) -> Response:
    return Response(fault.json(), fault.status, fault.headers, "application/json")
