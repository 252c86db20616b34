"""Damaged safetensors: an error with the file's name and size, before anything is allocated."""

import json
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.base import StoredTensor
from octavo.checkpoint.safetensors import FORMATS, open_file
from octavo.errors import CheckpointError
from octavo.quant.tensors import read_bytes, read_into

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(64, 32).to(torch.bfloat16),
    "c": torch.randn(1000, 5).to(torch.float16),
}


def opened(path: Path) -> dict[str, StoredTensor]:
    return dict(open_file(path).tensors)


def values(tensor: StoredTensor) -> torch.Tensor:
    out = torch.empty(tensor.shape)
    read_into(tensor, out)
    return out


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def write(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_is_written_is_read(good: Path) -> None:
    found = opened(good)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        assert torch.equal(values(found[name]), tensor.float())


def test_an_unaligned_body_is_read(tmp_path: Path) -> None:
    body = TENSORS["b"].view(torch.uint8).numpy().tobytes()
    header = json.dumps({"b": {"dtype": "BF16", "shape": [64, 32], "data_offsets": [0, 4096]}})
    path = write(
        tmp_path / "model.safetensors", (header + " " * (13 - len(header) % 8)).encode(), body
    )
    assert torch.equal(values(opened(path)["b"]), TENSORS["b"].float())


@pytest.mark.parametrize("cut", ["byte", "page", "half", "to the header", "all"])
def test_mdl_02_a_cut_file_is_refused(cut: str, good: Path) -> None:
    whole = good.read_bytes()
    keep = {"byte": len(whole) - 1, "page": len(whole) - 4096, "half": len(whole) // 2,
            "to the header": 20, "all": 0}[cut]  # fmt: skip
    good.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        opened(good)
    assert str(keep) in str(error.value)


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 10_000, 99_999_999])
def test_mdl_02_false_header_lengths(length: int, good: Path) -> None:
    good.write_bytes(struct.pack("<Q", length) + good.read_bytes()[8:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(good)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


BAD_HEADERS: dict[str, Any] = {
    "not json": b"{nope",
    "not utf-8": b'{"\xff": 1}',
    "a list": [1],
    "deep": b"[" * 50_000,
    "named twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "no fields": {"a": 3},
    "overlap": {"a": entry(0, 8), "b": entry(4, 8)},
    "hole": {"a": entry(0, 4), "b": entry(6, 8, [1], "BF16")},
    "reversed": {"a": entry(8, 0, [2])},
    "past the end": {"a": entry(0, 12)},
    "far past the end": {"a": entry(0, 2**62, [2**60])},
    "too short": {"a": entry(0, 4)},
    "wrong size for its type": {"a": entry(0, 8, [2], "BF16")},
    "wrong size for its shape": {"a": entry(0, 8, [3])},
    "unknown type": {"a": entry(0, 8, [2], "F32X")},
    "type no string": {"a": {"dtype": 5, "shape": [2], "data_offsets": [0, 8]}},
    "negative shape": {"a": entry(0, 8, [-2])},
    "boolean shape": {"a": entry(0, 4, [True])},
    "huge shape": {"a": entry(0, 8, [2**62, 2**62])},
    "float offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}},
    "negative offset": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
}


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_mdl_02_bad_headers(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", BAD_HEADERS[kind], bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        opened(path)
    if kind not in ("not json", "not utf-8", "deep", "named twice"):  # said by the library
        assert f"({path.stat().st_size} bytes in all)" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("past the end", r"\(78 bytes in all\): .*; its header describes 82 bytes"),
        ("too short", r"\(77 bytes in all\): .*; its header describes 73 bytes"),
        ("wrong size for its type", r"tensor 'a' takes 8 bytes, .* shape \[2\] in BF16 needs 4"),
        ("wrong size for its shape", r"tensor 'a' takes 8 bytes, .* shape \[3\] in F32 needs 12"),
        ("far past the end", r"its header describes 4\d{18} bytes"),
        ("huge shape", r"tensor 'a' takes 8 bytes, but .* needs \d+"),
        ("unknown type", r"tensor 'a' is described as .*F32X"),
        ("three offsets", r"tensor 'a' is described as .*\[0, 4, 8\]"),
        ("no fields", "tensor 'a' is described as 3"),
        ("overlap", "tensor `b`"),
        ("hole", "tensor `b`"),
    ],
)
def test_mdl_02_errors_name_the_tensor_and_the_sizes(kind: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", BAD_HEADERS[kind], bytes(8))
    with pytest.raises(CheckpointError, match=said):
        opened(path)


def test_mdl_02_a_name_that_occurs_twice_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", BAD_HEADERS["named twice"], bytes(8))
    with pytest.raises(CheckpointError, match="its header names twice: a"):
        opened(path)


def test_mdl_02_random_bytes_never_escape_the_checks(good: Path) -> None:
    """30 mutated headers: each is read in full or refused with CheckpointError."""
    whole = good.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    rng = random.Random(0)
    refused: list[str] = []
    for _ in range(30):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(8 + length)] = rng.randrange(256)
        good.write_bytes(bytes(data))
        try:
            for tensor in opened(good).values():
                loaded = tensor.load()
                assert loaded.nbytes == tensor.num_bytes
                bytes(loaded)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all("model.safetensors" in said for said in refused)


def test_mdl_02_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        opened(path)


def test_a_type_without_a_decoder_is_listed_but_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry(0, 8, [8], "F8_E5M2")}, bytes(8))
    tensor = opened(path)["a"]
    with pytest.raises(CheckpointError, match="F8_E5M2"):
        read_into(tensor, torch.empty(8))


@pytest.mark.parametrize("kind", [name for name, form in FORMATS.items() if form.dtype])
def test_every_readable_type_is_the_library_s(kind: str, tmp_path: Path) -> None:
    dtype = getattr(torch, str(FORMATS[kind].dtype))
    save_file({"a": torch.arange(6).view(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    tensor = opened(tmp_path / "model.safetensors")["a"]
    assert tensor.format == FORMATS[kind]
    assert tensor.num_bytes == 6 * dtype.itemsize
    assert torch.equal(values(tensor), torch.arange(6).view(2, 3).to(dtype).float())


def test_types_of_parts_of_a_byte_have_a_size(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry(0, 8, [4, 4], "F4")}, bytes(8))
    assert opened(path)["a"].num_bytes == 8


def test_tensors_are_views_of_the_mapped_file(good: Path) -> None:
    tensor = opened(good)["b"]
    first, second = (read_bytes(tensor) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
