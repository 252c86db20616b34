"""The files of a model's folder that say what is in it: their names, and the index."""

from pathlib import Path

from octavo.checkpoint.json_file import read_json
from octavo.errors import CheckpointError, shown

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
