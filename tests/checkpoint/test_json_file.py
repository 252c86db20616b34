"""A JSON file of a checkpoint is an object, or an error that names the file."""

from pathlib import Path

import pytest

from octavo.checkpoint.json_file import read_json
from octavo.errors import CheckpointError


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": "\u00e9"}')
    assert read_json(file) == {"a": "\u00e9"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (None, "No such file"),
    ],
)
def test_anything_else_is_an_error_that_names_the_file(
    content: bytes | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json.*{says}"):
        read_json(file)
