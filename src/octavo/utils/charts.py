"""Charts as SVG text: panels of horizontal bars or of lines, small enough to read in a diff.

Written here and not with matplotlib: its SVG files hold every letter as an outline (50 to 100 KB,
new ids at each run), and a chart needs four kinds of element. The background is transparent, and
every colour has a contrast of at least 3 on white and on black, so that a chart can be read on
light and dark pages alike, whatever the reader's system prefers. Nothing is told by colour alone:
bars carry their names and figures, lines their dash patterns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

TEXT, GRID = "#767676", "#8a8a8a"
OURS, OTHERS = "#2f81c4", "#9a7b4f"  # bars: Octavo's, and what it is compared with
COLOURS = ("#c46a1f", "#2f81c4", "#8a63c9", "#25896b")  # lines
_DASHES = ("7 3", "", "2 3", "10 3 2 3")  # lines, in the same order
_WIDTH, _MARGIN, _TITLE = 760, 16, 62
_BAR, _SPACE, _HEADING, _GAP = 15, 7, 26, 14  # of a panel of bars
_LEFT, _PLOT, _TOP, _BELOW = 70, 190, 54, 50  # of a panel of lines


@dataclass(frozen=True)
class Bar:
    """value: None if it was not measured; `note` then says why. low, high: of the runs.

    ours: whether it shows Octavo as it ships, and not what that is compared with.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars. form: of the figure at a bar's end, with its unit. top: the value
    that fills the width; the largest one if not given."""

    title: str
    bars: Sequence[Bar]
    form: str = "{:,.0f}"
    top: float | None = None


@dataclass(frozen=True)
class Line:
    """Points joined in order. bound: a limit that was given, drawn thin and named at its end."""

    name: str
    points: Sequence[tuple[float, float]]
    bound: bool = False


@dataclass(frozen=True)
class Lines:
    """A panel of lines over a common x."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Chart:
    """subtitle: how to read it. text: what it shows, for those who cannot see it. source: when and
    where it was measured, and by which command."""

    title: str
    subtitle: str
    text: str
    source: str
    panels: Sequence[Bars | Lines]


def svg(chart: Chart) -> str:
    """The chart as the text of a file."""
    subtitle = _wrap(chart.subtitle, 112)
    source = _wrap(chart.source, 120)
    parts = [_text(_MARGIN, 24, chart.title, size=16, bold=True)]
    parts += [_text(_MARGIN, 44 + 16 * i, line) for i, line in enumerate(subtitle)]
    y = _TITLE + 16.0 * (len(subtitle) - 1)
    for panel in chart.panels:
        parts.append(f'<g transform="translate(0 {y:.0f})">')
        if isinstance(panel, Bars):
            parts += _bars(panel, _label_width(chart.panels), _figure_width(panel, chart.panels))
            y += _HEADING + len(panel.bars) * (_BAR + _SPACE) + _GAP
        else:
            parts += _lines(panel)
            y += _TOP + _PLOT + _BELOW
        parts.append("</g>")
    parts += [_text(_MARGIN, y + 8 + 14 * i, line, size=11) for i, line in enumerate(source)]
    height = y + 8 + 14 * len(source)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{TEXT}">'
    )
    described = [
        f'<title id="title">{escape(chart.title)}</title>',
        f'<desc id="desc">{escape(chart.text)} {escape(chart.source)}</desc>',
    ]
    return "\n".join([head, *described, *parts, "</svg>", ""])


def _label_width(panels: Sequence[Bars | Lines]) -> float:
    """Of the names of all bars: the bars of all panels begin at one place."""
    bars = [bar for panel in panels if isinstance(panel, Bars) for bar in panel.bars]
    return max(_width(bar.label) * (1.12 if bar.ours else 1.0) for bar in bars)


def _figure_width(panel: Bars, panels: Sequence[Bars | Lines]) -> float:
    """Of the figures beside its bars, and beside those of all panels on the same given scale."""
    alike = [p for p in panels if isinstance(p, Bars) and panel.top and p.top == panel.top]
    return max(_width(_figure(p, bar)) for p in alike or [panel] for bar in p.bars)


def _bars(panel: Bars, label_width: float, figure_width: float) -> list[str]:
    start = _MARGIN + label_width + 10
    figures = [_figure(panel, bar) for bar in panel.bars]
    room = _WIDTH - _MARGIN - start - figure_width - 8
    top = panel.top or max(max(bar.high or 0, bar.value or 0) for bar in panel.bars) or 1.0
    parts = [_text(_MARGIN, 14, panel.title, size=13, bold=True)]
    for number, (bar, figure) in enumerate(zip(panel.bars, figures, strict=True)):
        y = _HEADING + number * (_BAR + _SPACE)
        parts.append(_text(start - 8, y + 12, bar.label, anchor="end", bold=bar.ours))
        if bar.value is not None:
            wide = room * bar.value / top
            parts.append(f'<rect x="{start:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" '
                         f'fill="{OURS if bar.ours else OTHERS}"/>')  # fmt: skip
        end = max(bar.value or 0.0, bar.high or 0.0)
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            parts += _whisker(start + room * bar.low / top, start + room * bar.high / top, y)
        parts.append(_text(start + room * end / top + 6, y + 12, figure))
    bottom = _HEADING + len(panel.bars) * (_BAR + _SPACE) - _SPACE + 2
    return [*parts, _stroke([(start, _HEADING - 3), (start, bottom)], GRID)]


