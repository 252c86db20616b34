"""Groups over shared memory: of processes, which may be killed, and of those that cannot share.

The other ranks are forks of this process, which costs no import. What the operations compute is
tested with the kernel.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from octavo.dist import shared_memory
from octavo.dist.base import Group, sum_in_rank_order
from octavo.dist.create import create_group
from octavo.dist.rendezvous import Rendezvous
from octavo.dist.shared_memory import SharedMemoryGroup
from octavo.errors import PeerLostError

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs memfd (Linux)")


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """A fork that runs `work`, and must end with 0 unless it is killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 37, generator=torch.Generator().manual_seed(rank)).bfloat16()


def use(group: Group) -> None:
    """Every operation, with the results that they must have."""
    for rows in (1, 64, 3000):
        parts = [part(rank, rows) for rank in range(group.size)]
        assert torch.equal(group.all_reduce(parts[group.rank].clone()), sum_in_rank_order(parts))
        assert torch.equal(group.all_gather(parts[group.rank]), torch.cat(parts, 1))
        assert torch.equal(group.broadcast(parts[group.rank]), parts[0])
    doubles = [part(rank, 4).double() for rank in range(group.size)]  # no kernel sums these
    sums = group.all_reduce(doubles[group.rank].clone())
    assert torch.equal(sums, sum_in_rank_order(doubles))
    columns = part(group.rank, 8).t()  # not contiguous
    assert torch.equal(group.all_reduce(columns), group.all_reduce(columns.contiguous()))
    assert group.min(2**40 - group.rank) == 2**40 - group.size + 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_compute_together(size: int) -> None:
    mine = SharedMemoryGroup.create(size)
    path = mine.path
    with contextlib.ExitStack() as stack:
        for rank in range(1, size):
            stack.enter_context(forked(partial(follow, path, rank, size, use)))
        use(mine)
    mine.close()


def follow(path: str, rank: int, size: int, work: Callable[[Group], object]) -> None:
    work(SharedMemoryGroup.join(path, rank, size))


def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    """Of rank 0, whose process watches the others, and of a third rank."""
    mine = SharedMemoryGroup.create(3)
    path = mine.path

    def works_on(group: Group) -> None:
        group.min(1)
        with pytest.raises(PeerLostError, match="rank 2 of 3: the group was aborted"):
            group.all_reduce(part(2, 5))

    def hangs(group: Group) -> None:
        group.min(1)
        signal.pause()

    with (
        forked(partial(follow, path, 2, 3, works_on)),
        forked(partial(follow, path, 1, 3, hangs)) as killed,
    ):
        mine.min(1)
        before = mine.operations
        watch = threading.Thread(target=kill, args=(killed, mine, before + 1))
        watch.start()
        with pytest.raises(PeerLostError, match="rank 0 of 3: the group was aborted"):
            mine.all_reduce(part(0, 5))
        watch.join()
    mine.close()


def kill(pid: int, group: Group, operations: int) -> None:
    """As the executor does, once rank 0 waits."""
    while group.operations < operations:
        pass
    os.kill(pid, signal.SIGKILL)
    group.abort()


def test_a_rank_that_leaves_is_an_error_of_the_others() -> None:
    mine = SharedMemoryGroup.create(2)

    def leaves(group: Group) -> None:
        group.min(1)
        group.close()

    with forked(partial(follow, mine.path, 1, 2, leaves)):
        mine.min(1)
        with pytest.raises(PeerLostError):
            mine.min(1)
    mine.close()


def test_the_memory_has_no_name_and_cannot_be_opened_later() -> None:
    before = set(os.listdir("/dev/shm"))
    group = SharedMemoryGroup.create(2)
    path = group.path
    assert os.stat(path).st_nlink == 0
    assert set(os.listdir("/dev/shm")) == before
    group.close()
    group.close()
    with pytest.raises(FileNotFoundError):
        SharedMemoryGroup.join(path, 1, 2)


def meet(folder: Path, size: int) -> list[str]:
    """The kinds of the groups that ranks form, as threads; each is used."""
    meeting = Rendezvous(file=str(folder / "meeting"))

    def rank(number: int) -> str:
        group = create_group(meeting, number, size, "cpu")
        use(group)
        kind = group.kind
        group.min(1)  # all are done
        group.close()
        return kind

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_ranks_on_one_machine_share_memory(tmp_path: Path) -> None:
    assert meet(tmp_path, 2) == ["shared memory"] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_gloo_where_a_rank_cannot_share(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container of its own, where /proc has other processes; or no memory is left."""
    name = "create" if rank == 0 else "join"
    ours = getattr(SharedMemoryGroup, name)

    def fails(*given: object) -> object:
        if rank == 0 or given[1] == rank:
            raise FileNotFoundError(2, "No such file or directory")
        return ours(*given)

    monkeypatch.setattr(SharedMemoryGroup, name, fails)
    assert meet(tmp_path, 3) == ["gloo"] * 3
