"""What a rank on this machine is given. Workers at work: tests/engine/test_tensor_parallel.py."""

import time

import pytest
import torch
import zmq

from octavo.config import EngineConfig
from octavo.dist.rendezvous import Rendezvous
from octavo.engine.worker_launcher import LocalWorkers, Place
from octavo.engine.worker_messages import WorkerLaunch
from octavo.errors import ConfigError


def config(**changes: object) -> EngineConfig:
    options = {"model": "m", "device": "cpu", "tensor_parallel_size": 2, **changes}
    return EngineConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threads", "variable", "size", "each"),
    [(8, None, 2, 4), (8, "2", 2, 4), (3, None, 2, 1), (1, None, 4, 1), (None, "6", 2, 3),
     (None, "1", 2, 1), (None, None, 2, 3), (None, "4,2", 2, 3)],
)  # fmt: skip
def test_ranks_divide_the_threads_that_one_alone_would_have(
    monkeypatch: pytest.MonkeyPatch,
    threads: int | None, variable: str | None, size: int, each: int,
) -> None:  # fmt: skip
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    shares = tuple(tuple(range(3 * rank, 3 * rank + 3)) for rank in range(size))
    monkeypatch.setattr("octavo.topology.shares", lambda count: shares[:count])
    monkeypatch.setattr("octavo.topology.count_cores", len)
    workers = LocalWorkers(config(threads=threads, tensor_parallel_size=size))
    for rank in range(size):
        place = workers.place(rank)
        assert (place.here, place.device, place.threads) == (size, "cpu", each)
        assert place.processors == shares[rank]


def test_each_rank_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    workers = LocalWorkers(config(device="cuda"))
    assert [workers.place(rank).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert workers.place(1).processors == ()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and this machine has 1 GPU"):
        LocalWorkers(config(device="cuda"))


@pytest.mark.slow
def test_a_worker_says_how_it_ended_and_leaves_nothing() -> None:
    context = zmq.Context()
    sockets = [context.socket(kind) for kind in (zmq.XPUB, zmq.PULL)]
    workers = LocalWorkers(config())
    try:
        plans, reports = workers.bind(*sockets)
        launch = WorkerLaunch(
            config(), 1, 2, 2, Rendezvous(file=workers.place(1).meeting.file), plans, reports, "e"
        )
        worker = workers.start(launch, Place(Rendezvous(), 2, "cpu"))
        assert worker.how_it_ended() is None
        assert worker.name.startswith("process ")
        worker.kill()
        assert worker.how_it_ended() == "was killed by SIGKILL"
        worker.kill()
        orphan = workers.start(launch, Place(Rendezvous(), 2, "cpu"))
        workers.close()  # its standard input is closed: as if this process had ended
        while orphan.how_it_ended() is None:
            time.sleep(0.01)
        assert orphan.how_it_ended() == "ended with exit code 1"
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
        workers.close()
