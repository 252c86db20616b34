"""`octavo pull` of Hugging Face ids, from a hub on this machine, and starting from what it left."""

import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub.constants as constants
import pytest

from models.hub_server import Hub, serving
from octavo.cli.main import main
from octavo.errors import ModelNotFoundError
from octavo.models.files import resolve
from octavo.models.hub import explain, size_text

INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
SHARDED = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "README.md": b"read me",
    "pytorch_model.bin": b"pickled",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-1.safetensors": b"1" * 5000,
    "model-2.safetensors": b"2" * 3000,
    "unrelated.safetensors": b"3" * 100,
}
GGUFS = {
    "toy-Q4_K_M.gguf": b"GGUF" + b"4" * 5000,
    "toy-Q8_0.gguf": b"GGUF" + b"8" * 9000,
    "toy-F16-00001-of-00002.gguf": b"GGUF" + b"1" * 9000,
    "toy-F16-00002-of-00002.gguf": b"GGUF" + b"2" * 9000,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    server.repos = {"owner/sharded": dict(SHARDED), "owner/ggufs": dict(GGUFS)}
    server.gated, server.bad_token, server.cut = set(), False, None
    server.status, server.spoilt = None, set()
    server.asked.clear()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return server


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a pull that fails."""
    assert main(["pull", *argv]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_repository_gives_its_description_and_the_weights_that_its_index_names(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "owner/sharded"]) == 0
    said = capsys.readouterr().err
    assert "fetching owner/sharded (5 files, 8 kB, licence mit; 8 kB are missing)" in said
    assert "octavo generate owner/sharded" in said
    wanted = {name for name in SHARDED if name not in ("README.md", "pytorch_model.bin")}
    assert set(hub.fetched()) == wanted - {"unrelated.safetensors"}
    hub.asked.clear()
    files = resolve("owner/sharded")
    assert [path.name for path in files.weights] == ["model-1.safetensors", "model-2.safetensors"]
    assert hub.fetched() == [], "an engine finds all of it there"


def test_a_second_pull_fetches_nothing(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", "owner/sharded"])
    hub.asked.clear()
    assert main(["pull", "owner/sharded", "--revision", "main"]) == 0
    assert "already here" in capsys.readouterr().err
    assert hub.fetched() == []


@pytest.mark.parametrize(
    "argv",
    [
        ["owner/ggufs:toy-Q4_K_M.gguf"],
        ["owner/ggufs", "--file", "toy-Q4_K_M.gguf"],
        ["owner/ggufs:q4_k_m"],
    ],
)
def test_one_gguf_file_of_several_is_chosen(
    hub: Hub, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", *argv]) == 0
    assert hub.fetched() == ["toy-Q4_K_M.gguf"]
    assert "octavo generate owner/ggufs:toy-Q4_K_M.gguf" in capsys.readouterr().err
    hub.asked.clear()
    assert resolve("owner/ggufs:Q4_K_M").root.name == "toy-Q4_K_M.gguf"
    assert hub.fetched() == []


@pytest.mark.parametrize("where", ["offline", "unreachable"])
def test_what_was_pulled_is_found_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    assert main(["pull", "owner/ggufs:Q8_0"]) == 0
    assert main(["pull", "owner/sharded"]) == 0
    if where == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("owner/ggufs:toy-Q8_0.gguf", "owner/ggufs:Q8_0", "owner/ggufs", "owner/sharded"):
        assert resolve(name).weights
    monkeypatch.undo()


def test_all_parts_of_a_gguf_model_come(hub: Hub) -> None:
    assert main(["pull", "owner/ggufs:F16"]) == 0
    assert sorted(hub.fetched()) == ["toy-F16-00001-of-00002.gguf", "toy-F16-00002-of-00002.gguf"]
    assert len(resolve("owner/ggufs:toy-F16.gguf").weights) == 2


def test_several_files_are_listed_with_their_sizes(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of(["owner/ggufs"], capsys)
    assert "3 files fit; name one, as owner/ggufs:FILE or with --file" in line
    assert "toy-F16.gguf (18 kB), toy-Q4_K_M.gguf (5 kB), toy-Q8_0.gguf (9 kB)" in line
    assert "no file is called 'Q2_K'" in error_of(["owner/ggufs:Q2_K"], capsys)
    with pytest.raises(ModelNotFoundError, match=r"owner/ggufs:FILE"):
        resolve("owner/ggufs")
    with pytest.raises(ModelNotFoundError, match=r"no file is called 'Q2_K'.*toy-Q8_0"):
        resolve("owner/ggufs:Q2_K")


def test_an_interrupted_fetch_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "toy-Q8_0.gguf"
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # else all of it is one chunk
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])
    hub.cut = 4000
    assert main(["pull", f"owner/ggufs:{name}"]) == 0
    ranges = [r for method, path, r in hub.asked if method == "GET" and path.endswith(name)]
    assert ranges == [None, "bytes=4000-"]
    assert resolve(f"owner/ggufs:{name}").root.read_bytes() == GGUFS[name]


@pytest.mark.parametrize(
    ("argv", "change", "words"),
    [
        (["owner/absent"], {}, ("no such model, or it is private", "HF_TOKEN")),
        (["owner/sharded", "--revision", "v9"], {}, ("no revision 'v9'",)),
        (
            ["owner/sharded"],
            {"gated": {"owner/sharded"}},
            ("gated", "accept its terms", "HF_TOKEN"),
        ),
        (["owner/sharded"], {"bad_token": True}, ("HF_TOKEN",)),
        (["owner/pickles"], {}, ("only other formats of weights",)),
        (["owner/sharded:a", "--file", "b"], {}, ("two files",)),
        (["smollm2", "--revision", "v1"], {}, ("--revision and --file are for Hugging Face",)),
    ],
)
def test_what_cannot_be_fetched_is_one_line_with_the_cure(
    hub: Hub, capsys: pytest.CaptureFixture[str], argv: list[str], change: dict[str, object],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    hub.repos["owner/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    for name, value in change.items():
        setattr(hub, name, value)
    line = error_of(argv, capsys)
    assert all(word in line for word in words), line
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "no JSON; a proxy or its login page"),
        (403, "the token in HF_TOKEN may not read it"),
        (404, "no such model, or it is private"),
        (429, "too many requests: wait some minutes"),
        (500, "the hub answers 500; try again later"),
    ],
)
def test_answers_that_are_no_model_are_reported_with_their_cure(
    hub: Hub, capsys: pytest.CaptureFixture[str], status: int, words: str
) -> None:
    hub.status = status
    assert words in error_of(["owner/sharded"], capsys)


def test_a_file_that_is_not_what_the_hub_announced_is_removed(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "owner/ggufs:toy-Q8_0.gguf"
    hub.spoilt = {"toy-Q8_0.gguf"}
    assert main(["pull", name]) == 1
    assert "came with SHA-256" in capsys.readouterr().err
    hub.spoilt = set()
    assert main(["pull", name]) == 0
    assert resolve(name).root.read_bytes() == GGUFS["toy-Q8_0.gguf"]


@pytest.mark.parametrize("kind", [httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_a_fetch_that_broke_off_says_that_it_can_go_on(kind: type[Exception]) -> None:
    assert "what has come is kept" in explain("owner/model", kind("timed out"))


def test_a_hub_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.models.hub._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever other tests import it with
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "broke off (timed out); run the same again" in error_of(["owner/sharded"], capsys)


def test_no_network_is_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = error_of(["owner/sharded"], capsys)
    assert "Hugging Face cannot be reached" in line
    assert "HF_ENDPOINT" in line


def test_a_full_disk_is_reported_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
    line = error_of(["owner/ggufs:Q8_0"], capsys)
    assert "9 kB are to be fetched" in line
    assert "2 kB free" in line
    assert hub.fetched() == []


def test_the_list_has_what_is_here(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", "owner/sharded"])
    assert main(["pull", "--list"]) == 0
    assert "owner/sharded  8 kB  (" in capsys.readouterr().out


def test_sizes_are_for_people() -> None:
    assert [size_text(n) for n in (12, 4321, 98_362_432, 4.1e9)] == [
        "12 B", "4 kB", "98.4 MB", "4.1 GB",
    ]  # fmt: skip
