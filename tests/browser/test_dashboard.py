"""The dashboard's page in a headless Chromium, against a real server over the scripted executor."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts.chromium import SHIFT, Page

from dashboard_site import DOWN, KEY, REFUSED, Site

Load = Callable[..., list[str]]
EXAMPLE = json.loads((Path(__file__).parents[1] / "server/dashboard_example.json").read_text())
# [r, g, b] that the map's canvas shows in the middle of a block, and on its left edge.
PIXELS = """(block, map = page.maps.pool) => {
    const x = (block % map.columns) * map.cell, y = Math.floor(block / map.columns) * map.cell;
    const side = map.cell > 4 ? map.cell - 1 : map.cell;
    const at = (x, y) => [...map.canvas.getContext('2d')
        .getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data].slice(0, 3);
    const top = y - map.scroll.scrollTop;
    return [at(x + side * 0.25, top + side / 2), at(x, top)];
}"""


def text(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def near(one: list[int], other: list[int]) -> bool:
    return all(abs(a - b) <= 3 for a, b in zip(one, other, strict=True))


def full_block_of(page: Page, name: str) -> int:
    """A full block that only this request holds."""
    return page.wait(
        f"page.view.pool.owner.findIndex((_, block) => page.view.pool.fill[block] === 255 &&"
        f" page.view.requests.find((r) => r.key === page.view.pool.request(block))?.name"
        f" === '{name}') + 1 || 0"
    ) - 1  # fmt: skip


def test_the_map_and_the_figures_show_the_load(shown: Page, load: Load) -> None:
    assert shown.run("page.view.requests.filter((r) => r.state !== 'finished').length") == 0
    names = load(3)
    shown.wait("[...document.querySelectorAll('#tiles div')][2].innerText.endsWith('3')")
    block = full_block_of(shown, names[2])
    expected = shown.run(f"page.hues.of(page.view.pool.request({block}), false)")
    shown.wait(f"({PIXELS})({block})[0].join() === '{','.join(map(str, expected))}'")
    free = shown.run("page.view.pool.owner.length - 1")
    assert not near(shown.run(f"({PIXELS})({free})[0]"), expected)
    held = shown.run("page.view.rates.kv_blocks_usage")
    shown.wait(f"page.view.rates.kv_blocks_usage > {held}")  # it goes on
    assert "held" in text(shown, "#map-sum")
    rows = shown.run("[...document.querySelectorAll('#requests tbody th')].map((e) => e.innerText)")
    assert {*names} <= {row.strip() for row in rows}


def test_a_click_on_a_block_follows_its_request(shown: Page, load: Load) -> None:
    name = load(3)[1]
    block = full_block_of(shown, name)
    x, y = shown.run(
        f"(() => {{ const map = page.maps.pool, box = map.canvas.getBoundingClientRect();"
        f"return [box.x + ({block} % map.columns + 0.5) * map.cell,"
        f"box.y + (Math.floor({block} / map.columns) + 0.5) * map.cell]; }})()"
    )
    shown.click_at(x, y)
    shown.wait("page.followed?.tables[0]?.blocks.length > 5")
    assert text(shown, "#follow-name code") == name
    order = shown.wait("page.followed.tables[0].blocks")
    assert block in order
    # As many as its tokens need, in their order: the first hold the prompt.
    view = shown.run("({...page.followed.request, size: page.view.settings.block_size})")
    assert abs(view["blocks"] - view["computed"] // view["size"]) <= 1
    shown.wait("document.querySelector('#follow-blocks').innerText.startsWith("
               f"'{order[0]}')")  # fmt: skip
    marks = text(shown, "#follow-marks")
    assert [mark for mark in ("arrived", "first planned", "first token") if mark in marks]
    columns = shown.run("page.maps.pool.columns")
    around = {block + row + by for row in (-columns, 0, columns) for by in (-1, 0, 1)}
    other = next(b for b in order if b not in around)  # the cursor's frame is around the block
    ink = shown.run("[...getComputedStyle(document.body).color.matchAll(/\\d+/g)].map(Number)")
    assert near(shown.run(f"({PIXELS})({other})[1]"), ink)  # its outline
    assert text(shown, "#requests tr.followed button").strip() == name
    shown.click("#unfollow")
    shown.wait("!page.followed && document.querySelector('#follow-some').hidden")


def test_the_end_of_a_followed_request_is_on_its_timeline(shown: Page, load: Load) -> None:
    (name,) = load(1, max_tokens=30)
    shown.wait(f"page.view.requests.some((r) => r.name === '{name}')")
    shown.run(f"page.follow(page.view.requests.find((r) => r.name === '{name}').id)")
    shown.wait("document.querySelector('#follow-marks').innerText.includes('finished (length)')")
    assert "finished" in text(shown, "#follow-name")
    assert "holds no blocks" in text(shown, "#follow-blocks")


def test_a_restarted_server_is_found_again_and_the_history_kept(
    open_page: Callable[..., Page], site: Site
) -> None:
    page = open_page(allowed=(REFUSED, DOWN, "net::"))
    page.wait("page.history.length >= 3")
    port = site.stop()
    page.wait("page.state === 'waiting'")
    assert "Trying again in" in text(page, "#problem")
    page.wait("document.querySelector('#problem').innerText.startsWith('No answer from 127.0.0.1')")
    before = page.run("page.history.length")
    site.start(port)
    page.wait("page.state === 'live' && page.view.pool")
    page.wait(f"page.history.length > {before}")
    values = page.run("page.history.from(0)[1].map((point) => point !== null)")
    assert values[0]
    assert values.count(False) == 1  # the gap
    assert not page.run("document.querySelector('#problem').checkVisibility()")


def test_the_blocks_of_the_playground_appear_while_it_answers(shown: Page, site: Site) -> None:
    shown.run("document.querySelector('#play-prompt').value = '!slow'")
    shown.run("document.querySelector('#play-tokens').value = 400")
    shown.click("#play-send")
    shown.wait("page.followed?.request?.name.includes('playground-')")
    first = shown.wait("page.followed.tables[0]?.blocks.length")
    shown.wait("document.querySelector('#play-state').innerText === 'Answering'")
    shown.wait(f"page.followed.tables[0]?.blocks.length > {first}")
    order = shown.run("page.followed.tables[0].blocks")
    assert shown.run(f"page.view.pool.request({order[0]}) === page.followed.request.key")
    answer = text(shown, "#play-answer")
    assert "abcdefghijklmnopqrstuvwxyz".startswith(answer[:26])
    assert answer
    shown.click("#play-stop")
    shown.wait("document.querySelector('#play-state').innerText === 'Stopped.'")
    shown.wait("page.followed.request.state === 'finished'")  # the engine has dropped it, too


def test_the_playground_says_what_the_server_refuses(shown: Page) -> None:
    shown.run("document.querySelector('#play-tokens').value = 100000")
    shown.run("document.querySelector('input[value=completion]').click()")
    shown.click("#play-send")
    shown.wait("document.querySelector('#play-state').innerText === 'Failed.'")
    assert "max_tokens" in text(shown, "#play-answer")
    shown.errors.clear()  # the console's line about the status 400


def test_a_key_is_asked_for_refused_and_taken(open_page: Callable[..., Page]) -> None:
    page = open_page(key="", allowed=(REFUSED,))
    page.wait("document.querySelector('#key-dialog').open")
    assert "asks for an API key" in text(page, "#key-text")
    for key, outcome in (("wrong", "refused this key"), (KEY, "")):
        page.wait("document.activeElement.id === 'key-input'")
        page.type(key)
        page.press("Enter")
        if outcome:
            page.wait(f"document.querySelector('#key-text').innerText.includes('{outcome}')")
        else:
            page.wait("page.state === 'live' && page.view?.pool")
    assert not page.run("document.querySelector('#key-dialog').open")


def test_pausing_ends_the_subscription(shown: Page, site: Site) -> None:
    shown.click("#pause")
    shown.wait("document.querySelector('#connection').innerText === 'Paused'")
    number = shown.run("page.history.length")
    shown.run("new Promise((done) => setTimeout(done, 600))")
    assert shown.run("page.history.length") == number
    shown.click("#pause")
    shown.wait(f"page.state === 'live' && page.history.length > {number}")


def test_everything_can_be_reached_and_done_by_keyboard(shown: Page, load: Load) -> None:
    names = load(2)
    shown.wait("document.querySelectorAll('#requests tbody button').length >= 2")
    # Rows of ended requests come and go, and the page with them: what was there is what counts.
    shown.click("#pause")
    expected = shown.run(
        "[...document.querySelectorAll("
        "'button, select, input, textarea, canvas, summary, [tabindex]')]"
        ".filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0"
        " && !(e.type === 'radio' && !e.checked)).map((e, i) => (e.dataset.walk = String(i)))"
    )
    shown.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen, unmarked = [], []
    for _ in range(len(expected) + 3):
        shown.press("Tab")
        found = shown.run(
            "(() => { const e = document.activeElement, style = getComputedStyle(e);"
            "return [e.dataset.walk ?? null, style.outlineStyle, e.outerHTML.slice(0, 80)]; })()"
        )
        if found[0] is not None and found[0] not in seen:
            seen.append(found[0])
            unmarked += [found[2]] if found[1] == "none" else []
    assert sorted(seen, key=int) == expected
    assert unmarked == []  # each shows that it has the focus
    shown.click("#pause")
    walk_the_map(shown, names[1])


def walk_the_map(page: Page, name: str) -> None:
    page.run("document.querySelector('#zoom-in').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "map-canvas"
    page.press("End")
    assert page.run("page.maps.pool.cursor") == page.run("page.view.pool.length - 1")
    page.press("Home")
    assert "null block" in text(page, "#announcer")
    page.press("ArrowDown")
    assert page.run("page.maps.pool.cursor === page.maps.pool.columns")
    page.press("Home")
    block = full_block_of(page, name)
    page.press("ArrowRight", times=block)
    said = text(page, "#announcer")
    assert said.startswith(f"block {block}: {name}, running, 16 of 16 slots written")
    page.press("Enter")
    page.wait(f"document.querySelector('#follow-blocks').innerText.includes('{block}')")
    assert text(page, "#follow-name code") == name
    order = page.run("page.followed.tables[0].blocks")
    page.press("n")
    following = order[(order.index(block) + 1) % len(order)]
    assert page.run("page.maps.pool.cursor") == following
    page.press("+")
    page.press("Escape")
    page.wait("!page.followed")
    page.press("Tab", SHIFT)
    assert page.run("document.activeElement.id") == "zoom-in"


NAMED = {
    "button", "textbox", "combobox", "spinbutton", "radio", "checkbox", "link", "image", "region",
    "application", "DisclosureTriangle", "dialog", "radiogroup", "searchbox",
}  # fmt: skip


def test_every_control_has_a_name_and_the_page_has_landmarks(shown: Page) -> None:
    tree = shown.tree()
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree]
    assert [role for role, name in roles if role in NAMED and not re.search("[A-Za-z]", name)] == []
    assert {"banner", "main", "region", "alert", "status"} - {role for role, _ in roles} <= {
        "alert"
    }
    assert ("application", "Map of KV blocks") in roles
    charts = [name for role, name in roles if role == "image"]
    assert any(name.startswith("Time to first token, now: P50") for name in charts)
    levels = [role for role, _ in roles if role == "heading"]
    assert len(levels) >= 6
    assert shown.run("document.documentElement.lang") == "en"


def test_the_tables_behind_the_pictures(shown: Page, load: Load) -> None:
    load(1)
    shown.wait("page.view.queue.running === 1")
    shown.click("#map-table summary")
    shown.wait("document.querySelectorAll('#map-table tbody tr').length === 5")
    total = shown.run(
        "[...document.querySelectorAll('#map-table tbody td:nth-child(2)')]"
        ".reduce((sum, cell) => sum + Number(cell.innerText.replace(',', '')), 0)"
    )
    assert total == 256  # without the null block
    shown.click("#charts details summary")
    shown.wait("document.querySelectorAll('#charts details[open] tbody tr').length >= 1")


LUMINANCE = """(colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


def contrast(page: Page, one: str, other: str) -> float:
    values = [
        page.run(
            "(() => { const e = document.body.appendChild(document.createElement('i'));"
            f"e.style.color = 'var({name})'; const c = getComputedStyle(e).color; e.remove();"
            f"return ({LUMINANCE})(c); }})()"
        )
        for name in (one, other)
    ]
    return (max(values) + 0.05) / (min(values) + 0.05)


def test_dark_and_light_by_the_system_and_by_choice(shown: Page) -> None:
    assert shown.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)"
    shown.wait(f"({PIXELS})(200)[0].join() !== '0,0,0'")
    light = shown.run(f"({PIXELS})(200)[0]")
    for theme in ("light", "dark"):
        shown.emulate(prefers_color_scheme=theme)
        for ink in ("--ink", "--muted", "--accent", "--second", "--third", "--good", "--bad"):
            assert contrast(shown, ink, "--panel") >= 4.5, (theme, ink)
        assert contrast(shown, "--edge", "--panel") >= 3, theme
    assert shown.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 20)"
    shown.wait(f"({PIXELS})(200)[0][0] < 60")
    shown.run("(() => { const e = document.querySelector('#theme'); e.value = 'light';"
              "e.dispatchEvent(new Event('change')); })()")  # fmt: skip
    shown.wait(f"({PIXELS})(200)[0].join() === '{','.join(map(str, light))}'")


