"""What is printed at the start, and that the command in it works as it is printed."""

import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from octavo.core.plan import RunnerLimits
from octavo.server.banner import banner, curl_command
from octavo.server.options import ServerConfig


def test_the_banner_says_what_an_operator_wants_to_know(server):
    text = "\n".join(banner(server.service, server.url))
    assert f"curl {server.url}/v1/completions" in text
    assert "sampling defaults from the model: none" in text
    assert "512 tokens a request, 64 at once" in text
    assert "without API key" in text


@pytest.mark.skipif(not shutil.which("curl"), reason="runs curl")
@pytest.mark.parametrize("how", ["key", "tls", "unix"])
def test_the_printed_command_works(make_server, certificate, tmp_path, how):
    options = {
        "key": {"api_key": ("the-first", "second"), "host": "0.0.0.0"},
        "tls": {"ssl_certfile": str(certificate / "both.pem"), "api_key": ("the-first",)},
        "unix": {"uds": str(tmp_path / "a socket")},
    }[how]
    server = make_server(options)
    line = banner(server.service, server.url)[-1]
    done = subprocess.run(
        ["sh", "-c", line.replace("curl ", "curl --silent --show-error ", 1)],
        capture_output=True, text=True, env={**os.environ, "OCTAVO_API_KEY": "the-first"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["object"] == "text_completion"


def test_addresses_of_every_interface_are_those_of_this_machine():
    for address, host in (("http://0.0.0.0:80", "127.0.0.1"), ("http://[::]:80", "[::1]")):
        assert f"http://{host}:80/v1" in curl_command(ServerConfig(), address)


def test_the_memory_is_said_where_only_the_size_of_the_kv_was_given(server):
    limits = RunnerLimits(1025, 16, 1 << 20, 64, 256)
    service = SimpleNamespace(
        limits=limits, config=server.service.config, options=ServerConfig(), defaults={},
        names=("m",),
    )  # fmt: skip
    assert "memory: KV 1.00 GiB, as given" in "\n".join(banner(service, "http://h:1"))
    service.config = service.config.with_(data_parallel_size=2)
    text = "\n".join(banner(service, "http://h:1"))
    assert "memory of engine 0: KV 1.00 GiB" in text  # another one may have found more
    assert "limits of each of 2 engines:" in text
