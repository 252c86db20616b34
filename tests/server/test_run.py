"""`octavo serve` as a process: its start, its end, and the end of its engine."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.engine.client import EXECUTOR
from serving import Process, free_port, wait_until, write_model


@pytest.fixture
def serve(folder, engine_path):
    running = []

    def start(*flags, model=folder, port=None, ready=True):
        process = Process(model, *flags, port=port)
        running.append(process)
        if ready:
            process.wait_ready()
        return process

    yield start
    for process in running:
        process.__exit__()


class Stream(threading.Thread):
    """A client in flight; `text` and `error` are what it got."""

    def __init__(self, server, prompt="!slow", stream=True, most=100):
        super().__init__(daemon=True)
        self._body = {"prompt": prompt, "stream": stream, "max_tokens": most, "ignore_eos": True}
        self._url = server.url + "/v1/completions"
        self.text, self.error, self.status = "", None, None
        self.first = threading.Event()
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    self.first.set()
                    self.take(line.removeprefix("data: "))
        except httpx.TransportError as error:
            self.error = str(error)
        self.ended = time.monotonic()

    def take(self, line):
        if line in ("", "[DONE]"):
            return
        item = json.loads(line)
        if "error" in item:
            self.error = item["error"]
        else:
            self.text += item["choices"][0]["text"]

    def wait(self, seconds=20):
        self.join(seconds)
        assert not self.is_alive(), "a client was left without an answer"
        return self


def in_flight(server, streams=3, most=100):
    clients = [Stream(server, most=most) for _ in range(streams)]
    for client in clients:
        assert client.first.wait(20)
    return clients


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split(")")[1].split()[0] == "Z"


def test_srv_10_a_port_that_is_taken_is_found_before_the_model_is_read(serve, tmp_path):
    slow = write_model(tmp_path / "slow", load_seconds=30)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = serve(model=slow, port=port, ready=False).end(10)
    assert code == 1
    assert (
        log.strip().splitlines()[-1].startswith(f"octavo: cannot listen on 127.0.0.1 port {port}")
    )


def test_srv_10_two_at_once_and_again_after_a_crash(serve):
    port = free_port()
    both = [serve(port=port, ready=False) for _ in range(2)]
    wait_until(lambda: any(p.process.poll() is not None for p in both))
    loser, winner = sorted(both, key=lambda p: p.process.poll() is None)
    assert loser.process.returncode == 1
    winner.wait_ready()
    engine = winner.engine_pid()
    winner.process.kill()
    wait_until(lambda: gone(engine), 5)
    serve(port=port)


def test_srv_08_sigterm_lets_running_requests_finish(serve):
    server = serve()
    engine = server.engine_pid()
    clients = in_flight(server)
    idle = httpx.Client(base_url=server.url)
    idle.get("/health")
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    late = Stream(server)
    code, log = server.end()
    assert code == 0, log
    assert late.wait().error
    assert all(c.wait().error is None and len(c.text) == 100 for c in clients)
    assert gone(engine)
    idle.close()
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_srv_08_what_does_not_finish_in_time_gets_an_error(make_server, how):
    server = make_server({"drain_timeout": 0.3 if how == "timeout" else 60})
    clients = in_flight(server)
    for _ in range(1 if how == "timeout" else 2):
        server.loop.call_soon_threadsafe(server.runner.drain)
    for client in clients:
        error = client.wait().error
        assert "shutting down" in error["message"]
        assert error["code"] == "unavailable"  # as of a new request: the next server may do it
    assert server.end() == 0


def test_srv_08_a_signal_while_the_model_loads(serve, tmp_path):
    slow = write_model(tmp_path / "slow", load_seconds=30)
    server = serve(model=slow, ready=False)
    wait_until(lambda: server.status() == 503)
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(10)[0] == 0
    assert gone(engine)


def test_srv_06_a_killed_engine_reaches_everybody(serve):
    server = serve()
    clients = in_flight(server, 3) + [Stream(server, stream=False, most=400) for _ in range(3)]
    time.sleep(0.2)
    killed = time.monotonic()
    os.kill(server.engine_pid(), signal.SIGKILL)
    for client in clients:
        client.wait()
        assert client.ended - killed < 2
        assert "the engine is dead" in client.error["message"]
        assert "SIGKILL" in client.error["message"]
    assert server.status() == 503
    after = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
    assert after.status_code == 503
    code, log = server.end()
    assert code == 1
    assert "the engine died" in log


def test_srv_06_a_step_that_raises_reaches_everybody(make_server, monkeypatch):
    monkeypatch.setattr("octavo.server.service.DEATH_LINGER_SECONDS", 0.5)
    server = make_server()
    clients = [*in_flight(server, 2), Stream(server, "!raise")]
    for client in clients:
        assert "MemoryError: told to" in client.wait().error["message"]
    assert server.http.get("/health").status_code == 503
    assert server.end() == 1


def test_srv_06_a_frozen_engine_fails_what_waits_and_may_wake_again(make_server, monkeypatch):
    monkeypatch.setattr("octavo.engine.link.FREEZE_SECONDS", 1.0)
    server = make_server()
    clients = in_flight(server, 2)
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        for client in clients:
            assert "silent" in client.wait(10).error["message"]
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", prompt="x").status_code == 503
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    wait_until(lambda: server.http.get("/health").status_code == 200)
    server.assert_alive()
    server.assert_idle()


def test_srv_06_the_engine_is_started_again_if_asked(make_server):
    server = make_server({"restart_engine": True})
    clients = [*in_flight(server, 2, most=50), Stream(server, stream=False, most=50)]
    wait_until(lambda: server.http.get("/load").json()["server_load"] == 3)
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    assert server.post("/v1/completions", prompt="x").status_code == 503
    for client in clients:
        assert client.wait().error is None
        assert client.text == "".join(chr(97 + i % 26) for i in range(50))
    assert server.http.get("/health").status_code == 200
    assert server.metric("octavo:requests_resumed_total") == 3
    assert server.metric("vllm:generation_tokens_total") == 150
    server.assert_alive()
    server.assert_idle()


def test_the_drain_ends_what_waits_for_an_engine(make_server, monkeypatch):
    monkeypatch.setattr("octavo.engine.pool.RESTART_SECONDS", 60.0)
    server = make_server({"restart_engine": True, "drain_timeout": 0.3})
    (client,) = in_flight(server, 1)
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    assert client.is_alive()
    server.loop.call_soon_threadsafe(server.runner.drain)
    assert "shutting down" in client.wait().error["message"]
    assert server.end() == 0


def answer_of(server, body):
    """A stream put together: of each choice, its text, its tokens' log-probabilities, its end."""
    found = {}
    for event in server.events("/v1/completions", **body):
        for choice in event["choices"]:
            text, logprobs, _ = found.get(choice["index"], ("", [], None))
            more = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            logprobs += zip(more["tokens"], more["token_logprobs"], strict=True)
            end = choice["finish_reason"]
            found[choice["index"]] = (text + choice["text"], logprobs, end)
    return found


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(400)
def test_streams_of_a_model_survive_the_death_of_each_of_two_engines(make_server, monkeypatch):
    monkeypatch.setattr("serving.START_SECONDS", 120)
    server = make_server(
        {"restart_engine": True}, folder="smollm2", executor=EXECUTOR, data_parallel_size=2,
        max_model_len=512, num_gpu_blocks_override=200,
    )  # fmt: skip
    bodies = [
        {"prompt": prompt, "max_tokens": 100, "seed": 3, "temperature": warmth, "logprobs": 1,
         "ignore_eos": True, "n": 2 if warmth else 1, "presence_penalty": warmth, "stop": ["zzz"]}
        for prompt in ("Once upon a time", "The capital of France", "1 2 3 4 5", "To bake bread")
        for warmth in (0, 0.8)
    ]  # fmt: skip
    expected = [answer_of(server, body) for body in bodies]
    client = server.service.client
    with ThreadPoolExecutor(len(bodies)) as threads:
        for killed in (0, 1):
            answers = [threads.submit(answer_of, server, body) for body in bodies]
            wait_until(lambda: min(load.running for load in client._loads) > 2)
            os.kill(client.links[killed].process.pid, signal.SIGKILL)
            for got, want in zip(answers, expected, strict=True):
                for index, (text, logprobs, end) in want.items():
                    have = got.result(60)[index]
                    assert (have[0], have[2]) == (text, end)
                    for (one, a), (two, b) in zip(have[1], logprobs, strict=True):
                        assert (one, a) == (two, pytest.approx(b, abs=1e-4))
            wait_until(lambda: not client.down, 120)
    assert server.metric("octavo:requests_resumed_total", engine="0") > 2
    assert server.metric("octavo:requests_resumed_total", engine="1") > 2
    server.assert_idle()


def test_mdl_01_a_start_that_fails_says_why_and_leaves_nothing(serve, tmp_path):
    broken = write_model(tmp_path / "broken")
    (broken / "broken").touch()
    server = serve(model=broken, ready=False)
    code, log = server.end()
    assert code == 1
    assert "told to be broken" in log
    assert "Traceback" not in log
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_processes_name_the_model_and_the_log_has_a_last_line(serve):
    server = serve("--log-format", "json", "--stats-interval", "0.2")
    titles = {
        subprocess.check_output(["ps", "-ww", "-o", "args=", "-p", str(pid)], text=True).strip()
        for pid in (server.process.pid, server.engine_pid())
    }
    assert any(t.startswith("octavo serve: ") and t.endswith(server.url) for t in titles)
    assert any(t.startswith("octavo engine: ") and t.endswith("scripted") for t in titles)
    httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3})
    wait_until(lambda: "rates" in server.log())
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    lines = [json.loads(line) for line in log.splitlines()]
    assert code == 0
    assert lines[-1]["message"].endswith(
        "with exit code 0: served 1 requests, 1 prompt tokens and 3 output tokens"
    )
    assert {"request", "rates"} <= {line.get("event") for line in lines}
