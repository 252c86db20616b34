"""`python -m benchmarks.experiments.redraw` redraws docs/charts from the saved rows."""

import sys

from benchmarks import compare
from benchmarks.charts import write
from benchmarks.experiments import concurrency, fragmentation, longseq, preemption, priority, slo
from benchmarks.experiments.common import saved

CHARTS = {
    "compare": compare.chart,
    "concurrency": concurrency.chart,
    "fragmentation": fragmentation.chart,
    "longseq": longseq.chart,
    "preemption": preemption.chart,
    "priority": priority.chart,
    "slo": slo.chart,
}
ROWS = {"compare": "throughput"}  # chart -> kind of its rows, where it is another


def main() -> int:
    for name, chart in CHARTS.items():
        if rows := saved(ROWS.get(name, name)):
            print(write(name, chart(rows)).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
