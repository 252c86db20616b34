"""Pictures of the dashboard from a real run, into docs/images: `python -m scripts.screenshots`.

Serves the embedded model with few KV blocks to clients with short and long prompts, some with a
common beginning, so that blocks are shared, cached and swapped; opens the page in a headless
Chromium and takes its picture while the playground answers. It measures nothing: the browser and
the clients compute on the cores of the server.
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.server import ServeProcess

from scripts.chromium import Chromium, Page, find

FOLDER = Path(__file__).parents[1] / "docs" / "images"
FLAGS = ("--num-gpu-blocks-override", "400", "--max-num-seqs", "24", "--swap-space", "0.25",
         "--preemption-mode", "swap", "--max-model-len", "2048")  # fmt: skip
CLIENTS = 26
QUALITY = 72
# name, width of the window, theme, whether the playground's request is followed, what is shown
PICTURES = (
    ("dashboard", 1440, "light", True, "#charts"),
    ("dashboard-dark", 1440, "dark", False, ".column"),
    ("dashboard-phone", 390, "dark", True, "#map"),
)
SHARED = "You are a careful assistant. Answer in plain words, and say when you are not sure. " * 12
TOPICS = (
    "rivers", "bridges", "glaciers", "sailing ships", "printing", "bees", "the moon", "maps",
    "bread", "clocks", "forests", "railways",
)  # fmt: skip


def client(url: str, seed: int, ended: threading.Event) -> None:
    """One request after another, until the end."""
    draw = random.Random(seed)
    for number in itertools.count(1):
        if ended.is_set():
            return
        topic = draw.choice(TOPICS)
        prompt = f"Tell a long story about {topic}. " * draw.choice((1, 4, 16, 40))
        body = {"prompt": (SHARED if seed % 3 else "") + prompt, "ignore_eos": True,
                "max_tokens": draw.choice((60, 200, 400)), "temperature": 0.8}  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": f"client-{seed}-{number}"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=120).read()


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server under load."""
    server = ServeProcess(model, *FLAGS, log=subprocess.DEVNULL)
    ended = threading.Event()
    url = f"http://127.0.0.1:{server.port}"
    try:
        server.wait_ready()
        threads = [
            threading.Thread(target=client, args=(url, seed, ended), daemon=True)
            for seed in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        yield url
    finally:
        ended.set()
        server.process.terminate()
        server.process.wait(60)


def picture(page: Page, path: Path, width: int, theme: str, play: bool, last: str) -> None:
    """last: the picture ends below this element."""
    page.resize(width, 900, 2 if width < 600 else 1.25)
    page.emulate(prefers_color_scheme=theme)
    if play:
        page.click("#play-send")
        page.wait("page.followed?.tables[0]?.blocks.length >= 6", 200)
    else:
        page.run(
            "page.follow(page.view.requests.filter((r) => r.state === 'running')"
            ".sort((a, b) => b.preempted - a.preempted || b.blocks - a.blocks)[0].id)"
        )
        page.wait("page.followed?.tables[0]?.blocks.length", 60)
    time.sleep(1)
    bottom = page.run(
        f"document.querySelector('{last}').getBoundingClientRect().bottom + scrollY + 10"
    )
    clip = {"x": 0, "y": 0, "width": width, "height": bottom, "scale": 1}
    page.screenshot(path, whole=True, quality=QUALITY, clip=clip)
    if play:
        page.run("document.querySelector('#play-stop').click()")
    page.run("page.follow(null)")
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.screenshots", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=75, help="of load before the first one")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    path = find()
    if path is None:
        print("no Chromium is installed", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    with served(options.model) as url, Chromium(path) as browser, browser.page() as page:
        page.resize(1440, 900)
        page.open(f"{url}/dashboard")
        page.run("import('/dashboard/app.js').then((module) => { window.page = module.page })")
        time.sleep(options.seconds)
        for name, width, theme, play, last in PICTURES:
            picture(page, options.folder / f"{name}.webp", width, theme, play, last)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
