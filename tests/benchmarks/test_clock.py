"""A stopped process's clock stands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Works for a while, then sleeps; prints the clock's seconds, the wall's, and those of the stops.
PROGRAM = """
import time
from benchmarks.clock import RunningClock
clock = RunningClock()
begin, wall = clock(), time.monotonic()
print("ready", flush=True)
{work}
print(clock() - begin, time.monotonic() - wall, clock.stopped)
"""
BUSY = "end = time.process_time() + 0.6\nwhile time.process_time() < end: sum(range(1000))"
IDLE = "[time.sleep(0.02) for _ in range(30)]"


def test_time_in_which_it_was_stopped_does_not_count() -> None:
    for work in (BUSY, IDLE):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(work=work)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(2):
            time.sleep(0.1)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(process.pid, signal.SIGCONT)
        clock, wall, stopped = map(float, process.communicate(timeout=20)[0].split())
        assert 0.85 < stopped < wall
        assert abs(clock + stopped - wall) < 0.05
