"""Servers for tests: real ones, over a real engine process whose executor does what prompts say."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

import kit
import octavo
from octavo.config import EngineConfig
from octavo.server.limits import LIMITS, HTTPLimits
from octavo.server.listener import open_listener
from octavo.server.options import ServerConfig
from octavo.server.run import Runner
from octavo.server.service import Service

TESTS = Path(kit.__file__).parent
# Where child processes find the tests' executor, and the Octavo that is tested here.
PYTHONPATH = os.pathsep.join((str(TESTS), str(Path(octavo.__file__).parents[1])))
START_SECONDS = 20.0
PIECES = ("ABC", "DE", "FG", "HI", "foo", "ba", "r!baz", "xxENDyy", "data: x", "[DONE]")


def write_model(folder: Path, **settings: object) -> Path:
    vocab = kit.write_tokenizer(folder, PIECES)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    (folder / "fake.json").write_text(json.dumps({"vocab_size": vocab, **settings}))
    return folder


def ids(folder: Path, *texts: str) -> list[int]:
    """Pieces as one id each, other texts as their bytes."""
    found: list[int] = []
    for text in texts:
        found += kit.piece_ids(folder, text) if text in PIECES else list(text.encode())
    return found


class Server:
    """A server on a free port, in a thread of this process."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, object],
        executor: str = "fake_engine:create",
        limits: HTTPLimits = LIMITS,
        tls: ssl.SSLContext | None = None,
        start_seconds: float = START_SECONDS,
        **engine: object,
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._start_seconds = start_seconds
        self.folder = folder
        self._executor = executor
        self._options = {**({} if "uds" in options else {"port": 0}), **options}
        self._config = EngineConfig(model=str(folder), swap_space=0, **engine)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            options = ServerConfig(**self._options)
            listener = open_listener(options)
            self.service = Service(self._config, options, self._executor)
            self.runner = Runner(self.service, listener, self._limits)
            self._started.set()
            with contextlib.closing(listener):
                return await self.runner.run()

        self.code = asyncio.run(main())

    def __enter__(self) -> "Server":
        self._thread.start()
        assert self._started.wait(20)
        self.url = self.runner.address
        uds = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
        self.http = httpx.Client(
            base_url="http://localhost" if uds else self.url,
            transport=httpx.HTTPTransport(uds=uds, verify=self._tls or False),
            timeout=30,
        )
        wait_until(lambda: self.http.get("/health").status_code == 200, self._start_seconds)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.runner.drain)
            self.loop.call_soon_threadsafe(self.runner.drain)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def end(self) -> int | None:
        """Wait for the end; the exit code."""
        self._thread.join(20)
        return self.code

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        return self.service.client.links[0].process.pid

    def ids(self, *texts: str) -> list[int]:
        return ids(self.folder, *texts)

    def say(self, *texts: str) -> str:
        """A prompt that makes the model say these texts, then end."""
        return f"say [{self.ids(*texts)}]"

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: object, **body: object) -> dict:
        reply = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 64, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, text: str, **body: object) -> dict:
        messages = [{"role": "user", "content": text}]
        reply = self.post("/v1/chat/completions", messages=messages, **{"max_tokens": 64, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, **body: object) -> list[dict]:
        """The parsed events of a stream, which must end with [DONE]."""
        reply = self.post(path, stream=True, **{"max_tokens": 64, **body})
        assert reply.status_code == 200, reply.text
        return parse_events(reply.content)

    def stream(self, prompt: object, **body: object) -> list[dict]:
        return self.events("/v1/completions", prompt=prompt, **body)

    def stream_chat(self, text: str, **body: object) -> list[dict]:
        messages = [{"role": "user", "content": text}]
        return self.events("/v1/chat/completions", messages=messages, **body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a metric's samples with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.split("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total

    def assert_alive(self) -> None:
        assert self.complete(self.say("ABC"))["choices"][0]["text"] == "ABC"
        assert self.http.get("/health").status_code == 200

    def assert_idle(self) -> None:
        """LEAK0: nothing runs, waits or holds blocks."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "vllm:kv_cache_usage_perc")  # fmt: skip
        client = self.service.client
        # First here: what a client left behind is aborted when its disconnect is noticed, and
        # until then the engine's last snapshot may be of a time before the request.
        wait_until(lambda: client.in_flight == 0 and len(client._outputs) == 0)
        wait_until(lambda: all(self.metric(name) == 0 for name in names))


def parse_named_events(raw: bytes) -> list[dict]:
    """A strict reader of events that have names, each with one line of data and no [DONE]."""
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def parse_events(raw: bytes) -> list[dict]:
    """A strict reader: lines end with LF, one `data:` line an event, `[DONE]` last and once."""
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    assert "[DONE]" not in data
    return [json.loads(item) for item in data]


def wait_until(true, seconds: float = 20, every: float = 0.02) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(every)


class Process:
    """`octavo serve` in a process of its own, over the scripted executor."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        # Not a pipe: nobody reads it while the server runs, and a full one would stop the server.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "fake_engine.py"), str(folder), "--port", str(self.port),
             "--swap-space", "0", *flags],
            stderr=self._log, env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )  # fmt: skip

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()

    def wait_ready(self) -> None:
        wait_until(lambda: self.status() == 200)

    def status(self) -> int | None:
        """The status of /health, or None while there is no connection."""
        assert self.process.poll() is None, "the server ended"
        try:
            return httpx.get(self.url + "/health").status_code
        except httpx.TransportError:
            return None

    def end(self, seconds: float = 20) -> tuple[int, str]:
        """Wait for the end: (exit code, log)."""
        code = self.process.wait(seconds)
        self._log.seek(0)
        return code, self._log.read()

    def log(self) -> str:
        """What it has logged so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def engine_pid(self) -> int:
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True
        )
        return int(found.stdout.split()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