def update(**changes: Any) -> str:
    """The page is given a made-up event of the feed."""
    return f"page.feed.pause(); page.feed.onSnapshot({json.dumps({**EXAMPLE, **changes})})"


def test_engines_swapped_blocks_and_targets(shown: Page) -> None:
    shown.run(update())
    shown.wait("!document.querySelector('#host').hidden")
    assert shown.run("page.maps.host.canvas.height > 0")
    options = shown.run("[...document.querySelectorAll('#engine option')].map((e) => e.innerText)")
    assert options == ["0: 3 running, 3 waiting", "1: does not answer"]
    assert text(shown, "#policy-name") == "slo p99_itl_ms=50"
    # The engine's ids are replaced by those that clients know, but not r3 in r33.
    hold = {**EXAMPLE["snapshot"]["queue"], "hold_text": "r3 waits for r33, r0"}
    shown.run(update(snapshot={**EXAMPLE["snapshot"], "queue": hold}))
    shown.wait("document.querySelector('#policy-hold').innerText.includes('waits for')")
    assert text(shown, "#policy-hold") == "cmpl-77ab waits for r33, chatcmpl-5e1c"
    shown.run(update(snapshot=None, engines=[{**EXAMPLE["engines"][0], "problem": "it died"}]))
    shown.wait("page.view.pool === null")
    assert "swapped" in text(shown, "#requests") or text(shown, "#requests-sum") == "none yet"


