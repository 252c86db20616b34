"""The files in deploy/ against what really is: what they copy, run and ask for is tried here.

Docker, systemd and Kubernetes are not needed; what the files say to them is read.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from configparser import ConfigParser
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from octavo.cli.main import command_parser
from octavo.server.options import ServerConfig
from serving import PYTHONPATH, TESTS, Process, free_port, wait_until, write_model

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.gpu")
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN",
         "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}  # fmt: skip


class Instruction(NamedTuple):
    name: str
    rest: str


def instructions(name: str) -> list[Instruction]:
    """Without comments, continued lines joined."""
    lines = [x for x in (DEPLOY / name).read_text().splitlines() if not x.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(word, rest.strip()) for word, _, rest in found]


def of(name: str, kind: str) -> list[str]:
    return [one.rest for one in instructions(name) if one.name == kind]


def words_of(name: str, kind: str) -> list[str]:
    """The words of an instruction in its exec form, which needs no shell."""
    return list(json.loads(of(name, kind)[-1]))


def environment(name: str) -> dict[str, str]:
    return dict(word.split("=", 1) for rest in of(name, "ENV") for word in shlex.split(rest))


def copied(name: str) -> list[str]:
    """Paths of the repository that the image gets."""
    rests = [rest.split() for rest in of(name, "COPY") if not rest.startswith("--from")]
    return [path for words in rests for path in words[:-1]]


def manifest(kind: str) -> Any:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return next(document for document in documents if document["kind"] == kind)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_copies_what_is_there_and_runs_what_is_accepted(name: str) -> None:
    assert {one.name for one in instructions(name)} <= KNOWN
    assert instructions(name)[0].name == "FROM"
    stages = re.findall(r" AS (\w+)$", "\n".join(of(name, "FROM")), re.MULTILINE)
    for rest in of(name, "COPY"):
        if stage := re.match(r"--from=(\w+) ", rest):
            assert stage.group(1) in stages
    assert copied(name)
    assert all((ROOT / path).exists() for path in copied(name))
    words = [*words_of(name, "ENTRYPOINT"), *words_of(name, "CMD")]
    assert words[:2] == ["octavo", "serve"]
    options = command_parser("serve").parse(words[2:])
    assert options.host == "0.0.0.0"
    assert of(name, "EXPOSE") == [str(ServerConfig.port)]
    used = set(re.findall(r"\$(\w+)", " ".join(of(name, "RUN"))))
    assert used <= {rest.split("=")[0] for rest in of(name, "ARG")}
    folders = [path for key, path in environment(name).items() if key.endswith(("_DIR", "_HOME"))]
    assert len(folders) >= 2
    assert all(path.startswith(of(name, "VOLUME")[0] + "/") for path in folders)


def test_both_dockerfiles_build_the_same_package() -> None:
    first, second = ([x for x in instructions(name) if x.name in ("COPY", "WORKDIR", "USER")]
                     for name in DOCKERFILES)  # fmt: skip
    assert first == second


def test_the_build_gets_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied("Dockerfile"))


def test_ports_users_and_folders_agree() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["octavo"]
    build = compose["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert compose["ports"][0].rsplit(":", 1)[1] == of("Dockerfile", "EXPOSE")[0]
    assert compose["volumes"][0].split(":")[1] == of("Dockerfile", "VOLUME")[0]
    pod = manifest("Deployment")["spec"]["template"]
    container = pod["spec"]["containers"][0]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == of("Dockerfile", "EXPOSE")[0]
    (service,) = manifest("Service")["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    assert manifest("Service")["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert f"--uid {pod['spec']['securityContext']['runAsUser']} " in " ".join(
        of("Dockerfile", "RUN")
    )
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName")
              for volume in pod["spec"]["volumes"]]  # fmt: skip
    assert manifest("PersistentVolumeClaim")["metadata"]["name"] in claims
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert of("Dockerfile", "VOLUME")[0] in mounts.values()


def test_health_checks_and_probes_see_a_load_and_a_ready_server(tmp_path: Path) -> None:
    with Process(write_model(tmp_path, load_seconds=2)) as server:
        wait_until(lambda: server.status() is not None)
        before = [server.status(), *checks(server.port)]
        server.wait_ready()
        assert checks(server.port) == [0, 0]
        for probe in probes():
            assert httpx.get(server.url + probe).status_code == 200
        # Unless the load was over before it was asked for.
        assert before[0] == 200 or before == [503, 1, 1]


def checks(port: int) -> list[int]:
    """Exit codes of the images' own checks."""
    codes = []
    for name in DOCKERFILES:
        (check,) = of(name, "HEALTHCHECK")
        words = json.loads(check.partition("CMD ")[2])
        assert f":{ServerConfig.port}/" in words[-1]
        words = [
            sys.executable,
            *(w.replace(f":{ServerConfig.port}/", f":{port}/") for w in words[1:]),
        ]
        codes.append(subprocess.run(words, capture_output=True, check=False).returncode)
    return codes


