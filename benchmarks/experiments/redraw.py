"""`python -m benchmarks.experiments.redraw` redraws docs/charts from the saved rows."""

import sys

from benchmarks import compare
from benchmarks.charts import write
from benchmarks.experiments import concurrency, fragmentation, longseq, preemption, priority, slo
from benchmarks.experiments.common import saved

PANELS = {
    "compare": compare.panels,
    "concurrency": concurrency.panels,
    "fragmentation": fragmentation.panels,
    "longseq": longseq.panels,
    "preemption": preemption.panels,
    "priority": priority.panels,
    "slo": slo.panels,
}
ROWS = {"compare": "throughput"}  # chart -> kind of its rows, where it is another


def main() -> int:
    for name, panels in PANELS.items():
        if rows := saved(ROWS.get(name, name)):
            print(write(name, panels(rows)).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