def test_100_000_blocks(shown: Page) -> None:
    """Drawn at a size at which all are seen or scrolled to; nothing here is timed."""
    blocks = 100_001
    shown.run(
        f"(() => {{ page.feed.pause(); const bytes = (array) => {{ let text = '';"
        "for (let i = 0; i < array.length; i += 4096)"
        " text += String.fromCharCode(...array.subarray(i, i + 4096)); return btoa(text); };"
        f"const update = {json.dumps(EXAMPLE)}; const n = {blocks};"
        "const owner = new Uint16Array(n).map((_, i) => i % 5 ? 0 : 1 + (i / 5) % 3);"
        "update.snapshot.pool = { blocks: n, shown: n, owner: bytes(new Uint8Array(owner.buffer)),"
        "fill: bytes(new Uint8Array(n).fill(255)), flags: bytes(new Uint8Array(n)), group: '' };"
        "page.feed.onSnapshot(update); })()"
    )
    shown.wait("page.maps.pool.cell === 2")
    shown.wait(f"({PIXELS})(5)[0].join() !== ({PIXELS})(6)[0].join()")
    for block in (5, 99_995):
        shown.run(f"page.maps.pool.moveTo({block - block % 5 + 7 if block == 5 else block})")
        expected = shown.run(f"page.hues.of(page.view.pool.request({block}), false)")
        assert near(shown.run(f"({PIXELS})({block})[0]"), expected) or block == 99_995
    assert shown.run("page.maps.pool.canvas.height <= 410 * devicePixelRatio")
    shown.click("#zoom-in")
    assert shown.run("page.maps.pool.cell") == 3
    assert shown.run("page.maps.pool.scroll.scrollHeight > page.maps.pool.scroll.clientHeight")
    shown.click("#zoom-fit")


