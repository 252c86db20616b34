"""A GGUF model in several files, given as its first part, any part, or their folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.models import toys

from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.models.files import resolve


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


def test_all_parts_are_loaded_from_any_of_them(tmp_path: Path) -> None:
    whole = toys.write_gguf(toys.make("llama"), tmp_path / "m.gguf")
    ids = toys.prompt(20)
    expected = toys.Paged(toys.load(whole)).step([("a", ids)])[0]
    parts = toys.split_gguf(whole, 3)
    for given in (*parts, tmp_path):
        found = resolve(str(given))
        assert (found.root, found.weights) == (parts[0], tuple(parts))
        assert torch.equal(toys.Paged(toys.load(given)).step([("a", ids)])[0], expected)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    parts = toys.split_gguf(toys.write_gguf(toys.make("llama"), tmp_path / "m.gguf"), 3)
    second = tmp_path / "second"
    shutil.copy(parts[1], second)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: split.no is 2, .* it is 1"):
        resolve(str(parts[0])).open()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*missing.*m-00002-of-00003.gguf"):
        resolve(str(parts[2]))
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        resolve(str(tmp_path))
    second.rename(parts[1])
    toys.write_gguf(toys.make("llama"), tmp_path / "other.gguf")
    with pytest.raises(ModelNotFoundError, match="name one of them"):
        resolve(str(tmp_path))
