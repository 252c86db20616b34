"""The files in deploy/: they parse, and what they say of Octavo is true."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli.main import command_parser, main
from octavo.server.limits import LIMITS
from octavo.server.options import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs/deploy.md").read_text()


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def served(words: list[str]) -> None:
    """These words after `octavo serve` are flags that there are, with values that they take."""
    command_parser("serve").parse(words)


def kubernetes(kind: str) -> Any:
    return next(d for d in documents("kubernetes.yaml") if d["kind"] == kind)


def container() -> Any:
    return kubernetes("Deployment")["spec"]["template"]["spec"]["containers"][0]


def entrypoint() -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text()
    found = re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert found
    return list(yaml.safe_load(found.group(1)))


def test_every_file_is_named_on_the_page_and_every_yaml_parses() -> None:
    for path in DEPLOY.iterdir():
        assert f"../deploy/{path.name})" in PAGE
        if path.suffix == ".yaml":
            assert all(isinstance(part, dict) for part in documents(path.name))


def test_every_command_line_is_accepted() -> None:
    assert entrypoint()[:2] == ["octavo", "serve"]
    served([*entrypoint()[2:], *documents("compose.yaml")[0]["services"]["octavo"]["command"]])
    served([*entrypoint()[2:], *container()["args"]])


def test_every_flag_on_the_pages_is_one() -> None:
    known = set(command_parser("serve").flags())
    for page in (PAGE, (ROOT / "docs/server.md").read_text()):
        named = set(re.findall(r"`(--[a-z][a-z-]+)", page))
        assert len(named) > 5
        assert named <= known


def test_the_configuration_file_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def record(listener: object, config: Any, options: Any) -> int:
        found.extend((config, options))
        return 7

    monkeypatch.setattr("octavo.server.run.serve", record)
    path = str(DEPLOY / "octavo.yaml")
    assert main(["serve", "--config", path, "--port", "0", "--max-num-seqs=3"]) == 7
    config, options = found
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("smollm2", 4096, 3)
    assert options.served_model_name == ("smollm2", "gpt-4o-mini")
    assert (options.port, options.log_format) == (0, "json")


def test_every_supervisor_waits_longer_than_a_drain() -> None:
    drain = ServerConfig().drain_timeout
    compose = documents("compose.yaml")[0]["services"]["octavo"]
    assert float(compose["stop_grace_period"].removesuffix("s")) > drain
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    before = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + before
    unit = (DEPLOY / "octavo.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop
    assert float(stop.group(1)) > drain


def test_probes_ask_for_what_needs_no_key() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"]["path"] == "/health"
    mounted = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounted == {"/cache", "/tmp"}


def test_proxies_close_first_and_take_bodies_as_large() -> None:
    nginx, caddy = ((DEPLOY / name).read_text() for name in ("nginx.conf", "Caddyfile"))
    for text in (nginx, caddy):
        idle = re.search(r"keepalive(?:_timeout)? (\d+)s", text)
        assert idle
        assert float(idle.group(1)) < LIMITS.keep_alive_seconds
        assert f" {ServerConfig().max_body_mb:g}m" in text.lower()
    assert "proxy_buffering off;" in nginx
    for text in (nginx, caddy):
        assert text.count("{") == text.count("}")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="asks systemd")
def test_the_unit_is_one(tmp_path: Path) -> None:
    unit = (DEPLOY / "octavo.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert command
    words = shlex.split(command.group(1))
    assert words[1] == "serve"
    assert words[2] == "--config"
    path = tmp_path / "octavo.service"
    path.write_text(unit.replace(words[0], sys.executable))  # one that is installed here
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "octavo.service" in line]
    assert ours == []


def test_every_environment_variable_is_documented() -> None:
    """Only log.py reads the environment; other files name variables to libraries and in texts."""
    text = (ROOT / "src/octavo/log.py").read_text()
    names = set(re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+)"', text))
    assert {"OCTAVO_API_KEY", "OCTAVO_LOG_LEVEL", "OMP_NUM_THREADS"} <= names
    ours = re.compile(r"\b(?:OCTAVO|OMP|HF)_[A-Z_]+\b|\bGOMP_SPIN[A-Z_]*\b")
    for path in (ROOT / "src/octavo").rglob("*.py"):
        names.update(ours.findall(path.read_text()))
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert set(re.findall(r"\bOCTAVO_[A-Z_]+\b", page.read_text())) <= names, page.name
