"""Promises of memory between processes: counted while their process lives, and no longer."""

import os
import subprocess
import sys

import pytest

from octavo.runner import promises as module
from octavo.runner.promises import Promises

OTHER = """
import sys
from pathlib import Path
from octavo.runner.promises import Promises
held = Promises(Path(sys.argv[1])).make("other", 10**9, 0)
ballast = bytearray(10**8)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "engines"


@pytest.fixture
def other(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_s_promise_counts_less_what_it_uses(folder, other):
    (promise,) = Promises(folder).others()
    assert (promise.pid, promise.model, promise.promised) == (other.pid, "other", 10**9)
    assert 0.5e9 < promise.outstanding < 0.9e9


def test_a_crash_frees_it(folder, other):
    other.kill()
    other.wait()
    assert Promises(folder).others() == []
    assert not list(folder.glob("*.json"))


def test_an_ordinary_end_leaves_no_file(folder, other):
    other.stdin.close()
    other.wait()
    assert not list(folder.glob("*.json"))
    other.stdin = None


def test_one_s_own_counts_whole_until_released(folder):
    here = Promises(folder)
    first, second = here.make("a", 100, 0), here.make("b", 200, 0)
    assert sorted(p.outstanding for p in here.others()) == [100, 200]
    first.release()
    first.release()
    assert [p.model for p in here.others()] == ["b"]
    second.release()
    assert here.others() == []


def test_a_fork_leaves_the_promise_to_its_parent(folder):
    here = Promises(folder)
    held = here.make("a", 100, 0)
    if (child := os.fork()) == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(here.others()) == 1
    held.release()


def test_another_machine_s_or_container_s_is_not_counted(folder, monkeypatch):
    here = Promises(folder)
    held = here.make("a", 100, 0)
    monkeypatch.setattr(module, "_place", lambda: "another boot")
    assert here.others() == []
    monkeypatch.undo()
    assert len(here.others()) == 1
    held.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_file_that_says_nothing_is_left_out(folder, content):
    here = Promises(folder)
    held = here.make("a", 100, 0)
    (file,) = folder.glob("*.json")
    file.write_bytes(content)
    assert here.others() == []
    held.release()


def test_without_a_folder_that_can_be_written_nothing_is_promised(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for here in (Promises(None), Promises(file / "engines")):
        with here.sizing():
            held = here.make("a", 100, 0)
        assert here.others() == []
        held.release()


def test_on_a_full_disk_nothing_is_promised_and_nothing_is_left(folder, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", write)
    held = Promises(folder).make("a", 100, 0)
    monkeypatch.undo()
    assert list(folder.glob("*.json")) == []
    held.release()


def test_a_pipe_in_the_folder_is_not_waited_for(folder):
    folder.mkdir(exist_ok=True)
    module.os.mkfifo(folder / "1-0.json")
    assert Promises(folder).others() == []


def test_one_engine_at_a_time_is_sized(folder, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    here = Promises(folder)
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    with here.sizing():
        assert not waits
        with here.sizing():  # another's, which is not waited for without end
            assert waits
    waits.clear()
    with here.sizing():
        assert not waits


def test_ranks_of_one_engine_do_not_count_each_other(folder):
    promises = Promises(folder)
    held = [promises.make("one", 5, 0, "e1"), promises.make("two", 7, 0, "e2")]
    assert [promise.promised for promise in promises.others("e1")] == [7]
    assert sorted(promise.promised for promise in promises.others("e3")) == [5, 7]
    assert sorted(promise.promised for promise in promises.others()) == [5, 7]
    for one in held:
        one.release()
