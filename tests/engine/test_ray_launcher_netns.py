"""Two machines: two network namespaces, each a node of a Ray cluster, and a server in the first.

Everything is started by deploy/ray-two-machines.sh. The second machine's clock is shifted, where
the kernel can do that. Needs root, `ip` and ray; run by `make test-netns`.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.log import cache_dir
from serving import PYTHONPATH, TESTS, wait_until, write_model

SCRIPT = TESTS.parent / "deploy/ray-two-machines.sh"
HERE, THERE = "10.99.0.1", "10.99.0.2"  # known in the two namespaces only
SHIFT = 1_000_000


def reason():
    """Why this cannot run here; '' where it can."""
    if importlib.util.find_spec("ray") is None:
        return "the package ray is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not installed"
    name = f"octavo-probe-{os.getpid()}"
    cable = f"ip -n {name} link add probe type veth peer name other"
    try:
        for command in (f"ip netns add {name}", cable, f"ip netns exec {name} true"):
            done = subprocess.run(command.split(), capture_output=True, check=False)
            if done.returncode:
                return f"no network namespaces here: {done.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Machines:
    """Two namespaces with a cable between them."""

    def __init__(self, place: Path) -> None:
        self.names = [f"octavo-{os.getpid()}-{i}" for i in (1, 2)]
        self.place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Machines":
        first, second = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        ends = [("cable", first), ("cable", second)]
        run("ip", "link", "add", "cable", "netns", first, "type", "veth",
            "peer", "name", "cable", "netns", second)  # fmt: skip
        for (end, name), address in zip(ends, (HERE, THERE), strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            self.kill_all(name)
        for process in self._processes:
            process.wait()
        for name in self.names:
            run("ip", "netns", "del", name)

    def kill_all(self, name: str) -> None:
        """End what runs in a namespace, at once."""
        found = True
        while found:
            found = run("ip", "netns", "pids", name).split()
            for pid in map(int, found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def start(self, machine: int, *command: str, log: str) -> "subprocess.Popen[bytes]":
        shift = ["unshare", "--time", "--monotonic", str(SHIFT)] if machine and can_shift() else []
        with (self.place / log).open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[machine], *shift, *command],
                stdout=file, stderr=file, env=self.environment(), start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def environment(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "PATH": f"{self.place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.place),
            "RAY_TMPDIR": str(self.place),
            "PYTHONPATH": PYTHONPATH,
            "OCTAVO_CACHE_DIR": str(cache_dir()),  # of compiled kernels
        }

    def cable(self, state: str) -> None:
        run("ip", "-n", self.names[1], "link", "set", "cable", state)

    def log(self, name: str) -> str:
        return (self.place / name).read_text()


def wait_for(machines, happens, *logs):
    """Wait at most a minute; the logs, if it does not happen."""
    try:
        wait_until(happens, 60, every=0.2)
    except AssertionError as error:
        pytest.fail("\n".join([str(error), *(f"{name}: {machines.log(name)}" for name in logs)]))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def can_shift() -> bool:
    probe = ["unshare", "--time", "--monotonic", "10", "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def machines():
    if why := reason():
        pytest.skip(why)
    place = Path(tempfile.mkdtemp(prefix="on-", dir="/tmp"))  # Ray's sockets have long names
    write_model(place / "model")
    (place / "octavo").write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} {TESTS / "fake_engine.py"} "$@"\n'
    )
    (place / "octavo").chmod(0o755)
    try:
        with Machines(place) as found:
            found.start(0, str(SCRIPT), "head", HERE, "--num-cpus=1", log="head")
            wait_until(lambda: "runtime started" in found.log("head"), 60)
            found.start(1, str(SCRIPT), "join", HERE, THERE, "--num-cpus=1", log="join")
            yield found
    finally:
        shutil.rmtree(place)


@pytest.mark.netns
def test_ranks_of_one_engine_on_two_machines_give_the_tokens_of_one(machines, tiny_folder):
    """Neither machine has two processors."""
    octavo = "import sys; from octavo.cli.main import main; sys.exit(main())"
    command = (
        "env", f"RAY_ADDRESS={HERE}:6379", "RAY_AUTH_MODE=token", sys.executable, "-c", octavo,
        "serve", str(tiny_folder), "--distributed-executor-backend", "ray",
        "--tensor-parallel-size", "2", "--threads", "2", "--host", HERE, "--port", "8000",
        "--dtype", "float32", "--kv-cache-memory-bytes", "10000000", "--swap-space", "0",
    )  # fmt: skip
    serve = machines.start(0, *command, log="ranks")
    body = {"prompt": "hello there", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    ask = (
        f"import httpx\nr = httpx.post('http://{HERE}:8000/v1/completions', json={body!r}, "
        "timeout=60)\nprint(r.status_code, r.text)"
    )

    def answer() -> str:
        assert serve.poll() is None, machines.log("ranks")
        done = subprocess.run(
            ["ip", "netns", "exec", machines.names[0], sys.executable, "-c", ask],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout if done.stdout.startswith("200") else ""

    try:
        wait_for(machines, lambda: answer() != "", "head", "join", "ranks")
        with LLM(str(tiny_folder), dtype="float32", kv_cache_memory_bytes=10_000_000) as llm:
            params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
            (alone,) = llm.generate(["hello there"], params, use_tqdm=False)
        text = alone.outputs[0].text
        assert json.loads(answer()[4:])["choices"][0]["text"] == text
        assert "rank 1 runs on" in machines.log("ranks")
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait(60)
    assert serve.returncode == 0, machines.log("ranks")


@pytest.mark.netns
def test_a_machine_that_is_lost_costs_no_answer_and_one_that_joins_is_used(machines):
    serve = machines.start(
        0, str(SCRIPT), "serve", HERE, str(machines.place / "model"), "--threads", "1",
        "--host", HERE, "--port", "8000", "--swap-space", "0", log="serve",
    )  # fmt: skip
    client = machines.start(
        0, sys.executable, str(TESTS / "netns_client.py"), f"http://{HERE}:8000", log="client"
    )

    def wait(text: str) -> None:
        def said() -> bool:
            assert serve.poll() is None, "the server ended"
            assert not client.poll(), "the client failed"
            return text in machines.log("client")

        wait_for(machines, said, "head", "join", "serve", "client")

    wait("in the middle")
    machines.cable("down")
    wait("answers are whole")
    machines.kill_all(machines.names[1])
    machines.cable("up")
    machines.start(1, str(SCRIPT), "join", HERE, THERE, "--num-cpus=1", log="join")
    wait("both engines answer")
    assert client.wait(20) == 0
    assert "machine or the network is lost" in machines.log("serve")
