"""Servers that tests share, and servers with settings of their own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tool_model
from serving import PYTHONPATH, Server, write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="session")
def engine_path() -> Iterator[None]:
    """The engine process finds the tests' executor."""
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = PYTHONPATH
    yield
    if old is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = old


@pytest.fixture(scope="session")
def server(folder: Path, engine_path: None) -> Iterator[Server]:
    with Server(folder, {}, max_num_seqs=64) as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory, engine_path: None) -> Iterator[Server]:
    """Its model writes tool calls, and writes what `tool_model.script` says."""
    folder = tool_model.write(tmp_path_factory.mktemp("models") / "hermes")
    with Server(folder, {}, max_model_len=8192, num_gpu_blocks_override=2049) as running:
        yield running


@pytest.fixture
def make_server(folder: Path, engine_path: None) -> Iterator[object]:
    """Servers with settings of their own, ended with the test."""
    with contextlib.ExitStack() as stack:

        def make(
            options: dict[str, object] | None = None,
            folder: Path | str = folder,
            **engine: object,
        ) -> Server:
            return stack.enter_context(Server(folder, options or {}, **engine))

        yield make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem for localhost, its key.pem, both.pem, and the key other.pem."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl"):
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
               "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=DNS:localhost"]  # fmt: skip
        for key, cert in (("key.pem", "cert.pem"), ("other.pem", "unused.pem")):
            subprocess.run([*new, "-keyout", folder / key, "-out", folder / cert],
                           check=True, capture_output=True)  # fmt: skip
        texts = [(folder / name).read_text() for name in ("cert.pem", "key.pem")]
        (folder / "both.pem").write_text("".join(texts))
    return folder
