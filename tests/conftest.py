"""Shared fixtures: toy models are written and loaded once a session.

Toy products gain nothing from a second thread, and OpenMP threads that spin for each other make
a busy machine crawl; so tests run on one thread, and those that are about threads ask for more.
"""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import kit

    return kit.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command run in this process sets up the log; the next test must not inherit that."""
    root = logging.getLogger("octavo")
    before = (root.handlers[:], root.propagate, root.level)
    yield
    root.handlers[:], root.propagate = before[0], before[1]
    root.setLevel(before[2])
