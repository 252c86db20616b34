"""Runs on a machine of a Ray cluster: starts an engine's process there, or a rank's, and holds it.

Commands, reports and tokens go over the engine's own sockets, never through this actor. What it
returns is plain values, so that a driver of another version can read them.

The engine process ends with the actor, whose end of its standard input closes then; and the actor
ends with the driver, or with its machine.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading

import msgspec
import zmq

from octavo.engine.launcher import child_environment
from octavo.engine.messages import EngineKeys, check_build, launch_line
from octavo.engine.ray_cluster import import_ray
from octavo.errors import ConfigError
from octavo.processes import module_command

_LAST_LINES_SECONDS = 0.5
_WAIT_SECONDS = 10.0  # of one call of `follow`, so that no call lasts for ever


class EngineHolder:
    """One process. `hello`, `start`, then `follow` again and again; `kill` at any time."""

    def __init__(self) -> None:
        self._public, self._secret = (key.decode() for key in zmq.curve_keypair())
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()

    def hello(self, build: str) -> tuple[str, str, str, str]:
        """This machine's name and its address in the cluster, the key of the process, and '' or
        why the builds do not fit."""
        machine, address = socket.gethostname(), str(import_ray().util.get_node_ip_address())
        try:
            check_build(build, machine)
        except ConfigError as error:
            return machine, address, self._public, str(error)
        return machine, address, self._public, ""

    def start(self, kind: str, launch: bytes, server_key: str, log: dict[str, str]) -> int:
        """Start the process. kind: "engine" or "worker". launch: its line, without the keys. log:
        the driver's settings of its log. Returns the process id."""
        told = msgspec.json.decode(launch)
        told["keys"] = EngineKeys(server_key, self._public, self._secret)
        # A process that has ranks elsewhere has Ray place them in the same cluster.
        cluster = {"RAY_ADDRESS": str(import_ray().get_runtime_context().gcs_address)}
        process = subprocess.Popen(
            module_command("octavo.engine.process" if kind == "engine" else "octavo.engine.worker"),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(), **log, **cluster},
            start_new_session=True,
        )
        self._process = process
        reader = threading.Thread(target=self._read_log, args=(process,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `follow` reports
            process.stdin.write(launch_line(told))
            process.stdin.flush()
        return process.pid

    def follow(self) -> tuple[list[str], int | None]:
        """Wait for lines of its log, or its end: the new lines, and the exit code once it has
        ended and all lines were returned."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended, _WAIT_SECONDS)
            lines, self._lines = self._lines, []
            process = self._process
            return lines, process.wait() if self._ended and process else None

    def kill(self) -> None:
        """End the process, and wait for its end."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_log(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with self._changed:
                self._lines.append(line.decode(errors="replace").rstrip("\n"))
                self._changed.notify_all()

    def _wait(self, process: "subprocess.Popen[bytes]", reader: threading.Thread) -> None:
        process.wait()
        reader.join(_LAST_LINES_SECONDS)  # its workers may have the stream open a little longer
        with self._changed:
            self._ended = True
            self._changed.notify_all()
