"""The engine's side of the border, one process at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine as EngineCore
from octavo.engine.fake import FakeRunner
from octavo.engine.messages import (
    Abort,
    Accepted,
    Add,
    Beat,
    Dead,
    Fault,
    Launch,
    Look,
    Ready,
    Refused,
    Report,
    Stats,
    Step,
    Stop,
)
from octavo.engine.process import Loop
from octavo.engine.watch import View
from octavo.engine.watcher import Watcher
from octavo.errors import EngineDeadError, QueueFullError, RequestError
from octavo.params import SamplingParams
from serving import PYTHONPATH, wait_until, write_model

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


class Engine:
    """A process, and both ends of its sockets."""

    def __init__(self, folder: Path, sockets: Path | None = None, **options: object) -> None:
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PUSH)
        self.outbox = self.context.socket(zmq.PULL)
        names = [f"ipc://{sockets or folder}/{name}" for name in ("in", "out")]
        self.inbox.connect(names[0])
        self.outbox.bind(names[1])
        config = EngineConfig(model=str(folder), swap_space=0, **options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )  # fmt: skip
        launch = Launch(config, names[0], names[1], "fake_engine:create")
        self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.context.destroy(linger=0)

    def send(self, command: object) -> None:
        self.inbox.send(msgspec.msgpack.encode(command))

    def add(self, name: str, prompt: str = "x", **fields: object) -> None:
        params = PARAMS.with_(**fields)
        self.submit(name, prompt.encode(), params)

    def submit(self, name: str, ids: Iterable[int], params: SamplingParams = PARAMS) -> None:
        self.send(Add(Submission(name, tuple(ids), params, arrival_time=time.monotonic())))

    def next(self, kind: type, seconds: float = 20) -> object:
        """The next report of this kind."""
        while True:
            assert self.outbox.poll(seconds * 1000), f"no {kind.__name__} came"
            report = msgspec.msgpack.decode(self.outbox.recv(), type=Report)
            if isinstance(report, kind):
                return report

    def tokens(self, count: int) -> dict[str, list[int]]:
        """Read steps until `count` requests have ended."""
        found: dict[str, list[int]] = {}
        while count:
            for update in self.next(Step).updates:
                found.setdefault(update.request_id, []).extend(update.token_ids)
                count -= update.finish_reason is not None
        return found


@pytest.fixture
def engine(tmp_path):
    with Engine(write_model(tmp_path)) as found:
        yield found


def test_it_says_what_it_can_do_answers_and_stops(engine):
    ready = engine.next(Ready)
    assert ready.capabilities.limits.max_model_len == 512
    assert ready.capabilities.scheduler == "fifo"
    assert not ready.capabilities.heeds_priority
    assert ready.capabilities.explain
    engine.add("a")
    engine.add("b", n=1, max_tokens=3)
    assert engine.tokens(2) == {"a": [97, 98, 99, 100, 101], "b": [97, 98, 99]}
    engine.send(Stop())
    assert engine.process.wait(10) == 0
    assert engine.process.stderr.read() == b""


@pytest.mark.parametrize("loading", [False, True], ids=["serves", "loads"])
def test_when_the_web_process_is_killed_nothing_of_it_is_left(tmp_path, loading):
    (sockets := tmp_path / "octavo-12345678").mkdir()
    folder = write_model(tmp_path, load_seconds=60 if loading else 0)
    with Engine(folder, sockets) as engine:
        if loading:
            wait_until((sockets / "in").exists)
        else:
            engine.next(Ready)
        engine.process.stdin.close()
        assert engine.process.wait(10) == int(loading)
        assert not sockets.exists()
        assert b"the web process has ended; the engine stops" in engine.process.stderr.read()
        engine.process.stderr.close()
        engine.process.stderr = engine.process.stdin = None


@pytest.mark.parametrize("said", [b"", b'{"build": '], ids=["nothing", "half"])
def test_a_web_process_that_ends_before_it_says_what_to_load(said):
    done = subprocess.run(
        [sys.executable, "-m", "octavo.engine.process"], input=said, capture_output=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"the web process has ended before it said what to load" in done.stderr


def test_commands_act_between_steps(engine):
    engine.next(Ready)
    engine.add("slow", "!slow", max_tokens=400)
    engine.next(Step)
    engine.add("other", "!slow", max_tokens=2)
    assert engine.tokens(1)["other"] == [97, 98]
    engine.send(Abort(["slow", "unknown"]))
    stats = engine.next(Stats).stats
    while stats.running:
        stats = engine.next(Stats).stats
    assert stats.finished["abort"] == 1
    assert stats.kv_blocks_usage == 0


def test_it_tells_what_it_refuses_and_goes_on(engine):
    engine.next(Ready)
    engine.add("same", "!slow", max_tokens=400)
    assert engine.next(Accepted).request_ids == ["same"]
    engine.add("same")
    refused = engine.next(Refused)
    assert refused.request_id == "same"
    assert type(refused.fault.error()) is RequestError
    assert "in flight" in refused.fault.message
    engine.add("c")
    assert engine.next(Accepted).request_ids == ["c"]
    assert engine.tokens(1)["c"][:2] == [97, 98]


def test_what_the_policy_refuses_says_which_error_it_is(tmp_path):
    policy = "slo,p99_ttft_ms=1,shed=true"
    with Engine(write_model(tmp_path), max_num_seqs=1, scheduler=policy) as engine:
        ready = engine.next(Ready)
        assert "shed" in {gauge.name for gauge in ready.capabilities.gauges}
        for name in ("runs", "waits"):
            engine.add(name, "!slow", max_tokens=400)
            engine.next(Step)
        engine.add("late")
        error = engine.next(Refused).fault.error()
        assert type(error) is QueueFullError
        assert "requests wait" in str(error)
        while not engine.next(Stats).stats.policy["shed"]:
            pass


def test_the_queue_is_not_bounded_on_this_side(tmp_path):
    with Engine(write_model(tmp_path), max_num_seqs=1, max_waiting=0) as engine:
        engine.next(Ready)
        for i in range(5):
            engine.add(str(i))
        assert len(engine.tokens(5)) == 5


def test_it_sends_a_beat_even_when_idle(engine):
    engine.next(Ready)
    engine.next(Beat)
    engine.next(Beat)


def test_it_leaves_when_the_web_process_is_gone(engine):
    engine.next(Ready)
    engine.add("slow", "!slow", max_tokens=400)
    engine.next(Step)
    engine.process.stdin.close()
    assert engine.process.wait(10) == 0
    engine.process.stdin = None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_web_process_s_business(engine, number):
    engine.next(Ready)
    engine.process.send_signal(number)
    engine.add("a")
    assert engine.tokens(1)
    assert engine.process.poll() is None


def test_a_step_that_fails_is_reported_before_it_dies(engine):
    engine.next(Ready)
    engine.add("a", "!raise")
    dead = engine.next(Dead)
    assert dead.fault == Fault("EngineDeadError", "MemoryError: told to")
    assert engine.process.wait(10) == 1


def test_a_load_that_fails_is_reported(tmp_path):
    folder = write_model(tmp_path)
    (folder / "broken").touch()
    with Engine(folder) as engine:
        dead = engine.next(Dead)
        assert dead.fault == Fault("CheckpointError", "this checkpoint was told to be broken")
        assert engine.process.wait(10) == 1
        assert engine.process.stderr.read() == b""
    (folder / "broken").unlink()
    (folder / "fake.json").write_text(json.dumps({}))
    with Engine(folder) as engine:
        dead = engine.next(Dead)
        assert dead.fault == Fault("EngineDeadError", "KeyError: 'vocab_size'")
        assert engine.process.wait(10) == 1
        assert b"Traceback" in engine.process.stderr.read()


def test_the_rates_of_an_idle_engine_fall_to_zero_and_then_it_sleeps(monkeypatch):
    """On a clock of its own: each wait takes the time that it may take."""
    now, waits = [100.0], []

    class Poller:
        def register(self, *args):
            pass

        def poll(self, milliseconds):
            if milliseconds is None:
                loop._stop = True
                return {"parent": 1}
            waits.append(milliseconds)
            now[0] += milliseconds / 1000
            return {}

    def step_takes_time(plan):
        now[0] += 0.5
        return run(plan)

    monkeypatch.setattr("octavo.engine.process.zmq.Poller", Poller)
    limits = RunnerLimits(257, 16, 1, 1024, 256)
    runner = FakeRunner()
    runner.limits = limits
    config = EngineConfig(swap_space=0)
    engine = EngineCore(config, runner, create_policy("fifo"), clock=lambda: now[0])
    run = runner.execute
    monkeypatch.setattr(runner, "execute", step_takes_time)
    engine.add_request(Submission("r", (1, 2, 3), PARAMS, arrival_time=now[0]))
    sent = []
    outbox = SimpleNamespace(send=sent.append)
    with open(os.devnull, "rb") as parent:
        loop = Loop(engine, object(), outbox, parent)
        loop.run()
    rates = [report.stats.throughput for report in sent if isinstance(report, Stats)]
    usage = [report.stats.gpu_utilization for report in sent if isinstance(report, Stats)]
    peak = rates.index(max(rates))
    assert rates[peak] > 1
    assert rates[peak:] == sorted(rates[peak:], reverse=True)  # falls all the time
    assert rates[-1] == usage[-1] == 0
    assert len(set(rates[peak:])) > 5
    assert sum(waits) >= 10_000  # the window
    assert now[0] < 100 + 20


def test_a_view_is_computed_when_it_is_asked_for_and_never_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = []

    def view(self: Watcher, followed: tuple[str, ...]) -> View:
        views.append(followed)
        return made(self, followed)

    made = Watcher.view
    monkeypatch.setattr(Watcher, "view", view)
    engine = EngineCore(EngineConfig(swap_space=0), FakeRunner(), create_policy("fifo"))
    context = zmq.Context()
    ends = [context.socket(kind) for kind in (zmq.PULL, zmq.PUSH)]
    ends[0].bind(f"ipc://{tmp_path}/in")
    ends[1].connect(f"ipc://{tmp_path}/in")
    encode, sent = msgspec.msgpack.encode, []

    def send(report: object) -> None:
        sent.append(report)
        if isinstance(report, Step) and report.updates[0].finish_reason:
            ended = report.updates[0].request_id
            then = (Add(Submission("b", (4,), PARAMS)), Look(("b",))) if ended == "a" else (Stop(),)
            for command in then:
                ends[1].send(encode(command))

    ends[1].send(encode(Add(Submission("a", (1, 2, 3), PARAMS))))
    try:
        parent_end, other = os.pipe()
        with open(parent_end, "rb") as parent:
            loop = Loop(engine, ends[0], SimpleNamespace(send=send), parent)
            loop.run()
        os.close(other)
    finally:
        context.destroy(linger=0)
    assert views == [("b",)]
    (found,) = [report for report in sent if isinstance(report, View)]
    assert found.followed[0].id == "b"
    assert any(row.id == "a" and row.reason == "length" for row in found.snapshot.requests)
    steps = [n for n, report in enumerate(sent) if isinstance(report, Step)]
    assert sum(n < sent.index(found) for n in steps) >= 5  # those of `a` came before


def test_an_executor_that_fails_while_nothing_runs_ends_the_loop(tmp_path: Path) -> None:
    """As one of ranks, of which one is killed between two requests."""
    readable, writable = os.pipe()

    class Failing(FakeRunner):
        failure_fd = readable

        def check(self) -> None:
            raise EngineDeadError("rank 1 (process 7) was killed by SIGKILL")

    engine = EngineCore(EngineConfig(swap_space=0), Failing(), create_policy("fifo"))
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(f"ipc://{tmp_path}/in")
    parent_end, other = os.pipe()
    try:
        with open(parent_end, "rb") as parent:
            loop = Loop(engine, inbox, SimpleNamespace(send=lambda report: None), parent)
            os.write(writable, b"!")
            with pytest.raises(EngineDeadError) as caught:
                loop.run()
        assert caught.value.reason == "rank 1 (process 7) was killed by SIGKILL"
        assert engine.dead == caught.value.reason
    finally:
        for end in (readable, writable, other):
            os.close(end)
        context.destroy(linger=0)
