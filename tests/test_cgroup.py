"""Limits of a container, read from trees that are made here."""

import pytest

from octavo import cgroup

GIB = 2**30


class Tree:
    """A /proc/self and mounts of cgroups."""

    def __init__(self, folder):
        self.folder = folder
        self.mounts: list[str] = ["21 20 0:5 / / rw - overlay overlay rw"]
        self.proc = folder / "proc"
        self.proc.mkdir()

    def process(self, *lines):
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, where, options="", root="/"):
        kind = "cgroup" if options else "cgroup2"
        path = str(self.folder / where).replace(" ", r"\040")
        self.mounts.append(f"30 21 0:6 {root} {path} rw shared:9 - {kind} {kind} rw,{options}")
        (self.proc / "mountinfo").write_text("\n".join(self.mounts) + "\n")

    def write(self, where, **files):
        place = self.folder / where
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            part, _, rest = name.partition("_")
            (place / f"{part}.{rest}").write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    made = Tree(tmp_path)
    monkeypatch.setattr(cgroup, "_PROC", made.proc)
    return made


def test_without_groups_nothing_is_limited(tree):
    assert cgroup.processor_quota() is None
    assert cgroup.memory_limits() == []


def test_the_quota_of_version_2_is_the_least_of_the_path(tree):
    tree.process("0::/pod/box")
    tree.mount("unified")
    tree.write("unified/pod/box", cpu_max="max 100000")
    assert cgroup.processor_quota() is None
    tree.write("unified/pod", cpu_max="150000 100000")
    assert cgroup.processor_quota() == 1.5
    tree.write("unified/pod/box", cpu_max="50000 100000")
    assert cgroup.processor_quota() == 0.5
    tree.write("unified/other", cpu_max="1000 100000")
    assert cgroup.processor_quota() == 0.5


def test_the_quota_of_version_1(tree):
    tree.process("4:memory:/a", "3:cpu,cpuacct:/a/b", "1:name=systemd:/", "0::/")
    tree.mount("unified")
    tree.mount("cpu", "cpu,cpuacct")
    tree.write("cpu/a/b", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    assert cgroup.processor_quota() is None
    tree.write("cpu/a", cpu_cfs_quota_us=200000, cpu_cfs_period_us=100000)
    assert cgroup.processor_quota() == 2
    tree.write("cpu", cpu_cfs_quota_us=100000, cpu_cfs_period_us=100000)
    assert cgroup.processor_quota() == 1


@pytest.mark.parametrize(
    ("process", "root"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/1f", "/docker/1f"),  # none: the mount begins at the container's group
        ("/../../elsewhere", "/"),
        ("/outside", "/docker/1f"),
    ],
)
@pytest.mark.parametrize("version", ["", "cpu"])
def test_a_container_s_own_group_may_be_the_root(tree, process, root, version):
    tree.process(f"{3 if version else 0}:{version}:{process}")
    tree.mount("with space", version, root)
    if version:
        tree.write("with space", cpu_cfs_quota_us=250000, cpu_cfs_period_us=100000)
    else:
        tree.write("with space", cpu_max="250000 100000")
    assert cgroup.processor_quota() == 2.5


def test_page_cache_is_not_used_memory_in_version_2(tree):
    """ollama#15704: 4 GiB, 3.8 used, of which 3.4 are the model's file, just copied."""
    tree.process("0::/")
    tree.mount("unified")
    stat = f"anon 99\nfile {4 * GIB}\nshmem 5\ninactive_file {3 * GIB}\nactive_file {GIB // 2}"
    tree.write("unified", memory_max=4 * GIB, memory_current=4 * GIB, memory_stat=stat)
    [found] = cgroup.memory_limits()
    assert found.limit == 4 * GIB
    assert found.free == 3.5 * GIB


def test_page_cache_is_not_used_memory_in_version_1(tree):
    tree.process("4:memory:/a/b")
    tree.mount("memory", "memory")
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    tree.write("memory/a/b", memory_limit_in_bytes=9223372036854771712,
               memory_usage_in_bytes=GIB, memory_stat="cache 0")  # fmt: skip
    tree.write("memory/a", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=3 * GIB,
               memory_stat=stat)  # fmt: skip
    [found] = cgroup.memory_limits()
    assert (found.limit, found.free) == (4 * GIB, 3 * GIB)


def test_a_limit_above_what_is_visible_is_in_the_statistics_of_version_1(tree):
    tree.process("4:memory:/x/y")
    tree.mount("memory", "memory", "/x/y")
    tree.write("memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB,
               memory_stat=f"hierarchical_memory_limit {2 * GIB}")  # fmt: skip
    [found] = cgroup.memory_limits()
    assert (found.limit, found.free) == (2 * GIB, GIB)


def test_groups_above_and_the_soft_limit_count(tree):
    tree.process("0::/pod/box")
    tree.mount("unified")
    tree.write("unified/pod/box", memory_max="max", memory_high=3 * GIB, memory_current=GIB)
    tree.write("unified/pod", memory_max=2 * GIB, memory_high="max", memory_current=2 * GIB)
    assert [(m.limit, m.free) for m in cgroup.memory_limits()] == [(3 * GIB, 2 * GIB), (2 * GIB, 0)]


def test_what_a_quota_cut_short_is_counted_by_the_group_that_has_it(tree):
    tree.process("0::/pod/box")
    tree.mount("unified")
    assert cgroup.throttling() is None
    tree.write("unified/pod/box", cpu_stat="usage_usec 5")
    tree.write("unified/pod", cpu_stat="usage_usec 5\nnr_periods 40\nnr_throttled 7")
    assert cgroup.throttling() == cgroup.Throttling(40, 7)


def test_this_machine_s_groups_can_be_read():
    quota = cgroup.processor_quota()
    assert quota is None or quota > 0
    assert all(limit.limit > 0 for limit in cgroup.memory_limits())
