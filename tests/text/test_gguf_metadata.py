"""The header reader agrees with the `gguf` package, and no damaged file is more than an error."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.text.gguf_metadata import read_gguf_header


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
def test_the_embedded_model_s_header(smollm2: Path) -> None:
    header = read_gguf_header(smollm2)
    assert header.metadata["general.architecture"] == "llama"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert header.tensor_count == 272
