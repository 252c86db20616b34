"""How rank 0 finds out what is wrong with the others: with workers that are ends of sockets."""

import os
import select
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan
from octavo.dist.base import Single
from octavo.engine.messages import Fault
from octavo.engine.worker_launcher import LocalWorkers, Place, WorkerProcess
from octavo.engine.worker_messages import (
    STOP,
    Failed,
    Loaded,
    Started,
    WorkerBeat,
    WorkerLaunch,
    WorkerReport,
)
from octavo.engine.worker_plans import PlanReader
from octavo.engine.workers import Limits, Workers
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    NotEnoughMemoryError,
    OctavoError,
    PeerLostError,
)


class Process:
    """A worker that the test plays."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self.name = f"process {100 * launch.rank}"
        self.rank, self.ended, self.was_killed = launch.rank, "", False
        self._context = zmq.Context()
        self._reports = self._context.socket(zmq.PUSH)
        self._reports.connect(launch.reports)
        self.plans = self._context.socket(zmq.SUB)
        self.plans.connect(launch.plans)
        self.plans.subscribe(b"")

    def send(self, *reports: WorkerReport) -> None:
        for report in reports:
            self._reports.send(msgspec.msgpack.encode(report))

    def how_it_ended(self) -> str | None:
        return self.ended or None

    def kill(self) -> None:
        self.was_killed = self.was_killed or not self.ended
        self.ended = self.ended or "was killed by SIGKILL"

    def close(self) -> None:
        self._context.destroy(linger=0)


class Launcher(LocalWorkers):
    def __init__(self, size: int) -> None:
        super().__init__(EngineConfig(model="m", device="cpu", tensor_parallel_size=size))
        self.processes: dict[int, Process] = {}

    def start(self, launch: WorkerLaunch, place: Place) -> WorkerProcess:
        self.processes[launch.rank] = Process(launch)
        return self.processes[launch.rank]


class Team:
    """Rank 0's side, and the workers that the test plays."""

    def __init__(self, size: int, limits: Limits | None) -> None:
        self.launcher = Launcher(size)
        self.workers = Workers(self.launcher, limits)
        config = EngineConfig(model="m", device="cpu", tensor_parallel_size=size)
        self.launches = {}
        for rank in range(1, size):
            place = self.launcher.place(rank)
            launch = WorkerLaunch(config, rank, size, size, place.meeting, *self.workers.addresses,
                                  "e")  # fmt: skip
            self.launches[rank] = (launch, place)
        self.workers.start(self.launches)
        self.processes = self.launcher.processes

    def failure(self) -> OctavoError:
        """Wait until something has gone wrong."""
        select.select([self.workers.failure_fd], [], [])
        with pytest.raises(OctavoError) as caught:
            self.workers.check()
        assert all(process.ended for process in self.processes.values())
        return caught.value

    def close(self) -> None:
        self.workers.close()
        for process in self.processes.values():
            process.close()


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    size, limits = getattr(request, "param", (3, None))
    made = Team(size, limits)
    yield made
    made.close()


class StuckGroup:
    """One in which rank 0 waits."""

    rank, size, kind = 0, 3, "stuck"

    def __init__(self, operations: int = 0) -> None:
        self.operations, self.aborted = operations, False

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None: ...


def test_a_killed_worker_is_the_reason_and_ends_the_others(team: Team) -> None:
    group = StuckGroup()
    team.workers.meet(lambda: group)
    team.processes[1].ended = "was killed by SIGKILL"
    # The other one only notices that its peer is gone, and says so first.
    fault = Fault("PeerLostError", "an operation over gloo failed: Connection closed by peer")
    team.processes[2].send(Failed(2, fault, follows=True))
    team.processes[2].ended = "ended with exit code 1"
    error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason == "rank 1 (process 100) was killed by SIGKILL"
    assert group.aborted
    assert team.workers.cause_of(PeerLostError("x")) is error


def test_a_worker_s_own_reason_goes_before_all_others(team: Team) -> None:
    team.processes[1].ended = "ended with exit code 1"
    team.processes[2].ended = "was killed by SIGKILL"
    team.processes[1].send(Failed(1, Fault.of(RuntimeError("no such kernel"))))
    error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason == "rank 1: RuntimeError: no such kernel"