def probes() -> list[str]:
    container = manifest("Deployment")["spec"]["template"]["spec"]["containers"][0]
    found = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
    assert len(found) == 3
    assert {probe["port"] for probe in found} == {container["ports"][0]["name"]}
    return [probe["path"] for probe in found]


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "octavo.service")
    return parser


def test_the_units_command_starts_drains_and_exits(tmp_path: Path) -> None:
    """With the configuration beside it and systemd's %C, on a free port; without weights."""
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[1:3] == ["serve", "--config"]
    settings = yaml.safe_load((DEPLOY / "octavo.yaml").read_text())
    port = free_port()
    settings |= {"model": str(write_model(tmp_path)), "port": port}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    variables = service["Environment"].replace("%C", str(tmp_path)).split()
    given = dict(variable.split("=", 1) for variable in variables)
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "fake_engine.py"), "--config", str(tmp_path / "config.yaml")],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **given}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, process.communicate()[1]
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [model["id"] for model in models] == settings["served-model-name"]
        process.send_signal(signal.SIGTERM)  # KillMode=mixed: to the main process
        _, log = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert all(json.loads(line) for line in log.splitlines())  # log-format: json
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"  # a drain is not one
    assert unit()["Install"]["WantedBy"] == "multi-user.target"


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def test_the_script_for_two_machines_is_one(tmp_path: Path) -> None:
    """Its commands are those of `ray` and `octavo`; test_ray_launcher_netns.py runs them."""
    script = DEPLOY / "ray-two-machines.sh"
    assert os.access(script, os.X_OK)
    for name in ("ray", "octavo"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" RAY_ADDRESS=$RAY_ADDRESS\n')
        (tmp_path / name).chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "RAY_ADDRESS": ""}

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [script, *words], env=told, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, said = run()
    assert code == 2
    assert said.count("ray-two-machines.sh ") == 3
    assert run("head", "10.0.0.1")[1].startswith("ray start --head --node-ip-address=10.0.0.1 ")
    code, said = run("join", "10.0.0.1", "10.0.0.2")
    assert code == 1
    assert "copy ~/.ray/auth_token of 10.0.0.1" in said
    code, said = run("serve", "10.0.0.1", "smollm2", "--threads", "2")
    *words, address = said.split()
    assert address == "RAY_ADDRESS=10.0.0.1:6379"
    options = command_parser("serve").parse(words[2:])
    assert (options.model, options.threads, options.data_parallel_size) == ("smollm2", 2, 2)
    assert (options.distributed_executor_backend, options.restart_engine) == ("ray", True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The Dockerfile's first stage: an environment in which what it copies is installed.

    Dependencies are not installed again: a .pth file names the folder where they lie.
    """
    source, place = tmp_path / "source", tmp_path / "octavo"
    source.mkdir()
    for path in copied("Dockerfile"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, source / path)
    venv.create(place, with_pip=False, symlinks=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel",
         "--directory", tmp_path / "wheels"],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "wheels").iterdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python",
         place / "bin/python", "install", "-q", "--no-deps", "--no-index", wheel],
        check=True,
    )  # fmt: skip
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


@pytest.mark.slow
def test_an_image_serves(image: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """As the container would: its entry point, its environment, its volume; another port."""
    port = free_port()
    given = {
        key: value.replace("/octavo/bin", str(image / "bin")).replace("/cache", str(tmp_path / "c"))
        for key, value in environment("Dockerfile").items()
    }
    assert given.pop("PATH").startswith(str(image / "bin"))
    entry = words_of("Dockerfile", "ENTRYPOINT")
    process = subprocess.Popen(
        [image / "bin" / entry[0], *entry[1:], str(tiny_folder), "--port", str(port),
         "--dtype", "float32", "--kv-cache-memory-bytes", "10000000", "--swap-space", "0"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | given,
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or answers(port), 250)
        body = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert all(json.loads(line) for line in log.splitlines())
    assert (tmp_path / "c/octavo").is_dir()