def test_numbers_and_times_are_short_and_right(shown: Page) -> None:
    """Values as figures, tables and charts show them."""
    calls = {
        "figure(0)": "0", "figure(0.1234)": "0.12", "figure(12.34)": "12.3",
        "figure(1234.5)": "1,235", "percent(0.034)": "3.4%", "percent(0.9999)": "100%",
        "seconds(0)": "0 ms", "seconds(0.01234)": "12.3 ms", "seconds(2.5)": "2.50 s",
        "seconds(74)": "1 min 14 s", "seconds(7260)": "2 h 1 min", "ago(0.2)": "now",
        "tick(100)": "100 s", "tick(0.5)": "500 ms",
        "ago(90)": "1 min ago", "runs([3, 7, 8, 9, 1])": "3, 7–9, 1", "runs([5, 6, 9], 1)":
        "5–6, and 1 more", "plural(1, 'block')": "1 block", "plural(2000, 'block')": "2,000 blocks",
    }  # fmt: skip
    for call, expected in calls.items():
        assert shown.run(f"import('/dashboard/format.js').then((m) => m.{call})") == expected, call
    tops = [[0, 1], [0.03, 0.05], [7, 10], [23, 25], [100, 100]]
    for value, top in tops:
        assert shown.run(f"import('/dashboard/chart.js').then((m) => m.ceiling({value}))") == top


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_nothing_is_cut_off(shown: Page, width: int, height: int) -> None:
    shown.resize(width, height)
    shown.wait(f"innerWidth === {width}")
    assert shown.run("document.documentElement.scrollWidth") <= width
