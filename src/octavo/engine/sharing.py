"""Lets several threads share an engine: one of them steps, the others wait for their outputs.

An engine is used by one thread at a time. That thread keeps stepping until its own requests are
finished, because each thread that enters a kernel creates its own OpenMP threads.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from octavo.engine.interrupts import interrupts_deferred


class FairLock:
    """A lock that threads acquire in FIFO order.

    `threading.Lock` may be acquired repeatedly by the thread that has just released it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()  # one for each waiting thread

    def acquire(self) -> None:
        gate = threading.Lock()
        with self._mutex:
            if not self._held:
                self._held = True
                return
            gate.acquire()
            self._queue.append(gate)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C
            self._leave(gate)
            raise

    def try_acquire(self) -> bool:
        """Never blocks. False if the lock is held, even by this thread."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            free = not self._held
            self._held = True
            return free
        finally:
            self._mutex.release()

    def release(self) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False

    def _leave(self, gate: threading.Lock) -> None:
        with self._mutex:
            if gate in self._queue:
                self._queue.remove(gate)
                return
        self.release()  # it had been handed over


class SharedSteps:
    """`step` advances the engine once; it is called by one thread at a time."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._engine = FairLock()
        self._stepper = threading.Condition()
        self._stepping = False
        self._later: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """For whatever touches the engine between two steps."""
        self._engine.acquire()
        try:
            self._run_later()
            yield
        finally:
            self._release()

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` before the next step, and now if the engine is free.

        Never waits: the garbage collector may close a stream while this very thread steps.
        """
        self._later.append(action)
        if self._engine.try_acquire():
            self._release()

    def advance(self, ready: Callable[[], bool]) -> None:
        """Return once `ready`: step until then, or wait while another thread steps.

        Ctrl-C raises between two steps; outputs of the last one are then ready.
        """
        if ready():
            return
        with self._stepper:
            while self._stepping and not ready():
                self._stepper.wait()
            if ready():
                return
            self._stepping = True
        try:
            with interrupts_deferred() as check_interrupt:
                while not ready():
                    with self.exclusive():
                        self._step()
                    check_interrupt()
        finally:
            with self._stepper:
                self._stepping = False
                self._stepper.notify_all()

    def notify(self) -> None:
        """Wake the threads that wait, to see whether they are ready."""
        with self._stepper:
            self._stepper.notify_all()

    def _release(self) -> None:
        """Release the engine, and leave no action undone that came meanwhile."""
        while True:
            try:
                self._run_later()
            finally:
                self._engine.release()
            if not self._later or not self._engine.try_acquire():
                return

    def _run_later(self) -> None:
        while self._later:
            self._later.popleft()()
