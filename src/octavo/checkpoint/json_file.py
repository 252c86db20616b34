"""JSON files of a checkpoint: its config, its index, its tokenizer."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, brief


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {brief(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
