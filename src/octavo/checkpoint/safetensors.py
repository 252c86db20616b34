"""The safetensors container, read by its own library.

The library checks the header: types, shapes, and tensors that follow one another
to the file's end without hole or overlap. Errors here add what its own lack: the file, its size,
the tensor and the sizes that disagree. A name that occurs twice, which it accepts, is refused.
"""

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import (
    Container,
    OpenedFile,
    StoredTensor,
    TensorFormat,
    file_size,
    name_list,
)
from octavo.checkpoint.mapped import MappedFile
from octavo.errors import CheckpointError, brief, shown

# The limit of the library itself.
_MAX_HEADER = 100_000_000

_READABLE = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
}
# Types that hold no weights that could be used yet: values in so many bytes.
_OTHER = {
    "F8_E5M2": (1, 1), "F8_E8M0": (1, 1), "F8_E4M3FNUZ": (1, 1),
    "F8_E5M2FNUZ": (1, 1), "F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3),
    "U16": (1, 2), "U32": (1, 4), "U64": (1, 8), "C64": (1, 8),
}  # fmt: skip
FORMATS = {
    **{name: TensorFormat(name, 1, size, dtype) for name, (size, dtype) in _READABLE.items()},
    **{name: TensorFormat(name, values, size) for name, (values, size) in _OTHER.items()},
}


def open_file(path: Path) -> OpenedFile:
    """See Container.open."""
    size = file_size(path, 8)
    header, start = _read_header(path, size)
    from safetensors import SafetensorError, safe_open  # it loads torch

    tensors: dict[str, StoredTensor] = {}
    try:
        file: Any = safe_open(path, framework="pt")
        mapped = MappedFile(path)
        for name in file.keys():  # noqa: SIM118 (no iterator)
            described = file.get_slice(name)
            shape, kind = tuple(described.get_shape()), described.get_dtype()
            begin, end = (start + at for at in header[name]["data_offsets"])
            tensors[name] = StoredTensor(
                path, shape, _format(path, name, kind), partial(mapped.view, begin, end),
                partial(mapped.release, begin, end),
            )  # fmt: skip
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is cut off or damaged ({size} bytes in all): {brief(error)}"
            f"{_explanation(header, start, size)}"
        ) from error
    return OpenedFile(tensors, {})


def _read_header(path: Path, size: int) -> tuple[Any, int]:
    """The header, and where the data start; the sizes and names that the library does not report
    are checked."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path} is cut off or damaged: its header claims {length} bytes, the file has "
                f"{size} in all (a header may have {_MAX_HEADER})"
            )
        text = handle.read(length)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: its header names twice: {name_list(twice)}")
        return value

    try:
        return json.loads(text, object_pairs_hook=unique), 8 + length
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON: {brief(error)}") from error


def _explanation(header: Any, start: int, size: int) -> str:
    """The tensor and the sizes that the library refuses without naming them."""
    if not isinstance(header, dict):
        return ""
    described = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            needed = FORMATS[entry["dtype"]].num_bytes(entry["shape"])
            begin, end = entry["data_offsets"]
            taken, described = end - begin, max(described, start + end)
        except (LookupError, TypeError, ValueError):
            return f"; tensor {name!r} is described as {shown(entry)}"
        if taken != needed:
            return (
                f"; tensor {name!r} takes {taken} bytes, but its shape {shown(entry['shape'])} in "
                f"{entry['dtype']} needs {needed}"
            )
    return f"; its header describes {described} bytes" if described != size else ""


def _format(path: Path, name: str, kind: str) -> TensorFormat:
    if kind not in FORMATS:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown type {shown(kind)}")
    return FORMATS[kind]


SAFETENSORS = Container("safetensors", ".safetensors", "huggingface", False, open_file)
