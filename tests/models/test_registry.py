"""The table of families."""

import pytest

from octavo.errors import CheckpointError
from octavo.models.decoder import Decoder
from octavo.models.registry import FAMILIES, by_architecture, decoder_class


def test_names_are_unique() -> None:
    names = [name for family in FAMILIES for name in (family.name, family.architecture)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_entry_leads_to_a_class(family: object) -> None:
    assert issubclass(decoder_class(family), Decoder)  # type: ignore[arg-type]


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'Qwen2ForCausalLM'") as error:
        by_architecture("Qwen2ForCausalML")
    for family in FAMILIES:
        assert family.architecture in str(error.value)
