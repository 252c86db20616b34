"""Servers as /metrics would show them, made with the server's own metrics: for what no fake engine
does in a short test."""

import re

from octavo.config import EngineConfig
from octavo.doctor.machine import Machine
from octavo.doctor.snapshot import Look, Snapshot
from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats, Observations
from octavo.server.config_info import config_labels
from octavo.server.metrics import Metrics

SECONDS, UPTIME = 5.0, 600.0
START = 1_700_000_000.0


class Modelled:
    """A server: change `metrics` and `values` between two looks."""

    def __init__(self, engines: int = 1, **config: object) -> None:
        self.metrics = Metrics("m", engines)
        self.metrics.config = {
            **config_labels(EngineConfig(model="m", data_parallel_size=engines, **config)),
            "processors": "4",
            "cpu_quota": "",
        }
        self.machine: Machine | None = None
        self.status, self.health = 200, ""
        self.values = {"process_cpu_seconds_total": 1.0, "process_start_time_seconds": START}
        self._time = START + UPTIME

    def update(self, fresh: Observations | None = None, engine: int = 0, **stats: object) -> None:
        self.metrics.update(engine, Stats(EngineStats(**stats), fresh or Observations()))

    def look(self) -> Look:
        text = self.metrics.text().decode()
        for name, value in self.values.items():
            text, count = re.subn(rf"(?m)^{name} .*$", f"{name} {value}", text)
            assert count == 1, name
        now, self._time = self._time, self._time + SECONDS
        return Look(
            now, text, status=self.status, health=self.health, version="1", machine=self.machine
        )


def twice(server: Modelled) -> Snapshot:
    """Nothing changes between the looks."""
    return Snapshot("http://m", server.look(), server.look())
