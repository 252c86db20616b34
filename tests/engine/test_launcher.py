"""What each of several engines on one machine has of it."""

import os

import pytest

from octavo import topology
from octavo.config import EngineConfig
from octavo.engine import launcher
from octavo.engine.launcher import gpus_of, local_launchers
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("engine", "ranks", "visible", "gpus"),
    [
        (0, 1, None, "0"), (1, 1, None, "1"), (1, 2, None, "2,3"),
        (0, 1, ["3", "5"], "3"), (1, 1, ["3", "5"], "5"), (1, 1, ["GPU-a", "GPU-b"], "GPU-b"),
        (2, 1, ["3", "5"], ""), (1, 2, ["0", "1", "2"], "2"), (0, 1, [], ""),
    ],
)  # fmt: skip
def test_each_engine_sees_its_own_gpus(engine, ranks, visible, gpus):
    """One that is left without any says so itself: it finds none."""
    assert gpus_of(engine, ranks, visible) == gpus


def test_engines_have_disjoint_processors_and_no_more_threads(monkeypatch):
    monkeypatch.setattr(topology, "shares", lambda count: ((0, 1), (2, 3)))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    of = local_launchers(EngineConfig(data_parallel_size=2))
    assert [of(engine)._processors for engine in (0, 1)] == [(0, 1), (2, 3)]
    second = of(1)
    given = launcher._share_of(dict(os.environ), second._processors, second._gpus)
    assert (given["OMP_NUM_THREADS"], given["CUDA_VISIBLE_DEVICES"]) == ("2", "6")
    on_cpu = local_launchers(EngineConfig(data_parallel_size=2, device="cpu"))(1)
    given = launcher._share_of(dict(os.environ), on_cpu._processors, on_cpu._gpus)
    assert given["CUDA_VISIBLE_DEVICES"] == "4,6"


@pytest.mark.parametrize("threads", ["1", "2", "2,1", ""])
def test_fewer_threads_stay_as_they_are(threads):
    given = {"OMP_NUM_THREADS": threads}
    assert launcher._share_of(given, (0, 1), None) == given


def test_one_engine_has_all(monkeypatch):
    monkeypatch.setattr(topology, "shares", None)
    alone = local_launchers(EngineConfig())(0)
    assert alone._gpus is None
    given = {"OMP_NUM_THREADS": "64"}
    assert launcher._share_of(given, (), None) == given


def test_more_engines_than_processors_are_said_to_share_them(monkeypatch, caplog):
    monkeypatch.setattr(topology, "shares", lambda count: ((0,), (1,), (0,)))
    of = local_launchers(EngineConfig(data_parallel_size=3))
    assert "3 engines share 2 processors" in caplog.text
    assert [of(engine)._processors for engine in range(3)] == [(0,), (1,), (0,)]


def test_where_processors_are_not_told_none_are_bound(monkeypatch):
    monkeypatch.setattr(topology, "shares", lambda count: ())
    of = local_launchers(EngineConfig(data_parallel_size=3))
    assert [of(engine)._processors for engine in range(3)] == [(), (), ()]


def test_more_engines_than_a_machine_is_a_place_for(monkeypatch):
    monkeypatch.setattr(topology, "usable", lambda: frozenset(range(4)))
    launcher.local_launchers(EngineConfig(data_parallel_size=16))
    with pytest.raises(ConfigError) as caught:
        launcher.local_launchers(EngineConfig(data_parallel_size=1000))
    said = str(caught.value)
    assert "data_parallel_size is 1000" in said
    assert "4 processors" in said
    assert "at most 16 are started here" in said
    assert "ray" in said
    monkeypatch.setattr(topology, "usable", lambda: frozenset({0}))
    launcher.local_launchers(EngineConfig(data_parallel_size=8))  # to try things
    monkeypatch.setattr(topology, "usable", frozenset)  # unknown
    monkeypatch.setattr(topology, "shares", lambda count: ())
    launcher.local_launchers(EngineConfig(data_parallel_size=1000))
