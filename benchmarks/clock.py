"""Seconds that this process was allowed to run: its clock pauses while it is stopped (SIGSTOP).

Several measurements may alternate on one machine, the others stopped. Time spent stopped would
look like one step that takes seconds.
"""

import os
import signal
import threading
import time

_TICK = 0.005


class RunningClock:
    """Call it for seconds, monotonic. One per process, made in the main thread.

    A stop is seen by the SIGCONT that ends it. When it began is known to 5 ms, or, where a long
    call keeps Python from looking at the time, from the processor time used since.
    """

    def __init__(self) -> None:
        self.stopped = 0.0  # seconds in all
        self._cores = len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._out, into = os.pipe2(os.O_NONBLOCK)
        signal.signal(signal.SIGCONT, lambda *_: None)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        self._wall, self._used = time.monotonic(), time.process_time()
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self) -> float:
        with self._lock:
            wall, used = time.monotonic(), time.process_time()
            if self._continued():
                ran = (used - self._used) / self._cores
                self.stopped += max(0.0, wall - self._wall - ran)
            self._wall, self._used = wall, used
            return wall - self.stopped

    def _continued(self) -> bool:
        try:
            return signal.SIGCONT in os.read(self._out, 512)
        except BlockingIOError:
            return False

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK)
            self()
