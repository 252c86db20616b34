"""How the harness and an engine's process talk: one JSON object per line. Standard library only.

    harness -> engine   (argument)  {"model": ..., ...}           the engine's options
    engine  -> harness  {"event": "ready", "startup_s": ..., "facts": {...}}
    harness -> engine   {"jobs": [[[ids...], max_tokens], ...]}
    engine  -> harness  {"event": "progress", "done": 16}         any number of times
    engine  -> harness  {"event": "result", "wall_s": ..., "latency_s": [...], ...}
    engine  -> harness  {"event": "error", "message": ...}        and the process ends
    harness closes the engine's standard input: the process ends

An engine's own output goes to standard error: the protocol keeps the real standard output.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.clock import RunningClock
from benchmarks.workloads import Job


@dataclass
class Outcome:
    """What one run of a workload gave.

    output_tokens: useful tokens only. latency_s: per request, in the workload's order, from the
    start of the run to the request's own end. kv: use of the KV cache through the run.
    """

    output_tokens: int
    latency_s: list[float]
    in_flight: float | None = None
    kv: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One engine, loaded."""

    facts: dict[str, Any]  # versions and settings, for the saved row

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        """All jobs at once; each generates exactly its max_tokens, end-of-text ignored.

        `done` may be told now and then how many jobs are complete.
        """
        ...

    def forget(self) -> None:
        """Empty any prefix cache, so that repetitions do the same work."""
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Be an engine's process: load, say so, run workloads until standard input closes."""
    clock = RunningClock()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        engine = load(json.loads(sys.argv[1]))
        # The first token of a tiny request ends the start-up; a second one warms the decode path.
        engine.run([Job(list(range(300, 308)), 1)], lambda count: None)
        started = time.time() - process_start()
        engine.run([Job(list(range(400, 432)), 8)], lambda count: None)
        _say(out, {"event": "ready", "startup_s": round(started, 3), "facts": engine.facts})
        for line in sys.stdin:
            jobs = [Job(prompt, count) for prompt, count in json.loads(line)["jobs"]]
            result = _measure(
                engine, jobs, clock, lambda n: _say(out, {"event": "progress", "done": n})
            )
            _say(out, {"event": "result", **result})
    except Exception as error:
        _say(out, {"event": "error", "message": f"{type(error).__name__}: {error}"})
        raise


def _end_with_parent(parent: int) -> None:
    """Do not go on computing for a harness that was killed: it would slow whatever runs next."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def process_start() -> float:
    """When this process was started, in seconds of the epoch (Linux; elsewhere: now)."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except OSError:
        return time.time()
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))


def _measure(
    engine: Engine, jobs: list[Job], clock: RunningClock, done: Callable[[int], None]
) -> dict[str, Any]:
    engine.forget()
    begin = clock()
    outcome = engine.run(jobs, done)
    wall = clock() - begin
    wanted = sum(job.max_tokens for job in jobs)
    if outcome.output_tokens != wanted:
        raise RuntimeError(f"{outcome.output_tokens} tokens came, {wanted} were asked for")
    return {"wall_s": wall, **asdict(outcome)}


def _say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
