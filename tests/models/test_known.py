"""Models by name: their parameters are those that their makers count."""

import math

import pytest

from octavo.models import registry
from octavo.models.config import from_config
from octavo.models.known import CONFIGS

# As counted from the published files; of a tied model, the head once.
COUNTS = {
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
}


def count(name):
    spec = from_config(CONFIGS[name])
    shapes = registry.decoder_class(spec.family).parameter_shapes(spec)
    return sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_published(name):
    assert count(name) == COUNTS[name]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - COUNTS.keys()))
def test_other_names_say_about_how_many(name):
    said = name.rsplit("-", 1)[-1]
    assert count(name) == pytest.approx(float(said[:-1]) * 1e9, rel=0.1)
