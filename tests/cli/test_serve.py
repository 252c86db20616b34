"""`octavo serve`: what the flags become, without starting a server."""

import socket

import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig, ServerConfig

Started = list[tuple[EngineConfig, ServerConfig]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    calls: Started = []

    def serve(listener: object, config: EngineConfig, options: ServerConfig) -> int:
        calls.append((config, options))
        return 0

    monkeypatch.setattr("octavo.server.run.serve", serve)
    monkeypatch.setattr("octavo.cli.serve.bind", lambda *args: socket.socket())
    monkeypatch.setattr("octavo.cli.serve.configure", lambda: None)
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    return calls


def test_flags_become_both_configurations(started: Started) -> None:
    assert main(["serve", "m.gguf", "--max-num-seqs", "8", "--seed", "3", "--port", "0"]) == 0
    config, options = started[0]
    assert (config.model, config.max_num_seqs, config.seed) == ("m.gguf", 8, 3)
    assert (options.host, options.port) == ("127.0.0.1", 0)


def test_vllm_s_names_are_taken(started: Started) -> None:
    main(["serve", "--scheduling-policy", "priority", "--shutdown-timeout", "5"])
    config, options = started[0]
    assert (config.scheduler, options.drain_timeout) == ("priority", 5.0)


def test_the_key_may_come_from_the_environment(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    main(["serve"])
    main(["serve", "--api-key", "given"])
    assert [options.api_key for _, options in started] == ["secret", "given"]


@pytest.mark.parametrize("argv", [["--port", "70000"], ["--max-body-mb", "0"]])
def test_a_wrong_value_is_one_line(
    started: Started, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 1
    error = capsys.readouterr().err
    assert argv[0][2:].replace("-", "_") in error
    assert error.count("\n") == 1
    assert started == []
