"""Sums over gloo: in rank order, so that a row's bits do not depend on the rows beside it.

The ranks are threads of this process: gloo connects them as it connects processes.
"""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from octavo.dist import torch_group
from octavo.dist.base import Group, sum_in_rank_order
from octavo.dist.create import create_group
from octavo.dist.gloo import gloo_group
from octavo.dist.rendezvous import Rendezvous, free_port
from octavo.errors import ConfigError, PeerLostError

T = TypeVar("T")


def on_ranks(size: int, meeting: Rendezvous, work: Callable[[Group], T]) -> list[T]:
    def rank(number: int) -> T:
        group = gloo_group(meeting, number, size)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.arange(-3, 3).repeat(columns)[:columns]  # so that the order matters
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_s_sum_is_the_same_bits_in_any_message(size: int, tmp_path: Path) -> None:
    """Alone, first, last, in messages that are gathered and in those that are scattered."""
    rows, columns = 300, 333

    def work(group: Group) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            whole = part(group.rank, rows, columns, dtype)
            parts = [part(rank, rows, columns, dtype) for rank in range(size)]
            expected = sum_in_rank_order(parts)
            assert (
                whole.numel() * whole.element_size() > torch_group.SMALL_BYTES or dtype.itemsize < 4
            )
            for begin, end in ((0, rows), (0, 1), (7, 8), (299, 300), (5, 70), (150, 300)):
                got = group.all_reduce(whole[begin:end].contiguous())
                assert torch.equal(got, expected[begin:end]), (begin, end)

    on_ranks(size, Rendezvous(file=str(tmp_path / "store")), work)


def test_large_messages_are_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that the ranks do not divide, on either path."""
    for small in (0, 2**30):
        monkeypatch.setattr(torch_group, "SMALL_BYTES", small)

        def work(group: Group) -> None:
            for rows, columns in ((1, 1), (2, 5), (3, 7), (65, 33)):
                parts = [part(rank, rows, columns, torch.float16) for rank in range(3)]
                got = group.all_reduce(parts[group.rank].clone())
                assert got.shape == (rows, columns)
                assert torch.equal(got, sum_in_rank_order(parts))

        on_ranks(3, Rendezvous(file=str(tmp_path / f"store{small}")), work)


def test_gather_broadcast_and_min_over_a_port() -> None:
    def work(group: Group) -> int:
        x = torch.arange(6.0).view(2, 3) + 10 * group.rank
        assert group.all_gather(x).tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert group.broadcast(x).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert group.min(2**40 - group.rank) == 2**40 - 1
        return group.operations

    host = "127.0.0.1"
    meeting = Rendezvous(address=host, port=free_port(host), host=host)
    assert on_ranks(2, meeting, work) == [3, 3]


def test_a_taken_port_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        meeting = Rendezvous(address="127.0.0.1", port=port, host="127.0.0.1")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use; stop what"):
            create_group(meeting, 0, 2, "cpu")


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    meeting = Rendezvous(address="192.0.2.1", port=29500, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"192.0.2.1:29500: .*an address of this machine"):
        create_group(meeting, 0, 2, "cpu")


def test_a_wait_for_a_rank_that_hangs_can_be_aborted(tmp_path: Path) -> None:
    waits, done = threading.Event(), threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:  # begins nothing
            done.wait(60)
            return
        threading.Thread(target=lambda: (waits.wait(60), group.abort())).start()
        waits.set()
        try:
            with pytest.raises(PeerLostError, match="aborted"):
                group.min(1)
            with pytest.raises(PeerLostError, match="aborted"):
                group.min(1)
        finally:
            done.set()

    on_ranks(2, Rendezvous(file=str(tmp_path / "store")), work)


def test_a_rank_that_leaves_is_an_error_of_the_others(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        group.min(1)
        if group.rank == 0:
            with pytest.raises(PeerLostError, match="over gloo failed"):
                group.min(1)

    on_ranks(2, Rendezvous(file=str(tmp_path / "store")), work)
