"""Errors in one shape everywhere, and an OpenAPI document that is the truth."""

import html.parser
import re

import pytest

from octavo.server import unsupported
from octavo.server.app import PATHS


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405),
        ("POST", "/v1/completions/", 404), ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
    ],
)  # fmt: skip
def test_the_framework_s_own_errors_have_our_shape(server, method, path, status):
    reply = server.http.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_method_that_is_not_allowed_gets_those_that_are(server):
    document = server.http.get("/openapi.json").json()["paths"]
    for path, operations in document.items():
        allowed = server.http.options(path.replace("{name}", "x")).headers["allow"]
        assert set(allowed.split(", ")) - {"HEAD"} == {name.upper() for name in operations}


def test_health_version_and_docs(server):
    health = server.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert server.http.head("/health").status_code == 200
    assert set(server.http.get("/version").json()) == {"version"}
    assert server.http.get("/load").json() == {"server_load": 0}
    for method in ("GET", "POST"):
        assert server.http.request(method, "/ping").status_code == 200


def test_the_address_alone_leads_on(server):
    links = server.http.get("/").json()
    assert links["name"] == "octavo"
    for name in ("models", "docs", "openapi", "health", "metrics"):
        assert server.http.get(links[name]).status_code == 200


def test_the_docs_page_needs_nothing_from_elsewhere(server):
    page = server.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in page.text
    assert not re.findall(r"(?:src|href)=\W*(?:https?:)?//", page.text)
    html.parser.HTMLParser().feed(page.text)
    targets = re.findall(r'href="#(\w+)"', page.text)
    assert {"CompletionBody", "ChatBody"} <= set(targets)
    assert set(targets) <= set(re.findall(r'id="(\w+)"', page.text))
    for path, operations in server.http.get("/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page.text
    for field in ("max_completion_tokens", "cache_salt", "deadline"):
        assert f"<code>{field}</code>" in page.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/abc", "not kept"), ("/v1/responses/abc/cancel", "not kept"),
        ("/api/chat", "base URL that ends in /v1"), ("/api/tags", "Ollama"),
        ("/v1/embeddings", "embedding"), ("/v1/rerank", "reranking"),
        ("/v1/messages/batches", "octavo run-batch"), ("/props", "llama.cpp"),
        ("/sleep", "cannot sleep"), ("/healthz", "GET /health"), ("/invocations", "SageMaker"),
        ("/chat/completions", "missing at the end of the client's base URL"),
        ("/v1/v1/chat/completions", "has /v1 twice"), ("/v1/batches", "octavo run-batch"),
    ],
)  # fmt: skip
def test_paths_of_other_servers_say_what_to_use(server, path, words):
    for method in ("GET", "POST"):
        reply = server.http.request(method, path)
        assert reply.status_code == 404
        assert "not_found" in reply.text
        assert words in reply.json()["error"]["message"]


def test_no_path_that_is_served_is_said_not_to_be():
    assert not [path for path in PATHS if unsupported.reason(path)]
    assert unsupported.reason("/nowhere") is None
    assert unsupported.reason("/" * 1000) is None


def test_the_prefix_cache_is_reset_only_with_a_key_and_metrics_can_be_open(make_server, server):
    reply = server.post("/reset_prefix_cache")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "api_key_required")
    guarded = make_server({"api_key": ("k",), "metrics_without_key": True})
    guarded.http.headers["Authorization"] = "Bearer k"
    prompt = "the same " * 8 + guarded.say("AB")

    def cached():
        usage = guarded.complete(prompt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    assert guarded.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
    del guarded.http.headers["Authorization"]
    assert guarded.post("/reset_prefix_cache").status_code == 401
    # Metrics can be open where all else needs a key.
    assert guarded.http.get("/metrics").status_code == 200
    assert guarded.http.get("/version").status_code == 401


def test_an_error_of_our_own_says_nothing_of_itself(server, monkeypatch, caplog):
    def explode(*args, **options):
        raise KeyError("/root/secret")

    monkeypatch.setattr(server.service, "model_name", explode)
    reply = server.post("/v1/completions", prompt="x")
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" in caplog.text


def test_the_document_describes_every_field_and_answer(server):
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    operation = document["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    fields = schemas[body["$ref"].rsplit("/", 1)[1]]
    assert "messages" in fields["required"]
    assert "top_logprobs" in fields["properties"]
    for path in document["paths"].values():
        for operation in path.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
    assert fields["additionalProperties"] is False
    assert fields["properties"]["functions"] == {"enum": [None, []]}
    assert "tool_choice" in fields["properties"]
    assert "user" in fields["properties"]
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert "securitySchemes" not in document["components"]


def test_the_document_names_the_key_and_the_prefix(make_server):
    server = make_server({"root_path": "/llm", "api_key": ("k",)})
    assert server.http.get("/openapi.json").status_code == 401
    document = server.http.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert document["servers"] == [{"url": "/llm"}]
    guarded = {
        path for path, ops in document["paths"].items() if "security" in ops[next(iter(ops))]
    }
    assert set(document["paths"]) - guarded == {"/health", "/ping"}


def test_pages_of_other_origins_may_call_only_if_told_so(make_server, server):
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert server.http.options("/v1/models", headers=headers).status_code == 405
    open_one = make_server({"allowed_origins": ("http://page",), "api_key": ("k",)})
    reply = open_one.http.options("/v1/models", headers=headers)
    assert reply.headers["access-control-allow-origin"] == "http://page"
    assert open_one.http.get("/v1/models", headers=headers).status_code == 401


def test_a_path_prefix_of_a_proxy(make_server):
    server = make_server({"root_path": "/llm"})
    assert server.http.get("/v1/models").status_code == 200
    assert "/llm/openapi.json" in server.http.get("/docs").text


def test_a_failure_outside_of_a_route_has_the_error_shape(server, monkeypatch):
    def fail(value):
        raise ZeroDivisionError

    monkeypatch.setattr("octavo.server.sse.to_json", fail)
    reply = server.post("/v1/completions", prompt=server.say("ABC"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    monkeypatch.undo()
    server.assert_alive()
    server.assert_idle()
