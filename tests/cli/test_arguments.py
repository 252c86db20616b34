"""Flags made from the parameter types, and mistakes on the command line."""

import argparse
from dataclasses import fields

import pytest

from octavo.cli.arguments import (
    SAMPLING_HELP,
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_options,
)
from octavo.config import EngineConfig
from octavo.params import SamplingParams
from octavo.utils.flags import flag_name

# Not for a command line: the first two shape a Python caller's outputs.
NO_FLAG = {"structured_outputs", "output_kind", "detokenize"}


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="octavo try")
    add_engine_flags(parser, skip=("seed",))
    add_sampling_flags(parser, {"max_tokens": 256})
    return parser


def error_of(parser: Parser, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong command line gives."""
    with pytest.raises(SystemExit) as stop:
        parser.parse(argv)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_every_sampling_parameter_has_a_flag_or_a_reason() -> None:
    assert {item.name for item in fields(SamplingParams)} - NO_FLAG == set(SAMPLING_HELP)


def test_every_engine_field_has_a_flag(parser: Parser) -> None:
    wanted = {flag_name(item.name) for item in fields(EngineConfig)} - {"--model"}
    assert wanted <= set(parser.flags())


def test_nothing_given_leaves_the_defaults(parser: Parser) -> None:
    args = parser.parse([])
    assert args.model == EngineConfig.model
    assert engine_options(args, skip=("model", "seed")) == {}
    assert SamplingParams(**sampling_options(args, {"max_tokens": 256})) == SamplingParams(
        max_tokens=256
    )


def test_engine_flags_become_options(parser: Parser) -> None:
    args = parser.parse(["m.gguf", "--block-size", "32", "--no-enable-prefix-caching"])
    assert engine_options(args, skip=("seed",)) == {
        "model": "m.gguf",
        "block_size": 32,
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--n", "3"], "n", 3),
        (["--seed", "-7"], "seed", -7),
        (["--stop", "END", "--stop", "\n"], "stop", ("END", "\n")),
        (["--stop-token-ids", "2,7"], "stop_token_ids", (2, 7)),
        (["--logit-bias", "15:-100,7:2.5"], "logit_bias", {15: -100.0, 7: 2.5}),
        (["--allowed-token-ids", "10,11"], "allowed_token_ids", (10, 11)),
        (["--bad-words", "a b"], "bad_words", ("a b",)),
        (["--ignore-eos"], "ignore_eos", True),
        (["--no-skip-special-tokens"], "skip_special_tokens", False),
        (["--max-tokens", "5"], "max_tokens", 5),
    ],
)
def test_sampling_flags_become_parameters(
    parser: Parser, argv: list[str], name: str, value: object
) -> None:
    options = sampling_options(parser.parse(argv), {"max_tokens": 256})
    assert getattr(SamplingParams(**options), name) == value


def test_a_misspelt_flag_names_the_nearest(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    text = error_of(parser, ["--tempratur", "0.5", "--n", "x"], capsys)
    assert text == "octavo try: unknown flag '--tempratur'; did you mean '--temperature'?\n"


def test_an_abbreviated_flag_is_not_guessed(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unknown flag '--temp'" in error_of(parser, ["--temp", "1"], capsys)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--n", "two"], ("--n", "'two'")),
        (["--dtype", "int4"], ("--dtype", "'int4'", "bfloat16")),
        (["--stop-token-ids", "2;7"], ("'2;7'", "2,7")),
        (["--logit-bias", "15"], ("'15'", "15:-100")),
        (["one", "two"], ("two",)),
        (["--max-tokens"], ("--max-tokens",)),
    ],
)
def test_a_bad_value_is_reported_in_one_line(
    parser: Parser, argv: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = error_of(parser, argv, capsys)
    assert all(word in text for word in words), text


def test_the_help_names_the_command_s_own_default(parser: Parser) -> None:
    assert "(default: 256)" in parser.format_help()


def test_words_after_two_dashes_are_no_flags() -> None:
    parser = Parser(prog="octavo try")
    parser.add_argument("words", nargs="*")
    assert parser.parse(["--", "--free"]) == argparse.Namespace(words=["--free"])
