"""Install the package as a user does, and use it.

    python -m scripts.package_check [--sdist] [--minimum | --newest]

In an empty environment, from the package index: the wheel (or the sdist); then `octavo pull`,
`generate`, `serve` with one request and `bench serve`, in an empty folder with an empty cache.
Dependencies come in the versions of constraints.txt, or in the oldest that pyproject.toml allows,
or in the newest of the index. Takes minutes and a network; tests/meta/test_package.py does the
same in seconds, without the dependencies.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_START_SECONDS = 600


def build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("*.whl" if target == "wheel" else "*.tar.gz"))


def minimum_constraints(wheel: Path, file: Path) -> Path:
    """The lower bound of each dependency, as pip's constraints."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    bounds = (re.fullmatch(r"Requires-Dist: ([\w-]+)>=([\w.]+)", line) for line in lines)
    file.write_text("".join(f"{found[1]}=={found[2]}\n" for found in bounds if found))
    return file


class Environment:
    """An empty virtual environment, an empty folder to work in, an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "env" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(folder / "env", with_pip=True)
        own = {"OCTAVO_CACHE_DIR": str(folder / "cache"), "OCTAVO_LOG_LEVEL": "info"}
        dropped = ("PYTHONPATH", "VIRTUAL_ENV")
        self.variables = {k: v for k, v in os.environ.items() if k not in dropped} | own

    def command(self, name: str, *arguments: object) -> list[str]:
        return [str(self.bin / name), *map(str, arguments)]

    def run(self, name: str, *arguments: object) -> None:
        command = self.command(name, *arguments)
        print("+", *command[1:], flush=True)
        begun = time.monotonic()
        subprocess.run(command, cwd=self.work, env=self.variables, check=True)
        print(f"  {time.monotonic() - begun:.1f} s", flush=True)


def check(environment: Environment) -> None:
    """What a user does first."""
    environment.run("octavo", "--version")
    environment.run("octavo", "pull", "smollm2")
    environment.run("octavo", "generate", "-p", "Hello", "--max-tokens", 8, "--temperature", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = environment.command("octavo", "serve", "smollm2", "--port", port)
    server = subprocess.Popen(command, cwd=environment.work, env=environment.variables)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, server)
        flags = ("--num-prompts", 4, "--input-len", 16, "--output-len", 8, "--ignore-eos")
        environment.run("octavo", "bench", "serve", "--base-url", url, *flags)
    finally:
        server.terminate()
        server.wait(60)


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--sdist", action="store_true", help="install the sdist, not the wheel")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--minimum", action="store_true", help="oldest allowed dependencies")
    group.add_argument("--newest", action="store_true", help="newest dependencies")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dist").mkdir()
        wheel = build("wheel", folder / "dist")
        package = build("sdist", folder / "dist") if args.sdist else wheel
        environment = Environment(folder)
        versions = ROOT / "constraints.txt"
        if args.minimum:
            versions = minimum_constraints(wheel, folder / "minimum.txt")
        flags = [] if args.newest else ["-c", versions]
        environment.run("pip", "--disable-pip-version-check", "install", "-q", *flags, package)
        environment.run("pip", "--disable-pip-version-check", "check")
        check(environment)
    print("the installed package works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
