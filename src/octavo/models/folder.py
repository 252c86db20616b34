"""The files of a model's folder that say what is in it: their names, and how they are read."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, brief, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weights_of_index(path: Path) -> dict[str, str]:
    """The tensor -> file map of a sharded checkpoint."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map' of tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not 0 < len(file) < 256:
            raise CheckpointError(
                f"{path}: {shown(name)} lies in {shown(file)}, which is no file name"
            )
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {brief(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
