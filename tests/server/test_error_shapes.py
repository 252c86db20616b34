"""Errors have the shape of the API that was asked."""

import json

import pytest

from octavo.errors import QueueFullError, RequestError
from octavo.server.error_shapes import answer_of
from octavo.server.errors import HTTPError, fault_of, unavailable

FAULT = HTTPError(400, "no", code="invalid_value", param="x")


def answered(fault, path, **scope):
    status, headers, body = answer_of(fault, {"path": path, **scope})
    return status, headers, json.loads(body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages-x", "/messages", ""])
def test_openais_shape_is_the_usual_one(path):
    assert answered(FAULT, path) == (400, {}, FAULT.body())


@pytest.mark.parametrize(
    "scope",
    [{"path": "/v1/messages"}, {"path": "/v1/messages/count_tokens"}, {"path": "/v1/messages/x"},
     {"path": "/under/v1/messages", "root_path": "/under"}],
)  # fmt: skip
def test_anthropics_paths_have_its_shape_and_a_request_id(scope):
    status, headers, body = answered(FAULT, **scope)
    assert status == 400
    error = {"type": "invalid_request_error", "message": "no"}
    assert body == {"type": "error", "error": error, "request_id": headers["request-id"]}
    assert answered(FAULT, **scope)[1] != headers


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (HTTPError(401, "", code="x"), 401, "authentication_error"),
        (HTTPError(403, "", code="x"), 403, "permission_error"),
        (HTTPError(404, "", code="x"), 404, "not_found_error"),
        (HTTPError(405, "", code="x"), 405, "invalid_request_error"),
        (HTTPError(408, "", code="x"), 408, "timeout_error"),
        (HTTPError(413, "", code="x"), 413, "request_too_large"),
        (HTTPError(429, "", code="x"), 429, "rate_limit_error"),
        (fault_of(RequestError("", "x")), 400, "invalid_request_error"),
        (fault_of(QueueFullError("")), 529, "overloaded_error"),
        (unavailable("", "unavailable"), 503, "overloaded_error"),
        (fault_of(ZeroDivisionError()), 500, "api_error"),
    ],
)
def test_the_types_are_those_that_anthropics_clients_know(fault, status, kind):
    found, headers, body = answered(fault, "/v1/messages")
    assert (found, body["error"]["type"]) == (status, kind)
    assert headers.get("Retry-After") == fault.headers.get("Retry-After")