def _figure(panel: Bars, bar: Bar) -> str:
    if bar.value is None:
        return bar.note or "not measured"
    text = panel.form.format(bar.value)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        plain = panel.form.split("}")[0] + "}"
        text += f" ({plain.format(bar.low)} to {plain.format(bar.high)})"
    return f"{text}; {bar.note}" if bar.note else text


def _whisker(low: float, high: float, y: float) -> list[str]:
    middle = y + _BAR / 2
    ends = [[(x, middle - 4), (x, middle + 4)] for x in (low, high)]
    return [_stroke(points, TEXT, 1.5) for points in ([(low, middle), (high, middle)], *ends)]


def _lines(panel: Lines) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    step = _nice(1.02 * max(y for _, y in points) / 4)
    top = step * math.ceil(1.02 * max(y for _, y in points) / step)
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    wide = _WIDTH - _LEFT - _MARGIN - 90

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * (x - low) / ((high - low) or 1), _TOP + _PLOT * (1 - y / top)

    parts = [_text(_MARGIN, 14, panel.title, size=13, bold=True)]
    parts += _legend([line.name for line in panel.lines if not line.bound])
    for i in range(round(top / step) + 1):
        y = place(low, i * step)[1]
        parts.append(_stroke([(_LEFT, y), (_LEFT + wide, y)], GRID, 0.5))
        parts.append(_text(_LEFT - 6, y + 4, f"{i * step:g}", anchor="end"))
    parts += _x_axis(panel.x, low, high, wide)
    turn = f' transform="rotate(-90 20 {_TOP + _PLOT / 2:.0f})"'
    parts.append(_text(20, _TOP + _PLOT / 2, panel.y, anchor="middle", more=turn))
    number = 0
    for line in panel.lines:
        path = [place(x, y) for x, y in line.points]
        if line.bound:
            parts.append(_stroke(path, TEXT, 1.5))
            parts.append(_text(path[-1][0] + 6, path[-1][1] + 4, line.name))
        else:
            parts.append(_stroke(path, COLOURS[number], 2.2, _DASHES[number]))
            number += 1
    return parts


def _x_axis(name: str, low: float, high: float, wide: float) -> list[str]:
    step = _nice((high - low) / 8)
    first = math.ceil(low / step)
    ticks = [i * step for i in range(first, int(high / step + 1e-9) + 1)]
    parts = []
    for x in ticks:
        at = _LEFT + wide * (x - low) / ((high - low) or 1)
        parts.append(_stroke([(at, _TOP + _PLOT), (at, _TOP + _PLOT + 4)], GRID))
        parts.append(_text(at, _TOP + _PLOT + 18, f"{x:g}", anchor="middle"))
    return [*parts, _text(_LEFT + wide / 2, _TOP + _PLOT + 36, name, anchor="middle")]


def _legend(names: Sequence[str]) -> list[str]:
    parts, at = [], float(_LEFT)
    for name, colour, dash in zip(names, COLOURS, _DASHES, strict=False):
        parts.append(_stroke([(at, 36), (at + 28, 36)], colour, 2.2, dash))
        parts.append(_text(at + 34, 40, name))
        at += 54 + _width(name)
    return parts


def _nice(step: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step or 1.0))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _width(text: str) -> float:
    """About how wide a text of size 12 is."""
    return 6.7 * len(text)


def _wrap(text: str, most: int) -> list[str]:
    """`text` in lines of at most `most` characters, broken between words."""
    words = text.split(" ")
    lines, line = [], words[0]
    for _, word in pairwise(words):
        if len(line) + 1 + len(word) > most:
            lines.append(line)
            line = word
        else:
            line += " " + word
    return [*lines, line]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12,
          bold: bool = False, more: str = "") -> str:  # fmt: skip
    style = f' text-anchor="{anchor}"' * (anchor != "start") + f' font-size="{size}"' * (size != 12)
    style += ' font-weight="bold"' * bold
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{more}>{escape(text)}</text>'


def _stroke(points: Sequence[tuple[float, float]], colour: str, width: float = 1,
            dash: str = "") -> str:  # fmt: skip
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:g}"{dashes}/>')  # fmt: skip
