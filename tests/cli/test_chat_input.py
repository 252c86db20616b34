"""Messages of several lines, and the history file."""

import io
import os
import stat

import pytest

from octavo.cli.chat_input import (
    LineReader,
    append_history,
    is_open,
    message_of,
    read_history,
)


def messages(text):
    reader, found = LineReader(io.StringIO(text)), []
    while True:
        try:
            found.append(reader.read())
        except EOFError:
            return found


def test_lines_are_messages():
    assert messages("one\n\ntwo\r\nthree") == ["one", "", "two", "three"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('"""\na\n\n  b\n"""\nnext\n', ["a\n\n  b", "next"]),
        ('"""a\nb"""\nnext\n', ["a\nb", "next"]),
        ('"""never closed\nb\n', ['"""never closed\nb']),
        ('"""one line"""\n', ["one line"]),
        ("a\\\nb\\\nc\nnext\n", ["a\nb\nc", "next"]),
        ("ends with\\\n", ["ends with"]),
        ('say "hi"\n', ['say "hi"']),
        ('"""\n"""\n', [""]),
        ('he said """x\n', ['he said """x']),
    ],
)
def test_messages_of_several_lines(text, want):
    assert [message_of(m) for m in messages(text)] == want


def test_quotes_within_pasted_code_are_its_own():
    code = '"""A module."""\n\ndef f():\n    """A function."""'
    assert not is_open(code)
    assert message_of(code) == code
    assert is_open('  """\ntext')
    assert not is_open('"""text"""')


def test_indentation_of_pasted_lines_stays():
    assert message_of("\n    if x:\n        y()\n\n") == "    if x:\n        y()"
    assert message_of("  one line  ") == "one line"


def test_history_is_private_and_keeps_lines_together(tmp_path):
    path = tmp_path / "new" / "chat_history"
    append_history(path, "one")
    append_history(path, "two\nlines")
    append_history(path, "  ")
    append_history(path, "x" * 100_000)
    assert read_history(path) == ["one", "two\nlines"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().count("\n") == 2, "an entry is a line"


def test_a_history_of_readline_s_is_read(tmp_path):
    path = tmp_path / "chat_history"
    path.write_bytes(b"hello\nwhat is \xff?\n")
    assert read_history(path) == ["hello", "what is \ufffd?"]


def test_a_long_history_is_cut(tmp_path):
    path = tmp_path / "chat_history"
    path.write_text("".join(f"{i}\n" for i in range(2500)))
    assert read_history(path) == [f"{i}" for i in range(1500, 2500)]
    assert len(path.read_text().splitlines()) == 1000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    append_history(tmp_path / "chat_history", "x")
    tmp_path.chmod(0o700)


def test_no_history_at_all(tmp_path):
    append_history(None, "x")
    assert read_history(None) == read_history(tmp_path / "nosuch") == []
    append_history(tmp_path / "file" / "chat_history", "x")
    (tmp_path / "plain").touch()
    append_history(tmp_path / "plain" / "chat_history", "x")  # no folder: nothing happens
