"""`octavo chat` in a terminal: the real program under a pty, over tests/chat_stub.py."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import octavo

TESTS = Path(__file__).parents[1]
SOURCE = Path(octavo.__file__).parents[1]
CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP, TAB = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A", "\t"


def _own_terminal() -> None:
    """So that Ctrl-C reaches the program, also where the tests run with SIGINT ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program in a pty of 40 columns; keeps what it shows."""

    def __init__(self, folder: Path, flags: tuple[str, ...], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._theirs = theirs
        self.resize(40)
        self.modes = termios.tcgetattr(theirs)
        self._plain = {"TERM": "xterm", "OCTAVO_CACHE_DIR": str(folder), **environment}
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "chat_stub.py"), *flags],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=_own_terminal,
            env={**inherited, "PYTHONPATH": f"{SOURCE}:{TESTS}", **self._plain},
        )  # fmt: skip
        self.shown = ""
        self._mark = 0

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> None:
        self._mark = len(self.shown)
        os.write(self._ours, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal does that was asked to mark what is pasted."""
        marks = self.shown.count("\x1b[?2004h") > self.shown.count("\x1b[?2004l")
        assert marks, "bracketed paste is off"
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait(self, pattern: str, seconds: float = 10) -> str:
        """Read until `pattern` is shown after what was typed last; returns that part."""
        os.set_blocking(self._ours, False)
        end = time.monotonic() + seconds
        while not re.search(pattern, self.new()):
            assert time.monotonic() < end, f"no {pattern!r} in {self.new()[-500:]!r}"
            try:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # the program has gone
                assert re.search(pattern, self.new()), f"no {pattern!r} in {self.shown!r}"
        return self.new()

    def new(self) -> str:
        return plain(self.shown[self._mark :])

    def ask(self, text: str, answer: str = r"in the window\]") -> str:
        self.type(text)
        return self.wait(rf"{answer}(?s:.*)\n>")

    def end(self) -> int:
        """The exit code. The terminal must be as it was."""
        status = self.process.wait(10)
        assert termios.tcgetattr(self._theirs) == self.modes, "not as it was"
        return status

    def hang_up(self) -> None:
        os.close(self._theirs)
        os.close(self._ours)
        self._ours = self._theirs = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._ours >= 0:
            os.close(self._ours)
            os.close(self._theirs)


def plain(text: str) -> str:
    """What a reader sees, roughly: without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r+(?=\n)|\x08", "", text)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*flags: str, ready: bool = True, **environment: str) -> Terminal:
        opened.append(Terminal(tmp_path, flags, environment))
        if ready:
            opened[-1].wait(r"Ctrl-D leaves.(?s:.*)\n>")
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_conversation(terminal: Open, tmp_path: Path) -> None:
    chat = terminal("--temperature", "0.5")
    assert "stub: temperature 0.5" in chat.new()
    assert "(the stub's);\nwindow of 1000 tokens\n" in chat.new(), "notes wrap too"
    # Pasted lines are one message, sent by Enter; so are those between quotes or with a backslash.
    chat.paste("!say one\n    two\n\nthree")
    assert "one\n    two\n\nthree\n" in chat.ask(ENTER)
    assert "\none\ntwo\n" in chat.ask(f'"""{ENTER}!say one{ENTER}two{ENTER}"""{ENTER}')
    assert "\none\ntwo\n" in chat.ask(f"!say one\\{ENTER}two{ENTER}")
    assert "\none\ntwo\n" in chat.ask(f"!say one{ALT_ENTER}two{ENTER}")
    # Words wrap at the edge, also after a change of the size.
    words = " ".join(f"word{i}" for i in range(10, 24))
    lines = chat.ask(f"!say {words}{ENTER}").split("\n")
    assert "word10 word11 word12 word13 word14" in lines
    chat.resize(80)
    lines = chat.ask(f"!say {words}{ENTER}").split("\n")
    assert " ".join(words.split()[:11]) in lines
    # Figures are dim, and not part of the answer.
    assert re.search(
        r"\x1b\[2m\[14 tokens, .* tokens/s, .* s to the first; \d+ of 1000", chat.shown
    )
    # Completion and history.
    chat.type(f"/reg{TAB}")
    chat.wait("/regenerate")
    chat.ask(ENTER)
    chat.type(f"/set tempe{TAB} 9{ENTER}")
    chat.wait(r"temperature must be in \[0, 2\], not 9")
    chat.type(f"{UP}{UP}{UP}")
    chat.wait("word23")
    chat.type(CTRL_C + CTRL_D)  # the first discards the line
    assert chat.end() == 0
    history = tmp_path / "chat_history"
    assert "!say one\u2028    two\u2028\u2028three\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_and_typing_during_an_answer(terminal: Open) -> None:
    chat = terminal()
    chat.type("!slow" + ENTER)
    chat.wait(r"word5\s")
    chat.type("typed ahead")
    chat.wait(r"word\d+ \s*word\d+ ")
    chat.paste("!say a\nb")  # also then it is one message
    chat.wait(r"word\d+ \s*word\d+ ")
    assert "typed" not in chat.new()
    assert "!say" not in chat.new()
    chat.type(CTRL_C)
    said = chat.wait(r"\(stopped; the partial answer is kept\)(?s:.*)\n>")
    assert said.count("word") < 20
    # Ctrl-C discards what was typed; what is typed before the end of an answer is kept.
    assert "\nagain\n" in chat.ask("again" + ENTER)
    chat.type(f"!20 slowly{ENTER}")
    chat.wait(r"w3\s")
    chat.type(f"!say next{ENTER}")
    assert "\nnext\n" in chat.wait(r"w19\s(?s:.*)\nnext\n(?s:.*)window(?s:.*)\n>")
    chat.type(CTRL_C)
    chat.wait("Ctrl-C again")
    chat.type(CTRL_C)
    assert chat.end() == 130


@pytest.mark.parametrize(
    ("number", "answering"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.slow),
    ],
)
def test_signals_restore_the_terminal(terminal: Open, number: int, answering: bool) -> None:
    chat = terminal(NO_COLOR="1")
    chat.ask(f"hello{ENTER}")
    if answering:
        chat.type("!slow" + ENTER)
        chat.wait(r"word3\s")
    chat.process.send_signal(number)
    assert chat.end() == 128 + number
    assert "Traceback" not in chat.shown
    assert not re.search(r"\x1b\[[1-9][0-9;]*m", chat.shown), "no colour, no dim"


def test_a_terminal_that_is_closed_ends_the_chat(terminal: Open) -> None:
    chat = terminal()
    chat.type("!slow" + ENTER)
    chat.wait(r"word3\s")
    chat.hang_up()
    assert chat.process.wait(10) == 128 + signal.SIGHUP


def test_a_plain_terminal_gets_no_control_sequences(terminal: Open) -> None:
    chat = terminal(TERM="dumb")
    chat.type('"""\n!say one\ntwo\n"""\n')
    assert "one\ntwo\n" in chat.wait(r"in the window\](?s:.*)\n>")
    chat.type("!slow\n")
    chat.wait(r"word5\s")
    chat.type("!say later\n")
    chat.wait(r"word\d+ \s*word\d+ ")
    assert "later" not in chat.new()
    chat.type(CTRL_C)
    chat.wait(r"\(stopped(?s:.*)\n>")
    chat.type(CTRL_D)
    assert chat.end() == 0
    assert "\x1b" not in chat.shown
