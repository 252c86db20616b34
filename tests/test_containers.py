"""The sweep of containers: an engine starts and answers in each, or says in one line why not.

Real namespaces and control groups, where this user may make them; `kernels/cpu/test_cgroup.py`
reads trees of every shape, and forks are tested with what must not be used in them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from serving import PYTHONPATH, Process, write_model

PROMPT = [1, 2, 3]
ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 50, "load_progress": False,
           "swap_space": 0}  # fmt: skip
OFFLINE = f"""
import json, sys
from octavo import LLM, SamplingParams
from octavo.log import configure
configure()
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
llm = LLM(sys.argv[1], **{OPTIONS})
print(json.dumps(llm.generate({PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids))
"""
# Starts the engine's process over sockets, as the server does; no part of it needs torch.
SERVED = """
import asyncio, sys
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.errors import OctavoError
from octavo.text.tokenizer import load_tokenizer
async def main():
    config = EngineConfig(model=sys.argv[1], swap_space=0)
    client = EngineClient(config, "fake_engine:create")
    try:
        await client.start(lambda: load_tokenizer(config.model))
    except OctavoError as error:
        sys.exit(f"octavo: {error}")
    print(client.capabilities.limits.max_model_len)
    await client.close()
asyncio.run(main())
"""


@lru_cache(maxsize=1)
def cannot_unshare() -> str | None:
    """Why no mount namespace can be made here; None if one can."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "--make-rprivate", "/"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        return f"unshare: {error}"
    return done.stderr.strip() if done.returncode else None


def run(program, folder, *, mounts="", limits="", environment=None, code=0):
    """Run a program behind `mounts` (in a namespace of its own) and `limits`: its output, its log.

    Shell commands; environment: of the program alone, None removes a name.
    """
    if mounts and (reason := cannot_unshare()):
        pytest.skip(reason)
    given = {**os.environ, "PYTHONPATH": PYTHONPATH, **(environment or {})}
    script = f'set -e\n{mounts}\n{limits}\nexec "$@"'
    shell = ["sh", "-c", script, "sh", sys.executable, "-c", program, str(folder)]
    done = subprocess.run(
        [*(["unshare", "-m"] if mounts else []), *shell],
        env={name: value for name, value in given.items() if value is not None},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def answer(tiny_folder):
    return LLM(str(tiny_folder), **OPTIONS).generate(PROMPT, ANSWER, use_tqdm=False)[0].outputs[
        0
    ].token_ids  # fmt: skip


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


def check(tiny_folder, answer, scripted, **surroundings):
    """Both programs answer; the log of the one with a model."""
    said, log = run(OFFLINE, tiny_folder, **surroundings)
    assert json.loads(said) == answer
    assert "Traceback" not in log
    said, other = run(SERVED, scripted, **surroundings)
    assert said == "512\n"
    assert "Traceback" not in other
    return log


NOBODY = "mount --bind /dev/null /etc/passwd\nmount --bind /dev/null /etc/nsswitch.conf"
HOMELESS = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "OCTAVO_CACHE_DIR"))


@pytest.mark.slow  # compiles every kernel
def test_no_home_and_no_passwd_entry(tiny_folder, answer, scripted):
    log = check(tiny_folder, answer, scripted, mounts=NOBODY, environment=HOMELESS)
    assert log.count("not kept for the next start: this user has no home folder") == 1


def test_a_read_only_root(tiny_folder, answer, scripted):
    """Sockets then lie in /dev/shm."""
    mounts = "mount --make-rprivate /\nmount -o remount,bind,ro /"
    check(tiny_folder, answer, scripted, mounts=mounts)


NO_SHM = "mount -t tmpfs -o ro,size=4k none /dev/shm"


def test_no_shared_memory(tiny_folder, answer, scripted):
    check(tiny_folder, answer, scripted, mounts=NO_SHM)


def test_no_folder_that_can_be_written_is_one_line(scripted):
    mounts = f"mount --make-rprivate /\nmount -o remount,bind,ro /\n{NO_SHM}"
    said, log = run(SERVED, scripted, mounts=mounts, code=1)
    assert said == ""
    [line] = log.splitlines()
    assert "set TMPDIR to a folder that can be written" in line


def test_temporary_files_that_cannot_be_run(tiny_folder, answer, scripted, tmp_path):
    mounts = f"mount -t tmpfs -o noexec none {tmp_path}"
    places = {"TMPDIR": str(tmp_path)}
    check(tiny_folder, answer, scripted, mounts=mounts, environment=places)


def test_a_long_folder_of_temporary_files(tiny_folder, answer, scripted, tmp_path):
    long = tmp_path / ("x" * 113)
    long.mkdir()
    check(tiny_folder, answer, scripted, environment={"TMPDIR": str(long)})
    assert list(long.iterdir()) == []


def test_few_descriptors(tiny_folder, answer, scripted):
    check(tiny_folder, answer, scripted, limits="ulimit -n 64")


def test_too_few_descriptors_are_one_line(scripted, tmp_path):
    """Whatever step finds none left; the folder of the sockets does not stay."""
    with tempfile.TemporaryDirectory(prefix="o") as short:
        for count in (8, 14, 20):
            program = (
                "import resource, asyncio, zmq.asyncio, octavo.engine.client, octavo.text.loading\n"
                f"resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, 64))\n" + SERVED
            )
            given = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": short}
            done = subprocess.run(
                [sys.executable, "-c", program, str(scripted)],
                env=given, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode == 1
            [line] = done.stderr.splitlines()
            assert "Too many open files" in line
            assert "ulimit -n" in line
            assert os.listdir(short) == []


def test_a_server_among_files_named_like_modules(scripted, tmp_path, monkeypatch):
    """ipython/ipykernel#209, vllm-ascend#725: none of them is run, by none of its processes."""
    for name in ("calendar", "json", "msgspec", "zmq", "signal", "runpy", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran a file of the user')\n")
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "__init__.py").write_text("raise SystemExit('ran a folder')\n")
    monkeypatch.chdir(tmp_path)
    with Process(scripted) as server:
        server.wait_ready()
        server.process.terminate()
        code, log = server.end()
    assert code == 0
    assert "ran a f" not in log


# Processors and memory

THREADS = """
import sys
from octavo.config import EngineConfig
from octavo.log import configure
from octavo.kernels.cpu import memory, openmp
from octavo.runner.device import cpu
configure()
device = cpu(EngineConfig(huge_pages=False))
print(openmp.threads(), device.memory().total, device.memory().free)
"""


@contextlib.contextmanager
def group(controller, **limits):
    """A control group of version 1 or 2 below this process's own; the shell command to enter it."""
    folder = Path(f"/sys/fs/cgroup/{controller}/octavo-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            for name, value in limits.items():
                (folder / f"{controller}.{name}").write_text(str(value))
        except OSError as error:
            pytest.skip(f"control group: {error}")
        yield f"echo $$ > {folder}/cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize(("quota", "explicit"), [(50_000, None), (150_000, None), (50_000, "2")])
def test_a_quota_of_processor_time(tmp_path, quota, explicit):
    with group("cpu", cfs_period_us=100_000, cfs_quota_us=quota) as enter:
        environment = {"OMP_NUM_THREADS": explicit}
        said, log = run(THREADS, tmp_path, limits=enter, environment=environment)
    assert said.split()[0] == (explicit or "1")
    assert ("1 threads rather than" in log) == (explicit is None)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_set_of_processors(tmp_path):
    one = f"taskset -p -c {min(os.sched_getaffinity(0))} $$ > /dev/null"
    said, _ = run(THREADS, tmp_path, limits=one, environment={"OMP_NUM_THREADS": None})
    assert said.split()[0] == "1"


def test_a_memory_limit_without_its_page_cache(tmp_path):
    """A file that was just copied is no memory in use.

    Here it takes 500 MB; the process itself takes 300 MB with torch's build for CUDA, else 150.
    """
    limit, size = 2**30, 500_000_000
    copy = f"head -c {size} /dev/zero > {tmp_path}/model\ncat {tmp_path}/model > /dev/null"
    with group("memory", limit_in_bytes=limit) as enter:
        said, _ = run(THREADS, tmp_path, limits=f"{enter}\n{copy}")
        (tmp_path / "model").unlink()
    _, total, free = map(int, said.split())
    assert total == limit
    assert free > limit - size
