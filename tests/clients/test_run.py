"""The clients whose environments are here already; `make clients` makes them and runs all."""

import os
import subprocess
import tempfile

import pytest
from tests.clients.run import CLIENTS, KEY, embedded

from octavo.log import cache_dir


@pytest.fixture(scope="module")
def port():
    with embedded() as found:
        yield found


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["openai_npm", "langchain_openai", "litellm"])
def test_a_client_finds_no_fault(name, request):
    if not (cache_dir() / "peers" / name).exists():
        pytest.skip(f"no environment for {name}; `make clients` makes it")
    command = CLIENTS[name](request.getfixturevalue("port"))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=100,
            env={**os.environ, "OPENAI_API_KEY": KEY, "PYTHONPATH": ""},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
