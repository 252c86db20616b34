"""`octavo chat --url URL`: a running server of ours, and what other servers may answer."""

import http.server
import io
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import http_stub
from octavo.cli.chat_server import ServerBackend
from octavo.cli.chat_session import Session
from octavo.cli.main import main
from octavo.errors import ConfigError, ContextLengthError, RequestError
from octavo.params import SamplingParams
from serving import PYTHONPATH, Server, wait_until, write_model

Handler = Callable[[str, dict[str, Any] | None], tuple[int, Any]]
MODELS = {"data": [{"id": "m", "max_model_len": 50}]}


@contextmanager
def serving(answer: Handler) -> Iterator[str]:
    """A server that answers (path, body) with (status, JSON or a list of events); its URL."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any] | None) -> None:
            status, content = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            if isinstance(content, list):
                parts = (e if isinstance(e, str) else json.dumps(e) for e in content)
                self.wfile.write("".join(f"data: {part}\n\n" for part in parts).encode())
            else:
                self.wfile.write(json.dumps(content).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http_stub.serving(Answers) as url:
        yield url


def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def test_a_server_of_ours(tmp_path, monkeypatch, capsys) -> None:
    folder = write_model(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # where the engine process finds its executor
    options = {"api_key": ("secret",), "served_model_name": ("mine",)}
    with Server(folder, options, max_model_len=300) as server:
        with pytest.raises(ConfigError, match="wants another key; set OCTAVO_API_KEY"):
            ServerBackend(server.url, None, None)
        with pytest.raises(ConfigError, match="no model 'other'; it has mine"):
            ServerBackend(server.url, "other", "secret")
        backend = ServerBackend(f"{server.url}/v1/", "mine", "secret")
        assert (backend.name, backend.window) == ("mine", 300)
        params = SamplingParams(temperature=0.0, max_tokens=None)
        chat = Session(backend, params, "be brief", given=["temperature"])
        shown: list[str] = []
        reply = chat.ask(server.say("foo", "ba"), shown.append)
        assert (reply.text, "".join(shown), reply.ending) == ("fooba", "fooba", "complete")
        assert reply.num_tokens == 3  # and end-of-text
        assert reply.prompt_tokens == backend.prepare(
            [{"role": "system", "content": "be brief"},
             {"role": "user", "content": server.say("foo", "ba")}]
        ).num_tokens  # fmt: skip
        # The window: an answer fills it, the oldest turn is dropped, a long message is refused.
        chat.clear()
        assert chat.ask("x" * 150, shown.append).ending == "window"
        assert chat.ask("hi" + server.say("foo"), shown.append).text == "foo"
        assert chat.first == 1
        with pytest.raises(ContextLengthError, match="window has 300"):
            chat.ask("x" * 400, shown.append)
        chat.set_params(params.with_(allowed_token_ids=[10**6]), ["allowed_token_ids"])
        with pytest.raises(RequestError, match=r"HTTP 400.*allowed_token_ids"):
            chat.ask("hi", shown.append)
        # Ctrl-C aborts the request.
        chat.set_params(params, ())

        def interrupted(text: str) -> None:
            raise KeyboardInterrupt

        chat.clear()
        assert chat.ask("hi !slow", interrupted).ending == "stopped"
        wait_until(lambda: server.service.client.in_flight == 0)
        monkeypatch.setenv("OCTAVO_API_KEY", "secret")
        monkeypatch.setattr("sys.stdin", io.StringIO("hello " + server.say("foo") + "\n/stats\n"))
        assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "foo\n"
    assert "settings     (the server's)" in err


def test_only_given_settings_are_sent() -> None:
    bodies = []

    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, MODELS
        if path == "/tokenize":
            return 404, {"detail": "Not Found"}
        bodies.append(body)
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
        return 200, [chunk("a b"), chunk("", "length"), usage, "[DONE]"]

    with serving(answer) as url:
        backend = ServerBackend(url, None, None)
        params, source = backend.default_params({"top_p": 1.0})
        chat = Session(backend, params, given=["top_p"])
        reply = chat.ask("hi", lambda text: None)
        assert source == "the server's defaults for the rest"
        assert (reply.text, reply.num_tokens, reply.used) == ("a b", 5, 14)
        assert reply.ending == "limit", "the server's own, and the window is not full"
        chat.set_params(
            params.with_(stop=["x"], logit_bias={3: 1.0}), ["stop", "logit_bias", "max_tokens"]
        )
        chat.ask("hi", lambda text: None)
    sent = [set(body) - {"model", "messages", "stream", "stream_options"} for body in bodies]
    assert sent == [{"top_p"}, {"stop", "logit_bias"}]
    assert (bodies[1]["stop"], bodies[1]["logit_bias"]) == (["x"], {"3": 1.0})


def test_turns_are_dropped_where_the_server_cannot_count() -> None:
    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if path == "/tokenize" or body is None:
            return 404, {}
        if len(body["messages"]) > 3:
            error = {"message": "too long", "code": "context_length_exceeded"}
            return 400, {"error": error}
        return 200, [chunk("yes", "stop"), "[DONE]"]

    with serving(answer) as url:
        chat = Session(ServerBackend(url, None, None), SamplingParams(max_tokens=None))
        for _ in range(4):
            chat.ask("hi", lambda text: None)
        assert (chat.first, len(chat.turns)) == (2, 4)


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (500, {"error": {"message": "no\nluck"}}, "says HTTP 500: no luck"),
        (502, "<html>", "HTTP 502"),
        (200, [chunk("a"), {"error": {"message": "it broke"}}], "^it broke$"),
        (200, [chunk("a")], "without a finish reason"),
        (200, ["nonsense"], "no JSON"),
        (200, ["[1]"], "no object"),
    ],
)
def test_what_a_server_may_answer(status: int, content: Any, says: str) -> None:
    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        known: dict[str, Any] = {"/v1/models": MODELS, "/tokenize": {"count": 3}}
        return (200, known[path]) if path in known else (status, content)

    with serving(answer) as url:
        chat = Session(ServerBackend(url, None, None), SamplingParams(max_tokens=None))
        with pytest.raises(RequestError, match=says) as error:
            chat.ask("hi", lambda text: None)
        assert "\n" not in str(error.value)
        assert chat.turns == []


@pytest.mark.parametrize("content", [{}, {"data": 3}, {"data": []}, [], 3])
def test_a_server_without_models(content: Any) -> None:
    with serving(lambda path, body: (200, content)) as url, pytest.raises(ConfigError):
        ServerBackend(url, None, None)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "unix:/x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url must be such as http://127.0.0.1:8000"):
        ServerBackend(url, None, None)


def test_no_server(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["chat", "--url", f"127.0.0.1:{port}"]) == 1
    error = capsys.readouterr().err
    assert f"the server at http://127.0.0.1:{port} does not answer" in error
    assert error.count("\n") == 1


def test_engine_flags_are_of_no_use_with_a_server(capsys) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--max-model-len", "9"]) == 1
    assert "leave out --max-model-len" in capsys.readouterr().err
