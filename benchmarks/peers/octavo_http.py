"""Octavo through its server: one streaming client per request, over HTTP on this machine."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job
from octavo.config import EngineConfig, flag_name
from octavo.version import __version__


class OctavoServer:
    """`octavo serve` as a child, driven with token ids."""

    def __init__(self, options: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        options = {"max_num_seqs": 64, "max_model_len": 4096, **options}
        model = options.pop("model")
        command = [str(Path(sys.executable).parent / "octavo"), "serve", model]
        command += ["--port", str(self._port)]
        for name, value in options.items():
            if name in EngineConfig.__dataclass_fields__:
                flag = flag_name(name)
                command += (
                    [flag.replace("--", "--no-", 1)] if value is False else [flag, str(value)]
                )
        self._server = subprocess.Popen(command)
        self._runs = 0
        self._wait()
        self.facts = {"build": f"octavo {__version__} serve", "streaming": True}

    def _wait(self) -> None:
        while self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError("the server ended while it started")

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> Outcome:
        begin = time.monotonic()
        answers = await asyncio.gather(*(self._ask(job) for job in jobs))
        return Outcome(
            output_tokens=sum(tokens for tokens, _ in answers),
            latency_s=[end - begin for _, end in answers],
        )

    async def _ask(self, job: Job) -> tuple[int, float]:
        """(output tokens, time of the end)."""
        body = json.dumps(
            {"prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0,
             "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
             "cache_salt": f"run {self._runs}"}
        ).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        tokens = 0
        while (line := await reader.readline()) and line != b"data: [DONE]\n":
            if b'"usage":{' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        end = time.monotonic()
        writer.close()
        return tokens, end

    def forget(self) -> None:
        """A salt of its own keeps a run from an earlier run's prefixes."""
        self._runs += 1


if __name__ == "__main__":
    serve(OctavoServer)
