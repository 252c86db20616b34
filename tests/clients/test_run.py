"""The clients whose environments are here already; `make clients` makes them and runs all."""

import os
import subprocess
import tempfile

import pytest
from tests.clients.run import AGENTS, CLIENTS, KEY, anthropic, embedded, scripted

from octavo.log import cache_dir


@pytest.fixture(scope="module")
def port():
    with embedded() as found:
        yield found


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["openai_npm", "langchain_openai", "litellm"])
def test_a_client_finds_no_fault(name, request):
    check(name, lambda: CLIENTS[name](request.getfixturevalue("port")))


@pytest.fixture(scope="module")
def scripted_port():
    with scripted() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anthropic", *AGENTS])
def test_a_client_finds_no_fault_in_what_is_scripted(name, request):
    check(name, lambda: CLIENTS[name](request.getfixturevalue("scripted_port")))


@pytest.mark.slow
@pytest.mark.model
def test_anthropics_client_finds_no_fault_in_a_model():
    with embedded("qwen2.5-coder-0.5b", 4096) as port:
        check("anthropic", lambda: anthropic(port, "qwen2.5-coder-0.5b"))


def check(name, make):
    if not (cache_dir() / "peers" / name).exists():
        pytest.skip(f"no environment for {name}; `make clients` makes it")
    command = make()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OPENAI_API_KEY": KEY, "PYTHONPATH": ""},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
