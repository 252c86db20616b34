"""Every getter names the field, and believes no value that no model has."""

import math
from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.models.fields import MOST, Fields, is_number

HUGE = (MOST + 1, 2**63, 10**400)
NOT_NUMBERS = (None, True, "1", [1], {}, math.nan, math.inf, -math.inf, 10**400)


def fields(value: Any) -> Fields:
    return Fields("file.json", {"key": value})


@pytest.mark.parametrize("value", [*HUGE, -1, 0, 1.0, True, "1", [1], {}])
def test_an_integer_has_a_type_and_bounds(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"file\.json: key is "):
        fields(value).integer("key")
    assert fields(7).integer("key", most=7) == 7


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_number_is_finite(value: Any) -> None:
    assert not is_number(value)
    with pytest.raises(CheckpointError, match=r"file\.json: key is "):
        fields(value).number("key")
    with pytest.raises(CheckpointError, match=r"file\.json: key is "):
        fields([value]).numbers("key", 1)


@pytest.mark.parametrize("value", [1, "a", [1], ["a", 1], {"a": 1}])
def test_a_list_has_items_of_one_type(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"file\.json: key is .* a list of str"):
        fields(value).items("key", str)
    assert fields(["a"]).items("key", str) == ["a"]
    assert fields(None).items("key", str) == []


@pytest.mark.parametrize("value", [1, True, ["a"], {}])
def test_a_text_is_one(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"file\.json: key is .* a string"):
        fields(value).text("key")


def test_a_long_value_is_cut_in_the_message() -> None:
    for value in ("a" * 10_000, [0] * 10_000, {str(i): i for i in range(1000)}):
        with pytest.raises(CheckpointError) as raised:
            fields(value).integer("key")
        assert len(str(raised.value)) < 300
