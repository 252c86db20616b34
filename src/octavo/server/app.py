"""The application: routes, errors in one shape, and the middleware in front of them.

Routes are thin: each hands the request to a function of its own module.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo.log import get_logger
from octavo.server import dashboard_routes, unsupported
from octavo.server.chat import create_chat
from octavo.server.completions import create_completion
from octavo.server.dashboard_routes import EVENTS, PAGE
from octavo.server.docs_page import docs_page
from octavo.server.document import openapi_document
from octavo.server.error_shapes import answer_of
from octavo.server.errors import HTTPError, fault_of, unavailable
from octavo.server.generation import client_of
from octavo.server.messages import count_tokens, create_message
from octavo.server.messages_events import Message, TokenCount
from octavo.server.messages_protocol import MessagesBody, PromptBody
from octavo.server.middleware import BodyLimit, KeyGuard, open_paths
from octavo.server.models import detokenize, get_model, json_response, list_models, tokenize
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.replies import (
    ChatCompletion,
    Completion,
    Degraded,
    Links,
    Load,
    Model,
    ModelList,
    Text,
    Tokens,
    Version,
)
from octavo.server.responses import create_response
from octavo.server.responses_protocol import ResponsesBody
from octavo.server.responses_replies import ResponseObject
from octavo.server.service import Service
from octavo.server.sse import log_fault, to_json
from octavo.version import __version__

logger = get_logger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]

# method, path, handler, body, reply (or its media type)
_ROUTES: tuple[tuple[str, str, Handler, type | None, type | str | None], ...] = (
    ("POST", "/v1/completions", create_completion, CompletionBody, Completion),
    ("POST", "/v1/chat/completions", create_chat, ChatBody, ChatCompletion),
    ("POST", "/v1/responses", create_response, ResponsesBody, ResponseObject),
    ("POST", "/v1/messages", create_message, MessagesBody, Message),
    ("POST", "/v1/messages/count_tokens", count_tokens, PromptBody, TokenCount),
    ("GET", "/v1/models", list_models, None, ModelList),
    ("GET", "/v1/models/{name:path}", get_model, None, Model),
    ("POST", "/tokenize", tokenize, TokenizeBody, Tokens),
    ("POST", "/detokenize", detokenize, DetokenizeBody, Text),
)


async def health(service: Service, request: Request) -> Response:
    """200 while an engine answers, and which others do not; 503 with the reason if none does."""
    if reason := service.unavailable_reason():
        return _error_response(request, unavailable(reason, "unavailable"))
    if down := service.engines_down():
        return json_response(Degraded(service.config.data_parallel_size - len(down), down))
    return Response(status_code=200)


async def version(service: Service, request: Request) -> Response:
    return json_response(Version(__version__))


async def load(service: Service, request: Request) -> Response:
    return json_response(Load(service.client.in_flight if service.ready else 0))


async def metrics(service: Service, request: Request) -> Response:
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def root(service: Service, request: Request) -> Response:
    """Where to go from the address alone."""
    prefix = service.options.root_path
    links = {name: prefix + path for name, path in _LINKS.items()}
    return json_response(Links("octavo", __version__, **links))


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Drop the cached prefixes; only for holders of a key, since it makes all others wait."""
    if not service.options.api_key:
        text = "POST /reset_prefix_cache is served only with an API key (--api-key)"
        raise HTTPError(403, text, code="api_key_required")
    if reason := service.unavailable_reason():
        raise unavailable(reason, "unavailable")
    if not await service.client.reset_prefix_cache():
        text = "running requests hold cached blocks; try again when none is running"
        raise HTTPError(409, text, code="in_use")
    return Response(status_code=200)


