"""An engine for the protocol's tests: a run takes no time; options can make it fail."""

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job


class Fake:
    """options: fail ("load" or "run"), short (tokens that go missing)."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("fail") == "load":
            raise OSError("no such model")
        self._options = options
        self.facts = {"build": "fake 1"}
        self.forgotten = 0

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        print("chatter that must not reach the protocol")
        print("nor this", file=sys.stderr)
        if self._options.get("fail") == "run" and len(jobs) > 1:
            raise MemoryError("full")
        done(len(jobs))
        tokens = sum(job.max_tokens for job in jobs)
        missing = self._options.get("short", 0) if len(jobs) > 1 else 0
        return Outcome(tokens - missing, [0.5] * len(jobs), kv={"forgotten": self.forgotten})

    def forget(self) -> None:
        self.forgotten += 1


if __name__ == "__main__":
    serve(Fake)
