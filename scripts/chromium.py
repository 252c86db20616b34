"""Drives a headless Chromium, for the dashboard's tests and its screenshots.

It speaks the DevTools protocol over a pipe: JSON messages that end with NUL, on two file
descriptors. That needs neither a package nor a port, and offers what WebDriver lacks: the
accessibility tree, the list of requests, emulated media. Not a general driver: it has the calls
that its two users need.
"""

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# As root, and without a network but the loopback.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 20.0
# DevTools' key names: key -> (code, Windows' virtual key code, text)
KEYS = {
    "Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""),
    " ": ("Space", 32, " "), "PageUp": ("PageUp", 33, ""), "PageDown": ("PageDown", 34, ""),
    "End": ("End", 35, ""), "Home": ("Home", 36, ""), "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""), "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}  # fmt: skip
SHIFT = 8
# Puts the pipes' ends where the browser expects them. A `preexec_fn` is unsafe with threads, and
# not every shell knows descriptors of two digits.
_LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""


def find() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, or a script in the page failed."""


class Chromium:
    """A browser with a profile of its own, which goes with it."""

    def __init__(self, path: str, width: int = 1440, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._lock = threading.Lock()
        self._number = 0
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()

        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(theirs_in), str(theirs_out), path,
                   *FLAGS, f"--window-size={width},{height}",
                   f"--user-data-dir={self._profile.name}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close", seconds=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        self._reader.join(5)
        os.close(self._in)
        self._profile.cleanup()

    def call(
        self, method: str, session: str | None = None, seconds: float = SECONDS, **params: Any
    ) -> dict[str, Any]:
        """A command and its result. Raises BrowserError."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
            message: dict[str, Any] = {"id": number, "method": method, "params": params}
            if session:
                message["sessionId"] = session
            data = json.dumps(message).encode() + b"\0"
            while data:
                data = data[os.write(self._out, data) :]
        try:
            found = answer.get(timeout=seconds)
        except queue.Empty:
            raise BrowserError(f"{method}: no answer within {seconds:g} s") from None
        if "error" in found:
            raise BrowserError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if waiting := self._answers.pop(message.get("id", 0), None):
                    waiting.put(message)
                elif listener := self._listeners.get(message.get("sessionId", "")):
                    listener(message)

    @contextlib.contextmanager
    def page(self) -> Iterator["Page"]:
        """A tab in a context of its own: no cookies, no storage, no cache of another."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        self._listeners[page.session] = page.note
        try:
            page.enable()
            yield page
        finally:
            del self._listeners[page.session]
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One tab. requests: the addresses asked for; errors: what its console has of them."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self.session = session
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._browser = browser

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self.session, **params)

    def enable(self) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def note(self, message: Mapping[str, Any]) -> None:
        """Called for each event, in the thread that reads."""
        params = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([part.get("value") for part in params["args"]]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} ({params['entry'].get('url', '')})")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if details := done.get("exceptionDetails"):
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """Until the expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise BrowserError(f"not within {seconds:g} s: {script}")
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """The middle of an element, with the mouse."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.click_at(x, y)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def press(self, key: str, modifiers: int = 0, times: int = 1) -> None:
        """A key of `KEYS`, or one character."""
        code, number, text = KEYS.get(key, ("", ord(key[0].upper()), key))
        for _ in range(times):
            common: dict[str, Any] = {"key": key, "code": code, "modifiers": modifiers,
                                      "windowsVirtualKeyCode": number}  # fmt: skip
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def emulate(self, **features: str) -> None:
        """CSS media features, such as prefers_color_scheme='dark'."""
        found = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=found)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=False)  # fmt: skip

    def tree(self) -> list[dict[str, Any]]:
        """The accessibility tree: nodes with role, name and properties, those ignored left out."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def screenshot(self, path: Path, whole: bool = False, **options: Any) -> None:
        """A picture of the window, or of the whole page; the format by the file's suffix."""
        kind = path.suffix.removeprefix(".")
        done = self.call("Page.captureScreenshot", format=kind, captureBeyondViewport=whole,
                         **options)  # fmt: skip
        path.write_bytes(base64.b64decode(done["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not where the browser expects its own."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]
