"""`python -m benchmarks.experiments.redraw` redraws docs/charts from the saved rows."""

import sys

from benchmarks import compare, suite, suite_report
from benchmarks.charts import write
from benchmarks.experiments import concurrency, fragmentation, longseq, preemption, priority, slo
from benchmarks.experiments.common import saved

CHARTS = {
    "compare": lambda rows: suite_report.engines_chart(suite_report.newest(rows)),
    "ratios": lambda rows: suite_report.ratios_chart(suite.FIGURES, suite_report.newest(rows)),
    "engines": compare.chart,
    "concurrency": concurrency.chart,
    "fragmentation": fragmentation.chart,
    "longseq": longseq.chart,
    "preemption": preemption.chart,
    "priority": priority.chart,
    "slo": slo.chart,
}
ROWS = {
    "compare": "suite",
    "ratios": "suite",
    "engines": "throughput",
}  # chart -> kind of its rows, where it is another


def main() -> int:
    for name, chart in CHARTS.items():
        if rows := saved(ROWS.get(name, name)):
            print(write(name, chart(rows)).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