# Beside the API; probes may POST to /ping, as SageMaker's hosts may.
_OWN_ROUTES: tuple[tuple[str, str, Handler, type | None, type | str | None], ...] = (
    ("GET", "/", root, None, Links),
    ("GET", "/health", health, None, None),
    ("GET", "/ping", health, None, None),
    ("POST", "/ping", health, None, None),
    ("GET", "/version", version, None, Version),
    ("GET", "/load", load, None, Load),
    ("GET", "/metrics", metrics, None, "text/plain"),
    ("POST", "/reset_prefix_cache", reset_prefix_cache, None, None),
)
_PAGES = ("/docs", "/openapi.json", PAGE, EVENTS)
_LINKS = {
    "models": "/v1/models", "chat": "/v1/chat/completions", "completions": "/v1/completions",
    "docs": "/docs", "openapi": "/openapi.json", "health": "/health", "metrics": "/metrics",
}  # fmt: skip
# As they are served; of a path with a parameter, the pattern.
PATHS = tuple(dict.fromkeys([*(path for _, path, *_ in (*_OWN_ROUTES, *_ROUTES)), *_PAGES]))


def create_app(service: Service) -> ASGIApp:
    """The ASGI application over a service, whose engine may still be loading."""
    described = [*_ROUTES, *_OWN_ROUTES]
    document = openapi_document(
        [(method, path, body, reply) for method, path, _, body, reply in described],
        service.options,
    )
    # One route for all methods of a path, so that `Allow` names them all.
    methods = {path: {m for m, p, *_ in described if p == path} for _, path, *_ in described}
    for path in ("/health", "/ping"):
        methods[path].add("HEAD")
    handlers = {path: handler for _, path, handler, _, _ in described}
    routes = [_route(methods[path], path, handlers[path], service) for path in methods]
    routes += [
        Route("/openapi.json", _constant(to_json(document), "application/json")),
        Route("/docs", _constant(docs_page(document), "text/html")),
    ]
    shown = dashboard_routes.page_files() if service.dashboard else {}
    routes += _dashboard(service, shown)
    faults = {HTTPException: _framework_error, Exception: _unexpected_error}
    app = Starlette(routes=routes, exception_handlers=faults)
    app.router.redirect_slashes = False
    return _guarded(app, service, shown)


def _route(methods: set[str], path: str, handler: Handler, service: Service) -> Route:
    route = Route(path, _endpoint(handler, service))
    route.methods = methods  # without the HEAD that Starlette adds to each GET
    return route


def _constant(body: bytes | str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return Response(body, media_type=media_type)

    return endpoint


def _dashboard(service: Service, shown: dashboard_routes.Files) -> list[Route]:
    """The page, its files, and its stream; or that there is none."""
    off = {PAGE: dashboard_routes.turned_off}
    pages = {path: dashboard_routes.handler(*file) for path, file in shown.items()}
    handlers = {**off, **pages, EVENTS: dashboard_routes.events}
    return [_route({"GET"}, path, handler, service) for path, handler in handlers.items()]


def _guarded(app: ASGIApp, service: Service, shown: dashboard_routes.Files) -> ASGIApp:
    options = service.options
    guarded: ASGIApp = BodyLimit(app, options.max_body_mb)
    # The page's files must be there before it can ask for a key; they hold no data.
    pages = {path: dashboard_routes.sign_in(*shown[path]) for path in shown if path == PAGE}
    opened = open_paths(options) | (shown.keys() - {PAGE})
    guarded = KeyGuard(guarded, options.api_key, options.root_path, opened, pages)
    if options.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return guarded


def _endpoint(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except ClientDisconnect:
            return Response(status_code=400)  # never read
        except Exception as error:  # noqa: BLE001 - answered to the client, and logged
            fault = log_fault(error)
            logger.info(
                "%s %r refused: %d %s param=%r client=%s", request.method,
                request.url.path[:100], fault.status, fault.code, fault.param, client_of(request),
            )  # fmt: skip
            return _error_response(request, fault)

    return endpoint


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        if why := unsupported.reason(path):
            text = f"{request.method} {path[:200]}: {why}"
    fault = HTTPError(error.status_code, text, code=code, headers=error.headers)
    return _error_response(request, fault)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    # Starlette raises it again, for the log, upon which uvicorn closes the connection.
    fault = fault_of(error)
    fault.headers["Connection"] = "close"
    return _error_response(request, fault)


def _error_response(request: Request, fault: HTTPError) -> Response:
    status, headers, body = answer_of(fault, request.scope)
    return Response(body, status, headers, "application/json")
