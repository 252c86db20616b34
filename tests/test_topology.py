"""Shares of a machine's processors, on machines that are made up here."""

import os
import subprocess

import pytest

from octavo import cgroup, topology
from octavo.processes import module_command
from octavo.topology import divide, read_nodes


def listed(numbers):
    return ",".join(map(str, sorted(numbers)))


def machine(folder, nodes, threads=1, siblings="core_cpus_list"):
    """/sys of nodes of so many cores; hardware threads numbered as Linux does: cores first."""
    total, first = sum(nodes), 0
    for number, cores in enumerate(nodes):
        here = [core + total * t for core in range(first, first + cores) for t in range(threads)]
        place = folder / "node" / f"node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(listed(here) + "\n")
        first += cores
    for one in range(total * threads):
        place = folder / "cpu" / f"cpu{one}" / "topology"
        place.mkdir(parents=True)
        same = [one % total + total * t for t in range(threads)]
        (place / siblings).write_text(listed(same) + "\n")
    return folder


def plain(*cores):
    """Nodes of so many cores of one thread."""
    numbers = iter(range(sum(cores)))
    return [[(next(numbers),) for _ in range(count)] for count in cores]


def test_nodes_and_cores_are_read(tmp_path):
    folder = machine(tmp_path, [2, 2], threads=2)
    assert read_nodes(range(8), folder) == [[(0, 4), (1, 5)], [(2, 6), (3, 7)]]
    assert read_nodes({1, 2, 6}, folder) == [[(1,)], [(2, 6)]]  # as taskset -c 1,2,6 leaves it
    assert read_nodes({3}, folder) == [[(3,)]]


def test_older_names_and_lists_of_ranges(tmp_path):
    folder = machine(tmp_path, [2], threads=2, siblings="thread_siblings_list")
    (folder / "node" / "node0" / "cpulist").write_text("0-1,2-3\n")
    assert read_nodes(range(4), folder) == [[(0, 2), (1, 3)]]


def test_a_node_of_memory_alone_is_none_and_the_tenth_comes_after_the_ninth(tmp_path):
    folder = machine(tmp_path, [1] * 11)
    (folder / "node" / "node4" / "cpulist").write_text("\n")
    found = read_nodes(set(range(11)) - {4}, folder)
    assert found == [[(n,)] for n in range(11) if n != 4]


def test_without_sys_there_is_one_node_of_plain_cores(tmp_path):
    assert read_nodes({5, 2, 3}, tmp_path) == [[(2,), (3,), (5,)]]
    (tmp_path / "node" / "node0").mkdir(parents=True)
    (tmp_path / "node" / "node0" / "cpulist").write_text("2\n")
    assert read_nodes({5, 2, 3}, tmp_path) == [[(2,)], [(3,), (5,)]]  # one that no node names


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [
        ([4], 1, [(0, 1, 2, 3)]),
        ([4], 2, [(0, 1), (2, 3)]),
        ([2, 2], 2, [(0, 1), (2, 3)]),
        ([4, 4], 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ([2, 2, 2, 2], 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # two nodes each
        ([5], 2, [(0, 1), (2, 3)]),  # of one size; one core is left over
        ([3, 3], 2, [(0, 1, 2), (3, 4, 5)]),
        ([4, 4], 3, [(0, 1), (2, 3), (4, 5)]),  # none crosses the border
        ([1, 7], 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # else both had one core
        ([2], 2, [(0,), (1,)]),
        ([2], 5, [(0,), (1,), (0,), (1,), (0,)]),  # fewer processors than processes
    ],
)
def test_shares_of_one_size_each_within_a_node(nodes, count, expected):
    assert divide(plain(*nodes), count) == tuple(expected)


def test_a_core_is_not_shared_while_there_are_enough(tmp_path):
    nodes = read_nodes(range(16), machine(tmp_path, [4, 4], threads=2))
    assert divide(nodes, 4) == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert divide(nodes, 8)[3] == (3, 11)
    assert divide(nodes, 16)[:3] == ((0,), (8,), (1,))  # then a thread each


def test_cores_of_a_share_are_counted_once(tmp_path):
    folder = machine(tmp_path, [4, 4], threads=2)
    assert topology.count_cores((0, 1, 8, 9), folder) == 2
    assert topology.count_cores((0, 9), folder) == 2
    assert topology.count_cores((), folder) == 0


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (None, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (16.0, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (5.0, ((0, 1), (4, 5))),
        (0.5, ((0,), (4,))),
    ],
)
def test_a_quota_is_for_all_of_them(quota, expected):
    assert divide(plain(4, 4), 2, quota) == expected


def test_a_quota_takes_whole_cores_where_it_can(tmp_path):
    nodes = read_nodes(range(16), machine(tmp_path, [4, 4], threads=2))
    assert divide(nodes, 2, 6.0) == ((0, 8), (4, 12))
    assert divide(nodes, 2, 2.0) == ((0,), (4,))


def test_this_process_s_own_limits_are_divided(monkeypatch):
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(cgroup, "processor_quota", lambda: None)
    (whole,) = topology.shares(1)
    assert set(whole) == allowed
    assert {one for share in topology.shares(2) for one in share} <= allowed
    monkeypatch.setattr(cgroup, "processor_quota", lambda: 1.0)
    assert len(topology.shares(1)[0]) == 1


def test_unknown_where_the_system_has_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert topology.shares(2) == ()


def test_a_child_is_started_on_its_share(tmp_path, monkeypatch):
    (tmp_path / "shown.py").write_text(
        "import os, sys; print(sorted(os.sched_getaffinity(0)), sys.argv[1:])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    last = max(os.sched_getaffinity(0))
    for given in ((), (last,)):
        command = module_command("shown", "a", processors=given)
        shown = subprocess.check_output(command, text=True).strip()
        assert shown == f"{list(given) or sorted(os.sched_getaffinity(0))} ['a']"
