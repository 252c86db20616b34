"""Environments of other engines: made once, and reported when they cannot be made."""

from pathlib import Path

import pytest
from benchmarks.engines import ENGINES
from benchmarks.processes import PeerError

from benchmarks import engines, environments

ROOT = Path(environments.__file__).parent


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run; nothing is installed."""
    ran: list[list[str]] = []

    def run(name: str, command: list[str], more: dict[str, str] | None = None) -> str:
        ran.append([*command, *(f"{key}={value}" for key, value in (more or {}).items())])
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        return "numpy>=2\nmsgspec\n" if "-c" in command else ""

    monkeypatch.setattr(environments, "run", run)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    return ran


def test_an_environment_is_made_once(commands: list[list[str]]) -> None:
    first = environments.python_of("toy", ("a==1", "b"))
    count = len(commands)
    assert [command[-1] for command in commands[1:]] == ["a==1", "b"]
    assert environments.python_of("toy", ("a==1", "b")) == first
    assert len(commands) == count
    environments.python_of("toy", ("a==2", "b"))
    assert len(commands) > count, "other requirements, another environment"


def test_some_requirements_can_be_left_out(commands: list[list[str]]) -> None:
    environments.python_of("toy", ("torch==1", "engine[cpu]==2"), without=("torchvision",))
    assert commands[2][-2:] == ["--no-deps", "engine[cpu]==2"]
    assert commands[3][-2:] == ["engine", "torchvision"]
    assert commands[4][-2:] == ["numpy>=2", "msgspec"]


def test_flags_reach_the_compiler_and_make_another_environment(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    environments.python_of("toy", ("a==1",), cmake="-DX=ON")
    assert commands[1][-3:] == ["a==1", "CMAKE_ARGS=-DX=ON", "LLAMA_CPP_BUILD_JOBS=3"]
    assert "--no-cache-dir" in commands[1], "pip would give what it built with other flags"
    count = len(commands)
    environments.python_of("toy", ("a==1",), cmake="-DX=OFF")
    assert len(commands) == 2 * count


def test_a_step_that_fails_says_its_last_words() -> None:
    with pytest.raises(PeerError, match="toy cannot be prepared: no such package"):
        environments.run("toy", ["sh", "-c", "echo no such package >&2; exit 1"])


def test_every_engine_has_its_file_and_every_file_an_engine() -> None:
    files = {path.stem for path in (ROOT / "peers").glob("*.py")} - {"__init__"}
    assert files == {spec.module for spec in ENGINES.values()}


def test_a_shape_is_made_once_and_a_folder_is_no_gguf(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, command: list[str], more: dict[str, str] | None = None) -> str:
        commands.append(command)
        Path(command[3]).touch()
        return ""

    monkeypatch.setattr(engines, "run", run)
    model = engines.model_file("shape:1B-Q4_0")
    assert model.name == "1B-Q4_0.gguf"
    assert engines.model_file("shape:1B-Q4_0") == model
    assert [command[-4:] for command in commands] == [["--size", "1B", "--form", "Q4_0"]]
    folder = model.with_name("1B-BF16")
    folder.mkdir()
    with pytest.raises(PeerError, match=r"reads \.gguf files; 1B-BF16 is a folder"):
        engines.stored_as("llama", folder, "BF16")
