"""What a checkpoint's files hold, whatever container they are in: tensors by name, and metadata.

A container is a file format for named tensors. Opening a file maps it, checks its header against
the bytes that are there, and allocates nothing for the tensors. What the stored bytes stand for is
the business of `quant`; which parameter a tensor is, that of `models`. Nothing here imports torch:
the web process reads a GGUF's metadata.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import CheckpointError, counted

_LFS = b"version https://git-lfs"

# Whose names the tensors and the configuration have.
Naming = Literal["huggingface", "gguf"]


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How the values of a tensor are stored: `block_bytes` bytes hold `block_values` values.

    dtype: torch's name for plain numbers; None for blocks, which `quant` decodes by their `name`,
    and for numbers that nothing here can use.
    """

    name: str
    block_values: int
    block_bytes: int
    dtype: str | None = None

    def num_bytes(self, shape: Iterable[int]) -> int:
        """What a tensor of `shape` takes; its values are a multiple of a block's."""
        return math.prod(shape) // self.block_values * self.block_bytes


def _nothing() -> None:
    """For a container that has nothing to give back."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an opened file.

    load: its bytes where they lie in the mapped file, in C order and without a copy: a writable
        buffer (torch takes no other) or a contiguous torch tensor. release: gives back the memory
        of those that were read, if the container can.
    """

    file: Path
    shape: tuple[int, ...]
    format: TensorFormat
    load: Callable[[], Any] = field(repr=False, compare=False)
    release: Callable[[], None] = field(default=_nothing, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        return self.format.num_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """One file of a container. metadata: what else it says of the model."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """A file format for named tensors.

    suffix: how its files' names end, with the dot. self_contained: a file is a whole model, with
    its configuration and tokenizer as metadata; else they lie beside it in a folder. open: maps a
    file and checks its header; raises CheckpointError, naming the file and what disagrees.
    """

    name: str
    suffix: str
    naming: Naming
    self_contained: bool
    open: Callable[[Path], OpenedFile]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's opened files. root: the folder, or the file of a self-contained model."""

    root: Path
    paths: tuple[Path, ...]
    container: Container
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any]


def file_size(path: Path, least: int) -> int:
    """The size of a file that must hold at least `least` bytes, in bytes.

    Raises CheckpointError if it cannot be read, is shorter, or is a Git LFS pointer.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            if handle.read(len(_LFS)) == _LFS:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the file it stands for; run 'git lfs pull'"
                )
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size < least:
        raise CheckpointError(
            f"{path} has {counted(size, 'byte')}, less than the {least} of an empty header"
        )
    return size


def one_line(name: str) -> str:
    """A name from a file, which may be anything, on one line and of a usual length."""
    plain = name if name.isprintable() else repr(name)
    return plain if len(plain) <= 160 else f"{plain[:156]} ..."


def name_list(names: Iterable[str], most: int = 8) -> str:
    """`names` in a message: the first few, and how many more there are."""
    listed = list(map(one_line, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
