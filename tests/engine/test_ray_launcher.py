"""Engines placed by Ray on a cluster of this machine alone (two: test_ray_launcher_netns.py)."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine import ray_cluster, ray_launcher
from octavo.engine.client import EngineClient
from octavo.engine.launcher import Addresses
from octavo.engine.preflight import check_options
from octavo.engine.ray_cluster import Machine, RayCluster, check_address, no_room
from octavo.engine.ray_launcher import RayLauncher, ray_launchers, wanted_resources
from octavo.errors import ConfigError, EngineDeadError
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, TESTS, free_port, wait_until, write_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
LONG = PARAMS.with_(max_tokens=60)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the package ray is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module")
def cluster():
    """Three processors, tokens and sessions in a folder of its own."""
    # Warnings of Ray's own, such as of files that it leaves to the garbage collector.
    ray = pytest.importorskip("ray", exc_type=ImportError)
    place = tempfile.mkdtemp(prefix="or-", dir="/tmp")  # its sockets' names are long
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HOME": place, "RAY_TMPDIR": place, "PYTHONPATH": PYTHONPATH,
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        before = signal.getsignal(signal.SIGTERM)
        ray.init(
            num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False,
            object_store_memory=80 << 20,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, before)
        try:
            yield ray
        finally:
            ray.shutdown()
            assert engines(place) == []
            shutil.rmtree(place, ignore_errors=True)


def engines(mark):
    """Processes of engines and of Ray that have `mark` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"HOME={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            if mine and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" "))
    return found


def config_of(folder, **options):
    fields = {"threads": 1, "swap_space": 0, "distributed_executor_backend": "ray", **options}
    return EngineConfig(model=str(folder), **fields)


@contextlib.asynccontextmanager
async def started(config, restart=False):
    client = EngineClient(config, "fake_engine:create", restart=restart)
    await client.start(lambda: load_tokenizer(config.model))
    try:
        yield client
    finally:
        await client.close()


def run(config, body, restart=False, seconds=60):
    async def main():
        async with started(config, restart) as client:
            await asyncio.wait_for(body(client), seconds)

    asyncio.run(main())


def request(client, text, params=PARAMS):
    return Submission(client.new_id(), tuple(text.encode()), params)


async def answer(client, text, params=PARAMS):
    batch = await client.submit([request(client, text, params)])
    return "".join([output.outputs[0].text async for _, output in batch])


def alphabet(count):
    return "".join(chr(97 + i % 26) for i in range(count))


@pytest.mark.ray
def test_200_requests_over_two_engines_of_which_one_is_killed(cluster, folder):
    """Whole and equal, none lost, none doubled; then a third engine takes its place."""

    async def body(client):
        killed = asyncio.Event()
        first = client.links[1].process.pid

        async def one(i):
            count = 20 + i % 41
            text = await answer(client, f"number {i}", PARAMS.with_(max_tokens=count))
            if i == 20:
                os.kill(first, signal.SIGKILL)
                killed.set()
            return text == alphabet(count)

        assert all(await asyncio.gather(*(one(i) for i in range(200))))
        assert killed.is_set()
        while client.down or client.links[1].process.pid == first:
            await asyncio.sleep(0.05)
        assert await answer(client, "x") == "abcdefgh"

    run(config_of(folder, data_parallel_size=2), body, restart=True, seconds=200)


@pytest.mark.ray
def test_an_actor_that_ends_takes_its_engine_with_it(cluster, folder):
    async def body(client):
        link = client.links[0]
        pid = link.process.pid
        batch = await client.submit([request(client, "!slow", PARAMS.with_(max_tokens=400))])
        await anext(batch)
        cluster.kill(link.process._holder)
        with pytest.raises(EngineDeadError, match="is lost"):
            async for _ in batch:
                pass
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)

    run(config_of(folder), body)


