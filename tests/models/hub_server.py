"""A hub on this machine, of which the tests own the files: what `huggingface_hub` asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """repos: id -> file -> bytes. gated: ids that need a token. cut: bytes of an answer after which
    the connection ends, once."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.bad_token = False
        self.status: int | None = None  # of every answer, with a page for people
        self.spoilt: set[str] = set()  # files that do not come as they were announced
        self.cut: int | None = None
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, range
        self.url = ""

    def fetched(self) -> list[str]:
        return [path.rsplit("/", 1)[-1] for method, path, _ in self.asked if method == "GET"
                and "/resolve/" in path]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("content_length", str(len(body))))
        self.end_headers()
        if self.command != "GET":
            return
        if self.hub.cut is not None and len(body) > self.hub.cut:
            self.wfile.write(body[: self.hub.cut])
            self.hub.cut = None
            self.close_connection = True
            return
        self.wfile.write(body)

    def answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers.get("Range")))
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(.*))?", path)
        repo = found[1] if found else ""
        if hub.status is not None:
            self.reply(hub.status, b"<html>Sign in</html>")
        elif hub.bad_token:
            self.reply(401, b"{}", X_Error_Message="Invalid user token")
        elif found is None or repo not in hub.repos:
            self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        elif repo in hub.gated:
            self.reply(403, b"{}", X_Error_Code="GatedRepo")
        else:
            self.answer_repo(repo, found[2] or "revision/main")

    def answer_repo(self, repo: str, rest: str) -> None:
        files = self.hub.repos[repo]
        if self.path.startswith("/api/"):
            kind, _, revision = rest.partition("/")
            if revision not in ("main", COMMIT):
                self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
            elif kind == "tree":
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                    for name, data in files.items()
                ]
                self.reply(200, json.dumps(tree).encode())
            else:
                siblings = [
                    {"rfilename": n, "size": len(d), "lfs": large(d)} for n, d in files.items()
                ]
                info = {
                    "id": repo,
                    "sha": COMMIT,
                    "siblings": siblings,
                    "cardData": {"license": "mit"},
                }
                self.reply(200, json.dumps(info).encode())
            return
        name = rest.removeprefix(f"resolve/{COMMIT}/").removeprefix("resolve/main/")
        if name not in files:
            self.reply(404, b"{}", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        data = files[name]
        if name in self.hub.spoilt:
            data = bytes(len(data))
        begin = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{oid(data)}"', "Accept_Ranges": "bytes"}
        if begin:
            headers["Content_Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.reply(206 if begin else 200, data[begin:], **headers)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def large(data: bytes) -> dict[str, object]:
    """How the hub describes a large file."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
