"""Charts are well-formed SVG, and what is drawn is where its number says."""

from xml.etree import ElementTree

import pytest
from benchmarks.charts import Bars, Line, Lines, svg
from benchmarks.experiments import common, redraw

NS = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_high_as_their_values() -> None:
    drawn = ElementTree.fromstring(
        svg([Bars("A < B & C", "y", ["g", "h"], {"one": [50.0, 100.0], "two": [25.0, None]})])
    )
    heights = [float(rect.get("height", 0)) for rect in list(drawn.iter(f"{NS}rect"))[1:]]
    assert heights[1] == pytest.approx(heights[0] / 2, abs=0.2)
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[3] == 0
    texts = [text.text for text in drawn.iter(f"{NS}text")]
    assert {"A < B & C", "g", "h", "one", "two", "none"} <= set(texts)


def test_lines_go_through_their_points() -> None:
    line = Line("l", [(0, 0.0), (10, 50.0), (20, 100.0)])
    drawn = ElementTree.fromstring(svg([Lines("t", "x", "y", [line])]))
    dots = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in drawn.iter(f"{NS}circle")]
    assert len(dots) == 3
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0], abs=0.2)
    assert dots[0][1] - dots[1][1] == pytest.approx(dots[1][1] - dots[2][1], abs=0.2)


@pytest.mark.parametrize("kind", redraw.PANELS)
def test_every_saved_experiment_can_be_drawn_again(kind: str) -> None:
    if rows := common.saved(redraw.ROWS.get(kind, kind)):
        ElementTree.fromstring(svg(redraw.PANELS[kind](rows)))
