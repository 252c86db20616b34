"""Servers that tests share, and servers with settings of their own."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def make_server(folder: Path, engine_path: None) -> Iterator[object]:
    """Servers with settings of their own, ended with the test."""
    with contextlib.ExitStack() as stack:

        def make(options: dict[str, object] | None = None, **engine: object) -> Server:
            return stack.enter_context(Server(folder, options or {}, **engine))

        yield make
