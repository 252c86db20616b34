"""The charts of the documentation: what `octavo.utils.charts` draws, in docs/charts."""

from pathlib import Path

from octavo.utils.charts import Bar, Bars, Chart, Line, Lines, svg

__all__ = ["CHARTS", "Bar", "Bars", "Chart", "Line", "Lines", "svg", "write"]

CHARTS = Path(__file__).parent.parent / "docs" / "charts"


def write(name: str, chart: Chart) -> Path:
    """Write docs/charts/NAME.svg."""
    CHARTS.mkdir(parents=True, exist_ok=True)
    path = CHARTS / f"{name}.svg"
    path.write_text(svg(chart))
    return path
