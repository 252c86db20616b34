"""What a long start shows: on a terminal, in a file, and not at all."""

import os
import pty
import subprocess
import sys
import time

import pytest

from octavo import progress
from octavo.progress import Bars, Lines, Phase, Progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "can_redraw", lambda stream: True)


def since(seconds: float, name: str = "compiling", **more: int) -> Phase:
    """A phase that began a while ago."""
    phase = Phase(name, **more)
    phase.began -= seconds
    return phase


def test_a_bar_moves_while_the_work_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    bars, phase = Bars(), since(5)
    bars.tick([phase])
    assert "compiling [00:05]" in capsys.readouterr().err
    phase.widget.start_t -= 60
    bars.tick([phase])
    assert "compiling [01:05]" in capsys.readouterr().err


def test_a_bar_has_the_share_that_is_done_and_no_colours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bars, phase = Bars(), since(1, "reading", total=1000)
    phase.advance(250)
    bars.tick([phase])
    shown = capsys.readouterr().err
    assert "reading:  25%" in shown
    assert "250/1000" in shown
    assert "\x1b" not in shown


def test_bars_of_a_library_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bars, phase = Bars(), since(3, "fetching")
    phase.foreign = True
    for _ in range(3):
        bars.tick([phase])
    bars.end(phase)
    assert capsys.readouterr().err == "fetching ...\n"


def test_what_is_over_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for display in (Bars(), Lines(print)):
        phase = since(0)
        display.tick([phase])
        display.end(phase)
    assert capsys.readouterr() == ("", "")


def test_only_what_took_long_stays_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, stays in ((1.0, False), (3.0, True)):
        bars, phase = Bars(), since(seconds)
        bars.tick([phase])
        bars.end(phase)
        assert capsys.readouterr().err.endswith("\n") == stays


def test_a_file_gets_two_lines_however_much_is_advanced() -> None:
    said: list[str] = []
    lines, phase = Lines(said.append), since(3, "reading weights", total=50)
    for _ in range(50):
        phase.advance()
        lines.tick([phase, since(9, "an inner one")])
    lines.end(phase)
    assert said[0] == "reading weights ..."
    assert said[1].startswith("reading weights: done in 3.")
    assert len(said) == 2


def test_a_file_is_told_every_10_s() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    phase = Phase("reading weights")
    for second in (2, 5, 12, 15, 23, 30):
        phase.began = time.monotonic() - second
        lines.tick([phase])
    assert said == ["reading weights ...", *(f"reading weights: {n} s so far" for n in (12, 23))]


def fail(lines: Lines, phase: Phase) -> None:
    lines.tick([phase])
    raise ValueError("broken")


def test_a_file_is_not_told_that_a_phase_that_failed_is_done() -> None:
    said: list[str] = []
    shown = Progress(Lines(said.append))
    with pytest.raises(ValueError, match="broken"), shown.phase(since(3, "opening")) as phase:
        fail(Lines(said.append), phase)
    assert said == ["opening ..."]


def test_a_series_that_takes_long_has_one_line() -> None:
    said: list[str] = []
    lines, outer = Lines(said.append), since(0, "measuring")
    for name in ("a", "b"):
        inner = since(2, f"compiling, 1 of 2: {name}")
        inner.series = "compiling"
        lines.tick([outer, inner])
    assert said == ["compiling ..."]


def test_items_of_a_series_are_counted(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(Bars, "end", lambda self, phase: names.append(phase.name))
    with progress.shown():
        progress.expect("compiling", 3)
        with progress.phase("loading"):
            with progress.item("compiling", "a"):
                pass
            progress.count("compiling")  # done by another process
            for name in ("b", "c"):
                with progress.item("compiling", name):
                    pass
    assert names == [
        "compiling, 1 of 3: a",
        "compiling, 3 of 3: b",
        "compiling, 4 of 4: c",
        "loading",
    ]


def test_nothing_is_shown_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Progress", None)
    with progress.shown(False), progress.phase("loading", 9) as phase:
        phase.advance(9)
    with progress.item("compiling", "a"):
        progress.expect("compiling", 2)
        progress.count("compiling")


def test_a_display_inside_another_is_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Progress] = []
    enter = Progress.__enter__
    monkeypatch.setattr(Progress, "__enter__", lambda self: made.append(self) or enter(self))
    with progress.shown(), progress.shown():
        pass
    assert len(made) == 1


def test_a_closed_standard_error_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(progress, "_LINE_AFTER_SECONDS", 0.0)
    with progress.shown(), progress.phase("loading"):
        pass
    display = Lines(progress._print)
    with Progress(display) as running, running.phase(since(3)), pytest.raises(BrokenPipeError):
        display.tick([since(3)])
    monkeypatch.setattr(sys, "stderr", None)
    with progress.shown(), progress.phase("loading"):
        pass


def test_a_phase_that_fails_is_ended(terminal: None) -> None:
    with progress.shown():
        with pytest.raises(ValueError, match="broken"), progress.phase("loading"):
            raise ValueError("broken")
        with progress.phase("again"):
            pass


# A phase that waits until it has been drawn often enough, and so ends only if it is.
SLOW = """
import sys, time
from octavo import progress
seen = []
class Spy:
    def isatty(self): return sys.__stderr__.isatty()
    def fileno(self): return sys.__stderr__.fileno()
    def flush(self): sys.__stderr__.flush()
    def write(self, text): seen.append(text); return sys.__stderr__.write(text)
sys.stderr = Spy()
wanted = int(sys.argv[1])
with progress.shown(), progress.phase("a slow phase"):
    while sum("a slow phase" in text for text in seen) < wanted:
        time.sleep(0.05)
"""


def run(wanted: int, **environment: str) -> str:
    """What the slow phase shows on a terminal that says it has no size."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SLOW, str(wanted)]
    found = b""
    with subprocess.Popen(
        command, stderr=slave, stdout=slave, env={**os.environ, **environment}
    ) as process:
        os.close(slave)
        try:
            while chunk := os.read(master, 4096):
                found += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        finally:
            os.close(master)
        assert process.wait() == 0
    return found.decode()


def test_a_slow_phase_is_never_silent_on_a_terminal() -> None:
    shown = run(5, TERM="xterm", NO_COLOR="1")
    assert shown.count("a slow phase [00:0") >= 5
    assert "\x1b" not in shown


def test_a_dumb_terminal_gets_lines() -> None:
    shown = run(1, TERM="dumb").splitlines()
    assert shown[0] == "a slow phase ..."
    assert shown[-1].startswith("a slow phase: done in ")
    assert "\r" not in shown[0]


def test_beside_other_processes_on_a_terminal_there_are_lines(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_LINE_AFTER_SECONDS", 0.0)
    said: list[str] = []
    with progress.shown(True, said.append, redraw=False), progress.phase("reading"):
        while not said:
            time.sleep(0.01)
    assert said[0] == "reading ..."
    assert capsys.readouterr().err == ""
