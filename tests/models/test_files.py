"""What a model's name may be, and what is said when it leads nowhere."""

import json
import os
import socket
from pathlib import Path

import pytest

import kit
from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError
from octavo.models import files
from octavo.models.files import EMBEDDED, embedded_path, resolve


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a path-like name reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(files, "_snapshot", refuse)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kit.tiny(tmp_path / "a model, größer")


def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve(str(folder))
    assert (found.root, found.weights) == (folder, (folder / "model.safetensors",))
    assert resolve(f"{folder}/") == found.__class__(f"{folder}/", folder, found.weights)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve(f"~/{folder.name}").weights == found.weights
    monkeypatch.chdir(folder.parent)
    assert resolve(folder.name).weights == (Path(folder.name) / "model.safetensors",)


@pytest.mark.parametrize(
    "name",
    ["/no/such/model", "./absent", "../absent", "~/absent", "absent", "a/b/c", "absent.gguf",
     "x/absent.gguf", "back\\slash", "gpt2"],
)  # fmt: skip
def test_mdl_15_absent_paths_never_touch_the_network(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        resolve(name)
    assert repr(name) in str(error.value)
    assert "smollm2" in str(error.value)


@pytest.mark.parametrize("name", ["~no-such-user/m", "x" * 5000, "/" + "x" * 300, "a\0b"])
def test_mdl_15_names_that_no_path_can_have(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="model "):
        resolve(name)


def test_mdl_15_an_absent_path_below_a_folder_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="models/absent"):
        resolve("models/absent")


def test_mdl_15_a_misspelt_embedded_name_gets_a_hint() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2'"):
        resolve("smolm2")


def test_mdl_15_an_embedded_model_that_is_not_pulled() -> None:
    with pytest.raises(ModelNotFoundError, match="octavo pull smollm2"):
        resolve("smollm2")


def test_an_embedded_model_is_found_in_the_cache() -> None:
    path = embedded_path("smollm2")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert resolve("smollm2").weights == (path,)
    assert path.name == EMBEDDED["smollm2"].file_name


def test_mdl_15_a_file_that_is_no_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file"):
        resolve(str(folder / "config.json"))


def test_mdl_15_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"empty holds no config\.json"):
        resolve(str(tmp_path / "empty"))


def test_mdl_15_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no safetensors"):
        resolve(str(folder))


def test_mdl_02_an_unfinished_download(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete")
    with pytest.raises(CheckpointError, match="unfinished download"):
        resolve(str(folder))


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*refused"):
        resolve(str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_mdl_15_no_permission(folder: Path) -> None:
    folder.chmod(0)
    try:
        with pytest.raises(ConfigError, match=r"[Pp]ermission"):
            resolve(str(folder))
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "index",
    [
        "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": ""}}',
    ],
)  # fmt: skip
def test_mdl_01_a_malformed_index(index: str, folder: Path) -> None:
    (folder.parent / "x.safetensors").write_bytes(b"outside the folder")
    (folder / files.INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        resolve(str(folder))


def test_mdl_01_a_missing_shard_is_named(folder: Path) -> None:
    (folder / files.INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        resolve(str(folder))


def test_several_files_and_no_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    assert resolve(str(folder)).weights == (folder / "one.safetensors",)
    (folder / "two.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        resolve(str(folder))


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path)).root.suffix == ".gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        resolve(str(tmp_path))


def test_a_hub_id_fetches_the_description_then_the_named_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(model: str, revision: str | None, patterns: list[str]) -> Path:
        assert (model, revision) == ("owner/name", "v1")
        asked.append(patterns)
        return folder

    monkeypatch.setattr(files, "_snapshot", snapshot)
    assert resolve("owner/name", "v1").root == folder
    assert "model.safetensors" not in asked[0]
    assert "model.safetensors" in asked[1]


def test_mdl_15_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.undo()

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        resolve("owner/name")


def test_an_embedded_model_in_a_folder_of_another_user_is_not_here(monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ModelNotFoundError, match="octavo pull smollm2"):
        resolve("smollm2")
