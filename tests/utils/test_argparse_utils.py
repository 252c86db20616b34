"""Command lines in vLLM's ways: underscores, opposites, and files of flags."""

from pathlib import Path

import pytest

from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.errors import ConfigError
from octavo.utils import FlexibleArgumentParser, random_uuid


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="octavo try")
    add_engine_flags(parser)
    return parser


PAIRS = ("ab", "bc", "cd", "de", "ef", "fg", "gh", "hi", "ij")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flags.yaml"
    path.write_text(
        "model: of/file\n"
        "max_model_len: 4K  # underscores too\n"
        "enable-prefix-caching: false\n"
        "trust-remote-code: true\n"
        "quantization: null\n"
        "cpu-offload-gb: 0\n"
        "compilation-config: {}\n"
    )
    return path


def options(parser: Parser, *words: str) -> dict[str, object]:
    return engine_options(parser.parse(list(words)))


def test_a_file_stands_for_its_flags(parser: Parser, file: Path) -> None:
    expected = {"model": "of/file", "max_model_len": 4096, "enable_prefix_caching": False}
    assert options(parser, "--config", str(file)) == expected
    assert options(parser, f"--config={file}") == expected


def test_the_command_line_wins_in_any_order(parser: Parser, file: Path) -> None:
    for words in (
        ["mine", "--max-model-len", "8", "--enable-prefix-caching", "--config", str(file)],
        ["--config", str(file), "--enable-prefix-caching", "--max_model_len=8", "mine"],
        ["--config", str(file), "--enable-prefix-caching", "--max-model-len=8", "--model=mine"],
    ):
        found = options(parser, *words)
        assert found == {"model": "mine", "max_model_len": 8, "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", "unknown option 'max-model-length'; did you mean 'max-model-len'"),
        ("- a list", "must hold lines such as"),
        ("a: [", "flags.yaml"),
        ("config: other.yaml", "a file of flags cannot name another"),
        ("seed: 0\nseed: 1", "'seed' is given twice"),
        ("max-model-len: 8\nmax_model_len: 9", "'max_model_len' is given twice"),
        ("enable-prefix-caching: true\nno-enable-prefix-caching: true", "is given twice"),
        ("seed: " + "[" * 3000, "nested too deeply"),
        ("seed: &a [*a]", "the value of 'seed' is too large for a flag"),
        (
            "a: &a [1,1,1,1,1,1,1,1]\n"
            + "".join(f"{y}: &{y} [*{x},*{x},*{x},*{x},*{x},*{x},*{x}]\n" for x, y in PAIRS)
            + "seed: *j",
            "too large for a flag",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    parser: Parser, file: Path, text: str, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        options(parser, "--config", str(file))


def test_a_file_that_is_not_there(parser: Parser) -> None:
    with pytest.raises(ConfigError, match=r"--config nosuch.yaml: No such file or directory$"):
        options(parser, "--config", "nosuch.yaml")
    with pytest.raises(ConfigError, match="needs the name"):
        options(parser, "--config")


def test_an_empty_file_is_no_flag(parser: Parser, file: Path) -> None:
    file.write_text("# nothing\n")
    assert options(parser, "m", "--config", str(file)) == {"model": "m"}


def test_the_model_is_a_flag_too(parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.parse(["--model", "m"]).model == "m"
    assert parser.parse(["m", "--model", "m"]).model == "m"
    with pytest.raises(SystemExit):
        parser.parse(["a", "--model", "b"])
    assert "two models are given: 'a' and 'b'" in capsys.readouterr().err


def test_a_parser_of_one_s_own_takes_underscores() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--under_score")
    assert parser.parse_args(["--max_tokens=3", "--under_score", "x_y"]).max_tokens == 3
    assert parser.parse_args(["--under_score", "x_y"]).under_score == "x_y"


def test_a_random_id() -> None:
    assert len(random_uuid()) == 16
    assert random_uuid() != random_uuid()


def test_a_date_in_a_file_is_its_flag_s_text(parser: Parser, file: Path) -> None:
    file.write_text("revision: 2024-01-01")
    assert options(parser, "m", "--config", str(file)) == {"model": "m", "revision": "2024-01-01"}