@pytest.mark.ray
def test_a_cluster_without_room_says_what_is_asked_and_free(cluster, folder, monkeypatch):
    monkeypatch.setattr(ray_launcher, "PLACE_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=r"4 CPU free within 1 s.*free are .*3 of 3 CPU"):
        run(config_of(folder, threads=4), None)
    assert wait_for_cpus(cluster)


@pytest.mark.ray
def test_another_version_on_a_machine_is_refused(cluster, folder, monkeypatch):
    monkeypatch.setattr(ray_launcher, "build", lambda: "9.9.9 (messages 12345678)")
    with pytest.raises(ConfigError, match=r"server has Octavo 9\.9\.9.*install the same version"):
        run(config_of(folder), None)
    assert wait_for_cpus(cluster)


@pytest.mark.ray
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(cluster, folder, tmp_path, capfd):
    broken = write_model(tmp_path / "broken")
    (broken / "broken").touch()
    with pytest.raises(ConfigError, match="told to be broken"):
        run(config_of(broken), None)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.99.*must be an address of this machine"):
        run(config_of(folder, data_parallel_address="192.0.2.99"), None)
    assert wait_for_cpus(cluster)


@pytest.mark.ray
def test_a_server_that_a_machine_cannot_reach_is_named(cluster, folder, monkeypatch):
    async def connect(launcher, inbox, outbox):
        await connect_for_real(launcher, inbox, outbox)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        return Addresses(address, address)

    connect_for_real = RayLauncher.connect
    monkeypatch.setattr(RayLauncher, "connect", connect)
    with pytest.raises(EngineDeadError, match=r"exit code 1 on .*server at tcp://127\.0\.0\.1:\d+ "
                       "cannot be reached"):  # fmt: skip
        run(config_of(folder), None)
    assert wait_for_cpus(cluster)


def wait_for_cpus(ray, count=3.0):
    wait_until(lambda: ray.available_resources().get("CPU") == count)
    return True


@pytest.mark.ray
@pytest.mark.slow
@needs_ray
def test_a_server_starts_a_cluster_of_its_own_and_ends_it(folder):
    place = tempfile.mkdtemp(prefix="or-", dir="/tmp")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "fake_engine.py"), str(folder), "--port", str(port),
         "--swap-space", "0", "--threads", "1", "--distributed-executor-backend", "ray"],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        | {"PYTHONPATH": PYTHONPATH, "HOME": place, "RAY_TMPDIR": place},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ready():
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200

    try:
        wait_until(ready, 100)
        body = {"prompt": "!slow", "max_tokens": 300, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            url = f"http://127.0.0.1:{port}/v1/completions"
            reply = pool.submit(httpx.post, url, json=body, timeout=60)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            # A drain of more than 3 s, after which Ray's own handler of the signal would abort.
            assert reply.result().json()["usage"]["completion_tokens"] == 300
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "SIGTERM received" not in log
    wait_until(lambda: engines(place) == [])
    shutil.rmtree(place)


# Without a cluster


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        ray_launchers(config_of("m"))
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        RayCluster().join()


@needs_ray
def test_options_of_ray_are_checked_before_anything_starts():
    with pytest.raises(ConfigError, match="Ray chooses it: set device='cuda'"):
        check_options(config_of("m", device="cuda:1"))
    for name, value in {
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 5000,
    }.items():
        with pytest.raises(ConfigError, match=f"{name} .*distributed_executor_backend='ray'"):
            check_options(EngineConfig(model="m", **{name: value}))


def machines(*sizes, **extra):
    return [
        Machine(f"10.0.0.{i}", {"CPU": float(size), **extra}, {}) for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("options", "found", "wanted"),
    [
        ({"threads": 3, "data_parallel_size": 4}, machines(8), {"CPU": 3}),
        ({"threads": None}, machines(8, 6), {"CPU": 6}),
        ({"threads": None, "data_parallel_size": 2}, machines(8, 6), {"CPU": 6}),
        ({"threads": None, "data_parallel_size": 3}, machines(8, 6), {"CPU": 3}),
        ({"threads": None, "data_parallel_size": 9}, machines(2, 2), {"CPU": 1}),
        ({"threads": None, "tensor_parallel_size": 4}, machines(2), {"CPU": 4}),
        ({"threads": None}, [], {"CPU": 1}),
        ({"tensor_parallel_size": 2}, machines(8, GPU=4.0), {"CPU": 2, "GPU": 2}),
        ({"device": "cpu", "threads": 2}, machines(8, GPU=4.0), {"CPU": 2}),
        ({"device": "cuda"}, machines(8), {"CPU": 1, "GPU": 1}),
    ],
)
def test_what_an_engine_asks_for(options, found, wanted):
    assert wanted_resources(config_of("m", **options), found) == wanted


def test_no_room_is_told_per_machine():
    found = [
        Machine("10.0.0.1", {"CPU": 8.0, "GPU": 2.0}, {"CPU": 7.5}),
        Machine("10.0.0.2", {}, {}),
    ]
    said = str(no_room({"CPU": 2.0, "GPU": 1.0}, found, 60))
    assert "no machine with 2 CPU and 1 GPU free within 60 s" in said
    assert "10.0.0.1: 7.5 of 8 CPU, 0 of 2 GPU; 10.0.0.2: nothing" in said


def test_an_address_of_a_cluster_is_tried_before_ray_does(monkeypatch):
    for fine in (None, "auto", "local"):
        check_address(fine)
    for wrong in ("ray://10.0.0.1:10001", "10.0.0.1", "here:there"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            check_address(wrong)
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}.*nobody answers"):
            check_address(address)
        silent.listen()
        check_address(address)