def test_a_mistake_of_the_operator_s_is_one_here_too(team: Team) -> None:
    team.processes[2].send(Started(2), Failed(2, Fault.of(NotEnoughMemoryError("too little"))))
    error = team.failure()
    assert type(error) is NotEnoughMemoryError
    assert str(error) == "rank 2: too little"
    assert team.processes[1].was_killed


def test_a_worker_that_ends_without_a_word_is_named_with_its_exit_code(team: Team) -> None:
    team.processes[2].ended = "ended with exit code 3"
    error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason == "rank 2 (process 200) ended with exit code 3"


@pytest.mark.parametrize("team", [(2, Limits(silent=0.3))], indirect=True)
def test_a_silent_worker_is_ended(team: Team) -> None:
    """As one that was stopped by SIGSTOP; one that has not begun may be silent."""
    team.processes[1].send(Started(1), WorkerBeat(1, 0))
    error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason == "rank 1 (process 100) has been silent for more than 0.3 s"
    assert team.processes[1].was_killed


@pytest.mark.parametrize("team", [(3, Limits(stall=0.5))], indirect=True)
@pytest.mark.parametrize(
    ("counts", "who"),
    [({1: 4, 2: 5}, "rank 1 (process 100) hangs"), ({1: 5, 2: 5}, "all ranks hang"),
     ({1: 6, 2: 6}, "rank 0 hangs"),
     ({1: 4, 2: 4}, "rank 1 (process 100) and rank 2 (process 200) hang")],
)  # fmt: skip
def test_the_ranks_that_others_wait_for_are_named(
    team: Team, counts: dict[int, int], who: str
) -> None:
    team.workers.meet(lambda: StuckGroup(5))
    for rank, count in counts.items():
        team.processes[rank].send(Started(rank), WorkerBeat(rank, count))
    with team.workers.running():
        error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason == f"{who}: no rank has begun an operation for more than 0.5 s of a step"


@pytest.mark.parametrize("team", [(3, Limits(stall=0.3))], indirect=True)
def test_short_steps_that_begin_no_operation_are_no_stall(team: Team) -> None:
    """As captured ones on a GPU, which the watch always finds running."""
    team.workers.meet(lambda: StuckGroup(5))
    for _ in range(50):
        with team.workers.running():
            time.sleep(0.02)
    team.workers.check()


def test_a_wait_for_ranks_that_do_not_come_ends_with_their_reason(team: Team) -> None:
    never = threading.Event()

    def form() -> Single:
        never.wait()
        return Single()

    team.processes[1].ended = "was killed by SIGSEGV"
    try:
        with pytest.raises(EngineDeadError, match="was killed by SIGSEGV"):
            team.workers.meet(form)
        with pytest.raises(EngineDeadError, match="was killed by SIGSEGV"):
            team.workers.wait_until_loaded(False)
    finally:
        never.set()


def test_a_report_that_cannot_be_read_ends_all(team: Team) -> None:
    team.processes[1]._reports.send(b"\xff")
    error = team.failure()
    assert isinstance(error, EngineDeadError)
    assert error.reason.startswith("its ranks can no longer be watched: ")


def test_plans_reach_all_workers_and_the_last_frame_stops_them(team: Team) -> None:
    for rank, process in team.processes.items():
        process.send(Started(rank), Loaded(rank))
    team.workers.wait_until_loaded(True)
    team.workers.send(StepPlan(7, ()))
    readers = {rank: PlanReader() for rank in team.processes}
    for rank, process in team.processes.items():
        assert readers[rank].read(process.plans.recv()).step == 7

    def end(process: Process) -> None:
        assert process.plans.recv() == STOP
        process.ended = "ended with exit code 0"

    threads = [threading.Thread(target=end, args=(p,)) for p in team.processes.values()]
    for thread in threads:
        thread.start()
    team.workers.close()
    for thread in threads:
        thread.join()
    assert not any(process.was_killed for process in team.processes.values())
    team.workers.close()


def test_what_was_opened_is_closed() -> None:
    files = set(os.listdir("/proc/self/fd"))
    Team(3, None).close()
    assert set(os.listdir("/proc/self/fd")) - files == set()


def test_an_address_that_cannot_be_bound_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(plans: object, reports: object) -> tuple[str, str]:
        raise ConfigError("no folder")

    launcher = Launcher(2)
    monkeypatch.setattr(launcher, "bind", bind)
    files = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="no folder"):
        Workers(launcher)
    assert set(os.listdir("/proc/self/fd")) - files == set()
