"""Cases: which seed, which edits; how they are thought up, kept, and written to disk.

A case of a kind and a number is always the same. What it does is in its edits, so that a kept
case (`cases/*.json`) does not change when the mutators do.
"""

import json
import random
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import seeds
from tests.fuzz.formats import (
    ARRAY,
    STRING,
    Edit,
    edit_bytes,
    edit_gguf,
    edit_json,
    gguf_bytes,
    json_bytes,
    json_paths,
    spm_bytes,
)
from tests.fuzz.target import Outcome, judge

KINDS = ("gguf", "safetensors", "tokenizer", "config")
KEPT = Path(__file__).parent / "cases"
_NAN, _INF = float("nan"), float("inf")
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 31, 255, 257, 4097, 2**16, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 10**40, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-300,
    1e300, -1.5, 2e9, _NAN, _INF, -_INF,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "0", "x", "\ud800", "\u0000", "a" * 3000, "{{ x", "{% for", "../x",
    "a\nb", [], [0], [None], [[]], [1, "a"], {}, {"a": 1}, {"content": 1}, {"$nest": 100},
    {"$nest": 100_000}, {"$objects": 900}, {"$digits": 5000}, {"$bytes": "fffe"}, [0] * 2000,
)  # fmt: skip
# GGUF's type numbers of plain numbers, and the values that they can have.
_TYPES: Mapping[int, tuple[Any, ...]] = {
    0: (0, 1, 7, 255), 1: (-128, -1, 0, 127), 2: (0, 65535), 3: (-32768, -1),
    4: (0, 1, 2, 3, 5, 31, 33, 4097, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1),
    5: (-(2**31), -1, 0, 1),
    6: (0.0, -1.0, 0.5, 1e-40, 3e38, _NAN, _INF, -_INF), 7: (False, True),
    10: (0, 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1), 11: (-(2**63), -1, 0, 2**62),
    12: (0.0, 1e308, -1e308, _NAN, _INF),
}  # fmt: skip
_COUNTS = (0, 1, 2, 3, 255, 2**16, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Case:
    """edits: of the structure; raw: of the bytes after that. file: the one that is edited."""

    kind: str
    seed: str
    file: str
    edits: list[Edit]
    raw: list[Edit]

    def text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(**json.loads(text))


class Bench:
    """The seeds on disk; a case replaces one file for as long as it is looked at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gguf = seeds.gguf_seeds()
        self.spm = seeds.spm_model()
        self.folders = {name: seeds.folder(root / name, name) for name in seeds.FAMILIES}
        self.folders["sharded"] = seeds.folder(root / "sharded", "llama", sharded=True)
        self.folders["spm"] = seeds.spm_folder(root / "spm")
        (root / "gguf").mkdir()
        self._original: dict[Path, bytes] = {}

    def original(self, case: Case) -> bytes:
        path = self.folders[case.seed] / case.file
        if path not in self._original:
            self._original[path] = path.read_bytes()
        return self._original[path]

    def data(self, case: Case) -> bytes:
        """The bytes of the edited file."""
        if case.file == "model.gguf":
            try:
                data = gguf_bytes(edit_gguf(self.gguf[case.seed], case.edits))
            except (struct.error, TypeError, ValueError):  # edits that cannot be written
                data = gguf_bytes(self.gguf[case.seed])
        elif case.file == "tokenizer.model":
            data = spm_bytes(self.spm, case.edits)
        elif case.file.endswith(".json"):
            data = json_bytes(edit_json(json.loads(self.original(case)), case.edits))
        else:
            data = self._safetensors(case)
        return edit_bytes(data, case.raw)

    def _safetensors(self, case: Case) -> bytes:
        data = self.original(case)
        length = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8 : 8 + length])
        lengths = [edit[1] for edit in case.edits if edit[0] == "length"]
        text = json_bytes(edit_json(header, [e for e in case.edits if e[0] != "length"]))
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", lengths[-1] if lengths else len(text)) + text + data[8 + length :]

    @contextmanager
    def on_disk(self, case: Case) -> Iterator[tuple[Path, int]]:
        """What is to be opened, and the size of its files."""
        data = self.data(case)
        if case.file == "model.gguf":
            path = self.root / "gguf" / "model.gguf"
            path.write_bytes(data)
            yield path, len(data)
            return
        folder = self.folders[case.seed]
        before = self.original(case)
        (folder / case.file).write_bytes(data)
        try:
            yield folder, sum(f.stat().st_size for f in folder.iterdir())
        finally:
            (folder / case.file).write_bytes(before)

    def judge(self, case: Case) -> Outcome:
        with self.on_disk(case) as (path, size):
            return judge(path, size, tokenizer_only=case.kind == "tokenizer")

    def close(self) -> None:
        shutil.rmtree(self.root)


def kept() -> dict[str, Case]:
    """Cases that were findings once, by their file's name."""
    return {path.stem: Case.parse(path.read_text()) for path in sorted(KEPT.glob("*.json"))}


# --- thinking up -----------------------------------------------------------------------------


def case(bench: Bench, kind: str, number: int) -> Case:
    """The case of a number: most edit the structure, some the bytes, some both."""
    rng = random.Random(f"{kind} {number}")
    made = _MAKERS[kind](bench, rng)
    if rng.random() < 0.75:
        return made
    size = len(bench.data(Case(kind, made.seed, made.file, [], [])))
    edits = made.edits if rng.random() < 0.3 else []
    raw = [_byte_edit(rng, size) for _ in range(rng.choice((1, 1, 2, 8)))]
    return Case(kind, made.seed, made.file, edits, raw)


def _byte_edit(rng: random.Random, size: int) -> Edit:
    # Headers are at the front, so most edits are there.
    at = rng.randrange(size) if rng.random() < 0.4 else rng.randrange(min(size, 2000))
    name = rng.choice(("flip", "flip", "flip", "cut", "insert", "remove", "write"))
    if name == "flip":
        return [name, at, rng.randrange(8)]
    if name == "remove":
        return [name, at, rng.choice((1, 4, 8, 100))]
    if name == "cut":
        return [name, at]
    return [name, at, rng.choice(("00", "ff", "ffffffff", "ffffffffffffffff", "7f", "c328",
                                  "5b" * 50, "0000000000000080",
                                  rng.randbytes(8).hex()))]  # fmt: skip


def _value(rng: random.Random, old: Any) -> Any:
    """Another value: of another type, at an edge, or near the old one."""
    choice = rng.random()
    if choice < 0.3:
        return rng.choice(NUMBERS)
    if choice < 0.65:
        return rng.choice(OTHERS)
    if isinstance(old, bool) or old is None:
        return rng.choice((True, False, None, 1))
    if isinstance(old, (int, float)):
        return rng.choice((old + 1, old - 1, old * 2, -old, old // 2, float(old), str(old)))
    if isinstance(old, str):
        return rng.choice((old + "x", old[:-1], old.upper(), [old], old * 50))
    if isinstance(old, list):
        return rng.choice((old * 2, old[:-1], old[:1], [old], dict.fromkeys(map(str, old[:9]), 0)))
    return rng.choice((list(old), [old], {**old, "more": 1}, dict(list(old.items())[:-1])))


def _json_edit(rng: random.Random, value: Any) -> Edit:
    paths = json_paths(value)
    top = [path for path in paths if len(path) == 1]
    path = list(rng.choice(top if rng.random() < 0.3 else paths))
    name = rng.choice(("set",) * 7 + ("remove", "rename", "double", "swap"))
    old = value
    for step in path:
        old = old[step]
    if name in ("set", "double"):
        return [name, path, _value(rng, old)]
    if name == "rename":
        return [
            name,
            path,
            rng.choice((f"{path[-1]}x", "rope_scaling", "layer_types", "__metadata__")),
        ]
    if name == "swap":
        return [name, path, list(rng.choice(paths))]
    return [name, path]


def _json_edits(rng: random.Random, value: Any) -> list[Edit]:
    if rng.random() < 0.02:
        return [["set", [], rng.choice(OTHERS + NUMBERS)]]
    return [_json_edit(rng, value) for _ in range(rng.choice((1, 1, 1, 2, 4)))]


def _config(bench: Bench, rng: random.Random) -> Case:
    if rng.random() < 0.15:
        file, seed = "model.safetensors.index.json", "sharded"
    else:
        file = "generation_config.json" if rng.random() < 0.15 else "config.json"
        seed = rng.choice(seeds.FAMILIES)
    made = Case("config", seed, file, [], [])
    return Case("config", seed, file, _json_edits(rng, json.loads(bench.original(made))), [])


def _safetensors(bench: Bench, rng: random.Random) -> Case:
    seed, file = rng.choice((*seeds.FAMILIES, "sharded")), "model.safetensors"
    if seed == "sharded":
        file = "model-00001-of-00002.safetensors"
    made = Case("safetensors", seed, file, [], [])
    data = bench.original(made)
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.1:
        near = (length - 1, length + 1, length * 2, len(data), len(data) - 8, 100_000_001)
        return Case("safetensors", seed, file, [["length", rng.choice((*_COUNTS, *near))]], [])
    return Case("safetensors", seed, file, _json_edits(rng, header), [])


def _tokenizer(bench: Bench, rng: random.Random) -> Case:
    choice = rng.random()
    if choice < 0.25:
        return Case("tokenizer", *_gguf_edited(bench, rng, "tokenizer."), [])
    if choice < 0.45:
        edits = [_spm_edit(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
        return Case("tokenizer", "spm", "tokenizer.model", edits, [])
    seed = "llama"
    file = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    if choice < 0.6:
        seed, file = "spm", rng.choice(("tokenizer_config.json", "special_tokens_map.json"))
    made = Case("tokenizer", seed, file, [], [])
    return Case("tokenizer", seed, file, _json_edits(rng, json.loads(bench.original(made))), [])


def _spm_edit(rng: random.Random) -> Edit:
    part = rng.choice(("piece", "piece", "trainer", "trainer", "normalizer", "pieces", "top"))
    known = {"piece": (1, 2, 3), "trainer": (3, 35, 40, 41, 42, 43), "normalizer": (1, 2, 3, 4)}
    which = rng.choice((*known.get(part, (1, 2, 3)), rng.randrange(1, 60)))
    wire = rng.choice((0, 0, 0, 1, 2, 2, 3, 5, 6, 7))
    value: Any = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 259, 2**31, 2**32, 2**63, 2**64 - 1))
    if wire:
        value = rng.choice(("", "00", "61", "fffe", "0000c07f", "0000807f", "00" * 8, "61" * 300))
    return [part, rng.randrange(300), which, wire, value]


def _gguf(bench: Bench, rng: random.Random) -> Case:
    return Case("gguf", *_gguf_edited(bench, rng, ""), [])


def _gguf_edited(bench: Bench, rng: random.Random, prefix: str) -> tuple[str, str, list[Edit]]:
    seed = rng.choice(sorted(bench.gguf))
    model = bench.gguf[seed]
    keys = [pair[0] for pair in model["pairs"] if pair[0].startswith(prefix)]
    edits = [_gguf_edit(rng, model, keys, bool(prefix)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    return seed, "model.gguf", edits


def _gguf_edit(rng: random.Random, model: dict[str, Any], keys: list[str], only: bool) -> Edit:
    key = rng.choice(keys)
    name = rng.choice(("value",) * 8 + ("drop", "rename", "swap", "double", "length"))
    if not only and rng.random() < 0.3:
        return _gguf_table_edit(rng, model)
    if name in ("value", "double"):
        old = next(pair for pair in model["pairs"] if pair[0] == key)
        return ["set" if name == "value" else name, key, *_gguf_value(rng, old[1], old[2])]
    if name == "drop":
        return [name, key]
    if name == "swap":
        return [name, key, rng.choice(keys)]
    if name == "rename":
        arch = model["pairs"][0][2]
        new = rng.choice(("rope.scale_linear", "rope.dimension_sections", "logit_scale", "unknown",
                          "attention.sliding_window_pattern", "expert_count"))  # fmt: skip
        return [name, key, f"{arch}.{new}"]
    # A string or an array that claims another length.
    count = struct.pack("<Q", rng.choice(_COUNTS)).hex()
    item = struct.pack("<I", rng.choice((0, 4, 6, 8, 9, 13))).hex()
    kind = rng.choice((STRING, ARRAY))
    return ["set", key, kind, {"raw": (item if kind == ARRAY else "") + count + "61" * 8}]


def _gguf_value(rng: random.Random, kind: int, old: Any) -> list[Any]:
    choice = rng.random()
    if choice < 0.4:
        new = rng.choice(sorted(_TYPES))
        return [new, rng.choice(_TYPES[new])]
    if choice < 0.55 and kind in _TYPES:
        return [kind, rng.choice(_TYPES[kind])]
    if choice < 0.65:
        text = rng.choice(
            ("", "x", "llama", "yarn", "longrope", "{{ x", "{% for", "a" * 3000, "\u0000")
        )
        return [STRING, text]
    if choice < 0.7:
        return [STRING, {"raw": "0200000000000000fffe"}]
    if choice < 0.75:
        return [ARRAY, {"nest": rng.choice((1, 3, 4, 100, 20_000))}]
    if choice < 0.8:
        return [rng.choice((13, 200, 2**32 - 1)), {"raw": "00" * 8}]
    if kind == ARRAY and rng.random() < 0.7:
        item, values = old
        at = rng.randrange(len(values))
        edge = "" if item == STRING else rng.choice(_TYPES[item])
        changed = rng.choice((values * 2, values[:-1], values[:1], [],
                              [*values[:at], edge, *values[at + 1 :]],
                              [*values[:at], values[0], *values[at + 1 :]]))  # fmt: skip
        return [ARRAY, [item, changed]]
    item = rng.choice((*_TYPES, STRING))
    values = ["a", "b"] if item == STRING else list(_TYPES[item])
    return [ARRAY, [item, values * rng.choice((1, 200))]]


def _gguf_table_edit(rng: random.Random, model: dict[str, Any]) -> Edit:
    number = rng.randrange(len(model["tensors"]))
    old = model["tensors"][number]
    name = rng.choice(("count", "version", "tensor-drop", "tensor-double", "dims", "dims", "type",
                       "offset", "offset", "name"))  # fmt: skip
    if name == "count":
        return [name, rng.choice(("tensors", "pairs")), rng.choice(_COUNTS)]
    if name == "version":
        return [name, rng.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))]
    if name.startswith("tensor-"):
        return [name, number]
    if name == "dims":
        dims = rng.choice(([], [0], [0, 0], [1], old[1][::-1], [*old[1], 1], [*old[1], 0],
                           [2**32, 2**32], [2**63, 2], [2**64 - 1] * 4, [d * 2 for d in old[1]],
                           [1] * 5, [32, 2**59]))  # fmt: skip
        return ["tensor", number, name, dims]
    if name == "type":
        return [
            "tensor",
            number,
            name,
            rng.choice((0, 1, 2, 3, 4, 8, 12, 13, 14, 24, 30, 2**32 - 1)),
        ]
    if name == "offset":
        near = (old[3] + 1, old[3] + 32, old[3] * 2)
        return ["tensor", number, name, rng.choice((*_COUNTS, *near))]
    return ["tensor", number, name, rng.choice(("", "x", "output.weight", "rope_freqs.weight",
            "blk.0.attn_q.bias",
            "blk.99.attn_q.weight", "a" * 3000, model["tensors"][0][0]))]  # fmt: skip


_MAKERS = {"gguf": _gguf, "safetensors": _safetensors, "tokenizer": _tokenizer, "config": _config}
