"""Names of containers, and the opening of a model's files as one table of tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import Checkpoint, Container, StoredTensor, name_list
from octavo.checkpoint.gguf import GGUF
from octavo.checkpoint.safetensors import SAFETENSORS
from octavo.errors import CheckpointError, ConfigError

_BUILT_IN = (SAFETENSORS, GGUF)
# The one table that grows at run time: registering is what `register_container` is for.
_registered: dict[str, Container] = {}


def register_container(container: Container) -> None:
    """Make files that end in `container.suffix` readable.

    Raises ConfigError for a suffix of a built-in container or without a dot. A suffix given again
    replaces the container.
    """
    taken = [known.suffix for known in _BUILT_IN]
    if container.suffix in taken or not container.suffix.startswith("."):
        raise ConfigError(
            f"container {container.name!r}: the suffix {container.suffix!r} is taken or has no "
            f"dot; choose another than {', '.join(map(repr, taken))}"
        )
    _registered[container.suffix] = container


def containers() -> tuple[Container, ...]:
    """Every known container; where a folder holds files of several, the first is read."""
    return (*_BUILT_IN, *_registered.values())


def container_of(path: Path) -> Container | None:
    """The container of a file of this name."""
    suffix = path.suffix.lower()
    return next((known for known in containers() if known.suffix == suffix), None)


def open_checkpoint(
    root: Path, paths: tuple[Path, ...], index: Mapping[str, str] | None = None
) -> Checkpoint:
    """Map the files of a model, all of one container, and check their headers.

    index: the file name of each tensor, where several files share them.
    Raises CheckpointError, naming the file and the sizes or names that disagree.
    """
    container = container_of(paths[0])
    if container is None:
        known = ", ".join(known.suffix for known in containers())
        raise CheckpointError(f"{paths[0]} has none of the known endings: {known}")
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, Any] = {}
    for path in paths:
        found = container.open(path)
        if index is not None:
            _check_shard(path, found.tensors, index)
        if twice := sorted(tensors.keys() & found.tensors.keys()):
            raise CheckpointError(f"{path} holds tensors of another file: {name_list(twice)}")
        tensors.update(found.tensors)
        if container.self_contained and len(paths) > 1:
            _check_part(path, paths, found.metadata)
        # The first part has the model's metadata, the others their own number.
        metadata = {**found.metadata, **metadata}
    _check_total(root, metadata, tensors)
    return Checkpoint(root, paths, container, tensors, metadata)


def _check_part(path: Path, paths: tuple[Path, ...], metadata: Mapping[str, Any]) -> None:
    """A part that says which it is (`gguf-split` counts from 0) must be where its name says."""
    for key, right in (("split.no", paths.index(path)), ("split.count", len(paths))):
        if metadata.get(key, right) != right:
            raise CheckpointError(
                f"{path}: {key} is {metadata[key]!r}, by its name it is {right}; rename the parts"
            )


def _check_total(root: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    total = metadata.get("split.tensors.count", len(tensors))
    if metadata.get("split.count") and total != len(tensors):
        raise CheckpointError(
            f"{root}: split.tensors.count is {total!r}, but its parts hold {len(tensors)} tensors"
        )


def _check_shard(path: Path, found: Iterable[str], index: Mapping[str, str]) -> None:
    """A shard must hold exactly the tensors that the index says."""
    listed = {name for name, file in index.items() if file == path.name}
    stored = set(found)
    if missing := sorted(listed - stored):
        raise CheckpointError(f"{path} lacks tensors that the index lists: {name_list(missing)}")
    if extra := sorted(stored - listed):
        raise CheckpointError(
            f"{path} holds tensors that the index does not place there: {name_list(extra)}"
        )
