"""Which files of a repository are a model. `tests/cli/test_pull_hub.py` runs it against a hub."""

import pytest

from octavo.errors import ModelNotFoundError
from octavo.models.hub import choose_gguf, split_id

FILES = ["a-Q4_0.gguf", "a-Q4_K_M.gguf", "b/big-00001-of-00002.gguf", "b/big-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("a-Q4_0.gguf", FILES[:1]),
        ("q4_0", FILES[:1]),
        ("K_M", FILES[1:2]),
        ("b/big.gguf", FILES[2:]),
        ("big", FILES[2:]),
        ("b/big-00002-of-00002.gguf", FILES[2:]),
    ],
)
def test_a_part_of_a_name_chooses_a_model_with_all_its_parts(wanted: str, found: list[str]) -> None:
    assert choose_gguf("o/n", ["config.json", *FILES], wanted) == found


@pytest.mark.parametrize(("wanted", "how"), [(None, "3 files fit"), ("Q4", "2 files fit")])
def test_more_than_one_are_listed(wanted: str | None, how: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"{how}.*a-Q4_0\.gguf"):
        choose_gguf("o/n", FILES, wanted)


def test_an_id_and_its_file() -> None:
    assert split_id("owner/name:Q4") == ("owner/name", "Q4")
    assert split_id("owner/name") == ("owner/name", None)
