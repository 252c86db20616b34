"""Which processors each of several processes of an engine runs on, on one machine.

Processes that compute side by side (tensor-parallel ranks, replicas) take disjoint sets of whole
cores, each within one NUMA node where there are enough nodes or cores: so a rank's weights lie in
memory near to it, and no thread of one waits on a core of another. Only what this process may use
is divided: its affinity, and the quota of its control group. Shares have one size, since a step of
tensor-parallel ranks takes as long as the slowest of them.

Pure but for the reading of /sys; `processes.module_command` starts a process on its share.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from octavo import cgroup

_SYSTEM = Path("/sys/devices/system")
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # since Linux 5.3, and before

Processors = tuple[int, ...]  # their numbers, rising
Node = list[Processors]  # its cores, each with its hardware threads


def usable() -> frozenset[int]:
    """The processors that this process may use; none where that is unknown."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def shares(count: int) -> tuple[Processors, ...]:
    """Of each of `count` processes, from what this one may use; none where that is unknown."""
    if not (processors := usable()):
        return ()
    nodes = read_nodes(processors)
    return divide(nodes, count, cgroup.processor_quota())


def count_cores(processors: Iterable[int], system: Path = _SYSTEM) -> int:
    """How many cores a share has: its compute threads, since a second thread of a core gains a
    product nothing."""
    return sum(map(len, read_nodes(processors, system)))


def divide(nodes: Sequence[Node], count: int, quota: float | None = None) -> tuple[Processors, ...]:
    """`count` shares of the cores of `nodes`.

    Cores that remain are nobody's: the web process runs there. quota: processors' worth of time
    for all. With fewer cores than processes each has one hardware thread, and where these do not
    suffice either, several processes have the same.
    """
    if sum(map(len, nodes)) < count:  # cores no longer count, only their threads
        nodes = [[(one,) for core in node for one in core] for node in nodes]
    cores = [core for node in nodes for core in node]
    if len(cores) < count:
        return tuple(cores[i % len(cores)] for i in range(count))
    taken = _by_node(nodes, count) or _in_order(cores, count)
    if quota is not None:
        most = max(1, int(quota / count))
        taken = [_within(share, most) for share in taken]
    return tuple(tuple(sorted(one for core in share for one in core)) for share in taken)


def _by_node(nodes: Sequence[Node], count: int) -> list[Node] | None:
    """Shares that are each within one node; None where there are more nodes than shares."""
    if count < len(nodes):
        return None
    total, guests = sum(map(len, nodes)), [1] * len(nodes)
    for _ in range(count - len(nodes)):  # the next one to the node that has most cores for each
        room = [len(node) / (here + 1) for node, here in zip(nodes, guests, strict=True)]
        guests[room.index(max(room))] += 1
    size = min(len(node) // here for node, here in zip(nodes, guests, strict=True))
    if not size or 2 * size * count < total:  # a small node: better a share that crosses a border
        return None
    return [
        node[i * size : (i + 1) * size]
        for node, here in zip(nodes, guests, strict=True)
        for i in range(here)
    ]


def _in_order(cores: Node, count: int) -> list[Node]:
    """Shares of neighbouring cores."""
    size = len(cores) // count
    return [cores[i * size : (i + 1) * size] for i in range(count)]


def _within(share: Node, most: int) -> Node:
    """The first cores of a share, of at most `most` hardware threads in all."""
    if sum(map(len, share)) <= most:
        return share
    first: list[Processors] = []
    for core in share:
        if sum(map(len, first)) + len(core) > most:
            break
        first.append(core)
    return first or [share[0][:most]]


def read_nodes(allowed: Iterable[int], system: Path = _SYSTEM) -> list[Node]:
    """The NUMA nodes that have `allowed` processors, by number, and their cores.

    What /sys does not tell, as in some containers, is taken to be one node of cores of one thread.
    """
    left, nodes = set(allowed), []
    for folder in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        if here := left & set(_numbers(folder / "cpulist")):
            left -= here
            nodes.append(_cores(here, system))
    return [*nodes, _cores(left, system)] if left else nodes


def _cores(processors: set[int], system: Path) -> Node:
    left, cores = set(processors), []
    for one in sorted(processors):
        if one in left:
            places = (system / "cpu" / f"cpu{one}" / "topology" / name for name in _SIBLINGS)
            told = next(filter(None, ([*islice(_numbers(place), 1024)] for place in places)), [])
            core = left & {one, *told}
            left -= core
            cores.append(tuple(sorted(core)))
    return cores


def _numbers(file: Path) -> Iterator[int]:
    """Of a list such as 0-3,8,10-11; none if it cannot be read."""
    try:
        text = file.read_text().strip()
    except OSError:
        return
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
