"""The reader agrees with the `gguf` package, and no damaged file is more than an error."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.checkpoint.base import StoredTensor
from octavo.checkpoint.gguf import FORMATS, open_file, read_gguf_header
from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.log import cache_dir


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -5)
    writer.add_uint16("n.u16", 65000)
    writer.add_int16("n.i16", -300)
    writer.add_uint32("n.u32", 4_000_000_000)
    writer.add_int32("n.i32", -7)
    writer.add_uint64("n.u64", 1 << 60)
    writer.add_int64("n.i64", -(1 << 60))
    writer.add_float32("n.f32", 0.5)
    writer.add_float64("n.f64", 1e300)
    writer.add_bool("n.bool", True)
    writer.add_string("text", "žluťoučký 漢字")
    writer.add_array("strings", ["a", "", "漢", "longer text"])
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("ints", [1, -2, 3])
    writer.add_tensor("weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "a.gguf"))
    reference = gguf.GGUFReader(tmp_path / "a.gguf")
    expected = {
        key: field.contents()
        for key, field in reference.fields.items()
        if not key.startswith("GGUF.")
    }
    assert dict(header.metadata) == expected
    assert header.metadata["n.bool"] is True
    assert (header.version, header.tensor_count) == (3, 1)


def test_the_offset_is_where_the_tensor_table_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    at = read_gguf_header(path).offset
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, at)
    assert data[at + 8 : at + 8 + length] == b"weight"


def test_a_file_cut_off_anywhere_in_its_header_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data, end = path.read_bytes(), read_gguf_header(path).offset
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, end, 7), *range(24, 100), end - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_header(cut)


def test_flipped_bytes_are_an_error_or_another_value_and_never_a_huge_allocation(
    tmp_path: Path,
) -> None:
    data = write(tmp_path / "a.gguf").read_bytes()
    end = read_gguf_header(tmp_path / "a.gguf").offset
    rng = random.Random(1)
    path = tmp_path / "flipped.gguf"
    tracemalloc.start()
    refused = 0
    for _ in range(250):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(4, end)] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        path.write_bytes(changed)
        try:
            read_gguf_header(path)
        except CheckpointError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 50
    assert peak < 10_000_000


@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12])
def test_a_count_beyond_the_file_is_an_error(tmp_path: Path, kind: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path = tmp_path / "x.gguf"
    for count in (1 << 62, (1 << 64) - 1, 100):
        path.write_bytes(head + key + struct.pack("<IQ", kind, count) + bytes(40))
        with pytest.raises(CheckpointError, match="cut off or damaged"):
            read_gguf_header(path)


def test_what_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for data, message in (
        (b"", "shorter"),
        (b"PK" + bytes(40), "does not start with"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not known"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "other byte order"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read_gguf_header(path)
    with pytest.raises(ModelNotFoundError, match="No such file"):
        read_gguf_header(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError, match="directory"):
        read_gguf_header(tmp_path)


@pytest.mark.model
def test_the_embedded_model_s_header() -> None:
    path = next(cache_dir().rglob("SmolLM2*.gguf"), None)
    if path is None:
        pytest.skip("the embedded model is not in the cache: run `octavo pull smollm2`")
    header = read_gguf_header(path)
    assert header.metadata["general.architecture"] == "llama"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert header.tensor_count == 272


def opened(path: Path) -> dict[str, StoredTensor]:
    return dict(open_file(path).tensors)


@pytest.fixture
def good_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    for number, name in enumerate(["x", "y"]):
        rows = np.random.default_rng(number).normal(size=(8, 64)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_mdl_02_a_cut_gguf_is_refused(good_gguf: Path) -> None:
    whole = good_gguf.read_bytes()
    assert {t.shape for t in opened(good_gguf).values()} == {(8, 64)}
    for keep in (len(whole) - 1, len(whole) - 600, len(whole) // 2, 100, 30, 23, 4, 0):
        good_gguf.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            opened(good_gguf)


def test_mdl_02_a_damaged_gguf_is_refused(good_gguf: Path) -> None:
    """Any byte of the header changed: read within the file, or refused by name."""
    whole = good_gguf.read_bytes()
    header = len(whole) - sum(t.num_bytes for t in opened(good_gguf).values())
    rng = random.Random(1)
    refused: list[str] = []
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        good_gguf.write_bytes(bytes(data))
        try:
            for tensor in opened(good_gguf).values():
                assert len(tensor.load()) == tensor.num_bytes
        except CheckpointError as error:
            refused.append(str(error))
    assert refused
    assert all("model.gguf" in said for said in refused)


def test_mdl_02_gguf_tables_that_lie(good_gguf: Path) -> None:
    whole = good_gguf.read_bytes()
    at = whole.index(b"\x01\x00\x00\x00\x00\x00\x00\x00x") + 9  # past the name "x"
    dims = struct.unpack_from("<I2QIQ", whole, at)
    assert dims == (2, 64, 8, 8, 0)
    lies = {
        "overlap": (2, 64, 8, 8, 64),
        "cut off": (2, 64, 2**50, 8, 0),
        "multiple of 32": (2, 63, 8, 8, 0),
        "ggml type 99": (2, 64, 8, 99, 0),
    }
    for said, lie in lies.items():
        data = bytearray(whole)
        struct.pack_into("<I2QIQ", data, at, *lie)
        good_gguf.write_bytes(bytes(data))
        with pytest.raises(CheckpointError, match=said):
            opened(good_gguf)


def test_sizes_equal_the_gguf_package() -> None:
    for number, form in FORMATS.items():
        quant = gguf.GGMLQuantizationType(number)
        assert quant.name == form.name
        assert gguf.GGML_QUANT_SIZES[quant] == (form.block_values, form.block_bytes)


def test_what_is_written_is_read(good_gguf: Path) -> None:
    file = open_file(good_gguf)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(good_gguf).tensors}
    assert file.tensors.keys() == reference.keys()
    for name, tensor in file.tensors.items():
        assert tensor.load().tobytes() == reference[name].data.tobytes()
    assert file.metadata["llama.block_count"] == 1


def test_a_file_that_is_absent_or_a_pointer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*absent\.gguf: No such file"):
        open_file(tmp_path / "absent.gguf")
    (tmp_path / "p.gguf").write_text("version https://git-lfs.example/spec/v1\noid sha256:00\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_file(tmp_path / "p.gguf")
