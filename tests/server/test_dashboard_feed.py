"""The form of the dashboard's stream, and an example of it that the page's tests use.

`python tests/server/test_dashboard_feed.py` writes the example again.
"""

import itertools
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.slo import SLOScheduler
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.watch import CACHED, HOST, SHARED, Snapshot
from octavo.engine.watcher import Watcher
from octavo.params import SamplingParams
from octavo.server.dashboard_feed import (
    VERSION,
    EngineRow,
    Group,
    Latencies,
    Quantiles,
    Rates,
    Settings,
    Update,
)

EXAMPLE = Path(__file__).with_name("dashboard_example.json")
NAMES = {"r0": "chatcmpl-5e1c", "r3": "cmpl-77ab"}


def example_engine() -> Engine:
    """One that is short of memory: requests share, are swapped out, and wait."""
    limits = RunnerLimits(33, 4, 1024, 96, 256, num_host_blocks=25)
    clock = itertools.count(100.0, 0.01)
    config = EngineConfig(model="toy", max_num_seqs=5, preemption_mode="swap")
    return Engine(config, FakeRunner(limits), SLOScheduler(p99_itl_ms=50), lambda: next(clock))


def example() -> bytes:
    """An update after a deterministic history, as one line of JSON."""
    engine = example_engine()
    watcher, prefix = Watcher(engine), (5, 6, 7, 8) * 2
    for number in range(7):
        prompt = (*prefix, *range(10, 14 + 3 * number))
        params = SamplingParams(max_tokens=8 if number == 1 else 40, ignore_eos=True)
        engine.add_request(Submission(f"r{number}", prompt, params))
    for step in range(34):
        engine.step()
        if step % 6 == 0:
            watcher.view()
    view = watcher.view(("r3",))
    engine.scheduler.check()
    snapshot = msgspec.structs.replace(view.snapshot, seconds=0.0004)
    rates = Rates(0.0, 96.5, 0.82, 0.7, 0.9, 0.2222, 0.5, 34, 150, 3, 0, 21, 8, {"length": 1})
    update = Update(
        VERSION, 1767225600.5, 12, 0.25, 0,
        (EngineRow(0, None, 3, 3, 0.9, 0), EngineRow(1, "the model is being loaded", 0, 0, 0.0, 1)),
        Settings("toy", "1.0", "cpu", "slo", {"p99_itl_ms": 50.0}, "swap", True, 4, 32, 24, "fp32",
                 (Group("full", None),), 5, 2048, 96, 1),
        rates,
        Latencies(10.0, Quantiles(0.03, 0.05, 0.07, 7), Quantiles(0.01, 0.02, 0.04, 150),
                  Quantiles(0.21, 0.21, 0.21, 1)),
        msgspec.Raw(msgspec.json.encode(snapshot)), NAMES, "cmpl-77ab", view.followed[0],
    )  # fmt: skip
    return msgspec.json.encode(update) + b"\n"


def test_the_example_is_what_an_engine_sends():
    assert EXAMPLE.read_bytes() == example(), "write it again: see the docstring"


def test_the_example_has_one_of_everything():
    update = msgspec.json.decode(EXAMPLE.read_bytes(), type=Update)
    snapshot = msgspec.json.decode(update.snapshot, type=Snapshot)
    states = {row.state for row in snapshot.requests}
    assert states == {"running", "waiting", "swapped", "finished"}
    assert {"preempted", "admission"} <= {change.name for change in snapshot.changes}
    assert {flag for byte in snapshot.pool.flags for flag in (SHARED, CACHED) if byte & flag} == {
        SHARED,
        CACHED,
    }
    assert all(byte & HOST for byte in snapshot.host.flags)
    assert update.followed is not None
    assert set(update.names) <= {row.id for row in snapshot.requests}


if __name__ == "__main__":
    EXAMPLE.write_bytes(example())
