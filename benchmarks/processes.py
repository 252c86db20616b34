"""The harness's side of an engine's process: start, run a workload, pause, end.

While one engine runs, the others are stopped (SIGSTOP), so that no idle thread of theirs takes
a core. Memory and processor time are read from /proc for the whole tree of processes.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workloads import Job

ROOT = Path(__file__).parent.parent
_TICKS = os.sysconf("SC_CLK_TCK")


class PeerError(Exception):
    """An engine could not start, or died; the message is its own."""


class EngineProcess:
    """One engine of `benchmarks.peers`, in a process of its own.

    name: how it is called in tables and rows. module: what to run, such as
    `benchmarks.peers.octavo_llm`.
    options: for its `load`. python: the interpreter of its environment.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: dict[str, Any],
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        root: Path = ROOT,
    ) -> None:
        """Start it. root: the checkout whose `benchmarks` and `octavo` run."""
        self.name = name
        sink = log.open("ab") if log else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=root,
            env={**os.environ, **_sources(root), **(environment or {})},
            start_new_session=True,
        )
        if log:
            sink.close()  # type: ignore[union-attr]
        try:
            ready = self._hear()
        except PeerError:
            self.close()
            raise
        self.startup_s: float = ready["startup_s"]
        self.facts: dict[str, Any] = ready["facts"]

    def run(
        self, jobs: list[Job], progress: Callable[[int], None] = lambda done: None
    ) -> dict[str, Any]:
        """Run one workload; the engine's result with cores used and peak memory added.

        `progress` is told how many jobs are complete, as often as the engine says so.
        """
        pid = self._process.pid
        _forget_peaks(pid)
        own, machine, begin = _tree_seconds(pid), machine_seconds(), time.perf_counter()
        self._tell({"jobs": [[job.prompt, job.max_tokens] for job in jobs]})
        while (result := self._hear())["event"] == "progress":
            progress(result["done"])
        span = time.perf_counter() - begin
        own, machine = _tree_seconds(pid) - own, machine_seconds() - machine
        del result["event"]
        return {
            **result,
            "cores": round(own / span, 2),
            "other_cores": round(max(0.0, machine - own) / span, 2),
            "peak_rss_mb": peak_rss_mb(pid),
        }

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process and all its children. Doing it again does no harm."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended with exit code {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        if message["event"] == "error":
            raise PeerError(f"{self.name}: {message['message']}")
        return message


def _sources(root: Path) -> dict[str, str]:
    """What lets a process import the package of another checkout before the installed one."""
    return {} if root == ROOT else {"PYTHONPATH": str(root / "src")}


def peak_rss_mb(root: int) -> int:
    """Peak resident memory of a process and its children, in MB (shared pages count in each)."""
    total = 0
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            total += int(found.group(1)) if found else 0
    return round(total / 1024)


def _forget_peaks(root: int) -> None:
    """Let peak memory count from now on, where the kernel allows it."""
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (the state)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def _tree_seconds(root: int) -> float:
    """Processor seconds that the tree has used."""
    total = 0
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            stat = _stat(pid)
            total += int(stat[11]) + int(stat[12])
    return total / _TICKS


def machine_seconds() -> float:
    """Processor seconds that the whole machine has spent busy."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / _TICKS
