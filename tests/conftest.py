"""Shared fixtures: toy models are written and loaded once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import kit

    return kit.tiny(tmp_path_factory.mktemp("tiny"))
