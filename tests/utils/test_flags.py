"""Flags that are generated from the fields of a configuration."""

import argparse
from dataclasses import fields

import pytest

from octavo.config import EngineConfig
from octavo.utils.flags import add_flags, flag_name


def parse(cls, *words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, cls)
    return vars(parser.parse_args(words))


def test_each_field_is_a_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    flags = {option for action in parser._actions for option in action.option_strings}
    for field in fields(EngineConfig):
        assert flag_name(field.name) in flags
        assert str(field.default) in parser.format_help().replace("\n", " ")


def test_flags_make_the_config_that_keywords_make():
    words = ["--max-model-len", "64", "--dtype", "float32", "--no-enable-prefix-caching",
             "--swap-space", "0.5", "--model", "x"]  # fmt: skip
    options = parse(EngineConfig, *words)
    assert EngineConfig.from_options(options) == EngineConfig(
        max_model_len=64, dtype="float32", enable_prefix_caching=False, swap_space=0.5, model="x"
    )


def test_flags_left_out_leave_nothing():
    assert parse(EngineConfig) == {}


def test_flags_can_be_skipped():
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, skip=("model",))
    assert "--model" not in parser._option_string_actions
    assert "--dtype" in parser._option_string_actions


def test_a_flag_refuses_a_value_of_another_kind():
    with pytest.raises(argparse.ArgumentError):
        parse(EngineConfig, "--dtype", "int4")
    with pytest.raises(argparse.ArgumentError):
        parse(EngineConfig, "--max-num-seqs", "many")
