"""Charts as SVG text: panels of lines or grouped bars, small enough to read in a diff.

Written here and not with matplotlib: its SVG files hold every letter as an outline (50 to 100 KB,
new ids at each run), and a chart needs four kinds of element.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

CHARTS = Path(__file__).parent.parent / "docs" / "charts"
COLOURS = ("#1b6ca8", "#d1495b", "#3a8f5c", "#b07d12", "#7a5195", "#666666")
_WIDTH, _LEFT, _RIGHT, _PLOT, _TOP, _BELOW = 760, 70, 20, 230, 62, 52


@dataclass(frozen=True)
class Line:
    """Points joined in order. A dashed one has no dots: a bound, or something given."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """A panel of lines over a common x. doubling: x in equal steps for each doubling, with a tick
    at each point of the first line."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    doubling: bool = False
    y_max: float | None = None


@dataclass(frozen=True)
class Bars:
    """A panel of bars: for each of `groups` one bar of each series. form: of the number on top."""

    title: str
    y: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    form: str = "{:.0f}"
    bounds: Mapping[str, float] = field(default_factory=dict)


def write(name: str, panels: Sequence[Lines | Bars]) -> Path:
    """Write docs/charts/NAME.svg."""
    CHARTS.mkdir(parents=True, exist_ok=True)
    path = CHARTS / f"{name}.svg"
    path.write_text(svg(panels))
    return path


def svg(panels: Sequence[Lines | Bars]) -> str:
    each = _TOP + _PLOT + _BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {each * len(panels)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * each})">')
        parts += _bars(panel) if isinstance(panel, Bars) else _lines(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, y: str, top: float, names: Sequence[tuple[str, bool]]) -> list[str]:
    """Title, legend, y axis with a grid, from 0 to `top`."""
    parts = [_text(_LEFT, 18, title, size=14, weight="bold")]
    at = float(_LEFT)
    for number, (name, dashed) in enumerate(names):
        parts += [_stroke([(at, 38), (at + 18, 38)], _colour(number), dashed, 4 - 2 * dashed)]
        parts.append(_text(at + 23, 42, name))
        at += 42 + 6.6 * len(name)
    step = _nice(top / 5)
    for i in range(int(top / step + 1e-9) + 1):
        height = _at_y(i * step, top)
        parts.append(_stroke([(_LEFT, height), (_WIDTH - _RIGHT, height)], "#dddddd"))
        parts.append(_text(_LEFT - 6, height + 4, f"{i * step:g}", anchor="end"))
    middle = _TOP + _PLOT / 2
    turned = f' transform="rotate(-90 16 {middle:.0f})"'
    return [*parts, _text(16, middle, y, anchor="middle", more=turned)]


def _lines(panel: Lines) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    top = panel.y_max or 1.08 * max(y for _, y in points)
    scale: Callable[[float], float] = math.log2 if panel.doubling else float
    low, high = min(scale(x) for x, _ in points), max(scale(x) for x, _ in points)
    wide = _WIDTH - _LEFT - _RIGHT - 20

    def place(x: float) -> float:
        return _LEFT + 10 + wide * (scale(x) - low) / ((high - low) or 1)

    parts = _frame(panel.title, panel.y, top, [(line.name, line.dashed) for line in panel.lines])
    step = _nice((high - low) / 8)
    first = math.ceil(low / step) * step
    ticks = [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]
    for x in [x for x, _ in panel.lines[0].points] if panel.doubling else ticks:
        parts.append(_text(place(x), _TOP + _PLOT + 18, f"{x:g}", anchor="middle"))
    parts.append(_text(_LEFT + wide / 2, _TOP + _PLOT + 38, panel.x, anchor="middle"))
    for number, line in enumerate(panel.lines):
        shown = [(place(x), _at_y(min(y, top), top)) for x, y in line.points]
        parts.append(_stroke(shown, _colour(number), line.dashed, 2))
        if not line.dashed and len(shown) <= 40:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(number)}"/>'
                      for x, y in shown]  # fmt: skip
    return parts


def _bars(panel: Bars) -> list[str]:
    values = [v for row in panel.series.values() for v in row if v is not None]
    top = 1.12 * max([*values, *panel.bounds.values()])
    names = [(name, False) for name in panel.series] + [(name, True) for name in panel.bounds]
    parts = _frame(panel.title, panel.y, top, names)
    group = (_WIDTH - _LEFT - _RIGHT) / len(panel.groups)
    wide = 0.8 * group / len(panel.series)
    for i, name in enumerate(panel.groups):
        middle = _LEFT + (i + 0.5) * group
        parts.append(_text(middle, _TOP + _PLOT + 18, name, anchor="middle"))
        for number, row in enumerate(panel.series.values()):
            x = middle - 0.4 * group + number * wide
            y = _at_y(row[i] or 0.0, top)
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" '
                         f'height="{_TOP + _PLOT - y:.1f}" fill="{_colour(number)}"/>')  # fmt: skip
            label = "none" if row[i] is None else panel.form.format(row[i])
            parts.append(_text(x + wide / 2 - 1, y - 4, label, anchor="middle", size=10))
    for number, bound in enumerate(panel.bounds.values(), len(panel.series)):
        y = _at_y(bound, top)
        parts.append(_stroke([(_LEFT, y), (_WIDTH - _RIGHT, y)], _colour(number), True, 2))
    return parts


def _at_y(value: float, top: float) -> float:
    return _TOP + _PLOT * (1 - value / top)


def _nice(step: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step or 1.0))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12,
          weight: str = "normal", more: str = "") -> str:  # fmt: skip
    style = f' font-size="{size}"' * (size != 12) + f' font-weight="{weight}"' * (weight == "bold")
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222"{style}{more}>'
            f"{escape(text)}</text>")  # fmt: skip


def _stroke(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False,
            width: int = 1) -> str:  # fmt: skip
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
