"""Charts are well-formed SVG, what is drawn is where its number says, and all is one run's."""

from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.experiments import common, redraw, slo

from octavo.utils.charts import COLOURS, OTHERS, OURS, TEXT, Bar, Bars, Chart, Line, Lines, svg

NS = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Bars | Lines) -> ElementTree.Element:
    chart = Chart("A title", "How to read it.", "What it shows.", "Measured somewhere.", panels)
    return ElementTree.fromstring(svg(chart))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NS}text")]


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in line.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_bars_are_as_long_as_their_values() -> None:
    root = drawn(
        Bars("A < B & C", [Bar("one", 50.0, 40.0, 80.0), Bar("two", 100.0, ours=True),
                           Bar("three", None, note="it failed")], "{:.0f} ms"),
    )  # fmt: skip
    one, two = root.iter(f"{NS}rect")
    assert float(two.get("width", 0)) == pytest.approx(2 * float(one.get("width", 0)), abs=0.2)
    assert {"A < B & C", "one", "50 ms (40 to 80)", "100 ms", "it failed"} <= set(texts(root))
    whisker = next(line for line in root.iter(f"{NS}polyline") if line.get("stroke") == TEXT)
    (low, _), (high, _) = points(whisker)
    start, wide = float(one.get("x", 0)), float(one.get("width", 0))
    assert (low - start) / wide == pytest.approx(40 / 50, abs=0.01)
    assert (high - start) / wide == pytest.approx(80 / 50, abs=0.01)


def test_panels_with_the_same_top_have_one_scale() -> None:
    root = drawn(Bars("a", [Bar("one", 2.0)], "{:.0f}", 4.0),
                 Bars("b", [Bar("two", 4.0, 3.0, 4.0)], "{:.0f}", 4.0))  # fmt: skip
    one, two = (float(bar.get("width", 0)) for bar in root.iter(f"{NS}rect"))
    assert two == pytest.approx(2 * one, abs=0.2)


def test_lines_go_through_their_points_and_the_axis_ends_above_them() -> None:
    line = Line("l", [(0, 0.0), (10, 50.0), (20, 100.0)])
    bound = Line("target 97", [(0, 97.0), (20, 97.0)], bound=True)
    root = drawn(Lines("t", "x", "y", [line, bound]))
    (path,) = [p for p in root.iter(f"{NS}polyline") if len(points(p)) == 3]
    (x0, y0), (x1, y1), (x2, y2) = points(path)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    ticks = [float(text) for text in texts(root) if text.isdigit()]
    assert max(ticks) >= 100
    assert "target 97" in texts(root)


def test_a_chart_says_what_it_is_to_those_who_cannot_see_it() -> None:
    root = drawn(Bars("b", [Bar("one", 1.0)]))
    assert root.get("role") == "img"
    described = [root.find(f"{NS}{name}") for name in ("title", "desc")]
    assert [e.text for e in described if e is not None] == [
        "A title", "What it shows. Measured somewhere.",
    ]  # fmt: skip


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colour", "least"), [(TEXT, 4.0), *((c, 3.0) for c in
                                                (OURS, OTHERS, *COLOURS))])  # fmt: skip
def test_colours_can_be_told_from_light_and_dark_pages(colour: str, least: float) -> None:
    for page in ("#ffffff", "#0d1117"):
        light, dark = sorted((_luminance(colour), _luminance(page)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least


def test_a_chart_has_no_background() -> None:
    assert not list(drawn(Lines("t", "x", "y", [Line("l", [(0, 1), (1, 2)])])).iter(f"{NS}rect"))


@pytest.mark.parametrize("kind", redraw.CHARTS)
def test_every_saved_experiment_can_be_drawn_again(kind: str) -> None:
    if rows := common.saved(redraw.ROWS.get(kind, kind)):
        chart = redraw.CHARTS[kind](rows)
        root = ElementTree.fromstring(svg(chart))
        assert "Measured on" in chart.source
        box = [float(n) for n in root.get("viewBox", "").split()]
        for text in root.iter(f"{NS}text"):
            assert 0 <= float(text.get("x", 0)) <= box[2]
            assert 0 <= float(text.get("y", 0)) <= box[3]


def row(engine: str, run: str, rate: float) -> dict[str, Any]:
    return {"engine": engine, "run": run, "rate": rate, "command": "c", "commit": "1"}


def test_a_chart_is_drawn_from_one_run() -> None:
    rows = [row("a", "1", 1), row("b", "1", 2), row("a", "2", 3), row("b", "2", 4),
            row("a", "3", 5)]  # fmt: skip
    assert [made["rate"] for made in common.one_run(rows)] == [3, 4]
    old = [{**made, "commit": "1+"} for made in rows[:2]]
    for made in old:
        del made["run"]
    assert common.one_run(old) == old


def test_a_window_is_held_at_the_target_and_not_above() -> None:
    run = {"target_ms": 200, "p99_by_second": [(20, 199.9), (21, 200.0), (22, 200.1), (23, 219)]}
    assert slo.held(run) == 2
