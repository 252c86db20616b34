"""The command's frame: overview, unknown commands, exit codes, what is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.cli
from octavo.cli import main as frame
from octavo.errors import ConfigError


def test_every_command_is_a_file_and_every_file_a_command() -> None:
    helpers = {"__init__", "main", "arguments", "preparation", "prompts", "server_connection"}
    files = {path.stem for path in Path(octavo.cli.__file__).parent.glob("*.py")} - helpers
    commands = {name.replace("-", "_") for name in frame.COMMANDS}
    parts = {name for name in files if name.partition("_")[0] in commands}  # as chat_input
    assert files - parts | files & commands == commands


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in frame.COMMANDS)


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([]) == 2
    assert "usage: octavo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("genrate", "octavo: unknown command 'genrate'; did you mean 'generate'?\n"),
        ("--versoin", "octavo: unknown flag '--versoin'; did you mean '--version'?\n"),
        ("zzz", "octavo: unknown command 'zzz'\n"),
    ],
)
def test_an_unknown_command_names_the_nearest(
    word: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main([word]) == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("command", frame.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        frame.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: octavo {command}" in capsys.readouterr().out


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["version"]) == frame.main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == f"octavo {octavo.__version__}"
    assert frame.main(["help"]) == 0
    assert "commands:" in capsys.readouterr().out
    assert frame.main(["help", "run-batch"]) == 0
    assert "--input-file" in capsys.readouterr().out
    assert frame.main(["help", "genrate"]) == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("octavo.cli.pull.run", run)


def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ConfigError("block_size must be 16"), monkeypatch)
    assert frame.main(["pull"]) == 1
    assert capsys.readouterr().err == "octavo: block_size must be 16\n"


@pytest.mark.parametrize("words", [
    ["plan", "x" * 300, "--device", "l4"],
    ["simulate", "llama-3.1-8b", "--device", "l4", "--workload", "x" * 300],
])  # fmt: skip
def test_a_name_that_is_too_long_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("octavo: 'xxx")
    assert said.endswith("cannot be a file: File name too long\n")
    assert len(said) < 250


def test_ctrl_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    assert frame.main(["pull"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyError("a bug"), monkeypatch)
    with pytest.raises(KeyError):
        frame.main(["pull"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from octavo.cli.main import main; sys.exit(main(['pull', '--list']))"
    reader = subprocess.Popen(
        [sys.executable, "-c", "pass"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    reader.wait()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # the write happens at the last flush
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        check=False,
    )
    assert reader.stdin is not None
    reader.stdin.close()
    assert done.returncode == 141
    assert done.stderr == b""


def test_commands_of_vllm_s_say_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    for command, use in {"complete": "octavo generate", "collect-env": "octavo version"}.items():
        assert frame.main([command, "--url", "x"]) == 2
        assert f"unknown command {command!r}; {use}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        (">&-", 0, ""),
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 1, "octavo: cannot write: No space left on device\n"),
    ],
)
def test_standard_streams_that_are_closed_or_full(redirection: str, code: int, error: str) -> None:
    """A closed one is as /dev/null, and no file of ours takes its number."""
    program = (
        "import os, sys; from octavo.cli.main import main; code = main(['pull', '--list'])\n"
        "assert os.open('/', os.O_RDONLY) > 2\n"
        "sys.stderr.isatty(); sys.stdin.read(); sys.exit(code)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, error)


def test_characters_that_the_locale_lacks_are_replaced() -> None:
    program = (
        "from octavo.cli import main as frame, pull\n"
        "pull.run = lambda args: print('caf\u00e9') or 0\n"
        "raise SystemExit(frame.main(['pull']))"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output([sys.executable, "-c", program], env=env) == b"caf?\n"


def test_help_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from octavo.cli.main import main\n"
        "main(['--help'])\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'numba', 'jinja2', 'tqdm'} & set(sys.modules))"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.splitlines()[-1] == "set()"
