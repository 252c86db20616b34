"""`octavo serve` as a process: its start, its end, and the end of its engine."""

import json
import os
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest

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


def in_flight(server, streams=3):
    clients = [Stream(server) for _ in range(streams)]
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
        assert "shutting down" in client.wait().error["message"]
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
    clients = in_flight(server, 2)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert all(client.wait().error for client in clients)
    wait_until(lambda: server.http.get("/health").status_code == 503)
    wait_until(lambda: server.http.get("/health").status_code == 200)
    server.assert_alive()


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
