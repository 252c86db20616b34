"""Cards by name: spellings, what is not known, and facts that must not contradict each other."""

import pytest

from octavo import hardware
from octavo.devices import OLDEST_GPU
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("a100-40gb", "a100-40gb"),
        ("A100 40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("h100", "h100-80gb"),
        ("GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_a_card_is_found_however_it_is_spelled(name, card):
    assert hardware.find(name).name == card


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100-40g", "unknown card 'a100-40g'; did you mean 'a100-40gb'?; known: a10g, "),
        ("tpu", "unknown card 'tpu'; known: a10g, "),
        ("", "unknown card ''; known: a10g, "),
    ],
)
def test_an_unknown_card_names_the_nearest(name, message):
    with pytest.raises(ConfigError) as found:
        hardware.find(name)
    assert str(found.value).startswith(message)
    assert "'described'" in str(found.value)


@pytest.mark.parametrize("card", hardware.CARDS.values(), ids=lambda card: card.name)
def test_facts_are_plausible(card):
    assert 20 * 2**30 < card.memory < 200 * 2**30
    for size in (20, 40, 80):
        if card.name.endswith(f"-{size}gb"):
            assert 0.95 * size * 2**30 < card.memory < size * 2**30
    assert card.capability >= OLDEST_GPU
    assert ("fp8" in card.flops) == (card.capability >= (8, 9))
    assert card.flops["int8"] >= card.flops["bfloat16"] == card.flops["float16"]
    # A byte of memory is worth some 50 to 600 operations on every card that was made so far.
    assert 50 < card.flops["bfloat16"] / card.bandwidth < 600
    assert card.link < card.bandwidth


@pytest.mark.parametrize("text", ["0", "0GiB", "40GB", "much", "-1"])
def test_memory_that_is_none(text):
    with pytest.raises(ConfigError, match="memory"):
        hardware.memory_size(text)


def test_memory():
    assert hardware.memory_size("40GiB") == 40 * 2**30
