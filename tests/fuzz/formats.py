"""Writers of GGUF, JSON, safetensors and SentencePiece files that can also write wrong ones.

Every edit is a JSON list, so that a found case is kept as the few edits that make it.
"""

import copy
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Edit = list[Any]

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
          12: "d"}  # fmt: skip
STRING, ARRAY = 8, 9


# --- bytes ---------------------------------------------------------------------------------


def edit_bytes(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Flips, cuts and insertions; places are taken modulo the size."""
    out = bytearray(data)
    for name, at, *rest in edits:
        at = at % (len(out) + 1)
        if name == "cut":
            del out[at:]
        elif name == "insert":
            out[at:at] = bytes.fromhex(rest[0])
        elif name == "remove":
            del out[at : at + rest[0]]
        elif name == "write":
            new = bytes.fromhex(rest[0])
            out[at : at + len(new)] = new
        elif name == "flip" and at < len(out):
            out[at] ^= 1 << rest[0]
    return bytes(out)


# --- JSON ----------------------------------------------------------------------------------


def json_bytes(value: Any) -> bytes:
    """JSON, with {"$nest": depth}, {"$digits": n}, {"$bytes": hex} and {"$pairs": [[k, v], ...]}
    written as nesting, a number of n digits, raw bytes in a string, and an object whose keys may
    repeat."""
    if isinstance(value, Mapping):
        if "$nest" in value:
            return b"[" * value["$nest"] + b"]" * value["$nest"]
        if "$objects" in value:
            return b'{"a":' * value["$objects"] + b"1" + b"}" * value["$objects"]
        if "$digits" in value:
            return b"9" * value["$digits"]
        if "$bytes" in value:
            return b'"' + bytes.fromhex(value["$bytes"]) + b'"'
        pairs = value["$pairs"] if "$pairs" in value else value.items()
        return b"{" + b",".join(json_bytes(k) + b":" + json_bytes(v) for k, v in pairs) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(json_bytes, value)) + b"]"
    return json.dumps(value).encode()


def edit_json(value: Any, edits: Sequence[Edit]) -> Any:
    """Set, remove, double and swap values by their path; a path that is not there changes
    nothing."""
    value = copy.deepcopy(value)
    # Each edit's values are its own: one that is put into itself could not be written.
    for edit in edits:
        name, path, *rest = copy.deepcopy(edit)
        if not path and name == "set":
            value = rest[0]
            continue
        try:
            parent = _at(value, path[:-1])
            if name == "set":
                parent[path[-1]] = rest[0]
            elif name == "remove":
                del parent[path[-1]]
            elif name == "rename":
                parent[rest[0]] = parent.pop(path[-1])
            elif name == "double":
                pairs = [*parent.items(), (path[-1], rest[0])]
                parent.clear()
                parent["$pairs"] = [list(pair) for pair in pairs]
            elif name == "swap":
                other = _at(value, rest[0][:-1])
                # Copies, each its own: one may hold the other.
                mine = copy.deepcopy(parent[path[-1]])
                theirs = copy.deepcopy(other[rest[0][-1]])
                parent[path[-1]], other[rest[0][-1]] = theirs, mine
        except (LookupError, TypeError, AttributeError):
            continue
    return value


def _at(value: Any, path: Sequence[Any]) -> Any:
    for step in path:
        value = value[step]
    return value


def json_paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value; of a long list or object only the first few."""
    found = [at] if at else []
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items if len(items) < 40 else items[:3] + items[-3:]:
        found += json_paths(item, (*at, key))
    return found


# --- GGUF ----------------------------------------------------------------------------------


def text_bytes(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(kind: int, value: Any) -> bytes:
    """A metadata value; {"raw": hex} is written as it is, {"nest": depth} as nested arrays."""
    if isinstance(value, Mapping):
        if "nest" in value:
            head = struct.pack("<IQ", ARRAY, 1) * value["nest"]
            return head + struct.pack("<IQB", 0, 1, 7)
        return bytes.fromhex(value["raw"])
    if kind == STRING:
        return text_bytes(value)
    if kind == ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(
            value_bytes(item, each) for each in values
        )
    return struct.pack(f"<{_CODES[kind]}", value)


def gguf_bytes(model: Mapping[str, Any]) -> bytes:
    """model: pairs [key, type, value], tensors [name, dims, type, offset, data], counts."""
    pairs, tensors = model["pairs"], model["tensors"]
    counts = model["counts"]
    out = [b"GGUF", struct.pack("<I", model["version"])]
    out.append(struct.pack("<QQ", counts.get("tensors", len(tensors)),
                           counts.get("pairs", len(pairs))))  # fmt: skip
    for key, kind, value in pairs:
        out += [text_bytes(key), struct.pack("<I", kind), value_bytes(kind, value)]
    for name, dims, kind, offset, _ in tensors:
        out += [text_bytes(name), struct.pack("<I", len(dims)),
                struct.pack(f"<{len(dims)}Q", *dims),
                struct.pack("<IQ", kind, offset)]  # fmt: skip
    head = b"".join(out)
    data = b"".join(d + bytes(-len(d) % 32)
                    for *_, d in tensors)  # fmt: skip
    return head + bytes(-len(head) % 32) + data


def edit_gguf(model: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    out = {
        "version": model["version"],
        "counts": dict(model["counts"]),
        "pairs": [list(pair) for pair in model["pairs"]],
        "tensors": [list(tensor) for tensor in model["tensors"]],
    }
    for name, *rest in edits:
        _GGUF_EDITS[name](out, *rest)
    return out


def _index(model: Mapping[str, Any], key: str) -> int | None:
    return next((i for i, pair in enumerate(model["pairs"]) if pair[0] == key), None)


def _set(model: dict[str, Any], key: str, kind: int, value: Any) -> None:
    at = _index(model, key)
    if at is None:
        model["pairs"].append([key, kind, value])
    else:
        model["pairs"][at] = [key, kind, value]


def _drop(model: dict[str, Any], key: str) -> None:
    if (at := _index(model, key)) is not None:
        del model["pairs"][at]


def _rename(model: dict[str, Any], key: str, new: str) -> None:
    if (at := _index(model, key)) is not None:
        model["pairs"][at][0] = new


def _swap(model: dict[str, Any], key: str, other: str) -> None:
    a, b = _index(model, key), _index(model, other)
    if a is not None and b is not None:
        pairs = model["pairs"]
        pairs[a][1:], pairs[b][1:] = pairs[b][1:], pairs[a][1:]


def _double(model: dict[str, Any], key: str, kind: int, value: Any) -> None:
    model["pairs"].append([key, kind, value])


def _count(model: dict[str, Any], which: str, count: int) -> None:
    model["counts"][which] = count


def _version(model: dict[str, Any], version: int) -> None:
    model["version"] = version


def _tensor(model: dict[str, Any], number: int, part: str, value: Any) -> None:
    at = {"name": 0, "dims": 1, "type": 2, "offset": 3}[part]
    if model["tensors"]:
        model["tensors"][number % len(model["tensors"])][at] = value


def _tensor_drop(model: dict[str, Any], number: int) -> None:
    if model["tensors"]:
        del model["tensors"][number % len(model["tensors"])]


def _tensor_double(model: dict[str, Any], number: int) -> None:
    if model["tensors"]:
        model["tensors"].append(list(model["tensors"][number % len(model["tensors"])]))


_GGUF_EDITS: Mapping[str, Callable[..., None]] = {
    "set": _set, "drop": _drop, "rename": _rename, "swap": _swap, "double": _double,
    "count": _count, "version": _version, "tensor": _tensor, "tensor-drop": _tensor_drop,
    "tensor-double": _tensor_double,
}  # fmt: skip


# --- SentencePiece ---------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, wire: int, value: int | bytes) -> bytes:
    """A protobuf field; `value` of the fixed wire types (1, 5) is their bytes."""
    tag = varint(number << 3 | wire)
    if isinstance(value, int):
        return tag + varint(value)
    return tag + (varint(len(value)) if wire == 2 else b"") + value


def spm_bytes(model: Mapping[str, list[bytes]], edits: Sequence[Edit] = ()) -> bytes:
    """model: serialized pieces, trainer and normalizer fields. An edit [part, number, field,
    wire, value] appends a field, which overrides; value is a number or hex."""
    pieces, trainer = list(model["pieces"]), b"".join(model["trainer"])
    normalizer = b"".join(model["normalizer"])
    top = b""
    for part, number, which, wire, value in edits:
        extra = field(which, wire, bytes.fromhex(value) if isinstance(value, str) else value)
        if part == "piece" and pieces:
            pieces[number % len(pieces)] += extra
        elif part == "trainer":
            trainer += extra
        elif part == "normalizer":
            normalizer += extra
        elif part == "pieces":
            pieces = pieces[: number % (len(pieces) + 1)]
        else:
            top += extra
    body = b"".join(field(1, 2, piece) for piece in pieces)
    return body + field(2, 2, trainer) + field(3, 2, normalizer) + top
