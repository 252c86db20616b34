"""Starts child interpreters, and tracks which process an object belongs to.

A child has its parent's import path, and never imports from the working folder, where a user's
files may have the names of modules.
"""

import os
import sys
from collections.abc import Collection
from pathlib import Path
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

_PACKAGE_ROOT = str(Path(__file__).parents[1])


def module_command(module: str, *arguments: str, processors: Collection[int] = ()) -> list[str]:
    """The command that runs `module` as `python -m` does, with this process's import path.

    `-m` itself would put the working folder first; `-P`, which forbids that, is of Python 3.11.
    Until the path is set, the code imports only `sys`, which is built in.

    processors: those that the child and its children may use (see `topology.shares`); none: as
    this process. They are set before anything counts them, as OpenMP does when it is loaded.
    """
    bind = f"import os; os.sched_setaffinity(0, {sorted(processors)}); " if processors else ""
    code = (
        f"import sys; sys.path[:] = {import_path()!a}; {bind}import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, *_args_from_interpreter_flags(), "-c", code, *arguments]


def import_path() -> list[str]:
    """`sys.path` without what `python -m` and `python -c` put first: the working folder.

    Where the package itself lies there, that folder stays, as the last one.
    """
    given = [place for place in sys.path if isinstance(place, str)]
    if given and given[0] and os.path.abspath(given[0]) == _working_folder():
        del given[0]
    path = [os.path.abspath(place) for place in given if place]
    return path if _PACKAGE_ROOT in path else [*path, _PACKAGE_ROOT]


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


class Owner:
    """The process that created an object; only that process may use it.

    A fork copies the memory but none of the threads, and shares the sockets and the children.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def complaint(self) -> str:
        return (
            f"{self._what} was made in process {self._pid} and is used in its fork, process "
            f"{os.getpid()}; make it after the fork, or use the start method 'spawn'"
        )
