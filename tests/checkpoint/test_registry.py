"""A model's files as one table; containers of one's own."""

import json
from pathlib import Path

import pytest

from octavo.checkpoint import registry
from octavo.checkpoint.base import Container, OpenedFile, StoredTensor, TensorFormat, name_list
from octavo.checkpoint.registry import container_of, open_checkpoint, register_container
from octavo.errors import CheckpointError, ConfigError

BYTES = TensorFormat("U8", 1, 1, "uint8")


def open_listed(path: Path) -> OpenedFile:
    """A file that is a JSON object of names to lists of bytes."""
    tensors = {
        name: StoredTensor(path, (len(values),), BYTES, lambda values=values: bytearray(values))
        for name, values in json.loads(path.read_text()).items()
    }
    return OpenedFile(tensors, {path.stem: True})


LISTED = Container("listed", ".listed", "huggingface", False, open_listed)


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_container(LISTED)


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, ...]:
    for name, tensors in (("a", {"x": [1], "y": [2, 3]}), ("b", {"z": [4]})):
        (tmp_path / f"{name}.listed").write_text(json.dumps(tensors))
    return tmp_path / "a.listed", tmp_path / "b.listed"


def test_files_are_one_table(shards: tuple[Path, ...], tmp_path: Path) -> None:
    index = {"x": "a.listed", "y": "a.listed", "z": "b.listed"}
    found = open_checkpoint(tmp_path, shards, index)
    assert {name: bytes(tensor.load()) for name, tensor in found.tensors.items()} == {
        "x": b"\1", "y": b"\2\3", "z": b"\4",
    }  # fmt: skip
    assert found.metadata == {"a": True, "b": True}
    assert found.container is LISTED


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"x": "a.listed", "y": "a.listed"}, r"b\.listed holds tensors .* not place there: z"),
        ({"x": "a.listed", "y": "b.listed", "z": "b.listed"}, r"a\.listed holds .* there: y"),
        (
            {"x": "a.listed", "y": "a.listed", "w": "a.listed", "z": "b.listed"},
            r"a\.listed lacks tensors that the index lists: w",
        ),
    ],
)
def test_mdl_01_files_that_differ_from_their_index(
    index: dict[str, str], said: str, shards: tuple[Path, ...], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path, shards, index)


def test_a_name_in_two_files(shards: tuple[Path, ...], tmp_path: Path) -> None:
    shards[1].write_text('{"y": [9]}')
    with pytest.raises(CheckpointError, match=r"b\.listed holds tensors of another file: y"):
        open_checkpoint(tmp_path, shards)


def test_files_of_no_container_list_the_known_endings(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.bin .* \.safetensors, \.gguf, \.listed"):
        open_checkpoint(tmp_path, (tmp_path / "model.bin",))


@pytest.mark.parametrize("name", ["a.GGUF", "a.gguf", "b/a.safetensors", "a.listed"])
def test_a_container_is_known_by_its_suffix(name: str) -> None:
    found = container_of(Path(name))
    assert found is not None
    assert found.suffix == Path(name).suffix.lower()


@pytest.mark.parametrize("suffix", [".gguf", "listed", ""])
def test_a_suffix_that_is_taken_or_none(suffix: str) -> None:
    with pytest.raises(ConfigError, match="is taken or has no dot"):
        register_container(Container("x", suffix, "gguf", True, open_listed))


def test_long_lists_of_names_are_cut() -> None:
    assert name_list("abc") == "a, b, c"
    assert name_list("abcdefghij") == "a, b, c, d, e, f, g, h and 2 more"
