"""Ctrl-C between two steps of an engine, and never within one.

A step that is cut in the middle leaves a plan in flight whose result never comes, and every later
step is refused. Not here: signals of other kinds, and handlers that a program installs itself.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if Ctrl-C came; so does the end of the block.

    A second Ctrl-C raises at once. Only where Python's own handler would act: in the main
    thread, with no other handler installed.
    """
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield _nothing
        return
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    def check() -> None:
        nonlocal count
        if count:
            count = 0
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def _nothing() -> None:
    pass
