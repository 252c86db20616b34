"""`octavo serve`'s flags become configurations; mistakes show before anything is loaded."""

import json
import socket
import subprocess
import sys

import pytest

from octavo.cli.main import command_parser, main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.options import ServerConfig


@pytest.fixture
def served(monkeypatch):
    """What would be served: (engine configuration, server configuration)."""
    found = []

    def record(listener, config, options):
        found.append((config, options))
        return 7

    monkeypatch.setattr("octavo.server.run.serve", record)

    def run(*flags):
        assert main(["serve", *flags]) == 7
        return found.pop()

    return run


def test_defaults(served, monkeypatch):
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    config, options = served("some/model", "--port", "0")
    assert config.with_(load_progress=True) == EngineConfig(model="some/model")
    assert options == ServerConfig(port=0)
    assert options.host == "127.0.0.1"


def test_flags_have_the_fields_names_and_vllm_s(served):
    config, options = served(
        "m", "--port=0", "--max-model-len=64", "--scheduling-policy=priority", "--max-num-seqs=3",
        "--no-enable-prefix-caching", "--served-model-name=a,b", "--shutdown-timeout=2.5",
        "--enable-log-requests", "--max-body-mb=8", "--generation-config=octavo",
    )  # fmt: skip
    assert (config.max_model_len, config.scheduler, config.max_num_seqs) == (64, "priority", 3)
    assert not config.enable_prefix_caching
    assert config.generation_config == "octavo"
    assert (options.served_model_name, options.drain_timeout) == (("a", "b"), 2.5)
    assert options.log_requests
    assert options.max_body_mb == 8


def test_srv_11_the_key_may_come_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-outside")
    assert served("m", "--port=0")[1].api_key == ("from-outside",)
    assert served("m", "--port=0", "--api-key=own")[1].api_key == ("own",)


def test_srv_10_a_taken_port_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "m", "--port", str(port)]) == 1
    assert capsys.readouterr().err.startswith(f"octavo: cannot listen on 127.0.0.1 port {port}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=70000"], "port must be between 0 and 65535, not 70000"),
        (["--root-path=llm"], "root_path must start with '/'"),
        (["--max-body-mb=0"], "max_body_mb must be above 0"),
        (["--drain-timeout=-1"], "drain_timeout"),
        (["--stall-timeout=nan"], "stall_timeout"),
        (["--api-key="], "api_key must not be empty"),
    ],
)
def test_wrong_values_are_reported(flags, words, capsys):
    assert main(["serve", "m", "--port=0", *flags]) == 1
    assert words in capsys.readouterr().err


def test_every_field_has_a_flag():
    flags = command_parser("serve").flags()
    for name in ServerConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in flags


def test_a_wrong_type_is_refused_in_code_too():
    for bad in ({"port": "8000"}, {"host": None}, {"restart_engine": 1}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ServerConfig(**bad)


def test_a_mistake_does_not_wait_for_the_web_framework():
    code = (
        "import sys; from octavo.cli.main import main; main(['serve', 'm', '--port=70000']);"
        "print(sorted({'starlette', 'uvicorn', 'torch', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_flags_of_several_words_leave_the_model_alone(served, monkeypatch, capsys):
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    for flags, keys in (
        (["m", "--api-key", "a", "b"], ("a", "b")), (["--api-key", "a", "--port=0", "m"], ("a",)),
        (["--api-key", "a", "m"], ("a",)), (["--api-key", "a", "b", "m"], ("a", "b")),
        (["m", "--api-key", "a", "--api-key", "b"], ("a", "b")),
    ):  # fmt: skip
        config, options = served("--port=0", *flags)
        assert (config.model, options.api_key) == ("m", keys)
    config, options = served("--port=0", "--api-key", "a")
    assert (config.model, options.api_key) == ("smollm2", ("a",))
    assert main(["serve", "--api-key", "a", "b", "--served-model-name", "c", "d"]) == 1
    assert "give MODEL first" in capsys.readouterr().err


def test_in_a_json_log_a_failed_start_is_an_object_too(tmp_path):
    flags = ["serve", "m", "--log-format=json", "--ssl-certfile", str(tmp_path / "none")]
    code = f"import sys; from octavo.cli.main import main; sys.exit(main({flags}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "error"
    assert "ssl_certfile" in json.loads(line)["message"]


def test_a_unix_socket_and_tls_are_checked_before_anything_is_loaded(served, tmp_path, capsys):
    path = tmp_path / "socket"
    assert served("m", "--uds", str(path))[1].uds == str(path)
    assert not path.exists()
    assert main(["serve", "m", "--port=0", "--ssl-certfile", str(path)]) == 1
    assert "ssl_certfile" in capsys.readouterr().err
