"""Spans of requests: what a collector receives, and that none of it matters to the server."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.cli import serve
from octavo.cli.main import command_parser
from octavo.errors import ConfigError
from octavo.server import spans
from octavo.server.options import ServerConfig
from octavo.server.spans import Spans, check_spans
from serving import Server

pytest.importorskip("opentelemetry.sdk", reason="the extra octavo[otel] is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP. received: (path, resource, span)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        import gzip

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = plain(part.resource.attributes)
            self.server.received += [
                (self.path, resource, span) for scope in part.scope_spans for span in scope.spans
            ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


def value(found: Any) -> Any:
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in found.array_value.values]
    return getattr(found, kind)


def plain(attributes: Any) -> dict[str, Any]:
    return {item.key: value(item.value) for item in attributes}


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced(folder, engine_path, collector):
    with Server(folder, {"otlp_traces_endpoint": collector.url}) as server:
        yield server


@pytest.fixture
def sent(traced, collector):
    """The spans of the requests of this test, once they have been sent."""
    collector.received.clear()

    def sent() -> list[Any]:
        assert traced.service.spans._provider.force_flush()
        return sorted(
            (span for _, _, span in collector.received), key=lambda s: s.end_time_unix_nano
        )

    return sent


def test_a_span_has_what_was_asked_and_given(traced, sent, collector):
    reply = traced.complete(
        traced.say("ABC", "DE"), temperature=0.5, top_p=0.9, seed=7, max_tokens=20
    )
    (span,) = sent()
    path, resource, _ = collector.received[0]
    assert path == "/v1/traces"
    assert resource["service.name"] == "octavo"
    assert span.name == "llm_request"
    assert span.kind == span.SPAN_KIND_SERVER
    found = plain(span.attributes)
    usage = reply["usage"]
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 3
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "scripted"
    assert found["gen_ai.request.id"] == found["gen_ai.response.id"] == reply["id"]
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_p"] == 0.9
    assert found["gen_ai.request.max_tokens"] == 20
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    latency = {name.rpartition(".")[2]: seconds for name, seconds in found.items()
               if name.startswith("gen_ai.latency.")}  # fmt: skip
    assert set(latency) == {
        "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill",
        "time_in_model_decode", "time_in_model_inference",
    }  # fmt: skip
    first = latency["time_in_queue"] + latency["time_in_model_prefill"]
    assert first == pytest.approx(latency["time_to_first_token"], abs=1e-5)
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    (event,) = span.events
    assert event.name == "first token"
    assert span.start_time_unix_nano < event.time_unix_nano <= span.end_time_unix_nano
    assert not span.parent_span_id
    # Neither the prompt nor the answer.
    assert "ABC" not in str(span)


def test_a_span_belongs_to_the_trace_of_its_request(traced, sent):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    body = {"prompt": traced.say("ABC"), "max_tokens": 5}
    traced.http.post("/v1/completions", json=body, headers=headers)
    traced.http.post("/v1/completions", json=body, headers={"traceparent": "not one"})
    traced.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    first, second = sent()  # the third is not sampled
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, SPAN)
    assert second.trace_id.hex() != TRACE
    assert not second.parent_span_id


def test_streams_several_prompts_and_what_fails(traced, sent):
    traced.stream_chat(traced.say("ABC"))
    traced.complete([traced.say("ABC"), traced.say("DE", "FG")], n=2)
    assert traced.post("/v1/completions", prompt="!fail", max_tokens=3).status_code == 500
    chat, one, other, failed = sent()
    assert plain(chat.attributes)["gen_ai.operation.name"] == "chat"
    assert [plain(span.attributes)["gen_ai.usage.completion_tokens"] for span in (one, other)] == [
        4, 6,
    ]  # fmt: skip
    assert plain(other.attributes)["gen_ai.usage.num_sequences"] == 2
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    found = plain(failed.attributes)
    assert found["error.type"] == "EngineError"
    assert found["gen_ai.response.finish_reasons"] == ["error"]
    assert "gen_ai.latency.time_to_first_token" not in found


class Exporter:
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.wait = threading.Event()
        self.wait.set()

    def export(self, batch: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.wait.wait(20)
        if self.problem:
            raise self.problem
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def send_one(made: Spans) -> None:
    made._tracer.start_span("x").end()
    made._provider.force_flush()


def test_a_collector_that_is_down_is_told_once_and_so_is_its_return(caplog):
    caplog.set_level("INFO", "octavo")
    exporter = Exporter()
    made = Spans("http://localhost:4318", exporter)
    exporter.problem = ConnectionError("refused")
    send_one(made)
    send_one(made)
    exporter.problem = None
    send_one(made)
    made.close()
    assert [
        record.message for record in caplog.records if record.name == "octavo.server.spans"
    ] == [
        "spans cannot be delivered to http://localhost:4318 (ConnectionError: refused); they are "
        "dropped until they can",
        "spans are delivered to http://localhost:4318 again",
    ]


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(spans, "_CLOSE_SECONDS", 0.02)
    exporter = Exporter()
    exporter.wait.clear()
    made = Spans("http://localhost:4318", exporter)
    made._tracer.start_span("x").end()
    made.close()
    assert not exporter.wait.is_set()  # it hangs still
    exporter.wait.set()


def test_without_the_extra_the_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check_spans(ServerConfig())  # not asked for
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        check_spans(ServerConfig(otlp_traces_endpoint="http://localhost:4318"))


@pytest.mark.parametrize(
    "given", ["localhost:4317", "grpc://localhost:4317", "http://", "http://a:b"]
)
def test_what_is_no_url_over_http_is_refused(given):
    with pytest.raises(ConfigError, match="over HTTP, not gRPC"):
        ServerConfig(otlp_traces_endpoint=given)


def test_the_flag_is_the_servers(monkeypatch):
    args = command_parser("serve").parse(["--otlp-traces-endpoint", "http://localhost:4318"])
    assert serve.server_options(args)["otlp_traces_endpoint"] == "http://localhost:4318"


@pytest.mark.parametrize(("given", "complete"), [
    ("http://a:4318", "http://a:4318/v1/traces"), ("http://a:4318/", "http://a:4318/v1/traces"),
    ("https://a/otlp", "https://a/otlp"),
])  # fmt: skip
def test_the_usual_path_is_added_where_there_is_none(given, complete):
    assert spans._complete(given) == complete
