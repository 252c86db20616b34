"""`octavo doctor`: a server, a file, and what is neither."""

import http.server
import json
import socket
from contextlib import contextmanager

import pytest

import http_stub
from modelled import Modelled, twice
from octavo.cli.main import main
from serving import PYTHONPATH, Server, write_model


@contextmanager
def pages(**answers):
    """A server of these pages: path -> (status, text)."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers.get(self.path.strip("/"), (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with http_stub.serving(Answers) as url:
        yield url


def test_a_server_with_a_key(tmp_path, monkeypatch, capsys):
    folder = write_model(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    file = tmp_path / "saved.json"
    with Server(folder, {"api_key": ("secret",)}, max_model_len=300) as server:
        for key in ([], ["--api-key", "wrong"]):
            assert main(["doctor", server.url, *key]) == 2
            assert capsys.readouterr().err == (
                f"octavo: {server.url}/metrics wants another key; give it with --api-key or "
                "OCTAVO_API_KEY\n"
            )
        quick = ["--interval", "0.01", "--save", str(file), "--json"]
        monkeypatch.setenv("OCTAVO_API_KEY", "secret")
        code = main(["doctor", f"{server.url}/v1", *quick])
        seen = json.loads(capsys.readouterr().out)
    assert code == (0 if seen["healthy"] else 1)
    assert (seen["url"], seen["model"]) == (server.url, "model")
    assert "secret" not in file.read_text()
    assert json.loads(file.read_text())["now"]["window"] == 300
    assert main(["doctor", str(file), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["findings"] == seen["findings"]


def test_the_exit_code_says_whether_there_are_symptoms(tmp_path, capsys):
    healthy, ill = Modelled(), Modelled()
    ill.update(policy_errors=1)
    for server, code, word in ((healthy, 0, "healthy: no symptom"), (ill, 1, "[policy-errors]")):
        twice(server).save(tmp_path / "s.json")
        assert main(["doctor", str(tmp_path / "s.json")]) == code
        assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"metrics": (200, "vllm:x 1\n")}, "has metrics of vLLM"),
        ({"metrics": (200, "<html>")}, "is not a metrics page in Prometheus's text format"),
        ({"metrics": (500, "")}, "/metrics says HTTP 500, so nothing can be judged"),
        ({}, "/metrics does not exist: this is no Octavo server, or not its address"),
    ],
)
def test_other_servers(answers, message, capsys):
    with pages(**answers) as url:
        assert main(["doctor", url]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_server_that_answers_metrics_alone_as_in_a_drain(capsys):
    ending = (503, '{"error": {"message": "the server is shutting down"}}')
    down = dict.fromkeys(("health", "version", "load", "v1/models"), ending)
    with pages(metrics=(200, Modelled().look().metrics), **down) as url:
        assert main(["doctor", url, "--interval", "0.01"]) == 1
    assert "/health says 503: the server is shutting down" in capsys.readouterr().out


def test_no_server(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{sock.getsockname()[1]}"
        assert main(["doctor", url]) == 2
    said = f"octavo: the server at http://{url} does not answer: Connection refused\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.json"], "nothing.json cannot be read: No such file or directory"),
        (["ftp://x"], "url must be such as http://127.0.0.1:8000, not 'ftp://x'"),
        (["--save", "no/folder/f.json"], "--save: there is no folder no/folder"),
        (["/", "--save", "f", "--interval", "1"], "leave out --interval, --save"),
        ([""], "url must be such as"),
        (["http://[::1"], "url must be such as"),
        (["http://a..b"], "the server at http://a..b does not answer"),
        (["--api-key", "a\nb"], "the API key must be printable ASCII"),
        (["--api-key", "kľúč"], "the API key must be printable ASCII"),
        (["/"], "/ cannot be read: Is a directory"),
        (["/" + "x" * 300], "cannot be read: File name too long"),
        (["--save", "x" * 300 + "/f"], "--save: there is no folder xxx"),
    ],
)
def test_what_is_no_source(words, message, capsys):
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e9"])
def test_intervals(seconds, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", f"--interval={seconds}"])
    assert end.value.code == 2
    assert "must be seconds above 0" in capsys.readouterr().err
