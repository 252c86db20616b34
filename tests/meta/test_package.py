"""The package: what a wheel and an sdist hold, and that an installed wheel needs no checkout.

The wheel goes into an environment of its own. Dependencies are not installed again: a .pth file
adds the folder where they lie. Python does not read the .pth files in such a folder, so that an
editable install there stays out of sight. `make package-check` installs everything anew.
"""

import ast
import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import octavo
from octavo.version import __version__
from serving import free_port, wait_until

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"


def build(target: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        folder,
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def tracked(*folders: str) -> set[str]:
    """Files of the sources; what Python leaves beside them is left out."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == {name.removeprefix("src/") for name in tracked("src/octavo")}
    assert "octavo/py.typed" in own
    assert f"octavo-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_holds_what_builds_and_explains_it(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked("src/octavo") <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= names
    assert not {name for name in names if name.split("/")[0] in ("tests", "benchmarks")}


def test_nothing_is_left_in_the_source_tree(tmp_path: Path) -> None:
    def left() -> set[Path]:
        return {ROOT / name for name in ("build", "dist") if (ROOT / name).exists()} | {
            *SOURCE.parent.glob("*.egg-info")
        }

    before = left()
    build("wheel", tmp_path)
    assert left() == before


def test_metadata(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("octavo", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("Provides-Extra") == ["bench", "dev", "otel", "ray"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers


def requirements(metadata: email.message.Message) -> dict[str, str]:
    """Dependencies of the package itself: normalized name -> lower bound."""
    found = {}
    for line in metadata.get_all("Requires-Dist") or []:
        if "extra ==" not in line:
            name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", line.replace(" ", "")).groups()
            found[normal(name)] = bound
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> set[str]:
    """Third-party modules that the package imports, wherever in its files."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).split(".")[0])
    return found - {*sys.stdlib_module_names, "octavo"}


def test_each_import_is_declared_and_each_dependency_imported(
    metadata: email.message.Message,
) -> None:
    owners = packages_distributions()
    # Imported where a device, a cluster, or a collector of spans needs it.
    optional = {"triton", "ray", "opentelemetry"}
    used = {normal(owners[module][0]) for module in imported() - optional}
    assert used == requirements(metadata).keys()


def test_lower_bounds_are_at_most_the_versions_tested_together(
    metadata: email.message.Message,
) -> None:
    text = (ROOT / "constraints.txt").read_text()
    tested = {
        normal(name): version for name, version in re.findall(r"^([\w-]+)==([\d.]+)", text, re.M)
    }
    for name, bound in requirements(metadata).items():
        assert numbers(bound) <= numbers(tested[name]), name


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


class Installed:
    """An environment with the wheel and, by path, this one's dependencies."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        self.check(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
        site = Path(
            self.check(self.python, "-c", "import sysconfig as s;print(s.get_path('purelib'))")
        )
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def check(self, *command: object) -> str:
        """Run in an empty folder's place; returns the output."""
        done = subprocess.run(
            [str(part) for part in command], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def octavo(self, *arguments: object) -> str:
        return self.check(self.folder / "bin" / "octavo", *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed") / "env", wheel)


def test_the_installed_package_is_not_the_checkout(installed: Installed) -> None:
    where = installed.check(installed.python, "-c", "import octavo; print(octavo.__file__)")
    assert Path(where).is_relative_to(installed.folder)
    assert not Path(octavo.__file__).is_relative_to(installed.folder)
    assert installed.octavo("--version") == f"octavo {__version__}"


@pytest.mark.model
def test_pull_works_where_installed(installed: Installed) -> None:
    assert "smollm2" in installed.octavo("pull", "--list")
    installed.octavo("pull", "smollm2")


def test_generate_works_where_installed(installed: Installed, tiny_folder: Path) -> None:
    answer = installed.octavo("generate", "--model", tiny_folder, "--json", "-p", "hi", *FLAGS)
    assert len(json.loads(answer)["outputs"][0]["token_ids"]) == 4


FLAGS = ("--max-tokens", "4", "--ignore-eos", "--dtype", "float32", "--kv-cache-memory-bytes",
         "10000000", "--swap-space", "0")  # fmt: skip


@pytest.fixture
def server(installed: Installed, tiny_folder: Path) -> Iterator[str]:
    port = free_port()
    command = [
        installed.folder / "bin" / "octavo",
        "serve",
        tiny_folder,
        "--port",
        port,
        *FLAGS[3:],
    ]
    process = subprocess.Popen(
        [str(part) for part in command], cwd=installed.folder, env=installed.environment,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or is_ready(url), 200)
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health") as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def ask(url: str, body: Mapping[str, object]) -> dict:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_serve_and_bench_serve_work_where_installed(
    installed: Installed, tiny_folder: Path, server: str
) -> None:
    body = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
    assert ask(server + "/v1/completions", body)["usage"]["completion_tokens"] == 3
    flags = ("--base-url", server, "--num-prompts", 3, "--input-len", 8, "--output-len", 4)
    shown = installed.octavo("bench", "serve", "--tokenizer", tiny_folder, "--ignore-eos", *flags)
    assert "Successful requests:                     3" in shown
    assert "Total generated tokens:                  12" in shown
